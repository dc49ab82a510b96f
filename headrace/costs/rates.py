"""Hold points that were measured of a device, the formulas beside them, and how both are read.

`headrace.costs.machine` describes the method.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from headrace.core.model_config import ModelConfig
from headrace.costs.constants import number, numbers, table

T = TypeVar("T")

Precision = Literal["bf16", "fp16", "fp32", "tf32", "fp8"]
Kernel = Literal["cudnn", "flash", "flash4", "flex", "efficient", "math"]
Half = Literal["", "autocast", "parameters"]
"""How a step multiplies bf16; "" where it multiplies fp32."""
PlacedRatio = tuple[tuple[float, ...], float]
"""Where a point lies, in log size, and the logarithm of its time over the formula's."""
Shape = tuple[int, int, int, int, int]
"""The sizes of attention: rows, query heads, key-value heads, tokens of a row, features of a head.
"""
OPERAND_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
RESULT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 2}

TILES = {"gpu": table("tiles_gpu"), "cpu": table("tiles_cpu")}
"""Device -> (rows of a matmul's tile, its columns, the share of the rate that it reaches)."""
SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts into which the sum of a matmul may be cut."""
EDGE = dict(zip(TILES, numbers("tile_edge"), strict=True))
"""Device -> the terms of a tile's sum that cost as much as the tile's beginning and end."""
QUERIES = dict(zip(TILES, numbers("attention_queries"), strict=True))
"""Device -> queries of a tile of attention."""
SOFTMAX, START = number("softmax"), number("attention_tile_start")
BACKWARD = 2.5
"""Matmuls of attention's backward pass for each one of the forward pass: 5 for 2."""
SCORE_BYTES = (20, 30)
"""Bytes moved for one score where scores are kept in memory ("math"), forward and backward."""
SAME = 1e-9
"""A squared distance in log size below which two shapes are one."""


@dataclass(frozen=True)
class StreamPoint:
    """Hold how long a device took to read or write so many bytes."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class StreamRates:
    """Hold how long moving bytes takes: by measured points, or by a floor and a bandwidth."""

    floor_s: float
    bytes_per_s: float
    points: tuple[StreamPoint, ...] = ()

    @cached_property
    def _rising(self) -> list[tuple[float, float]]:
        """Return the logarithms of each point's bytes and seconds by size, the seconds rising."""
        by_size = sorted((p.bytes, p.seconds) for p in self.points)
        slowest = accumulate((seconds for _, seconds in by_size), max)
        return [(math.log(b), math.log(s)) for (b, _), s in zip(by_size, slowest, strict=True)]

    def seconds(self, count: float) -> float:
        """Return the seconds of moving `count` bytes."""
        if not self.points:
            return self.floor_s + count / self.bytes_per_s
        known, at = self._rising, math.log(max(count, 1))
        if at <= known[0][0]:
            return math.exp(known[0][1])
        for (x0, y0), (x1, y1) in pairwise(known):
            if at <= x1:
                return math.exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
        return math.exp(known[-1][1]) + (count - math.exp(known[-1][0])) / self.bytes_per_s


@dataclass(frozen=True)
class MatmulPoint:
    """Hold the time of one measured matmul, [m, k] times [k, n]."""

    m: int
    n: int
    k: int
    seconds: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return m, n and k."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> float:
        """Return the multiplications and additions."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class MatmulRates:
    """Hold what is known of matmuls in one precision."""

    precision: Precision
    flops_per_s: float
    """the rate of full tiles with long sums, by which the formula reckons"""
    points: tuple[MatmulPoint, ...] = ()

    @property
    def what(self) -> str:
        """Return the precision, which distinguishes these rates from a machine's others."""
        return self.precision


@dataclass(frozen=True)
class AttentionPoint:
    """Hold the time of one measured pass of attention, forward or backward."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    features: int
    causal: bool
    seconds: float

    @property
    def shape(self) -> Shape:
        """Return everything but the mask and the time."""
        return self.rows, self.heads, self.kv_heads, self.length, self.features


@dataclass(frozen=True)
class AttentionRates:
    """Hold what is known of one kernel of attention in one direction."""

    kernel: Kernel
    backward: bool
    flops_per_s: float
    """the rate of full tiles, the softmax counted as `SOFTMAX` features of each head"""
    points: tuple[AttentionPoint, ...] = ()

    @property
    def what(self) -> tuple[str, bool]:
        """Return kernel and direction, which distinguish these rates from a machine's others."""
        return self.kernel, self.backward


LinearMatmul = Literal["result", "input", "weight"]
"""A linear layer's three matmuls: its result, and the gradients of its input and its weight."""


@dataclass(frozen=True)
class LinearRates:
    """Hold the measured times of one of a linear layer's three matmuls on a CPU.

    Its operands lie in memory as a training step lays them out.
    """

    matmul: LinearMatmul
    precision: Precision
    points: tuple[MatmulPoint, ...]

    def seconds(self, m: int, n: int, k: int, floor_s: float) -> float:
        """Return the seconds of [m, k] times [k, n], by the rates of the points that lie near it.

        Args:
            m: rows of the result.
            n: columns of the result.
            k: terms of each sum.
            floor_s: seconds that any operation takes, however small.
        """
        at = place(m, n, k)
        per_s = between(self._rates, at)
        return floor_s + 2.0 * m * n * k / per_s

    @cached_property
    def _rates(self) -> list[PlacedRatio]:
        return [(place(*p.sizes), math.log(p.flops / p.seconds)) for p in self.points]


@dataclass(frozen=True)
class PieceRates:
    """Hold the times of one kind of operation in a CPU's step, by the bytes that it moves."""

    name: str
    whole: bool
    """whether a compiler leaves it as it is"""
    points: tuple[StreamPoint, ...]

    @cached_property
    def stream(self) -> StreamRates:
        """Return the points as a curve that goes on beyond the largest one at its rate."""
        ordered = tuple(sorted(self.points, key=lambda p: p.bytes))
        largest = ordered[-1]
        return StreamRates(ordered[0].seconds, largest.bytes / largest.seconds, ordered)


@dataclass(frozen=True)
class DecoderSizes:
    """Hold the sizes of a small plain decoder and of its micro-batch."""

    dim: int
    layers: int
    heads: int
    vocab: int
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the micro-batch."""
        return self.rows * self.length

    def config(self, **keys: Any) -> ModelConfig:
        """Return the decoder's config as the demo's family has it, with other keys set."""
        sizes = {"dim": self.dim, "layers": self.layers, "heads": self.heads, "vocab": self.vocab}
        return ModelConfig(**{**sizes, "qk_norm": True, **keys})


@dataclass(frozen=True)
class MeasuredStep(DecoderSizes):
    """Hold a measured step of such a decoder, which its operations alone do not predict."""

    compiled: bool
    keeps: bool
    """whether the process kept the memory that the step freed"""
    threads: int
    seconds: float
    half: Half = ""
    """how bf16 was multiplied: by autocast, or with parameters stored in it; "" is fp32"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the decoder and its micro-batch."""
        return self.dim, self.layers, self.heads, self.vocab, self.rows, self.length


@dataclass(frozen=True)
class Absent:
    """Hold what the device or its libraries lack, and why."""

    what: str
    why: str


def plain_matmul(
    known: MatmulRates, kind: str, processors: int, traffic: StreamRates, m: int, n: int, k: int
) -> float:
    """Return the seconds of a matmul by the formula alone, on so many processors of a kind."""
    inner, outer = OPERAND_BYTES[known.precision], RESULT_BYTES[known.precision]
    moved_s = (inner * (m * k + k * n) + outer * m * n) / traffic.bytes_per_s
    partial_s = 2 * 4 * m * n / traffic.bytes_per_s
    per_processor, fastest = known.flops_per_s / processors, math.inf
    for high, wide, share in TILES[kind]:
        tiles = math.ceil(m / high) * math.ceil(n / wide)
        for split in SPLITS:
            rounds = math.ceil(tiles * split / processors)
            flops = rounds * 2 * high * wide * (math.ceil(k / split) + EDGE[kind]) / share
            more_s = partial_s * split if split > 1 else 0.0
            fastest = min(fastest, flops / per_processor + more_s)
    return max(fastest, moved_s) + traffic.floor_s


def plain_attention(
    known: AttentionRates,
    kind: str,
    processors: int,
    traffic: StreamRates,
    shape: Shape,
    causal: bool,
) -> float:
    """Return the seconds of attention by the formula alone, on so many processors of a kind."""
    rows, heads, kv_heads, length, features = shape
    matmuls = 4 * (BACKWARD if known.backward else 1)
    moved = 4 * rows * length * features * (heads + kv_heads) * (2 if known.backward else 1)
    moved_s = moved / traffic.bytes_per_s
    if known.kernel == "math":
        scores = rows * heads * length * length
        kept_s = scores * SCORE_BYTES[known.backward] / traffic.bytes_per_s
        computed_s = scores * matmuls * features / known.flops_per_s
        return max(computed_s + kept_s, moved_s) + traffic.floor_s
    tile = QUERIES[kind]
    tiles = math.ceil(length / tile)
    seen = tiles * (tiles + 1) / 2 if causal else tiles * tiles
    per_head = tile * tile * (seen * (features + SOFTMAX) + tiles * START)
    flops = rows * heads * per_head * matmuls
    idle = max(1.0, processors / (rows * heads * tiles))
    return max(flops * idle / known.flops_per_s, moved_s) + traffic.floor_s


def met(known: T, seconds: float, formula: Callable[[T], float]) -> T:
    """Return `known` with the rate at which the formula predicts `seconds`, or is closest to it."""
    table: Any = known
    for _ in range(20):
        faster = replace(table, flops_per_s=table.flops_per_s * formula(table) / seconds)
        if formula(faster) > 0.999 * formula(table) and formula(table) > seconds:
            break  # a floor or the memory holds it: a higher rate would mean nothing
        table = faster
    return table


def between(points: Sequence[PlacedRatio], place: Sequence[float]) -> float:
    """Return the ratio of measured to formula time at `place`, between the measured points.

    It is 1 without points, and a point's own ratio at that point. Elsewhere it is the mean of all
    logarithms, weighted by the inverse fourth power of the distance. A place outside of all points
    is first moved to the outermost one in each direction.
    """
    if not points:
        return 1.0
    sides = list(zip(*(where for where, _ in points), strict=True))
    inside = [min(max(x, min(side)), max(side)) for x, side in zip(place, sides, strict=True)]
    weights = total = 0.0
    for where, ratio in points:
        squared = sum((x - y) ** 2 for x, y in zip(where, inside, strict=True))
        if squared < SAME:
            return math.exp(ratio)
        weight = squared**-2
        weights += weight
        total += weight * ratio
    return math.exp(total / weights)


def place(*sizes: float) -> tuple[float, ...]:
    """Return the logarithms of sizes to the base of 2, in which distances are taken."""
    return tuple(math.log2(size) for size in sizes)


# --- files ------------------------------------------------------------------------------------

MAY_BE_ZERO = frozenset({"context_bytes"})
LATER = frozenset({"links", "linears", "pieces", "steps", "half", "network_bytes_per_s"})
"""Fields with defaults that a file may lack: from before they were measured, or a plan's."""
FILE_KEYS = {"matmuls": "products", "matmul": "way"}
"""Field -> its key in files and JSON, where the key is an older word that must stay."""


def to_table(instance: Any) -> dict[str, Any]:
    """Return a dataclass and those within it as tables, by the keys that `checked` reads."""
    return asdict(instance, dict_factory=lambda pairs: {FILE_KEYS.get(k, k): v for k, v in pairs})


def checked(kind: type[T], value: Any, where: str = "") -> T:
    """Return `value`, which was parsed from JSON, as an instance of `kind`.

    A kind is a frozen dataclass, a tuple, a literal, a text, a truth value or a number.

    Raises:
        ValueError: the value is of another kind; the message has the key and what is wanted there.
    """
    if is_dataclass(kind):
        return kind(**_table(kind, value, where))
    if get_origin(kind) is tuple:
        if type(value) is not list:
            raise _wrong(where, value, "a list")
        inner = get_args(kind)[0]
        items: Any = tuple(checked(inner, one, f"{where}[{n}]") for n, one in enumerate(value))
        return items
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(where, value, f"one of {', '.join(get_args(kind))}")
        return value
    if kind is float or kind is int:
        zero = where.rpartition(".")[2] in MAY_BE_ZERO
        right = type(value) in ((int, float) if kind is float else (int,))
        if not right or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            number = "number" if kind is float else "whole number"
            raise _wrong(where, value, f"a {number} {'of at least' if zero else 'above'} 0")
        number: Any = kind(value)
        return number
    if type(value) is not kind:
        raise _wrong(where, value, {str: "a text", bool: "true or false"}[kind])
    return value


def _table(kind: type[Any], value: Any, where: str) -> dict[str, Any]:
    """Return the fields of a dataclass, each checked; a file may lack those in `LATER`."""
    if type(value) is not dict:
        raise _wrong(where or "the whole", value, "a table")
    types = get_type_hints(kind)
    fields = {FILE_KEYS.get(name, name): name for name in types}
    prefix = f"{where}." if where else ""
    for key in value.keys() ^ fields.keys():
        if key in value or key not in LATER:
            fault = "missing" if key in fields else "not a key of it"
            raise ValueError(f"{prefix}{key} is {fault}")
    given = {name: key for key, name in fields.items() if key in value}
    return {name: checked(types[name], value[key], f"{prefix}{key}") for name, key in given.items()}


def _wrong(where: str, value: Any, wanted: str) -> ValueError:
    """Return the error that names a key, its value and what is wanted there."""
    shown = repr(value)
    return ValueError(
        f"{where} is {shown if len(shown) <= 40 else f'{shown[:40]}...'}, not {wanted}"
    )
