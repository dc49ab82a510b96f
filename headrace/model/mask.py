"""One description of which key each query may see, for every attention backend.

`MaskSpec` says it in words; `allowed` is its single definition; a backend turns it into what its
kernel wants (a flag, a dense tensor, a block mask). Techniques compose the spec, never tensors.

Shapes: B rows, T queries, S keys.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskSpec:
    """What limits attention.

    Args:
        causal: a query sees itself and what stands before it.
        document: a query sees its own document only; positions restart with each document.
        window: a query sees at most this many tokens, itself included; None is no limit.
        prefix: the first tokens of a row, as many as the batch says, see each other fully.
    """

    causal: bool = True
    document: bool = False
    window: int | None = None
    prefix: bool = False

    def with_document(self) -> "MaskSpec":
        """The same mask, and a query sees its own document only."""
        return replace(self, document=True)

    @property
    def is_plain_causal(self) -> bool:
        """Whether a kernel's own causal flag says everything."""
        return self == MaskSpec()


class Rows(NamedTuple):
    """What a forward pass knows of its rows besides the tokens.

    Args:
        positions_BT: place of each token, in its document if documents are masked, else in its row;
            one row serves all when they are equal.
        segments_BT: index of each token's document, or None when documents are not masked.
        prefix_B: length of each row's prefix, or None.
    """

    positions_BT: Tensor
    segments_BT: Tensor | None = None
    prefix_B: Tensor | None = None


def allowed(spec: MaskSpec, rows: Rows, length: int) -> Tensor:
    """The definition: bool [B, 1, T, T], True where a query may see a key."""
    place_T = torch.arange(length, device=rows.positions_BT.device)
    query_T1, key_1T = place_T[:, None], place_T[None, :]
    ok = torch.ones(1, 1, length, length, dtype=torch.bool, device=place_T.device)
    if spec.causal:
        ok = ok & (key_1T <= query_T1)
    if spec.window is not None:
        ok = ok & ((query_T1 - key_1T).abs() < spec.window)
    if spec.prefix and rows.prefix_B is not None:
        ok = ok | (key_1T < rows.prefix_B[:, None, None, None])
    if spec.document and rows.segments_BT is not None:
        ok = ok & (rows.segments_BT[:, None, :, None] == rows.segments_BT[:, None, None, :])
    return ok
