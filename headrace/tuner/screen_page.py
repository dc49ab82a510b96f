"""Render a screen of changes of learning as a section of tune.html."""

from collections.abc import Sequence

from headrace.core.units import format_seconds
from headrace.report.page import Safe, join, muted, section, table, tag
from headrace.tuner.rungs import RungRow, Screen


def screen_section(screen: Screen) -> Safe:
    """Return the section of one screen: what came of it, a row for each candidate and rung."""
    rows = [_row(row) for row in screen.rows]
    head = ("Change", "", "Rung", "Steps", "Seconds", "Loss", "Gap")
    parts = [tag("p", screen.sentence())]
    if rows:
        parts += [
            table("Rungs", head, rows, text=2),
            muted(
                "Short runs, a screen and no verdict: what was dropped may still be better over a "
                "whole run. Loss: validation at the end in bits per byte, the mean of the seeds. "
                "Gap: its difference from the plan as it is, seed for seed; below 0 is better. "
                "Seconds: of the steps, by each one's measured step time, so that losses are "
                "compared at equal seconds."
            ),
        ]
    left = [tag("li", *codes(words), muted(why)) for words, why in screen.left_out]
    if left:
        parts += [muted("Not screened, and left to whole runs:"), tag("ul", *left, class_="legend")]
    of = " of " + " ".join(screen.baseline) if screen.baseline else ""
    return section(f"Which changes{of} are worth whole runs", *parts)


def _row(row: RungRow) -> tuple[Safe | str, ...]:
    """Return the cells of a candidate in a rung."""
    name = join(codes(row.changes)) if row.changes else "The plan as it is"
    if row.refused:
        name = join((name, muted(row.refused)))
    gone = {True: "gone on", False: "dropped", None: ""}[row.went_on]
    tone = "good" if row.went_on else "plain"
    return (
        name,
        tag("span", gone, class_=f"badge {tone}") if gone else "",
        str(row.rung),
        f"{row.steps:,}" if row.steps else "",
        format_seconds(row.seconds) if row.seconds else "",
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.gap is None or not row.changes else f"{row.gap:+.4f}",
    )


def codes(words: Sequence[str]) -> list[Safe]:
    """Return changes as they are typed, with room between them."""
    return [join((tag("code", word), " ")) for word in words]
