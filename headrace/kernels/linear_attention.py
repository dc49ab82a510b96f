"""Causal linear attention with a decay per head is computed in chunks: work grows with the row.

Each head keeps one matrix of K x V features: S_t = exp(g_t) S_{t-1} + k_t v_t^T, and o_t = q_t S_t.
`recurrent` does just that, token by token, and is the reference, also of the gated delta rule.
`chunked` computes the same with matmuls: inside of a chunk the scores of all pairs, weighted by the
decay between them, and between chunks the states. Which states reach which chunk is one small
matrix of the same kind, so nothing loops; with Z chunks it costs Z^2 K V per head, little while Z
stays below the chunk's size times a few.

A document's first token forgets all before it. Decays are sums of logarithms that start anew at
each pair's own first token, never differences of sums over the row, and what belongs to another
document is multiplied by an exact zero: a document's results do not move by one bit when its
neighbour changes. Sources: arXiv 2312.06635 (GLA), 2405.21060 (Mamba-2, section 6).

Shapes: B rows, T tokens, G key-value heads, P queries of each, K features of keys, V of values,
Z chunks, C tokens of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def recurrent(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    segments_BT: Tensor | None = None,
    *,
    state_BGKV: Tensor | None = None,
    strength_BTG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one token after the other what `chunked` computes: the reference.

    Args:
        q_BTGPK: as for `chunked`, like all others but the last.
        k_BTGK: keys.
        v_BTGV: values.
        log_decay_BTG: logarithm of what is kept.
        segments_BT: index of each token's document.
        state_BGKV: the state before the rows.
        strength_BTG: how much of what is known of a key is replaced (`gated_delta.chunked`); None
            adds every value to what is known.
    """
    B, T, G, _, K = q_BTGPK.shape
    state = v_BTGV.new_zeros(B, G, K, v_BTGV.size(-1)) if state_BGKV is None else state_BGKV
    out = []
    for t in range(T):
        kept = log_decay_BTG[:, t].exp()
        if segments_BT is not None and t > 0:
            kept = kept * (segments_BT[:, t] == segments_BT[:, t - 1])[:, None]
        state = state * kept[..., None, None]
        written = v_BTGV[:, t]
        if strength_BTG is not None:
            known = (k_BTGK[:, t, :, None] @ state).squeeze(-2)
            written = strength_BTG[:, t, :, None] * (written - known)
        state = state + k_BTGK[:, t, :, :, None] * written[..., None, :]
        out.append(q_BTGPK[:, t] @ state)
    return torch.stack(out, 1), state


def chunked(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    segments_BT: Tensor | None = None,
    *,
    chunk: int,
    state_BGKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention over rows of documents.

    Args:
        q_BTGPK: queries, grouped by the head of keys and values that they share.
        k_BTGK: keys.
        v_BTGV: values.
        log_decay_BTG: logarithm, at most 0, of what a head keeps of its state at each token; fp32.
        segments_BT: index of each token's document; None is one document.
        chunk: tokens of a chunk.
        state_BGKV: the state before the rows, of the first token's document; None is zeros.

    Returns:
        The mixed values [B, T, G, P, V], and the state after the last token [B, G, K, V].
    """
    B, T, G, P, K = q_BTGPK.shape
    V, C = v_BTGV.size(-1), min(chunk, T)
    # One copy to [B, G, Z, C, ...], which all matmuls then share.
    q, k, v, g = (
        cut(x, C).movedim(3, 1).contiguous() for x in (q_BTGPK, k_BTGK, v_BTGV, log_decay_BTG)
    )
    Z = g.size(2)
    segments = None if segments_BT is None else cut_segments(segments_BT, C).unsqueeze(1)
    weight_CC = between(g, segments)  # [B, G, Z, C, C]

    written = (k * weight_CC[..., -1, :, None]).transpose(-2, -1) @ v  # [B, G, Z, K, V]
    first = written.new_zeros(B, G, K, V) if state_BGKV is None else state_BGKV.to(written.dtype)
    states = torch.cat((first[:, :, None], written), 2).flatten(-2)
    ends = None  # the document in which each of the Z + 1 states stands
    if segments is not None:
        ends = torch.cat((segments[:, :, :1, 0], segments[..., -1]), 2)
    reach = between(F.pad(g.sum(-1), (1, 0)), ends)  # [B, G, Z + 1, Z + 1]
    states = (reach @ states).unflatten(-1, (K, V))

    fade = g.cumsum(-1).exp()
    if segments is not None and ends is not None:
        fade = fade * (segments == ends[..., :-1, None])
    out = mixed(q, k, v, states[:, :, :-1], weight_CC, fade).permute(0, 2, 3, 1, 4, 5)
    return out.reshape(B, Z * C, G, P, V)[:, :T], states[:, :, -1]


def mixed(
    q: Tensor, k: Tensor, written: Tensor, states: Tensor, weight_CC: Tensor, fade: Tensor
) -> Tensor:
    """Return what queries read inside of their chunk and in the state before it.

    Args:
        q: queries [x, y, z, C, P, K], for any three dimensions of chunks and heads.
        k: keys [x, y, z, C, K].
        written: what is written under them [x, y, z, C, V].
        states: the state before each chunk [x, y, z, K, V].
        weight_CC: how much of each place is left at each other, from `between`.
        fade: how much of the state before is left at each place [x, y, z, C].

    Returns:
        The mixed values [x, y, z, C, P, V].
    """
    places = q.shape[3:5]
    queries = q.flatten(3, 4)
    scores = (queries @ k.transpose(-2, -1)).unflatten(3, places) * weight_CC.unsqueeze(-2)
    near = scores.flatten(3, 4) @ written
    far = (queries @ states).unflatten(3, places) * fade[..., None, None]
    return near.unflatten(3, places) + far


def between(log_decay: Tensor, segments: Tensor | None) -> Tensor:
    """Return how much of place j is left at place i, [..., i, j].

    It is 0 before j and in other documents. Every column sums its own logarithms, so that none
    feels what stands before it.
    """
    size = log_decay.size(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, size)
    sums = steps.masked_fill(~later.tril(-1), 0.0).cumsum(-2)
    ok = later
    if segments is not None:
        ok = later & (segments.unsqueeze(-1) == segments.unsqueeze(-2))
    return sums.masked_fill(~ok, float("-inf")).exp()


def cut(x: Tensor, chunk: int) -> Tensor:
    """Cut [B, T, G, ...] into [B, Z, C, G, ...], with zeros after the last token."""
    more = -x.size(1) % chunk
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, more)) if more else x
    return x.unflatten(1, (-1, chunk))


def cut_segments(segments_BT: Tensor, chunk: int) -> Tensor:
    """Cut documents' indices [B, T] into [B, Z, C]; the padding belongs to the last document."""
    more = -segments_BT.size(1) % chunk
    padded = torch.cat((segments_BT, segments_BT[:, -1:].expand(-1, more)), 1)
    return padded.unflatten(1, (-1, chunk))
