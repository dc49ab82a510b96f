"""Let a token's embedding read the token before it: a table of pairs, and a share of its features.

Much of what a small model learns first is which token follows which two. Attention finds the token
before at the cost of a layer. Here what the first block reads has it already, from a table with a
row for each pair of tokens (`PairEmbedding`), and as a learned share of its features (`Smear`).
Both start as zeros, so that at first nothing is changed.

A table has far fewer rows than there are pairs, so pairs share rows. Row (before x stride + token)
mod rows is another one for each token behind the same token before it, and for each token before
the same token, since stride and rows share no factor. The stride is near the golden ratio of the
rows, so that steps of it spread evenly over them (Knuth, vol. 3, section 6.4).

The first token of a row, or of a document where documents are masked, has no token before it: its
position is 0, and it has the row of a pair with an entry behind the vocabulary. While sampling, the
cache keeps what the next token will read. Where ranks share rows, a piece of a row begins with two
tokens more, its leads: what the first token's share is of was made with the token before that.
Their gradients are of the same weights as those of all tokens.

Sources: github.com/KellerJordan/modded-nanogpt; arXiv 1709.03933 (hash embeddings); 2601.07372
(Engram). Shapes: B rows, T tokens, D features, C pieces of a row.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio, of which every multiple lies far from all before it."""

LEADS = 2
"""Tokens before a piece of a row that what its first token reads is made of: the one before it for
each of the two modules."""


def stride_of(rows: int) -> int:
    """Return how far apart a token's rows are behind two neighbours of the vocabulary."""
    near = round(GOLDEN * rows)
    return next(n for n in range(near, near + rows + 1) if gcd(n, rows) == 1)


def token_before(x: Tensor, shared: Any, name: str, nothing: float) -> Tensor:
    """Return of each token what the token before it has, [B, T] or [B, T, D].

    Args:
        x: of each token.
        shared: what all layers share, whose cache keeps the last token's under `name`.
        name: of what is read.
        nothing: the value for a token without one before it.
    """
    first, cache = x[:, :1], shared.cache
    if cache is not None:
        first, cache.before[name] = cache.before.get(name, first), x[:, -1:]
    begins = shared.positions_BT == 0
    before = torch.cat((first, x[:, :-1]), 1)
    return before.masked_fill(begins[..., None] if x.dim() > 2 else begins, nothing)


def leads(ids_BT: Tensor) -> Tensor:
    """Return of each token of whole rows the ids of the two before it, [B, T, 2].

    Those of a row's first tokens are its last ones, which nothing reads.
    """
    return torch.stack([ids_BT.roll(before, 1) for before in range(LEADS, 0, -1)], -1)


def with_leads(ids_BT: Tensor, before_BC2: Tensor, shared: Any) -> tuple[Tensor, Any]:
    """Put before each piece of a row its leads, and their positions into what layers share.

    A lead of another document, which nothing reads, has a position below 0.
    """
    pieces, to = before_BC2.size(1), shared.positions_BT
    places_BCt = to.unflatten(1, (pieces, -1))
    back_2 = torch.arange(-LEADS, 0, device=to.device)
    places_BCt = torch.cat((places_BCt[..., :1] + back_2, places_BCt), -1)
    ids_BCt = torch.cat((before_BC2, ids_BT.unflatten(1, (pieces, -1))), -1)
    return ids_BCt.flatten(1), shared._replace(positions_BT=places_BCt.flatten(1))


def without_leads(x_BTD: Tensor, pieces: int) -> Tensor:
    """Return the features of the tokens themselves."""
    return x_BTD.unflatten(1, (pieces, -1))[:, :, LEADS:].flatten(1, 2)


class PairEmbedding(nn.Module):
    """Add a row of a further table for each pair of a token and the token before it."""

    def __init__(self, rows: int, features: int, vocab: int) -> None:
        super().__init__()
        self.rows, self.vocab, self.stride = rows, vocab, stride_of(rows)
        self.read = 0
        """tokens of the last forward pass"""
        self.embed = nn.Embedding(rows, features)

    def places(self, ids_BT: Tensor, shared: Any) -> Tensor:
        """Return the row of each token, [B, T]."""
        before_BT = token_before(ids_BT, shared, "ids", self.vocab)
        return (before_BT * self.stride + ids_BT) % self.rows

    def forward(self, x_BTD: Tensor, ids_BT: Tensor, shared: Any) -> Tensor:
        """Return the sum of `x_BTD` and the rows."""
        self.read = ids_BT.numel()
        return x_BTD + self.embed(self.places(ids_BT, shared))


class Smear(nn.Module):
    """Add a learned share of each feature of the token before."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.read = 0
        """tokens of the last forward pass"""
        self.weight = nn.Parameter(torch.empty(features))

    def forward(self, x_BTD: Tensor, shared: Any) -> Tensor:
        """Return the sum, in the dtype of the embedding."""
        self.read = x_BTD.size(0) * x_BTD.size(1)
        before_BTD = token_before(x_BTD, shared, "embedded", 0.0)
        return x_BTD + self.weight.to(x_BTD.dtype) * before_BTD
