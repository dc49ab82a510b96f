"""Cut parameters, gradients and optimizer states into slices, one for each rank, with FSDP2.

The techniques that share this differ in what a step keeps whole, and for how long: `fsdp` gathers a
block's weights for its forward and again for its backward pass, `zero` all of them once a step. The
mechanism is torch's `fully_shard` (PyTorch FSDP: arXiv 2304.11277). The loss scale holds one over
the targets of the whole batch, so gradients are summed, never averaged.

A group of weights that are gathered together has one dtype. Beside matrices that are stored in bf16
its vectors and routers, which stay fp32, are whole on every rank, and their gradients are summed.

With `mesh.replicate` the ranks of `shard` are that many groups, each of which holds one copy of the
model in slices (hybrid sharding: arXiv 2304.11277, section 3.2.2). Weights are gathered and
gradients scattered within a group, and each slice of the summed gradients is added up over the
groups once a step. A group fits into one node, whose links are fast; only slices of gradients cross
the slow ones, 1 / slices of what replicas would send there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.core.units import divisors
from headrace.costs.count import FP32
from headrace.costs.float8 import fp8_slices, is_fp8, without_weight_casts
from headrace.costs.ledger import Instant, Ledger, Line, Slicing
from headrace.costs.slices import (
    DividedExperts,
    experts_work,
    retained_bytes,
    sliced_work,
)
from headrace.costs.work import Work
from headrace.parallel.float8_gather import Float8Gather
from headrace.parallel.layout import is_dtensor
from headrace.parallel.tables import free_after_evaluation, hand_over_gathered, own_tables
from headrace.parallel.tensor import peers_of
from headrace.plan.technique import (
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASTS = ("weight_cast", "head_cast")
"""Pieces of work that bf16 weights do not need; a gradient is cast as it is scattered."""
SUMMED = ("reduce/gradients", "reduce/copy")
"""Pieces in whose place gradients are scattered."""
SUMMED_EXPERTS = ("experts/gradients", "experts/copy")
"""Pieces in whose place gradients of divided experts are scattered, where ranks share these."""
FLOAT8 = "float8_linear"
"""The technique whose weights `gather = fp8` is about."""
GATHER8 = "sliced fp8"
"""Name of the note that holds what gathers in fp8."""
BEGINS, KEPT = "sliced begins", "sliced kept"
"""Names of notes: whether a step's first micro-batch comes, and whether blocks had their whole
weights whenever a later one came."""
FREED = "sliced freed"
"""Name of the note that holds whether blocks free their weights after the forward pass."""
APART = "sliced apart"
"""Name of the note that holds what is whole beside matrices of another dtype."""
SHARDED_LINES = ("parameters", "gradients", "optimizer")
THROUGH: tuple[Instant, ...] = ("loss", "turn", "backward")
"""When gathered weights are held."""
LITTLE = 0.05
"""Share of a rank's predicted peak that gathered weights may add before they are freed, where that
is left open: below it a second gather costs more than its memory is worth."""


class SlicingTechnique(Technique[Build]):
    """A technique of this kind keeps a slice of every parameter on each of the ranks."""

    gather: Literal["fp32", "bf16", "fp8"] = "fp32"
    """What weights are gathered in. fp32 sends them as they are stored, which is in bf16 where
    `bf16_parameters` is on; bf16 halves the traffic and keeps fp32 slices. With fp8 those that
    `float8_linear` casts anyway are cast before, and others are sent in the run's dtype."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed in. Of two numbers in bf16 whose sum is kept in bf16 it is the same
    sum in either, so two slices of weights that are stored in bf16 are always summed in bf16."""
    prefetch: int = Field(default=1, ge=0, le=4)
    """Blocks whose weights are gathered ahead; tuner range 0 to 2."""

    room: ClassVar[str] = "parallel"
    stage: ClassVar[Stage] = Stage.MATERIALIZE
    claims: ClassVar[tuple[str, ...]] = ("sync",)
    composes: ClassVar[tuple[str, ...]] = ("shard", "layouts", "after_update")
    timed: ClassVar[bool] = True
    gathers_once: ClassVar[bool] = False
    """whether weights stay gathered over all micro-batches of a step"""

    def frees_weights(self) -> bool | None:
        """Return whether a block's weights are freed after its forward pass; None is left open."""
        return not self.gathers_once

    def sends_each(self) -> bool:
        """Return whether the gradients of every micro-batch are sent, instead of their sum."""
        return False

    def _adds_pairs(self, sizes: Mapping[str, float]) -> bool:
        """Return whether the gradients of a group are summed in the dtype of its weights.

        That is where each sum is of two numbers and rounded to that dtype at once in any case.
        """
        alone = sizes["replicate_ranks"] == sizes["micro_batches"] == 1
        return self.gather == self.reduce == "fp32" and sizes["slices_ranks"] == 2 and alone

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require several ranks."""
        if context.ranks < 2:
            return Unsupported(
                "one process has nothing to share",
                mend("mesh.data=2", text="mesh.data=2 under torchrun"),
            )
        mesh = context.plan.mesh
        if mesh.replicate > 1 and mesh.replicate == mesh.data * mesh.context:
            fewer = max(n for n in divisors(mesh.data) if n < mesh.data)
            return Unsupported(
                f"mesh.replicate = {mesh.replicate} makes groups of one rank, which hold whole "
                "weights",
                mend(f"mesh.replicate={fewer}")
                | mend("mesh.replicate=1", f"-{self.name()}", "+data_parallel"),
            )
        if "bf16" in (self.gather, self.reduce) and context.precision != "bf16":
            return Unsupported(
                f"the run computes in {context.precision}; gathering in bf16 would round it",
                mend("model.precision=bf16")
                | mend(
                    f"techniques.{self.name()}.gather=fp32", f"techniques.{self.name()}.reduce=fp32"
                ),
            )
        return self._gathers_fp8(context) if self.gather == "fp8" else Supported()

    def _gathers_fp8(self, context: Context) -> Supported | Unsupported:
        """Require linears that cast their weights by one scale a tensor."""
        key, half = f"techniques.{self.name()}.gather", context.precision == "bf16"
        plain = mend(f"{key}={'bf16' if half else 'fp32'}")
        linears = context.plan.techniques.get(FLOAT8)
        if linears is None:
            return Unsupported(
                f"{key} = fp8 sends what {FLOAT8} casts to fp8, and the plan has none",
                mend(f"+{FLOAT8}") | plain,
                RefusalKind.COMBINATION,
            )
        recipe = getattr(linears, "recipe", "")
        if recipe != "tensorwise":
            return Unsupported(
                f"{key} = fp8 sends numbers under one scale a tensor, and {FLOAT8} is {recipe}",
                mend(f"techniques.{FLOAT8}.recipe=tensorwise") | plain,
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Count slices of all three, two blocks' gathered weights, and gradients not yet sent.

        Several micro-batches add their gradients up whole, in what they are summed in.

        On a host a rank holds more: gloo gathers into a copy of a block's weights and scatters from
        a copy of the gradients (`empty` in its `_allgather_base_`, `clone` in its
        `_reduce_scatter_base_`), where NCCL works on torch's own buffers. Of small models that was
        7 to 18% of the peak. Left out on any device: a block's gradients in the buffer that they
        are sent from, 6% where they were more than the activations of the last block.
        """
        ranks, divided = ledger.sizes["slices_ranks"], DividedExperts.of(ledger)
        whole, through = ledger, THROUGH
        if self._is_narrow(whole):  # autocast finds them in its dtype
            left = _cast_share(whole)
            ledger = ledger.without(["head_cast"])
            ledger = ledger.scaled(lambda name: name.endswith("/weight_cast"), left)
        gradients = ledger.memory.get("gradients")
        for name in SHARDED_LINES:
            if line := ledger.memory.get(name):
                own = min(line.bytes, getattr(divided, name))
                bytes = (line.bytes - own) / ranks + own / divided.slices
                ledger = ledger.with_line(name, replace(line, bytes=bytes))
        if gradients is not None and ledger.sizes["micro_batches"] > 1 and not self.sends_each():
            summed = gradients.bytes * (0.5 if self.reduce == "bf16" else 1.0)
            more = max(0.0, summed - ledger.memory["gradients"].bytes)
            ledger = ledger.with_line("whole_gradients", Line(more, through))
        few, every = (retained_bytes(self._slicing(whole, freed=f)) for f in (True, False))
        ledger = ledger.with_line("gathered", Line(few, through))
        freed = self.frees_weights()
        if freed is None:
            halved = ledger.sizes.get("stored_halves") and not self._is_narrow(whole)
            freed = (every - few) / (2 if halved else 1) > LITTLE * ledger.peak()[1]
        if not freed:
            ledger = ledger.with_line("gathered", Line(every, through))
        slicing = self._slicing(whole, freed=freed)
        work = dict(self._worked(replace(whole, sliced=slicing)))
        sizes = {**ledger.sizes, "slices": ranks}
        return replace(ledger, sizes=sizes, work=work, sliced=slicing)

    def _is_narrow(self, ledger: Ledger) -> bool:
        """Return whether what is not gathered in fp8 is gathered in bf16."""
        return self.gather == "bf16" or (
            self.gather == "fp8" and ledger.sizes["stream_bytes"] < FP32
        )

    def _worked(self, ledger: Ledger) -> Iterator[tuple[str, Work]]:
        """Update slices; put gathers and scatters, with their copies, in the place of sums."""
        sizes, narrow, divided = ledger.sizes, self._is_narrow(ledger), DividedExperts.of(ledger)
        fp8 = self.gather == "fp8"
        if fp8:
            ledger = without_weight_casts(ledger)
        for name, piece in ledger.work.items():
            what = name.partition("/")[0]
            if name in SUMMED_EXPERTS:
                if divided.slices == 1:
                    yield name, piece
            elif piece.phase == "optimizer" and what != "count":
                if name not in SUMMED:
                    yield name, piece.with_bytes(lambda bytes: bytes / sizes["slices_ranks"])
            elif not (narrow and what in CASTS):
                yield name, piece
            elif what == "weight_cast" and (left := _cast_share(ledger)):
                yield name, piece.with_bytes(lambda bytes, left=left: bytes * left)
        assert ledger.sliced is not None
        freed, every = ledger.sliced.freed, sizes["micro_batches"] if self.gathers_once else 1.0
        yield from sliced_work(ledger)
        if fp8:
            cast = [m.numbers for name, m in ledger.matrices.items() if is_fp8(ledger, name)]
            yield from fp8_slices(sizes, cast, {"forward": 1 / every, "backward": 1.0 * freed})
        if divided.slices > 1:
            yield from experts_work(ledger, divided)

    def _slicing(self, ledger: Ledger, *, freed: bool) -> Slicing:
        """Return how slices of the model are gathered and scattered."""
        return Slicing(
            ledger,
            freed=freed,
            gathers_once=self.gathers_once,
            sends_each=self.sends_each(),
            narrow=self._is_narrow(ledger),
            fp8=self.gather == "fp8",
            summed=FP32 * (0.5 if self.reduce == "bf16" else 1.0),
            pairs=self._adds_pairs(ledger.sizes),
        )

    def apply(self, build: Build) -> None:
        """Shard each block, then the rest, as their weights become real."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        assert build.world.mesh is not None
        copies = build.world.size("replicate") > 1
        options: dict[str, Any] = {
            "mesh": build.world.mesh[("replicate", "slices") if copies else "slices"],
            "mp_policy": self._precision(build),
        }
        float8 = self._float8(build)

        frees_blocks = self._frees(build)
        whole = _left_whole(build)
        apart: set[nn.Parameter] = set()
        build.notes[APART] = apart

        def shard(module: nn.Module) -> None:
            root = module is build.model  # its weights are needed again at once
            frees = frees_blocks and not root
            left = {p for n, p in build.model.named_parameters() if n in whole} | apart
            for table in own_tables(build.model) if root else ():
                fully_shard(table, reshard_after_forward=False, ignored_params=left, **options)
            for part in () if root else _divided(build, module):
                among: dict[str, Any] = {**options, "mesh": build.world.experts}
                among["shard_placement_fn"] = _place_experts(build)
                fully_shard(part, reshard_after_forward=frees, ignored_params=left, **among)
            apart.update(_of_another_dtype(module, left))
            fully_shard(module, reshard_after_forward=frees, ignored_params=left | apart, **options)
            if float8 is not None:
                float8.take(module)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)  # the loss is scaled already: a sum
                    part.set_force_sum_reduction_for_comms(True)  # gloo has no other
            if root:
                _take_over(build)
                if build.model.head in own_tables(build.model):
                    hand_over_gathered(build.model.head)
                self._order(build)
                module.register_forward_hook(free_after_evaluation)
                if float8 is not None:  # before FSDP2 lets its streams run on
                    module.register_forward_pre_hook(float8.refresh, prepend=True)

        build.shard.append(shard)
        build.sync = self._communicate

    def _frees(self, build: Build) -> bool:
        """Return whether blocks free their weights, as the plan's prediction has it."""
        freed = self.frees_weights()
        if freed is None:
            sliced = build.predicted(build.plan).sliced
            freed = sliced is None or sliced.freed
        build.notes[FREED] = freed
        return freed

    def _communicate(self, build: Build, last: bool) -> None:
        """Say whether the coming backward pass sends gradients and frees weights."""
        from torch.distributed.fsdp import FSDPModule

        root, kept = build.model, self.gathers_once
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last or self.sends_each())
        root.set_requires_all_reduce(last)  # over the groups of `mesh.replicate`
        if kept:
            root.set_reshard_after_backward(last)
            if not build.notes.get(BEGINS, True):
                whole = not any(is_dtensor(p) for p in build.model.blocks.parameters())
                build.notes[KEPT] = build.notes.get(KEPT, True) and whole
            build.notes[BEGINS] = last
        root.set_is_last_backward(last)

    def _float8(self, build: Build) -> Float8Gather | None:
        """Make and note what gathers in fp8, where that is asked for."""
        if self.gather != "fp8":
            return None
        group = build.world.group("slices")
        float8 = Float8Gather(None if group is None else peers_of(group))
        build.notes[GATHER8] = float8
        build.after_update.append(float8.outdate)
        return float8

    def _precision(self, build: Build) -> "MixedPrecisionPolicy":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        gather = self.gather
        if gather == "fp8":
            gather = "bf16" if build.dtype is torch.bfloat16 else "fp32"
        sliced = build.predicted(build.plan).sliced
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if gather == "bf16" else None,
            reduce_dtype=None if sliced and sliced.pairs else DTYPES[self.reduce],
            cast_forward_inputs=False,
        )

    def _order(self, build: Build) -> None:
        """Order what is gathered ahead of what, in both directions; tables stay gathered."""
        model, tables = build.model, own_tables(build.model)
        blocks = list(model.blocks.values())
        ends = [[table] if table in tables else [] for table in (model.embed, model.head)]
        line = [*ends[0], *blocks, *ends[1]]
        for index, module in enumerate(line):
            fully = cast("FSDPModule", module)
            fully.set_modules_to_forward_prefetch(
                _sliced(*line[index + 1 : index + 1 + self.prefetch])
            )
            behind = [m for m in line[max(0, index - self.prefetch) : index] if m not in tables]
            fully.set_modules_to_backward_prefetch(_sliced(*behind[::-1]))

    def active(self, build: Build) -> Evidence:
        """Report how many of all bytes of parameters this rank holds."""
        sharded = [p for p in build.model.parameters() if is_dtensor(p)]
        here = sum(p.to_local().nbytes for p in sharded)
        whole = sum(p.nbytes for p in sharded)
        left, apart = _left_whole(build), build.notes.get(APART, set())
        loose = [
            name
            for name, p in build.model.named_parameters()
            if not is_dtensor(p) and name not in left and p not in apart
        ]
        ranks, kept = build.world.size("slices"), build.notes.get(KEPT)
        own = "" if kept is None else f"; {'all' if kept else 'not all'} kept within a step"
        if kept is None and not build.notes.get(FREED, True):
            own = "; blocks keep gathered weights for the backward pass"
        groups = {p.device_mesh.size() // p.device_mesh.size(-1) for p in sharded}
        wanted = build.world.size("replicate")
        if wanted > 1:
            own += f", in {' or '.join(map(str, sorted(groups)))} groups"
        shared = bool(sharded) and not loose and (here < whole or ranks == 1)
        numbers = {"bytes": here, "whole_bytes": whole, "ranks": ranks, "groups": max(groups)}
        if GATHER8 in build.notes:
            sent = build.notes[GATHER8].sent()
            shared &= sent.weights > 0 and not sent.others
            numbers |= {"fp8_weights": sent.weights, "fp8_bytes": sent.bytes}
            own += f"; {sent.weights} of {sent.weights + sent.others} fp8 weights were gathered "
            own += f"in fp8, {sent.bytes:,} bytes"
        return Evidence(
            active=shared and kept is not False and groups == {wanted},
            detail=f"holds {here:,} of {whole:,} bytes of parameters over {ranks} ranks"
            + (f"; not {', '.join(loose)}" if loose else "")
            + own,
            numbers=numbers,
        )


def _sliced(*blocks: nn.Module) -> "list[FSDPModule]":
    """Return the blocks, each with the part of it that is sliced over other ranks."""
    from torch.distributed.fsdp import FSDPModule

    return [part for block in blocks for part in block.modules() if isinstance(part, FSDPModule)]


def _cast_share(ledger: Ledger) -> float:
    """Return the share of autocast's copies that weights have which are gathered in no other dtype.

    These are experts that no other rank has.
    """
    divided, line = DividedExperts.of(ledger), ledger.memory.get("0/weight_cast")
    if divided.slices > 1 or line is None or not line.bytes:
        return 0.0
    return min(1.0, divided.parameters / 2 / ledger.sizes["layers"] / line.bytes)


def _left_whole(build: Build) -> set[str]:
    """Return the names of parameters that are not sliced beside experts that ranks divide.

    Where one rank of a group holds an expert, nobody shares it. Else a layer's experts are sliced
    over other ranks than the rest of their block, and what else the layer has, its router, is whole
    on each rank.
    """
    experts = {name for name, layout in build.layouts.items() if "expert" in layout.split}
    if build.world.experts is None:
        return experts
    parts = tuple({name.rpartition(".")[0] + "." for name in experts})
    return {name for name in build.layouts if name not in experts and name.startswith(parts)}


def _of_another_dtype(module: nn.Module, left: set[nn.Parameter]) -> set[nn.Parameter]:
    """Return what learns in fp32 beside matrices in bf16, of the weights that come together next.

    Args:
        module: whose weights are about to be sliced, but for those that are already.
        left: parameters that are not sliced.
    """
    own = {p for p in module.parameters() if p.requires_grad and not is_dtensor(p)} - left
    wide = {p for p in own if p.dtype != torch.bfloat16}
    return wide if wide < own else set()


def _take_over(build: Build) -> None:
    """Note that FSDP2 adds up the gradients of what it has sliced."""
    for name, p in build.model.named_parameters():
        if is_dtensor(p):
            layout = build.layouts[name]
            layout.partial = layout.partial - {"shard", "expert_copies"}


def _divided(build: Build, block: nn.Module) -> list[nn.Module]:
    """Return the modules of a block whose experts are sliced over `world.experts`."""
    if build.world.experts is None:
        return []
    own = {p for n, p in build.model.named_parameters() if "expert" in build.layouts[n].split}
    return [m for m in block.modules() if own & set(m.parameters(recurse=False))]


def _place_experts(build: Build) -> Any:
    """Return what chooses the dimension along which the experts of a rank are sliced.

    It is that of whole experts where they come out even, else that of each one's rows.
    """
    from torch.distributed.tensor import Shard

    ranks = build.world.size("expert_slices")

    def place(parameter: nn.Parameter) -> Any:
        rows = parameter.size(0) % ranks and not parameter.size(1) % ranks
        return Shard(1 if rows else 0)

    return place
