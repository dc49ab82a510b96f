"""The first step beside the plain trunk's: does the combination compute the same?

Techniques that are exact one by one can be wrong together, with a loss that looks right: kernels,
compilers and masks have done so (a fused loss that counted ignored targets under a compiler, a
gradient that a sharded embedding lost). So before anything is learnt the plan is built once more
without its exact techniques and with the run's own weights, takes its first batch row by row, and
keeps its loss and the norm of every gradient. The run's own first step is compared with them before
its update is applied; a run that computes something else ends there.

It costs one uncompiled step, and while that lasts a second copy of the weights, their gradients and
what one row keeps. Several processes, fp16, and a plain model
that does not fit are left out, and the report says so.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.build import make_build
from headrace.core.errors import HeadraceError, RunError, is_out_of_memory
from headrace.core.plan import Plan
from headrace.parallel.layout import local_of
from headrace.sockets import Build, Pass

Step = Callable[[Build, Sequence[Any], int], Tensor]
"""train.step"""
NOTE = "guard"
"""Where a build keeps what came of it; the report has it under the same name."""
BANDS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest relative difference of a gradient's norm, by precision; a tenth of it is the loss's. In
bf16 a gradient is off by 0.02 to 0.05 (L2), mostly not in its length; a fault takes away parts."""
SMALLEST = 1e-3
"""Norms below this share of the largest are compared with it: some gradients are zero but for
rounding, as that of the keys' bias."""
TINY = 1e-20


class First(NamedTuple):
    """What a first step computed."""

    loss: float
    """nats"""
    total: float
    """norm of all gradients before clipping"""
    norms: dict[str, float]
    """each gradient's norm by name, after clipping"""


def first_of_the_trunk(build: Build, step: Step) -> First | str:
    """The plain trunk's first step on the run's first batch, or why there is none."""
    exact = [n for n, t in build.plan.techniques.items() if t.equality == "exact"]
    if not exact:
        return "no technique of this plan could be left out"
    if build.world.ranks > 1:
        return f"not compared: the model is on {build.world.ranks} processes"
    if build.context.precision not in BANDS:
        return f"not compared: {build.context.precision} needs a loss scale"
    try:
        found = _first(build, step)
    except HeadraceError as error:
        return f"not compared: the plain model cannot run here: {error}"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "not compared: the plain model does not fit on this device"
    finally:  # the plain model is gone by now
        gc.collect()
        if build.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    sound = math.isfinite(found.loss) and math.isfinite(found.total)
    return found if sound else f"not compared: the plain model's first loss is {found.loss}"


def _plain(plan: Plan) -> Plan:
    """The plan without its exact techniques, row by row, unless products depend on the rows."""
    kept = {n: t for n, t in plan.techniques.items() if t.equality != "exact"}
    cut = any(t.equality == "approximate" and "linear" in t.composes for t in kept.values())
    batch = plan.batch if cut else plan.batch.model_copy(update={"micro_sequences": 1})
    return plan.replaced(techniques=kept, batch=batch)


def _first(build: Build, step: Step) -> First:
    """Take the first step of the plain plan without its update."""
    found: list[First] = []
    held = {n: p.detach() for n, p in build.model.named_parameters() if type(p.data) is Tensor}
    plain = make_build(_plain(build.plan), build.prepared, build.world, build.device, given=held)
    watch(plain, found.append, update=False)
    try:
        step(plain, plain.loader.step(0).micros, 0)
    finally:
        plain.loader.close()
    return found[0]


def watch(build: Build, see: Callable[[First], None], *, update: bool = True) -> None:
    """Call `see` once, in the first step, with its loss and gradients before their update."""
    passes, engine, clip = build.passes, build.engine, build.clip
    losses: list[Tensor] = []
    norms: list[Tensor] = []

    def run(build: Build, *given: Any) -> Tensor:
        loss, factor = engine(build, *given), build.loss_scale(build)
        losses.append(loss.clone() if factor is None else loss / factor)
        return loss

    def measure(build: Build, limit: float) -> Tensor:
        norms.append(clip(build, limit).clone())
        return norms[-1]

    def watched(build: Build, index: int) -> Sequence[Pass]:
        build.passes, build.engine, build.clip = passes, run, measure
        first, *rest = passes(build, index)

        def absorb(build: Build, finite: Tensor) -> None:
            build.engine, build.clip = engine, clip
            see(First(float(losses[0]), float(norms[0]), norms_of(build)))
            if update:
                first.absorb(build, finite)

        return [replace(first, absorb=absorb), *(rest if update else [])]

    build.passes = watched


def norms_of(build: Build) -> dict[str, float]:
    """The norm of every gradient that is there, by name, as an update would see it."""
    held = {n: local_of(p.grad) for n, p in build.model.named_parameters() if p.grad is not None}
    if not held:
        return {}
    norms = {name: gradient.float().norm() for name, gradient in held.items()}
    for route, optimizer in build.optimizers.items():
        if (factor := getattr(optimizer, "gradient_factor", None)) is not None:
            norms |= {n: norms[n] * factor for n in build.routed[route] if n in norms}
    return dict(zip(norms, torch.stack(list(norms.values())).tolist(), strict=True))


def guard(build: Build, step: Step) -> None:
    """Compute the plain first step, and have the run's own compared with it.

    Raises (in the run's first step):
        RunError: its loss or a gradient's norm is another one; the update was not applied.
    """
    if not build.plan.guard:
        return
    wanted = first_of_the_trunk(build, step)
    if isinstance(wanted, str):
        build.notes[NOTE] = {"compared": False, "why": wanted}
    else:
        watch(build, lambda found: compare(build, found, wanted))


def compare(build: Build, found: First, wanted: First) -> None:
    """Note how far the first step is from the plain one; raise RunError beyond the band."""
    band = BANDS[build.context.precision]
    floor = SMALLEST * max(wanted.norms.values(), default=0.0)
    freed = any("clip" in t.claims for t in build.techniques)  # by an update in the backward pass
    off = {"all parameters": abs(found.total - wanted.total) / max(wanted.total, TINY)}
    for name in wanted.norms.keys() if not freed else wanted.norms.keys() & found.norms.keys():
        norm = wanted.norms[name]
        off[name] = abs(found.norms.get(name, 0.0) - norm) / max(norm, floor, TINY)
    for name in found.norms.keys() - wanted.norms.keys():
        off[name] = found.norms[name] / max(floor, TINY)
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else math.inf)
    loss_off = abs(found.loss - wanted.loss) / max(abs(wanted.loss), TINY)
    build.notes[NOTE] = {
        "compared": True, "loss_off": loss_off, "gradients": len(off) - 1, "worst": worst,
        "off": off[worst], "band": band,
    }  # fmt: skip
    if not loss_off <= band / 10:
        what = f"its first loss is {found.loss:.6g} nats, and {wanted.loss:.6g}"
    elif not off[worst] <= band:
        one, other = (
            first.total if worst == "all parameters" else first.norms.get(worst, 0.0)
            for first in (found, wanted)
        )
        what = f"the gradient of {worst} has norm {one:.6g}, and {other:.6g}"
    else:
        return
    exact = [n for n, t in build.plan.techniques.items() if t.equality == "exact"]
    raise RunError(
        f"this combination computes something else than the plain trainer: {what} without "
        f"{', '.join(exact)}; nothing was learnt",
        f"--without {exact[0]}, to find which one it is; guard=false goes on regardless",
    )
