"""Keep matrices in bf16, and their gradients too, without losing what an update adds.

Under autocast every fp32 weight is cast to bf16 for its product, and the cast is kept for the
backward pass. Here the weight is bf16 in the first place: no cast, half the bytes. What is hard is
the update: mostly smaller than half of bf16's last place, it would round away. `rounding` says how
it is kept (kernels/bf16_weight). "master": the optimizer holds the 16 bits that bf16 leaves out, so
weight and rest are an fp32 master copy in 4 bytes; the model sees it rounded to the nearest.
"stochastic": no master; the update is computed in fp32 and written with stochastic rounding, noise
that is a pure function of seed, matrix, step and element: a resume, another number of ranks and
replicas round alike. Moments are fp32 in both. On a GPU one kernel does the update and the clipping
(kernels/adamw); elsewhere torch's fused AdamW does, on fp32 slices.

A gradient is bf16 where it is computed once a step: the number that the matmul gave, which the
baseline only stores wider. Where micro-batches or ranks add gradients up they are fp32, so that a
sum rounds nowhere; that costs their half. Two replicas whose sums go beside the backward pass add
two numbers, and round them once in bf16 as in fp32. FSDP2 adds them up in fp32 too, and rounds the
sum once, to the dtype of its slices; a tied table's two gradients meet in bf16 there. Clipping
multiplies a gradient in fp32, inside the update. Vectors, what routers choose by, and on a host
tables that are looked up stay fp32, as do softmax, norms and the loss.
Left out: bf16 moments. Source: arXiv 2010.06192.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build, Route
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.decoder_work import stored_in_bf16
from headrace.costs.ledger import Ledger
from headrace.costs.slices import beside_halves
from headrace.costs.work import CUSTOM_COMPILED, EAGER, Collective, Stream, Work
from headrace.kernels.adamw import KERNEL, Noise
from headrace.kernels.bf16_weight import keys_of, places
from headrace.kernels.launches import COUNTS
from headrace.optim.bf16_adamw import SLICE_NUMBERS, Bf16AdamW, local_state
from headrace.parallel.layout import is_dtensor, local_box, local_of
from headrace.plan.plan import Plan
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

FP32 = ("router.weight",)
"""How the names of matrices end that stay fp32: a router rounds what it compares."""
SUMMED_EARLY = "reduce/gradients_last"
"""The piece of work that replicas have whose gradients are summed beside the backward pass."""
TABLES = ("embed.weight", "position.weight")
"""How the names of tables end, which are looked up, not multiplied. On a host torch adds up their
gradient in the table's own dtype, where bf16 would lose a frequent token's; so they stay fp32
there. On a GPU it is added up in fp32."""
SLICE_LAUNCHES = 30
"""Eager kernels that the host takes as long for as for one slice's update by torch's operations.
Without the fused kernel a step of 160m in 60 slices took 66.0 ms for 35.7 (natural.jsonl, H100)."""
TEMPORARIES = 4
"""fp32 copies of a slice that the update in slices holds at once; measured."""


class Bf16Parameters(Technique[Build]):
    """Keep matrices and their gradients in bf16."""

    rounding: Literal["master", "stochastic"] = "master"
    """How small updates survive: 16 more bits of each weight in the optimizer, or by chance."""
    fused: bool | None = None
    """Whether one Triton kernel does the whole update. Left open: on a GPU that has Triton."""

    rest: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    settled: ClassVar[tuple[str, ...]] = ("rounding",)
    """What no master costs shows late in a run, where no trial of 50 steps looks."""
    room: ClassVar[str] = "precision"
    halves: ClassVar[bool] = True
    stage: ClassVar[Stage] = Stage.MATERIALIZE
    composes: ClassVar[tuple[str, ...]] = ("storage", "routes", "block_forward")
    equality: ClassVar = "approximate"
    rounds: ClassVar = "state"
    band: ClassVar[float] = 0.05  # bf16's own: products have the operands that autocast gives them
    symptoms: ClassVar[tuple[str, ...]] = (
        "memory capacity:parameters",
        "memory capacity:gradients",
        "memory bandwidth:optimizer",
    )
    card: ClassVar[Card] = Card(
        buys=(
            "2 bytes of each weight, 2 of its gradient and the 2 of autocast's kept cast",
            "14 bytes a number with a master and 12 without, where fp32 has 16 (derived)",
        ),
        costs=(
            "with stochastic rounding, noise of bf16's last place in every weight (arXiv "
            "2010.06192)",
            "no saving in gradients that are added up",
        ),
        helps="models whose weights fill the memory, in one micro-batch a step",
        hurts="small learning rates late in a run, for stochastic rounding: its noise does not "
        "shrink with the update",
        source="arXiv 2010.06192; arXiv 1710.03740 (master copies)",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.precision`: bf16 weights are multiplied in bf16."""
        return {"model.precision": "bf16"}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require bf16 and AdamW, and sums of gradients in fp32."""
        capability = context.capability
        if context.device == "cuda" and (capability is None or capability < (8, 0)):
            return Unsupported(
                f"{context.device_name} has no bf16 products",
                mend("-bf16_parameters"),
                RefusalKind.DEVICE,
            )
        if self.fused and context.lacks_triton():
            return Unsupported(
                "fused = true needs an NVIDIA GPU and Triton",
                mend("techniques.bf16_parameters.fused=false")
                | ("pip install triton" if context.device == "cuda" else ""),
                RefusalKind.PACKAGE,
            )
        for other, technique in context.plan.techniques.items():
            if other == self.name():
                continue
            if "routes" in technique.composes:
                return Unsupported(
                    f"{other} adds its updates to the weights itself, and bf16 would round most of "
                    "them away",
                    mend(f"-{other}"),
                    RefusalKind.COMBINATION,
                )
            if getattr(technique, "zero_stage", 1) == 2 and _adds_up_here(context.plan):
                return Unsupported(
                    f"{other} in stage 2 adds the gradients of micro-batches up in the dtype of "
                    "its slices, where bf16 would lose small ones",
                    mend(f"techniques.{other}.zero_stage=1"),
                    RefusalKind.COMBINATION,
                )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Take two bytes from every number of a matrix; drop casts; add slices in fp32."""
        sizes, gpu = ledger.sizes, bool(ledger.sizes["on_gpu"])
        slices = sizes.get("slices", 1.0)
        pairs = SUMMED_EARLY in ledger.work and sizes["shard_ranks"] == 2
        several = sizes["micro_batches"] > 1 or (sizes["shard_ranks"] > 1 and not pairs)
        adds_up = slices == 1 and several
        widened = 1.0 if SUMMED_EARLY in ledger.work else 1 / max(1.0, sizes["micro_batches"])
        master = self.rounding == "master"
        plain = {
            n: m
            for n, m in ledger.matrices.items()
            if m.stored == 4 and _is_taken(n, len(m.shape), on_gpu=gpu)
        }
        ledger = ledger.updated_by(self.name(), lambda name, _: name in plain)
        learns = ledger.updates(self.name())
        changed = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
        for name, matrix in plain.items():
            numbers = matrix.numbers / slices
            changed["parameters"] -= 2 * numbers
            if name in learns:
                summed = adds_up or (slices == 1 and name == "embed.weight" and sizes["tied"])
                changed["gradients"] -= 0 if summed else 2 * numbers
                changed["optimizer"] += 2 * numbers if master else 0
        for name, more in changed.items():
            line = ledger.memory[name]
            ledger = ledger.with_line(name, replace(line, bytes=line.bytes + more))
        if (line := ledger.memory.get("head_weight_gradient")) is not None and not adds_up:
            ledger = ledger.with_line("head_weight_gradient", replace(line, bytes=line.bytes / 2))
        casts = [n for n in ledger.memory if n == "head_cast" or n.endswith("/weight_cast")]
        ledger = ledger.without(casts).reworked(
            lambda n, w: stored_in_bf16(n, w, adds_up=adds_up, master=master, widened=widened)
        )
        if slices > 1:
            ledger = beside_halves(ledger, plain)
        elif pairs and not adds_up:
            ledger = _summing_halves(ledger, -changed["gradients"])
        if gpu:  # a kernel for each matrix, or many for each slice
            slices = sum(-(-m.numbers // SLICE_NUMBERS) for m in learns.values())
            is_fused = self.fused is not False
            launches = (
                len(learns) * CUSTOM_COMPILED if is_fused else slices * SLICE_LAUNCHES * EAGER
            )
            ledger = ledger.reworked(
                lambda name, piece: (
                    replace(piece, launch=launches) if name == "update/optimizer" else piece
                )
            )
            if is_fused:
                return ledger
        largest = min(max((m.numbers for m in learns.values()), default=0.0), SLICE_NUMBERS)
        return ledger.updating(TEMPORARIES * 4 * largest)

    def apply(self, build: Build) -> None:
        """Store matrices in bf16, and give those that learn an optimizer that can write them."""
        config, context, rounding = build.plan.optimizer, build.context, self.rounding
        fused = self._is_fused(context)

        def store(name: str, value: Tensor) -> Tensor:
            plain = type(value) is Tensor and value.dtype == torch.float32
            taken = plain and _is_taken(name, value.ndim, on_gpu=build.device.type == "cuda")
            return value.bfloat16() if taken else value

        def noise(name: str) -> Noise:
            layout = build.layouts[name]
            offset, shape = layout.offsets(build.world)
            parameter = build.model.get_parameter(name)
            if is_dtensor(parameter):
                shape, begin = local_box(parameter)
                offset = tuple(own + more for own, more in zip(offset, begin, strict=True))
            where = places(offset, shape, tuple(layout.shape), build.device)
            return Noise(keys_of(build.plan.seed, name, build.device), *where)

        def make(named: Mapping[str, nn.Parameter]) -> Bf16AdamW:
            tied = "embed.weight" if build.config.tied_embeddings else ""
            for name, p in named.items():
                if is_dtensor(p):
                    continue  # FSDP2 adds up in fp32, and gives the sum its slice's dtype
                if name == tied or build.layouts[name].partial - {"shard"}:
                    p.grad_dtype = torch.float32
                elif _adds_up(build.plan) and not _adds_pairs(build.plan):
                    _keep_wide(p, early=_sums_early(build.plan))
            return Bf16AdamW(config, named, rounding=rounding, noise=noise, fused=fused)

        build.notes[self.name()] = COUNTS[KERNEL]
        build.storage.append(store)
        model, blocks = build.model, build.model.blocks
        if not any("shard" in t.composes for t in build.plan.techniques.values()):
            build.wrap_blocks(self.name(), lambda f, layer: _beside_sums(f, blocks[str(layer)]))
            for whole in ("states", "loss"):
                setattr(model, whole, _beside_sums(getattr(model, whole), model))
        build.routes.append(
            Route(self.name(), lambda name, p: p.dtype == torch.bfloat16, make, rest=self.rest)
        )

    def active(self, build: Build) -> Evidence:
        """Report bytes of the weights, and the state that keeps what they cannot hold."""
        gpu, parameters = build.device.type == "cuda", build.model.named_parameters()
        taken = [p for n, p in parameters if p.requires_grad and _is_taken(n, p.ndim, on_gpu=gpu)]
        low = [p for p in taken if p.dtype == torch.bfloat16]
        state: Mapping[Any, Mapping[str, Tensor]] = getattr(
            build.optimizers.get(self.name()), "state", {}
        )
        # A block that was left out of every step so far has had no gradient.
        due = [p for p in low if p.grad is not None or state.get(p)]
        states = {p: local_state(state.get(p, {})) for p in low}
        rests = [states[p]["rest"] for p in due if "rest" in states[p]]
        kept = sum(int(rest.count_nonzero()) for rest in rests)
        moved = sum("exp_avg" in states[p] for p in due)
        local = [local_of(p) for p in taken]
        count = sum(p.numel() for p in local)
        bytes_per_weight = sum(p.nbytes for p in local) / max(1, count)
        grown = sum(t.nbytes for own in states.values() for t in own.values()) / max(1, count)
        how = f"{kept} of {count} weights have bits beyond" if rests else "rounded by chance"
        whole = kept > 0 and len(rests) == len(due) if self.rounding == "master" else not rests
        launched = COUNTS[KERNEL] - build.notes[self.name()]
        whole = whole and (launched > 0) == self._is_fused(build.context)
        return Evidence(
            active=len(taken) == len(low) and 0 < len(due) == moved and whole,
            detail=f"{len(low)} of {len(taken)} matrices are bf16: {bytes_per_weight:.2f} bytes a "
            f"weight and {grown:.2f} of state; {how}; {launched} updates were one kernel",
            numbers={
                "matrices": len(low),
                "bytes_per_weight": bytes_per_weight,
                "state_bytes": grown,
                "beyond": kept,
                "launches": launched,
            },
        )

    def _is_fused(self, context: Context) -> bool:
        return context.lacks_triton() is None if self.fused is None else self.fused


def _keep_wide(p: nn.Parameter, *, early: bool) -> None:
    """Keep the gradient of a bf16 matrix in fp32, to which others are added.

    Autograd would widen each gradient and then add it up: 18 bytes of a number, where the sum of
    a number in fp32 and one in bf16 moves 10. So only the first is widened, once it is there. What
    sums gradients early reads them in hooks of its own, and has each of them widened.
    """
    p.grad_dtype = torch.float32 if early else None
    if not early:
        p.register_post_accumulate_grad_hook(_widen)


def _widen(p: Tensor) -> None:
    if p.grad is not None and p.grad.dtype is not torch.float32:
        p.grad = p.grad.float()


def _beside_sums(run: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Run `run` while no bf16 matrix of the module has an fp32 gradient.

    Compiling, Dynamo refuses to trace a weight whose gradient has another dtype (gb0181): at a
    second length among micro-batches, or in an evaluation after a step. A block inside of a larger
    graph leaves that to what stands around the graph: its own list, made at the first call, would
    be traced as it was not there yet, and all be compiled a second time. FSDP2 keeps sums apart.
    """
    low: list[nn.Parameter] | None = None

    def call(*given: Any, **named: Any) -> Any:
        nonlocal low
        if torch.compiler.is_compiling():
            return run(*given, **named)
        if low is None:  # the weights are real now
            low = [p for p in module.parameters() if p.dtype == torch.bfloat16]
        sums = [(p, p.grad) for p in low if p.grad is not None]
        try:
            for p, _ in sums:
                p.grad = None
            return run(*given, **named)
        finally:
            for p, gradient in sums:
                p.grad = gradient

    return call


def _summing_halves(ledger: Ledger, bytes: float) -> Ledger:
    """Return the ledger of two replicas that sum so many bytes of gradients less, in bf16.

    A bucket has vectors too, which are summed by themselves.
    """
    share = 1 - bytes / (ledger.memory["gradients"].bytes + bytes)

    def edit(name: str, piece: Work) -> Work:
        if not name.startswith("reduce/") or not isinstance(piece, (Collective, Stream)):
            return piece
        kernels = piece.kernels if isinstance(piece, Stream) else 2 * share * piece.kernels
        return replace(piece, bytes=share * piece.bytes, kernels=max(2.0, kernels))

    return ledger.reworked(edit)


def _is_taken(name: str, dimensions: int, *, on_gpu: bool) -> bool:
    """Return whether a parameter is one of the matrices that become bf16."""
    left = FP32 if on_gpu else (*FP32, *TABLES)
    return dimensions >= 2 and not name.endswith(left)


def _adds_up(plan: Plan) -> bool:
    """Return whether a step adds several gradients of one weight."""
    return _adds_up_here(plan) or plan.mesh.data * plan.mesh.context > 1


def _adds_pairs(plan: Plan) -> bool:
    """Return whether each gradient is one number of each of two ranks, which are summed early.

    The sum of two numbers in bf16 rounds to bf16 as it would from fp32.
    """
    ranks = plan.mesh.data * plan.mesh.context
    return _sums_early(plan) and ranks == 2 and not _adds_up_here(plan)


def _sums_early(plan: Plan) -> bool:
    """Return whether gradients are summed over ranks while the backward pass makes others."""
    return any("reduce" in technique.claims for technique in plan.techniques.values())


def _adds_up_here(plan: Plan) -> bool:
    """Return whether one rank adds several gradients of one weight."""
    return plan.micro_rows * plan.mesh.data < plan.rows_per_step
