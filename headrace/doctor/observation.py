"""Observe what a run of Headrace or a watched loop left, in one shape for one table of rules.

A run leaves report.json and a row of metrics.jsonl for each step; `headrace.watch` leaves one file
with the same names. What nobody read is None, and the doctor says that it was not measured rather
than guess. Steps that compiled, and the first ones, are no steady steps.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from headrace.core.command import rerun
from headrace.core.errors import RunError
from headrace.core.files import shell
from headrace.doctor.findings import Finding
from headrace.doctor.stages import StageTimes
from headrace.doctor.use import UNKNOWN, Use

WARM_STEPS = 2
"""First steps of a session that are never steady: caches fill, and states are made."""
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the name of its precision."""
PADDED = 0.02
"""Share of the tokens from which padding is worth a change. Chosen, not measured."""


@dataclass(frozen=True)
class Observation:
    """Hold what is known of one run or loop, its steady steps in order, the oldest first.

    Args:
        step_s: seconds of each steady step.
        input_s: seconds of each step in which the device waited for the loader.
        forward_s, backward_s: seconds of the device's work on the model.
        communication_s: seconds of exposed communication.
        slack_s: seconds in which the host waited for the device. Near zero, the host is what the
            step waits for, or a step's launches do not fit into the device's queue.
        dry: 1 for each step at whose beginning the device had nothing left to do, else 0.
        loss, grad_norm: of every step, not of the steady ones only; nan where they were not finite.
        useful_share: share of the tokens that a loss counted, or that it read to count others.
        counted_share: share of the tokens that a loss counted.
        recompile_s: seconds that each step which compiled after the first ones took more than
            others.
        graph_breaks: breaks between compiled graphs.
        tiny: operations of a step that are views or touch a page at most.
        host_s: seconds of the host for them.
        wide_flops: share of the FLOPs of matmuls in a dtype wider than the plan's.
        wider: how many times as wide that dtype is.
        straggler_s: seconds by which the last rank of a step is behind the others' median, in the
            median step.
        waited_s: mean seconds of a step in which this rank waited for the last one.
        last, last_share: the rank that is last most often, and in how much of the steps.
        host: the machine of that rank, where the ranks are on several; else "".
        stages: what ranks of a pipeline take for their passes; None without a pipeline.
        allocated_bytes, reserved_bytes: peaks; on a CPU those of the process.
        capacity_bytes: memory of the device.
        alloc_retries: times that the allocator gave back its cache to go on.
        savings: for each technique that trades time for memory, the "bytes" that it takes off the
            peak, the share of a step's FLOPs that it does "again" and the bytes "moved" for it.
        untrained: share of the optimizer's parameters that never had a gradient.
        inactive: names of techniques that were asked for and are not in force.
        unreached: for each technique some of whose parts learned nothing, these "parts", and the
            "others".
        before_nats: validation loss before the first step.
        val_nats: validation losses after it, the oldest first.
        val_steps: the steps after which they were.
        val_passes: the passes over the text until then; none where nothing says them.
        given: of given weights, what "trains", its "lr" and the "usual_lr", which may be None, and
            the "fp32_bytes" of frozen weights that bf16 arithmetic reads.
        general: loss on the general text, "before_nats" and "after_nats", and its "source".
        templates: sha256 of the chat template that conversations were written by, and of the one
            beside the tokenizer, where that is another.
        device: "cuda", "cpu" or "mps".
        ended_by: class of the error that ended the run, "" where none did.
        message: the first line of that error's message.
        phases: findings that say where the time, the memory and the tokens went.
        padding_share: share of the tokens that are padding.
        masks_prompts: tokens without a target may all be masked prompts, which are no waste.
        gpu: what the GPU reported of its clock.
        outcome: how the run diverged, with numbers, where it did.
        not_hooked: what no hook of a watched loop saw, in words for a reader.
        not_logged: what the log of another trainer does not say, in the same words.
        logged_loop: what a log tells of its loop, by the names under which a watch saves it.
        use: what the work of a step takes of the device.
        traced: findings of the newest profiler window.
        split: where kernels or operations of that window spent their time.
        beside: the finding that a run beside this one came as far with fewer tokens.
    """

    step_s: tuple[float, ...] = ()
    input_s: tuple[float, ...] | None = None
    forward_s: tuple[float, ...] | None = None
    backward_s: tuple[float, ...] | None = None
    communication_s: tuple[float, ...] | None = None
    slack_s: tuple[float, ...] | None = None
    dry: tuple[float, ...] | None = None
    loss: tuple[float, ...] | None = None
    grad_norm: tuple[float, ...] | None = None
    useful_share: float | None = None
    counted_share: float | None = None
    recompile_s: tuple[float, ...] = ()
    graph_breaks: int | None = None
    tiny: int | None = None
    host_s: float | None = None
    wide_flops: float | None = None
    wider: float = 1.0
    straggler_s: float | None = None
    waited_s: float | None = None
    last: int | None = None
    last_share: float = 0.0
    host: str = ""
    stages: StageTimes | None = None
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    capacity_bytes: float | None = None
    alloc_retries: int | None = None
    savings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    untrained: float = 0.0
    inactive: tuple[str, ...] = ()
    unreached: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    before_nats: float | None = None
    val_nats: tuple[float, ...] = ()
    val_steps: tuple[int, ...] = ()
    val_passes: tuple[float, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    general: Mapping[str, Any] = field(default_factory=dict)
    templates: tuple[str, str] | None = None
    device: str = ""
    ended_by: str = ""
    message: str = ""
    phases: tuple[Finding, ...] = ()
    padding_share: float | None = None
    masks_prompts: bool = False
    gpu: Mapping[str, Any] | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)
    not_hooked: tuple[str, ...] = ()
    not_logged: tuple[str, ...] = ()
    logged_loop: Mapping[str, Any] = field(default_factory=dict)
    watched_steps: int = 0
    use: Use = UNKNOWN
    traced: tuple[Finding, ...] = ()
    split: Finding | None = None
    beside: Finding | None = None

    @property
    def steps(self) -> int:
        """Return how many steady steps there are."""
        return len(self.step_s)

    def share(self, series: Sequence[float] | None) -> float | None:
        """Return the share of the steps' time that a phase took; None where it was not read."""
        whole_s = sum(self.step_s)
        return None if series is None or not whole_s else sum(series) / whole_s


def steady(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows behind a session's first ones without compiling and without a profiler."""
    taken: Counter[Any] = Counter()
    steady_rows = []
    for row in rows:
        taken[row.get("session")] += 1
        undisturbed = not row.get("compile_s") and not row.get("traced")
        if taken[row.get("session")] > WARM_STEPS and undisturbed:
            steady_rows.append(row)
    return steady_rows


def series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...] | None:
    """Return a number of each row, nan for null; None where a row lacks it."""
    if not rows or any(key not in row for row in rows):
        return None
    return tuple(nan if row[key] is None else float(row[key]) for row in rows)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, without a last line that was cut off.

    A file that is missing has no rows.

    Raises:
        RunError: a line before the last one is no JSON object, or it is no text.
    """
    rows: list[dict[str, Any]] = []
    aside = f"mv {shell(file)} {shell(f'{file}.damaged')}"
    mend = f"{aside}; {rerun((file.parent, file.parent), verb='doctor')}"
    try:
        lines = [n for n in file.read_text().splitlines() if n.strip()] if file.exists() else []
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}", mend) from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        except RecursionError:
            message = f"{file} line {number} holds lists in lists too deep to be read"
            raise RunError(message, mend) from None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise RunError(f"{file} line {number} is damaged", mend)
    return rows


def observe(
    report: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    use: Use = UNKNOWN,
    phases: Sequence[Finding] = (),
) -> Observation:
    """Read the signals of a run or of a watched loop.

    Args:
        report: report.json, or what `headrace.watch` saved.
        rows: the rows of metrics.jsonl.
        use: what the work of its steps takes of the device.
        phases: where the report says that the time went.
    """
    kept, waste = steady(rows), (counts := report["wasted_token_fraction"])
    if "chat" in (report.get("data") or {}):  # a masked prompt is read to be answered
        waste = report["padding_fraction"]
    memory, signals = report["peak_memory_bytes"], report.get("signals") or {}
    measured = memory["method"] == "allocator"
    step_s = _step_s(kept)
    read: Callable[[str], tuple[float, ...] | None] = lambda key: series(kept, key)  # noqa: E731
    not_hooked = report.get("not_measured") if report.get("watched") else None
    return Observation(
        step_s=step_s,
        input_s=read("input_s"),
        forward_s=read("forward_s"),
        backward_s=read("backward_s"),
        communication_s=read("communication_exposed_s"),
        slack_s=read("slack_s"),
        dry=read("dry"),
        loss=series(rows, "loss"),
        grad_norm=series(rows, "grad_norm"),
        useful_share=None if waste is None else 1.0 - waste,
        counted_share=None if counts is None else 1.0 - counts,
        recompile_s=_recompiles(rows, median(step_s)) if step_s else (),
        graph_breaks=signals.get("graph_breaks"),
        **_operations(signals),
        **_ranks(signals),
        stages=StageTimes.of(signals.get("stages")),
        allocated_bytes=memory["allocated"] if measured else None,
        reserved_bytes=memory["reserved"],
        capacity_bytes=signals.get("capacity_bytes"),
        alloc_retries=signals.get("alloc_retries"),
        savings=signals.get("savings") or {},
        untrained=signals.get("untrained_share") or 0.0,
        inactive=tuple(signals.get("lost_techniques") or ()),
        unreached=signals.get("unreached") or {},
        before_nats=(report.get("before") or {}).get("loss_nats"),
        val_nats=tuple(one["loss_nats"] for one in report.get("val") or ()),
        val_steps=tuple(one.get("step", 0) for one in report.get("val") or ()),
        val_passes=_passes(report),
        given=signals.get("given") or {},
        general=report.get("general") or {},
        templates=_templates(report),
        device=signals.get("device", ""),
        ended_by=report.get("error", "RunError") if report.get("status") == "failed" else "",
        message=report.get("message", "").partition("\n")[0],
        phases=tuple(phases),
        padding_share=report.get("padding_fraction"),
        masks_prompts=masks_prompts(report),
        gpu=signals.get("gpu"),
        outcome=report.get("outcome") or {},
        not_hooked=tuple(map(str, not_hooked)) if isinstance(not_hooked, list) else (),
        watched_steps=report.get("measured_steps", 0),
        use=use,
    )


def _passes(report: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the passes over the text until each validation: its tokens by those that differ."""
    sources = ((report.get("data") or {}).get("mixture") or {}).get("sources") or ()
    each = [(one.get("tokens") or 0, one.get("source_tokens") or 0) for one in sources]
    read, differ = sum(n for n, _ in each), sum(map(min, each))
    looks, whole = report.get("val") or (), report.get("tokens")
    if not (differ and whole and all(one.get("tokens") for one in looks)):
        return ()
    return tuple(one["tokens"] / whole * read / differ for one in looks)


def _templates(report: Mapping[str, Any]) -> tuple[str, str] | None:
    talks = (report.get("data") or {}).get("chat") or {}
    other = talks.get("other_template_sha256")
    return (talks["template_sha256"], other) if other else None


def masks_prompts(report: Mapping[str, Any]) -> bool:
    """Return whether a loop's tokens without a target may all be masked prompts.

    They are then no fault. A run of Headrace masks the prompts of its conversations.
    """
    padded, wasted = report.get("padding_fraction"), report["wasted_token_fraction"]
    talks = report.get("watched") or "chat" in (report.get("data") or {})
    return bool(talks and wasted and (padded or 0.0) < PADDED)


def _step_s(rows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return the seconds of each step, without what a loop did between it and the next."""
    whole, between = series(rows, "step_s") or (), series(rows, "other_s") or (0.0,) * len(rows)
    return tuple(a - b for a, b in zip(whole, between, strict=False))


def _recompiles(rows: Sequence[Mapping[str, Any]], usual_s: float) -> tuple[float, ...]:
    """Return the seconds that steps behind a session's first ones took more for compiling."""
    taken: Counter[Any] = Counter()
    more_s = []
    for row in rows:
        taken[row.get("session")] += 1
        if taken[row.get("session")] > WARM_STEPS and row.get("compile_s"):
            more_s.append(max(0.0, row["step_s"] - row.get("other_s", 0.0) - usual_s))
    return tuple(more_s)


def _operations(signals: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was dispatched in the step of which the operations were counted."""
    seen = signals.get("operations")
    if not seen:
        return {}
    flops, width = seen["product_flops"], WIDTHS[signals["precision"]]
    wide = {dtype: n for dtype, n in flops.items() if WIDTHS.get(dtype, 0) > width}
    return {
        "tiny": seen["views"] + seen["tiny"],
        "host_s": seen["host_s"],
        "wide_flops": sum(wide.values()) / sum(flops.values()) if flops else None,
        "wider": max((WIDTHS[dtype] for dtype in wide), default=width) / width,
    }


def _ranks(signals: Mapping[str, Any]) -> dict[str, Any]:
    """Return how evenly ranks work."""
    ranks = signals.get("ranks")
    if not ranks:
        return {}
    hosts = ranks.get("hosts") or [""]
    return {
        "straggler_s": ranks["late_s"],
        "last": ranks["last"],
        "last_share": ranks["last_share"],
        "waited_s": ranks["waited_s"][0],
        "host": hosts[ranks["last"]] if len({*hosts}) > 1 else "",
    }
