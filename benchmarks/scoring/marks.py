"""Define what each number must be and should be, and render the table of how far each is.

A number meets its mark only when as many observations as the mark asks for stand behind it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scoring.rows import on_cpu

Bounds = tuple[float, float]
"""The least and the greatest allowed value, both included."""
ANY = math.inf


@dataclass(frozen=True)
class Mark:
    """Hold what a number must be and should be.

    Args:
        what: the number, in the few words of a table.
        says: how it is counted, in a sentence.
        must: the bounds that it must keep.
        aim: the bounds that it should keep; None where no aim is set.
        fewest: the least number of observations.
        needs: maps keys beside the value to the bounds that they must keep.
        share: whether it is shown in percent.
        ahead: whether predictions count only when their rows stand before their outcomes.
    """

    what: str
    says: str
    must: Bounds
    aim: Bounds | None = None
    fewest: int = 1
    needs: Mapping[str, Bounds] = field(default_factory=dict)
    share: bool = True
    ahead: bool = False


PUBLISHED = (0.0, 0.019)
"""The lowest average error of step time that was published: SimAI's 1.9% (NSDI 2025). A must
that is lower holds it too."""
FAULTS = {
    "faults": (12.0, ANY),
    "severities": (3.0, ANY),
    "workloads": (5.0, ANY),
    "held_out_faults": (3.0, ANY),
    "held_out_workloads": (2.0, ANY),
}
NATURAL = {"workloads": (8.0, ANY), "kinds": (4.0, ANY), "devices": (3.0, ANY)}
CONFIGURATIONS = {"configurations": (40.0, ANY)}
RISKY = {"risky_run": (1.0, ANY), "risky_not_run": (0.0, 0.0)}
MARKS = {
    "doctor_top1": Mark(
        "planted faults named",
        "Of runs with a planted fault, those whose first finding names it; abstaining is a miss.",
        (0.95, 1),
        (0.99, 1),
        180,
        FAULTS,
    ),
    "doctor_false_alarms": Mark(
        "healthy runs blamed",
        "Of runs without a fault, those that a finding blames.",
        (0, 0.02),
        (0, 0.005),
        100,
    ),
    "doctor_first_remedy_near_best": Mark(
        "first remedy near the best",
        "Of natural runs, those whose first remedy gained at least four fifths of what the best "
        "measured change gained there. Where no change gains more than 5%, saying healthy is "
        "right, and so is a first remedy that loses no more than 1%. A first remedy that was "
        "refused is wrong, and so is saying healthy where a change gains more than 5%. A run of "
        "which fewer than two other changes were measured counts only where it is wrong.",
        (0.85, 1),
        (0.95, 1),
        40,
        NATURAL,
        ahead=True,
    ),
    "doctor_healthy_wrong": Mark(
        "healthy said wrongly",
        "Of natural runs, those said to be healthy where some change gains more than 10%.",
        (0, 0.02),
        (0, 0),
        40,
        NATURAL,
        ahead=True,
    ),
    "forecast_coverage": Mark(
        "gains in their interval",
        "Of remedies, those whose measured gain lies in the 80% interval that was forecast: of a "
        "run, whose step was measured, and until 40 of those were, of a plan too.",
        (0.8, 0.9),
        None,
        40,
        {"width": (0, 0.6)},
    ),
    "forecast_median_error": Mark(
        "error of a forecast gain",
        "Forecast less measured gain, as a share of it: the median.",
        (0, 0.25),
        (0, 0.15),
        40,
    ),
    "forecast_natural_coverage": Mark(
        "natural gains in their interval",
        "Of first remedies of natural runs that had a forecast and ran, those whose measured gain "
        "lies in the 80% interval. Beside it is the median error of the gain, as a share of it.",
        (0.7, 0.9),
        (0.8, 0.9),
        20,
        {"median_error": (0, 0.25)},
        ahead=True,
    ),
    "overhead_always_on": Mark(
        "cost of watching",
        "What the signals that are always on add to a step: the mean over shapes; a shape's "
        "repeats are weighted by their intervals.",
        (-ANY, 0.003),
        (-ANY, 0.001),
        needs={"high": (-ANY, 0.003)},
    ),
    "overhead_with_bursts": Mark(
        "cost with profiler windows",
        "What watching adds to a step with a short trace now and then: the mean over shapes.",
        (-ANY, 0.005),
        needs={"high": (-ANY, 0.005)},
    ),
    "step_time_error_no_gpu": Mark(
        "step time without a GPU",
        "Predicted less measured seconds of a step, as a share: the mean, from datasheets.",
        (0, 0.05),
        PUBLISHED,
        40,
        ahead=True,
    ),
    "step_time_error_after_probes": Mark(
        "step time after probes",
        "The same, with rates that probes measured there.",
        (0, 0.025),
        PUBLISHED,
        40,
        ahead=True,
    ),
    "step_time_error_after_20_steps": Mark(
        "step time after 20 steps",
        "The same, once 20 steps of one plan were measured.",
        (0, 0.015),
        PUBLISHED,
        40,
        ahead=True,
    ),
    "cpu_step_time_error": Mark(
        "step time on a CPU",
        "The same on processors, with rates that a probe measured there: the mean. Steps on a CPU "
        "are in none of the three numbers before.",
        (0, 0.10),
        (0, 0.05),
        30,
        {"memory_error": (0, 0.01)},
        ahead=True,
    ),
    "memory_allocated_error": Mark(
        "memory allocated",
        "Predicted less measured peak, as a share: the median.",
        (0, 0.01),
        needs=CONFIGURATIONS,
        ahead=True,
    ),
    "memory_reserved_error": Mark(
        "memory reserved",
        "The same for what the allocator takes from the device.",
        (0, 0.03),
        needs=CONFIGURATIONS,
        ahead=True,
    ),
    "false_fits": Mark(
        "said to fit, did not",
        "Predictions of fitting that ran out of memory.",
        (0, 0),
        None,
        200,
        RISKY,
        share=False,
        ahead=True,
    ),
    "pick_regret": Mark(
        "pick behind the best",
        "How much slower the planner's choice is "
        "than the fastest of the five to seven plans of its workload, which were all run.",
        (0, 0.02),
        needs={"candidates": (40, ANY)},
    ),
    "kendall_tau": Mark(
        "order of candidates",
        "Kendall's tau of predicted and measured order: 1 is the same.",
        (0.9, 1),
        share=False,
    ),
    "tuner_ratio": Mark(
        "tuned over the best row",
        "Where the tuner ends, over the "
        "fastest plan of the workload that has a row; a LoRA fine-tune and rows of 32,768 tokens "
        "have none, so there it is the shape's recipe.",
        (0.97, ANY),
        (1.02, ANY),
        4,
        {"workloads": (4, ANY)},
    ),
    "tuner_small_ratio": Mark(
        "least of a short tuning",
        "The smallest of the newest speeds over the best known plan's on a GPU: of `small` and "
        "`demo` after 3 minutes, 160m after 5 and 1b after 8. Rows of longer tunings do not count.",
        (0.95, ANY),
        (1.0, ANY),
        4,
    ),
    "tuner_exact_rejected": Mark(
        "exact changes rejected for their loss",
        "Exact changes that went through the tuner's pair and judge, and were rejected for their "
        "loss or gradients.",
        (0, 0),
        None,
        60,
        {"workloads": (5, ANY)},
        share=False,
    ),
    "tuner_losers_kept": Mark(
        "losers that were kept",
        "Approximate changes that the judge kept, and that lose more than 0.01 nats beside the "
        "plan without them after 1,000 steps of both.",
        (0, 0),
        None,
        1,
        {"untrained": (0, 0)},
        share=False,
    ),
}
"""Maps the name of each number to its mark, in the order of the table."""

HEAD = ("what", "reached", "wanted (aim)", "n", "held out", "so far")


def judge(name: str, number: Mapping[str, Any]) -> str:
    """Return how far a number is from its mark.

    Args:
        name: one of MARKS.
        number: what `compute` gives for it.

    Returns:
        "not measured yet", "not met", "not met: ..." or "too few: ..." with what is missing,
        "met" or "aim met".
    """
    mark, value = MARKS[name], number["value"]
    if value is None:
        return "not measured yet"
    if not _within(value, mark.must):
        return "not met"
    for need, (low, high) in mark.needs.items():
        if number[need] is None:
            return f"too few: {NONE[need]}"
        if number[need] > high:
            shown, most = _shown(number[need], mark.share), _shown(high, mark.share)
            return f"not met: {ABOVE[need].format(told=shown, most=most)}"
        if need == "severities" and number[need] < low:
            return f"too few: {_at_few(number['severities_of'], int(low))}"
        if number[need] < low:
            return f"too few: {number[need]} of {low:g} wanted {BELOW[need]}"
    if number["n"] < mark.fewest:
        return f"too few: {number['n']} of {mark.fewest} wanted"
    return "aim met" if mark.aim and _within(value, mark.aim) else "met"


def table(numbers: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of text for each number, under HEAD. "Held out" is what set no threshold."""
    return [
        [
            mark.what,
            reached(name, numbers[name]),
            wanted(mark),
            _count(mark, numbers[name]["n"]),
            _unseen_part(mark, numbers[name]),
            judge(name, numbers[name]).partition(":")[0],
        ]
        for name, mark in MARKS.items()
    ]


def notes(numbers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the notes below the table: a line for each number that was measured."""
    lines = []
    for name, mark in MARKS.items():
        number = numbers[name]
        _, _, why = judge(name, number).partition(": ")
        words_beside = [places(number), why]
        words_beside += [
            words.format(_shown(number[key], mark.share))
            for key, words in VALUES.items()
            if number.get(key) is not None
        ]
        words_beside += [
            f"{number[key]} {words}" for key, words in BESIDE.items() if number.get(key)
        ]
        if part := number.get("with_retracted"):
            words_beside.append(f"with them {_shown(part['value'], mark.share)} of {part['n']}")
        parts = {
            of: (_shown(part["value"], mark.share), part.get("n"))
            for of, part in number.get("of", {}).items()
        }
        words_beside += [
            f"of a {of} {value} of {n}" for of, (value, n) in parts.items() if n is not None
        ]
        newest = ", ".join(f"{of} {value}" for of, (value, n) in parts.items() if n is None)
        words_beside.append(newest and f"newest of each: {newest}")
        if any(words_beside):
            lines.append(f"{mark.what}: {'; '.join(filter(None, words_beside))}")
    return lines


def places(number: Mapping[str, Any]) -> str:
    """Return where rows were measured, as "385 on a CPU, 28 on an NVIDIA H200"."""
    n: Counter[str] = Counter()
    for name, part in number.get("by_hardware", {}).items():
        a = "an" if name[0] in "AEINO" else "a"
        n["a CPU" if on_cpu(name) else f"{a} {name}"] += part["n"]
    return ", ".join(f"{count} on {where}" for where, count in n.most_common())


def _at_few(severities: Mapping[str, int], wanted: int) -> str:
    """Return which faults were planted at fewer severities than wanted."""
    few: dict[int, list[str]] = {}
    for fault, n in severities.items():
        if n < wanted:
            few.setdefault(n, []).append(fault.replace("_", " "))
    parts = [
        f"{_word(len(faults))} kind{'s' * (len(faults) > 1)} ({', '.join(faults)}) "
        f"{'were' if len(faults) > 1 else 'was'} run at {_word(n)} "
        f"severit{'ies' if n > 1 else 'y'} only"
        for n, faults in sorted(few.items())
    ]
    return f"{', '.join(parts)}, of {_word(wanted)} wanted"


def _word(n: int) -> str:
    return WORDS[n] if n < len(WORDS) else str(n)


WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BELOW = {
    "faults": "kinds of faults",
    "workloads": "workloads",
    "held_out_faults": "held-out kinds of faults",
    "held_out_workloads": "held-out workloads",
    "configurations": "configurations",
    "risky_run": "runs of risky ones",
    "candidates": "candidates",
    "kinds": "kinds of precision and compilation",
    "devices": "kinds of devices",
}
"""Maps a key of a number that is too low to what it counts, for a reader."""
ABOVE = {
    "width": "their median width, {told} of the gain, is above {most}",
    "high": "its upper end, {told}, is above {most}",
    "risky_not_run": "{told} of the risky ones not run",
    "median_error": "the median error of the gain, {told}, is above {most}",
    "memory_error": "the median error of its memory, {told}, is above {most}",
    "untrained": "{told} that were kept were not trained for as long",
}
"""Maps a key of a number that is too high to a sentence about it, for a reader."""
NONE = {"memory_error": "its memory was not measured"}
"""Maps a key of a number that is unavailable to a sentence about it, for a reader."""
VALUES = {
    "median_error": "median error of the gain {}",
    "memory_error": "median error of memory {}",
    "p95": "19 of 20 within {}",
    "worst": "worst {}",
    "width": "median width {} of the gain",
}
"""Maps a key of a number to the text that shows its value."""
BESIDE = {
    "readings": "pairs of readings",
    "abstained": "abstained",
    "mild": "more took under 10% of the step: not counted",
    "false_refusals": "said not to fit, and did",
    "risky_run": "risky ones run",
    "open": "without an outcome yet",
    "late": "not written down before their outcome, and not counted",
    "healthy_said": "said to be healthy",
    "unfinished": "of which some changes were left",
    "thin": "of which too few changes were measured, and not counted",
    "untrained": "kept, and not trained yet",
    "refused": "refused",
    "retracted": "retracted, and not counted",
}
"""Maps a key of a number to what it counts, for a reader."""


def reached(name: str, number: Mapping[str, Any]) -> str:
    """Return the value with its interval, "-" where nothing was measured."""
    share = MARKS[name].share
    if number["value"] is None:
        return "-"
    value = _shown(number["value"], share)
    if "low" not in number:
        return value
    return f"{value} ({_shown(number['low'], share)} to {_shown(number['high'], share)})"


def wanted(mark: Mark) -> str:
    """Render what the number must be, and in brackets its aim."""
    must = _bounds(mark.must, mark.share)
    if mark.aim is None:
        return must
    aim = _bounds(mark.aim, mark.share)
    return f"{must} ({aim if ' to ' in aim else aim.split()[-1]})"


def _count(mark: Mark, n: int) -> str:
    return f"{n}/{mark.fewest}" if n < mark.fewest and mark.fewest > 1 else str(n)


def _unseen_part(mark: Mark, number: Mapping[str, Any]) -> str:
    """Render the number over held-out rows; "all" where predictions must stand before outcomes."""
    if not number["n"]:
        return "-"
    if "held_out" not in number:
        return "all" if mark.ahead else ""
    part = number["held_out"]
    return f"{_shown(part['value'], mark.share)} of {part['n']}" if part["n"] else "none"


def _within(value: float, bounds: Sequence[float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _shown(value: float, share: bool) -> str:
    return f"{100 * value:.3g}%" if share else f"{value:.3g}"


def _bounds(bounds: Bounds, share: bool) -> str:
    low, high = bounds
    if low == high:
        return _shown(low, share)
    if low <= 0:
        return f"<= {_shown(high, share)}"
    if high == ANY or high == 1:
        return f">= {_shown(low, share)}"
    return f"{_shown(low, share)} to {_shown(high, share)}"
