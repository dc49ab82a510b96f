"""Multiply the blocks' linears in 8-bit floating point.

Hopper and Ada multiply matrices of fp8 at twice the rate of bf16. Inputs, weights and gradients are
scaled so that their largest number fits, cast to fp8 (e4m3, and e5m2 for tensorwise gradients),
multiplied with fp32 accumulation, and scaled back: three products of every linear, by torchao's
Float8Linear. Weights, gradients and optimizer stay as they are. One scale a tensor is the fastest;
a scale a row follows outliers and costs more casts. Scales are powers of two here in both recipes:
fp8 then rounds a number alike whatever stands beside it, so cutting a batch into micro-batches or
over ranks hardly changes a result, and evidence can be read from bits. What it costs is at most one
bit of range. The magnitude that a scale is made from stays fp32: torchao has it in the operand's
bf16, of which a compiler uses the unrounded number in the kernel that finds it and the rounded one
in others. At a border between two scales, one operand in some 300, numbers were then cast by one
scale and divided by its double. Embedding, head and attention stay in the run's precision. On a CPU
the products are emulated: same rounding, no speed. `fsdp` and `zero` send such weights in fp8 where
their `gather` says so. Left out: delayed scales, MX formats. Source: torchao.float8;
arXiv 2209.05433.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._guards import TracingContext

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.remedy import mend
from headrace.costs.count import without_casts
from headrace.costs.float8 import TURNED, casts_of
from headrace.costs.ledger import Ledger
from headrace.costs.work import Matmul, Stream
from headrace.parallel.layout import shallow_copy
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

MULTIPLE = 16
"""Sizes of a fp8 matmul on a GPU must be multiples of this (torch._scaled_mm)."""
WIDE = 1024
"""Least features in and out of a linear in fp8, by default. On one H200, compiled: 1.18 times the
tokens/s at 2,048 features, 1.11 at 1,536, 1.02 at 1,024, 0.94 at 768 (techniques.jsonl). torchao's
own filter leaves out up to 4,096 in by 1,024 out."""
MANTISSA_BITS = 3
"""Bits of the mantissa of e4m3."""


class Float8Linear(Technique[Build]):
    """Multiply the blocks' linears in 8-bit floating point."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """One scale for a tensor, the fastest; or one for each row, the more exact."""
    multiple_of: int = Field(default=MULTIPLE, ge=1, le=1 << 16)
    """Linears both of whose sizes are multiples of this. On a GPU a multiple of 16."""
    min_size: int = Field(default=WIDE, gt=0, le=1 << 16)
    """Linears of at least so many features in and out; narrower ones lose more to casts than they
    gain."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "precision"
    halves: ClassVar[bool] = True
    stage: ClassVar[Stage] = Stage.LINEAR
    composes: ClassVar[tuple[str, ...]] = ("linear",)
    equality: ClassVar = "approximate"
    rounds: ClassVar = "operands"
    band: ClassVar[float] = 0.6  # measured 0.54 at 32 features, whose sums average little
    symptoms: ClassVar[tuple[str, ...]] = ("computation:products",)
    card: ClassVar[Card] = Card(
        buys=(
            "matrix products of linears at up to twice the rate (published peak)",
            "torchao measured +25% tokens/s tensorwise and +10% rowwise on Llama-3-8B, 8 x H100",
        ),
        costs=(
            "rounding every operand to 4 significant bits",
            "casts that read each operand twice",
            "With tensorwise, an operand's smallest numbers depend on the largest beside "
            "them, so on how the batch is cut over micro-batches and ranks",
            "rowwise depends on it only in the weights' gradient",
            "Tensor parallelism cuts what a scale is of: inside the band, not equal",
        ),
        helps="wide models (1,536 features and more) on Hopper or newer, compiled",
        hurts="narrow models, which min_size leaves out: casts outweigh their products; runs that "
        "are not compiled",
        source="https://github.com/pytorch/ao/tree/main/torchao/float8; arXiv 2209.05433",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require Ada, Hopper or newer; a CPU emulates it."""
        if find_spec("torchao") is None:
            return Unsupported(
                "torchao is not installed", "pip install 'headrace[quant]'", RefusalKind.PACKAGE
            )
        if context.device == "mps":
            return Unsupported(
                "Apple GPUs have no fp8",
                mend("device=cpu", text="device=cpu, which emulates it"),
                RefusalKind.DEVICE,
            )
        if context.device == "cuda":
            capability = context.capability
            if capability is None or capability < (8, 9):
                return Unsupported(
                    f"{context.device_name} has compute capability {context.capability_text}, "
                    "and fp8 products need 8.9",
                    "an Ada or Hopper GPU, or newer",
                    RefusalKind.DEVICE,
                )
            if self.multiple_of % MULTIPLE:
                return Unsupported(
                    f"multiple_of = {self.multiple_of}, and fp8 products need multiples of "
                    f"{MULTIPLE} on a GPU",
                    mend(f"techniques.float8_linear.multiple_of={MULTIPLE}"),
                )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep no cast of a weight: the matmul makes it anew from the fp32 weight."""
        sizes = ledger.sizes
        linears = [key[:-3] for key in sizes if key.endswith("/in")]
        if ledger.experts():  # which are no linears
            linears = [name for name in linears if not name.startswith("mlp.")]
        weights = {n: (int(sizes[f"{n}/in"]), int(sizes[f"{n}/out"])) for n in linears}
        fits = {n: ends for n, ends in weights.items() if self._fits(*ends)}
        if not fits:
            raise self._nothing_fits(set(weights.values()))
        ledger = without_casts(ledger, fits).with_linears(self.name(), fits)
        facts = {f"{name}/fp8": 1.0 for name in fits}
        return self._worked(replace(ledger, sizes={**sizes, **facts}), fits)

    def _worked(self, ledger: Ledger, fits: Mapping[str, tuple[int, int]]) -> Ledger:
        """Price matmuls at fp8's rate, and the passes that scale and cast their operands."""
        tokens, layers = ledger.sizes["tokens"], ledger.sizes["layers"]
        whole = self.recipe == "tensorwise"
        how = "uncompiled" if whole else f"with {self.recipe} scales"
        casts = {}
        for name, ends in fits.items():
            for phase, moved in casts_of(tokens, *ends).items():
                casts[f"{name}/casts_{phase}"] = Stream(
                    phase,
                    layers,
                    moved,
                    fused=TURNED * moved if whole else None,
                    unknown=f"float8_linear {how} does not say yet what it does to a step's time",
                )
        ledger = ledger.reworked(
            lambda name, piece: (
                replace(piece, precision="fp8")
                if name.partition("/")[0] in fits and isinstance(piece, Matmul)
                else piece
            )
        )
        return replace(ledger, work={**ledger.work, **casts})

    def _fits(self, inner: int, outer: int) -> bool:
        wide = min(inner, outer) >= self.min_size
        return wide and inner % self.multiple_of == 0 and outer % self.multiple_of == 0

    def _nothing_fits(self, sizes: set[tuple[int, int]]) -> ConfigError:
        """Return the error for linears of these sizes (in, out), none of which fits."""
        narrow = max(min(ends) for ends in sizes)
        linears = ", ".join(sorted(f"{outer} x {inner}" for inner, outer in sizes))
        return ConfigError(
            f"float8_linear takes linears whose sizes are multiples of {self.multiple_of} and "
            f"at least {self.min_size}, and this model has {linears}",
            mend(
                f"techniques.float8_linear.min_size={narrow}",
                text=f"techniques.float8_linear.min_size={narrow}, at a loss of speed",
            )
            if narrow < self.min_size
            else f"sizes (model.dim, model.ffn) that are multiples of {self.multiple_of}",
        )

    def apply(self, build: Build) -> None:
        """Replace every linear of the blocks whose sizes fit."""
        linears = {
            name: module
            for name, module in build.model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith("blocks.")
        }
        ranks = build.world.size("tensor")  # each holds a share of one of the two sizes
        names = [
            n
            for n, m in linears.items()
            if self._fits(m.in_features, m.out_features)
            and m.in_features % (ranks * self.multiple_of) == 0
            and m.out_features % (ranks * self.multiple_of) == 0
        ]
        if not names:
            raise self._nothing_fits({(m.in_features, m.out_features) for m in linears.values()})
        make = _maker(self.recipe, build)
        build.replace_linears(self.name(), names, make)

    def active(self, build: Build) -> Evidence:
        """Send unit vectors through the linears as they are now: rounded weights come out."""
        from torchao.float8.float8_linear import Float8Linear as Module

        linears = [m for m in build.model.modules() if isinstance(m, nn.Linear)]
        taken = [m for m in linears if isinstance(m, Module)]
        rounded = fine = numbers = 0
        for module in taken:
            weight, result = _unit_results(module, build)
            numbers += result.numel()
            rounded += int((~_is_fine(result)).sum())
            fine += int(_is_fine(weight).sum())
        how = "emulated " if taken and taken[0].config.emulate else ""
        return Evidence(
            active=0 < numbers == rounded and fine > 0,
            detail=f"{len(taken)} of {len(linears)} linears multiply in {how}fp8 ({self.recipe}): "
            f"{rounded} of {numbers} numbers of unit products have {MANTISSA_BITS} bits, where "
            f"{fine} of the weights have more",
            numbers={"linears": len(taken), "products": numbers, "rounded": rounded, "finer": fine},
        )


def _maker(recipe: str, build: Build) -> Any:
    """Return a function from a linear to torchao's fp8 linear over the same parameters."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Module

    _keep_magnitudes_in_fp32()
    plan = build.plan
    base = Float8LinearConfig.from_recipe_name(recipe)  # type: ignore[arg-type]
    config = replace(
        base,
        emulate=build.device.type != "cuda",
        round_scales_to_power_of_2=True,
        # The weights' gradient sums over tokens, whose count a GPU wants in multiples of 16.
        pad_inner_dim=plan.data.sequence_length // plan.mesh.context % MULTIPLE != 0,
    )

    return lambda linear: Module.from_float(linear, config)


@cache
def _keep_magnitudes_in_fp32() -> None:
    """Replace torchao's largest magnitude by the same in fp32, for good."""
    from torchao.float8 import float8_utils

    of_torchao = float8_utils.tensor_to_amax

    def in_fp32(x: Tensor, *given: Any, **named: Any) -> Tensor:
        if TracingContext.try_get() is not None:  # a compiler's; else it would be a copy of x
            x = x.float()
        return of_torchao(x, *given, **named).float()

    float8_utils.tensor_to_amax = in_fp32


def _unit_results(module: Any, build: Build) -> tuple[Tensor, Tensor]:
    """Return the first columns of this rank's part of a weight, and the module's result."""
    weight = getattr(module.weight, "_local_tensor", module.weight).detach()
    weight = weight[: len(weight) // MULTIPLE * MULTIPLE or len(weight)]
    probe = shallow_copy(module)  # the run's module with this rank's rows, untouched by hooks
    probe._parameters = {"weight": nn.Parameter(weight), "bias": None}
    units = torch.eye(MULTIPLE, weight.size(1), device=weight.device)
    with torch.no_grad(), build.autocast():
        result = type(module).forward(probe, units)
    count = min(MULTIPLE, weight.size(1))
    return weight[:, :count].float(), result[:count].float()


def _is_fine(values: Tensor) -> Tensor:
    """Return whether numbers have more bits than fp8 keeps."""
    return values.contiguous().view(torch.int32) & ((1 << (23 - MANTISSA_BITS)) - 1) != 0
