"""Write the numbers of the pages, from the receipts in results/ and from nothing else.

    python benchmarks/readme_table.py            # write them between the pages' markers
    python benchmarks/readme_table.py --check    # exit 1 when a page is behind the receipts

The README has three numbers, docs/numbers.md all. Rows keep the words that they were written with,
and a page shows them in today's words (WORDS). The newest row of a measurement, at one shape on one
device, stands in the table, unless an older one has more readings. A row that another row retracts
is left out; so are a sweep's single points (`kind` "tune"). Where the best plans' time goes stands
beside measured ceilings (`kernel_gaps.py`). How right predictions and verdicts were has a page of
its own, docs/how-right.md with its pictures, which `truth.py --page` writes too.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from scoring import compute
from scoring.marks import places, reached
from scoring.page import behind, markdown, write
from scoring.rows import NAMES

ROOT = Path(__file__).resolve().parent.parent
RESULTS, THREE, GAPS = "results", "numbers", "gaps"
"""Names of the pages' markers: <!-- NAME:begin --> and <!-- NAME:end -->."""
WORDS = {
    r"matrix products": "matmuls of older rows",
    r"products": "matmuls",
    r"trunk": "baseline",
}
"""Maps the regular expression of a stored word to the word that a page shows."""
EMPTY = "No receipts yet: nothing has been measured with this version, so nothing is claimed."
GIB = 2**30
PAGES = (ROOT / "README.md", ROOT / "docs" / "numbers.md")
"""Pages that have markers, between which numbers are written."""
POINTS = ("tune", "search", "reading")
"""Kinds of rows that are one point of a sweep or a search, or one reading of several."""
BY_KIND = ("learning", "data", "finetune", "scaling", "reliability", "compress")
"""Topics whose kinds of rows measure different things: each kind has a table of its own."""
OF_RANKS = ("side", "rank_memory")
"""Kinds of rows whose tables tell for how many GPUs a plan was."""
PLACES = ("data.sources", "data.directory", "directory")
"""Keys of a plan that hold a place of this machine, which tables leave out."""
HOW_RIGHT = ROOT / "docs" / "how-right.md"
"""The page that is written as a whole, and not between markers."""


def read_rows(file: Path, *, points: bool = False) -> list[dict[str, Any]]:
    """Return a topic's rows, retracted ones and those that retract left out.

    A sweep's or search's single points are left out too, unless `points` asks for them.
    Rows without a `loss_schedule` lose their loss difference: their schedule ended after 24 of 200
    steps.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    for row in rows:
        if "loss_schedule" not in row and row.get("loss_steps"):
            row["metrics"].pop("loss_difference", None)
    retracted = {row["retracts"] for row in rows if "retracts" in row}
    return [
        row
        for number, row in enumerate(rows, 1)
        if number not in retracted
        and "retracts" not in row
        and (points or row.get("kind") not in POINTS)
    ]


def subject(row: dict[str, Any]) -> str:
    """Return what a row measured, in words."""
    if "base" in row:
        how = "left out of" if row.get("left_out") else "added to"
        knobs = f" ({row['knobs']})" if row.get("knobs") else ""
        changed = " ".join(changes(row))
        base = f"{row['base']} ({changed})" if changed else row["base"]
        return f"{row['technique']}{knobs} {how} the {base}"
    if "fault" in row:
        return row["fault"] or "no fault"
    names = (row.get(key) for key in ("peer", "recipe", "side", "technique"))
    name = next(filter(None, names), "trunk")
    if row.get("kind") == "longest":
        return f"{name}, {row['length']:,} tokens"
    if row.get("kind") == "repeated_text":
        passes = f"{row['metrics']['epochs']['value']:.2g} passes"
        pairs = ["with pairs"] * ("bigram_embeddings" in row["techniques"])
        return ", ".join([passes, *pairs, *row["overrides"]])
    if row.get("kind") == "optimizer_share" and (changed := changes(row)):
        return f"{name} ({' '.join(changed)})"
    return f"{name}, GPUs: {row['ranks']}" if row.get("kind") in OF_RANKS else name


def changes(row: dict[str, Any]) -> list[str]:
    """Return how the plan differed from its shape's, places of text aside."""
    has = _keys(row.get("shape", ""))
    on = {row["technique"], *row.get("techniques", [])}
    differences = _ablated(on, has) if row.get("left_out") and "overrides" not in row else []
    for change in row.get("overrides", []):
        key, is_key, value = change.partition("=")
        idle = key.startswith("techniques.") and key.split(".")[1] not in on
        if not is_key or not (key in PLACES or idle or has.get(key) == value):
            differences.append(change)
    return sorted(differences)


def _ablated(recipe: set[str], has: dict[str, str]) -> list[str]:
    """Return how a recipe differs from its shape's by its techniques, where the row omits it."""
    own = {key.split(".")[1] for key in has if key.startswith("techniques.")}
    return [f"+{n}" for n in recipe - own] + [f"-{n}" for n in own - recipe]


@cache
def _keys(shape: str) -> dict[str, str]:
    """Return a shape's plan by its keys, as a command line would give them."""
    values: dict[str, str] = {}

    def collect(table: dict[str, Any], before: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict) and value:
                collect(value, f"{before}{name}.")
            else:
                values[before + name] = str(value)

    file = ROOT / "benchmarks" / "plans" / f"{shape}.toml"
    collect(tomllib.loads(file.read_text()) if file.is_file() else {}, "")
    return values


def tables(topic: str, rows: list[dict[str, Any]]) -> str:
    """Return one topic as Markdown, with a table for each of its measurements."""

    def measurement(row: dict[str, Any]) -> str:
        parts = (row.get("kind", ""), row.get("method", "")) if topic in BY_KIND else ()
        return row.get("measurement", " ".join(filter(None, parts)).replace("_", " "))

    return "\n\n".join(
        table(topic, name, [row for row in rows if measurement(row) == name])
        for name in dict.fromkeys(map(measurement, rows))
    )


def shown(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the newest row of each subject; one with fewer readings hides none with more.

    Two rows of one commit with as many readings, as on two hosts, are both returned.
    """
    newest: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key, often = (subject(row), row.get("shape"), row["hardware"]), row.get("n", 0)
        before = newest.get(key, [])
        if not any(often < other.get("n", 0) for other in before):
            like = (o for o in before if (o["commit"], o.get("n")) == (row["commit"], often))
            newest[key] = [*(like if often else ()), row]
    return [(what, row) for (what, *_), each in newest.items() for row in each]


def table(topic: str, kind: str, rows: list[dict[str, Any]]) -> str:
    """Return one measurement of a topic as a table in Markdown."""
    newest = shown(rows)
    heads: dict[str, str] = {}
    for _, row in newest:
        heads |= {name: metric["unit"] for name, metric in row.get("metrics", {}).items()}
    titles = [f"{name.replace('_', ' ')}{_unit(name, unit)}" for name, unit in heads.items()]
    lines = [
        f"**{': '.join(filter(None, [topic.replace('_', ' '), kind]))}** (`results/{topic}.jsonl`)",
        "",
        f"| what | shape | hardware | n | {' | '.join([*titles, 'commit'])} |",
        f"|---|---|---|---|{'---|' * (len(titles) + 1)}",
    ]
    for what, row in newest:
        cells = [_cell(row.get("metrics", {}).get(name)) for name in heads]
        if "refused" in row:
            why = " ".join(row["refused"].replace("|", "/").split())
            cells = [f"refused: {why}", *["" for _ in cells[1:]]]
        what += _reached(row.get("reached") or [])
        facts = [what, row.get("shape") or "", row["hardware"], str(row.get("n", "")), *cells]
        facts.append(row["commit"] or "")
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines)


def _reached(by_seed: list[bool] | dict[str, list[bool]]) -> str:
    """Return how many seeds reached a target, of each side where there are several."""
    sides = by_seed if isinstance(by_seed, dict) else {"": by_seed}
    parts = [f"{name} {sum(each)} of {len(each)} seeds" for name, each in sides.items() if each]
    return f" (target reached by {', '.join(map(str.strip, parts))})" if parts else ""


def of_techniques(results: Path) -> dict[str, str]:
    """Return each technique's rows as a table, by its name; a page of the reference shows it."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(results / "techniques.jsonl"):
        by_name.setdefault(row["technique"], []).append(row)
    return {name: todays(tables("techniques", rows)) for name, rows in by_name.items()}


def distances(topic: str, rows: list[dict[str, Any]]) -> str:
    """Render compositions in a few lines: inside of their band, magnified, outside, refused."""
    newest = {(r["composition"], r["ranks"]): r for r in rows}
    hardware = sorted({f"{r['ranks']} x {r['hardware']}" for r in newest.values()})
    measured = {n: r for (n, _), r in newest.items() if "gradient" in r["metrics"]}
    off = {n: r["metrics"]["gradient"]["value"] for n, r in measured.items()}
    narrow = min(r["band"] for r in measured.values())
    inside = [off[n] for n, r in measured.items() if r["inside"] and off[n] <= narrow]
    magnified = [
        f"{n} {off[n]:.2g} of {r['band']:.2g}"
        for n, r in measured.items()
        if r["inside"] and off[n] > narrow
    ]
    outside = [f"{n} {off[n]:.2g}" for n, r in measured.items() if not r["inside"]]
    refused = [name for (name, _), r in newest.items() if "refused" in r]
    lines = [
        f"**{topic}** (`results/{topic}.jsonl`, {', '.join(hardware)}, bf16 against fp32 in one "
        "process)",
        "",
        f"Gradients within {narrow:g}: {len(inside)} compositions, at {min(inside):.3f} to "
        f"{max(inside):.3f} (worst gradient, relative L2).",
    ]
    for what, names in (
        ("Within twice what rounding to bf16 alone moves there", magnified),
        ("Outside", outside),
        ("Refused", refused),
    ):
        lines += [f"{what}: {', '.join(names)}."] if names else []
    return "\n".join(lines)


def _unit(name: str, unit: str) -> str:
    """Return the unit, where the metric's name does not already say it."""
    named = {"tokens_per_s": "tokens/s", "bits_per_byte": "bits/byte", "tokens": "tokens"}
    return "" if named.get(name) == unit else f", {'GiB' if unit == 'bytes' else unit}"


def _cell(metric: dict[str, Any] | None) -> str:
    """Return the value, and its spread when there is one."""
    if metric is None:
        return "-"
    scale = GIB if metric["unit"] == "bytes" else 1
    value, low, high = (_number(metric[k] / scale) for k in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def render(results: Path) -> str:
    """Return every topic that has rows as Markdown, or one sentence.

    Topics that are scored are left out: docs/how-right.md has them.
    """
    files = [f for f in sorted(results.glob("*.jsonl")) if not f.stem.startswith(NAMES)]
    topics = [(f.stem, rows) for f in files if (rows := read_rows(f))]
    pages = [(distances if name == "compositions" else tables)(name, rows) for name, rows in topics]
    return todays("\n\n".join(pages)) or EMPTY


def todays(text: str) -> str:
    """Return a text with stored words replaced by today's (WORDS); text in backticks stays."""
    parts = text.split("`")
    for word, today in WORDS.items():
        parts[::2] = [re.sub(rf"\b{word}\b", today, part) for part in parts[::2]]
    return "`".join(parts)


def three_numbers(results: Path) -> str:
    """Return the three numbers of the README as a table, each with its receipt."""
    numbers = compute(results)
    rows = [_beside_torchtitan(results)]
    scored = (
        ("step_time_error_no_gpu", "mean error of a step's time, predicted without the GPU", ""),
        ("doctor_top1", "of planted faults named by the doctor", "runs: "),
    )
    for (name, words, unit), topic in zip(scored, ("plans", "doctor"), strict=True):
        number = numbers[name]
        on = places(number) or "plans, each predicted in an earlier row than its outcome"
        value = f"**{reached(name, number)}** {words}" if number["n"] else f"{words}: not measured"
        rows.append((value, f"{number['n']} {unit}{on}; `results/{topic}.jsonl`"))
    return markdown(("number", "receipt"), rows).rstrip()


def _beside_torchtitan(results: Path) -> tuple[str, str]:
    """Return the speed and the memory of the 160m shape beside torchtitan, and their receipt."""
    file = results / "peers.jsonl"
    rows = shown(read_rows(file) if file.is_file() else [])
    own = [r for what, r in rows if what == "headrace" and r.get("shape") == "160m"]
    if not own:
        return "speed beside torchtitan: not measured", "`results/peers.jsonl`"
    row = own[-1]
    speed, memory = (row["metrics"][f"{n}ratio_to_torchtitan"] for n in ("", "memory_"))
    return (
        f"**{speed['value']:.2f} times** torchtitan's tokens per second in {memory['value']:.2f} "
        "of its memory, a 160M decoder in bf16",
        f"{row['n']} paired readings, {_cell(speed).partition(' ')[2].strip('()')}: "
        f"{row['hardware']}, {row['commit']}; `results/peers.jsonl`",
    )


def gaps(results: Path) -> str:
    """Return the best plans' kernels beside the ceilings, or one sentence."""
    from kernel_gaps import section  # makes plans, which other tables need not wait for

    file = results / "kernels.jsonl"
    return todays(section(read_rows(file) if file.is_file() else [])) or EMPTY


def replaced(page: str, inner: str, name: str = RESULTS) -> str:
    """Return `page` with the text between the markers of that name replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    if not rest or end not in page:
        raise SystemExit(f"a page has no {begin} ... {end}")
    return f"{before}{begin}\n{inner}\n{end}{after}"


def main(words: Sequence[str] | None = None) -> None:
    """Write the pages, or with --check exit 1 where one differs from the receipts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", type=Path, help="one page instead, with all topics")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    args = parser.parse_args(words)
    for path in (args.page,) if args.page else PAGES:
        page = path.read_text()
        fresh = filled(page, args.results)
        if not args.check:
            path.write_text(fresh)
        elif page != fresh:
            sys.exit(f"{path.name} is behind results/: python benchmarks/readme_table.py")
    if args.page:
        return
    if not args.check:
        write(args.results, HOW_RIGHT)
    elif files := behind(args.results, HOW_RIGHT):
        sys.exit(f"{files[0].name} is behind results/: python benchmarks/readme_table.py")


def filled(page: str, results: Path) -> str:
    """Return a page with the text between its markers computed anew."""
    for name, make in ((RESULTS, render), (THREE, three_numbers), (GAPS, gaps)):
        if f"<!-- {name}:begin -->" in page:
            page = replaced(page, make(results), name)
    return page


if __name__ == "__main__":
    main()
