"""Forecast how long a quantized model takes for a token, before it is made.

A token's time is that of the whole model, which was measured, less what its matrices take there,
plus what they take in few bits. Both are timed here by one matmul of each shape, with numbers that
are drawn: what a matmul costs follows from shapes and formats alone.

Shapes: R rows of a matrix, C columns.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compress.quantized_model import (
    formats_of,
    is_tied,
    matrices_of,
    quantize_matrix,
    runtime_tensor,
)
from headrace.compress.spec import NumberFormat, QuantizationSpec
from headrace.model.decoder import Decoder

LEAST_S, LEAST_CALLS = 0.02, 5
"""Seconds and calls over which an operation is timed, at least: the median of the calls counts."""


class TimedShape(NamedTuple):
    """Name one operation of a shape and a format that is timed once."""

    looks_up: bool
    """whether rows are looked up, in the place of a matmul"""
    rows: int
    columns: int
    kind: NumberFormat | None
    """None is fp32"""
    activations: str


class DecodeForecast:
    """Forecast the time of a token from that of the whole model.

    Args:
        model: with its fp32 weights.
        token_s: seconds that it takes for a token, measured.
    """

    def __init__(self, model: Decoder, token_s: float) -> None:
        self.model, self.token_s = model, token_s
        self._times: dict[TimedShape, float] = {}

    @torch.no_grad()
    def seconds(self, spec: QuantizationSpec) -> float:
        """Return the seconds of a token under a spec, at least a hundredth of the whole model's.

        Raises:
            ConfigError: the spec does not fit this model.
        """
        total, formats = self.token_s, formats_of(self.model, spec)
        for name, role in matrices_of(self.model).items():
            if name not in formats:
                continue
            rows, columns = self.model.get_parameter(name).shape
            uses = [role == "embeddings"]
            if name == "embed.weight" and is_tied(self.model):
                uses.append(False)
            for looks_up in uses:
                few = TimedShape(looks_up, rows, columns, formats[name], spec.activations)
                whole = TimedShape(looks_up, rows, columns, None, "none")
                total += self._time(few, spec, name) - self._time(whole, spec, name)
        return max(total, self.token_s / 100)

    def _time(self, one: TimedShape, spec: QuantizationSpec, name: str) -> float:
        """Return the seconds of one operation, timed once for all matrices of its shape."""
        if one not in self._times:
            device = self.model.embed.weight.device
            draw = torch.Generator().manual_seed(0)
            weight: Any = torch.randn(one.rows, one.columns, generator=draw).to(device)
            if one.kind is not None:
                weight = runtime_tensor(quantize_matrix(name, weight, one.kind), spec, name)
            weight = nn.Parameter(weight, requires_grad=False)
            x_11C = torch.randn(1, 1, one.columns, generator=draw).to(device)
            ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=device)

            def run() -> Tensor:
                return F.embedding(ids_11, weight) if one.looks_up else F.linear(x_11C, weight)

            self._times[one] = _median_s(run)
        return self._times[one]


def _median_s(run: Callable[[], Tensor]) -> float:
    """Return the median of the seconds of some calls, after one that is not timed."""
    run()
    seconds: list[float] = []
    while len(seconds) < LEAST_CALLS or sum(seconds) < LEAST_S:
        begin = time.perf_counter()
        result = run()
        if result.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
