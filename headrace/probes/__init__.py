"""The rates of the device that is here, measured in under three minutes and kept per machine.

Products in every precision that the device has, over shapes of a transformer's layers; attention
by kernel, forward and backward; copies from a few KiB to GiB, whose small end is the least time of
a kernel; what queueing an operation costs the host, eagerly and as a captured graph; the link to
pinned memory of the host, both ways; and what CUDA's context takes. `headrace.costs.machine` makes
times of any shape from these points.

A time is a median. On a GPU it is read from CUDA events, after a kernel that empties the L2 cache
and one that waits until the host has queued everything; what is shorter than `clock.SHORT_S` is
timed in a burst instead, in which its operands stay in the cache, as results do that are used at
once. What timing one kernel alone adds to it is taken off. On a CPU it is the host's clock.
Operands of products and of attention are random, for zeros draw less power and run faster. A GPU's
product of more than `HOT_S` is no point: timing it a few times in a row lowers the clock more than
steps do. For the same cause no load is probed: six seconds of nothing but products took 1.18 and
1.19 times as long on two H200s whose steps agreed with their single products.

Probes run in order of importance. One that its forerunners say would not end in time is left out
and told in `Machine.skipped`; what the device or its libraries refuse is told in `Machine.absent`
with their own words, and nothing is guessed in its place. An interrupt leaves nothing behind: the
file is written at the end, under the name of the device, torch's version and the driver's, or of a
CPU the model and the threads that torch uses. What a step is made of on a CPU: probes/host.py.

Links to other ranks are measured by several together (probes/together.py).

Left out: what runs beside a kernel in a step, and transposed operands.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.core.errors import ConfigError, UnsupportedError, is_out_of_memory
from headrace.core.progress import Progress
from headrace.core.remedy import mend
from headrace.costs.machine import FORMAT, Machine, host_memory_bytes
from headrace.costs.rates import (
    Absent,
    AttentionRates,
    Kernel,
    LinearRates,
    MatmulRates,
    Precision,
    Shape,
    StreamPoint,
    StreamRates,
)
from headrace.probes import host
from headrace.probes.clock import Clock
from headrace.probes.points import Found, Probe, attention_probe, in_order, launches, product_probe
from headrace.train.run_folder import cpu_name

T = TypeVar("T", MatmulRates, AttentionRates)

ANY = 1e12
"""A rate in FLOP/s that is fitted before anyone reads it."""
HOT_S = 3e-3
"""Of 125 products on an H200 those above ran at 630 to 800 TFLOP/s, their shorter neighbours at 750
to 850: nine in a row reach the limit of its power."""

# --- where it is kept -------------------------------------------------------------------------


def path(device: torch.device) -> Path:
    """The file of this device with this torch, this driver and this way to measure."""
    whole = f"{name_of(device)} torch {torch.__version__} {driver_of(device)} {FORMAT}"
    name = f"{re.sub('[^A-Za-z0-9.]+', '-', whole)}.json"
    return Path.home() / ".cache" / "headrace" / "machines" / name


def cached(device: torch.device) -> Machine | None:
    """What was measured here before, if it was.

    Raises:
        ConfigError: the file is damaged; with the command that makes another.
    """
    file = path(device)
    return Machine.read(file) if file.exists() else None


def name_of(device: torch.device) -> str:
    """A GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver_of(device: torch.device) -> str:
    """The driver's version; of a CPU its model and the threads that torch uses."""
    if device.type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except (ImportError, OSError, RuntimeError, AttributeError, *_nvml_errors()):
        return f"CUDA {torch.version.cuda}"


def _nvml_errors() -> tuple[type[Exception], ...]:
    """What the management library raises, where it is installed."""
    if find_spec("pynvml") is None:
        return ()
    import pynvml

    return (pynvml.NVMLError,)


# --- the measuring ----------------------------------------------------------------------------


def measure(
    device: torch.device, *, budget_s: float = 180.0, progress: Progress | None = None
) -> Machine:
    """The rates of `device`, measured now and kept in `path(device)`; see `measured`."""
    machine = measured(device, budget_s=budget_s, progress=progress)
    keep(machine, device)
    return machine


def keep(machine: Machine, device: torch.device) -> Path:
    """Write the rates of a device where predictions find them; return the file.

    Raises:
        OSError: the folder cannot be written.
    """
    machine.write(path(device))
    return path(device)


def measured(
    device: torch.device, *, budget_s: float = 180.0, progress: Progress | None = None
) -> Machine:
    """The rates of `device`, measured now.

    Args:
        device: a CPU or a CUDA device.
        budget_s: after so long no further probe begins; the most important ones always run.
        progress: is told how far it is.

    Raises:
        UnsupportedError: another kind of device.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"probes know CPUs and NVIDIA GPUs, not {device.type}", mend("device=cpu")
        )
    found = _run(device, budget_s, progress)
    machine = _machine(found)
    with suppress(ConfigError):  # a damaged file, in whose place this one comes
        before = cached(device)
        machine = machine if before is None else replace(machine, links=before.links)
    return machine


def add(
    machine: Machine, device: torch.device, *,
    products: Iterable[tuple[Precision, int, int, int]] = (),
    attention: Iterable[tuple[Kernel, Shape, bool]] = (),
    budget_s: float = 60.0, progress: Progress | None = None,
) -> Machine:  # fmt: skip
    """`machine` with the very shapes of a plan measured too, and kept in `path(device)`.

    Args:
        machine: what `measure` found on this device.
        device: the same.
        products: (precision, m, n, k); those that it knows are left out, here and below.
        attention: (kernel, (rows, heads, kv_heads, length, features), causal).
        budget_s: after so long no further one begins; `skipped` tells which were left.
        progress: is told how far it is.
    """
    known = {(p.precision, *point.sizes) for p in machine.products for point in p.points}
    mixed = {(a.kernel, p.shape, p.causal) for a in machine.attention for p in a.points}
    found = _run(
        device, budget_s, progress,
        lambda found: [
            *(product_probe(found, *one) for one in products if one not in known),
            *(attention_probe(found, *one) for one in attention if one not in mixed),
        ],
    )  # fmt: skip
    new_products, new_attention = _tables(found)
    machine = replace(
        machine,
        products=_cool(_merged(machine.products, new_products), machine.kind),
        attention=_merged(machine.attention, new_attention),
        absent=tuple({a.what: a for a in (*_absences(found), *machine.absent)}.values()),
        skipped=machine.skipped + _missed(found),
    ).fitted()
    machine.write(path(device))
    return machine


def _run(
    device: torch.device, budget_s: float, progress: Progress | None,
    choose: Callable[[Found], Iterable[Probe]] | None = None,
) -> Found:  # fmt: skip
    """What the chosen probes find, or all of them, with the process's flags put back."""
    before, here = torch.get_float32_matmul_precision(), nullcontext()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        here = torch.cuda.device(device)
    every = in_order if device.type == "cuda" else host.in_order
    with here, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that refuse say so in many of them
        found = Found(Clock(device, budget_s), torch.Generator(device).manual_seed(0))
        try:
            torch.set_float32_matmul_precision("highest")
            if choose is None:
                launches(found)
            _work_through(found, list((choose or every)(found)), progress or Progress())
        finally:
            torch.set_float32_matmul_precision(before)
            found.clock.release()
    return found


def _work_through(found: Found, probes: list[Probe], progress: Progress) -> None:
    """Each probe that there is time and memory for."""
    clock, fastest, seen = found.clock, dict[str, float](), set[tuple[str, str]]()
    for probe in probes:
        if (probe.group, probe.label) in seen:
            continue
        seen.add((probe.group, probe.label))
        progress.task("probes", min(clock.spent_s, clock.budget_s), clock.budget_s)
        if probe.group in found.absent:
            continue
        left_s = clock.budget_s - clock.spent_s
        expected_s = probe.work * fastest.get(probe.group, 0.0) + probe.least_s
        if not probe.must and (left_s <= expected_s or _lacks_memory(found, probe)):
            found.skipped.setdefault(probe.group, []).append(probe.label)
            continue
        begin_s = time.perf_counter()
        try:
            probe.run()
        except torch.AcceleratorError:
            raise  # the device can do nothing more in this process
        except Exception as error:  # whatever a library refuses with
            if probe.must:
                raise
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            if probe.group in fastest or is_out_of_memory(error):
                found.skipped.setdefault(probe.group, []).append(f"{probe.label} ({why})")
            else:
                found.absent[probe.group] = why
            continue
        rate = (time.perf_counter() - begin_s) / probe.work
        fastest[probe.group] = min(rate, fastest.get(probe.group, rate))


def _lacks_memory(found: Found, probe: Probe) -> bool:
    """Whether a probe needs more than most of what is free."""
    if found.device.type != "cuda":
        return probe.bytes > 0.25 * host_memory_bytes()
    torch.cuda.empty_cache()
    return probe.bytes > 0.8 * torch.cuda.mem_get_info(found.device)[0]


# --- what came of it --------------------------------------------------------------------------


def _machine(found: Found) -> Machine:
    """All points as a machine, its rates fitted to the fastest of them."""
    device, cuda = found.device, found.device.type == "cuda"
    products, attention = _tables(found)
    return Machine(
        name=name_of(device),
        kind="gpu" if cuda else "cpu",
        source="probes",
        says=f"medians of single kernels, attention in {'bf16' if cuda else 'fp32'}, in "
        f"{found.clock.spent_s:.0f} of {found.clock.budget_s:.0f} s",
        date=time.strftime("%Y-%m-%d"),
        torch=torch.__version__,
        driver=driver_of(device),
        memory_bytes=torch.cuda.mem_get_info(device)[1] if cuda else host_memory_bytes(),
        context_bytes=_context_bytes(device),
        processors=(
            torch.cuda.get_device_properties(device).multi_processor_count
            if cuda
            else torch.get_num_threads()
        ),
        launch_s=found.launch_s,
        graph_launch_s=found.graph_launch_s,
        traffic=_stream(found.traffic, found.kernel_s),
        to_host=_stream(found.links[True]),
        from_host=_stream(found.links[False]),
        products=_cool(products, "gpu" if cuda else "cpu"),
        attention=attention,
        absent=_absences(found),
        skipped=_missed(found),
        linears=tuple(LinearRates(*key, tuple(known)) for key, known in found.linears.items()),
        pieces=host.pieces_of(found),
        steps=tuple(found.steps),
    ).fitted()


def _tables(found: Found) -> tuple[tuple[MatmulRates, ...], tuple[AttentionRates, ...]]:
    """Points by what they are of; the rates are any, for `fitted` sets them."""
    products = (MatmulRates(p, ANY, tuple(points)) for p, points in found.products.items())
    attention = (
        AttentionRates(*key, ANY, tuple(points)) for key, points in found.attention.items()
    )
    return tuple(products), tuple(attention)


def _merged(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[T, ...]:
    """Tables of the same thing made one."""
    tables: dict[Any, Any] = {}
    for table in (*old, *new):
        one = tables.setdefault(table.what, table)
        if one is not table:
            tables[table.what] = replace(one, points=one.points + table.points)
    return tuple(tables.values())


def _cool(tables: tuple[MatmulRates, ...], kind: str) -> tuple[MatmulRates, ...]:
    """Without a GPU's products that slow it down, unless there are no others."""
    if kind != "gpu":
        return tables
    return tuple(
        replace(one, points=tuple(p for p in one.points if p.seconds < HOT_S) or one.points)
        for one in tables
    )


def _absences(found: Found) -> tuple[Absent, ...]:
    return tuple(Absent(what, why) for what, why in found.absent.items())


def _missed(found: Found) -> tuple[str, ...]:
    """A line for each group of which probes were left out."""
    return tuple(f"{of} ({len(which)}): {', '.join(which)}" for of, which in found.skipped.items())


def _stream(points: list[StreamPoint], floor_s: float | None = None) -> StreamRates:
    """Points by size, the rate of the largest, and the least time unless it is known better."""
    by_size = sorted(points, key=lambda point: point.bytes)
    largest = by_size[-1]
    least_s = min(point.seconds for point in points) if floor_s is None else floor_s
    return StreamRates(least_s, largest.bytes / largest.seconds, tuple(by_size))


def _context_bytes(device: torch.device) -> int:
    """Memory in use on the device that torch's allocator does not hold; 0 for a CPU.

    The driver's list of processes tells this one's share. Where it does not (in a container), what
    other processes hold counts too.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = _own_bytes(device)
    return max(0, (total - free if mine is None else mine) - held)


def _own_bytes(device: torch.device) -> int | None:
    """What this process holds on the device, if the management library tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        identifier = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(identifier)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (ImportError, OSError, RuntimeError, AttributeError, *_nvml_errors()):
        return None
    return next((p.usedGpuMemory for p in running if p.pid == os.getpid()), None)
