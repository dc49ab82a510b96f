"""Find a recipe that needs more tokens than another one did: the runs of one folder, side by side.

How low a loss may be after so many tokens has no law that is true for every text and every size, so
a run is compared with the user's own: those that lie beside it, on the same text with the same
tokenizer, of a model of the same size. Where one of them reached this run's best validation with
far fewer tokens, the recipe (its optimizer, rates, schedule, batch or model) is what to look at,
and the finding names what the two plans have different. Only a run that ended is judged, for a rate
that has not come down yet hides what was learned.

Two runs are no proof of a recipe, for seeds differ: by a few percent of the tokens as a rule, and
19% was seen. So a run of the very same recipe is never what to look at. Where there are such runs,
what they and this one differ by among themselves is the noise, and another recipe has to spare more
than that, and more than a fixed share.

Left out: scaling laws, which predict recipes that nobody tried here.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from headrace.core.files import parse_json, recorded_plan
from headrace.doctor.findings import Finding, Kind

FEWER_TOKENS = 0.15
"""Share of a run's tokens that another one must have spared: seeds move it by less."""
FEWEST = 3
"""Validations that each run must have."""
SAME_SIZE = 0.02
"""Share by which the numbers of parameters may differ."""
NO_RECIPE = (
    "name",
    "directory",
    "device",
    "guard",
    "eval",
    "checkpoint",
    "track",
    "trace",
    "goal",
    "hardware",
    "seed",
    "data.directory",
    "data.workers",
    "data.prefetch",
)
"""Tables and keys of a plan that differ without making a difference to what is learned."""
TEXT = ("data.sources", "data.validation", "eval.tokens")
"""Keys of a plan that make validations those of one text."""
SHOWN = 6
"""Differences that a reader sees."""
Validations = list[tuple[float, float]]
"""Tokens and bits per byte of each validation."""


def slower_than_another(folder: Path, report: Mapping[str, Any]) -> Finding | None:
    """Look for another run beside this one that reached its quality with fewer tokens.

    Args:
        folder: runs/NAME.
        report: its report.json.
    """
    mine, plan = _curve(report), plan_tables(folder)
    if report["status"] != "done" or len(mine) < FEWEST or plan is None:
        return None
    best = min(bits for _, bits in mine)
    spent = tokens_to(mine, best)
    quicker: list[tuple[float, str, dict[str, Any]]] = []
    alike = [mine]
    for other, its_report, its_plan in _beside(folder):
        if not _comparable(report, plan, its_report, its_plan):
            continue
        if not _different(plan, its_plan):
            done = its_report.get("status") == "done"
            if done and plan.get("goal") == its_plan.get("goal"):
                alike.append(_curve(its_report))
            continue
        needed = tokens_to(_curve(its_report), best)
        if needed is not None and spent:
            quicker.append((needed / spent, other, its_plan))
    if not quicker or (share := 1 - min(quicker)[0]) < FEWER_TOKENS:
        return None
    if share <= (noise := _noise(alike)):
        return None
    left, name, its_plan = min(quicker, key=lambda one: one[0])
    facts = {
        "run": name,
        "bits_per_byte": best,
        "tokens": spent or 0,
        "its_tokens": left * (spent or 0),
        "differences": differences(plan, its_plan),
        "repeats": len(alike),
        "noise_share": noise,
    }
    return Finding(Kind.SLOWER_RECIPE, share, facts, "inferred")


def _noise(curves: Sequence[Validations]) -> float:
    """Return the largest share of the tokens that one of two runs spared, where both came."""
    most = 0.0
    for one, two in combinations(curves, 2):
        reached = max(min(bits for _, bits in curve) for curve in (one, two))
        spent = [tokens_to(curve, reached) or 0.0 for curve in (one, two)]
        most = max(most, 1 - min(spent) / max(spent)) if max(spent) else most
    return most


def tokens_to(curve: Validations, bits: float) -> float | None:
    """Return the tokens after which a curve is down at `bits`, interpolated between points."""
    if not curve or curve[0][1] <= bits:
        return curve[0][0] if curve else None
    for (before, high), (after, low) in pairwise(curve):
        if low <= bits < high:
            return before + (after - before) * (high - bits) / (high - low)
    return None


def differences(plan: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what the second plan has otherwise, as words of a plan; most of them are left out."""
    words = _different(plan, other)
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more if words else "the same recipe: another seed"


def _different(plan: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return each difference of the recipe; none where only the seed differs."""
    mine, its = _techniques(plan), _techniques(other)
    words = [f"-{name}" for name in sorted({*mine} - {*its})]
    words += [f"+{name}" for name in sorted({*its} - {*mine})]
    one, two = _flat(plan), _flat(other)
    for name in sorted({*mine} & {*its}):
        for keys_of, technique in ((one, mine[name]), (two, its[name])):
            keys_of |= {f"techniques.{name}.{key}": value for key, value in technique.items()}
    keys = [k for k in sorted({*one, *two}) if not {k, k.partition(".")[0]} & {*NO_RECIPE}]
    return words + [
        f"{k}={two.get(k)} in place of {one.get(k)}" for k in keys if one.get(k) != two.get(k)
    ]


def _beside(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield name, report and plan of the runs in the same place, where they can be read."""
    for file in sorted(folder.resolve().parent.glob("*/report.json")):
        plan = None if file.parent == folder.resolve() else plan_tables(file.parent)
        try:
            report = parse_json(file.read_bytes()) if plan is not None else None
        except (OSError, ValueError):
            continue
        if plan is not None and isinstance(report, dict):
            yield file.parent.name, report, plan


def _comparable(
    report: Mapping[str, Any],
    plan: Mapping[str, Any],
    other: Mapping[str, Any],
    its_plan: Mapping[str, Any],
) -> bool:
    """Return whether both have one text in the same tokens, models of one size, and a curve."""
    one, two = _flat(plan), _flat(its_plan)
    same_text = all(one.get(key) == two.get(key) for key in TEXT)
    sizes = report["parameters"], other.get("parameters") or 0
    return (
        same_text
        and report["tokenizer"] == other.get("tokenizer")
        and abs(sizes[1] / sizes[0] - 1) <= SAME_SIZE
        and len(_curve(other)) >= FEWEST
    )


def _curve(report: Mapping[str, Any]) -> Validations:
    points = [(one["tokens"], one["bits_per_byte"]) for one in report.get("val") or ()]
    return [(tokens, bits) for tokens, bits in points if bits is not None]


def plan_tables(folder: Path) -> dict[str, Any] | None:
    """Return the tables of the plan that a run was started with; None where it cannot be read."""
    try:
        return tomllib.loads(recorded_plan(folder).read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _techniques(plan: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return plan.get("techniques", {})


def _flat(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a plan with their values, without techniques."""
    return {
        f"{table}.{key}": value
        for table, keys in plan.items()
        if isinstance(keys, dict) and table != "techniques"
        for key, value in keys.items()
    }
