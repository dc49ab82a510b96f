"""One description of what each query reads of each key, for every attention backend.

`MaskSpec` says it in words; `allowed` is the single definition of which keys a query may see, and
`bias` of what is added to the scores of those that it sees. A backend turns both into what its
kernel wants (a flag, a dense tensor, a block mask with a function of the score). Techniques compose
the spec, never tensors.

Shapes: B rows, T queries, S keys, H query heads, Z blocks of a row.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.core.model_config import ModelConfig

SPREAD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""Large odd numbers that the places of two blocks and the seed are multiplied with."""


@dataclass(frozen=True)
class BlockPattern:
    """A pattern says which blocks of keys a block of queries sees, counted from the row's start.

    What a block of queries sees depends on its own place alone: a longer row begins with the
    pattern of a shorter one.

    Args:
        block: tokens of a block.
        local: blocks on either side of the diagonal, the query's own included.
        stride: every key block that lies a multiple of this many blocks away; 0 is none.
        first: this many blocks at the row's beginning.
        random: this many more of the blocks before the query's, drawn by `seed`.
        seed: of the draw.
    """

    block: int
    local: int = 1
    stride: int = 0
    first: int = 0
    random: int = 0
    seed: int = 0

    def seen(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Return bool [Z, Z] for Z = `count` blocks; rows are query blocks, columns key blocks."""
        place_Z = torch.arange(count, device=device)
        query_Z1, key_1Z = place_Z[:, None], place_Z[None, :]
        apart = (query_Z1 - key_1Z).abs()
        seen = (apart < self.local) | (key_1Z < self.first)
        if self.stride:
            seen = seen | (apart % self.stride == 0)
        if self.random:
            drawn = mixed(query_Z1, key_1Z, self.seed)
            drawn = drawn.masked_fill(seen | (key_1Z >= query_Z1), 1 << 32)
            rank = drawn.argsort(dim=-1, stable=True).argsort(dim=-1)
            seen = seen | ((rank < self.random) & (drawn < 1 << 32))
        return seen

    def density(self, length: int) -> float:
        """Share of the blocks on and below the diagonal that are visited in a row of `length`."""
        count = -(-length // self.block)
        return self.seen(count).tril().sum().item() / (count * (count + 1) / 2)


def mixed(one: Tensor, other: Tensor, seed: int) -> Tensor:
    """Return a 32-bit hash of two places and a seed (lowbias32 in int64, alike on every device)."""
    low = 0xFFFFFFFF
    spread = (seed + 1) * SPREAD[2] & low  # a Python int; large seeds would not fit into int64
    x = (one * SPREAD[0] + other * SPREAD[1] + spread) & low
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ (x >> shift)) * factor) & low
    return x ^ (x >> 15)


@dataclass(frozen=True)
class MaskSpec:
    """What limits attention, and what is done to the scores that it lets pass.

    Args:
        causal: a query sees itself and what stands before it.
        document: a query sees its own document only; positions restart with each document.
        window: a query sees at most this many tokens, itself included; None is no limit.
        prefix: the first tokens see each other fully, as many as the batch says: of each document
            where those are masked, else of a row.
        blocks: a query sees these blocks of keys only; None is all.
        alibi: query heads, each with its own slope by which a score falls per token of distance; 0
            is no slope.
        soft_cap: a score s is made soft_cap x tanh(s / soft_cap), before the slope; 0 is no cap.
        between: layers with the window between two without it; 0 is none without it. A backend sees
            the spec of one layer, `of_layer`.
        alibi_share: which of how many equal parts of the `alibi` heads is here, (place, parts);
            ranks that share heads have successive ones.
    """

    causal: bool = True
    document: bool = False
    window: int | None = None
    prefix: bool = False
    blocks: BlockPattern | None = None
    alibi: int = 0
    soft_cap: float = 0.0
    between: int = 0
    alibi_share: tuple[int, int] = (0, 1)

    def with_document(self) -> "MaskSpec":
        """Return this mask with the limit that a query sees its own document only."""
        return replace(self, document=True)

    def of_heads(self, place: int, ranks: int) -> "MaskSpec":
        """Return the mask of one rank's heads, where `ranks` share the heads that this one has."""
        if not self.alibi:
            return self
        first, parts = self.alibi_share
        return replace(self, alibi_share=(first * ranks + place, parts * ranks))

    def is_open(self, layer: int) -> bool:
        """Return whether `layer` is one without the window."""
        return self.between > 0 and (layer + 1) % (self.between + 1) == 0

    def of_layer(self, layer: int) -> "MaskSpec":
        """Return the mask of one layer."""
        window = None if self.is_open(layer) else self.window
        return replace(self, window=window, between=0)

    def within(self, length: int) -> "MaskSpec":
        """Return the mask of rows of `length` tokens, where a window as long limits nothing."""
        wide = self.window is not None and self.window >= length
        return replace(self, window=None, between=0) if wide else self

    @property
    def is_plain_causal(self) -> bool:
        """Return whether a kernel's own causal flag says everything."""
        return self == MaskSpec()

    @property
    def sees_all_before(self) -> bool:
        """Return whether the newest token reads every key of its document, each by its bare score.

        Then one query over a cache of keys needs no mask.
        """
        return replace(self, document=False, prefix=False).is_plain_causal


def mask_of(config: ModelConfig) -> MaskSpec:
    """Return the mask that `model.*` describes; techniques compose it further."""
    return MaskSpec(
        window=config.window or None,
        between=config.window_between,
        soft_cap=config.attention_cap,
    )


class Rows(NamedTuple):
    """What a forward pass knows of its rows besides the tokens.

    Args:
        positions_BT: place of each token, in its document if documents are masked, else in its row;
            one row serves all when they are equal.
        segments_BT: index of each token's document, or None when documents are not masked.
        prefix_B: tokens of the prefix of each row, and of each of its documents where those are
            masked; or None.
        noise_BT: a word of each token that noise on it is made of, from 0 to 2^32; or None.
        before_BC2: ids of the two tokens before each piece of a row that is here, where a rank has
            C equal pieces of each row; None where rows are whole.
    """

    positions_BT: Tensor
    segments_BT: Tensor | None = None
    prefix_B: Tensor | None = None
    noise_BT: Tensor | None = None
    before_BC2: Tensor | None = None


def allowed(spec: MaskSpec, rows: Rows, length: int) -> Tensor:
    """Define the mask: return bool [B, 1, T, T], True where a query may see a key."""
    place_T = torch.arange(length, device=rows.positions_BT.device)
    query_T1, key_1T = place_T[:, None], place_T[None, :]
    ok = torch.ones(1, 1, length, length, dtype=torch.bool, device=place_T.device)
    if spec.causal:
        ok = ok & (key_1T <= query_T1)
    if spec.window is not None:
        ok = ok & ((query_T1 - key_1T).abs() < spec.window)
    if spec.blocks is not None:
        block_T = place_T // spec.blocks.block
        seen_ZZ = spec.blocks.seen(-(-length // spec.blocks.block), place_T.device)
        ok = ok & seen_ZZ[block_T[:, None], block_T[None, :]]
    if spec.prefix and rows.prefix_B is not None:
        known_BT = rows.positions_BT < rows.prefix_B[:, None]
        ok = ok | known_BT[:, None, None, :]
    if spec.document and rows.segments_BT is not None:
        ok = ok & (rows.segments_BT[:, None, :, None] == rows.segments_BT[:, None, None, :])
    return ok


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Return how much a score falls per token of distance, fp32 [H] (arXiv 2108.12409, section 3).

    A geometric series from 2^(-8/n) to 2^-8 for n heads. Where n is no power of two, the series of
    the power below, then every other number of the one above, as the authors' code has it. They
    are made on the device: a copy from the host would wait for it in every step.
    """
    below = 1 << (heads.bit_length() - 1)
    whole = torch.arange(1, below + 1, device=device) * (-8 / below)
    between = (2 * torch.arange(heads - below, device=device) + 1) * (-4 / below)
    return torch.exp2(torch.cat((whole, between)))


def own_slopes(spec: MaskSpec, device: torch.device | str = "cpu") -> Tensor:
    """Return the slopes of the heads that are here, fp32 [H]."""
    place, parts = spec.alibi_share
    return slopes(spec.alibi, device).unflatten(0, (parts, -1))[place]


def bias(spec: MaskSpec, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Define the bias: return fp32 [1, H, T, T], what is added to each head's scores.

    A distance inside of a document is the distance in the row, so that one serves all rows.
    """
    place_T = torch.arange(length, device=device)
    apart_TT = (place_T[:, None] - place_T[None, :]).abs()
    return -own_slopes(spec, device)[None, :, None, None] * apart_TT


def dense(spec: MaskSpec, rows: Rows, length: int, dtype: torch.dtype) -> Tensor:
    """Return mask and bias in one: bool [B or 1, 1, T, T], or numbers to add [B or 1, H, T, T]."""
    ok = allowed(spec, rows, length)
    if not spec.alibi:
        return ok
    return bias(spec, length, ok.device).to(dtype).masked_fill(~ok, float("-inf"))
