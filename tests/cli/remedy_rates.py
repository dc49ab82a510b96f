"""Errors about the rates of a device, which a probe mends: its command is run up to the timing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probed_cpu import probed_cpu
from remedy_python import Call
from shell import run

from headrace import probes
from headrace.costs import host, links
from headrace.costs.machine import Machine
from headrace.predict import on_cpu
from headrace.predict.candidates import _bugs_reported

CPU = torch.device("cpu")


def probes_here(remedy: str) -> None:
    """Run the probe that a remedy names, where measuring takes no time; its rates are kept."""
    command = remedy.partition(" (on ")[0].split("headrace ")[-1].split()
    assert command[0] == "probe"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(Path.cwd()))
        patch.setattr(probes, "_run", lambda device, *_: device)
        patch.setattr(probes, "_machine", lambda device: probed_cpu())
        told = run([*command, *([] if "--device" in command else ["--device", "cpu"])])
        assert not told.code, told
        assert probes.cached(CPU) == probed_cpu()


def damaged(patch: pytest.MonkeyPatch) -> Any:
    """Read the rates of this processor from a file that was cut off."""
    patch.setenv("HOME", str(Path.cwd()))
    file = probes.path(CPU)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"format": ')
    return probes.cached(CPU)


def broken(patch: pytest.MonkeyPatch) -> Any:
    """Predict a plan with a technique whose own code fails."""
    with _bugs_reported():
        raise ZeroDivisionError("division by zero")


def left_out(remedy: str) -> None:
    """Hold what a remedy says of a bug: the technique is left out, and reported."""
    assert remedy.split()[:3] == ["leave", "it", "out,"] and "report" in remedy


RATES = {
    "costs/host:step_time#1": Call(
        lambda patch: host.step_time({}, Machine.assumed("cpu"), 1), probes_here
    ),
    "costs/links:collective_s#1": Call(
        lambda patch: links.collective_s((), "NVIDIA H200", "all_reduce", 1e6, 4096), probes_here
    ),
    "costs/machine:Machine._lacks#1": Call(
        lambda patch: replace(Machine.assumed("NVIDIA H200"), matmuls=()).matmul_s("bf16", 8, 8, 8),
        probes_here,
    ),
    "costs/machine:Machine.read#1": Call(damaged, probes_here),
    "predict/candidates:_bugs_reported#1": Call(broken, left_out),
    "predict/on_cpu:_against#1": Call(
        lambda patch: on_cpu._against(
            replace(probed_cpu(), steps=()), lambda step: True, "of this kind"
        ),
        probes_here,
    ),
    "predict/on_cpu:_handed_out_s#1": Call(
        lambda patch: on_cpu._handed_out_s(replace(probed_cpu(), steps=())), probes_here
    ),
}
"""Site of an error -> what makes it, and what does as its remedy says."""
