"""Make the page "Which optimization, when?": each bottleneck, its remedies, and measured gains.

Bottlenecks and remedies are those of the doctor: a technique is listed where its symptoms name the
bottleneck, and keys of a plan where the doctor tries them. Gains are those of the rows of
natural.jsonl, whose runs have no planted fault, and of techniques.jsonl.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from learning_page import Gain
from readme_table import read_rows
from scoring.picture import Picture
from scoring.tables import markdown

from headrace.catalogue.pages import card_path
from headrace.core.statistics import Interval
from headrace.doctor.remedies import OF_TIME, QUALITY, SHARES
from headrace.plan.changes import parse
from headrace.plan.symptoms import BOTTLENECKS
from headrace.plan.symptoms import parse as parse_symptom
from headrace.plan.technique import Catalogue, Technique
from sitepages.figures import figure
from sitepages.measured import MeasuredEffect, effects, effects_elsewhere, learned

MEANINGS: Mapping[str, str] = {
    "memory capacity": "The run does not fit, or is so near the limit that it allocates anew.",
    "fragmentation": "The allocator holds much more than tensors need, in unfit pieces.",
    "unused memory": "The device has room, and the plan pays time for memory that nobody uses.",
    "memory bandwidth": "Kernels wait for bytes, and not for arithmetic.",
    "kernel efficiency": "Matmuls or attention reach a smaller part of the device than they could.",
    "launch": "The host cannot start kernels as fast as the device ends them, or a step compiles "
    "again and again.",
    "interconnect": "Ranks wait for what other ranks send.",
    "straggler": "All ranks wait for one that is late.",
    "pipeline imbalance": "Stages of a pipeline take unlike times, and the slowest sets the pace.",
    "wrong layout": "Another mesh of the same ranks is predicted to be clearly faster.",
    "input": "The step waits for its batch.",
    "wasted tokens": "A part of each batch has no target: padding, or crops.",
    "instability": "The loss jumps or is not finite.",
    "forgetting": "Given weights lose what they knew.",
    "overfitting": "The run learns its text by heart: on any other text it becomes worse.",
    "chat template": "Conversations are written in another template than the weights have learned.",
    "recipe": "The loss comes down slower for its tokens than it could.",
    "silent no-op": "What was asked for does nothing.",
    "computation": "The device is busy with arithmetic: it needs less of it, or a faster kind.",
}
"""Bottleneck -> what it means, in one sentence."""
OF_RANKS = ("straggler", "pipeline imbalance", "wrong layout")
"""Bottlenecks of how ranks work together, beside what they send."""
WITHOUT: Mapping[str, str] = {
    "chat template": "data.chat.template= takes the one of the weights",
    "silent no-op": "the doctor names what keeps it from acting, or leaves it out",
    "pipeline imbalance": "`techniques.pipeline_parallel.layers=` moves layers to other ranks",
    "straggler": "the doctor names the rank, and no plan mends a machine",
    "wrong layout": "the doctor names the mesh and its command",
    "unused memory": "what saves memory is left out, or micro-batches get more rows",
}
"""Bottleneck that no technique removes -> what does, in words."""
DIVISIONS: Mapping[str, tuple[str, ...]] = {
    "Is what the run learns wrong, or slow for its tokens?": QUALITY,
    "Where does the time of a step go?": (*dict.fromkeys((*SHARES, *OF_RANKS, *OF_TIME)),),
    "Does it fit, and does it use what is there?": (
        "memory capacity",
        "fragmentation",
        "unused memory",
    ),
}
"""Question -> the bottlenecks that answer it, in the order of the page."""
SHOWN = 8
"""Changes of one bottleneck that a table shows."""
ALONE = ("---", "hide:", "  - navigation", "---", "")
"""Lines before the text of a page that has no section of its own."""
NATURAL = "natural.jsonl"
WIDTH, TOP, ROW, ASKED = 820, 20, 30, 44
"""Pixels across the tree, above it, down one bottleneck, and down one question."""
NAMES, CHANGES = (60, 150), 250
"""Left end and width of the bottlenecks' boxes, and left end of what helped, in pixels."""
LETTERS = 52
"""Letters of a change that fit into the tree."""
OFTEN = 10
"""Runs from which more of them say no more, and the larger gain stands first."""
WORTH = 1.05
"""Times as fast from which a change helped."""


@dataclass(frozen=True)
class ChangeGains:
    """Hold how many times as fast runs of one bottleneck were with a change.

    Args:
        words: the change, as it is typed after a plan.
        times: one number a run.
        places: the workload and the hardware of each run.
    """

    words: str
    times: tuple[float, ...]
    places: tuple[str, ...]

    @property
    def middle(self) -> float:
        """Return the median."""
        return median(self.times)


def decisions_page(catalogue: Catalogue, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        catalogue: all techniques.
        results: the folder of rows.
    """
    natural = gains_by_bottleneck(read_rows(results / NATURAL))
    measured, taught = effects(results), learned(results)
    others = effects_elsewhere(results)
    lines = [
        *ALONE,
        "# Which optimization, when?",
        "",
        "First find what holds **your** run up, then remove that. `headrace doctor RUN` names it, "
        "and `headrace tune PLAN` tries the remedies and keeps what won. This page is the table "
        "that both use, with what was measured: it is made from the techniques' own cards and from "
        "the rows in `results/`, each time that the pages are built.",
        "",
        "```sh",
        "headrace train demo name=first",
        "headrace doctor first",
        "```",
        "",
        "A gain below is times as fast: 1.50 is a step in two thirds of the time, and below 1 it "
        "is a loss. Runs are those that the doctor was tried on without a planted fault "
        "([how right it was](how-right.md)), each change alone or with what it needs beside it.",
        "",
    ]
    for question, bottlenecks in DIVISIONS.items():
        lines += [f"- **{question}** " + ", ".join(f"[{b}](#{anchor(b)})" for b in bottlenecks)]
    helped = {
        bottleneck: _helped_most(bottleneck, catalogue, natural.get(bottleneck, {}), results)
        for bottleneck in BOTTLENECKS
    }
    lines += ["", figure(tree_picture(helped)), ""]
    for question, bottlenecks in DIVISIONS.items():
        lines += [f"## {question}", ""]
        for bottleneck in bottlenecks:
            gained = natural.get(bottleneck, {})
            lines += _section(bottleneck, catalogue, gained, measured, taught, others)
    return "\n".join(lines).rstrip() + "\n"


def anchor(bottleneck: str) -> str:
    """Return the anchor of a bottleneck's heading."""
    return bottleneck.replace(" ", "-")


def gains_by_bottleneck(
    rows: Iterable[dict[str, Any]],
) -> dict[str, dict[str, list[ChangeGains]]]:
    """Return the changes that were measured under each verdict, by kind of device.

    Args:
        rows: rows of natural.jsonl.

    Returns:
        Bottleneck -> "a GPU" or "a CPU" -> changes, those of most runs first.
    """
    gained: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        if row["verdict"] in QUALITY:
            continue  # the time of a step says nothing about what is learned
        device = "a GPU" if row.get("device") == "cuda" else "a CPU"
        place = f"{row.get('workload', '')} on {row['hardware'].removeprefix('NVIDIA ')}"
        for one in row.get("measured", ()):
            if gain := one.get("gain"):
                words = " ".join(parse(one["change"]).command())
                key = (row["verdict"], device, words)
                gained.setdefault(key, []).append((1 + gain["value"], place))
    by_bottleneck: dict[str, dict[str, list[ChangeGains]]] = {}
    for (bottleneck, device, words), runs in gained.items():
        times, places = zip(*runs, strict=True)
        change = ChangeGains(words, times, places)
        by_bottleneck.setdefault(bottleneck, {}).setdefault(device, []).append(change)
    for devices in by_bottleneck.values():
        for changes in devices.values():
            changes.sort(key=lambda change: (-len(change.times), -change.middle, change.words))
    return by_bottleneck


def remedies_of(bottleneck: str, catalogue: Catalogue) -> list[type[Technique[Any]]]:
    """Return the techniques whose symptoms name a bottleneck, in the catalogue's order."""
    return [
        technique
        for technique in catalogue.techniques.values()
        if any(parse_symptom(symptom)[0] == bottleneck for symptom in technique.symptoms)
    ]


def _section(
    bottleneck: str,
    catalogue: Catalogue,
    natural: Mapping[str, Sequence[ChangeGains]],
    measured: Mapping[str, Sequence[MeasuredEffect]],
    taught: Mapping[str, Gain],
    others: Mapping[str, Sequence[MeasuredEffect]],
) -> list[str]:
    lines = [f"### {bottleneck}", "", MEANINGS[bottleneck], ""]
    for device, changes in natural.items():
        lines += _gains(device, changes)
    rows = [
        (
            f"[`{t.name()}`]({card_path(t)})",
            ", ".join(_parts(t, bottleneck)) or "all of it",
            t.equality,
            t.card.parts("buys")[0],
            what_was_measured(t.name(), measured, taught, others),
        )
        for t in remedies_of(bottleneck, catalogue)
    ]
    if rows:
        head = ("technique", "acts on", "gradients", "what it buys", "measured")
        lines += [markdown(head, rows)]
    elif not natural:
        lines += [f"No technique removes it: {WITHOUT[bottleneck]}.", ""]
    return lines


def _gains(device: str, changes: Sequence[ChangeGains]) -> list[str]:
    runs = len({place for change in changes for place in change.places})
    rows = [
        (f"`{change.words}`", _times(change), str(len(change.times)), _places(change))
        for change in changes[:SHOWN]
    ]
    lines = [
        f"Measured on {device}, {runs} workload{'s' * (runs != 1)} with this verdict "
        f"(`results/{NATURAL}`):",
        "",
        markdown(("change", "times as fast", "runs", "where"), rows),
    ]
    if left := changes[SHOWN:]:
        least = min(change.middle for change in left)
        lines += [
            f"{len(left)} more changes were measured there, at {least:.2f} to "
            f"{max(change.middle for change in left):.2f}.",
            "",
        ]
    return lines


def _times(change: ChangeGains) -> str:
    low, high = min(change.times), max(change.times)
    if len(change.times) == 1:
        return f"{low:.2f}"
    return f"{change.middle:.2f} ({low:.2f} to {high:.2f})"


def _places(change: ChangeGains) -> str:
    places = list(dict.fromkeys(change.places))
    return ", ".join(places[:2]) + (f", and {len(places) - 2} more" if places[2:] else "")


def _parts(technique: type[Technique[Any]], bottleneck: str) -> list[str]:
    """Return the parts of a bottleneck that a technique acts on; none where it is all of it."""
    named = map(parse_symptom, technique.symptoms)
    parts = [part for name, part in named if name == bottleneck]
    return [] if "" in parts else parts


def what_was_measured(
    name: str,
    measured: Mapping[str, Sequence[MeasuredEffect]],
    taught: Mapping[str, Gain],
    others: Mapping[str, Sequence[MeasuredEffect]],
) -> str:
    """Return the range of what was measured of a technique, in words."""
    words: list[str] = []
    for what, ratios in (
        ("speed", [e.speed.value for e in measured.get(name, ()) if e.speed]),
        ("memory", [e.memory.value for e in measured.get(name, ()) if e.memory]),
    ):
        if ratios:
            ends = dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}"))
            words.append(f"{what} {' to '.join(ends)}")
    if gain := taught.get(name):
        ratio = f" {gain.ratio:.2f} times sooner" if gain.ratio is not None else ""
        words.append(f"target{ratio}: {gain.verdict}")
    if not words and (elsewhere := others.get(name)):
        words.append(f"{len(elsewhere)} rows of another kind, on its page")
    return "; ".join(words) or "no row yet"


def tree_picture(helped: Mapping[str, str]) -> str:
    """Return an SVG: questions, the bottlenecks that answer them, and what helped most.

    Args:
        helped: bottleneck -> what helped most, in words.
    """
    count = sum(map(len, DIVISIONS.values()))
    height = TOP + ASKED * len(DIVISIONS) + ROW * count + 14
    draw = Picture(WIDTH, height, f"Three questions, {count} bottlenecks, and what helps each")
    y = float(TOP)
    for question, bottlenecks in DIVISIONS.items():
        draw.text(24, y + 20, question, bold=True)
        y += ASKED - 8
        first = y
        for bottleneck in bottlenecks:
            middle = y + ROW / 2
            draw.line(36, middle, NAMES[0], middle, colour="goal", opacity=0.5)
            draw.box(NAMES[0], y + 3, NAMES[1], ROW - 6, fill="c0", opacity=0.16, stroke="c0")
            draw.text(NAMES[0] + NAMES[1] / 2, middle + 4.5, bottleneck, anchor="middle")
            right = NAMES[0] + NAMES[1]
            draw.line(right, middle, CHANGES - 8, middle, colour="goal", opacity=0.5)
            draw.text(CHANGES, middle + 4.5, helped[bottleneck], colour="soft", size=12)
            y += ROW
        draw.line(36, first - 8, 36, y - ROW / 2, colour="goal", opacity=0.5)
        y += 8
    return draw.svg()


def _helped_most(
    bottleneck: str,
    catalogue: Catalogue,
    natural: Mapping[str, Sequence[ChangeGains]],
    results: Path,
) -> str:
    """Return in words what was measured to help most often, or some candidates without a row.

    For time it is the change that gained in most runs; for memory the technique whose median peak
    is the smallest; for learning the technique that was soonest at its target.
    """
    names = [technique.name() for technique in remedies_of(bottleneck, catalogue)]
    words = _faster(natural)
    if not words and bottleneck == "memory capacity":
        peaks = {
            name: median(peak.value for peak in _peaks(some))
            for name, some in effects(results).items()
            if name in names and _peaks(some)
        }
        best = sorted(peaks, key=lambda name: peaks[name])[:2]
        words = "; ".join(f"{name}: {peaks[name]:.2f} of the peak" for name in best)
    if not words and bottleneck == "recipe":
        taught = learned(results)
        won = [taught[n] for n in names if n in taught and taught[n].verdict == "helps"]
        won.sort(key=lambda gain: -(gain.ratio or 0))
        words = "; ".join(
            f"{g.line}: {g.ratio:.2f} times sooner" if g.ratio else f"{g.line}: helps"
            for g in won[:2]
        )
    more = f", and {len(names) - 4} more" if names[4:] else ""
    return words or ", ".join(names[:4]) + more or WITHOUT[bottleneck]


def _faster(natural: Mapping[str, Sequence[ChangeGains]]) -> str:
    """Return the change that gained in most runs, of the device with more of them, in words."""
    won = [
        (min(len(change.times), OFTEN), change.middle, len(change.times), device, change.words)
        for device, changes in natural.items()
        for change in changes
        if change.middle > WORTH
    ]
    if not won:
        return ""
    _, times, runs, device, words = max(won)
    if len(words) > LETTERS:
        words = words[: LETTERS - 3].rstrip() + "..."
    return f"{words}: {times:.2f} times as fast, {runs} run{'s' * (runs != 1)} on {device}"


def _peaks(some: Iterable[MeasuredEffect]) -> list[Interval]:
    return [effect.memory for effect in some if effect.memory]
