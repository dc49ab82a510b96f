"""This module calls the Triton kernels of flash-linear-attention on chunks of linear attention.

They follow the two rules of linear_attention.py and gated_delta.py with the same arguments, by the
package's `chunk_simple_gla` and `chunk_gated_delta_rule`. They keep what is inside of a chunk of 64
tokens on the processor, sum in fp32 and take factors in bf16; fp32 inputs are rounded. Their heads
come one for each query, so shared keys and values are repeated. Documents are laid end to end as
one sequence with cumulative lengths, and each begins with an empty state.

The package leaves both kernels out of compiled graphs, and callers do so too. It is imported when
the first of them runs.
Source: arXiv 2312.06635, 2412.06464; fla-core 0.6.0, ops/simple_gla/chunk.py and
ops/gated_delta_rule/chunk.py.

Shapes: B rows, T tokens, G key-value heads, P queries of each, H = G x P, K features of keys, V of
values, S documents of all rows.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.launches import COUNTS

CHUNK = 64
"""Tokens of a chunk, the package's own choice for rows of at least as many."""
SUM, GATED_DELTA = "fla_simple_gla", "fla_gated_delta_rule"
"""Names under which forward launches of the two kernels are counted."""


def ends_of(segments_BT: Tensor) -> Tensor:
    """Return where each document of rows laid end to end begins, and their end, int64 [S + 1].

    This waits for the device: the number of documents is a shape.
    """
    B, T = segments_BT.shape
    first_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    first_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts_S = first_BT.flatten().nonzero().flatten()
    return torch.cat((starts_S, starts_S.new_full((1,), B * T)))


def decayed_sum(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    ends_S: Tensor | None = None,
    *,
    state_BGKV: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `linear_attention.chunked`; with documents, from `ends_of`, there is no state."""
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore

    COUNTS[SUM] += 1
    given = {"q": q_BTGPK, "k": k_BTGK, "v": v_BTGV, "g": log_decay_BTG}
    return _call(chunk_simple_gla, given, ends_S, state_BGKV)


def gated_delta(
    q_BTGPK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    log_decay_BTG: Tensor,
    strength_BTG: Tensor,
    ends_S: Tensor | None = None,
    *,
    state_BGKV: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `gated_delta.chunked`; with documents, from `ends_of`, there is no state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore

    COUNTS[GATED_DELTA] += 1
    given = {
        "q": q_BTGPK,
        "k": k_BTGK,
        "v": v_BTGV,
        "g": log_decay_BTG,
        "beta": strength_BTG,
    }
    return _call(chunk_gated_delta_rule, given, ends_S, state_BGKV)


def _call(
    kernel: Any, given: dict[str, Tensor], ends_S: Tensor | None, state_BGKV: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Call a kernel on [B, T, H, ...], or on [1, B x T, H, ...] where documents are given."""
    assert ends_S is None or state_BGKV is None, "a state stands in one document"
    B, T, G, P, _ = given["q"].shape
    dtype = given["v"].dtype
    low = torch.bfloat16 if dtype == torch.float32 else dtype
    heads = {n: x.repeat_interleave(P, 2) if P > 1 else x for n, x in given.items() if n != "q"}
    heads["q"] = given["q"].flatten(2, 3)
    for name in ("q", "k", "v"):
        heads[name] = heads[name].to(low)
    if ends_S is not None:
        heads = {name: x.flatten(0, 1)[None] for name, x in heads.items()}
    mixed, state = kernel(
        **heads,
        scale=1.0,
        output_final_state=ends_S is None,
        cu_seqlens=ends_S,
        initial_state=None if state_BGKV is None else state_BGKV.float().repeat_interleave(P, 1),
    )
    mixed = mixed.view(B, T, G, P, -1).to(dtype)
    return mixed, state[:, ::P] if ends_S is None else None
