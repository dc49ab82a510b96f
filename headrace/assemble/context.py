"""Decide where a plan would run, and check whether its techniques can run there."""

import shutil
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch

from headrace.core.errors import ConfigError, HeadraceError, RefusalKind, UnsupportedError
from headrace.core.remedy import mend
from headrace.costs.hardware import BF16, NO_BF16, lookup
from headrace.costs.machine import Machine
from headrace.plan.plan import Plan
from headrace.plan.technique import Context, Technique, Unsupported, check_claims

APART = ("H100", "A100", "T4")
"""GPUs of three capabilities: what none of them can run for the plan's sake, no GPU can."""
OF_PLANS = (RefusalKind.PLAN, RefusalKind.COMBINATION)
"""Kinds of refusals that no other device, package or system mends."""


def choose_device(plan: Plan) -> torch.device:
    """Return the plan's device, or the best one that is here; see `find_device`."""
    return find_device(plan.device)


def find_device(name: str, remedy: str = "device=auto") -> torch.device:
    """Return the device of that name, or for "auto" the best one that is here.

    Args:
        name: the device's name as a plan gives it.
        remedy: the change that asks for the best device that is here; the error shows it.

    Raises:
        UnsupportedError: the device that is asked for is not here.
    """
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = next(d for d in ("cuda", "mps", "cpu") if here[d])
    if not here.get(name):
        raise UnsupportedError(
            f"device = {name!r} was asked for and torch {torch.__version__} finds none here",
            remedy,
        )
    return torch.device(name)


def make_context(plan: Plan, device: torch.device) -> Context:
    """Return what techniques may ask about the place where the plan runs."""
    cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if cuda else None
    major, minor = torch.__version__.split(".")[:2]
    return Context(
        plan=plan,
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else device.type,
        capability=capability,
        torch=(int(major), int(minor)),
        has_triton=find_spec("triton") is not None,
        has_compiler=_has_compiler(),
        ranks=plan.mesh.ranks,
        precision=precision_of(plan, capability),
    )


def precision_of(plan: Plan, capability: tuple[int, int] | None) -> Literal["fp32", "bf16", "fp16"]:
    """Return the plan's precision; "auto" is bf16 on a GPU that multiplies it, and else fp32.

    Args:
        plan: the plan whose precision is asked for.
        capability: the compute capability of the GPU; None where no NVIDIA GPU is used.
    """
    if plan.model.precision != "auto":
        return plan.model.precision
    return "bf16" if capability is not None and capability >= BF16 else "fp32"


def on_one_process(plan: Plan) -> str:
    """Return the changes after which a plan runs in one process."""
    axes = {**plan.mesh.sizes, "replicate": plan.mesh.replicate, "expert": plan.mesh.expert}
    sizes = [f"mesh.{axis}=1" for axis, size in axes.items() if size > 1]
    spread = [
        name
        for name, technique in plan.techniques.items()
        if technique.axes or "shard" in technique.composes
    ]
    return " ".join([*sizes, *(f"--without {name}" for name in spread)])


def elsewhere(context: Context, device_name: str) -> Context:
    """Return the context on an NVIDIA GPU that is not here, with Triton and a compiler.

    Raises:
        ConfigError: `device_name` is no such GPU.
        UnsupportedError: nothing is assumed of such a device.
    """
    Machine.assumed(device_name)
    datasheet = lookup(device_name)
    if not datasheet.family:
        raise ConfigError(
            f"--device-name is of a GPU that is not here, and {device_name} is none",
            "device=cpu without --device-name",
        )
    return replace(
        context,
        device="cuda",
        device_name=device_name,
        capability=datasheet.capability,
        has_triton=True,
        has_compiler=True,
        precision=precision_of(context.plan, datasheet.capability),
    )


def check_reads_images(technique: Technique[Any], plan: Plan) -> None:
    """Refuse a technique of tokens in a plan for images.

    Raises:
        UnsupportedError: names it.
    """
    if plan.vision is not None and not technique.images:
        name = technique.name()
        raise UnsupportedError(
            f"{name} was asked for and cannot run here: it is made for tokens of text, and the "
            f"plan trains {plan.vision.architecture} on images",
            mend(f"-{name}"),
        )


def _has_compiler() -> bool:
    return any(shutil.which(c) for c in ("c++", "g++", "clang++", "cl"))


def check_anywhere(plan: Plan) -> None:
    """Refuse a plan that would be refused on every device, by what it asks for itself.

    What a device, a package, a system or a file decides is left to where the plan will run, and so
    is everything that depends on a layout which `mesh.auto` chooses there.

    Raises:
        UnsupportedError: a technique cannot run, with its reason and remedy.
        ConfigError: two of them own one socket, exclude each other, or update all that is left.
    """
    techniques = list(plan.techniques.values())
    check_claims(techniques)
    _check_scaled(techniques, plan.model.precision)
    _check_rest(techniques)
    here = make_context(plan, torch.device("cpu"))
    places = [here] if plan.device == "cpu" else [elsewhere(here, name) for name in APART]
    for technique in techniques if not plan.mesh.auto else ():
        check_reads_images(technique, plan)
        refusals: list[Unsupported] = []
        with suppress(HeadraceError):  # it reads weights or a run that are not here
            answers = [technique.supports(place) for place in places]
            refusals = [a for a in answers if isinstance(a, Unsupported) and a.kind in OF_PLANS]
        if len(refusals) == len(places):
            raise _refused(technique, plan, refusals[0])


def _refused(technique: Technique[Any], plan: Plan, answer: Unsupported) -> UnsupportedError:
    """Return the error of a technique that cannot run, with the reason and the remedies."""
    name, mesh = technique.name(), plan.mesh
    split = [f"mesh.{axis}=1" for axis in technique.axes if getattr(mesh, axis) > 1]
    if "shard" in technique.composes and mesh.replicate > 1:
        split.append("mesh.replicate=1")
    return UnsupportedError(
        f"{name} was asked for and cannot run here: {answer.reason}",
        answer.remedy.otherwise(mend(*split, f"-{name}")),
    )


def check_supported(techniques: list[Technique[Any]], context: Context) -> Context:
    """Ask every technique whether it can run in `context`, and return that context.

    A caller that goes on with the same plan passes the context on, so that no technique is asked
    twice.

    Raises:
        UnsupportedError: a technique cannot run, with its reason and remedy; the GPU multiplies no
            bf16, and the plan asks for it; or ranks cannot talk to each other there.
        ConfigError: two of them own one socket, exclude each other, or update all that is left.
    """
    check_claims(techniques)
    _check_scaled(techniques, context.precision)
    for technique in techniques:
        check_reads_images(technique, context.plan)
        answer = technique.supports(context)
        if isinstance(answer, Unsupported):
            raise _refused(technique, context.plan, answer)
    if context.precision == "bf16" and context.capability and context.capability < BF16:
        raise UnsupportedError(
            f"model.precision = 'bf16' and {context.device_name} "
            f"{NO_BF16.format(*context.capability)}",
            mend("model.precision=fp32").otherwise(
                mend("model.precision=fp16", "+fp16_loss_scaling")
            ),
        )
    if context.device == "mps" and context.ranks > 1:
        raise UnsupportedError(
            f"torch.distributed has no backend for Apple GPUs, and the plan wants {context.ranks} "
            "ranks",
            mend("device=cpu"),
        )
    _check_rest(techniques)
    return context


def _check_scaled(techniques: list[Technique[Any]], precision: str) -> None:
    """Refuse fp16 without a scale of the loss.

    Raises:
        ConfigError: nothing scales it.
    """
    if precision == "fp16" and not any("loss_scale" in t.claims for t in techniques):
        raise ConfigError(
            "model.precision = 'fp16' loses small gradients when the loss is not scaled",
            mend("+fp16_loss_scaling").otherwise(mend("model.precision=bf16")),
        )


def _check_rest(techniques: list[Technique[Any]]) -> None:
    """Refuse two optimizers that both update all that no other one does.

    Raises:
        ConfigError: names both.
    """
    run = {name for technique in techniques for name in technique.runs_rest}
    if len(rest := sorted(t.name() for t in techniques if t.rest and t.name() not in run)) > 1:
        one, two = rest[:2]
        raise ConfigError(
            f"{one} and {two} both take the place of the baseline's AdamW",
            mend(f"-{one}") | mend(f"-{two}"),
        )
