"""Measure the rates of the device that is here in under three minutes, and keep them per machine.

The probes time matmuls in every precision that the device has, over shapes of a transformer's
layers. They time attention by kernel, forward and backward. They time copies from a few KiB to GiB,
whose small end is the least time of a kernel. They time what queueing an operation costs the host,
eagerly and as a captured graph, and the link to the host's pinned memory in both directions. They
also measure the memory of CUDA's context. `headrace.costs.machine` predicts times of any shape from
these points.

A time is a median; on a CPU short probes run twice. On a GPU it is read from CUDA events, after a
kernel that empties the L2 cache and one that waits until the host has queued everything. A kernel
shorter than `clock.MIN_SINGLE_S` is timed over many calls in a row instead. Its operands then stay
in the cache, as results do that are used at once. What timing one kernel alone adds to it is
subtracted. On a CPU the host's clock is read. Operands of matmuls and of attention are random,
because zeros draw less power and run faster. A GPU's matmul that takes more than `HOT_S` is not
kept as a point: timing it a few times in a row lowers the clock more than steps do. For the same
reason no sustained load is probed: six seconds of nothing but matmuls took 1.18 and 1.19 times as
long on two H200s whose steps agreed with their single matmuls.

Probes run in order of importance. A probe that would not end in time, judged by the earlier ones of
its group, is left out and listed in `Machine.skipped`. What the device or its libraries refuse is
listed in `Machine.absent` with their own words, and nothing is guessed in its place. An interrupt
leaves nothing behind: the file is written at the end. Its name holds the device, torch's version
and the driver's version, or for a CPU the model and the threads that torch uses. The parts of a
step on a CPU are measured in probes/host.py.

Several ranks together measure the links between them (probes/together.py).

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
from statistics import fmean
from typing import Any, TypeVar

import torch

from headrace.core.errors import ConfigError, UnsupportedError, is_out_of_memory
from headrace.core.progress import Progress
from headrace.core.remedy import mend
from headrace.costs.machine import FORMAT, Machine, host_memory_bytes
from headrace.costs.rates import (
    Absent,
    AttentionPoint,
    AttentionRates,
    Kernel,
    LinearRates,
    MatmulPoint,
    MatmulRates,
    MeasuredStep,
    Precision,
    Shape,
    StreamPoint,
    StreamRates,
)
from headrace.probes import host
from headrace.probes.clock import Clock
from headrace.probes.points import (
    Probe,
    Readings,
    attention_probe,
    in_order,
    launches,
    matmul_probe,
)
from headrace.train.run_folder import cpu_name

T = TypeVar("T", MatmulRates, AttentionRates)
Point = TypeVar("Point", MatmulPoint, AttentionPoint, StreamPoint, MeasuredStep)

ANY = 1e12
"""A placeholder rate in FLOP/s; `Machine.fitted` replaces it before anyone reads it."""
HOT_S = 3e-3
"""Seconds from which a GPU's matmul is not kept as a point, because it slows the GPU down. Of 125
matmuls on an H200 those above ran at 630 to 800 TFLOP/s, their shorter neighbours at 750 to 850:
nine in a row reach the limit of its power."""
TWICE = ("linears'", "steps", "attention")
"""How groups of probes begin that a CPU runs twice; none of them compiles."""
DISTURBED = 1.1
"""The factor above the faster reading from which the slower one does not count. Where the faster
always counted, steps were predicted too fast: they have their share of small disturbances."""

# --- where it is kept -------------------------------------------------------------------------


def path(device: torch.device) -> Path:
    """Return the file of rates for this device, torch version, driver and file format."""
    whole = f"{name_of(device)} torch {torch.__version__} {driver_of(device)} {FORMAT}"
    name = f"{re.sub('[^A-Za-z0-9.]+', '-', whole)}.json"
    return Path.home() / ".cache" / "headrace" / "machines" / name


def cached(device: torch.device) -> Machine | None:
    """Return the rates that were measured on this device before, or None if there are none.

    Raises:
        ConfigError: the file is damaged; it names the command that makes another.
    """
    file = path(device)
    return Machine.read(file) if file.exists() else None


def name_of(device: torch.device) -> str:
    """Return a GPU's name, or the type of another device, such as "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver_of(device: torch.device) -> str:
    """Return the driver's version, or for a CPU its model and the threads that torch uses."""
    if device.type == "cpu":
        return f"{cpu_name()}, {torch.get_num_threads()} threads"
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except (ImportError, OSError, RuntimeError, AttributeError, *_nvml_errors()):
        return f"CUDA {torch.version.cuda}"


def _nvml_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of NVIDIA's management library; none where it is not installed."""
    if find_spec("pynvml") is None:
        return ()
    import pynvml

    return (pynvml.NVMLError,)


# --- the measuring ----------------------------------------------------------------------------


def measure(
    device: torch.device, *, budget_s: float = 180.0, progress: Progress | None = None
) -> Machine:
    """Measure the rates of `device` now and keep them in `path(device)`; see `measured`."""
    machine = measured(device, budget_s=budget_s, progress=progress)
    keep(machine, device)
    return machine


def keep(machine: Machine, device: torch.device) -> Path:
    """Write the rates of a device to the file that predictions read, and return that file.

    Raises:
        OSError: the folder cannot be written.
    """
    machine.write(path(device))
    return path(device)


def measured(
    device: torch.device, *, budget_s: float = 180.0, progress: Progress | None = None
) -> Machine:
    """Measure the rates of `device` now and return them, with its links of earlier runs.

    Args:
        device: a CPU or a CUDA device.
        budget_s: seconds after which no further probe begins; the most important ones always run.
        progress: shows how far the probes are.

    Raises:
        UnsupportedError: another kind of device.
    """
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"probes know CPUs and NVIDIA GPUs, not {device.type}", mend("device=cpu")
        )
    readings = _run(device, budget_s, progress)
    machine = _machine(readings)
    with suppress(ConfigError):  # the new file replaces a damaged one
        before = cached(device)
        machine = machine if before is None else replace(machine, links=before.links)
    return machine


def add(
    machine: Machine,
    device: torch.device,
    *,
    matmuls: Iterable[tuple[Precision, int, int, int]] = (),
    attention: Iterable[tuple[Kernel, Shape, bool]] = (),
    budget_s: float = 60.0,
    progress: Progress | None = None,
) -> Machine:
    """Measure the exact shapes of a plan, add them to `machine`, and keep it in `path(device)`.

    Args:
        machine: what `measure` returned for this device.
        device: the device of `machine`.
        matmuls: matmuls as (precision, m, n, k); those that `machine` has are left out.
        attention: (kernel, (rows, heads, kv_heads, length, features), causal); those that
            `machine` has are left out.
        budget_s: seconds after which no further probe begins; `skipped` lists those left out.
        progress: shows how far the probes are.
    """
    known = {(p.precision, *point.sizes) for p in machine.matmuls for point in p.points}
    mixed = {(a.kernel, p.shape, p.causal) for a in machine.attention for p in a.points}
    readings = _run(
        device,
        budget_s,
        progress,
        lambda readings: [
            *(matmul_probe(readings, *one) for one in matmuls if one not in known),
            *(attention_probe(readings, *one) for one in attention if one not in mixed),
        ],
    )
    new_matmuls, new_attention = _tables(readings)
    machine = replace(
        machine,
        matmuls=_cool(_merged(machine.matmuls, new_matmuls), machine.kind),
        attention=_merged(machine.attention, new_attention),
        absent=tuple({a.what: a for a in (*_absences(readings), *machine.absent)}.values()),
        skipped=machine.skipped + _missed(readings),
    ).fitted()
    machine.write(path(device))
    return machine


def _run(
    device: torch.device,
    budget_s: float,
    progress: Progress | None,
    choose: Callable[[Readings], Iterable[Probe]] | None = None,
) -> Readings:
    """Run the chosen probes, or all of them, and return what they measured.

    The process's matmul precision and torch's current device are restored afterwards.
    """
    before, here = torch.get_float32_matmul_precision(), nullcontext()
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        device = torch.device("cuda", index)
        here = torch.cuda.device(device)
    every = in_order if device.type == "cuda" else host.in_order
    with here, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels that refuse give many warnings
        readings = Readings(Clock(device, budget_s), torch.Generator(device).manual_seed(0))
        try:
            torch.set_float32_matmul_precision("highest")
            if choose is None:
                launches(readings)
            progress = progress or Progress()
            ran = _work_through(readings, list((choose or every)(readings)), progress)
            if choose is None and device.type == "cpu":
                _reread(readings, ran, progress)
        finally:
            torch.set_float32_matmul_precision(before)
            readings.clock.release()
    return readings


def _work_through(readings: Readings, probes: list[Probe], progress: Progress) -> list[Probe]:
    """Run each probe that there is time and memory for, and return those that ran.

    Why others did not run is noted in the readings.
    """
    clock, fastest, seen = readings.clock, dict[str, float](), set[tuple[str, str]]()
    ran = list[Probe]()
    for probe in probes:
        if (probe.group, probe.label) in seen:
            continue
        seen.add((probe.group, probe.label))
        progress.task("probes", min(clock.spent_s, clock.budget_s), clock.budget_s)
        if probe.group in readings.absent:
            continue
        left_s = clock.budget_s - clock.spent_s
        expected_s = probe.work * fastest.get(probe.group, 0.0) + probe.least_s
        if not probe.must and (left_s <= expected_s or _lacks_memory(readings, probe)):
            readings.skipped.setdefault(probe.group, []).append(probe.label)
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
                readings.skipped.setdefault(probe.group, []).append(f"{probe.label} ({why})")
            else:
                readings.absent[probe.group] = why
            continue
        ran.append(probe)
        rate = (time.perf_counter() - begin_s) / probe.work
        fastest[probe.group] = min(rate, fastest.get(probe.group, rate))
    return ran


def _reread(readings: Readings, ran: list[Probe], progress: Progress) -> None:
    """Run the brief probes of a CPU once more, and make one point of both readings of each.

    A probe lasts some milliseconds. What else runs on the host for as long slows all of its
    readings, and is over by the second time. What fails now keeps its first reading.
    """
    brief = [probe for probe in ran if probe.group.startswith(TWICE)]
    for index, probe in enumerate(brief):
        with suppress(RuntimeError):
            probe.run()
        progress.task("second readings", index + 1, len(brief))
    readings.linears = {key: _settled(points) for key, points in readings.linears.items()}
    readings.pieces = {key: _settled(points) for key, points in readings.pieces.items()}
    readings.attention = {key: _settled(points) for key, points in readings.attention.items()}
    readings.steps = _settled(readings.steps)


def _settled(points: Iterable[Point]) -> list[Point]:
    """Return each point once: with the mean of its readings, without those that were disturbed."""
    times = dict[Any, list[float]]()
    for point in points:
        times.setdefault(replace(point, seconds=0.0), []).append(point.seconds)
    return [
        replace(what, seconds=fmean(s for s in seconds if s <= DISTURBED * min(seconds)))
        for what, seconds in times.items()
    ]


def _lacks_memory(readings: Readings, probe: Probe) -> bool:
    """Return whether a probe needs over 80% of the GPU's free memory, or 25% of the host's."""
    if readings.device.type != "cuda":
        return probe.bytes > 0.25 * host_memory_bytes()
    torch.cuda.empty_cache()
    return probe.bytes > 0.8 * torch.cuda.mem_get_info(readings.device)[0]


# --- the machine that is made of the measurements ---------------------------------------------


def _machine(readings: Readings) -> Machine:
    """Return all points as a machine whose rates are fitted to the fastest of them."""
    device, cuda = readings.device, readings.device.type == "cuda"
    matmuls, attention = _tables(readings)
    return Machine(
        name=name_of(device),
        kind="gpu" if cuda else "cpu",
        source="probes",
        says=f"medians of single kernels, attention in {'bf16' if cuda else 'fp32'}, in "
        f"{readings.clock.spent_s:.0f} of {readings.clock.budget_s:.0f} s",
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
        launch_s=readings.launch_s,
        graph_launch_s=readings.graph_launch_s,
        traffic=_stream(readings.traffic, readings.kernel_s),
        to_host=_stream(readings.links[True]),
        from_host=_stream(readings.links[False]),
        matmuls=_cool(matmuls, "gpu" if cuda else "cpu"),
        attention=attention,
        absent=_absences(readings),
        skipped=_missed(readings),
        linears=tuple(LinearRates(*key, tuple(known)) for key, known in readings.linears.items()),
        pieces=host.pieces_of(readings),
        steps=tuple(readings.steps),
    ).fitted()


def _tables(readings: Readings) -> tuple[tuple[MatmulRates, ...], tuple[AttentionRates, ...]]:
    """Return tables of the matmul and attention points; `fitted` sets their rates later."""
    matmuls = (MatmulRates(p, ANY, tuple(points)) for p, points in readings.matmuls.items())
    attention = (
        AttentionRates(*key, ANY, tuple(points)) for key, points in readings.attention.items()
    )
    return tuple(matmuls), tuple(attention)


def _merged(old: tuple[T, ...], new: tuple[T, ...]) -> tuple[T, ...]:
    """Return the tables with those of the same operation joined into one."""
    tables: dict[Any, Any] = {}
    for table in (*old, *new):
        one = tables.setdefault(table.what, table)
        if one is not table:
            tables[table.what] = replace(one, points=one.points + table.points)
    return tuple(tables.values())


def _cool(tables: tuple[MatmulRates, ...], kind: str) -> tuple[MatmulRates, ...]:
    """Drop a GPU's matmuls of `HOT_S` or longer from each table, unless it has no others."""
    if kind != "gpu":
        return tables
    return tuple(
        replace(one, points=tuple(p for p in one.points if p.seconds < HOT_S) or one.points)
        for one in tables
    )


def _absences(readings: Readings) -> tuple[Absent, ...]:
    return tuple(Absent(what, why) for what, why in readings.absent.items())


def _missed(readings: Readings) -> tuple[str, ...]:
    """Return a line for each group of which probes were left out."""
    return tuple(
        f"{of} ({len(which)}): {', '.join(which)}" for of, which in readings.skipped.items()
    )


def _stream(points: list[StreamPoint], floor_s: float | None = None) -> StreamRates:
    """Return the points by size with the rate of the largest and the least time.

    Args:
        points: the measured copies.
        floor_s: the least time in seconds; without it the shortest of the points counts.
    """
    by_size = sorted(points, key=lambda point: point.bytes)
    largest = by_size[-1]
    least_s = min(point.seconds for point in points) if floor_s is None else floor_s
    return StreamRates(least_s, largest.bytes / largest.seconds, tuple(by_size))


def _context_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device outside of torch's allocator; 0 for a CPU.

    The driver's list of processes gives this process's share. Where it does not (in a container),
    the memory of other processes counts too.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    reserved_bytes = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = _own_bytes(device)
    return max(0, (total - free if mine is None else mine) - reserved_bytes)


def _own_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process uses on the device; None where NVML does not report it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        identifier = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(identifier)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (ImportError, OSError, RuntimeError, AttributeError, *_nvml_errors()):
        return None
    return next((p.usedGpuMemory for p in running if p.pid == os.getpid()), None)
