"""Say how large the small decoders are whose operations a CPU is timed with, and make them.

Shapes: B rows, T tokens, N = B x T, D features, V entries of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.costs.decoder_work import baseline_work
from headrace.costs.rates import DecoderSizes
from headrace.costs.work import Stream
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.probes.points import Readings

PLAIN = {"layer_norms": "norms", "plain_activation": "activation"}
"""Piece whose operations differ from the demo's -> the name that both have in a ledger."""


class Small(DecoderSizes):
    """Say what the ledger counts of a small decoder."""

    def bytes_of(self, name: str) -> int:
        """Return the bytes that the ledger counts for one piece, named "piece/phase"."""
        what, _, phase = name.partition("/")
        plain = what == "plain_activation"
        config = self.config(activation="gelu") if plain else self.config()
        work = baseline_work(
            config, rows=self.rows, length=self.length, precision="fp32", micro_batches=2.0
        )
        piece = work[f"{PLAIN.get(what, what)}/{phase}"]
        assert isinstance(piece, Stream)
        return int(piece.bytes)


def random_ids(readings: Readings, small: Small, *shape: int) -> Tensor:
    """Return random tokens of the decoder's vocabulary."""
    return torch.randint(small.vocab, shape, generator=readings.draw)


def weighted(readings: Readings, module: Any) -> Any:
    """Return the module after its parameters are given small random values."""
    for parameter in module.parameters():
        parameter.data = 0.02 * readings.random(*parameter.shape)
    return module


def decoder(readings: Readings, small: Small) -> Decoder:
    """Return a decoder of these sizes with small random weights."""
    return weighted(readings, Decoder(small.config(), baseline_parts(small.config()), MaskSpec()))
