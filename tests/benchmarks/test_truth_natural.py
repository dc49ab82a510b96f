"""Natural runs: when a first remedy is right, which rows count, and what the page shows of them."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from facts import in_order, tells
from scoring import compute, judge, notes
from scoring.natural import RIGHT
from scoring.natural import natural as read
from scoring.page import render
from truth_rows import (
    COMPILE,
    GRAPHS,
    ROWS,
    Row,
    metric,
    natural,
    natural_said,
    outcome,
    prediction,
    trial,
    write,
)

from headrace.core.errors import ConfigError

Measured = list[tuple[list[str], float | str]]
LITTLE: Measured = [(GRAPHS, 0.01), (ROWS, -0.2)]
MUCH: Measured = [(GRAPHS, 0.30), (ROWS, -0.2)]


@pytest.mark.parametrize(
    ("first", "healthy", "measured", "why", "healthy_wrong"),
    [
        (COMPILE, False, [(COMPILE, 0.24), *MUCH], "near the best", False),
        (COMPILE, False, [(COMPILE, 0.239), *MUCH], "another gains more", False),
        (COMPILE, False, [(COMPILE, 0.5), *MUCH], "near the best", False),
        (COMPILE, False, [(COMPILE, 0.3), *MUCH], "near the best", False),  # a tie
        (COMPILE, False, [(COMPILE, -0.02), *MUCH], "the first remedy is a loss", False),
        (COMPILE, False, [(COMPILE, "no room"), *MUCH], "the first remedy was refused", False),
        (COMPILE, False, MUCH, "the first remedy was not measured", False),
        (None, False, MUCH, "no remedy was said", False),
        (None, True, MUCH, "healthy was said", True),
        # nothing gains: silence is right, and a remedy that costs nothing
        (None, True, LITTLE, "healthy, and it is", False),
        (None, False, LITTLE, "healthy, and it is", False),
        (COMPILE, True, [(COMPILE, -0.3), *LITTLE], "healthy, and it is", False),
        (COMPILE, False, [(COMPILE, -0.009), *LITTLE], "no loss where nothing gains", False),
        (COMPILE, False, [(COMPILE, -0.011), *LITTLE], "the first remedy is a loss", False),
        (COMPILE, False, [(COMPILE, "no room"), *LITTLE], "the first remedy was refused", False),
        # healthy is said, and its own remedy gains: below a tenth it is wrong, above it twice
        (COMPILE, True, [(COMPILE, 0.12), *LITTLE], "healthy was said", True),
        (COMPILE, True, [(COMPILE, 0.09), *LITTLE], "healthy was said", False),
        (None, True, [(COMPILE, 0.05), *LITTLE], "healthy, and it is", False),
        (None, True, [(COMPILE, 0.051), *LITTLE], "healthy was said", False),
        (
            None,
            True,
            [(COMPILE, "no room"), (GRAPHS, -0.1), (ROWS, -0.2)],
            "healthy, and it is",
            False,
        ),
    ],
)
def test_a_first_remedy_is_right_by_what_was_measured(
    tmp_path: Path,
    first: list[str] | None,
    healthy: bool,
    measured: Measured,
    why: str,
    healthy_wrong: bool,
) -> None:
    topics = {
        "natural_said": [natural_said("a", first, healthy=healthy)],
        "natural": [natural("a", first, *measured)],
    }
    (run,) = read(write(tmp_path, topics)).scored
    assert run.why == why
    found = compute(tmp_path)
    near, wrong = found["doctor_first_remedy_near_best"], found["doctor_healthy_wrong"]
    assert (near["value"], near["n"]) == (float(why in RIGHT), 1)
    assert (wrong["value"], wrong["n"]) == (float(healthy_wrong), 1)


def test_a_best_of_too_few_changes_makes_nothing_right_and_hides_no_loss(tmp_path: Path) -> None:
    alone = [
        natural("right", COMPILE, (COMPILE, 0.5), (GRAPHS, 0.1), (ROWS, "no room")),
        natural("healthy", None, (COMPILE, 0.01)),
        natural("nothing", None, (COMPILE, "no room")),
        natural("loss", COMPILE, (COMPILE, -0.5)),
        natural("wronged", None, (COMPILE, 0.5)),
    ]
    said = [
        natural_said(row["id"], row["first_change"], healthy=row["first_change"] is None)
        for row in alone
    ]
    found = compute(write(tmp_path, {"natural": alone, "natural_said": said}))
    near = found["doctor_first_remedy_near_best"]
    assert (near["value"], near["n"], near["thin"]) == (0, 2, 3)
    assert found["doctor_healthy_wrong"]["value"] == 0.5
    (line,) = (one for one in notes(found) if one.startswith("first remedy near"))
    assert tells(line, 3, "too few", "not counted")


@pytest.mark.parametrize(
    "other",
    [
        {"date": "2026-11-26"},
        {"hardware": "NVIDIA H200"},
        {"id": "b"},
        {"first": None},
        {"commit": "def5678"},
        {"first": {"change": GRAPHS, "gain": None}},
    ],
    ids=str,
)
def test_a_run_counts_only_as_it_was_said_before(tmp_path: Path, other: Row) -> None:
    said, came = natural_said("a", COMPILE, 0.4), natural("a", COMPILE, (COMPILE, 0.4), *LITTLE)
    topics = {"natural_said": [said], "natural": [came]}
    assert compute(write(tmp_path, topics))["doctor_first_remedy_near_best"]["n"] == 1
    topics["natural_said"] = [said | other]
    found = compute(write(tmp_path, topics))
    for name in ("doctor_first_remedy_near_best", "forecast_natural_coverage"):
        assert (found[name]["value"], found[name]["n"], found[name]["late"]) == (None, 0, 1)
    topics["natural_said"] = [said, {"retracts": 1, "reason": "said again"}]
    late = compute(write(tmp_path, topics))["doctor_healthy_wrong"]
    assert (late["n"], late["late"]) == (0, 1)


def test_a_second_row_of_a_run_is_told_until_one_is_retracted(tmp_path: Path) -> None:
    said, came = natural_said("a", COMPILE, 0.4), natural("a", COMPILE, (COMPILE, -0.4), *MUCH)
    better = natural("a", COMPILE, (COMPILE, 0.4), *MUCH)
    topics = {"natural_said": [said], "natural": [came, better]}
    with pytest.raises(
        ConfigError, match=in_order("natural.jsonl:2:", "second", "'a on NVIDIA H100'")
    ):
        compute(write(tmp_path, topics))
    topics["natural"].append({"retracts": 1, "reason": "another process ran beside it"})
    found = compute(write(tmp_path, topics))["doctor_first_remedy_near_best"]
    assert (found["value"], found["n"], found["retracted"]) == (1, 1, 1)
    assert found["with_retracted"] == {"value": 0.5, "n": 2}
    topics["natural_said"].append(said)
    with pytest.raises(ConfigError, match=r"natural_said.jsonl:2: a second row"):
        compute(write(tmp_path, topics))


def test_natural_runs_are_told_apart_by_device(tmp_path: Path) -> None:
    cpu = {"hardware": "Xeon, 2 cores", "device": "cpu"}
    more = {**cpu, "hardware": "Other, 16 cores", "workload": "1m", "compiled": True}
    runs = [("a", 0.3, {}), ("b", 0.1, cpu), ("c", 0.3, more)]
    topics = {
        "natural_said": [natural_said(name, COMPILE, 0.3, **o) for name, _, o in runs]
        + [natural_said("waits", None)],
        "natural": [natural(name, COMPILE, (COMPILE, gain), *MUCH, **o) for name, gain, o in runs]
        + [{**natural("broke", None), "refused": "out of memory"}],
    }
    found = compute(write(tmp_path, topics))
    near, held = found["doctor_first_remedy_near_best"], found["forecast_natural_coverage"]
    told = [near[key] for key in ("n", "workloads", "kinds", "devices", "open", "refused")]
    assert told == [3, 2, 2, 2, 1, 1]
    by = {name: part["value"] for name, part in near["by_hardware"].items()}
    assert by == {"NVIDIA H100": 1, "Xeon, 2 cores": 0, "Other, 16 cores": 1}
    assert (held["value"], held["n"]) == (pytest.approx(2 / 3), 3)
    assert held["median_error"] == 0 and held["by_hardware"]["Xeon, 2 cores"]["value"] == 0
    assert held["by_hardware"]["Xeon, 2 cores"]["median_error"] == pytest.approx(2)
    marked = judge("doctor_first_remedy_near_best", {**near, "value": 0.9})
    assert tells(marked, "too few:", "2 of 8")
    marked = judge("forecast_natural_coverage", {**held, "value": 0.8, "median_error": 0.3})
    assert tells(marked, "not met:", "median error", "30%", "25%")


def test_a_first_remedy_without_a_forecast_or_a_gain_covers_nothing(tmp_path: Path) -> None:
    topics = {
        "natural_said": [natural_said("a", COMPILE), natural_said("b", COMPILE, 0.4)],
        "natural": [
            natural("a", COMPILE, (COMPILE, 0.4), *MUCH),
            natural("b", COMPILE, (COMPILE, "no room"), *MUCH),
        ],
    }
    assert compute(write(tmp_path, topics))["forecast_natural_coverage"]["n"] == 0


def test_the_page_shows_every_run_and_the_wrong_ones_first(tmp_path: Path) -> None:
    topics = {
        "natural_said": [
            natural_said("a <fine>", COMPILE, 0.4),
            natural_said("b lost", ROWS),
            natural_said("c well", None, healthy=True),
        ],
        "natural": [
            natural("a <fine>", COMPILE, (COMPILE, 0.4), *MUCH, left=[["+tf32"]]),
            natural("b lost", ROWS, (COMPILE, 0.4), *MUCH),
            natural("c well", None, *LITTLE),
        ],
        "natural_again": [
            {
                "commit": "abc",
                "of": "NVIDIA H100",
                "n": 3,
                "metrics": {
                    name: {"low": value, "value": value, "high": value}
                    for name, value in (("coverage", share), ("median_error", 0.25))
                },
            }
            for share in (0.0, 2 / 3)  # the newest is shown
        ],
    }
    files = render(write(tmp_path, topics))
    _, _, part = files["page"].partition("## The doctor's verdicts on natural runs\n")
    lines = part.partition("\n## ")[0].splitlines()
    assert "The doctor was wrong first in 1 of 3." in lines
    _, by, _, *rows = (line for line in lines if line.startswith("| "))
    assert by == "| NVIDIA H100 | 3 | 66.7% | 0% | 100% of 1 | 0% | 66.7% of 3; 25% (abc) |"
    assert rows[0] == (
        "| b lost | NVIDIA H100 | launch | `batch.micro_sequences=8` | -20% (-21% to -19%) | "
        "`+torch_compile` | +40% (+39% to +41%) | the first remedy is a loss |"
    )
    assert [row.split(" | ")[0] for row in rows] == ["| b lost", "| a <fine>", "| c well"]
    assert (
        "| healthy; none | - | `+cuda_graphs` | +1% (+0% to +2%) | healthy, and it is |" in rows[2]
    )
    drawn = ElementTree.fromstring(files["pictures/natural.svg"])
    svg = "{http://www.w3.org/2000/svg}"
    titles = {e.findtext(svg + "title", "")[:6]: e.tag for e in drawn.iter()}
    assert (titles["a <fin"], titles["b lost"], titles["c well"]) == (
        svg + "circle",
        svg + "rect",
        svg + "polygon",
    )


# --- the tuner's trials, short tunings and steps on a CPU -------------------------------------


def test_every_rejected_exact_change_and_every_loser_counts(tmp_path: Path) -> None:
    rows = [
        *[trial("exact", verdict) for verdict in ("kept", "lost", "not shown")],
        trial("exact", "cut"),  # no verdict
        trial("exact", "rejected", for_loss=True),
        trial("exact", "kept"),  # a second try hides no
        {**trial("exact", "kept"), "refused": "no GPU"},
        trial("approximate", "rejected", for_loss=True),  # it may be
        trial("approximate", "lost", nats=9.0, steps=1000),  # not kept
        trial("approximate", "kept", change=ROWS),
        trial("approximate", "kept", change=ROWS, nats=0.01, steps=1000),
        trial("approximate", "kept", change=GRAPHS, nats=0.5, steps=400),  # not long enough
        trial("learning", "kept", nats=9.0, steps=1000),
    ]
    found = compute(write(tmp_path, {"tuner_trials": rows}))
    exact, losers = found["tuner_exact_rejected"], found["tuner_losers_kept"]
    assert (exact["value"], exact["n"], exact["refused"]) == (1, 5, 1)
    assert (losers["value"], losers["n"], losers["untrained"]) == (0, 1, 1)
    assert tells(judge("tuner_losers_kept", losers), "not met:", 1, "not trained")
    again = [trial("approximate", "kept", change=ROWS, nats=n, steps=1000) for n in (0.011, 0.0)]
    found = compute(write(tmp_path, {"tuner_trials": [*rows, *again]}))["tuner_losers_kept"]
    assert (found["value"], found["n"]) == (1, 3), "training it again hides no loss"
    page = render(tmp_path)["page"]
    assert "- small: `+torch_compile` is exact, and was rejected for its loss" in page
    assert "- small: `batch.micro_sequences=8` was kept, and loses +0.011 nats" in page
    assert "| small | NVIDIA H100 | 5 | 1 | 2 | 3 | 1 | +0 to +0.011 |" in page


def test_only_short_tunings_on_a_gpu_count_as_such(tmp_path: Path) -> None:
    def row(workload: str, value: float, **other: object) -> Row:
        return metric("ratio_to_best", value, value, value, workload=workload, **other)

    rows = [
        row("small", 0.5, minutes=3.0),  # the newest stands
        row("small", 0.97, minutes=3.0),
        row("demo", 0.99, minutes=2.0),
        row("160m", 0.1, minutes=5.5),
        row("1b", 0.2),
        row("long", 0.3, minutes=1.0),
        row("demo", 2.0, minutes=2.0, hardware="Xeon, 2 cores"),
        row("1b", 0.4, minutes=8.0),
    ]
    rows[-1]["metrics"]["tuning"] = {"low": 900.0, "value": 900.0, "high": 900.0}  # in two calls
    found = compute(write(tmp_path, {"tuner": rows}))["tuner_small_ratio"]
    assert (found["value"], found["n"], [*found["of"]]) == (0.97, 2, ["small", "demo"])
    assert judge("tuner_small_ratio", found) == "too few: 2 of 4 wanted"


def test_steps_on_a_cpu_have_a_number_of_their_own(tmp_path: Path) -> None:
    cpu = {"hardware": "Xeon, 16 threads"}
    gpu = [prediction("a", "after_probes", 1.1, 110, True), outcome("a", 1.0, 100, True)]
    before = compute(write(tmp_path, {"plans": gpu}))
    rows = [
        {**prediction("b", "after_probes", 2.0, 100, None), "predicted_for": cpu["hardware"]},
        {**prediction("c", "after_probes", 2.0, None, None), "predicted_for": cpu["hardware"]},
        {**outcome("b", 1.0, 100, None), **cpu},
        {**prediction("b", "after_20_steps", 2.0, 100, None), **cpu},  # too late
    ]
    after = compute(write(tmp_path, {"plans": [*gpu, *rows]}))
    found = after["cpu_step_time_error"]
    assert (found["value"], found["n"], found["open"], found["memory_error"]) == (1.0, 1, 1, 0)
    assert found["by_hardware"]["Xeon, 16 threads"]["n"] == 1
    marked = judge("cpu_step_time_error", {**found, "value": 0.08, "memory_error": None})
    assert tells(marked, "too few:", "memory", "not measured")
    others = [name for name in before if name != "cpu_step_time_error" and before[name]["n"]]
    assert {n: after[n]["value"] for n in others} == {n: before[n]["value"] for n in others}
    drawn = render(tmp_path)
    assert "step_time_cpu" in drawn["page"] and "pictures/step_time_cpu.svg" in drawn
