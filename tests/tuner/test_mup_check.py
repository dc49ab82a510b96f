"""The coordinate check passes with muP, fails without its rates, and draws what it saw."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from facts import tells
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import ConfigError
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.plan.technique import installed
from headrace.techniques.design.mup import Mup
from headrace.tuner.mup_check import (
    STEEPEST,
    STEPS,
    CoordinateCheck,
    check_mup,
    format_check,
    write_check,
)

ON = "techniques.mup.base_dim=32"
KEYS = ("model.heads=2", "model.head_dim=8", "optimizer.lr=0.02", "model.init_std=0.1")


def test_it_passes_with_mup_and_sees_rates_that_do_not_carry_over(
    tiny_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(ON, *KEYS)
    check = check_mup(plan, widest=256)
    assert check.widths == [32, 64, 128, 256] and {*check.moved} == {"block 0", "logits"}
    assert all(len(moves) == STEPS for each in check.moved.values() for moves in each)
    assert check.passes, check.slopes()
    page = write_check(check, tmp_path / "seen").read_text()
    assert "<svg" in page and tells(format_check(check), "passes", "32", "256")
    assert json.loads((tmp_path / "seen" / "mup.json").read_text())["passes"] is True
    # The same with every weight and rate as at the base: the usual parametrization.
    monkeypatch.setattr(Mup, "apply", lambda self, build: None)
    usual = check_mup(plan, widest=256)
    assert not usual.passes and min(usual.slopes().values()) > STEEPEST, usual.slopes()
    assert tells(format_check(usual), "fails")


def test_a_plan_without_mup_and_widths_without_whole_heads_are_refused(
    tiny_plan: Callable[..., Plan], plan_file: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_mup(tiny_plan())
    assert caught.value.remedy.changes == (("+mup",),)
    with pytest.raises(ConfigError) as caught:
        check_mup(tiny_plan(ON, *KEYS), widest=100)
    assert caught.value.remedy.text == "--widest 128"
    told = CliRunner().invoke(app, ["check", "mup", str(plan_file), "--json"])
    assert told.exit_code == 2 and "mup" in json.loads(told.stdout)["error"]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("techniques.muon={}",), ("+mup", "-muon")),
        (
            ("techniques.lion={}", "model.tied_embeddings=true", "model.head_init=normal"),
            ("-lion",),
        ),
    ],
)
def test_a_plan_is_given_mup_without_what_it_refuses(
    tiny_plan: Callable[..., Plan], words: tuple[str, ...], changes: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="has no mup") as caught:
        check_mup(tiny_plan(*words))
    (asked,) = caught.value.remedy.changes
    assert {*changes} <= {*asked}
    check_mup(changed(tiny_plan(*words), asked, installed()), widest=64)


def test_what_says_the_schedule_or_the_width_is_left_out(tiny_plan: Callable[..., Plan]) -> None:
    """The check has a schedule and widths of its own."""
    more = ("techniques.warmup.steps=2", "techniques.weight_decay_schedule={}", "schedule.steps=9")
    check = check_mup(tiny_plan(ON, *KEYS, *more), widest=64)
    assert check.widths[-1] == 64 and check.passes


def test_moves_that_are_no_numbers_tell_nothing(tiny_plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError, match="which tells nothing of widths"):
        check_mup(tiny_plan(ON, *KEYS[:2], "optimizer.lr=1e30"), widest=64)
    slopes = {"logits": [[1.0], [1.0]], "block 0": [[1.0], [float("nan")]]}
    assert not CoordinateCheck(tiny_plan(ON), [8, 16], slopes).passes, "whatever comes first"


@pytest.mark.parametrize(
    ("started", "words", "message", "remedy"),
    [
        (1, ["mesh.data=2"], "the plan has 2 ranks", "mesh.data=1"),
        (2, [], "2 were started", "headrace check mup PLAN"),
        (2, ["mesh.auto=true"], "2 were started", "headrace check mup PLAN"),
        (2, ["mesh.data=2"], "the plan has 2 ranks", "headrace check mup PLAN mesh.data=1"),
    ],
)
def test_several_ranks_are_refused_with_what_runs(
    tiny_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    started: int,
    words: list[str],
    message: str,
    remedy: str,
) -> None:
    """Check that it never waits for ranks which do not take part."""
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(ConfigError, match=message) as caught:
        check_mup(tiny_plan(ON, *KEYS, *words), widest=64)
    assert caught.value.remedy.text == remedy
