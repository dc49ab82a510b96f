"""Train low-rank adapters over a frozen model whose weights are stored in 4 or 8 bits.

With LoRA the frozen weights are most of the memory: four bytes each in fp32. They are only read, so
QLoRA stores those of the adapted linears in NF4, 4.1 bits a number, and makes each whole for the
length of a product, twice a step. The adapters stay fp32 and learn around the error of the storage.
The scales of NF4's blocks are 8-bit numbers themselves: the paper's double quantization, which is
always on. Rows are quantized by themselves (kernels/quantized_weight), so shards of any cut along
rows hold the same numbers. Where tensor ranks cut columns, each quantizes whole rows and keeps its
part; NF4 has to be cut between blocks of 64 numbers, int8 anywhere. `export --to hf` adds the
adapters into the weights as they were stored, not as they were before. Memory that a device has
left buys time back: the last `whole_blocks` hold the same rounded numbers whole in the run's dtype.
Left out: quantized embedding and head, paged optimizer state. Source: arXiv 2305.14314.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind, UnsupportedError
from headrace.core.remedy import mend
from headrace.costs.adapters import ROWS as CUT
from headrace.costs.adapters import SCALES
from headrace.costs.count import block_linears
from headrace.costs.ledger import DERIVED, Ledger
from headrace.costs.work import Phase, Stream
from headrace.kernels.quantized_weight import BLOCK, QuantizedWeight, quantize, quantized_bytes
from headrace.model.lora import LoraLinear
from headrace.parallel.layout import share
from headrace.plan.plan import Plan
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Supported,
    Unsupported,
)

WHOLE: Mapping[str, tuple[float, int, float]] = {"int8": (11.0, 2, 3.0), "nf4": (22.5, 4, 2.5)}
"""Bytes that making one number whole moves, in how many kernels, and when fused: code, fp32 and
bf16, between them in NF4 an index of four bytes for two numbers. Counted in `dequantize`
(kernels/quantized_weight); what scales of blocks and rows move is left out."""


class Qlora(AdapterTechnique):
    """Train low-rank adapters over a frozen model whose weights are stored in 4 or 8 bits."""

    base: Literal["nf4", "int8"] = "nf4"
    """How the frozen weights are stored: 4.1 bits a number, or 8 with a tenth of the error."""
    whole_blocks: int = Field(default=0, ge=0, le=4096)
    """Last blocks whose weights are rounded as `base` rounds them and then held whole, in the run's
    dtype: a step makes none of them whole, and computes the same. Memory trades for time in steps
    of one block."""

    composes: ClassVar[tuple[str, ...]] = (*AdapterTechnique.composes, "storage")
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        *AdapterTechnique.symptoms,
    )
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("8-bit states",)
    card: ClassVar[Card] = Card(
        buys="all that lora buys, and 28 of 32 bits of the adapted linears' weights (derived)",
        costs=(
            "making each weight whole twice a step",
            "the model starts off by the error of its storage, 9% of a weight in NF4 and 1% "
            "in int8 (of a normal distribution; a test holds it); double quantization of "
            "NF4's scales, always on, adds less than a thousandth to it and saves 0.36 of 4.5 bits "
            "(a test holds both)",
        ),
        helps="finetuning a model whose weights alone fill the memory",
        hurts="when lora fits: it is faster and starts exact",
        source="arXiv 2305.14314",
    )

    @property
    def stored(self) -> str:
        """Return how the frozen weights are stored."""
        return self.base

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require rows long enough to be smaller in few bits, and cuts between blocks of NF4."""
        plan = context.plan
        if not plan.model.pretrained:  # else shapes are known when weights are made
            if refused := self._refuse_whole(plan.model.layers):
                return refused
            linears = block_linears(plan.model)
            for name in CUT:
                if refused := self._refuse_cut(name, linears[name][0], plan.mesh.tensor):
                    return refused
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

    def _refuse_whole(self, layers: int) -> Unsupported | None:
        """Return why no weight would be left in few bits; None where one is."""
        if self.whole_blocks < layers:
            return None
        return Unsupported(
            f"whole_blocks = {self.whole_blocks} of {layers} leaves no weight in {self.base}",
            mend(f"techniques.{self.name()}.whole_blocks={layers - 1}"),
        )

    def _refuse_cut(self, name: str, columns: int, ranks: int) -> Unsupported | None:
        """Return why tensor ranks cannot cut the rows of a linear; None where they can."""
        is_chosen = not self.targets or name in self.targets
        if (
            self.base == "int8"
            or not is_chosen
            or all(share(columns, ranks, rank)[0] % BLOCK == 0 for rank in range(ranks))
        ):
            return None
        return Unsupported(
            f"nf4 has a scale for every {BLOCK} numbers of a row, and mesh.tensor = {ranks} cuts "
            f"the rows of {name}, of {columns} numbers, inside of these blocks",
            mend(f"techniques.{self.name()}.base=int8"),
            RefusalKind.COMBINATION,
        )

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

    def predict(self, ledger: Ledger) -> Ledger:
        """Count as lora does, with the adapted weights in few bits."""
        first_whole = int(ledger.sizes["layers"]) - self.whole_blocks

        def stored(layer: int, inner: int, outer: int) -> float | None:
            return quantized_bytes(outer, inner, self.base) if layer < first_whole else None

        return self._made_whole(self.predict_stored(ledger, stored))

    def _made_whole(self, ledger: Ledger) -> Ledger:
        """Make each stored weight whole before both of its matmuls, in the place of its cast.

        Derived: no step of it was measured on a GPU, nor that a compiler fuses all of it.
        """
        sizes, work = ledger.sizes, dict(ledger.work)
        every = {
            key[:-3]: sizes[key] * sizes[f"{key[:-3]}/out"] for key in sizes if key.endswith("/in")
        }
        chosen = [n for name, n in every.items() if not self.targets or name in self.targets]
        stored = max(0.0, sizes["layers"] - self.whole_blocks)
        if (cast := work.pop("weight_cast/forward", None)) is not None:
            left = 1 - sum(chosen) / sum(every.values()) * stored / sizes["layers"]
            if left > 0:
                work["weight_cast/forward"] = cast.with_bytes(lambda bytes: left * bytes)
        eager, kernels, fused = WHOLE[self.base]
        phases: tuple[Phase, ...] = ("forward", "backward")
        for phase in phases:
            work[f"whole_weight/{phase}"] = Stream(
                phase,
                stored,
                eager * sum(chosen),
                kernels * len(chosen),
                fused * sum(chosen),
            )
        scales = stored * self._whole_scales(sizes)
        return replace(ledger, work=work, sizes={**sizes, DERIVED: 1.0, SCALES: scales})

    def _whole_scales(self, sizes: Mapping[str, float]) -> float:
        """Return the bytes of a block's stored weights that each tensor rank has whole."""
        linears = [key[:-3] for key in sizes if key.endswith("/in")]
        return sum(
            quantized_bytes(int(sizes[f"{name}/out"]), 0, self.base)
            if name in CUT
            else quantized_bytes(0, int(sizes[f"{name}/in"]), self.base)
            for name in linears
            if not self.targets or name in self.targets
        )

    def apply(self, build: Build) -> None:
        """Replace the chosen linears, freeze all but the adapters, store the chosen weights."""
        weights, layers = set[str](), build.config.layers
        if refused := self._refuse_whole(layers):  # of a given model, whose blocks are known now
            raise UnsupportedError(refused.reason, refused.remedy)
        for name in self.adapt(build):
            weights.add(f"{name}.weight")
            linear, end = build.model.get_submodule(name), name.split(".", 2)[2]
            assert isinstance(linear, nn.Linear)
            ranks = build.plan.mesh.tensor if end in CUT else 1
            if refused := self._refuse_cut(end, linear.in_features, ranks):
                raise UnsupportedError(refused.reason, refused.remedy)

        def store(name: str, value: Tensor) -> Tensor:
            if name not in weights:
                return value
            layout = build.layouts[name]
            (_, begin), (_, count) = layout.offsets(build.world)
            if count == layout.shape[1]:
                weight = quantize(value, self.base)
            else:  # a row's scales are of all its numbers, so its matrix is read whole once more
                whole = build.source(name, torch.Size(layout.shape)).to(value.device, value.dtype)
                weight = quantize(whole, self.base).columns(begin, count)
            is_whole = _layer_of(name) >= layers - self.whole_blocks
            return weight.dequantize() if is_whole else weight

        build.storage.append(store)

    def active(self, build: Build) -> Evidence:
        """Report bits of a stored number, adapters with a gradient, and frozen weights without."""
        adapters = super().active(build)
        weights = {
            name: getattr(m.weight, "_local_tensor", m.weight)
            for name, m in build.model.named_modules()
            if isinstance(m, LoraLinear)
        }
        stored = {name: w for name, w in weights.items() if isinstance(w, QuantizedWeight)}
        first_whole = build.config.layers - self.whole_blocks
        wanted = {name for name in weights if _layer_of(name) < first_whole}
        count = sum(weight.numel() for weight in stored.values())
        stores = f"{len(stored)} weights are stored in"
        bits = 8 * sum(weight.nbytes for weight in stored.values()) / max(1, count)
        whole = f"; {len(weights) - len(stored)} are held whole" if self.whole_blocks else ""
        return Evidence(
            active=bool(adapters.active) and stored.keys() == wanted and bits < 32,
            detail=f"{adapters.detail}; {stores} {bits:.2f} bits a number{whole}",
            numbers={**adapters.numbers, "bits_per_weight": bits},
        )


def _layer_of(name: str) -> int:
    """Return the block that a linear or its weight is of, from its full name."""
    return int(name.split(".")[1])
