"""Say what binds decoding with an exported file here: memory bandwidth, computation or overhead.

A token must read every matrix that it is multiplied with, and the keys and values before it. Their
bytes over the rate at which this machine reads a buffer as large, and their multiplications over
the rate of its matmuls, are the least times that the token can take; they may overlap. What is
measured beyond the larger of both is the runtime's own: starting operations, threads that wait,
codes that are made whole.

A buffer as large as the model is read, since a small model stays in the processor's cache.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace.core.files import shell
from headrace.core.units import format_bytes, format_seconds
from headrace.export.llama_cpp import TokenWork
from headrace.export.runtime import open_runtime, run_beside

PLACES, TIMES = 48, 3
"""Tokens of a text, of which the last two thirds are decoded and timed, and how often that is done;
the fastest counts. A model of shorter rows has fewer."""
BINDS = 0.5
"""Share of a token's time from which its reads or its multiplications are what binds. Chosen: below
it more than half of the time is neither."""
LEAST_READ, MOST_READ = 1 << 20, 1 << 28
"""Bytes of the buffer that is read to measure the bandwidth, at least and at most."""
SQUARE = 512
"""Rows and columns of the matmul by which the rate of multiplications is measured."""
FEWER = {"onnx": "int8", "executorch": "8da4w", "gguf": "q4_0"}
"""What a format stores in the fewest bits that computes faster than whole numbers."""


class HostRates(NamedTuple):
    """Hold what this machine does at most, measured just now."""

    bytes_per_s: float
    """reading a buffer as large as the model"""
    flops_per_s: float
    """matmuls of fp32"""


@dataclass(frozen=True)
class Decoding:
    """Hold what was measured of a file, and what binds it."""

    file: Path
    runtime: str
    token_s: float
    work: TokenWork
    rates: HostRates
    run: str
    """the run that it was made of, for commands; RUN where the file names none"""
    quantized: str
    """how its matrices are stored"""

    @property
    def memory_share(self) -> float:
        """Return the share of a token's time that its reads need at least."""
        moved = self.work.weight_bytes + self.work.cache_bytes
        return min(1.0, moved / self.rates.bytes_per_s / self.token_s)

    @property
    def compute_share(self) -> float:
        """Return the share of a token's time that its multiplications need at least."""
        return min(1.0, 2 * self.work.multiplied / self.rates.flops_per_s / self.token_s)

    @property
    def bottleneck(self) -> str:
        """Return what binds: memory bandwidth, computation, or launch, the runtime's overhead."""
        if max(self.memory_share, self.compute_share) < BINDS:
            return "launch"
        return "memory bandwidth" if self.memory_share >= self.compute_share else "computation"

    @property
    def share(self) -> float:
        """Return the share of a token's time that what binds takes."""
        shares = {"memory bandwidth": self.memory_share, "computation": self.compute_share}
        return shares.get(self.bottleneck, 1 - max(self.memory_share, self.compute_share))

    @property
    def remedy(self) -> str:
        """Return the command that makes what binds less."""
        kind = {".onnx": "onnx", ".pte": "executorch"}.get(self.file.suffix, "gguf")
        if self.bottleneck == "launch" and kind == "onnx":
            return f"headrace export {self.run} --to executorch"
        if self.bottleneck == "launch":
            return f"headrace prune {self.run} --by 30% --only layers"
        if self.bottleneck == "memory bandwidth" and self.quantized != FEWER[kind]:
            return f"headrace export {self.run} --to {kind} --quantize {FEWER[kind]}"
        return f"headrace prune {self.run} --by 30%"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, as the doctor's findings are."""
        return {
            "bottleneck": self.bottleneck,
            "share": self.share,
            "sentence": self.sentence,
            "evidence": self.evidence,
            "confidence": "measured",
            "not_measured": "",
            "runtime": self.runtime,
            "tokens_per_s": 1 / self.token_s,
            "bytes_per_token": self.work.weight_bytes + self.work.cache_bytes,
            "bytes_per_s": self.rates.bytes_per_s,
            "flops_per_s": self.rates.flops_per_s,
            "memory_share": self.memory_share,
            "compute_share": self.compute_share,
            "remedies": [{"command": self.remedy}],
            "first": {"command": self.remedy},
        }

    @property
    def sentence(self) -> str:
        """Return the verdict in a sentence."""
        return {
            "memory bandwidth": f"Memory bandwidth binds decoding: reading what a token needs is "
            f"{self.share:.0%} of its time.",
            "computation": f"Computation binds decoding: a token's multiplications are "
            f"{self.share:.0%} of its time.",
            "launch": f"The runtime's overhead binds decoding: {self.share:.0%} of a token's time "
            "is neither its reads nor its multiplications.",
        }[self.bottleneck]

    @property
    def evidence(self) -> str:
        """Return the numbers that the verdict is made of."""
        work, rates = self.work, self.rates
        return (
            f"{self.runtime} decodes {1 / self.token_s:,.0f} tokens/s, "
            f"{format_seconds(self.token_s)} each. A token reads "
            f"{format_bytes(work.weight_bytes)} of weights and {format_bytes(work.cache_bytes)} of "
            f"keys and values, at {rates.bytes_per_s / 1e9:.3g} GB/s {self.memory_share:.0%} of "
            f"that; its {2 * work.multiplied / 1e6:.4g} MFLOP are {self.compute_share:.0%} at "
            f"{rates.flops_per_s / 1e9:.3g} GFLOP/s."
        )


def examine_file(file: Path) -> Decoding:
    """Decode some tokens with an exported file, and return what binds them.

    Args:
        file: it ends in .gguf, .onnx or .pte.

    Raises:
        ConfigError: there is no such file, it is damaged, or its rows are too short.
        UnsupportedError: its runtime is not installed.
    """
    runtime: Any = open_runtime(file, "", PLACES)
    places = min(PLACES, runtime.context or PLACES)
    prompt = max(1, places // 3)
    work = runtime.work((places + prompt) // 2)
    token_s = min(runtime.decode_s(prompt, places - prompt) for _ in range(TIMES))
    rates = measure_host(work.weight_bytes + work.cache_bytes)
    run = run_beside(file, runtime.origin)
    name = "RUN" if runtime.origin is None else runtime.origin.run
    named = shell(name if run is None else run)
    return Decoding(file, runtime.name, token_s, work, rates, named, runtime.quantized)


def measure_host(size_bytes: int) -> HostRates:
    """Return how fast this machine reads a buffer of so many bytes, and multiplies."""
    size = max(LEAST_READ, min(MOST_READ, size_bytes))
    buffer = torch.ones(size // 4)
    read_s = _fastest(lambda: buffer.sum())
    one, other = torch.randn(SQUARE, SQUARE), torch.randn(SQUARE, SQUARE)
    multiply_s = _fastest(lambda: one @ other)
    return HostRates(size / read_s, 2 * SQUARE**3 / multiply_s)


def _fastest(work: Callable[[], object], times: int = 7) -> float:
    """Return the seconds of the fastest of some calls, after one that is not timed."""
    work()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
