"""Render the verdict in one sentence, and numbers that may be missing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.report.run_files import Report

NOT_MEASURED = "not measured"


def format_or_missing(value: float | None, form: Callable[[float], str]) -> str:
    """Return `value` as text, or that it was not measured."""
    return NOT_MEASURED if value is None else form(value)


def bits(value: float | None) -> str:
    """Render bits per byte: 1.5 -> '1.500'."""
    return format_or_missing(value, lambda v: f"{v:.3f}")


def whole(value: float | None) -> str:
    """Render a whole number: 12345.6 -> '12,346'."""
    return format_or_missing(value, lambda v: f"{v:,.0f}")


def count(value: float | None) -> str:
    """Render a count: 1234567 -> '1.23M'."""
    return format_or_missing(value, format_count)


def seconds(value: float | None) -> str:
    """Render seconds: 133 -> '2 min 13 s'; 3725 -> '62 min 05 s'; others as `format_seconds`."""

    def form(value: float) -> str:
        whole_s = round(value)
        if not 120 <= whole_s < 7200:
            return format_seconds(value)
        return f"{whole_s // 60} min {whole_s % 60:02d} s"

    return format_or_missing(value, form)


def size(value: float | None) -> str:
    """Render bytes: 1536 -> '1.5 KiB'."""
    return format_or_missing(value, format_bytes)


def flops(value: float | None) -> str:
    """Render FLOPs: 9.89e14 -> '989 TFLOP'."""

    def form(value: float) -> str:
        for prefix in ("", "k", "M", "G", "T"):
            if value < 999.5:
                return f"{value:.3g} {prefix}FLOP"
            value /= 1000
        return f"{value:,.3g} PFLOP"

    return format_or_missing(value, form)


def percent(value: float | None) -> str:
    """Render a share: 0.1234 -> '12.3 %'; a share that rounds to nothing is '<0.1 %'."""
    return format_or_missing(
        value, lambda v: "<0.1 %" if 0 < v < 0.0005 else f"{v:.1%}".replace("%", " %")
    )


def dollars(value: float) -> str:
    """Render dollars: 12.345 -> '$12.35'; 0.00312 -> '$0.0031'."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.2g}"


@dataclass(frozen=True)
class RunEnding:
    """Hold how the run ended: a tone for the eye, a badge of a few words, and one sentence."""

    tone: Literal["good", "bad", "plain"]
    badge: str
    sentence: str


def verdict(report: Report) -> RunEnding:
    """Return what became of the goal, how long it took, and what it cost when that is known."""
    goal, target = report.goal, report.goal.asked.get("bits_per_byte")
    cost = f", for {dollars(report.dollars)}" if report.dollars is not None else ""
    spent = f"{seconds(report.wall_s)} and {count(report.tokens)} tokens{cost}"
    wild = report.outcome is not None and report.outcome.diverged
    if report.status != "done":
        word = "Diverged" if wild else report.status.capitalize()
        reason = f": {report.message.rstrip('.')}" if report.message else ""
        sentence = f"{word} at step {whole(report.steps)} after {spent}{reason}."
        return RunEnding("bad" if wild or report.status == "failed" else "plain", word, sentence)
    if report.outcome is not None and wild:
        how = report.outcome.sentence
        sentence = f"{how[:1].upper()}{how[1:]}; ended by {_limit(report)} after {spent}."
        return RunEnding("bad", "Diverged", sentence)
    if target is None:
        end = (
            f"validation ended at {bits(report.evaluated[-1].bits_per_byte)} bits per byte"
            if (report.evaluated)
            else "validation was not measured"
        )
        return RunEnding("good", "Finished", f"Ended by {_limit(report)} after {spent}; {end}.")
    if goal.reached is None:
        sentence = f"Whether it reached {target:g} bits per byte was not measured; it took {spent}."
        return RunEnding("plain", "Goal not measured", sentence)
    if goal.reached:
        when = f"at step {whole(goal.step)} after {seconds(goal.wall_s)}"
        total = f" The whole run took {spent}."
        sentence = (
            f"Reached {target:g} bits per byte {when} and {count(goal.tokens)} tokens.{total}"
        )
        return RunEnding("good", "Goal reached", sentence)
    best = report.best_bits_per_byte
    low = f"the best was {bits(best)}" if best is not None else "validation was not measured"
    sentence = f"Did not reach {target:g} bits per byte: {low} when {_limit(report)} ended the run"
    return RunEnding("bad", "Goal not reached", f"{sentence} after {spent}.")


def _limit(report: Report) -> str:
    """Render what ended the run: 'its limit of 1,000 steps'."""
    kind = report.goal.ended_by or "an unnamed limit"
    value = report.goal.asked.get(kind)
    if value is None:
        return kind
    amount = {"dollars": dollars(value), "tokens": f"{count(value)} tokens"}.get(kind)
    unit = kind.removesuffix("s") if value == 1 else kind
    return f"its limit of {amount or f'{value:,g} {unit}'}"
