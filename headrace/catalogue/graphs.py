"""List every graph, break and recompile of a plan, from torch's own records.

A plan that compiles says nothing about how often: a break splits a graph and gives back to Python
what lies between the pieces, and a guard that fails compiles the whole function again. torch keeps
a record of each: one of `CompilationMetrics` per compiled frame (function, line, seconds, and which
guard failed), and one of `GraphCompileReason` per break (the stack, and a message with hints). This
takes the plan's own model on its own device, a few rows of real data, two steps, the first step of
each later length of rows, and an evaluation, and reads them. So it shows what a run shows: a step
that compiles again although nothing changed, and the evaluation, whose graphs have no gradients.

`fullgraph` is left out while it looks, so that all breaks are found and not only the first. Left
out: several ranks.
"""

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import make_build
from headrace.assemble.context import check_supported, choose_device, make_context, on_one_process
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import Progress
from headrace.core.remedy import mend
from headrace.core.units import format_seconds
from headrace.data.ingest import prepare
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Technique
from headrace.train.evaluate import evaluate
from headrace.train.train import step

MOST_ROWS = 2
"""Most rows of the batch that is tried: their number changes shapes, and not what is traced."""
LENGTH = "sequence_length"
"""Name of the step's value that says how long its rows are, where that varies."""
RECORDS = 100_000
"""Most compilations that are kept; torch keeps 64 by itself."""
TORCH = str(Path(torch.__file__).parent)
PLACE = re.compile(r'File "(.+)", line (\d+)')
RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")

FIXES: Sequence[tuple[str, str]] = (
    ("generic_jump", "it branches on a tensor: torch.where, or decide outside of the graph"),
    ("grad_mode", "none: evaluation has no gradients, and needs graphs of its own once"),
    ("autocast", "enter autocast in one way everywhere"),
    ("size mismatch", "keep to few shapes: --with shape_buckets, or rows of one length"),
    ("stride mismatch", "make the tensor contiguous before it comes in"),
    ("dtype mismatch", "hand in one dtype"),
    ("requires_grad mismatch", "freeze before the first step, and not later"),
    ("___check_obj_id", "make the object once, while the build is made, and not in each step"),
    ("___check_type_id", "hand in one type"),
    ("___dict_contains", "give it all its attributes while the build is made"),
    ("len(", "hand in a list or dictionary of one length"),
    (" == ", "a number that changes belongs into a tensor"),
)
"""Part of torch's message -> what mends the cause, where torch gives no hint; the first match
counts."""


def explain_graphs(plan: Plan, progress: Progress | None = None) -> tuple[dict[str, Any], str]:
    """Return graphs, graph breaks and recompiles of a few steps, as data and as text.

    Args:
        plan: the run; its data is prepared as a run would, no run folder is made.
        progress: where to tell how preparing goes.

    Raises:
        ConfigError: nothing of the plan is compiled.
        UnsupportedError: a technique cannot run here, or the plan needs several processes.
    """
    compiling = [t for t in plan.techniques.values() if "compiled" in t.composes]
    if not compiling:
        raise ConfigError(
            f"nothing of {plan.name} is compiled, so it has no graphs", mend("+torch_compile")
        )
    if plan.mesh.ranks > 1:
        raise UnsupportedError(
            f"--graph looks at one process, and the plan's mesh has {plan.mesh.ranks}",
            on_one_process(plan),
        )
    device = choose_device(plan)
    check_supported(list(plan.techniques.values()), make_context(plan, device))
    tried = _tried(plan, compiling)
    prepared = prepare(tried, progress=(progress or Progress()).task)
    with _all_records():
        build = make_build(tried, prepared, World(), device)
        recorded = _watch(build)
    value = {
        "name": plan.name,
        "device": device.type,
        "torch": torch.__version__,
        "rows": tried.micro_rows,
        "tokens_of_a_row": tried.data.sequence_length,
        "fullgraph": any(getattr(t, "fullgraph", False) for t in compiling),
        **recorded,
    }
    return value, _as_text(value, compiling[0].name())


def _tried(plan: Plan, compiling: Sequence[Technique[Any]]) -> Plan:
    """Return the plan with one small micro-batch, as many steps as before, and breaks allowed."""
    rows = min(MOST_ROWS, plan.micro_rows)
    tokens = rows * plan.data.sequence_length
    techniques = dict(plan.techniques)
    for technique in compiling:
        if "fullgraph" in type(technique).model_fields:
            techniques[technique.name()] = technique.model_copy(update={"fullgraph": False})
    return plan.replaced(
        batch=plan.batch.model_copy(update={"tokens": tokens, "micro_sequences": rows}),
        schedule=plan.schedule.model_copy(update={"steps": plan.horizon_steps}),
        eval=plan.eval.model_copy(update={"tokens": tokens}),
        techniques=techniques,
    )


@contextmanager
def _all_records() -> Iterator[None]:
    """Let torch keep every record while it lasts."""
    from torch._dynamo import utils

    utils.set_compilation_metrics_limit(RECORDS)
    try:
        yield
    finally:
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)


def _watch(build: Build) -> dict[str, Any]:
    """Take the steps and evaluate once; return what torch recorded, by when it did."""
    from torch._dynamo import utils

    def take(index: int) -> None:
        step(build, build.loader.step(index).micros, index)

    steps = _steps(build)
    acts: dict[str, Callable[[], Any]] = {f"step {n + 1}": partial(take, n) for n in steps}
    acts["evaluation"] = partial(evaluate, build)
    metrics: list[tuple[str, Any]] = []
    breaks: list[tuple[str, Any]] = []
    begun, broken = len(utils.get_compilation_metrics()), len(utils.graph_break_reasons)
    with ExitStack() as stack:
        stack.callback(build.loader.close)
        for flags in build.runtime:
            stack.enter_context(flags())
        for when, act in acts.items():
            act()
            metrics += [(when, m) for m in utils.get_compilation_metrics()[begun + len(metrics) :]]
            breaks += [(when, b) for b in utils.graph_break_reasons[broken + len(breaks) :]]
    frames = [(when, m) for when, m in metrics if m.co_name is not None]
    return {
        "steps": [n + 1 for n in steps],
        "seconds": sum(_seconds(m) for _, m in metrics),
        "graphs": _graphs(frames, metrics),
        "breaks": _breaks(breaks, frames),
        "recompiles": _recompiles(frames),
        "uncompiled": _uncompiled(metrics),
    }


def _steps(build: Build) -> list[int]:
    """Return the first two steps, and the first of each later length of rows; counted from 0."""
    length = build.values.get(LENGTH, float)
    last = (build.plan.horizon_steps or 0) if LENGTH in build.values else 0
    return [0, 1, *(n for n in range(2, last) if length(n) != length(n - 1))]


def _seconds(record: Any) -> float:
    return (record.duration_us or 0) / 1e6


def _frame(when: str, record: Any) -> dict[str, Any]:
    """Return where a compiled function stands."""
    resumed = RESUMED.fullmatch(record.co_name or "?")
    name = f"{resumed[1]} after line {resumed[2]}" if resumed else record.co_name
    return {
        "id": record.compile_id,
        "function": name,
        "file": record.co_filename,
        "line": record.co_firstlineno,
        "when": when,
        "seconds": _seconds(record),
    }


def _graphs(frames: Sequence[tuple[str, Any]], metrics: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return every frame that became a graph, with the seconds of its backward graph."""
    backward: dict[str, float] = {}
    for _, record in metrics:
        if record.co_name is None and not record.fail_type:
            key = record.compile_id
            backward[key] = backward.get(key, 0.0) + _seconds(record)
    return [
        _frame(when, record)
        | {
            "operations": record.graph_op_count,
            "backward_seconds": backward.get(record.compile_id, 0.0),
            "no_cuda_graph": record.cudagraph_skip_reason,
        }
        for when, record in frames
        if record.graph_op_count and not record.fail_type
    ]


def _breaks(
    breaks: Sequence[tuple[str, Any]], frames: Sequence[tuple[str, Any]]
) -> list[dict[str, Any]]:
    """Return every place that breaks a graph, once; seconds are those of repeated tracing."""
    breaks_of: dict[tuple[str, int, str], dict[str, Any]] = {}
    for when, record in breaks:
        where = _own_line(record.user_stack)
        cause, fix = _cause_and_fix(record.reason)
        key = (where.filename, where.lineno or 0, cause)
        entry = breaks_of.setdefault(
            key,
            {
                "file": where.filename,
                "line": where.lineno,
                "function": where.name,
                "code": (where.line or "").strip(),
                "when": when,
                "count": 0,
                "cause": cause,
                "fix": fix,
                "seconds": 0.0,
            },
        )
        entry["count"] += 1
    for _, record in frames:
        causes = {_cause_and_fix(reason)[0] for reason in record.restart_reasons or ()}
        same_file = [
            e
            for e in breaks_of.values()
            if e["cause"] in causes and e["file"] == record.co_filename
        ] or [e for e in breaks_of.values() if e["cause"] in causes]
        for entry in same_file:
            entry["seconds"] += (record.dynamo_time_before_restart_s or 0.0) / len(same_file)
    return list(breaks_of.values())


def _recompiles(frames: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames of which a guard failed, with the guard and its line if known."""
    recompiles = []
    for when, record in frames:
        if record.recompile_reason:
            cause, *more = record.recompile_reason.strip().splitlines()
            places = PLACE.findall("\n".join(more))
            guarded = f"{places[-1][0]}:{places[-1][1]}" if places else None
            entry = {"cause": cause.strip(), "guarded": guarded, "fix": _fix(cause)}
            recompiles.append(_frame(when, record) | entry)
    return recompiles


def _uncompiled(metrics: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames that torch gave up, and runs as plain Python.

    A frame that was compiled too often has a record without a name; its number is that of the first
    one, and what mends it is what mends its last recompile.
    """
    named = {m.compile_id.split("/")[0]: m for _, m in metrics if m.co_name is not None}
    uncompiled = []
    for when, record in metrics:
        if record.fail_type:
            number = (record.compile_id or "").split("/")[0]
            cause, fix = _cause_and_fix(record.fail_reason or record.fail_type)
            if record.recompile_reason:
                last = record.recompile_reason.strip().splitlines()[0]
                cause, fix = f"{cause} The last: {last}", _fix(last)
            own = {"id": record.compile_id, "seconds": _seconds(record)}
            place = _frame(when, named.get(number, record))
            uncompiled.append({**place, **own, "cause": cause, "fix": fix})
    return uncompiled


def _own_line(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the innermost line that is not torch's."""
    if not stack:
        return traceback.FrameSummary("?", 0, "?")
    own = [frame for frame in stack if not frame.filename.startswith(TORCH)]
    return (own or list(stack))[-1]


def _cause_and_fix(reason: str) -> tuple[str, str]:
    """Return a reason's cause, and the fix that torch hints at."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    named: Mapping[str, list[str]] = {"Explanation": [], "Hint": []}
    for line in lines:
        kind, colon, text = line.partition(": ")
        if colon and kind in named:
            named[kind].append(text)
    cause = " ".join([lines[0] if lines else "not told", *named["Explanation"]])
    return cause, " ".join(named["Hint"]) or _fix(reason)


def _fix(cause: str) -> str:
    for part, fix in FIXES:
        if part in cause:
            return fix
    return "TORCH_LOGS=graph_breaks,recompiles headrace train ... prints all that torch knows"


def _as_text(value: Mapping[str, Any], owner: str) -> str:
    """Render counts, then each entry with its place, cause and fix."""
    graphs, breaks, recompiles = value["graphs"], value["breaks"], value["recompiles"]
    lines = [
        f"{value['name']} on {value['device']}, torch {value['torch']}: {_count(graphs, 'graph')}, "
        f"{_count(breaks, 'graph break')}, {_count(recompiles, 'recompile')}, "
        f"{format_seconds(value['seconds'])} of compiling",
        f"(steps {', '.join(map(str, value['steps']))} of {value['rows']} x "
        f"{value['tokens_of_a_row']} tokens, and an evaluation)",
        "",
        "graphs:",
    ]
    for graph in graphs:
        lines.append(
            f"  {_place(graph)}, {graph['operations']} operations, {graph['seconds']:.2f} s + "
            f"{graph['backward_seconds']:.2f} s backward"
        )
        if graph["no_cuda_graph"]:
            lines.append(f"    no CUDA graph: {graph['no_cuda_graph']}")
    sections = (
        ("graph breaks", breaks),
        ("recompiles", recompiles),
        ("left to Python", value["uncompiled"]),
    )
    for title, entries in sections:
        if not entries:
            continue
        lines += ["", f"{title}:"]
        for entry in entries:
            times = f", {entry['count']} times" if entry.get("count", 1) > 1 else ""
            lines.append(f"  {_place(entry)}{times}, {entry['seconds']:.2f} s")
            lines += [f"    code:  {entry['code']}"] if entry.get("code") else []
            lines += [f"    at:    {entry['guarded']}"] if entry.get("guarded") else []
            lines += [f"    cause: {entry['cause']}", f"    fix:   {entry['fix']}"]
    if breaks and value["fullgraph"]:
        lines += [
            "",
            f"fullgraph = true makes the first break an error: mend it, or accept breaks with "
            f"techniques.{owner}.fullgraph=false",
        ]
    return "\n".join(lines)


def _count(entries: Sequence[Any], what: str) -> str:
    return f"{len(entries)} {what}{'' if len(entries) == 1 else 's'}"


def _place(entry: Mapping[str, Any]) -> str:
    number = f"{entry['id']} " if "id" in entry else ""
    return f"{number}{entry['function']} {entry['file']}:{entry['line']} ({entry['when']})"
