"""Order the tests by what they took, and name what runs in `make test-full` alone.

`longest.txt` names files, longest first: they start first, so that no process waits for another's
last, and others follow in the order in which they are collected. `slow_cases.txt` names cases of
parametrized tests that took long where quicker ones of the same test remain: they are marked
`slow`. A stale line costs seconds and no test. To write both anew from one or more runs:

    make test-full PYTEST_ADDOPTS=--junitxml=times.xml
    python tests/longest.py times.xml
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("longest.txt")
CASES = Path(__file__).with_name("slow_cases.txt")
LEAST_S = 4.0
"""Seconds of a file that is listed: what is shorter fills the last gap."""
LONG_CASE_S = 0.4
REMAIN = 2
"""The quickest cases of a test that stay in `make test`, however long they take."""
WHOLE = (
    "tests/contract/test_trains.py",  # each technique trains, resumes and reports
    "tests/distributed/test_compositions.py",  # all cases share one group of ranks
    "tests/distributed/test_traffic.py",
    "tests/docs/test_snippets.py::test_every_command_of_a_page[README.md]",
)
"""What stays whole in `make test`."""


def first_longest(items: list[pytest.Item]) -> None:
    """Sort tests by the place of their files in the list; those of a file stay in their order."""
    place = {file: number for number, file in enumerate(listed())}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the listed cases `slow`."""
    cases = {*CASES.read_text().splitlines()}
    for item in items:
        if item.nodeid in cases:
            item.add_marker(pytest.mark.slow)


def listed() -> list[str]:
    """Return the files of the list, longest first, as paths from the root."""
    return [line.partition(" ")[0] for line in LIST.read_text().splitlines()]


def seconds_of(reports: Iterable[Path]) -> dict[str, float]:
    """Return the least seconds that each case took by reports in JUnit's format."""
    seconds: dict[str, float] = {}
    for case in (c for r in reports for c in ElementTree.parse(r).iter("testcase")):
        parts = case.attrib["classname"].split(".")
        inner: list[str] = []
        while parts and not (file := ROOT.joinpath(*parts).with_suffix(".py")).is_file():
            inner.insert(0, parts.pop())  # a class in the file
        if parts:
            path = file.relative_to(ROOT).as_posix()
            name = "::".join((path, *inner, case.attrib["name"]))
            took = float(case.attrib["time"])
            seconds[name] = min(took, seconds.get(name, took))
    return seconds


def slow_of(seconds: dict[str, float]) -> list[str]:
    """Return the long cases of tests of which quicker ones remain."""
    tests = defaultdict[str, list[str]](list)
    for case in sorted(seconds, key=lambda case: seconds[case]):
        tests[case.partition("[")[0]].append(case)
    later = (case for cases in tests.values() for case in cases[REMAIN:])
    return [c for c in later if seconds[c] >= LONG_CASE_S and not c.startswith(WHOLE)]


def main(*reports: str) -> None:
    """Write both lists."""
    seconds = seconds_of(map(Path, reports))
    slow = slow_of(seconds)
    CASES.write_text("".join(f"{case}\n" for case in sorted(slow)))
    files = defaultdict[str, float](float)
    for case in seconds.keys() - set(slow):
        files[case.partition("::")[0]] += seconds[case]
    longest = sorted(files.items(), key=lambda pair: -pair[1])
    LIST.write_text("".join(f"{file} {s:.0f}\n" for file, s in longest if s >= LEAST_S))


if __name__ == "__main__":
    main(*sys.argv[1:])
