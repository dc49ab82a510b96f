"""Train low-rank adapters over a frozen model whose weights are stored in 4 or 8 bits.

With LoRA the frozen weights are most of the memory: four bytes each in fp32. They are only read, so
QLoRA stores those of the adapted linears in NF4, 4.1 bits a number, and makes each whole for the
length of a product, twice a step. The adapters stay fp32 and learn around the error of the storage.
Rows are quantized by themselves (kernels/quantized_weight), so shards of any cut hold the same
numbers, and `export --to hf` adds the adapters into the weights as they were stored, not as they
were before. Left out: quantized embedding and head, paged optimizer state. Source: arXiv
2305.14314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.count import block_linears
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Phase, Stream
from headrace.kernels.quantized_weight import QuantizedWeight, quantize, quantized_bytes
from headrace.model.lora import (
    LoraLinear,
    adapt_linears,
    adapter_evidence,
    over_random_weights,
    with_adapters_alone,
)
from headrace.plan.plan import Plan
from headrace.plan.symptoms import LoopChange
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

WHOLE: Mapping[str, tuple[float, int, float]] = {"int8": (11.0, 2, 3.0), "nf4": (22.5, 4, 2.5)}
"""Bytes that making one number whole moves, in how many kernels, and when fused: code, fp32 and
bf16, between them in NF4 an index of four bytes for two numbers. Counted in `dequantize`
(kernels/quantized_weight); what scales of blocks and rows move is left out."""


class Qlora(Technique[Build]):
    """Train low-rank adapters over a frozen model whose weights are stored in 4 or 8 bits."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of an adapter; tuner range 8 to 256."""
    alpha: float = Field(default=32.0, gt=0, le=4096)
    """The correction is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Ends of names of the linears that are stored in few bits and adapted; empty is all linears of
    the blocks."""
    base: Literal["nf4", "int8"] = "nf4"
    """How the frozen weights are stored: 4.1 bits a number, or 8 with a tenth of the error."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.LINEAR
    composes: ClassVar[tuple[str, ...]] = ("linear", "frozen", "storage")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:optimizer",
        "memory capacity:gradients",
    )
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("8-bit states",)
    card: ClassVar[Card] = Card(
        buys="all that lora buys, and 28 of 32 bits of the adapted linears' weights (derived)",
        costs=(
            "making each weight whole twice a step",
            "the model starts off by the error of its storage, 9% of a weight in NF4 and 1% "
            "in int8 (of a normal distribution; a test holds it)",
        ),
        helps="finetuning a model whose weights alone fill the memory",
        hurts="when lora fits: it is faster and starts exact",
        source="arXiv 2305.14314",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require rows long enough to be smaller in few bits; refuse tensor parallelism."""
        plan = context.plan
        if plan.mesh.tensor > 1:
            return Unsupported(
                "adapters and quantized weights do not say yet how they are split over tensor "
                "ranks",
                context.whole("tensor"),
                RefusalKind.COMBINATION,
            )
        if not plan.model.pretrained and (bits := self._bits(plan)) >= 32:
            return Unsupported(
                f"rows so short take {bits:.1f} bits a number in {self.base} with their scales, "
                "and 32 as they are",
                mend(f"techniques.{self.name()}.base=int8")
                if self.base == "nf4"
                else mend(f"-{self.name()}", "+lora"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def _bits(self, plan: Plan) -> float:
        """Return the bits a number takes in the dense linears that it stores; 0 without any."""
        dense = not any(
            "parts.mlp" in t.claims and t.equality != "exact" for t in plan.techniques.values()
        )
        shapes = [
            (outer, inner)
            for name, (inner, outer) in block_linears(plan.model).items()
            if (name in self.targets or not self.targets) and (dense or name.startswith("mixer."))
        ]
        bytes_stored = sum(quantized_bytes(rows, columns, self.base) for rows, columns in shapes)
        return 8 * bytes_stored / max(1, sum(rows * columns for rows, columns in shapes))

    def doubt(self, plan: Any) -> Doubt | None:
        """Refuse adapters of random weights, which stay random: there is nothing to adapt."""
        return over_random_weights(self.name(), plan.model)

    def predict(self, ledger: Ledger) -> Ledger:
        """Count as lora does, with the adapted weights in few bits."""
        quantized = with_adapters_alone(
            ledger,
            self.name(),
            self.targets,
            self.rank,
            stored=lambda inner, outer: quantized_bytes(outer, inner, self.base),
        )
        return self._made_whole(quantized)

    def _made_whole(self, ledger: Ledger) -> Ledger:
        """Make each stored weight whole before both of its matmuls, in the place of its cast.

        Derived: no step of it was measured on a GPU, nor that a compiler fuses all of it.
        """
        sizes, work = ledger.sizes, dict(ledger.work)
        every = {
            key[:-3]: sizes[key] * sizes[f"{key[:-3]}/out"] for key in sizes if key.endswith("/in")
        }
        chosen = [n for name, n in every.items() if not self.targets or name in self.targets]
        if (cast := work.pop("weight_cast/forward", None)) is not None:
            left = 1 - sum(chosen) / sum(every.values())
            if left > 0:
                work["weight_cast/forward"] = cast.with_bytes(lambda bytes: left * bytes)
        eager, kernels, fused = WHOLE[self.base]
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            work[f"whole_weight/{phase}"] = Stream(
                phase,
                sizes["layers"],
                eager * sum(chosen),
                kernels * len(chosen),
                fused * sum(chosen),
            )
        return replace(ledger, work=work, sizes={**sizes, DERIVED: 1.0})

    def apply(self, build: Build) -> None:
        """Replace the chosen linears, freeze all but the adapters, store the chosen weights."""
        names = adapt_linears(build, self.name(), self.targets, rank=self.rank, alpha=self.alpha)
        weights = {f"{name}.weight" for name in names}

        def store(name: str, value: Tensor) -> Tensor:
            return quantize(value, self.base) if name in weights else value

        build.storage.append(store)

    def active(self, build: Build) -> Evidence:
        """Report bits of a stored number, adapters with a gradient, and frozen weights without."""
        active, detail, numbers = adapter_evidence(build.model, build.optimizers.values())
        weights = [
            getattr(m.weight, "_local_tensor", m.weight)
            for m in build.model.modules()
            if isinstance(m, LoraLinear)
        ]
        stored = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        count = sum(weight.numel() for weight in stored)
        bits = 8 * sum(weight.nbytes for weight in stored) / max(1, count)
        return Evidence(
            active=active and len(stored) == len(weights) and bits < 32,
            detail=f"{detail}; {len(stored)} weights are stored in {bits:.2f} bits a number",
            numbers={**numbers, "bits_per_weight": bits},
        )
