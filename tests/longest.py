"""Hand the files that take longest to the processes first, so that none waits for another's last.

`longest.txt` names them, longest first; others follow in the order in which they are collected. A
stale line costs seconds and no test. To write it anew from a run of `make test`:

    make test PYTEST_ADDOPTS=--junitxml=times.xml
    python tests/longest.py times.xml
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("longest.txt")
LEAST_S = 4.0
"""Seconds of a file that is listed: what is shorter fills the last gap."""


def first_longest(items: list[pytest.Item]) -> None:
    """Sort tests by the place of their files in the list; those of a file stay in their order."""
    place = {file: number for number, file in enumerate(listed())}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def listed() -> list[str]:
    """Return the files of the list, longest first, as paths from the root."""
    return [line.partition(" ")[0] for line in LIST.read_text().splitlines()]


def seconds_of(report: Path) -> dict[str, float]:
    """Return the seconds that each file took by a report in JUnit's format."""
    seconds = defaultdict[str, float](float)
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        while parts and not (file := ROOT.joinpath(*parts).with_suffix(".py")).is_file():
            parts.pop()  # a class in the file
        if parts:
            seconds[file.relative_to(ROOT).as_posix()] += float(case.attrib["time"])
    return seconds


def main(report: str) -> None:
    """Write the list."""
    seconds = seconds_of(Path(report))
    longest = sorted(seconds.items(), key=lambda pair: -pair[1])
    LIST.write_text("".join(f"{file} {s:.0f}\n" for file, s in longest if s >= LEAST_S))


if __name__ == "__main__":
    main(sys.argv[1])
