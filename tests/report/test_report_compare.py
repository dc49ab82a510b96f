"""Runs side by side: ratios, overlaid curves, and what differs."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.report.compare import LIMIT, compare_reports

MakeRun = Callable[..., Path]
PLAN = "[optimizer]\nlr = 0.003\n[data]\nsources = 'stdlib'\n"
FASTER = "[optimizer]\nlr = 0.004\n[data]\nsources = 'stdlib'\n[techniques.muon]\n"


@pytest.fixture
def page(make_run: MakeRun, tmp_path: Path) -> str:
    """The page about a run, one that is a quarter faster, and one that has no numbers."""
    first = make_run("first", name="first", plan=PLAN)
    second = make_run(
        "second", name="<b>second", plan=FASTER, steady_tokens_per_s=15754.2 * 1.25, dollars=None
    )
    third = make_run("third", name="third", plan=PLAN, steady_tokens_per_s=None, wall_s=None)
    return compare_reports([first, second, third], tmp_path / "compare.html").read_text()


def row(page: str, title: str) -> list[str]:
    """Return the text of the cells in the row with this title."""
    found = re.search(rf'<tr><th scope="row">{re.escape(title)}</th>(.*?)</tr>', page)
    assert found is not None, title
    cells = re.findall(r"<td[^>]*>(.*?)</td>", found[1])
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in cells]


def test_ratios_are_against_the_first(page: str) -> None:
    assert row(page, "Tokens per second, median") == ["15,754", "19,693 1.25x", "not measured"]
    wall = "3 min 40 s"
    assert row(page, "Wall time") == [wall, f"{wall} 1.00x", "not measured"]
    assert row(page, "Cost") == ["$0.031", "unknown", "$0.031 1.00x"]


def test_only_plan_keys_that_differ_are_listed(page: str) -> None:
    assert row(page, "optimizer.lr") == ["0.003", "0.004", "0.003"]
    assert row(page, "techniques.muon") == ["not set", "on", "not set"]
    assert "data.sources" not in page
    environment = page[page.index("Environment that differs") :]
    assert "None." in environment


def test_curves_are_overlaid_with_a_colour_per_run(page: str) -> None:
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(charts) == 2
    for chart in charts:
        assert all(f"stroke: var(--c{run})" in chart for run in range(3))
        assert "var(--goal)" in chart
    assert "All runs read the" in page


def test_names_are_escaped_and_nothing_is_fetched(page: str) -> None:
    assert "<b>" not in page and "&lt;b&gt;second" in page
    assert not re.search(r"https?:|<script|<link|<img", page)
    assert not re.search(r"\b(nan|inf)\b", page)


def test_runs_of_one_name_are_told_apart_by_folder(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b")]
    page = compare_reports(runs, tmp_path / "c.html").read_text()
    assert all(f"demo ({run})" in page for run in runs)


def test_different_goals_draw_no_goal_line(make_run: MakeRun, tmp_path: Path) -> None:
    other = {"asked": {"bits_per_byte": 2.0}, "reached": True, "step": 1, "wall_s": 1, "tokens": 1}
    runs = [make_run("a"), make_run("b", goal=other)]
    page = compare_reports(runs, tmp_path / "c.html").read_text()
    assert "stroke: var(--goal)" not in page and "goal, 2" not in page


def test_a_run_without_validation_makes_the_comparison_in_nats(
    make_run: MakeRun, tmp_path: Path
) -> None:
    runs = [make_run("a"), make_run("b", val=[])]
    page = compare_reports(runs, tmp_path / "c.html").read_text()
    assert "nats per token" in page and "with different tokenizers" in page


def test_different_streams_are_told(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b", stream_sha256="0")]
    assert "The token streams differ." in compare_reports(runs, tmp_path / "c").read_text()
    runs[1] = make_run("c", stream_sha256=None)
    assert "is unknown." in compare_reports(runs, tmp_path / "c").read_text()


@pytest.mark.parametrize("number", [0, 1, 9])
def test_too_few_or_too_many_runs_are_refused(
    make_run: MakeRun, tmp_path: Path, number: int
) -> None:
    runs = [make_run()] * number
    with pytest.raises(ConfigError, match=f" 2 to {LIMIT} runs; {number} ") as caught:
        compare_reports(runs, tmp_path / "c.html")
    words = caught.value.remedy.text.split()
    given = [str(run) for run in runs[:LIMIT]] or ["runs/*"]
    assert words == ["headrace", "report", *given, "--output", str(tmp_path / "c.html")]


def test_a_plan_that_is_not_toml_is_told(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a"), make_run("b", plan="= 3")]
    with pytest.raises(ConfigError, match="is not valid TOML"):
        compare_reports(runs, tmp_path / "c.html")
