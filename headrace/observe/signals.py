"""Read numbers cheaply while a run goes: phase times, loss, norms, memory.

On a GPU nothing here waits for the device. A phase's beginning is an event in the stream; the loss
is copied to pinned memory behind the step; both are read when a later step finds them complete, and
at the latest one step on, so the host never runs more than two steps ahead. On a CPU the clock is
read directly. Phases partition the step, so their times sum to it.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from headrace.observe import PHASES

STEP_PHASES = ("input", "forward", "backward", "optimizer")
OUTSIDE = ("checkpoint", "eval", "other")
"""Phases that stand between steps; `headrace.watch` marks the last two."""
PARTS = {"copy": "input", "prepare": "forward"}
"""Marks that are parts of a phase: the copy of a batch to the device, and the step's own work
before its first forward, which waits for no data even where a thread that reads holds it up."""
TINY_BYTES = 4096
"""Bytes up to which an operation is all overhead: a page is read in less time than a call takes."""
PROBES, PROBED = 5, 200
"""How often one tiny operation is timed, and over how many of them; the fastest counts."""


class HostClock:
    """Hold a moment on the host, in the shape of a device event."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        """Take the time now."""
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        """Return True: the host is never behind itself."""
        return True

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def elapsed_time(self, later: "HostClock") -> float:
        """Return the milliseconds until `later`, as a CUDA event does."""
        return (later.at_s - self.at_s) * 1e3


@dataclass
class Pending:
    """Hold a step whose device work may not be complete."""

    step: int
    marks: list[tuple[str, Any]]
    end: Any
    read: Tensor
    facts: dict[str, Any] = field(default_factory=dict)


class Signals:
    """Time the phases of the steps of a run."""

    def __init__(self, device: torch.device, more: Sequence[str] = ()) -> None:
        """Begin with no steps.

        Args:
            device: where they run.
            more: names of the numbers that a step gives after the four of every step.
        """
        self.device, self._more = device, tuple(more)
        self.cuda = device.type == "cuda"
        self.totals_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._free: list[Any] = []
        self._free_reads: list[Tensor] = []
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[Pending] = deque()
        self._dry = 0

    def mark(self, phase: str) -> None:
        """Begin a phase of the current step now; an evaluation is timed as a whole."""
        if not torch.is_grad_enabled():
            return
        if phase == "forward" and self.cuda and all(name != phase for name, _ in self._marks):
            self._dry = int(bool(self._pending) and self._pending[-1].end.query())
        self._marks.append((phase, self._moment()))

    def end_step(self, step: int, numbers: Tensor, facts: dict[str, Any]) -> None:
        """Take note that the step is issued.

        Args:
            step: the index of the step.
            numbers: fp32 on the device: loss in nats per token, gradient norm, finite (1 or 0),
                targets that counted, and those that `more` names.
            facts: what the host already knows.
        """
        if self._free_reads:
            read = self._free_reads.pop()
        else:
            read = torch.empty(len(numbers), pin_memory=self.cuda)
        read.copy_(numbers, non_blocking=self.cuda)
        if self.cuda:  # whether the step before was through when this one's first work came
            facts["dry"] = self._dry
        self._pending.append(Pending(step, self._marks, self._moment(), read, facts))
        self._marks = []

    def drain(self, *, keep: int | None = 1) -> list[dict[str, Any]]:
        """Return rows of complete steps; wait until at most `keep` are not; None never waits."""
        rows = []
        while self._pending:
            pending = self._pending[0]
            if self.cuda and keep is not None and pending.end.query():
                # Done before the host asked. To wait for it anyway gives other threads the
                # interpreter, and the time until it comes back is no wait for the device.
                pending.facts["slack_s"] = 0.0
            elif self.cuda and keep is not None and len(self._pending) > keep:
                began_s = time.perf_counter()
                pending.end.synchronize()
                pending.facts["slack_s"] = time.perf_counter() - began_s
            elif not pending.end.query():
                break
            rows.append(self._row(self._pending.popleft()))
        return rows

    def spent(self, phase: str, seconds: float) -> None:
        """Add host time that stands outside of steps (checkpoint, eval, compile, trace)."""
        self.totals_s[phase] = self.totals_s.get(phase, 0.0) + seconds

    def _row(self, pending: Pending) -> dict[str, Any]:
        seconds: dict[str, float] = dict.fromkeys(STEP_PHASES, 0.0)
        here = self.device.type == "cpu"  # to where nothing is copied
        parts = {**PARTS, "copy": "forward"} if here else PARTS
        ends = [m for _, m in pending.marks[1:]] + [pending.end]
        for (mark, begin), end in zip(pending.marks, ends, strict=True):
            phase = parts.get(mark, mark)
            seconds[phase] = seconds.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        if pending.facts.pop("compile_s", 0.0) > 0:
            # Compiling happens inside the phase that first calls the code, and brings the first
            # launch, kernel choice and caches with it: such a step counts as compiling whole.
            inside = {p: s for p, s in seconds.items() if p not in OUTSIDE}
            seconds |= {**dict.fromkeys(inside, 0.0), "compile": sum(inside.values())}
        for phase, spent_s in seconds.items():
            self.totals_s[phase] = self.totals_s.get(phase, 0.0) + spent_s
        numbers = self._named(pending.read.tolist())
        self._free += [m for _, m in pending.marks] + [pending.end]
        self._free_reads.append(pending.read)
        return {
            "step": pending.step,
            **numbers,
            "step_s": sum(seconds.values()),
            "compile_s": 0.0,
            **{f"{phase}_s": spent_s for phase, spent_s in seconds.items()},
            **pending.facts,
        }

    def _moment(self) -> Any:
        moment = self._free.pop() if self._free else self._new_moment()
        moment.record()
        return moment

    def _new_moment(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else HostClock()

    def _named(self, numbers: list[float]) -> dict[str, Any]:
        """Return by name the numbers that `end_step` was given."""
        loss, norm, finite, targets, *more = numbers
        return {
            "loss": loss,
            "grad_norm": norm,
            "finite": finite == 1.0,
            "targets": int(targets),
            **dict(zip(self._more, more, strict=True)),
        }


class Operations:
    """Count the operations of one step: those that do next to nothing, and the FLOPs of matmuls.

    What `views` and `tiny` ones cost the host is their number times what one costs here, for they
    all but cost the same. Matmuls of the update (Muon's) are left out: the optimizer says in what
    they are computed, and not the plan's precision.
    """

    def __init__(self) -> None:
        self.count = self.views = self.tiny = 0
        self.matmul_flops: Counter[str] = Counter()

    def note(self, func: Any, args: tuple[Any, ...], out: Any, *, updates: bool = False) -> None:
        """Count one operation, of the update or before it."""
        self.count += 1
        if getattr(func, "is_view", False):
            self.views += 1
            return
        touched = (t.nbytes for t in tree_iter((args, out)) if isinstance(t, Tensor))
        self.tiny += all(size <= TINY_BYTES for size in touched)
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm") and not updates:
            rows = args[0] if name in ("mm", "bmm") else args[1]
            kind = str(out.dtype).removeprefix("torch.")
            self.matmul_flops[kind] += 2 * out.numel() * rows.size(-1)

    def report(self) -> dict[str, Any]:
        """Return counts, FLOPs of matmuls by dtype, and the host's seconds for tiny operations."""
        one = torch.ones(1)
        view_s, tiny_s = _fastest(lambda: one[:1]), _fastest(lambda: one + 1.0)
        return {
            "count": self.count,
            "views": self.views,
            "tiny": self.tiny,
            "host_s": self.views * view_s + self.tiny * tiny_s,
            "product_flops": dict(self.matmul_flops),
        }


def _fastest(act: Callable[[], Any]) -> float:
    """Return the seconds of one call, in the fastest of several series."""
    call_s = []
    for _ in range(PROBES):
        began_s = time.perf_counter()
        for _ in range(PROBED):
            act()
        call_s.append((time.perf_counter() - began_s) / PROBED)
    return min(call_s)


def _waits(func: Any) -> bool:
    """Return whether an operation waits for a collective."""
    return func is torch.ops._c10d_functional.wait_tensor.default


def _tensors_in(out: Any) -> list[Tensor]:
    """Return the tensors of what an operation returned."""
    if isinstance(out, Tensor):
        return [out]
    return [tensor for tensor in tree_iter(out) if isinstance(tensor, Tensor)]


def memory_tracker(
    model: torch.nn.Module, optimizers: list[Any], seen: Operations | None = None
) -> Any:
    """Return torch's MemTracker for a model whose parts may run several times and may be frozen.

    It sees every operation, and `seen` counts each. Tensors that were made before are unknown to
    it, but for those of the model and of `optimizers`, among which may be tensors.
    """
    from torch._guards import active_fake_mode
    from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
    from torch.distributed.tensor import DTensor

    class LenientTracker(MemTracker):
        """Take second forwards and frozen parameters, which MemTracker refuses.

        MemTracker also looks at every module at every operation, and makes each result anew.
        """

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if DTensor in types or _waits(func):
                out = super().__torch_dispatch__(func, types, args, kwargs)
            else:
                out = func(*args, **kwargs or {})
                if active_fake_mode() is getattr(self, "_fake_mode_on_entry", None):
                    self._note_memory(out)
            if seen is not None and out is not NotImplemented:
                seen.note(func, args, out, updates=self._in_opt)
            return out

        def _note_memory(self, out: Any) -> None:
            temporary = self._mod_tracker.is_bw and not self._in_ac
            made_by = _MemRefType.TEMP if temporary else _MemRefType.ACT
            for tensor in _tensors_in(out):
                self._track(_MemRefType.OPT if self._in_opt else made_by, tensor)
            self._update_peak_stats(None)

        def _update_peak_stats(self, peak_state: Any) -> None:
            for device, sizes in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < sizes["Total"]:
                    self._peak_mem[device] = sizes["Total"]
                    self._peak_mem_snap[device] = dict(sizes)

        def get_tracker_snapshot(self, type: str = "current") -> Any:
            """Return the snapshot without torch's deep copy of two dictionaries of integers."""
            known = self._curr_mem_snap if type == "current" else self._peak_mem_snap
            return {device: dict(sizes) for device, sizes in known.items()}

        def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
            if not self._mod_tracker.is_bw:
                self.memory_tracking.pop(module, None)
            super()._pre_fw_hook(module, inputs)

        def _track_module_params_and_buffers(
            self, module: torch.nn.Module, install_grad_hooks: bool = True
        ) -> tuple[int, int]:
            trained = all(p.requires_grad for p in module.parameters())
            return super()._track_module_params_and_buffers(module, install_grad_hooks and trained)

    tracker = LenientTracker()
    tracker.track_external(model, *optimizers)
    return tracker


class TrackedMemory:
    """Measure the peak memory of a step on the host by torch's MemTracker, once and uncompiled.

    The tracker watches every tensor by its storage, so it also sees what selective checkpointing
    keeps, which saved-tensor hooks do not.
    """

    def __init__(self, model: torch.nn.Module, optimizers: list[Any]) -> None:
        self.operations = Operations()
        self._tracker = memory_tracker(model, optimizers, self.operations)

    def __enter__(self) -> "TrackedMemory":
        self._tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.__exit__(*error)

    def peak_bytes(self) -> dict[str, int]:
        """Return the bytes at the peak by category ("Parameter", "Activation", ...) and "Total"."""
        devices = self._tracker.get_tracker_snapshot("peak")
        peak: dict[str, int] = {}
        for categories in devices.values():
            for name, size in categories.items():
                key = getattr(name, "value", str(name))
                peak[key] = peak.get(key, 0) + int(size)
        return peak


def device_peak_bytes(device: torch.device) -> dict[str, int] | None:
    """Return the peaks of the allocator on a GPU in bytes; None on other devices."""
    if device.type != "cuda":
        return None
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of the allocator on a GPU, or of the process; None where nothing tells it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # which not every system has
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
