"""Write the page "What buys quality per second" from the rows of learning.py, and its picture.

    python benchmarks/learning_page.py           # write them
    python benchmarks/learning_page.py --check   # exit 1 where one is behind the rows

The receipts that `headrace explain RECIPE` shows beside the lines of a recipe are written too. The
same rows give the same files; without rows a part says that it was not measured yet.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readme_table import read_rows
from scoring.picture import Panel, Picture, around
from scoring.tables import markdown

from headrace.core.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "learning-rows.md"
FILES = {
    "page": PAGE,
    "picture": PAGE.parent / "pictures" / "learning.svg",
    "receipts": ROOT / "headrace" / "catalogue" / "learning.json",
}
"""Name of what is rendered -> its file."""
NOT_YET = "Not measured yet."
OPENING = """\
# What buys quality per second

How many seconds does a recipe need until it reaches 1.54 bits per byte on novels that it was not
trained on? This page is made from the rows in `results/learning.jsonl` by
`python benchmarks/learning_page.py`, and from nothing else; `benchmarks/learning.py` writes them.
Compiling and evaluating are off the clock. A ratio above 1 is in favour of the recipe as it stands
with the technique; an interval holds 95%, over seeds. Losers stay.
"""
LEFT, ROW, TOP = 300, 24, 40
"""Pixels left of the bars, of a bar's row, and above the first."""


@dataclass(frozen=True)
class Gain:
    """Hold what one technique or key of the recipe was measured to buy.

    Args:
        line: the technique's name, or the key.
        change: how the recipe was changed: added, left out, or set.
        words: the whole change.
        refused: why it cannot stand in the recipe; "" where it was measured.
        reached: runs of the changed recipe that reached the target.
        base_reached: runs of the recipe itself that did.
        ratio: how many times sooner the recipe is with it, or with its own value of a key;
            None where no seed has both times.
        low: the interval's lower end; None without a ratio.
        high: its upper end; None where there is none.
        n: seeds.
        row: the whole row.
    """

    line: str
    change: str
    words: str
    refused: str
    reached: int
    base_reached: int
    ratio: float | None
    low: float | None
    high: float | None
    n: int
    row: dict[str, Any]

    @property
    def verdict(self) -> str:
        """Return whether the seeds show that it helps or hurts."""
        if self.refused:
            return "cannot stand here"
        if self.ratio is None and self.base_reached and not self.reached:
            return "hurts" if self.change == "added" else "helps"
        if self.low is not None and self.low > 1:
            return "helps"
        return "hurts" if self.high is not None and self.high < 1 else "not shown"


def gains(rows: Iterable[dict[str, Any]]) -> list[Gain]:
    """Return the newest row of each technique and key, the best first and what is refused last."""
    newest = {row["technique"]: row for row in rows if row.get("kind") == "technique"}
    measured = [_gain(row) for row in newest.values()]
    order = {"helps": 0, "not shown": 1, "hurts": 2, "cannot stand here": 3}
    return sorted(measured, key=lambda g: (order[g.verdict], -(g.ratio or 0.0), g.line))


def _gain(row: dict[str, Any]) -> Gain:
    metric, change = row["metrics"].get("ratio"), row["change"]
    ends: tuple[float | None, ...] = (None, None, None)
    if metric:
        ends = metric["low"], metric["value"], metric["high"]
        if change != "added":  # the recipe over what was changed, and not the other way
            ends = tuple(1 / end if end else None for end in reversed(ends))
            ends = (ends[0] or 0.0, *ends[1:])
    return Gain(
        line=row["technique"],
        change=change,
        words=" ".join(row["words"]),
        refused=row.get("refused", ""),
        reached=sum(row["reached"]),
        base_reached=sum(s is not None for s in row.get("base_seconds", [])),
        ratio=ends[1],
        low=ends[0],
        high=ends[2],
        n=row["n"],
        row=row,
    )


def bars(measured: Sequence[Gain]) -> str | None:
    """Draw the ratio of each technique with its interval."""
    shown = [gain for gain in measured if gain.ratio is not None]
    if not shown:
        return None
    ends = [e for g in shown for e in (g.ratio, g.low, g.high) if e]
    height = TOP + ROW * len(shown) + 60
    draw = Picture(760, height, f"Times sooner with each of {len(shown)} techniques and keys")
    times = "times sooner to the target, with its interval of 95%"
    axis = around([1.0, *(min(10.0, max(0.1, end)) for end in ends)], times, _times, log=True)
    panel = Panel(draw, axis, around([0, 1], "", lambda _: ""), LEFT, TOP, 430, ROW * len(shown))
    one, bottom = panel.at(1, 0)[0], TOP + ROW * len(shown)
    for value in axis.ticks():
        x = panel.at(value, 0)[0]
        draw.line(x, TOP, x, bottom, colour="grid")
        draw.text(x, bottom + 18, _times(value), colour="soft", anchor="middle", size=12)
    draw.text(LEFT + 215, bottom + 40, times, colour="soft", anchor="middle")
    for at, gain in enumerate(shown):
        y = TOP + ROW * (at + 0.5)
        x, low, high = (
            panel.at(min(axis.high, max(axis.low, end)), 0)[0]
            for end in (gain.ratio or 1.0, gain.low or axis.low, gain.high or axis.high)
        )
        colour = {"helps": "c0", "hurts": "c1"}.get(gain.verdict, "c7")
        draw.text(LEFT - 10, y + 4, f"{gain.line}, {gain.change}", anchor="end", size=12)
        draw.box(min(one, x), y - 6, abs(x - one), 12, fill=colour, opacity=0.6)
        draw.line(low, y, high, y, colour="ink", width=1.4)
    draw.line(one, TOP, one, bottom, colour="ink", dash="4 3")
    return draw.svg()


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}x"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None else f" ({_times(low)} to {_times(high) if high else 'no end'})"


def technique_table(measured: Sequence[Gain]) -> str:
    """Return a table of what was measured, and a list of what cannot stand in the recipe."""
    lines = [
        (
            f"`{g.line}`",
            f"`{g.words}`",
            _times(g.ratio) + _interval(g.low, g.high),
            f"{g.reached} of {g.n}",
            f"{g.row.get('horizon_factor', 1):g}",
            g.verdict,
        )
        for g in measured
        if not g.refused
    ]
    head = ("technique or key", "change", "times sooner with it", "reached", "horizon", "verdict")
    refused = [f"- `{g.line}` (`{g.words}`): {g.refused}" for g in measured if g.refused]
    cannot = ["", "What cannot stand in the recipe:", "", *refused, ""] if refused else []
    return (markdown(head, lines) if lines else "") + "\n".join(cannot)


def race_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of both sides, each device's newest row."""
    newest = {(r["hardware"], r["shape"], r["side"]): r for r in rows}
    lines = []
    for (hardware, shape, side), row in sorted(newest.items()):
        seconds = row["metrics"]["seconds"]
        ratio = row["metrics"].get("ratio")
        p = row.get("p")
        lines.append(
            (
                side,
                f"{hardware}, {shape}",
                f"{seconds['value']:.3g} ({seconds['low']:.3g} to {seconds['high']:.3g})",
                f"{sum(row['reached'])} of {row['n']}",
                f"{row['searched']}",
                _times(ratio["value"]) + _interval(ratio["low"], ratio["high"]) if ratio else "-",
                "-" if p is None else f"{p:.2g}",
            )
        )
    head = ("side", "where", "seconds", "reached", "search runs", "AdamW's time over it", "p")
    return markdown(head, lines)


def search_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the points of the search that reached the target, the fastest first."""
    lines = []
    for row in sorted(rows, key=lambda r: (r["side"], r["metrics"]["seconds"]["value"])):
        point, numbers = row["point"], row["metrics"]
        lines.append(
            (
                row["side"],
                f"{row['hardware']}, {row['shape']}, {row['commit']}",
                f"{point['factor']:g}",
                f"{point['rows']}",
                f"{point['epochs']:g}",
                f"{point['decay']:g}" if point["decay"] else "cosine",
                f"{point.get('final', 0.0):g}",
                f"{numbers['seconds']['value']:.3g}" if row["reached"] else "not reached",
                f"{numbers['bits_per_byte']['value']:.4f}",
            )
        )
    head = (
        *("side", "where", "rate x", "rows", "epochs", "decay", "rate left", "seconds"),
        "bits per byte",
    )
    return markdown(head, lines)


def bought_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of what a budget bought beside the other plan, each device's newest row."""
    newest = {(r["hardware"], r["minutes"], r["side"], *r["seeds"]): r for r in rows}
    lines = []
    for row in newest.values():
        numbers = row["metrics"]
        lines.append(
            (
                f"`{row['recipe']}`" if row["recipe"] else "Chinchilla, AdamW's defaults",
                f"{row['hardware']}, {row['minutes']:g} minutes",
                f"{row['shape']}, {row['parameters'] / 1e6:.1f}M",
                f"{numbers['tokens']['value'] / 1e6:.0f}M",
                f"{numbers['epochs']['value']:.3g}",
                f"{numbers['best_bits_per_byte']['value']:.4f}",
                f"{numbers['last_bits_per_byte']['value']:.4f}",
            )
        )
    head = ("plan", "where", "parameters", "tokens", "epochs", "lowest bits per byte", "at the end")
    return markdown(head, lines)


def render(results: Path) -> dict[str, str]:
    """Return the page, its picture and the receipts of recipes, by name."""
    file = results / "learning.jsonl"
    rows = read_rows(file, points=True) if file.is_file() else []
    measured = gains(rows)
    race = [row for row in rows if row.get("kind") == "time_to_target"]
    points = [row for row in rows if row.get("kind") == "search"]
    budgets = [row for row in rows if row.get("kind") == "budget"]
    picture = bars(measured)
    shown = "![Times sooner with each technique](pictures/learning.svg)\n" if picture else ""
    parts = [
        OPENING,
        "## The recipe beside AdamW\n",
        "Each side at the best point of its own search, the same seeds, in turn.\n",
        race_table(race) if race else f"{NOT_YET}\n",
        "## What a budget buys\n",
        "`headrace plan RECIPE --budget` beside the shape and tokens that the scaling law\n"
        "gives, with AdamW's defaults, on as many minutes of one GPU and the same text\n"
        "(`benchmarks/bought.py`).\n",
        bought_table(budgets) if budgets else f"{NOT_YET}\n",
        "## One technique at a time\n",
        "The recipe of `benchmarks/plans/learning.toml`, as it was at the row's commit, one\n"
        "technique left out, added, or one key set to another value. `horizon` is the factor of\n"
        "the recipe's length that the changed one was given.\n",
        shown,
        technique_table(measured) if measured else f"{NOT_YET}\n",
        "## The search\n",
        search_table(points) if points else f"{NOT_YET}\n",
    ]
    page = "\n".join(part for part in parts if part)
    files = {"page": page, "receipts": _receipts(measured)}
    return files | ({"picture": picture} if picture else {})


def _receipts(measured: Sequence[Gain]) -> str:
    """Return the receipts of recipes as JSON, one a line."""
    own = [
        {
            "line": g.line,
            "change": g.change,
            "ratio": None if g.ratio is None else round(g.ratio, 3),
            "low": None if g.low is None else round(g.low, 3),
            "high": None if g.high is None else round(g.high, 3),
            "verdict": g.verdict,
            **{key: g.row[key] for key in ("n", "hardware", "shape", "date", "commit")},
            **({"set_to": g.words.partition("=")[2]} if g.change == "set" else {}),
        }
        for g in measured
        if not g.refused
    ]
    lines = ",\n".join(f" {json.dumps(receipt)}" for receipt in own)
    return f"[\n{lines}\n]\n" if own else "[]\n"


def behind(results: Path) -> list[Path]:
    """Return the committed files that are not what the rows give."""
    files = render(results)
    return [
        path
        for name, path in FILES.items()
        if (path.read_text() if path.is_file() else None) != files.get(name)
    ]


def main() -> None:
    """Write the files, or with --check report one that is behind the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail on a change")
    args = parser.parse_args()
    stale = behind(RESULTS)
    if args.check and stale:
        sys.exit(f"{stale[0]} is behind results/: python benchmarks/learning_page.py")
    files = render(RESULTS)
    for name in files:
        FILES[name].parent.mkdir(parents=True, exist_ok=True)
        write_whole(FILES[name], files[name])
    if "picture" not in files:
        FILES["picture"].unlink(missing_ok=True)


if __name__ == "__main__":
    main()
