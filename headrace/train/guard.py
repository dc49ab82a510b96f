"""Compare the first step of a run with the first step of the plain baseline.

Techniques that are right one by one can be wrong together, with a loss that looks right. Kernels,
compilers and masks have done so: a fused loss counted ignored targets under a compiler, and a
sharded embedding lost a gradient. So before anything is learned, the plan is built once more with
the run's own weights and without the techniques that keep the baseline's learning rule. This plain
model computes the first batch sequence by sequence, and its loss and the norm of every gradient are
kept. Then the run takes its own first step, still before the loop, on the Build that it was given.
That step is compared before its update is applied. A run that computes something else ends there.

Exact techniques must stay within the band of the precision; each approximate technique adds its own
band. Some models magnify rounding beyond any band. So before a run is ended, the plain model
computes the batch again from weights that are moved by as much as rounding. Where that alone moves
its gradients as far, the comparison says nothing, and the run goes on.

The comparison costs one uncompiled step, and up to four more before a run is ended. Meanwhile the
memory also holds a second copy of the weights, their gradients and the activations of one sequence.
The plain model multiplies in the run's own precision, in a wider one where a technique rounds more
(TF32, fp8), and in fp32 for fp16, which would need a loss scale. Replicas compute their own
sequences and add up; ranks that hold slices (FSDP) or some of the experts of a mixture each gather
the whole model meanwhile. Models that are divided otherwise, and plain models that do not fit, are
not compared. What was not compared is reported at the start and in report.json.
"""

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build, Engine
from headrace.core.errors import HeadraceError, RunError, is_out_of_memory
from headrace.costs.machine import host_memory_bytes
from headrace.model.head import IGNORED
from headrace.optim.adamw import scale_gradients
from headrace.parallel.layout import is_dtensor, local_of
from headrace.parallel.world import World
from headrace.plan.plan import Plan

Inspect = Callable[[Build, Tensor, Tensor], bool]
"""Reads the gradients of a step's first pass before its update: (build, loss in nats, norm of all
gradients before clipping) -> whether they are applied."""
TakeStep = Callable[[Build, Sequence[Any], int, Inspect | None], Tensor]
"""train.step"""
BANDS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest allowed relative difference of a gradient's norm, by precision; the loss may differ by a
tenth of it. In bf16 a gradient is off by 0.02 to 0.05 (L2), mostly in its direction and not in its
norm; a fault removes whole parts of it."""
BAND_FP16 = BANDS["bf16"] / 2**3
"""Largest allowed relative difference of a gradient's norm in fp16, which keeps 3 bits more."""
WHOLE, LOSS = 1 / 2, 1 / 20
"""Shares of the bands of approximate techniques that the norm of all gradients together (`WHOLE`)
and the loss (`LOSS`) may differ by. In that norm the rounding of single gradients averages out.
1,700 tiny plans of pairs and triples reached 0.35 of a limit, except normalised states in fp8
(linear_attention), which magnify rounding without bound."""
SMALLEST = 1e-3
"""Share of the largest norm. The difference of a norm below it is divided by it, because some
gradients, as that of the keys' bias, are zero except for rounding."""
UNITS = {"fp32": 2.0**-21, "bf16": 2.0**-9, "fp16": 2.0**-12}
"""Relative change of weights that is like the rounding of a matmul, by precision. bf16 rounds by
half a unit in the last place; in fp32 the matmuls only add up in another order."""
UNIT_OF_BAND = UNITS["bf16"] / 0.05
"""Relative change of weights per unit of an approximate technique's band, in bf16's proportion."""
DRAWS, MAGNIFIED = 4, 3.0
"""Number of random moves of the weights, and the factor by which so few draws may underestimate the
largest effect. In a model that does not magnify rounding, a move has a tenth of the allowed
effect."""
TINY = 1e-20
ALL, MEAN = "all parameters", "the loss"
EXPERT = "expert"
"""Axis of the ranks that divide the experts of a mixture."""


class First(NamedTuple):
    """Hold what a first step computed."""

    loss: float
    """Loss in nats per token."""
    total: float
    """Norm of all gradients together, before clipping."""
    norms: dict[str, float]
    """Norm of each gradient by the name of its parameter, after clipping."""


def left_out(plan: Plan) -> list[str]:
    """Return the names of the techniques that the plain model leaves out.

    They keep the baseline's learning rule and do more than set keys of the config. Techniques that
    only set such keys stay.
    """
    return [
        n
        for n, t in plan.techniques.items()
        if t.equality != "learning"
        and not all(socket.startswith("config.") for socket in (*t.claims, *t.composes))
    ]


def first_of_the_baseline(build: Build, step: TakeStep, *, draw: int = 0) -> First | str:
    """Return the first step of the plain baseline on the run's first batch, or why there is none.

    Args:
        build: the run.
        step: the function that takes a step.
        draw: the seed of a random move of the weights by as much as rounding; 0 moves none.
    """
    if not left_out(build.plan):
        return "no technique of this plan could be left out"
    if build.world.ranks != build.world.size("data"):
        return f"the model is cut over {build.world.ranks} processes"
    ready: list[bool] = []
    why = ""
    baseline = None
    try:
        baseline = _first(build, step, draw, ready)
    except HeadraceError as error:
        why = f"the plain model cannot run here: {error}"
    except _ElsewhereError:
        why = "the plain model does not run on another process, which says why"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = "the plain model does not fit on this device"
    finally:  # the plain model is gone by now
        gc.collect()
        if build.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if baseline is None:
        if not ready:  # the other ranks wait for this answer
            build.world.any(True)
        return why
    sound = math.isfinite(baseline.loss) and math.isfinite(baseline.total)
    return baseline if sound else f"the plain model's first loss is {baseline.loss}"


def _plain(build: Build) -> Plan:
    """Return the plan without what is left out, with micro-batches of one sequence.

    Each rank has the whole model, experts of a mixture and slices too.
    fp16 becomes fp32, because it would need a loss scale.
    """
    plan, left = build.plan, left_out(build.plan)
    kept = {n: t for n, t in plan.techniques.items() if n not in left}
    whole = {"precision": "fp32"} if build.context.precision == "fp16" else {}
    return plan.replaced(
        techniques=kept,
        model=plan.model.model_copy(update=whole),
        mesh=plan.mesh.model_copy(update={"expert": 1, "replicate": 1}),
        batch=plan.batch.model_copy(update={"micro_sequences": _plain_rows(plan)}),
    )


def _plain_rows(plan: Plan) -> int:
    """Return the rows of a plain micro-batch: all of a plan's images are normalised together."""
    return 1 if plan.vision is None else plan.micro_rows


def _first(build: Build, step: TakeStep, draw: int, ready: list[bool]) -> First:
    """Take the first step of the plain plan without its update, and return what it computed."""
    firsts: list[First] = []
    every = {n: p.data for n, p in build.model.named_parameters()}
    shared = {n: p for n, p in every.items() if type(local_of(p)) is Tensor}
    cut = {n: p for n, p in shared.items() if is_dtensor(p) or _by_experts(build, n)}
    given = dict(shared)
    for name, part in cut.items():
        whole = build.layouts[name].shape if _by_experts(build, name) else part.shape
        given[name] = local_of(part).new_zeros(()).expand(tuple(whole))
    plan, alone = _plain(build), replace(build.world, groups={})  # no rank waits for one that fails
    needs = build.predicted(plan).without(["optimizer"]).peak()[1] * build.world.ranks
    if build.device.type == "cpu" and needs > host_memory_bytes():  # the system would kill us
        raise MemoryError
    plain = make_build(plan, build.prepared, alone, build.device, given=given)
    try:
        if cut:
            _gather(plain, cut, build, ready)
        if build.world.ranks > 1:
            plain.engine = _together(plain.engine, build.world, ready)
        if draw:
            _move(plain, rounding(build), draw)
        with full_precision_matmuls():
            micros = plain.loader.step(0).micros
            step(plain, micros, 0, inspects(firsts.append, update=False))
    finally:
        plain.loader.close()
    return firsts[0]


def _by_experts(build: Build, name: str) -> bool:
    """Return whether ranks hold some experts of a parameter each."""
    layout = build.layouts.get(name)
    return layout is not None and EXPERT in layout.split and build.world.size(EXPERT) > 1


def _gather(plain: Build, cut: Mapping[str, Any], build: Build, ready: list[bool]) -> None:
    """Fill the plain model with whole weights from the parts of all ranks.

    All ranks first check that they have memory for the gradients of those weights.
    """
    own = dict(plain.model.named_parameters())
    room = [torch.empty_like(p.data) for p in own.values() if type(p.data) is Tensor]
    _meet(build.world, ready)
    ready.clear()  # they meet once more, in `_together`
    del room
    for name, tensor in cut.items():
        if _by_experts(build, name):
            whole = build.layouts[name].whole(build.world, tensor, local_of(tensor))
        else:
            whole = tensor.full_tensor()
        if name in own and own[name].shape == whole.shape:  # else its value was drawn at random
            own[name].data.copy_(whole)


class _ElsewhereError(Exception):
    """The plain model does not run on another process, which reports the reason itself."""


def _meet(world: World, ready: list[bool]) -> None:
    """Wait until all ranks come here; raise _ElsewhereError where one has failed before."""
    ready.append(True)
    if world.any(False):
        raise _ElsewhereError


def _together(engine: Engine, world: World, ready: list[bool]) -> Engine:
    """Return an engine that computes alone, waits for all ranks, and then joins them.

    After that it scales loss and gradients to the share of the targets that this rank has. Losses
    that layers kept go by tokens, of which all ranks tell each other how many have a target.
    """

    def run(build: Build, work: Sequence[Any], objective: Any, scale: Tensor) -> Tensor:
        own = torch.stack([(w.targets_BT != IGNORED).sum() for w in work]).sum().float()
        if build.auxiliary:
            _meet(world, ready)
            ready.clear()  # they meet once more, below
            every = world.sum_(own.clone(), "shard").clamp(min=1)
            tokens = sum(w.targets_BT.numel() for w in work) * world.size("shard")
            build.targets_per_token = every / tokens
        loss = engine(build, work, objective, scale)
        _meet(world, ready)
        build.world = world
        share = own.clamp(min=1) / world.sum_(own.clone(), "shard").clamp(min=1)
        scale_gradients([p.grad for p in build.model.parameters() if p.grad is not None], share)
        return loss * share

    return run


@contextmanager
def full_precision_matmuls() -> Iterator[None]:
    """Compute fp32 matmuls in full fp32 within this context, whatever precision the run has set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rounding(build: Build) -> float:
    """Return the relative change of a weight that is like the rounding of the run's arithmetic."""
    techniques = build.plan.techniques
    bands = sum(techniques[n].band for n in left_out(build.plan))
    return UNITS[build.context.precision] + UNIT_OF_BAND * bands


def _move(plain: Build, unit: float, draw: int) -> None:
    """Move every weight up or down at random by the share `unit` of itself."""
    source = torch.Generator(plain.device).manual_seed(draw)
    with torch.no_grad():
        for parameter in plain.model.parameters():
            if type(parameter.data) is Tensor:  # else it is stored in a quantised type
                coins = torch.randint(
                    0, 2, parameter.shape, generator=source, device=plain.device, dtype=torch.int8
                )
                parameter.mul_(1 + unit * (2.0 * coins - 1))


def inspects(see: Callable[[First], None], *, update: bool = True) -> Inspect:
    """Return what gives `see` the loss and gradients of a step, for the argument of `train.step`.

    Args:
        see: called in the step, before its update.
        update: whether the gradients are applied then.
    """

    def inspect(build: Build, loss: Tensor, norm: Tensor) -> bool:
        see(First(float(loss), float(norm), norms_of(build)))
        return update

    return inspect


def norms_of(build: Build) -> dict[str, float]:
    """Return the norm of every existing gradient by name, as an update would use it."""
    named, none = dict(build.model.named_parameters()), torch.zeros((), device=build.device)
    local_norms = {
        n: local_of(p.grad).float().norm() for n, p in named.items() if p.grad is not None
    }
    norms = {n: local_norms.get(n, none) for n in named}
    sliced = [n for n, p in named.items() if is_dtensor(p)]
    divided = [n for n, p in named.items() if not is_dtensor(p) and _by_experts(build, n)]
    for cut, axis in (sliced, "slices"), (divided, EXPERT):  # slices of experts are of all experts
        if cut:
            squares = torch.stack([norms[n].square() for n in cut])
            norms |= zip(cut, build.world.sum_(squares, axis).sqrt(), strict=True)
    for route, optimizer in build.optimizers.items():
        if (factor := getattr(optimizer, "gradient_factor", None)) is not None:
            norms |= {n: norms[n] * factor for n in build.routed[route]}
    values = torch.stack(list(norms.values())).tolist()
    return {n: v for n, v in zip(norms, values, strict=True) if v or n in local_norms}


def guard(build: Build, step: TakeStep) -> Inspect | None:
    """Compute the plain first step, and return what compares the run's own with it.

    Where nothing is compared it is None, and the reason is noted and told. In the run's first step
    it raises RunError where the loss or a gradient's norm is another one; no update is applied
    then.
    """
    if not build.plan.guard:
        build.run_notes.guard = {"compared": False, "why": "guard = false"}
        return None
    wanted = first_of_the_baseline(build, step)
    if isinstance(wanted, str):
        _not_compared(build, wanted)
        return None
    if kept := _kept(build.plan):
        build.note_line(f"not compared with the plain trainer, which has it too: {', '.join(kept)}")

    def recompute(draw: int) -> First | str:
        return first_of_the_baseline(build, step, draw=draw)

    return inspects(lambda computed: compare(build, computed, wanted, recompute))


def _kept(plan: Plan) -> list[str]:
    left = left_out(plan)
    return [n for n in plan.techniques if n not in left]


def _not_compared(build: Build, why: str) -> None:
    build.run_notes.guard = {"compared": False, "why": why}
    if build.plan.techniques:  # else it is the plain trainer
        build.note_line(f"the first step is not compared with the plain trainer's: {why}")


def compare(
    build: Build, computed: First, wanted: First, recompute: Callable[[int], First | str]
) -> None:
    """Note how far the first step differs from the plain one; refuse differences beyond the bands.

    Args:
        build: the run, in its first step.
        computed: what that step computed.
        wanted: what the plain model computed.
        recompute: draw -> what the plain model computes when its weights are moved as by rounding.

    Raises:
        RunError: a difference is beyond its band, and rounding alone does not explain it.
    """
    left, limits, freed = left_out(build.plan), limits_of(build), freed_by(build)
    off = apart(computed, wanted, freed)
    if build.context.precision == "fp16" and not math.isfinite(computed.total):
        off = {MEAN: off[MEAN]}  # the step is skipped, and the scale halved
        build.note_line(
            "the first gradients are not compared: they overflowed fp16 at this loss scale"
        )
    share = {name: value / limits.get(name, limits[""]) for name, value in off.items()}
    worst = max(share, key=lambda name: share[name] if share[name] == share[name] else math.inf)
    worst = worst if share[MEAN] <= 1 else MEAN
    build.run_notes.guard = {
        "compared": True,
        "without": left,
        "kept": _kept(build.plan),
        "loss_off": off[MEAN],
        "gradients": len(off.keys() - {MEAN, ALL}),
        "worst": worst,
        "off": off[worst],
        "band": limits.get(worst, limits[""]),
    }
    if not build.world.any(not share[worst] <= 1):
        return
    if (moved := _magnified(wanted, limits, recompute)) > 1 / MAGNIFIED:
        _not_compared(build, f"rounding alone moves it by {moved:.2g} times what is allowed")
        return
    what = f"its first loss is {computed.loss:.6g} nats, and {wanted.loss:.6g}"
    if worst != MEAN:
        one, other = (
            first.total if worst == ALL else first.norms.get(worst, 0.0)
            for first in (computed, wanted)
        )
        what = f"the gradient of {worst} has norm {one:.6g}, and {other:.6g}"
    raise RunError(
        f"this combination computes something else than the plain trainer: {what} without "
        f"{', '.join(left)}; nothing was learnt",
        f"--without {left[0]}, to find which one it is; guard=false goes on regardless",
    )


def limits_of(build: Build) -> dict[str, float]:
    """Return the largest allowed relative differences.

    They are of the loss, of all gradients together, and, as "", of any single gradient.
    """
    techniques = build.plan.techniques
    bands = sum(techniques[n].band for n in left_out(build.plan))
    own = BANDS.get(build.context.precision, BAND_FP16)
    return {MEAN: own / 10 + LOSS * bands, ALL: own + WHOLE * bands, "": own + bands}


def freed_by(build: Build) -> set[str]:
    """Return the parameters whose gradients an optimizer has already used and freed."""
    return {
        name
        for route, optimizer in build.optimizers.items()
        if getattr(optimizer, "frees_gradients", False)
        for name in build.routed[route]
    }


def apart(computed: First, wanted: First, freed: Collection[str] = ()) -> dict[str, float]:
    """Return relative differences: of the loss, of all gradients together, and of each by name.

    Args:
        computed: what a first step computed.
        wanted: what it should have computed.
        freed: the parameters whose gradients may be missing in `computed`.
    """
    floor = SMALLEST * max(wanted.norms.values(), default=0.0)
    off = {
        MEAN: abs(computed.loss - wanted.loss) / max(abs(wanted.loss), TINY),
        ALL: abs(computed.total - wanted.total) / max(wanted.total, TINY),
    }
    for name, norm in wanted.norms.items():
        if name in computed.norms or name not in freed:
            off[name] = abs(computed.norms.get(name, 0.0) - norm) / max(norm, floor, TINY)
    for name in computed.norms.keys() - wanted.norms.keys():
        off[name] = computed.norms[name] / max(floor, TINY)
    return off


def _magnified(
    wanted: First, limits: Mapping[str, float], recompute: Callable[[int], First | str]
) -> float:
    """Return how far rounding alone moves the plain model, as the largest share of a limit.

    0 where that cannot be computed, for example because memory is missing.
    """
    most = 0.0
    for draw in range(1, DRAWS + 1):
        if isinstance(moved := recompute(draw), str):
            return most
        off = apart(moved, wanted)
        most = max(most, *(value / limits.get(name, limits[""]) for name, value in off.items()))
        if most > 1 / MAGNIFIED:
            break
    return most
