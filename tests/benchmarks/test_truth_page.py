"""The page "How right is it?": what it says is in the rows, and the committed one is theirs."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scoring.drawings import HEALTHY, classes
from scoring.page import NOT_YET, ON_CPU, PICTURES, PROGRAMS, behind, render, write
from scoring.picture import SCHEMES, Axis, around
from scoring.rows import PLANS, Outcome
from truth_rows import COMPILE, GRAPHS, natural, natural_said, trial

from headrace.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
SAID = {
    "workload": "a",
    "forecast": {"low": 0.1, "value": 0.15, "high": 0.25},
    "baseline_sha256": "1330a4f",
}
BASE = {"date": "2026-11-20", "hardware": "GPU <A>", "metrics": {}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "doctor": [
        *(
            {
                "measurement": "fault",
                "fault": "slow_loader",
                "severity": s,
                "workload": "a",
                "held_out": False,
                "expected": "input",
                "verdict": "input",
                "abstained": False,
            }
            for s in (0.1, 0.2, 0.4)
        ),
        {
            "measurement": "fault",
            "fault": "spikes",
            "severity": 0.2,
            "workload": "a",
            "held_out": True,
            "expected": "instability",
            "verdict": "launch",
            "abstained": False,
        },
        {
            "measurement": "fault",
            "fault": "spikes",
            "severity": 0.05,
            "workload": "a",
            "held_out": True,
            "expected": "instability",
            "verdict": "launch",
            "abstained": False,
        },
        {"measurement": "healthy", "workload": "a", "verdict": "computation", "abstained": False},
        {"measurement": "healthy", "workload": "a", "verdict": None, "abstained": True},
    ],
    "forecasts": [
        {**SAID, "remedy": "one", "measured": 0.2, "said": "ded2a89"},
        {**SAID, "remedy": "two & <more>", "measured": 0.5, "said": "abc1234"},
        {**SAID, "remedy": "nobody said", "measured": 0.5, "said": "abc1234"},
    ],
    "forecasts_said": [
        {**SAID, "remedy": "one", "commit": "ded2a89"},
        {**SAID, "remedy": "two & <more>", "commit": "abc1234"},
    ],
    "plans": [
        {
            "kind": "prediction",
            "id": "p",
            "tier": "no_gpu",
            "step_s": 0.11,
            "allocated_bytes": 2**30,
            "reserved_bytes": None,
            "fits": True,
        },
        {
            "kind": "outcome",
            "id": "p",
            "step_s": 0.1,
            "allocated_bytes": 2**30,
            "reserved_bytes": 2**31,
            "fits": True,
            "risky": False,
        },
        {"kind": "prediction", "id": "p", "tier": "after_probes", "step_s": 0.1},  # too late
        {"kind": "prediction", "id": "c", "tier": "after_probes", "step_s": 0.1, "device": "cpu"},
        {"kind": "outcome", "id": "c", "step_s": 0.1, "risky": False, "device": "cpu"},
    ],
    "natural_said": [natural_said("one <run>", COMPILE, 0.4), natural_said("well", None)],
    "natural": [
        natural("one <run>", COMPILE, (COMPILE, -0.4), (GRAPHS, 0.3), (["+tf32"], 0.1)),
        natural("well", None, (COMPILE, 0.01), (GRAPHS, 0.02)),
    ],
    "tuner_trials": [trial("exact", "kept")],
    "picks": [
        {
            "workload": "a",
            "candidates": [
                {"id": "x", "predicted_s": 1.0, "measured_s": 1.1},
                {"id": "y", "predicted_s": 2.0, "measured_s": 1.0},
            ],
        }
    ],
}


def _results(folder: Path, *topics: str) -> Path:
    folder.mkdir()
    for topic in topics:
        rows = "".join(json.dumps({**BASE, **row}) + "\n" for row in ROWS[topic])
        (folder / f"{topic}.jsonl").write_text(rows)
    return folder


def _classes(svg: str, tag: str) -> list[str]:
    return [e.get("class", "") for e in ElementTree.fromstring(svg).iter(SVG + tag)]


def test_the_committed_page_is_what_the_rows_give() -> None:
    late = [p.name for p in behind(ROOT / "results", ROOT / "docs" / "how-right.md")]
    assert not late, "python benchmarks/readme_table.py writes them"


def test_without_rows_nothing_is_said_and_nothing_drawn(tmp_path: Path) -> None:
    files = render(_results(tmp_path / "results"))
    assert list(files) == ["page"]
    page = files["page"]
    table, _, rest = page.partition("## The doctor")
    assert page.count(NOT_YET) == 9 and "![" not in page
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert {(row[1], row[-1]) for row in cells} == {("-", "not measured yet |")}
    assert not re.search(r"\d+ rows?\b", rest)


def test_a_page_goes_stale_with_its_rows_and_is_mended(tmp_path: Path) -> None:
    page, results = tmp_path / "docs" / "page.md", _results(tmp_path / "results", *ROWS)
    pictures = [page.parent / "pictures" / f"{name}.svg" for name in PICTURES]
    assert set(behind(results, page)) == {page, *pictures}
    assert set(write(results, page)) == {page, *pictures}
    assert behind(results, page) == []
    pictures[0].write_text(pictures[0].read_text().replace(">3<", ">4<"))
    assert behind(results, page) == [pictures[0]]
    (results / "forecasts.jsonl").unlink()
    gone = pictures[PICTURES.index("forecasts")]
    assert set(behind(results, page)) == {page, pictures[0], gone}
    write(results, page)
    assert behind(results, page) == [] and not gone.exists()
    with pytest.raises(ConfigError, match="no Markdown"):
        write(results, tmp_path / "page.html")


def test_verdicts_are_counted_as_the_numbers_are(tmp_path: Path) -> None:
    found = {c.fault: c for c in classes(_results(tmp_path / "results", "doctor"))}
    assert list(found) == ["slow_loader", "spikes", HEALTHY]
    assert (found["slow_loader"].right, found["slow_loader"].severities) == (3, 3)
    assert found["spikes"].verdict_counts == {"launch": 1} and found["spikes"].right == 0
    assert found[HEALTHY].right == found[HEALTHY].n == 2
    files = render(tmp_path / "results")
    assert "| spikes | instability | 0 of 1 | 1 | 1 | launch 1 |" in files["page"]
    assert "7 rows, the newest of 2026-11-20; GPU <A>" in files["page"]
    drawn = files["pictures/confusion.svg"]
    words = [e.text for e in ElementTree.fromstring(drawn).iter(SVG + "text")]
    assert "spikes*" in words and "slow loader" in words and "0 of 1" in words
    boxes = _classes(drawn, "rect")
    assert boxes.count("f-c1") == 1  # a wrong verdict
    assert boxes.count("s-c0") == 4  # what is right: of two faults, and two of healthy runs


def test_times_are_of_the_device_that_outcomes_ran_on(tmp_path: Path) -> None:
    cpu, gpu = {"hardware": "Xeon, 2 cores"}, {"hardware": "GPU"}
    said, came, *_ = ROWS["plans"]
    pick = {
        **ROWS["picks"][0],
        "candidates": [
            {"id": name, "predicted_s": 1.0, "measured_s": 1.0 + 0.1 * i}
            for i, name in enumerate("pq")
        ],
    }
    topics = {
        "plans": [{**said, **cpu}, {**came, **gpu}, {**came, "id": "z", "hardware": "not asked"}],
        "picks": [{**pick, **cpu, "tier": tier} for tier in ("no_gpu", "after_20_steps")],
        "doctor": [
            {**row, **(gpu if row["severity"] == 0.1 else cpu)} for row in ROWS["doctor"][:3]
        ],
    }
    results = _results(tmp_path / "results")
    for topic, rows in topics.items():
        text = "".join(json.dumps({**BASE, **row}) + "\n" for row in rows)
        (results / f"{topic}.jsonl").write_text(text)
    page = render(results)["page"]
    assert "2 rows, the newest of 2026-11-20; outcomes on GPU)" in page
    assert "outcomes: 1 on GPU; 1 on not asked)" in page
    assert "; 2 on Xeon, 2 cores; 1 on GPU)" in page
    assert "| pick, a, without a GPU | q |" in page and "| pick, a, after 20 steps | q |" in page


def _predicted(plan: str, tier: str, step_s: float, command: str) -> dict[str, Any]:
    return {"kind": "prediction", "id": plan, "tier": tier, "step_s": step_s, "command": command}


def _ran(plan: str, step_s: float | None, command: str) -> dict[str, Any]:
    return {"kind": "outcome", "id": plan, "step_s": step_s, "risky": False, "command": command}


def _by_list(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines under the heading "The planner, list by list", below its sentence."""
    results = _results(folder)
    (results / "plans.jsonl").write_text("".join(json.dumps({**BASE, **r}) + "\n" for r in rows))
    _, _, part = render(results)["page"].partition("## The planner, list by list\n")
    return part.partition("\n## ")[0].strip().splitlines()[2:]


def test_each_list_has_its_own_errors_and_retracted_ones_are_told(tmp_path: Path) -> None:
    one, two = "foresight.py", "foresight.py --list plans/held_out_2.toml --part 1/2"
    three = "foresight.py --list plans/held_out_3.toml"
    rows = [
        _predicted("a", "no_gpu", 1.1, one),
        _predicted("b", "no_gpu", 1.3, one),
        _predicted("a", "after_probes", 1.5, one),
        _predicted("b", "after_probes", 1.4, one),
        _ran("a", 1.0, one),
        _ran("b", 1.0, one),
        _predicted("a", "after_20_steps", 9.0, one),  # 7: too late, and retracted
        _predicted("c", "no_gpu", 2.2, two),
        _predicted("c", "after_probes", 2.1, two),
        _predicted("d", "after_probes", 3.0, two),
        _predicted("d", "after_20_steps", -1.0, two),
        _ran("c", 2.0, two),
        _ran("d", 2.0, two),
        _predicted("e", "no_gpu", 1.0, three),
        _ran("e", None, three),  # not timed
        _predicted("f", "no_gpu", 1.0, three),  # not run
        *({"retracts": number, "reason": "a wrong probe"} for number in (3, 4, 7)),
        {"retracts": 10, "reason": "another"},
        {"retracts": 11, "reason": "no time is negative"},
    ]
    assert _by_list(tmp_path / "results", rows) == [
        "| list | timed configurations | without a GPU | after probes | after 20 steps |",
        "|---|---|---|---|---|",
        "| held_out | 2 | 20%, worst 30%, of 2 | retracted: 45%, worst 50%, of 2 | - |",
        "| held_out_2 | 2 | 10%, worst 10%, of 1 "
        "| 5%, worst 5%, of 1; retracted: 50%, worst 50%, of 1 | - |",
        "",
        "- held_out, after probes: 2 retracted: a wrong probe",
        "- held_out_2, after probes: 1 retracted: another",
    ]
    table, _, _ = render(tmp_path / "results")["page"].partition("## The doctor")
    assert "| step time after probes | 5% |" in table
    beside = "3 retracted, and not counted; with them 36.2% of 4"
    assert f"step time after probes: 19 of 20 within 5%; worst 5%; {beside}" in table


def test_without_retractions_and_commands_the_lists_say_so(tmp_path: Path) -> None:
    rows = [_predicted("a", "no_gpu", 1.1, ""), _ran("a", 1.0, "")]
    head, _, *lines = _by_list(tmp_path / "results", rows)
    assert head.startswith("| list |")
    assert lines == ["| not told | 1 | 10%, worst 10%, of 1 | - | - |"]


def test_the_list_that_a_row_tells_holds_its_configuration() -> None:
    timed = [
        row
        for row in PLANS.read(ROOT / "results").rows
        if isinstance(row, Outcome) and row.step_s is not None
    ]
    assert timed
    held: dict[str, set[str]] = {}
    plans = ROOT / "benchmarks" / "plans"
    for file in (*plans.glob("held_out*.toml"), plans / "cpu.toml"):
        held[file.stem] = {
            f"{choice['shape']}-{choice['length']}x{choice['rows']}/{name}"
            for choice in tomllib.loads(file.read_text())["choices"]
            for name in choice["sets"]
        }
    where = {row.id: str(row.id).rpartition(": ")[2] for row in timed}  # CPU: PROCESSOR: NAME
    assert [row.id for row in timed if where[row.id] not in held[row.list_name]] == []


def test_every_program_that_the_page_names_is_there() -> None:
    assert all((ROOT / program).is_file() for program in (*PROGRAMS.values(), ON_CPU))


def test_what_came_in_one_commit_with_its_outcomes_is_told_of_rows_that_are_there(
    tmp_path: Path,
) -> None:
    page = render(_results(tmp_path / "results", *ROWS))["page"]
    assert page.count("entered this repository's history") == 1
    assert "The outcomes of 1 entered" in page
    page = render(ROOT / "results")["page"]
    assert "The outcomes of 59 entered" in page
    assert "The 38 predictions after 20 steps of `held_out_3` entered" in page


def test_points_are_marked_by_what_came_of_them(tmp_path: Path) -> None:
    files = render(_results(tmp_path / "results", "forecasts", "forecasts_said", "plans"))
    gains = ElementTree.fromstring(files["pictures/forecasts.svg"])
    titles = [e.text or "" for e in gains.iter(SVG + "title")]
    assert sorted(titles) == [
        "one, a: 15% forecast, 20% measured",
        "two & <more>, a: 15% forecast, 50% measured",
    ]
    shapes = {e.findtext(SVG + "title", "")[:3]: e.tag for e in gains.iter()}
    assert (shapes["one"], shapes["two"]) == (SVG + "circle", SVG + "rect")  # inside, outside
    steps = files["pictures/step_time.svg"]
    assert "+10.0%" in steps and "after probes" not in steps
    memory = files["pictures/memory.svg"]
    assert "allocated: 1" in memory and "reserved" not in memory


def test_a_picture_stands_alone_and_reads_in_light_and_dark(tmp_path: Path) -> None:
    light, dark = SCHEMES
    assert light.keys() == dark.keys() and light["card"] == "#fff" != dark["card"]
    for name, text in render(_results(tmp_path / "results", *ROWS)).items():
        if name == "page":
            continue
        root = ElementTree.fromstring(text)
        assert root.get("aria-label") and "http" not in text.replace(SVG[1:-1], "")
        style = (root.findtext(SVG + "style") or "").split("@media(prefers-color-scheme:dark)")
        for part in style:
            defined = set(re.findall(r"\.([fs]-[a-z0-9-]+)\{", part))
            used = {c for e in root.iter() for c in e.get("class", "").split()}
            assert used <= defined, name
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for text_at in root.iter(SVG + "text"):
            x, y = float(text_at.get("x", -1)), float(text_at.get("y", -1))
            assert 0 <= x <= width and 0 <= y <= height


@pytest.mark.parametrize(
    ("values", "log", "fewest"),
    [
        ([0.2], False, 1),
        ([0.0, 0.0], False, 1),
        ([-3e-5, 4e-5], False, 3),
        ([0.1], True, 1),
        ([0.06, 1.4], True, 3),
        ([1e-3, 1e3], True, 3),
        ([99.0, 101.0], True, 1),
    ],
)
def test_an_axis_holds_its_values_and_few_round_ticks(
    values: list[float], log: bool, fewest: int
) -> None:
    axis: Axis = around(values, "x", str, log=log)
    assert all(0 < axis.share(v) < 1 for v in values)
    ticks = axis.ticks()
    assert fewest <= len(ticks) <= 8 and ticks == sorted(set(ticks))
    assert all(-1e-9 <= axis.share(t) <= 1 + 1e-9 for t in ticks)
