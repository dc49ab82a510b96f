"""The lists of what takes long name files and cases, and are written from reports."""

from pathlib import Path

import pytest
from longest import CASES, LIST, REMAIN, ROOT, listed, main


def test_the_list_names_files_longest_first() -> None:
    files = listed()
    assert len(files) == len({*files}) > 50
    assert [file for file in files if not (ROOT / file).is_file()] == []
    seconds = [int(line.split()[1]) for line in LIST.read_text().splitlines()]
    assert seconds == sorted(seconds, reverse=True)


def test_slow_cases_are_of_parametrized_tests_that_are_there() -> None:
    for case in CASES.read_text().splitlines():
        file, _, name = case.partition("::")
        test, bracket, _ = name.partition("[")
        assert bracket and f"def {test.rpartition('::')[2]}(" in (ROOT / file).read_text(), case


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where both lists are written."""
    files, cases = tmp_path / "list.txt", tmp_path / "cases.txt"
    monkeypatch.setattr("longest.LIST", files)
    monkeypatch.setattr("longest.CASES", cases)
    return files, cases


def report(path: Path, *cases: tuple[str, str, float]) -> str:
    """Write a report of the cases' places, names and seconds."""
    one = '<testcase classname="tests.{}" name="{}" time="{}"/>'
    path.write_text(f"<testsuites>{''.join(one.format(*case) for case in cases)}</testsuites>")
    return str(path)


def test_files_are_written_from_a_report(tmp_path: Path, lists: tuple[Path, Path]) -> None:
    cases = [
        ("core.test_core", "a", 5),
        ("parallel.test_ring.TestRanks", "b", 4),
        ("core.test_core", "c", 1.4),
        ("core.test_facts", "d", 0.1),
        ("core.test_gone", "e", 9),
    ]
    main(report(tmp_path / "times.xml", *cases))
    assert lists[0].read_text() == "tests/core/test_core.py 6\ntests/parallel/test_ring.py 4\n"
    assert lists[1].read_text() == ""


def test_the_quickest_cases_of_a_test_are_never_listed(
    tmp_path: Path, lists: tuple[Path, Path]
) -> None:
    first = [("core.test_core", f"a[{n}]", n + 5.0) for n in range(REMAIN + 2)]
    first.append(("contract.test_trains", "b", 9))
    again = [("core.test_core", f"a[{REMAIN}]", 0.01)]  # one slow hour lists nothing
    main(*(report(tmp_path / f"{n}.xml", *cases) for n, cases in enumerate((first, again))))
    assert lists[1].read_text().split() == [f"tests/core/test_core.py::a[{n}]" for n in (1, 3)]
