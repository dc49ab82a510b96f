"""Try ways to store a trained model in less, and measure each on the very file that it wrote.

A point is a folder of `export.point`. What is told of it is computed with the matrices that were
read back from its file: bits per byte, the largest difference of logits to the fp32 model, the
largest difference to the fake-quantized reference (which is drift, and should be zero), and tokens
a second of decoding here.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.compress.gptq import gptq_model
from headrace.compress.latency import DecodeForecast
from headrace.compress.quantized_model import (
    StoredMatrix,
    check_finite,
    check_installed,
    computing,
    faking,
    formats_of,
    quantize_model,
    stored_bytes,
)
from headrace.compress.sensitivity import (
    logits_on,
    ranked,
    sensitivities,
    with_higher,
    within_budget,
)
from headrace.compress.sparsity import SparseMatrix
from headrace.compress.spec import QuantizationSpec
from headrace.compress.wanda import wanda_model
from headrace.core.errors import UnsupportedError
from headrace.core.progress import OnProgress
from headrace.export.point import WEIGHTS, fill_, point_plan, read_point, write_point
from headrace.inference.sample import generate
from headrace.model.decoder import Decoder
from headrace.model.lora import merged_state
from headrace.parallel.world import World
from headrace.plan.technique import Stage
from headrace.train.evaluate import evaluate, finite

DECODED, DECODINGS = 24, 3
"""Tokens of one decoding that is timed, and how many are: the median is told."""
COMPARED = 512
"""Tokens of validation text on which logits are compared and sensitivity is measured, at least one
row."""
CALIBRATED = 8192
"""Tokens of training text that GPTQ and Wanda calibrate on."""
USUAL_RISE = 0.01
"""Most rise of bits per byte, as a share, at which a point is chosen where nothing is asked."""


@dataclass(frozen=True)
class SizeGoal:
    """Hold what a compressed model is to reach; without either, the usual rise.

    Args:
        budget_bytes: the most bytes of its weights.
        rise: the most rise of bits per byte, as a share of that of fp32.
    """

    budget_bytes: int | None = None
    rise: float | None = None

    @property
    def is_asked(self) -> bool:
        """Return whether the user asked for one."""
        return self.budget_bytes is not None or self.rise is not None

    def is_met(self, point: "PointReading") -> bool:
        """Return whether a point reaches it."""
        if self.budget_bytes is not None:
            return point.bytes <= self.budget_bytes
        return point.rise <= (USUAL_RISE if self.rise is None else self.rise)


@dataclass(frozen=True)
class PointReading:
    """Hold what was measured of one point."""

    name: str
    folder: str
    """Relative to the page; "" of the fp32 model."""
    bytes: int
    """Size of the file of weights."""
    loss_nats: float
    bits_per_byte: float
    rise: float
    """Rise of bits per byte, as a share of that of fp32."""
    logits_from_whole: float
    """Largest difference of a logit to that of the fp32 model."""
    logits_from_reference: float
    """Largest difference of a logit to that of the fake-quantized reference."""
    tokens_per_s: float
    """Speed of decoding one sequence here, by torch and torchao without compilation."""
    forecast_tokens_per_s: float
    """What that speed was forecast to be before the point was made."""
    higher: tuple[str, ...] = ()
    """Matrices that are kept in 8 bits."""
    pruned: float = 0.0
    """Share of the numbers of the linears of blocks that are zero and not stored."""


@dataclass(frozen=True)
class Compression:
    """Hold all points of a model, and the one that is chosen."""

    model: str
    whole: PointReading
    points: tuple[PointReading, ...]
    goal: SizeGoal
    tokens: int
    """Validation targets that each was evaluated on."""
    unquantized: Mapping[str, int]
    """Bytes of each matrix that no spec quantizes, by name."""
    sensitivity: Mapping[str, float]
    """Nats a token, by matrix; empty where it was not measured."""

    @property
    def chosen(self) -> PointReading | None:
        """Return the best point of the goal: of least loss in a budget, else of least size."""
        met = [point for point in self.points if self.goal.is_met(point)]
        if self.goal.budget_bytes is not None:
            return min(met, key=lambda p: (p.bits_per_byte, p.bytes), default=None)
        return min(met, key=lambda p: (p.bytes, p.bits_per_byte), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        chosen = self.chosen
        return {**asdict(self), "chosen": chosen.name if chosen else None}


def plain_build(build: Build, until: Stage = Stage.STEP) -> Build:
    """Return the model of an opened run as plain weights: adapters merged, frozen codes made whole.

    Args:
        build: the run, opened.
        until: the last stage; a model alone, whose text is not open, is MATERIALIZE.

    Raises:
        ConfigError: a weight is not finite, or missing among the plain ones.
    """
    made = make_build(point_plan(build), build.prepared, World(), build.device, until=until)
    state = merged_state(build.model)
    for name, weight in state.items():
        check_finite(name, weight)
    name = build.plan.name
    remedy = f"headrace sample {name}, which computes it as it was trained"
    fill_(made, state, source=name, remedy=remedy)
    return made


@torch.no_grad()
def compress_model(
    build: Build,
    specs: Sequence[QuantizationSpec],
    out: Path,
    goal: SizeGoal,
    *,
    model: str,
    source: str,
    tokens: int | None = None,
    progress: OnProgress = lambda description, done, total: None,
) -> Compression:
    """Write and measure a point of each spec, and a hybrid one where a goal has room for it.

    Args:
        build: the model with its validation text, by `plain_build`.
        specs: what to try.
        out: an empty folder; each point goes below it.
        goal: what is to be reached.
        model: its name, for the report.
        source: the digest of its weights.
        tokens: the most validation tokens; all without it.
        progress: takes how far it is.

    Raises:
        ConfigError: a spec does not fit this model.
        UnsupportedError: torchao is not installed, or no point can be within the budget.
        Diverged: a loss is not finite.
    """
    if any(spec.matrices.sparsity is None for spec in specs):
        check_installed()
    sizes = {spec.name: stored_bytes(build.model, spec) for spec in specs}
    _check_budget(goal, sizes, _header_bytes(build))
    work = _Work(build, out, source, tokens, progress, len(specs) + 1)
    whole = work.measure_whole()
    points = [work.measure(spec) for spec in specs]
    sensitivity: dict[str, float] = {}
    low = _base_of(specs, points)
    if goal.is_asked and low is not None:
        hybrid, sensitivity = work.find_hybrid(low, points, goal)
        if hybrid is not None:
            points.append(work.measure(hybrid))
    quantized = set[str]().union(*(formats_of(build.model, spec) for spec in specs))
    unquantized = {
        name: 4 * parameter.numel()
        for name, parameter in build.model.named_parameters()
        if parameter.ndim > 1 and name not in quantized
    }
    return Compression(model, whole, tuple(points), goal, work.targets, unquantized, sensitivity)


def check_reached(compression: Compression) -> None:
    """Refuse a goal that no point reached; the points stay.

    Raises:
        UnsupportedError: names the nearest.
    """
    if compression.chosen is not None or not compression.goal.is_asked:
        return
    if (budget := compression.goal.budget_bytes) is not None:
        smallest = min(compression.points, key=lambda point: point.bytes)
        raise UnsupportedError(
            f"no point fits into --budget-mb {budget / 1e6:g}: the nearest is {smallest.name}, "
            f"whose file of weights has {smallest.bytes / 1e6:.4g} MB",
            f"--budget-mb {_up(smallest.bytes / 1e6)}",
        )
    nearest = min(compression.points, key=lambda point: point.rise)
    percent = 100 * (compression.goal.rise or 0)
    raise UnsupportedError(
        f"no point is within --max-loss {percent:g}%: the nearest is {nearest.name}, whose bits "
        f"per byte rise by {nearest.rise:.3%}",
        f"--max-loss {_up(100 * nearest.rise)}%",
    )


def _check_budget(goal: SizeGoal, sizes: Mapping[str, int], header: int) -> None:
    """Refuse a budget that the weights of no spec fit into.

    Raises:
        UnsupportedError: names the smallest.
    """
    name, least = min(sizes.items(), key=lambda pair: pair[1])
    if goal.budget_bytes is not None and least > goal.budget_bytes:
        raise UnsupportedError(
            f"no point fits into --budget-mb {goal.budget_bytes / 1e6:g}: the nearest is {name}, "
            f"whose weights take {least / 1e6:.4g} MB",
            f"--budget-mb {_up((least + header) / 1e6)}",
        )


def _up(value: float) -> str:
    """Return a number of three digits that is not below `value`."""
    text = f"{value:.3g}"
    return text if float(text) >= value else f"{value * 1.01:.3g}"


def _header_bytes(build: Build) -> int:
    """Return the most bytes of the header of a file of weights, which names every tensor."""
    return 400 * sum(1 for _ in build.model.parameters())


def _base_of(
    specs: Sequence[QuantizationSpec], points: Sequence[PointReading]
) -> QuantizationSpec | None:
    """Return the best spec of 4-bit integers, which a hybrid begins from; None without one."""
    low = {spec.name: spec for spec in specs if spec.matrices.dtype == "int4"}
    best = min((point for point in points if point.name in low), key=lambda p: p.rise, default=None)
    return low[best.name] if best else None


@dataclass
class _Work:
    """Measure points of one model."""

    build: Build
    out: Path
    source: str
    tokens: int | None
    progress: OnProgress
    total: int
    done: int = 0
    targets: int = 0

    def __post_init__(self) -> None:
        length = self.build.plan.data.sequence_length
        rows = max(1, COMPARED // length)
        self.ids_BT = rows_of(self.build.prepared.validation, rows, length, self.build.device)
        self.logits = logits_on(self.build.model, self.ids_BT)
        self.bits_per_byte = 0.0

    def measure_whole(self) -> PointReading:
        """Return what is measured of the fp32 model."""
        self._step("fp32")
        size = sum(4 * parameter.numel() for parameter in self.build.model.parameters())
        loss = finite(evaluate(self.build, self.tokens))
        self.targets, self.bits_per_byte = loss.tokens, loss.bits_per_byte
        speed = decoding_speed(self.build.model, self.ids_BT)
        self.forecast = DecodeForecast(self.build.model, 1 / speed)
        whole = loss.loss_nats, loss.bits_per_byte
        return PointReading("fp32", "", size, *whole, 0.0, 0.0, 0.0, speed, speed)

    def measure(self, spec: QuantizationSpec) -> PointReading:
        """Write a point, read it back, and return what is measured of it."""
        self._step(spec.name)
        folder, model = self.out / spec.name, self.build.model
        forecast = 1 / self.forecast.seconds(spec)
        write_point(folder, self.build, spec, self._quantize(spec), self.source)
        read, stored, _ = read_point(folder, self.build.device)
        with faking(model, read, stored):
            reference = logits_on(model, self.ids_BT)
        with computing(model, read, stored):
            logits = logits_on(model, self.ids_BT)
            loss = finite(evaluate(self.build, self.tokens))
            speed = decoding_speed(self.build.model, self.ids_BT)
        return PointReading(
            spec.name,
            spec.name,
            (folder / WEIGHTS).stat().st_size,
            loss.loss_nats,
            loss.bits_per_byte,
            rise=loss.bits_per_byte / self.bits_per_byte - 1,
            logits_from_whole=_largest(logits, self.logits),
            logits_from_reference=_largest(logits, reference),
            tokens_per_s=speed,
            forecast_tokens_per_s=forecast,
            higher=tuple(spec.exceptions),
            pruned=_pruned_share(stored),
        )

    def find_hybrid(
        self, low: QuantizationSpec, points: Sequence[PointReading], goal: SizeGoal
    ) -> tuple[QuantizationSpec | None, dict[str, float]]:
        """Return a spec that keeps some matrices in 8 bits, if one helps, and sensitivities.

        In a budget it keeps those that fit. Under a limit of the loss it keeps as few of the most
        sensitive as reach it, by bisection; the loss of each try is that of the reference.
        """
        model = self.build.model
        stored = self._quantize(low)
        measured = sensitivities(model, low, stored, self.ids_BT, self.progress)
        order = ranked(model, low, measured)
        if goal.budget_bytes is not None:
            room = goal.budget_bytes - _header_bytes(self.build)
            mixed = within_budget(model, low, order, room)
            return (mixed if mixed.exceptions else None), measured
        limit = goal.rise or 0.0
        if any(point.name == low.name and point.rise <= limit for point in points):
            return None, measured
        least, most = 1, len(order)
        while least < most:
            middle = (least + most) // 2
            if self._rise(with_higher(low, order[:middle])) <= limit:
                most = middle
            else:
                least = middle + 1
        return with_higher(low, order[:least]), measured

    def _rise(self, spec: QuantizationSpec) -> float:
        with faking(self.build.model, spec, self._quantize(spec)):
            return evaluate(self.build, self.tokens).bits_per_byte / self.bits_per_byte - 1

    def _quantize(self, spec: QuantizationSpec) -> dict[str, Any]:
        """Return the quantized matrices, calibrated on training text where the spec asks for it."""
        filled: Mapping[str, Any] = {}
        model, kind = self.build.model, spec.matrices
        if kind.rounding == "gptq":
            filled = gptq_model(model, spec, self._training_text(), self.progress)
        if kind.sparsity is not None and kind.sparsity.metric == "wanda":
            filled = wanda_model(model, spec, self._training_text(), self.progress)
        return quantize_model(model, spec, filled)

    def _training_text(self) -> Tensor:
        """Return rows of training text to calibrate on, int64 [B, T]."""
        length = self.build.plan.data.sequence_length
        rows = max(1, CALIBRATED // length)
        return rows_of(self.build.prepared.train[0], rows, length, self.build.device)

    def _step(self, name: str) -> None:
        self.progress(f"measuring {name}", self.done, max(self.total, self.done + 1))
        self.done += 1


def decoding_speed(model: Decoder, ids_BT: Tensor) -> float:
    """Return the tokens a second of greedy decoding: the median of some runs after a first.

    Args:
        model: by torch, as it is.
        ids_BT: text, of whose first row the prompt is.
    """
    prompt = ids_BT[:1, : max(1, min(16, ids_BT.size(1) - DECODED))]
    new = min(DECODED, ids_BT.size(1) - prompt.size(1))
    seconds = []
    for _ in range(1 + DECODINGS):
        with _clock(seconds):
            # The tokens come to the host, so that the device is done.
            generate(model, prompt, new_tokens=new, temperature=0.0).tolist()
    return new / statistics.median(seconds[1:])


@contextmanager
def _clock(seconds: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin)


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _pruned_share(stored: Mapping[str, StoredMatrix]) -> float:
    """Return the share of the numbers of pruned matrices that is not stored; 0 without any."""
    pruned = [one for one in stored.values() if isinstance(one, SparseMatrix)]
    numbers = sum(one.shape.numel() for one in pruned)
    return 1 - sum(one.values_N.numel() for one in pruned) / numbers if numbers else 0.0


def rows_of(shards: Any, rows: int, length: int, device: torch.device) -> Tensor:
    """Return rows of a text, spread evenly over it, int64 [B, T]."""
    length = min(length, shards.tokens)
    rows = min(rows, shards.tokens // length)
    apart = (shards.tokens - length) // max(1, rows - 1) if rows > 1 else 0
    read = [torch.from_numpy(shards.read(n * apart, length).astype("int64")) for n in range(rows)]
    return torch.stack(read).to(device)
