"""The rates of the device that is here are read, assumed from a datasheet, or measured now.

Rates that were measured on this device come first. For a GPU that has a datasheet's row the rates
are assumed at once, with the memory and the processors that its driver reports; `headrace probe`
measures them. Nothing is assumed for a GPU without a row, and rates guessed for a CPU predict no
time of a step. Where a command asks for rates of such a device, they are measured then, once,
within `QUICK_S`, and kept as those of `headrace probe` are. The doctor measures every GPU that is
free, because no datasheet knows how fast its host launches kernels. (The median error of a natural
gain was 17% on an H200 with measured rates, and 31% on an H100 with assumed ones; no GPU was tried
quietly with both.) The closing words of a run measure nothing, because a user waits there for
another answer.

Apple's GPUs (MPS) have no rates: their memory is the host's, and only memory is predicted there.
No such device was at hand, so nothing was tried on one.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from headrace.core.errors import UnsupportedError
from headrace.core.progress import Progress
from headrace.costs.hardware import lookup
from headrace.costs.machine import PROBE, Machine
from headrace.kernels.cpu_units import bf16_units
from headrace.probes import cached, keep, measured, name_of

QUICK_S = {"cuda": 40.0, "cpu": 20.0}
"""Seconds after which no further probe begins, by type of device; the most important probes come
first. A compiler's first start, which a probe may wait for, comes on top: 50 s on two cores."""
SECOND_READINGS_S = 10.0
"""About the seconds after these in which a CPU's short probes run once more."""
WITH_HALVES = 1.75
"""The factor on `QUICK_S` of a CPU that multiplies bf16, because steps in bf16 are timed there
too."""
TAKEN_BYTES = 1.5 * 2**30
"""The most memory of a GPU that is held where its rates are measured, this process's context in it:
beside another program they would be too low, and its steps slower."""


def rates(
    device: torch.device, make_progress: Callable[[], Progress] | None = None, *, sure: bool = False
) -> Machine:
    """Return the rates of a device that is here.

    Args:
        device: the device.
        make_progress: makes the progress display that shows how far the probes are, where they run.
            Without it nothing is measured, and guessed rates are returned for a CPU.
        sure: a free GPU is measured even where its datasheet's rates could be assumed.

    Raises:
        ConfigError: the file of measured rates is damaged.
        UnsupportedError: there are no rates of the device, and `make_progress` is not given.
    """
    if device.type == "mps":
        return Machine.assumed(device.type)
    if (cached_rates := cached(device)) is not None:
        return cached_rates
    name = name_of(device)
    published = device.type == "cuda" and bool(lookup(name).family)
    if published and not (sure and make_progress is not None and _is_free(device)):
        return of_its_driver(Machine.assumed(name), device)
    if make_progress is not None and not published:
        return _measured_now(device, make_progress(), "nothing")
    if make_progress is not None:
        try:
            return _measured_now(device, make_progress(), "no more than its datasheet")
        except RuntimeError as error:
            _note(make_progress, f"it could not be measured, and its datasheet is assumed: {error}")
        return of_its_driver(Machine.assumed(name), device)
    if device.type == "cpu":
        return Machine.assumed(device.type)
    raise UnsupportedError(f"nothing is known of {name!r} before it is measured", PROBE)


def of_its_driver(machine: Machine, device: torch.device) -> Machine:
    """Return assumed rates with the memory and the processors that the driver of a GPU reports."""
    own = torch.cuda.get_device_properties(device)
    return replace(
        machine, memory_bytes=own.total_memory, processors=own.multi_processor_count
    ).fitted()


def _note(make_progress: Callable[[], Progress], line: str) -> None:
    """Show the user one line."""
    progress = make_progress()
    progress.note(line)
    progress.close()


def _is_free(device: torch.device) -> bool:
    """Return whether hardly any memory of a GPU is taken."""
    try:
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
    except RuntimeError:  # no context can be made beside what runs there
        return False
    return all_bytes - free_bytes <= TAKEN_BYTES


def _measured_now(device: torch.device, progress: Progress, known: str) -> Machine:
    """Measure a device within `QUICK_S`, note that for the user, and keep its rates."""
    budget_s = QUICK_S[device.type]
    if device.type == "cpu" and bf16_units():
        budget_s *= WITH_HALVES
    about_s = budget_s + (SECOND_READINGS_S if device.type == "cpu" else 0.0)
    name = "this processor" if device.type == "cpu" else name_of(device)
    try:
        progress.note(
            f"{known} is known of {name} yet: it is measured now, once, in about {about_s:.0f} s"
        )
        machine = measured(device, budget_s=budget_s, progress=progress)
        try:
            progress.note(f"kept in {keep(machine, device)}; `{PROBE}` measures more")
        except OSError as error:
            progress.note(f"it could not be kept, and is measured again next time: {error}")
    finally:
        progress.close()
    return machine
