"""Linear attention by the gated delta rule, in chunks: a state overwrites what it knows of a key.

A sum of k v^T keeps adding under a key that it already holds. The delta rule first takes out what
the state answers to that key: with a decay a = exp(g) and a strength b in [0, 1] per token and head

    S_t = a S_{t-1} + b k (v - a S_{t-1}^T k)^T,    o_t = S_t^T q

for keys of unit length. `recurrent` does just that and is the reference. `chunked` computes the
same with matmuls. Inside of a chunk, what token i writes, u_i, depends on all u_j before it:
(I + A) u = b (v - f S^T k), with A_ij = b_i d_ij k_i.k_j below the diagonal, d_ij the decay from j
to i and f_i that from the start of the chunk. One triangular solve for both terms on the right (the
WY representation, arXiv 2406.06484) leaves u = U - W S, and a chunk takes its state S to
(f I - K^T W) S + K^T U. These steps cannot be reordered as a sum's decays can: states follow each
other in a loop over the chunks, with one small matmul each.

All of it is computed in fp32 under any autocast, since errors pass through the solve and along the
row. Compiled code alone rounds factors of the backward pass's matmuls, which AOTAutograd traces
under the autocast around the whole graph (its `backward_pass_autocast`). A document's first token
forgets all before it, and no result moves by one bit when another document changes: what crosses a
boundary is multiplied by an exact zero, as in linear_attention.py. torch's FLOP counter does not
know the solve; this module registers its formula.
Sources: arXiv 2412.06464 (gated delta rule), 2406.06484 (delta rule in chunks).

Shapes: B rows, T tokens, G key-value heads, P queries of each, K features of keys, V of values,
Z chunks, C tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from headrace.kernels import linear_attention
from headrace.kernels.linear_attention import between, cut, cut_segments


def recurrent(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    strength_BTG: Tensor,
    segments_BT: Tensor | None = None,
    *,
    state_BGKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one token after the other what `chunked` computes: the reference."""
    return linear_attention.recurrent(
        q_BTGPK,
        k_BTGK,
        v_BTGV,
        log_decay_BTG,
        segments_BT,
        state_BGKV=state_BGKV,
        strength_BTG=strength_BTG,
    )


def chunked(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    strength_BTG: Tensor,
    segments_BT: Tensor | None = None,
    *,
    chunk: int,
    state_BGKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute linear attention by the gated delta rule over rows of documents.

    Args:
        q_BTGPK: queries, grouped by the head of keys and values that they share.
        k_BTGK: keys of at most unit length.
        v_BTGV: values.
        log_decay_BTG: logarithm, at most 0, of what a head keeps of its state at each token.
        strength_BTG: how much of what is known of a key is replaced, from 0 to 1.
        segments_BT: index of each token's document; None is one document.
        chunk: tokens of a chunk.
        state_BGKV: the state before the rows, of the first token's document; None is zeros.

    Returns:
        The mixed values [B, T, G, P, V] in the dtype of `v_BTGV`, and the state after the last
        token [B, G, K, V] in fp32.
    """
    kind = torch.promote_types(v_BTGV.dtype, torch.float32)
    q, k, v, g, b = (x.to(kind) for x in (q_BTGPK, k_BTGK, v_BTGV, log_decay_BTG, strength_BTG))
    with torch.autocast(v_BTGV.device.type, enabled=False):
        mixed, state = _chunked(q, k, v, g, b, segments_BT, chunk, state_BGKV)
    return mixed.to(v_BTGV.dtype), state


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    strength: Tensor,
    segments_BT: Tensor | None,
    chunk: int,
    state_BGKV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `chunked` in one dtype."""
    B, T, G, P, K = q.shape
    V, C = v.size(-1), min(chunk, T)
    # Zeros after the last token write nothing; a copy of each to [Z, B, G, C, ...].
    q, k, v, g, strength = (
        cut(x, C).movedim((1, 0, 3), (0, 1, 2)).contiguous() for x in (q, k, v, g, strength)
    )
    weight_CC, fade = between(g, None), g.cumsum(-1).exp()  # [Z, B, G, C, C] and [Z, B, G, C]
    if segments_BT is not None:
        segments = cut_segments(segments_BT, C).transpose(0, 1).unsqueeze(2)
        weight_CC = between(g, segments)
        before = torch.cat((segments[:1, ..., :1], segments[:-1, ..., -1:]))
        fade = fade * (segments == before)  # the state stands in the document of the chunk before

    strong_k = k * strength[..., None]
    coupling_CC = (strong_k @ k.transpose(-2, -1) * weight_CC).tril(-1)
    right = torch.cat((v * strength[..., None], strong_k * fade[..., None]), -1)
    solved = torch.linalg.solve_triangular(coupling_CC, right, upper=False, unitriangular=True)
    values, keys = solved.split((V, K), -1)  # U and W of this module's docstring
    last = (k * weight_CC[..., -1, :, None]).transpose(-2, -1)
    writes, removes = (last @ solved).split((V, K), -1)  # [Z, B, G, K, V] and [Z, B, G, K, K]
    moves = torch.eye(K, dtype=k.dtype, device=k.device) * fade[..., -1, None, None] - removes

    state = v.new_zeros(B, G, K, V) if state_BGKV is None else state_BGKV.to(v.dtype)
    states = [state]
    for move, write in zip(moves.unbind(), writes.unbind(), strict=True):
        states.append(move @ states[-1] + write)
    starts = torch.stack(states[:-1])  # [Z, B, G, K, V]

    written = values - keys @ starts
    out = linear_attention.mixed(q, k, written, starts, weight_CC, fade).permute(1, 0, 3, 2, 4, 5)
    return out.reshape(B, -1, G, P, V)[:, :T], states[-1]


def solve_flops(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs of a solve with a triangle of N x N: N x N of them for each column."""
    *batch, N, columns = b
    return torch.Size(batch).numel() * N * N * columns


if torch.ops.aten.linalg_solve_triangular not in flop_registry:
    register_flop_formula(torch.ops.aten.linalg_solve_triangular)(solve_flops)
