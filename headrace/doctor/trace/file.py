"""Read one trace of torch.profiler (Kineto): Chrome's JSON, plain or gzip, from any trainer.

A trace is data: json reads it and nothing of it runs. Of each event only what the doctor needs is
kept, as the file is read, so that memory is two to three times the text's; flows, Python frames and
most operations are counted and dropped. Times stay in microseconds, `_us`, on the file's own clock.
Categories changed their names between versions ("Kernel", "kernel"); both are read. Events with
times that no clock can have given are left out and counted.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.command import rerun
from headrace.core.errors import ConfigError, nearest
from headrace.core.files import no_json
from headrace.core.units import format_bytes
from headrace.doctor.trace.limits import MOST_BYTES

CATEGORIES = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "set",
    "memset": "set",
    "cuda_runtime": "call",
    "runtime": "call",
    "cuda_driver": "call",
    "driver": "call",
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "mark",
    "gpu_user_annotation": "on device",
    "python_function": "frame",
}
"""Kineto's categories, in lower case -> ours."""
DEVICE = ("kernel", "copy", "set")
ENDINGS = (".json", ".json.gz")
"""How the names of traces end."""
RECORD = (
    "torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=2, active=5), "
    "on_trace_ready=torch.profiler.tensorboard_trace_handler('traces'))"
)
"""How to record what the doctor can read, as Python runs it."""
RECORD_AND_JUDGE = (
    f"{RECORD} around the loop, with its step() behind each step; then "
    "headrace doctor traces/*.json"
)
"""Command for a user whose file is no trace, or no whole one."""

LAUNCH = re.compile(r"Launch|Memcpy|Memset")
SYNC = re.compile(r"Synchronize$|^(cuda|hip)Memcpy$|^hipMemcpyWithStream$|^cuMemcpy(DtoH|HtoD)_v2$")
SYNC_OPS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
ALLOCATOR = re.compile(
    r"^(cuda|hip)(Malloc|Free)$|^(cu|hip)Mem(Map|Unmap|Create|Release|SetAccess)$"
)
LOADER = re.compile(
    r"enumerate\(DataLoader\)|data_?loader|data_iter|data_wait|(get|next|load|fetch)_batch", re.I
)
STEP = re.compile(r"^ProfilerStep#(\d{1,15})$")
OPTIMIZER = "Optimizer.step#"
RANK = re.compile(r"rank[-_]?(\d+)", re.I)

LAST_US, LONGEST_US = 2.0**53, 86_400e6
"""Times from which floats do not resolve microseconds; and a day, which no event of a step
takes."""
APART_US = 600e6
"""Ten minutes: no queue keeps a launch so long, and no two clocks of one trace differ so much."""
MOST_RANKS = 2**31
SHOWN, LISTED = 60, 8
"""Letters of a name, and names, that a message shows."""


class Event(NamedTuple):
    """Hold one complete event.

    `call` is the correlation id between a launch and its kernel, or 0; `op` the number of the
    operation that launched it, or 0.
    """

    kind: str
    name: str
    start_us: float
    end_us: float
    thread: tuple[str, str]
    call: int
    stream: Any
    device: Any
    group: str
    op: int = 0


class Operation(NamedTuple):
    """Hold an operation with its arguments' shapes, types and plain values; lists nest."""

    name: str
    dims: list[Any]
    types: list[Any]
    values: list[Any]


@dataclass(frozen=True)
class Trace:
    """Hold what the doctor needs of one rank's file.

    Args:
        path: the file.
        rank: its number, from distributedInfo or the file's name; None when neither has one.
        world: ranks of the run; None when the file does not say.
        device: kernels, copies and memsets of the busiest device, in order of their starts.
        devices: devices that ran something.
        launches: correlation id -> when the call was made.
        holds: synchronisations on threads that launch, in order.
        allocations: calls of the allocator to the driver on threads that launch, in order.
        loads: a data loader at work on those threads, in order.
        steps: ProfilerStep marks of the host, or else the optimizer's steps, in order.
        device_steps: ProfilerStep marks of the device, in order.
        counts: events of each of the file's categories.
        frames: whether Python frames were recorded, which slows the host.
        computes_tf32: False when the file says that the device is older than tensor cores for
            float32; True when it says otherwise or nothing.
        operations: number -> what launched kernels, where shapes were recorded.
        device_name: name of the first device that the file names; empty when it names none.
        odd: events that were left out, for their times are none.
    """

    path: Path
    rank: int | None
    world: int | None
    device: list[Event]
    devices: int
    launches: dict[int, float]
    holds: list[Event]
    allocations: list[Event]
    loads: list[Event]
    steps: list[Event]
    device_steps: list[Event]
    counts: Counter[str]
    frames: bool
    computes_tf32: bool
    operations: dict[int, Operation]
    device_name: str
    odd: int


def read_trace(path: Path) -> Trace:
    """Return one file's trace.

    Raises:
        ConfigError: it is missing, cut short, too large, no JSON, or no trace of torch.profiler.
    """
    text = text_of(path)
    try:
        whole, sieve = _parsed(text)
    except (ValueError, RecursionError) as error:
        try:
            whole, sieve = _parsed(_mended(text))
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} {no_json(text, error)}", RECORD_AND_JUDGE) from None
    if isinstance(whole, list):  # Chrome allows the bare list
        whole = {"traceEvents": whole}
    of_run = (path.parent / "plan.toml").is_file()
    remedy = rerun((path, path.parent), verb="doctor") if of_run else RECORD_AND_JUDGE
    if not isinstance(whole, dict) or not isinstance(whole.get("traceEvents"), list):
        raise ConfigError(f"{path} is JSON, but no trace: it has no list 'traceEvents'", remedy)
    if not any(c.lower() in CATEGORIES for c in sieve.counts):
        categories = ", ".join(shown(c) for c in sorted(sieve.counts)[:LISTED]) or "none"
        more = f" and {len(sieve.counts) - LISTED} more" if len(sieve.counts) > LISTED else ""
        raise ConfigError(
            f"{path} holds no event of torch.profiler (ph 'X'); its categories: {categories}{more}",
            remedy,
        )
    return _sorted_out(path, whole, sieve)


def _parsed(text: str) -> tuple[Any, "_Sieve"]:
    sieve = _Sieve()
    return json.loads(text, object_hook=sieve.take, strict=False), sieve


def shown(name: str, most: int = SHOWN) -> str:
    """Return a name as a message shows it: the beginning of a long one, and nothing that steers."""
    cut = name if len(name) <= most else f"{name[: most - 3]}..."
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def times_of(event: dict[str, Any]) -> tuple[float, float] | None:
    """Return when an event began and how long it took; None where no clock can say so."""
    both: Any = event.get("ts"), event.get("dur")
    if not all(type(one) in (int, float) for one in both):
        return None
    start, spent = both
    if not (-LAST_US < start < LAST_US and 0 <= spent <= LONGEST_US):
        return None  # what is not a number, too
    return float(start), float(spent)


def _mended(text: str) -> str:
    """Return the text without two faults of Kineto: missing values, and backslashes of Windows."""
    text = re.sub(r'":\s*(?=[,}])', '": null', text)
    escaped = r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
    return re.sub(escaped + r"|\\", lambda match: match[1] or r"\\", text)


def text_of(path: Path) -> str:
    """Return the unpacked text of a file.

    Raises:
        ConfigError: it is missing, cut short or too large.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileNotFoundError:
        there = [file.name for ending in ENDINGS for file in path.parent.glob(f"*{ending}")]
        near = nearest(path.name, there)
        message = f"There is no trace {path}"
        if near in there:
            command = rerun((path, path.parent / near), verb="doctor")
            raise ConfigError(f"{message}; the nearest is {path.parent / near}", command) from None
        raise ConfigError(message, RECORD_AND_JUDGE) from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}", RECORD_AND_JUDGE) from None
    if len(data) > MOST_BYTES:
        raise ConfigError(
            f"{path} holds more than {format_bytes(MOST_BYTES)} of JSON, the most that is read",
            RECORD_AND_JUDGE,
        )
    return data.decode("utf-8-sig", errors="replace")  # tools of Windows put a mark before it


class _Sieve:
    """Take events out of the JSON while it is read."""

    def __init__(self) -> None:
        self.kept: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.shaped: dict[int, Operation] = {}
        self.odd = 0
        self._names: dict[str, str] = {}

    def take(self, item: dict[str, Any]) -> dict[str, Any] | None:
        """Keep or drop an event and return None; return anything else as it is."""
        if "ph" not in item or "name" not in item:
            return item
        if item["ph"] == "X" and isinstance(item.get("cat"), str):
            self.counts[item["cat"]] += 1
            kind, name = CATEGORIES.get(item["cat"].lower()), item["name"]
            if kind and isinstance(name, str):
                name = self._names.setdefault(name, name)
                if kind == "op":
                    self._keep_shapes(name, item.get("args"))
                if _wanted(kind, name):
                    self._keep(kind, name, item)
        return None

    def _keep_shapes(self, name: str, args: Any) -> None:
        if not isinstance(args, dict) or not isinstance(dims := args.get("Input Dims"), list):
            return
        number, types = args.get("External id"), args.get("Input type")
        values = args.get("Concrete Inputs")
        if isinstance(number, int) and isinstance(types, list):
            self.shaped[number] = Operation(
                name, dims, types, values if isinstance(values, list) else []
            )

    def _keep(self, kind: str, name: str, item: dict[str, Any]) -> None:
        args = item.get("args")
        args = args if isinstance(args, dict) else {}
        times, call = times_of(item), args.get("correlation", 0)
        if times is None:
            self.odd += 1
            return
        start, spent = times
        group = args.get("Process Group Ranks") or args.get("Process Group Name") or ""
        thread = (str(item.get("pid")), str(item.get("tid")))  # some versions write "24572"
        number = args.get("External id", 0)
        self.kept.append(
            Event(
                kind,
                name,
                start,
                start + spent,
                thread,
                call if isinstance(call, int) else 0,
                _key(args.get("stream", thread[1])),
                _key(args.get("device", thread[0])),
                str(group),
                number if isinstance(number, int) else 0,
            )
        )


def _key(value: Any) -> int | str:
    """Return what names a stream or a device."""
    return value if isinstance(value, (int, str)) else str(value)


def _wanted(kind: str, name: str) -> bool:
    """Return whether the doctor looks at such an event."""
    if kind in DEVICE:
        return True
    if kind == "call":
        return any(pattern.search(name) for pattern in (LAUNCH, SYNC, ALLOCATOR))
    if kind == "op":
        return name in SYNC_OPS or _marks(name)
    if kind == "mark":
        return _marks(name)
    return kind == "on device" and bool(STEP.match(name))


def _marks(name: str) -> bool:
    """Return whether a name marks a step or a loader; older torch called marks operators."""
    return bool(STEP.match(name) or LOADER.search(name)) or name.startswith(OPTIMIZER)


def _sorted_out(path: Path, whole: dict[str, Any], sieve: _Sieve) -> Trace:
    """Sort events by what they are for."""
    ran: dict[Any, list[Event]] = {}
    host: list[Event] = []
    device_steps: dict[str, Event] = {}
    for event in sorted(sieve.kept, key=lambda e: e.start_us):
        if event.kind in DEVICE:
            ran.setdefault(event.device, []).append(event)
        elif event.kind == "on device":
            device_steps.setdefault(event.name, event)  # one a stream: the first counts
        else:
            host.append(event)
    calls = [e for e in host if e.kind == "call" and LAUNCH.search(e.name)]
    launches: dict[int, float] = {}
    for event in calls:
        if event.call:
            launches.setdefault(event.call, event.start_us)
    timely = {device: [e for e in es if not _apart(e, launches)] for device, es in ran.items()}
    odd = sieve.odd + sum(len(ran[device]) - len(es) for device, es in timely.items())
    ran = {device: es for device, es in timely.items() if es}
    steps = _steps(host)
    threads = {e.thread for e in [*calls, *steps]}
    holds = [e for e in host if SYNC.search(e.name) or e.name in SYNC_OPS]
    info = whole.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    named = RANK.search(path.name)
    rank = info.get("rank", int(named[1]) if named else None)
    world = info.get("world_size")
    launchers = {e.op for events in ran.values() for e in events}
    return Trace(
        path=path,
        rank=rank if _is_number(rank) else None,
        world=world if _is_number(world) else None,
        device=max(ran.values(), key=lambda es: sum(e.end_us - e.start_us for e in es), default=[]),
        devices=len(ran),
        launches=launches,
        holds=_on(threads, holds),
        allocations=_on(threads, [e for e in host if ALLOCATOR.search(e.name)]),
        loads=_on(threads, [e for e in host if e.kind != "call" and LOADER.search(e.name)]),
        steps=steps,
        device_steps=list(device_steps.values()),
        counts=sieve.counts,
        frames=any(CATEGORIES.get(c.lower()) == "frame" for c in sieve.counts),
        computes_tf32=_computes_tf32(whole),
        operations={n: op for n, op in sieve.shaped.items() if n in launchers},
        device_name=next(
            (shown(str(card["name"])) for card in _cards(whole) if card.get("name")), ""
        ),
        odd=odd,
    )


def _apart(event: Event, launches: dict[int, float]) -> bool:
    """Return whether what the device ran is too far from its launch for both times to be right."""
    return abs(event.start_us - launches.get(event.call, event.start_us)) > APART_US


def _is_number(value: Any) -> bool:
    """Return whether a value numbers ranks."""
    return type(value) is int and 0 <= value < MOST_RANKS


def _steps(host: list[Event]) -> list[Event]:
    """Return the profiler's steps; without them those of the optimizer that steps most often."""
    marks = [e for e in host if STEP.match(e.name)]
    if marks:
        return marks
    names = Counter(e.name for e in host if e.name.startswith(OPTIMIZER))
    often = max(names, key=lambda name: names[name], default=None)
    return [e for e in host if e.name == often]


def _on(threads: set[tuple[str, str]], events: list[Event]) -> list[Event]:
    """Return events of the threads that launch: a thread that pins memory may wait as it likes."""
    return [e for e in events if e.thread in threads]


def _cards(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the file says of each device."""
    known = whole.get("deviceProperties") or whole.get("computeProperties")
    return [card for card in known if isinstance(card, dict)] if isinstance(known, list) else []


def _computes_tf32(whole: dict[str, Any]) -> bool:
    """Return whether float32 matmuls could run on tensor cores (compute capability 8.0 on)."""
    majors = [card.get("computeMajor", card.get("major")) for card in _cards(whole)]
    return all(major >= 8 for major in majors if isinstance(major, int))
