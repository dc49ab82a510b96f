"""Where a plan would run, and whether its techniques can run there."""

import shutil
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from headrace.core.assumed import CAPABILITIES, part_of
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.machine import Machine
from headrace.core.plan import Plan
from headrace.core.technique import Context, Technique, Unsupported, check_claims


def choose_device(plan: Plan) -> torch.device:
    """The plan's device, or the best that is here; see `find_device`."""
    return find_device(plan.device)


def find_device(name: str) -> torch.device:
    """The device of that name, or for "auto" the best that is here.

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
            "device=auto",
        )
    return torch.device(name)


def make_context(plan: Plan, device: torch.device) -> Context:
    """What techniques may ask about the place where the plan runs."""
    cuda = device.type == "cuda"
    precision = plan.model.precision
    if precision == "auto":
        precision = "bf16" if cuda else "fp32"
    major, minor = torch.__version__.split(".")[:2]
    return Context(
        plan=plan,
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if cuda else device.type,
        capability=torch.cuda.get_device_capability(device) if cuda else None,
        torch=(int(major), int(minor)),
        has_triton=find_spec("triton") is not None,
        has_compiler=_has_compiler(),
        ranks=plan.mesh.ranks,
        precision=precision,
    )


def elsewhere(context: Context, device_name: str) -> Context:
    """The same on an NVIDIA GPU that is not here, with Triton and a compiler.

    Raises:
        ConfigError: it is none.
        UnsupportedError: nothing is assumed of such a device.
    """
    Machine.assumed(device_name)
    if (part := part_of(device_name)) is None:
        raise ConfigError(
            f"--device-name is of a GPU that is not here, and {device_name} is none",
            "device=cpu without --device-name",
        )
    precision = context.plan.model.precision
    return replace(
        context, device="cuda", device_name=device_name, capability=CAPABILITIES[part.family],
        has_triton=True, has_compiler=True,
        precision="bf16" if precision == "auto" else precision,
    )  # fmt: skip


def _has_compiler() -> bool:
    return any(shutil.which(c) for c in ("c++", "g++", "clang++", "cl"))


def check_supported(techniques: list[Technique[Any]], context: Context) -> None:
    """Ask every technique whether it can run here.

    Raises:
        UnsupportedError: the first that cannot, with its reason and remedy.
        ConfigError: two of them own one socket, exclude each other, or update all that is left.
    """
    check_claims(techniques)
    if context.precision == "fp16" and not any("loss_scale" in t.claims for t in techniques):
        raise ConfigError(
            "model.precision = 'fp16' loses small gradients when the loss is not scaled",
            "--with fp16_loss_scaling (or model.precision=bf16)",
        )
    for technique in techniques:
        answer = technique.supports(context)
        if isinstance(answer, Unsupported):
            name, mesh = technique.name(), context.plan.mesh
            split = [f"mesh.{axis}=1 " for axis in technique.axes if getattr(mesh, axis) > 1]
            raise UnsupportedError(
                f"{name} was asked for and cannot run here: {answer.reason}",
                f"{answer.remedy} (or {''.join(split)}--without {name})",
            )
    if len(rest := sorted(t.name() for t in techniques if t.rest)) > 1:
        one, two = rest[:2]
        raise ConfigError(
            f"{one} and {two} both take the place of the trunk's AdamW",
            f"--without {one} or --without {two}",
        )
