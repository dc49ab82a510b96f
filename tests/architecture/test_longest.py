"""The list of the files that are tested first names files, longest first."""

from pathlib import Path

import pytest
from longest import LIST, ROOT, listed, main


def test_the_list_names_files_longest_first() -> None:
    files = listed()
    assert len(files) == len({*files}) > 50
    assert [file for file in files if not (ROOT / file).is_file()] == []
    seconds = [int(line.split()[1]) for line in LIST.read_text().splitlines()]
    assert seconds == sorted(seconds, reverse=True)


def test_it_is_written_from_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = '<testcase classname="tests.{}" time="{}"/>'
    cases = [("core.test_core", 5), ("parallel.test_ring.TestRanks", 4), ("core.test_core", 1.4)]
    cases += [("core.test_facts", 0.1), ("core.test_gone", 9)]
    report = tmp_path / "times.xml"
    report.write_text(f"<testsuites>{''.join(case.format(*one) for one in cases)}</testsuites>")
    monkeypatch.setattr("longest.LIST", tmp_path / "list.txt")
    main(str(report))
    wanted = "tests/core/test_core.py 6\ntests/parallel/test_ring.py 4\n"
    assert (tmp_path / "list.txt").read_text() == wanted
