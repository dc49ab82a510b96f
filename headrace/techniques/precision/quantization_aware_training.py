"""Train a model in the few bits in which it will be stored, so that it learns around the rounding.

Rounding a trained model's weights to 4 bits moves its predictions, and nothing corrects that. Here
every matmul of the training rounds what it multiplies by the spec that stores the model later: the
matrices of blocks, the embedding, the output matrix, and, where the spec says so, what they read.
Gradients go through the rounding as if it were not there (compress/fake), and the weights that are
trained stay whole. `headrace compress RUN --to 8da4w` then stores the very codes that the last step
computed with.

With adapters the weight that is rounded is the one that the adapter is merged into, since that is
what is stored (LR-QAT). It costs the rounding of every weight in both directions, and no memory in
the blocks: a linear keeps its whole weight and its input, as without.

Let the rate end at zero (`schedule.final_fraction=0`). At a tenth of the rate weights still jump
between codes in the last steps, and the codes that are stored are those of one moment. A training
that also has much to learn rounds late: with `start=0.3` its first steps learn as a plain one's.

Left out: scales that learn (LSQ), NF4 and GPTQ, whose rounding is no function of the weight alone
or has no gradient, experts, and parts of a row on several tensor ranks, whose scale is of all.
Source: arXiv 1712.05877; arXiv 2305.17888 (LLM-QAT); arXiv 2406.06385 (LR-QAT).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import FAKE, Build
from headrace.compress.codes import quantize_nearest
from headrace.compress.fake import Rounding, fake_input
from headrace.compress.quantized_model import formats_of
from headrace.compress.spec import PRESETS, QuantizationSpec
from headrace.compress.vision import image_formats, look_at_rounding
from headrace.core.errors import RefusalKind
from headrace.core.remedy import Remedy, mend
from headrace.core.units import divisors
from headrace.costs.count import block_linears, without_casts
from headrace.costs.ledger import DERIVED, Instant, Ledger, Line
from headrace.costs.work import Matmul, Phase, Stream
from headrace.model.lora import LoraLinear, plain
from headrace.parallel.layout import local_of, shallow_copy
from headrace.plan.schedule import ENDLESS
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.plan.until import end_step

WEIGHT = (60.0, 14, 12.0)
"""Bytes that rounding one number of a weight moves, in how many kernels, and when fused: two passes
that find a group's ends, and one that divides, rounds, limits and multiplies (counted of
`compress/fake.fake_weight`)."""
READ = (56.0, 13, 12.0)
"""Bytes, kernels and fused bytes of rounding one number that a matmul reads, counted likewise."""
UNITS, ROWS = 16, 64
"""Inputs, each of one feature, that a linear is shown as evidence, and rows of it that answer."""
KEPT: tuple[Instant, ...] = ("loss", "turn")
"""When rounded weights of convolutions are held for the backward pass."""
HIGH_END = 0.05
"""Share of the rate at the end of a schedule above which weights of 4 bits still jump between codes
in the last steps. Chosen between the two ends that were measured, 0 and 0.1."""
OF_ROWS = ("lora_b", "lora_m")
"""Parameters of an adapter that have a row for each row of the weight."""


class QuantizationAwareTraining(Technique[Build]):
    """Train a model in the few bits in which it will be stored."""

    to: Literal["8da4w", "int4", "int8", "int8-dynamic"] = "8da4w"
    """How the model will be stored, as in `headrace compress --to`."""
    group: int = Field(default=32, ge=0, le=1 << 16)
    """Numbers of a row under one scale of 4 bits; 0 is the whole row."""
    start: float = Field(default=0.0, ge=0, lt=1)
    """Share of the schedule's steps that are trained without rounding."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    stage: ClassVar[Stage] = Stage.LINEAR
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("fake_quantized", "values")
    excludes: ClassVar[Mapping[str, str]] = {
        "float8_linear": "its matmuls round their operands to fp8, and no file stores that",
        "mixture_of_experts": "experts are no linears, and `headrace compress` leaves them whole",
        "tensor_parallel": "a row's scale is of all its numbers, of which a rank has a part",
    }
    equality: ClassVar = "learning"
    follows_horizon: ClassVar[bool] = True
    settled: ClassVar[tuple[str, ...]] = ("to", "group", "start")
    card: ClassVar[Card] = Card(
        buys=(
            "58% of what 8da4w costs a model of 172 thousand weights, with `start=0.3` and a rate "
            "that ends at zero (results/compress.jsonl)",
            "torchao recovered 68% of the rise of wikitext's perplexity (Llama-3-8B, 8da4w)",
        ),
        costs=(
            "rounding every weight, and what matmuls read, twice a step",
            "with adapters, a whole copy of each adapted weight until its gradient",
        ),
        helps="models of 4 bits, which lose most; a short training after the usual one",
        hurts="int8 weights, whose rounding costs next to nothing",
        source="arXiv 1712.05877; arXiv 2305.17888; arXiv 2406.06385",
    )

    @property
    def spec(self) -> QuantizationSpec:
        """Return how the model will be stored."""
        return PRESETS[self.to].with_group(self.group)

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Keep no best checkpoint where it might be one of a step that does not round."""
        return {"checkpoint.keep_best": False} if self.start else {}

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn of weights of 4 bits that still jump between codes in the last steps."""
        schedule = plan.schedule
        falls = plan.vision is None and schedule.kind not in ENDLESS
        if not falls or self.spec.matrices.dtype != "int4" or schedule.final_fraction <= HIGH_END:
            return None
        return Doubt(
            f"the rate ends at {schedule.final_fraction:.0%} of its peak, where weights of 4 bits "
            "still jump between codes: the codes that are stored are those of one moment",
            mend("schedule.final_fraction=0"),
        )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require groups that divide rows, whole weights in matmuls, and a schedule that ends."""
        plan, name = context.plan, self.name()
        if plan is None:
            return Supported()
        if not plan.model.pretrained and (refused := self._refuse_group(plan.model)):
            return refused
        for other, technique in plan.techniques.items():
            if getattr(technique, "gather", "fp32") != "fp32":
                return Unsupported(
                    f"{other} gathers weights in {technique.gather}, and the codes are those of "
                    "fp32 weights",
                    mend(f"techniques.{other}.gather=fp32"),
                    RefusalKind.COMBINATION,
                )
        if self.start and "cuda_graphs" in plan.techniques:
            return Unsupported(
                f"a graph that cuda_graphs recorded before {self.start:.0%} of the steps does not "
                "round",
                mend(f"techniques.{name}.start=0") | mend("-cuda_graphs"),
                RefusalKind.COMBINATION,
            )
        if self.start and plan.horizon_steps is None:
            return Unsupported(
                f"techniques.{name}.start = {self.start:g} is a share of schedule.steps or "
                "goal.steps, and the plan has neither",
                mend("schedule.steps=1000") | mend(f"techniques.{name}.start=0"),
            )
        if plan.vision is not None and self.to != "int8":
            return Unsupported(
                f"convolutions are stored in 8 bits a channel (int8), and "
                f"techniques.{name}.to = {self.to!r} is of the matrices of a decoder",
                mend(f"techniques.{name}.to=int8"),
            )
        return Supported()

    def _refuse_group(self, model: Any) -> Unsupported | None:
        """Return why the groups do not divide the rows of a model's linears; None where they do."""
        if not self.group or not self.spec.matrices.group:
            return None
        for linear, (columns, _) in block_linears(model).items():
            if columns % self.group:
                return Unsupported(
                    f"groups of {self.group} numbers do not divide the {columns} columns of "
                    f"{linear}",
                    self._grouped(_nearest_divisor(columns, self.group)),
                )
        return None

    def _grouped(self, group: int) -> Remedy:
        return mend(f"techniques.{self.name()}.group={group}")

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep no cast of a weight, and a rounded output matrix; round what is multiplied."""
        sizes = ledger.sizes
        if not sizes["layers"]:  # a network of images, whose rounded weights are kept
            rounded = replace(ledger.memory["parameters"], instants=KEPT)
            return ledger.with_line("fake_weights", rounded)
        linears = {
            key[:-3]: (int(sizes[key]), int(sizes[f"{key[:-3]}/out"]))
            for key in sizes
            if key.endswith("/in")
        }
        numbers = sum(inner * outer for inner, outer in linears.values())
        ledger = without_casts(ledger, linears)
        if sizes["activation_bytes"] == 4:
            ledger = ledger.with_line("fake_head", Line(4 * sizes["embedding"], ("loss", "turn")))
        ledger = self._merged(ledger, linears)
        return self._worked(ledger, numbers, sum(inner for inner, _ in linears.values()))

    def _merged(self, ledger: Ledger, linears: Mapping[str, tuple[int, int]]) -> Ledger:
        """Keep the weight of each adapted linear with its adapter merged, and find its gradient."""
        adapted = {name: ends for name, ends in linears.items() if name in ledger.linears}
        numbers = sum(inner * outer for inner, outer in adapted.values())
        if not numbers:
            return ledger
        for layer in range(int(ledger.sizes["layers"])):
            kept = ledger.memory.get(f"{layer}/residual")
            if kept is not None:
                ledger = ledger.with_line(f"{layer}/merged", replace(kept, bytes=4 * numbers))
        return ledger.with_flops("backward", 2 * ledger.sizes["layers"] * numbers)

    def _worked(self, ledger: Ledger, weights: float, reads: float) -> Ledger:
        """Price the rounding of weights and inputs; derived, and measured on no GPU."""
        sizes, work = ledger.sizes, dict(ledger.work)
        layers, dynamic = sizes["layers"], self.spec.activations != "none"
        count = sum(isinstance(w, Matmul) and n.endswith("/result") for n, w in work.items())
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            eager, kernels, fused = WEIGHT
            work[f"fake_weight/{phase}"] = Stream(
                phase, layers, eager * weights, kernels * max(1, count), fused * weights
            )
            if dynamic:
                eager, kernels, fused = READ
                read = sizes["tokens"] * reads
                work[f"fake_input/{phase}"] = Stream(
                    phase, layers, eager * read, kernels * max(1, count), fused * read
                )
        eager, kernels, fused = WEIGHT
        table = sizes["embedding"]
        work["fake_head/forward"] = Stream("forward", 1.0, eager * table, kernels, fused * table)
        return replace(ledger, work=work, sizes={**sizes, DERIVED: 1.0})

    def apply(self, build: Build) -> None:
        """Say how each matrix is rounded, and from which step on."""
        if build.plan.vision is not None:
            formats = image_formats(build.model)
        else:
            formats = formats_of(build.model, self.spec, self._grouped)
        rounding = {n: Rounding(kind, self.spec.activations) for n, kind in formats.items()}
        build.fake_quantized.update(rounding)
        begins = end_step(self.start, build.plan.horizon_steps) if self.start else 0
        assert begins is not None, "supports asks for a schedule that ends"
        build.values[FAKE] = lambda step: float(step >= begins)

    def active(self, build: Build) -> Evidence:
        """Show unit vectors to every matrix as it is now: what its codes stand for comes out."""
        rounds, now = build.rounds_now, build.now
        seen = _looked(build)
        try:
            build.now = {**now, FAKE: 1.0}
            later = seen if rounds else _looked(build)
        finally:
            build.now = now
        whole = 0 if rounds else sum(one.is_rounded and one.moved > 0 for one in seen)
        rounded = sum(one.is_rounded for one in later)
        moved = max((one.moved for one in later), default=0.0)
        active = 0 < rounded == len(later) and moved > 0 and not whole
        when = "" if rounds else f" in the steps after {self.start:.0%} of them, and none before"
        return Evidence(
            active=None if build.fake_quantized and not later else active,
            detail=f"{rounded} of {len(later)} matrices give what their {self.to} codes stand "
            f"for{when}; a weight is moved by up to {moved:.2g}",
            numbers={
                "matrices": len(later),
                "rounded": rounded,
                "moved": moved,
                "rounds": float(rounds),
            },
        )


class _Look(NamedTuple):
    """Hold what a matrix showed."""

    is_rounded: bool
    """Whether it gave what its codes stand for."""
    moved: float
    """How far the codes move a weight at most."""


def _looked(build: Build) -> list[_Look]:
    """Return what each matrix shows that this rank has rows of."""
    looks = []
    with torch.no_grad(), torch.autocast(build.device.type, enabled=False):
        for name, rounding in build.fake_quantized.items():
            module = _module(build, name)
            if build.plan.vision is not None:
                looks.append(_Look(*look_at_rounding(module)))
                continue
            shown = _shown(build, name, rounding)
            if shown is None:
                continue
            weight, result, unit = shown
            stored = quantize_nearest(weight, rounding.kind).dequantize()
            wanted = stored[: len(result), : result.size(1)] * unit
            near = 1e-5 * float(weight.abs().max())
            is_rounded = bool(((result - wanted).abs() <= near).all())
            looks.append(_Look(is_rounded, float((stored - weight).abs().max())))
    return looks


def _module(build: Build, name: str) -> nn.Module | None:
    """Return the module that owns a weight; None where it is on another rank."""
    try:
        return build.model.get_submodule(name.removesuffix(".weight"))
    except AttributeError:
        return None


def _shown(build: Build, name: str, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return rows of a matrix, what comes out of some of its numbers, and the input of each.

    None where a pipeline has it on another rank, or this rank has no row of it.
    """
    model: Any = build.model
    end, one = name.removesuffix(".weight"), torch.ones((), device=build.device)
    if end == "head":
        if model.head is None:
            return None
        rows = _rows(model.head.weight)
        proxy = SimpleNamespace(**vars(model), unembedding=rows)
        _, result = model.head_inputs.__func__(proxy, rows)
        return (rows, result, one) if len(rows) else None
    try:
        module: Any = model.get_submodule(end)
    except AttributeError:
        return None
    probe, weight = shallow_copy(module), _rows(module.weight)
    if not len(weight):
        return None
    probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False), "bias": None}
    forward = module.forward.__func__
    if isinstance(module, nn.Embedding):
        ids = torch.arange(len(weight), device=build.device)
        return weight, forward(probe, ids), one
    if isinstance(module, LoraLinear):
        whole = build.whole(f"{end}.lora_a", local_of(module.lora_a.detach()))
        own = {"lora_a": whole} | {
            key: _rows(value) for key, value in module._parameters.items() if key in OF_ROWS
        }
        probe._parameters |= {key: nn.Parameter(value) for key, value in own.items()}
        weight = probe.effective()
    units = torch.eye(min(UNITS, weight.size(1)), weight.size(1), device=build.device)
    read = fake_input(units, rounding.activations)
    return weight, forward(probe, units).t(), read[0, 0]


def _rows(parameter: Any) -> Tensor:
    """Return the first rows of a parameter that this rank has, fp32."""
    return plain(local_of(parameter.detach())[:ROWS])


def _nearest_divisor(columns: int, group: int) -> int:
    return min(divisors(columns), key=lambda size: (abs(size - group), -size))
