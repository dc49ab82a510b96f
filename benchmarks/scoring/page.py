"""Render the page "How right is it?" of the documentation from the rows in results/.

The page is Markdown with the table of `truth.py`, pictures beside it under pictures/, and their
numbers as text. Only two things on it are written by hand: what the numbers mean, and of which rows
the history cannot show that they stood before their outcomes (TOGETHER). A part without rows is
marked as not measured yet. The same rows give the same files.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import write_whole
from scoring.drawings import (
    Class,
    classes,
    confusion,
    forecasts,
    memory,
    natural_runs,
    step_times,
    step_times_cpu,
)
from scoring.marks import MARKS, notes, table
from scoring.natural import natural
from scoring.numbers import compute
from scoring.pairs import Pairs, forecasts_ahead, paired, retracted
from scoring.rows import (
    NATURAL_REPEATED,
    PICKS,
    TRIALS,
    TUNER,
    standing,
)
from scoring.tables import (
    choice_table,
    device_table,
    list_table,
    markdown,
    run_table,
    trial_table,
    verdict_table,
)

PICTURES = ("confusion", "natural", "forecasts", "step_time", "step_time_cpu", "memory")
"""Files that the page may show, NAME.svg under pictures/."""
PROGRAMS = {
    "doctor": "benchmarks/faults.py",
    "natural_said": "benchmarks/natural.py",
    "natural": "benchmarks/natural.py",
    "natural_again": "benchmarks/natural_error.py",
    "forecasts": "benchmarks/forecasts.py",
    "plans": "benchmarks/foresight.py",
    "picks": "benchmarks/foresight.py",
    "tuner": "benchmarks/tuner.py",
    "tuner_trials": "benchmarks/tuner_trials.py",
}
"""Maps a topic to the program that writes its rows."""
ON_CPU = "benchmarks/foresight_cpu.py"
"""The program that writes the rows of plans on a CPU."""
NOT_YET = "Not measured yet."
OPENING = """\
# How right is it?

Headrace predicts before a run what it will take, names its bottleneck, and forecasts what a remedy
will gain. This page shows how often that was right. The page and its pictures are made from the
rows in `results/` and from nothing else, by `python benchmarks/readme_table.py` (or by
`python benchmarks/truth.py --page FILE`). A number without rows is not measured yet.

- Every row counts that no later row retracts, whether it flatters or not.
- Abstaining is not being right.
- A prediction counts only when its row stands before the row of its outcome.
- A forecast of a gain counts only when `results/forecasts_said.jsonl` has the same one, of that day
  or before.
- The doctor is scored twice. A planted fault has a name that the doctor must find. A natural run
  has none: there the gain of the first remedy is compared with the best gain that was measured.

"Wanted" is what a release must reach; the aim stands in brackets. "Held out" is the same number
over rows that set no threshold, or "all" where every prediction was written before its outcome.
`python benchmarks/truth.py --json` prints the same numbers by the names at the end of this page.
"""

TOGETHER = {
    "forecasts": (
        {"said": "ded2a89"},
        " The outcomes of {n} entered this repository's history in the same commit as what was "
        "said of them (7f5b1dc), since the commit of what was said did not reach it; the code of "
        "ded2a89 with that day's `results/forecasts_run.jsonl` says all of it again, number for "
        "number.",
    ),
    "plans": (
        {"tier": "after_20_steps", "commit": "789c8e7"},
        " The {n} predictions after 20 steps of `held_out_3` entered this repository's history in "
        "the same commit as their outcomes (a1f8c64), in rows before them.",
    ),
}
"""Maps a topic to facts of rows whose order the history cannot show, and a sentence for them."""


def render(results: Path) -> dict[str, str]:
    """Render the page as "page", and its pictures as "pictures/NAME.svg": name -> text.

    Raises:
        ConfigError: no such folder, or a row that is wrong, by file and line.
    """
    numbers = compute(results)
    pairs, _ = paired(results)
    faults, runs, (gains, _) = classes(results), natural(results), forecasts_ahead(results)
    repeated = {row.of: row for row in NATURAL_REPEATED.read(results).rows}
    drawn = {
        "confusion": confusion(faults),
        "natural": natural_runs([*runs.scored, *runs.thin]),
        "forecasts": forecasts(gains),
        "step_time": step_times(pairs),
        "step_time_cpu": step_times_cpu(pairs),
        "memory": memory(pairs),
    }
    parts = [
        OPENING,
        markdown(("number", "reached", "wanted (aim)", "n", "held out", "so far"), table(numbers)),
        "".join(f"- {line}\n" for line in notes(numbers)),
        *_of_doctor(results, drawn, faults, device_table(numbers, repeated) + run_table(runs)),
        *_of_planner(results, drawn, pairs),
        *_of_tuner(results),
        "## How each is counted\n",
        "\n".join(f"- {mark.what} (`{name}`): {mark.says}" for name, mark in MARKS.items()),
    ]
    files = {f"pictures/{name}.svg": text for name, text in drawn.items() if text}
    return {"page": "\n".join(filter(None, parts)) + "\n", **files}


Drawn = Mapping[str, str | None]
"""Maps the name of a picture to the picture; None where there is nothing to draw."""


def _of_doctor(results: Path, drawn: Drawn, fault_classes: Sequence[Class], runs: str) -> list[str]:
    """Render the verdicts on planted faults and on natural runs, and the forecasts."""
    return [
        _section(
            "The doctor's verdicts on planted faults",
            drawn["confusion"],
            "confusion",
            verdict_table(fault_classes),
            "Of each planted fault, and of runs without one, what the first finding was. A "
            "frame is around what is right.",
            _source(results, "doctor"),
        ),
        _section(
            "The doctor's verdicts on natural runs",
            drawn["natural"],
            "natural",
            runs,
            "Of each run without a planted fault, the remedy that was named first and what it "
            "gained, beside the change that gained most of all that were measured there; the "
            "gain is the step's time before over after, less 1, with its 95% interval. The "
            "wrong ones stand first. Said again is what the code of that commit says of the same "
            "runs; their outcomes were known, and what it fits was fitted without the run's "
            "workload.",
            _source(results, "natural_said", "natural", "natural_again"),
        ),
        _section(
            "Forecasts of gains",
            drawn["forecasts"],
            "forecasts",
            "",
            "A remedy's gain is the step's time before over after, less 1. On the dashed line "
            "a forecast is what was measured; four of five intervals should meet it."
            + _together(results, "forecasts"),
            _source(results, "forecasts"),
        ),
    ]


def _of_planner(results: Path, drawn: Drawn, pairs: Pairs) -> list[str]:
    """Render predicted steps and peaks beside measured ones."""
    source = _source(results, "plans")
    return [
        _section(
            "Step time",
            drawn["step_time"],
            "step_time",
            "",
            "Seconds of a steady step, predicted before they were measured."
            + _together(results, "plans"),
            source,
        ),
        _section(
            "Step time on a CPU",
            drawn["step_time_cpu"],
            "step_time_cpu",
            "",
            "The same on processors, with the rates that a probe measured there.",
            f"Rows: those of processors in `results/plans.jsonl`, written by `{ON_CPU}`.",
        ),
        _section(
            "The planner, list by list",
            None,
            "",
            list_table(pairs, retracted(results)),
            "Each list was written down before any of it was run, and the later ones for a "
            "planner that the outcomes of the earlier ones changed. The numbers of step time "
            "above pool what stands of all lists. Here is each list alone: the mean error of "
            "the step time, the worst, and of how many predictions; also that of retracted "
            "ones, which is in no number above.",
            source,
        ),
        _section(
            "Memory",
            drawn["memory"],
            "memory",
            "",
            "The peak of a step, as torch counts it and as the device does.",
            source,
        ),
    ]


def _of_tuner(results: Path) -> list[str]:
    """Render the choices, and what the judge of pairs accepted and rejected."""
    picks, tuned = PICKS.read(results).rows, TUNER.read(results).rows
    return [
        _section(
            "Choices",
            None,
            "",
            choice_table(picks, tuned),
            "What the planner chose, by what it knew, beside the fastest of all candidates; "
            "where the tuner ended beside the best row.",
            _source(results, "picks", "tuner"),
        ),
        _section(
            "The tuner's judge",
            None,
            "",
            trial_table(TRIALS.read(results).rows),
            "Each change went through the pair and the judge of `headrace tune`. An exact one "
            "must not be rejected for its loss, and an approximate one that was kept is "
            "trained beside the plan without it.",
            _source(results, "tuner_trials"),
        ),
    ]


def write(results: Path, page: Path) -> list[Path]:
    """Write the page and its pictures, and remove pictures that have no rows any more.

    Returns:
        The files that were written.

    Raises:
        ConfigError: as `render`, or the page is no Markdown file.
    """
    if page.suffix != ".md":
        raise ConfigError(f"{page} is no Markdown file", "--page docs/how-right.md")
    files = {_path(page, name): text for name, text in render(results).items()}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    for gone in _pictures(page) - files.keys():
        gone.unlink(missing_ok=True)
    return list(files)


def behind(results: Path, page: Path) -> list[Path]:
    """Return the files that differ from what the rows give, or are missing, or have no rows."""
    files = {_path(page, name): text for name, text in render(results).items()}
    off = [p for p, text in files.items() if not p.is_file() or p.read_text() != text]
    return off + sorted(p for p in _pictures(page) - files.keys() if p.exists())


def _path(page: Path, name: str) -> Path:
    return page if name == "page" else page.parent / name


def _pictures(page: Path) -> set[Path]:
    return {page.parent / "pictures" / f"{name}.svg" for name in PICTURES}


def _section(title: str, picture: str | None, name: str, rows: str, says: str, source: str) -> str:
    """Render a titled part: its picture and rows, or that there are none."""
    if not picture and not rows:
        return f"## {title}\n\n{NOT_YET} {source}\n"
    shown = f"![{title}](pictures/{name}.svg)\n" if picture else ""
    return "\n".join(filter(None, [f"## {title}\n", f"{says} {source}\n", shown, rows]))


def _source(results: Path, *topics: str) -> str:
    """Return where the rows are, how many, where they were measured, and what writes them."""
    sources = []
    for topic in topics:
        rows = _rows(results, topic)
        about = f"`results/{topic}.jsonl`, written by `{PROGRAMS[topic]}`"
        if rows:
            dates = sorted(str(r["date"]) for r in rows if "date" in r)
            newest = f", the newest of {dates[-1]}" if dates else ""
            about += (
                f" ({len(rows)} row{'s' * (len(rows) > 1)}{newest}; {_measured_on(results, topic)})"
            )
        sources.append(about)
    return f"Rows: {'; '.join(sources)}."


def _together(results: Path, topic: str) -> str:
    """Return a sentence about rows that came in one commit with their outcomes; "" without any."""
    facts, says = TOGETHER[topic]
    n = sum(all(row.get(k) == v for k, v in facts.items()) for row in _rows(results, topic))
    return says.format(n=n) if n else ""


def _rows(results: Path, topic: str) -> list[dict[str, Any]]:
    file = results / f"{topic}.jsonl"
    return [row for _, row in standing(file)] if file.is_file() else []


def _measured_on(results: Path, topic: str) -> str:
    """Return the devices that times were measured on, with how many rows where there are several.

    Predictions and choices are written on any machine: what counts is where their outcomes ran.
    """
    rows, what = _rows(results, topic), ""
    if topic in ("plans", "picks"):
        asked = {c["id"] for row in rows for c in row.get("candidates", [])}
        came = [r for r in _rows(results, "plans") if r.get("kind") == "outcome"]
        rows, what = [r for r in came if topic == "plans" or r.get("id") in asked], "outcomes on "
    n = Counter(str(row.get("hardware", "hardware not told")) for row in rows)
    if not n:
        return "no outcomes"
    devices = [f"{count} on {name}" for name, count in n.most_common()]
    return (
        f"{what}{next(iter(n))}" if len(n) == 1 else f"{what and 'outcomes: '}{'; '.join(devices)}"
    )
