"""Report what was read, in the names of a run's report.json where both mean one thing."""

import math
import os
import sys
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.observe import REPORT_FORMAT
from headrace.observe.compile_time import compile_seconds, graph_breaks
from headrace.observe.waits import waits_of
from headrace.watch.clock import HookClock

LEADS = ("dry_before_input", "dry_after_input", "dry_at_forward")
"""Where in a step the device is asked whether it has nothing left to do."""
WARMUP_STEPS = 3
"""First steps that rates, leads and recompilations leave out: lazy state, caches, shapes."""
LOOK_EVERY = 64
"""Steps from one look at which parameters have gradients to the next."""
WINDOW_STEPS = 512
"""Newest rows, which are kept; counts and sums are over all steps."""


@dataclass(frozen=True)
class Compiled:
    """Hold what torch's compiler has done in this process so far."""

    seconds: float = 0.0
    graphs: int = 0
    breaks: int = 0

    @staticmethod
    def now() -> "Compiled":
        """Return its counters; zeros before its first use."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return Compiled()
        return Compiled(
            compile_seconds(), dynamo.counters["stats"]["unique_graphs"], graph_breaks()
        )

    def since(self, before: "Compiled") -> dict[str, Any]:
        """Return the difference; zeros where somebody has set the counters back."""
        return {
            "compile_s": max(0.0, self.seconds - before.seconds),
            "graphs": max(0, self.graphs - before.graphs),
            "graph_breaks": max(0, self.breaks - before.breaks),
        }


class Idle:
    """Find what was asked for and does nothing: parameters without a gradient, torch.compile."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._compiles = is_compiled(model)
        self._left = [p for group in optimizer.param_groups for p in group["params"]]
        self._numbers, self._looks = sum(p.numel() for p in self._left), 0

    def look(self, step: int) -> None:
        """Look before `step`: at each of the first steps, then now and then."""
        if step < WARMUP_STEPS or step % LOOK_EVERY == 0:
            self._looks += 1
            self._left = [p for p in self._left if p.grad is None]

    def report(self) -> dict[str, Any]:
        """Return the share of the optimizer's numbers, and names; None after too few steps."""
        if self._looks < WARMUP_STEPS or not self._numbers:
            return {"untrained_share": None, "lost_techniques": None}
        nothing = self._compiles and not Compiled.now().graphs
        return {
            "untrained_share": sum(p.numel() for p in self._left) / self._numbers,
            "lost_techniques": ["torch.compile"] * nothing,
        }


class StepTally:
    """Sum up rows of steps."""

    def __init__(self) -> None:
        self.rows: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self.counts: Counter[str] = Counter()
        self.epoch_wait_s = 0.0
        self.first_loss: float | None = None

    def add(self, row: dict[str, Any]) -> None:
        """Add a step that is complete; its row gets the names of metrics.jsonl."""
        counts, tokens = self.counts, row.pop("step_tokens")
        warm = row["step"] > WARMUP_STEPS and "traced" not in row
        counts["steps"] += 1
        counts["forward_steps"] += bool(row.pop("forwards"))
        counts["traced"] += "traced" in row
        for name in ("graphs", "graph_breaks"):
            counts[name] += row[name]
            counts[f"{name}_after_warmup"] += row[name] * warm
        for name in LEADS:
            counts[name] += row.get(name, False) and warm
        counts["lead_steps"] += LEADS[-1] in row and warm
        counts["tokens"] += tokens
        for name in ("padded", "targets"):
            if name in row:
                counts[name] += int(row[name])
                counts[f"{name}_of"] += tokens
        if "padded" in row:
            row["padded_tokens"] = int(row.pop("padded"))
        if "targets" in row:
            row["wasted_tokens"] = max(0, tokens - int(row.pop("targets")))
        if tokens:
            row["tokens_per_s"] = tokens / max(row["step_s"], 1e-9)
        if "max_norm" in row:
            row["clipped"] = row["grad_norm"] > row.pop("max_norm")
            counts["clipped"] += row["clipped"]
            counts["clipped_of"] += 1
        counts["norms"] += "grad_norm" in row
        row["finite"] = all(math.isfinite(row.get(n, 0.0)) for n in ("loss", "grad_norm"))
        counts["nonfinite"] += not row["finite"]
        counts["skipped"] += row.pop("skipped", 0.0) > 0
        if self.first_loss is None:
            self.first_loss = row.get("loss")
        self.epoch_wait_s = max(self.epoch_wait_s, row.pop("epoch_wait_s"))
        self.rows.append(row)

    def report(
        self, known: dict[str, Any], clock: HookClock, before: dict[str, int] | None
    ) -> dict[str, Any]:
        """Return a report.

        Args:
            known: what the watch itself knows: status, steps, model, optimizer, loader.
            clock: the clock of the steps.
            before: the allocator's counts when the watch began; None when it never did.
        """
        counts = self.counts
        steady = [r for r in self.rows if r["step"] > WARMUP_STEPS and "traced" not in r]
        steady = [r for r in steady if r["compile_s"] == 0]
        step_s = median(r["step_s"] for r in steady) if steady else None
        rates = [r["tokens_per_s"] for r in steady if "tokens_per_s" in r]
        phase_s = dict(clock.totals_s)
        transfer_s = phase_s.pop("transfer", 0.0)
        phase_s["input"] += transfer_s
        del phase_s["communication_exposed"]  # no hook sees it
        if not known.get("trainer"):  # nor this; a Trainer tells
            del phase_s["checkpoint"]
        wasted = max(0, counts["targets_of"] - counts["targets"])
        losses = [r["loss"] for r in self.rows if "loss" in r]
        report = {
            "format": REPORT_FORMAT,
            "watched": True,
            **known,
            "measured_steps": counts["steps"],
            "warmup_steps": WARMUP_STEPS,
            "steady_step_s": step_s,
            "tokens": counts["tokens"],
            "steady_tokens_per_s": median(rates) if rates else None,
            "model_flops_utilization": {"value": None},
            "peak_memory_bytes": _memory(clock.device),
            "memory_lines": [],
            "signals": {**_pressure(clock.device, before), "graph_breaks": counts["graph_breaks"]},
            "phase_s": {"other": 0.0, **phase_s},
            "transfer_s": transfer_s,
            "input_wait": self._waits(step_s),
            "host_lead": self._leads(),
            "compiler": {
                f"{name}{when}": counts[f"{name}{when}"]
                for name in ("graphs", "graph_breaks")
                for when in ("", "_after_warmup")
            },
            "wasted_token_fraction": _share(wasted, counts, "targets_of"),
            "padding_fraction": _share(counts["padded"], counts, "padded_of"),
            "loss": {"first": self.first_loss, "last": losses[-1] if losses else None},
            "clip_rate": _share(counts["clipped"], counts, "clipped_of"),
            "nonfinite_steps": counts["nonfinite"],
            "skipped_steps": counts["skipped"],
        }
        missing = self._not_measured(report, clock)
        return {**report, "not_measured": missing, "rows": [dict(r) for r in self.rows]}

    def _waits(self, step_s: float | None) -> dict[str, Any]:
        """Return how long steps waited for data, on the host."""
        waits_s = [r["wait_s"] for r in self.rows]
        waits = waits_of(waits_s, step_s)
        if len(waits_s) < 2:
            return {**waits, **dict.fromkeys(("p95_s", "max_s", "epoch_max_s"))}
        p95_s = quantiles(waits_s, n=20, method="inclusive")[-1]
        return {**waits, "p95_s": p95_s, "max_s": max(waits_s), "epoch_max_s": self.epoch_wait_s}

    def _leads(self) -> dict[str, int] | None:
        """Return in how many warm steps the device had run dry; None on the host."""
        if not self.counts["lead_steps"]:
            return None
        dry = {f"{name}_steps": self.counts[name] for name in LEADS}
        return {"steps": self.counts["lead_steps"], **dry}

    def _not_measured(self, report: dict[str, Any], clock: HookClock) -> list[str]:
        counts = self.counts
        open_steps, given = report["steps"] - counts["steps"], bool(report.get("loader"))
        read = counts["tokens"] or report["phase_s"].get("input")
        missing = {
            "checkpoints: no hook sees them": not report.get("trainer"),
            "exposed communication and kernels: no step was traced": not counts["traced"],
            "every step: optimizer.step was never seen": not report["steps"],
            f"{open_steps} steps: the device has not finished them": open_steps > 0,
            "the wait for data: no loader was given": not given,
            "the wait for data: nothing was read from the loader given": given and not read,
            "the host's lead: the device is the host": not clock.asynchronous,
            "forward and backward apart: another wrapper compiled the model, or calls it": counts[
                "forward_steps"
            ]
            < counts["steps"],
            "wasted tokens: no batch names input_ids and labels": not counts["targets_of"],
            "padding: no batch names input_ids and attention_mask": not counts["padded_of"],
            "loss: neither returned by the model nor noted": report["loss"]["last"] is None,
            "gradient norms: no step's were read, nor noted": not counts["norms"],
            "clipping: no grad_norm and max_norm were noted": not counts["clipped_of"],
        }
        return [sentence for sentence, is_missing in missing.items() if is_missing]


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model was given to torch.compile, or made by it."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def describe(model: nn.Module, optimizer: Any, loader: Any, arguments: Any) -> dict[str, Any]:
    """Return what a remedy must know of the three, and of a Trainer's arguments."""
    parameter = next(model.parameters(), torch.empty(0))
    device, cuda = parameter.device, parameter.device.type == "cuda"
    first = optimizer.param_groups[0]
    names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
    given = {name: getattr(loader, name, None) for name in names}
    asked = ("bf16", "fp16", "torch_compile", "max_grad_norm")
    return {
        "parameters": sum(p.numel() for p in model.parameters() if not is_lazy(p)),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else None,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "compiled": is_compiled(model),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "trainer": arguments and {name: getattr(arguments, name, None) for name in asked},
        "optimizer": {
            "name": type(optimizer).__name__,
            **{name: first.get(name) for name in ("fused", "foreach", "capturable")},
        },
        "loader": None if loader is None else {"name": type(loader).__name__, **given},
    }


def allocator(device: torch.device) -> dict[str, int]:
    """Return how often the allocator gave back its cache to go on, and how often it failed."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {"alloc_retries": stats.get("num_alloc_retries", 0), "ooms": stats.get("num_ooms", 0)}


def _pressure(device: torch.device, before: dict[str, int] | None) -> dict[str, Any]:
    """Return the device's memory, and the allocator's troubles since the watch began."""
    if device.type != "cuda" or before is None:
        return {"device": device.type, "capacity_bytes": None, "alloc_retries": None, "ooms": None}
    return {
        "device": device.type,
        "capacity_bytes": torch.cuda.get_device_properties(device).total_memory,
        **{name: count - before[name] for name, count in allocator(device).items()},
    }


def _memory(device: torch.device) -> dict[str, Any]:
    """Return the peak bytes since the process began, or since its loop set the peaks back."""
    unknown = {"predicted": None, "predicted_at": None}
    if device.type != "cuda":
        import resource  # which not every system has

        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"allocated": None, "reserved": resident, **unknown, "method": "process"}
    stats = torch.cuda.memory_stats(device)
    names = ("allocated", "reserved", "active", "inactive_split")
    peaks = {name: stats.get(f"{name}_bytes.all.peak", 0) for name in names}
    return {**peaks, **unknown, "method": "allocator"}


def _share(part: int, counts: Counter[str], whole: str) -> float | None:
    return part / counts[whole] if counts[whole] else None
