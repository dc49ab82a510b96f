"""Explain a technique's card, or a plan's sockets in order and what they will cost."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import check_weights, make_ledger
from headrace.assemble.context import check_supported
from headrace.assemble.sockets import COMPOSED, SOCKETS
from headrace.catalogue.reasons import format_reasons, reasons, to_dicts
from headrace.core.command import rerun
from headrace.core.errors import ConfigError, alike
from headrace.core.known import describe_known
from headrace.core.strict import meanings
from headrace.core.units import format_bytes, format_count
from headrace.costs.ledger import WORDS
from headrace.plan.doubts import doubts_of
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, Technique, installed


def explain_technique(technique: type[Technique[Any]]) -> tuple[dict[str, Any], str]:
    """Return a technique's card, as data and as text."""
    docs = meanings(technique)
    knobs = {
        name: {
            "type": str(info.annotation).replace("typing.", ""),
            "default": info.default,
            "doc": docs[name],
        }
        for name, info in technique.model_fields.items()
    }
    value = {
        "technique": technique.name(),
        "room": technique.room,
        "what": (technique.__doc__ or "").strip(),
        "stage": technique.stage.name.lower(),
        "owns": list(technique.claims),
        "composes": list(technique.composes),
        "equality": technique.equality,
        **technique.card.whole(),
        "knobs": knobs,
    }
    lines = [f"{technique.name()} ({technique.room})", "", value["what"], ""]
    lines += [f"{key:>9}: {value[key]}" for key in ("buys", "costs", "helps", "hurts", "source")]
    lines += [f"{'equality':>9}: {value['equality']}"]
    sockets = ", ".join([*technique.claims, *technique.composes])
    lines += [f"{'stage':>9}: {value['stage']}", f"{'sockets':>9}: {sockets}", "", "knobs:"]
    for name, knob in knobs.items():
        lines.append(f"  techniques.{technique.name()}.{name} = {knob['default']!r}  {knob['doc']}")
    return value, "\n".join(lines if knobs else lines[:-2])


def explain_plan(plan: Plan, context: Context) -> tuple[dict[str, Any], str]:
    """Return a plan's sockets in order, its predicted memory and work, and why each line stands.

    Raises:
        ConfigError, UnsupportedError: a technique cannot run here, or two clash.
    """
    techniques = sorted(plan.techniques.values(), key=lambda t: (t.stage, t.name()))
    check_supported(techniques, context)
    fillers = {
        socket: [t.name() for t in techniques if socket in (*t.claims, *t.composes)]
        for socket in SOCKETS
    }
    check_weights(plan)
    ledger = make_ledger(plan, context)
    instant, peak = ledger.peak()
    why = reasons(plan, installed())
    value = {
        "name": plan.name,
        "device": context.device,
        "precision": context.precision,
        "torch": torch.__version__,
        "attention": plan.attention,
        "sockets": fillers,
        "peak_memory_bytes": peak,
        "peak_at": instant,
        "memory_lines": dict(ledger.owners()),
        "flops_per_token": ledger.flops,
        "left_open": plan.mesh.left_open,
        "doubts": [doubt.to_dict() for doubt in doubts_of(plan)],
        "reasons": to_dicts(why),
    }
    lines = [f"{plan.name} on {context.device} in {context.precision}", "", "sockets in order:"]
    for socket, names in fillers.items():
        base = [] if socket in COMPOSED else ["baseline"]
        if socket == "parts.attend" and plan.attention == "measured":
            base = ['the fastest when the run starts (attention = "measured")']
        lines.append(f"  {socket:<18} {' + '.join(names or base) or '-'}")
    lines += ["", f"predicted peak: {format_bytes(peak)}, {WORDS[instant]}"]
    lines += [f"  {name:<18} {format_bytes(size)}" for name, size in ledger.owners()]
    lines += filter(None, [plan.mesh.left_open])
    work = ", ".join(f"{k} {format_count(v)}" for k, v in ledger.flops.items())
    lines += ["", f"FLOPs per token: {work}"]
    lines += [f"note: {doubt.line}" for doubt in doubts_of(plan)]
    lines += ["", *format_reasons(why)]
    return value, "\n".join(lines)


def check_explained(
    what: str, known: Catalogue, *, matrix: bool, graph: bool, changes: bool
) -> None:
    """Refuse words of `explain` that change nothing of what it would print.

    Args:
        what: what is to be explained.
        known: every technique.
        matrix: whether the table of all techniques is asked for.
        graph: whether the graphs of a plan are.
        changes: whether there are words that change a plan.

    Raises:
        ConfigError: some would be ignored.
    """
    if matrix and (what or graph or changes):
        raise ConfigError(
            "--matrix is of all techniques, and takes nothing beside it",
            "headrace explain --matrix",
        )
    if what not in known.techniques:
        return
    if graph:
        raise ConfigError(
            f"--graph looks at a plan, and {what} is a technique",
            rerun((what, "demo"), verb="explain") + f" --with {what}",
        )
    if changes:
        raise ConfigError(
            f"what stands behind {what} changes a plan, and {what} is a technique",
            rerun((what, "demo"), verb="explain") + f" --with {what}",
        )


def nothing_to_explain(what: str, known: Catalogue, plans: Iterable[str]) -> ConfigError:
    """Return the error for a word that is neither a plan nor a technique."""
    run = Path("runs", what, "plan.toml")
    message = f"{what!r} is no plan, recipe or technique"
    if what and run.is_file():
        return ConfigError(f"{message}; it is a run", rerun((what, run), verb="explain"))
    near = alike(what, [*known.techniques, *plans])
    if method := describe_known(what):
        message, first = method
        near = first if first in known.techniques else ""
        message = message
    elif near:
        message += f"; the nearest is {near}"
    return ConfigError(
        message,
        rerun((what, near), verb="explain")
        if near
        else "headrace list for the techniques, headrace list --recipes for the recipes",
    )
