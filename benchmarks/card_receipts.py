"""Write what was measured of each technique, from the rows of results/, into the file of its card.

A receipt of `headrace/techniques/receipts.json` says which plan a technique was put into or left
out of, and which ratios its card shows. This program looks each of them up in the rows: a ratio
that none has any more becomes that of the newest row. A receipt is added by hand, with any number,
and this program gives it the measured one.

    python benchmarks/card_receipts.py [--check]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from readme_table import read_rows, shown

ROOT = Path(__file__).parents[1]
RECEIPTS = ROOT / "headrace" / "techniques" / "receipts.json"
ROWS = ROOT / "results" / "techniques.jsonl"
BASES = {"compiled recipe": "recipe", "plain trunk": "trunk", "plain baseline": "trunk"}
"""Maps the first words of a receipt to the name that its rows give that plan."""
METRICS = {
    "speed": ("speed_ratio", "run_ratio"),
    "memory": ("memory_ratio",),
    "reserved memory": ("reserved_ratio",),
}
ROUNDED = 0.005
"""Half of the last digit that a card shows; a ratio that is nearer to a row's agrees with it."""


def measured_rows(file: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows that hold a measurement and that the table of techniques shows."""
    read = read_rows(file)
    measurements = {row.get("measurement", "") for row in read}
    each = (
        shown([row for row in read if row.get("measurement", "") == kind]) for kind in measurements
    )
    return [row for some in each for _, row in some if row.get("metrics")]


def measured(
    receipt: dict[str, Any], ratio: dict[str, Any], rows: list[dict[str, Any]]
) -> list[float]:
    """Return what the rows measured of one ratio of a receipt, the oldest first."""
    base = next(name for words, name in BASES.items() if receipt["where"].startswith(words))
    left_out = "without it" in receipt["where"]
    keys = [word for word in ratio["knobs"].replace(",", " ").split() if "=" in word]
    return [
        row["metrics"][metric]["value"]
        for row in rows
        for metric in METRICS[ratio["of"]]
        if metric in row["metrics"]
        and row["hardware"] == receipt["hardware"]
        and (row["technique"], row["base"]) == (receipt["technique"], base)
        and (row["shape"], row["left_out"]) == (ratio["shape"], left_out)
        and all(
            any(key in given for given in (row["knobs"], *row.get("overrides", []))) for key in keys
        )
    ]


def refreshed(receipts: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the receipts with measured ratios.

    Raises:
        SystemExit: no row measured one of them.
    """
    for receipt in receipts:
        for ratio in receipt["ratios"]:
            values = measured(receipt, ratio, rows)
            if not values:
                sys.exit(f"no row has this: {receipt['technique']}: {receipt['where']}: {ratio}")
            if not any(abs(value - ratio["ratio"]) <= ROUNDED + 1e-9 for value in values):
                ratio["ratio"] = round(values[-1], 2)
    return receipts


def render(receipts: list[dict[str, Any]]) -> str:
    """Render the file, one receipt a line."""
    lines = ",\n".join(f" {json.dumps(receipt, ensure_ascii=False)}" for receipt in receipts)
    return f"[\n{lines}\n]\n"


def main() -> None:
    """Write the file, or with --check report that it is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail on a change")
    given = parser.parse_args()
    before = RECEIPTS.read_text()
    after = render(refreshed(json.loads(before), measured_rows()))
    if given.check and after != before:
        sys.exit(f"{RECEIPTS} is not what the rows say: python benchmarks/card_receipts.py")
    RECEIPTS.write_text(after)


if __name__ == "__main__":
    main()
