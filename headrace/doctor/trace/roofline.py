"""Model what kernels could reach: the device's ceilings, and how far below each operation stays.

A trace that recorded shapes says which operation launched a kernel and on what. From that follow
the FLOPs of matmuls and attention, and the bytes that anything else must at least read and write:
each argument once, and of an operation that returns a new tensor its largest argument once more.
Both are modelled, never counted on the device. An operation's time is that of all its kernels; at
the roof it would take the longest of FLOPs over the highest rate, bytes over the bandwidth, and a
kernel's floor. Which of the three it is, is its bound.

The rates are a `Machine`'s: probed here, or from the datasheet and the shares of it that
`costs/assumed.py` states. Beside the roof stands `best_s`: what the machine reaches at that very
shape. A matmul of small or odd sizes is far below the roof and may still be at its best, and only
what lies above its best is called inefficient.

Left out: matmuls of sparse, grouped or jagged tensors; attention over packed rows without a batch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch

from headrace import probes
from headrace.core.errors import UnsupportedError
from headrace.costs.machine import ANCHOR_MATMUL, Machine
from headrace.doctor.trace.file import Event, Operation
from headrace.doctor.trace.kernels import FASTER, family_of
from headrace.doctor.trace.limits import NEAR_ROOF, WELL

MATMULS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::bmm": (0, 1),
    "aten::baddbmm": (1, 2),
    "aten::_scaled_mm": (0, 1),
}
"""Operation -> the places of its two matrices."""
MIXERS = {
    "aten::_flash_attention_forward": ("flash", 0, 8, False),
    "aten::_flash_attention_backward": ("flash", 1, 11, False),
    "aten::_cudnn_attention_forward": ("cudnn", 0, 10, True),
    "aten::_cudnn_attention_backward": ("cudnn", 1, 14, True),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", 0, 6, True),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("cudnn", 1, 14, True),
    "aten::_efficient_attention_forward": ("efficient", 0, 9, False),
    "aten::_efficient_attention_backward": ("efficient", 1, 14, False),
}
"""Operation -> kernel, the place of its queries, that of its mask's kind, whether heads stand
before tokens."""
PRECISIONS = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
SIZES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "int": 4,
    "bool": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "unsigned char": 1,
    "signed char": 1,
    "long": 8,
    "short": 2,
}
"""The profiler's names of types -> bytes; the list of tensors is counted as fp32."""
LOADED = 1.04
"""How many times as long matmuls and attention take on a GPU that has worked for a while, whose
clock falls: the median of six H200s, under tenths of a second of matmuls."""
UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
"""Errors that shapes raise which are none."""
MOST_NUMBERS = 2**48
"""Numbers of one tensor, more than any device holds."""
SHRINKING = ("sum", "mean", "norm", "max", "min", "amax", "argmax", "nll_loss", "any", "all")
"""Parts of the names of operations that return little."""


@dataclass(frozen=True)
class Worked:
    """Compare one operation's time with what it could take, in seconds.

    Args:
        kernels: the kernels that it launched.
        kind: "product", "attention" or "moved".
        spent_s: their summed time.
        flops: FLOPs of a matmul or of attention; else 0.
        roof_s: its time at the device's highest rates.
        best_s: what the machine reaches at this shape; for bytes, as `roof_s`.
        bound: "compute", "bandwidth" or "latency".
    """

    kernels: tuple[Event, ...]
    kind: str
    spent_s: float
    flops: float
    roof_s: float
    best_s: float
    bound: str


@dataclass(frozen=True)
class Roof:
    """Hold the ceilings of a device."""

    machine: Machine

    @property
    def says(self) -> str:
        """Return where the rates are from."""
        how = "probed" if self.machine.source == "probes" else "assumed from the datasheet"
        return f"{self.machine.name}'s rates, {how}"

    @property
    def probed(self) -> bool:
        """Return whether they were measured."""
        return self.machine.source == "probes"

    @cached_property
    def bandwidth(self) -> float:
        """Return the bytes per second of a long stream."""
        count = 2.0**30
        return count / self.machine.traffic_s(count)

    @cached_property
    def floor_s(self) -> float:
        """Return the least time of a kernel in seconds."""
        return self.machine.traffic_s(1.0)

    def peak(self, precision: str) -> float:
        """Return the highest rate of matmuls, in FLOP/s."""
        m, n, k = ANCHOR_MATMUL
        anchor = 2.0 * m * n * k / self.machine.matmul_s(precision, m, n, k)
        known = next(p for p in self.machine.matmuls if p.precision == precision)
        return max(anchor, *(p.flops / p.seconds for p in known.points or ()), 0.0)

    def worked(self, events: Sequence[Event], operations: dict[int, Operation]) -> list[Worked]:
        """Return the operations among events whose shapes and rates are known."""
        of: dict[int, list[Event]] = {}
        for event in events:
            computes = event.kind == "kernel" and family_of(event.name) != "collectives"
            if computes and event.op in operations:
                of.setdefault(event.op, []).append(event)
        worked = []
        for number, kernels in of.items():
            try:
                one = self._worked(tuple(kernels), operations[number])
            except (UnsupportedError, *UNREADABLE):
                continue  # a rate that nobody measured, or shapes in another torch's order
            if one is not None:
                worked.append(one)
        return worked

    def _worked(self, kernels: tuple[Event, ...], operation: Operation) -> Worked | None:
        spent_s = sum(e.end_us - e.start_us for e in kernels) * 1e-6
        floor_s = len(kernels) * self.floor_s
        if not _real(operation.dims):
            return None
        if operation.name in MATMULS:
            kind, (flops, computed_s, best_s) = "product", self._matmul(kernels, operation)
        elif operation.name in MIXERS:
            kind, (flops, computed_s, best_s) = "attention", self._attention(operation)
        elif any(family_of(e.name) in ("products", "attention") for e in kernels):
            return None  # it computes, and nobody knows how much
        else:
            kind, flops, computed_s, best_s = "moved", 0.0, 0.0, 0.0
        moved_s = _moved(operation) / self.bandwidth if kind != "attention" else 0.0
        if not moved_s and not computed_s:
            return None
        times = {"latency": floor_s, "bandwidth": moved_s, "compute": computed_s}
        bound = max(times, key=lambda name: times[name])
        roof_s = times[bound]
        loaded = LOADED if self.machine.kind == "gpu" else 1.0
        return Worked(kernels, kind, spent_s, flops, roof_s, max(loaded * best_s, roof_s), bound)

    def _matmul(
        self, kernels: tuple[Event, ...], operation: Operation
    ) -> tuple[float, float, float]:
        """Return FLOPs, seconds at the peak, and at this shape's best."""
        first, second = MATMULS[operation.name]
        (*batch, m, k), (*_, n) = operation.dims[first], operation.dims[second]
        precision = PRECISIONS[operation.types[first]]
        if precision == "fp32" and any(p in e.name.lower() for e in kernels for p in FASTER):
            precision = "tf32"
        count = prod(batch)
        flops = 2.0 * count * m * n * k
        shape_s = self.machine.matmul_s(precision, m, n, k)
        if count > 1:  # as one product of more rows: many small ones fill the device together
            shape_s = min(count * shape_s, self.machine.matmul_s(precision, count * m, n, k))
        return flops, flops / self.peak(precision), shape_s

    def _attention(self, operation: Operation) -> tuple[float, float, float]:
        kernel, place, mask, heads_first = MIXERS[operation.name]
        (rows, *query, features), key = operation.dims[place], operation.dims[place + 1]
        heads, length = query if heads_first else reversed(query)
        kv_heads = key[1] if heads_first else key[2]
        seen = key[2] if heads_first else key[1]
        causal = str(operation.values[mask]) in ("True", "1")
        backward = place > 0
        if not causal:
            length = round((length * seen) ** 0.5)
        flops = 4.0 * rows * heads * length * length * features * (0.5 if causal else 1.0)
        flops *= 2.5 if backward else 1.0
        best_s = self.machine.attention_s(
            kernel,
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            length=length,
            features=features,
            causal=causal,
            backward=backward,
        )
        return flops, flops / self.peak("bf16"), best_s


@dataclass(frozen=True)
class RoofTimes:
    """Compare a rank's measured steps with its device's ceilings; times are sums, in seconds.

    Args:
        says: where the ceilings are from.
        probed: whether they were measured.
        matmuls_s, matmuls_roof_s, matmuls_best_s: what matmuls of known shapes took, would take
            at the peak, and at the best for their shapes.
        attention_s, attention_best_s: what attention took, and would take at its best.
        lost_s: time of both that lies above `WELL` of the best.
        moved_s: operations that only move bytes, with known shapes.
        bandwidth_s: all operations near the roof that bandwidth binds.
        kernels: name -> bound, and the roof's share of the time.
    """

    says: str
    probed: bool
    matmuls_s: float
    matmuls_roof_s: float
    matmuls_best_s: float
    attention_s: float
    attention_best_s: float
    lost_s: float
    moved_s: float
    bandwidth_s: float
    kernels: dict[str, tuple[str, float]]


def roof_times(roof: Roof, worked: Sequence[Worked]) -> RoofTimes | None:
    """Sum up the operations of the measured steps; None where no shape is known."""
    if not worked:
        return None

    def total(kind: str, of: str) -> float:
        return sum(getattr(w, of) for w in worked if w.kind == kind)

    computing = [w for w in worked if w.kind != "moved" and w.bound != "latency"]
    near = [w for w in worked if w.bound == "bandwidth" and w.roof_s >= NEAR_ROOF * w.spent_s]
    by_name: dict[str, list[Worked]] = {}
    for one in worked:
        longest = max(one.kernels, key=lambda e: e.end_us - e.start_us)
        by_name.setdefault(longest.name, []).append(one)
    kernels = {}
    for name, operations in by_name.items():
        bounds = Counter(one.bound for one in operations)
        spent_s = sum(one.spent_s for one in operations)
        share = sum(one.roof_s for one in operations) / max(spent_s, 1e-12)
        kernels[name] = bounds.most_common(1)[0][0], min(1.0, share)
    return RoofTimes(
        says=roof.says,
        probed=roof.probed,
        matmuls_s=total("product", "spent_s"),
        matmuls_roof_s=total("product", "roof_s"),
        matmuls_best_s=total("product", "best_s"),
        attention_s=total("attention", "spent_s"),
        attention_best_s=total("attention", "best_s"),
        lost_s=sum(max(0.0, w.spent_s - w.best_s / WELL) for w in computing),
        moved_s=total("moved", "spent_s"),
        bandwidth_s=sum(w.spent_s for w in near),
        kernels=kernels,
    )


def machine_of(name: str) -> Machine | None:
    """Return the rates of a device: probed, if it is here and was; else assumed; None if unknown.

    Raises:
        ConfigError: the file of the probes is damaged.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_name() == name:
        probed = probes.cached(torch.device("cuda", torch.cuda.current_device()))
        if probed is not None:
            return probed
    try:
        return Machine.assumed(name) if name else None
    except UnsupportedError:
        return None


def _real(dims: Any) -> bool:
    """Return whether tensors can have such shapes."""
    if not isinstance(dims, list) or not all(isinstance(n, int) for n in dims):
        return not isinstance(dims, list) or all(map(_real, dims))
    return all(n >= 0 for n in dims) and prod(dims) < MOST_NUMBERS


def _moved(operation: Operation) -> float:
    """Return the bytes that an operation must read and write at least."""
    sizes = [
        sum(_bytes(dims, kind))
        for dims, kind in zip(operation.dims, operation.types, strict=False)
        if isinstance(dims, list) and dims
    ]
    if not sizes:
        return 0.0
    whole, name = float(sum(sizes)), operation.name.removeprefix("aten::")
    if operation.name in MATMULS:
        first, second = MATMULS[operation.name]
        (*batch, m, _), (*_, n) = operation.dims[first], operation.dims[second]
        size = SIZES.get(operation.types[first], 4)
        return sizes[first] + sizes[second] + prod(batch) * m * n * max(size, 2)
    if name == operation.name or name in ("copy_", "fill_", "zero_"):
        return whole  # a fused kernel is given what it writes, too
    if name.startswith("_fused_adam"):
        return whole * 7 / 4  # reads four of a kind, writes three of them
    if name.endswith("_"):
        return whole + sizes[0]
    return whole if any(part in name for part in SHRINKING) else whole + max(sizes)


def _bytes(dims: list[Any], kind: Any) -> Iterator[float]:
    """Yield the bytes of a tensor, or of each in a list of them."""
    if isinstance(dims[0], list):
        dtypes = kind if isinstance(kind, list) else ["float"] * len(dims)
        for inner, one in zip(dims, dtypes, strict=False):
            yield from _bytes(inner, one) if inner else ()
    elif all(isinstance(n, int) for n in dims):
        yield prod(dims) * SIZES.get(kind, 4) if isinstance(kind, str) else prod(dims) * 4
