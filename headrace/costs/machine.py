"""Hold the rates of one device: how long a matmul, attention, a stream of bytes or a copy takes.

A rate depends on the shape, so every time has two factors. The first is a plain formula. Of a
matmul: its result is cut into tiles, the processors work on as many tiles at once as there are of
them, and a last round that is not full costs as much as a full one; a tile costs its FLOPs and a
fixed share for its beginning and end, which is why short sums (small k) are slower; cutting the sum
helps where tiles are few, and costs a pass over the partial results. Bytes bound it from below. Of
attention: scores in tiles, of which a causal mask spares those above the diagonal, the softmax
counted as `SOFTMAX` features more, and a tile of queries costs `START` features for its beginning
and end; too few rows and heads leave processors idle. Of a stream: bytes over the bandwidth. A
kernel's floor is added to each.

The second factor is what was measured beside the formula. With points the formula's one rate is
fitted to the fastest of them, and at a point the answer is its time exactly. Elsewhere the ratios
of neighbours count by the fourth power of their closeness in log size; beyond the outermost points
the nearest ratio holds, so that the formula extrapolates. Streams are interpolated in log size
between their points, which are made to rise.

Layouts (which operand is transposed) are not distinguished, nor what runs beside a kernel: clocks
and caches of a step differ from those of a loop over one kernel, and the caller corrects for that.
In measured steps the formula alone predicts matmuls better than points do (`plain`), likely since
the limit of power slows the fastest most. A `Machine` comes from
`headrace.probes.measure`, or from `assumed`: datasheet peaks and the shares of them that
`headrace.costs.assumed` states. Files are JSON, checked value by value.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import MALFORMED, ConfigError, UnsupportedError
from headrace.core.files import write_whole
from headrace.costs.assumed import (
    ANCHOR_ATTENTION,
    CPU,
    FACTORS,
    FAMILIES,
    H200_PEAK,
    Family,
)
from headrace.costs.hardware import ASSUMED, Hardware, lookup, near
from headrace.costs.links import GB, Link
from headrace.costs.rates import (
    BACKWARD,
    Absent,
    AttentionPoint,
    AttentionRates,
    LinearMatmul,
    LinearRates,
    MatmulPoint,
    MatmulRates,
    MeasuredStep,
    PieceRates,
    PlacedRatio,
    Shape,
    StreamRates,
    between,
    checked,
    met,
    place,
    plain_attention,
    plain_matmul,
    to_table,
)

FORMAT = 3
"""The version of the file; another one is refused. Times in the first had what timing them took in
them, and the second had the slowdown of a load of nothing but matmuls, which no step has."""
PROBE = "headrace probe"
"""The command that measures a machine and writes its file."""
ANCHOR_MATMUL = (8192, 8192, 8192)
"""The sizes of the matmul at which a share of a peak is stated."""
SQUARE = (256, 256, 256)
"""The sizes of the matmul at which a CPU's precisions are compared."""


@dataclass(frozen=True)
class Machine:
    """A machine holds the rates of one device."""

    name: str
    kind: Literal["gpu", "cpu"]
    source: Literal["datasheet", "probes"]
    says: str
    """what is assumed, or how it was measured"""
    date: str
    """of the probes, YYYY-MM-DD; empty for a datasheet, as the next two"""
    torch: str
    driver: str
    memory_bytes: int
    context_bytes: int
    """of it, what CUDA's context and the libraries take before the first tensor"""
    processors: int
    """multiprocessors of a GPU, threads of a CPU"""
    launch_s: float
    """host seconds of one eager operation, without waiting for the device; on a CPU it is part of
    each operation's time and not beside it"""
    graph_launch_s: float
    """host seconds of one replay of a captured graph, however many kernels are in it"""
    traffic: StreamRates
    """one kernel that reads and writes so many bytes in all; its floor is every kernel's"""
    to_host: StreamRates
    from_host: StreamRates
    matmuls: tuple[MatmulRates, ...]
    attention: tuple[AttentionRates, ...]
    absent: tuple[Absent, ...] = ()
    skipped: tuple[str, ...] = ()
    """what the probes' time did not suffice for"""
    links: tuple[Link, ...] = ()
    """to other ranks, where several measured them; else costs/links.py assumes them by the name"""
    linears: tuple[LinearRates, ...] = ()
    """of a CPU alone, as the next two: a linear layer's matmuls as a step lays them out"""
    pieces: tuple[PieceRates, ...] = ()
    """the other operations of a step, by the names of their work (costs/decoder_work.py)"""
    steps: tuple[MeasuredStep, ...] = ()
    """whole steps, by which the sum of their pieces is set right"""
    network_bytes_per_s: float | None = None
    """that each GPU sends to other hosts, as a plan says; None where it does not"""

    def joined(self, gb_per_s: float | None) -> "Machine":
        """Return the same beside a network to which each GPU sends so many GB/s; None: unknown."""
        rate = None if gb_per_s is None else GB * gb_per_s
        return self if rate == self.network_bytes_per_s else replace(self, network_bytes_per_s=rate)

    # --- what it tells ------------------------------------------------------------------------

    def matmul_s(self, precision: str, m: int, n: int, k: int, *, plain: bool = False) -> float:
        """Return the seconds of one matmul [m, k] x [k, n].

        With `plain` the formula decides alone, at the rate of the point that is long in every
        direction.

        Raises:
            UnsupportedError: the device has no such matmuls, or they were not measured.
        """
        key = (precision, m, n, k, plain)
        if key not in self._memory:
            known = (self._anchored if plain else self._matmuls).get(precision)
            if known is None:
                raise self._lacks(f"products in {precision}")
            ratio = 1.0 if plain else between(self._matmul_ratios(known), place(m, n, k))
            self._memory[key] = ratio * self._plain_matmul(known, m, n, k)
        return self._memory[key]

    def attention_s(
        self,
        kernel: str,
        *,
        rows: int,
        heads: int,
        kv_heads: int,
        length: int,
        features: int,
        causal: bool,
        backward: bool,
    ) -> float:
        """Return the seconds of one forward pass, or with `backward` of one backward pass alone.

        Args:
            kernel: "cudnn", "flash", "flash4", "flex", "efficient" or "math".
            rows: sequences.
            heads: of queries.
            kv_heads: of keys and values.
            length: tokens of a row.
            features: of a head.
            causal: whether a token sees only those before it.
            backward: which of the two passes.

        Raises:
            UnsupportedError: the device has no such kernel, or it was not measured.
        """
        shape = (rows, heads, kv_heads, length, features)
        key = (kernel, backward, causal, *shape)
        if key not in self._memory:
            known = self._kernels.get((kernel, backward))
            if known is None:
                direction = "backward" if backward else "forward"
                raise self._lacks(f"attention by {kernel} ({direction})")
            ratio = between(self._attention_ratios(known), _spot(length, features, causal))
            self._memory[key] = ratio * self._plain_attention(known, shape, causal)
        return self._memory[key]

    def traffic_s(self, bytes: float) -> float:
        """Return the seconds of one streaming kernel that reads and writes `bytes` in all."""
        return self.traffic.seconds(bytes)

    def link_s(self, bytes: float, to_host: bool) -> float:
        """Return the seconds of one copy between the device and pinned memory of the host."""
        return (self.to_host if to_host else self.from_host).seconds(bytes)

    def linear_s(self, matmul: LinearMatmul, precision: str, m: int, n: int, k: int) -> float:
        """Return the seconds of one of a linear layer's matmuls on a CPU.

        A precision whose linears were not timed is as much slower as its square matmuls are.

        Raises:
            UnsupportedError: the precision was not measured.
        """
        key = ("linear", matmul, precision, m, n, k)
        if key not in self._memory:
            known: dict[tuple[LinearMatmul, str], LinearRates]
            known = {(one.matmul, one.precision): one for one in self.linears}
            measured, plain = known.get((matmul, precision)), known.get((matmul, "fp32"))
            if measured is not None:
                self._memory[key] = measured.seconds(m, n, k, self.launch_s)
            elif plain is None or precision == "fp32":
                self._memory[key] = self.matmul_s(precision, m, n, k)
            else:
                slower = self.matmul_s(precision, *SQUARE) / self.matmul_s("fp32", *SQUARE)
                self._memory[key] = slower * plain.seconds(m, n, k, self.launch_s)
        return self._memory[key]

    def piece(self, name: str) -> PieceRates | None:
        """Return what was measured on a CPU of the work of this name."""
        return self._pieces.get(name)

    @cached_property
    def _pieces(self) -> dict[str, PieceRates]:
        return {one.name: one for one in self.pieces}

    def kernels(self, backward: bool) -> tuple[str, ...]:
        """Return the kernels that `attention_s` knows in this direction."""
        return tuple(a.kernel for a in self.attention if a.backward == backward)

    def _plain_matmul(self, known: MatmulRates, m: int, n: int, k: int) -> float:
        """Return the formula's seconds."""
        return plain_matmul(known, self.kind, self.processors, self.traffic, m, n, k)

    def _plain_attention(self, known: AttentionRates, shape: Shape, causal: bool) -> float:
        """Return the formula's seconds."""
        return plain_attention(known, self.kind, self.processors, self.traffic, shape, causal)

    # --- what was measured beside them --------------------------------------------------------

    def fitted(self) -> "Machine":
        """Return the same with each rate set so that the formula meets its fastest point."""

        def attention(known: AttentionRates) -> AttentionRates:
            best = min(known.points, key=lambda p: p.seconds / self._plain(known, p))
            return met(known, best.seconds, lambda a: self._plain(a, best))

        return replace(
            self,
            matmuls=tuple(self._at(p, lambda p: p.flops / p.seconds) for p in self.matmuls),
            attention=tuple(attention(a) if a.points else a for a in self.attention),
        )

    def _plain(self, known: AttentionRates, point: AttentionPoint) -> float:
        return self._plain_attention(known, point.shape, point.causal)

    def _at(self, known: MatmulRates, best: Callable[[MatmulPoint], float]) -> MatmulRates:
        if not known.points:
            return known
        point = max(known.points, key=best)
        return met(known, point.seconds, lambda p: self._plain_matmul(p, *point.sizes))

    @cached_property
    def _memory(self) -> dict[tuple[Any, ...], float]:
        """Return what was asked before: a planner asks for the same shapes a thousand times."""
        return {}

    @cached_property
    def _matmuls(self) -> dict[str, MatmulRates]:
        return {p.what: p for p in self.matmuls}

    @cached_property
    def _anchored(self) -> dict[str, MatmulRates]:
        """Return the rates of matmuls by precision, each with the rate of one point."""
        return {p.what: self._at(p, lambda p: min(p.sizes)) for p in self.matmuls}

    @cached_property
    def _kernels(self) -> dict[tuple[str, bool], AttentionRates]:
        return {a.what: a for a in self.attention}

    @cached_property
    def _ratios(self) -> dict[Any, list[PlacedRatio]]:
        """Return where points lie, and their logarithmic ratios.

        They are by precision, or by kernel and direction.
        """
        return {}

    def _matmul_ratios(self, known: MatmulRates) -> list[PlacedRatio]:
        if known.what not in self._ratios:
            self._ratios[known.what] = [
                (place(*p.sizes), math.log(p.seconds / self._plain_matmul(known, *p.sizes)))
                for p in known.points
            ]
        return self._ratios[known.what]

    def _attention_ratios(self, known: AttentionRates) -> list[PlacedRatio]:
        if known.what not in self._ratios:
            self._ratios[known.what] = [
                (_spot(p.length, p.features, p.causal), math.log(p.seconds / self._plain(known, p)))
                for p in known.points
            ]
        return self._ratios[known.what]

    def _lacks(self, what: str) -> UnsupportedError:
        """Return the error that says why `what` is unavailable of this device."""
        words = what.partition(" (")[0]
        why = next((a.why for a in self.absent if a.what in (what, words)), "")
        how = "its probes" if self.source == "probes" else "what is assumed of its kind"
        return UnsupportedError(
            f"{self.name} has no {what}: {why}" if why else f"{how} tell no {what} of {self.name}",
            PROBE if not why else "",
        )

    # --- files --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, by the keys of files, but for what a plan says."""
        return {k: v for k, v in to_table(self).items() if k != "network_bytes_per_s"}

    def to_json(self) -> str:
        """Return everything as a text that people can read too."""
        return json.dumps({"format": FORMAT, **self.to_dict()}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Keep it as a file, aside and renamed, so that a reader finds a whole one."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> "Machine":
        """Return the machine that `write` kept.

        Raises:
            ConfigError: it is not there, damaged, or not a machine's; with what was found.
        """
        try:
            return cls.from_json(path.read_text())
        except OSError as error:
            why = error.strerror or str(error)
        except MALFORMED as error:
            why = str(error)
        raise ConfigError(f"{path} does not hold a machine's rates: {why}", PROBE)

    @classmethod
    def from_json(cls, text: str) -> "Machine":
        """Return the machine that `to_json` made a text of.

        Raises:
            ValueError: it did not make this; with what was found.
        """
        table = json.loads(text)
        if type(table) is not dict or table.get("format") != FORMAT:
            version = table.get("format") if type(table) is dict else type(table).__name__
            raise ValueError(f"format {version!r}, and {FORMAT} is read here")
        return checked(cls, {key: value for key, value in table.items() if key != "format"}, "")

    @classmethod
    def assumed(cls, device_name: str) -> "Machine":
        """Return the rates of a device that nobody probed.

        They are its datasheet's, and the shares in `costs/assumed.py`.

        Of a CPU, and of Apple's GPU beside one ("mps"), the memory is the host's, and the rates
        are guessed.

        Raises:
            UnsupportedError: nothing is published here of such a device.
        """
        if device_name.lower() in ("cpu", "mps"):
            unknown = lookup(device_name.lower())
            return _assumed(replace(unknown, family="cpu", processors=os.cpu_count() or 1))
        hardware = lookup(device_name)
        if not hardware.family:
            guess = near(device_name)
            raise UnsupportedError(
                f"nothing is published here of {device_name!r}"
                f"{f'; did you mean {guess!r}?' if guess else ''}; rates are assumed for cpu, "
                f"{ASSUMED}",
                f'--device-name "{guess}"' if guess else f"{PROBE} (on that machine)",
            )
        return _assumed(hardware)


def _spot(length: int, features: int, causal: bool) -> tuple[float, ...]:
    """Return where attention lies among points; the formula covers what a length changes."""
    return (*place(length, features**4), 2.0 * causal)


@cache
def _assumed(hardware: Hardware) -> Machine:
    """Return the rates of a device whose peaks are published, or of a CPU by guessed peaks.

    They are fitted once: a sweep asks for them at each plan.
    """
    family, cpu = FAMILIES[hardware.family], hardware.family == "cpu"
    peaks = {
        "half": hardware.peak_half_flops or CPU.half_flops * hardware.processors,
        "fp32": hardware.peak_fp32_flops or CPU.fp32_flops * hardware.processors,
    }
    bandwidth = hardware.memory_bandwidth_bytes_per_s or CPU.bandwidth_bytes_per_s
    link = StreamRates(family.link_s, family.link_bytes_per_s)
    low = (
        ""
        if hardware.sustained == 1
        else (f"; of products {hardware.sustained:.0%} of that, for its low limit of power")
    )
    m, n, k = ANCHOR_MATMUL
    whole = Machine(
        name=hardware.name,
        kind="cpu" if cpu else "gpu",
        source="datasheet",
        says=f"peaks: {hardware.source}; shares of them that are reached: {family.says}{low}",
        date="",
        torch="",
        driver="",
        memory_bytes=hardware.memory_bytes or host_memory_bytes(),
        context_bytes=family.context_bytes,
        processors=hardware.processors,
        launch_s=family.launch_s,
        graph_launch_s=family.graph_launch_s,
        traffic=StreamRates(family.kernel_s, bandwidth * family.traffic),
        to_host=link,
        from_host=link,
        matmuls=(),
        attention=(),
        absent=_absent(family),
    )
    matmuls = []
    for precision, share in family.matmuls.items():
        peak = peaks[FACTORS[precision][0]] * FACTORS[precision][1]
        point = MatmulPoint(m, n, k, 2 * m * n * k / (peak * share * hardware.sustained))
        matmuls.append(MatmulRates(precision, peak, (point,)))  # type: ignore[arg-type]
    half = peaks["half"] * hardware.sustained
    attention = [
        AttentionRates(kernel, backward, half, points)  # type: ignore[arg-type]
        for kernel, backward, points in _attention_points(family, half)
    ]
    rate = half * family.matmuls.get("bf16", family.matmuls.get("fp16", 1.0))
    attention += [AttentionRates("math", backward, rate) for backward in (False, True)]
    return replace(whole, matmuls=tuple(matmuls), attention=tuple(attention)).fitted()


def _attention_points(
    family: Family, peak: float
) -> Iterator[tuple[str, bool, tuple[AttentionPoint, ...]]]:
    """Yield per kernel and direction the rows that were measured on a like device."""
    like = peak / H200_PEAK * 1e12
    rows = {
        kernel: [(row, (like * row.rates[0], like * row.rates[1])) for row in known]
        for kernel, known in family.rows.items()
    }
    for kernel, (other, ratio) in family.relative.items():
        rows[kernel] = [(row, (ratio * f, ratio * b)) for row, (f, b) in rows[other]]
    for kernel, (forward, backward) in family.attention.items():
        rows[kernel] = [(ANCHOR_ATTENTION, (peak * forward, peak * backward))]
    for kernel, known in rows.items():
        for backward in (False, True):
            yield (
                kernel,
                backward,
                tuple(
                    AttentionPoint(
                        *row.shape,
                        True,
                        row.flops * (BACKWARD if backward else 1) / rates[backward],
                    )
                    for row, rates in known
                ),
            )


def _absent(family: Family) -> tuple[Absent, ...]:
    """Return what no device of the family has, by its datasheets."""
    return tuple(
        Absent(f"products in {precision}", "its datasheet names no such rate")
        for precision in FACTORS
        if precision not in family.matmuls
    )


def host_memory_bytes() -> int:
    """Return the bytes of memory of the machine that this runs on."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
