"""A run that has trained is done: what is made afterwards may be missing, and says so."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.terminal import note
from headrace.cli.train import closing_words
from headrace.core.files import write_whole
from headrace.core.outcome import outcome_of
from headrace.core.units import format_count, format_seconds
from headrace.plan.technique import installed
from headrace.report import conclude as ending
from headrace.train import session
from headrace.train import train as trainer
from headrace.train.interrupts import Closing
from headrace.train.result import Conclusion, Result
from headrace.train.run_folder import RunFolder
from headrace.train.track import Trackers

Say = Callable[..., tuple[str, str]]


@pytest.fixture
def ended(workshop: Path) -> Any:
    """The run of the workshop, as it was once it had trained; put back afterwards."""
    folder = workshop / "runs" / "demo"
    files = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    yield folder
    for path, content in files.items():
        write_whole(path, content)


def conclude(folder: Path, closing: Closing | None = None) -> Conclusion:
    """Conclude a run as the command does."""
    return Result(folder, installed()).conclude(closing, note)


def words(folder: Path, report: dict[str, Any], *, own_text: bool) -> str:
    """What the command prints of a run with such a report."""
    page = None if "page" in report["not_made"] else folder / "report.html"
    return closing_words(folder, Conclusion(report, [], page, {}), own_text=own_text)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no luck\nbelow")


@pytest.mark.parametrize(
    ("name", "what"),
    [("advise", "findings"), ("closing_verdict", "findings"), ("sample_of", "sample")],
)
def test_what_cannot_be_made_is_told_and_the_rest_is_there(
    ended: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    what: str,
) -> None:
    (ended / "report.html").unlink()
    monkeypatch.setattr(ending, name, broken)
    report = conclude(ended).report
    assert report == json.loads((ended / "report.json").read_text())
    assert report["status"] == "done" and report["not_made"] == {what: "no luck"}
    assert (report["narrowest"] is None) == (what == "findings")
    assert (report["sample"] is None) == (what == "sample")
    told = capsys.readouterr().err
    assert f"no {what}: no luck" in told and "below" not in told
    assert (ended / "report.html").is_file()
    assert "report.html" in words(ended, report, own_text=False)


def test_the_end_is_told_with_the_runs_own_numbers(ended: Path) -> None:
    """Check the last message with numbers that all differ, so that none can pass for another."""
    report = json.loads((ended / "report.json").read_text()) | {"not_made": {}}
    last = report["val"][-1] | {"bits_per_byte": 1.234, "share": 0.25}
    goal = report["goal"] | {
        "step": 3,
        "tokens": 77,
        "wall_s": 11.0,
        "ended_by": "steps",
        "asked": {"bits_per_byte": 0.9},
        "reached": False,
    }
    report |= {"val": [last], "goal": goal, "tokens": 41_000, "wall_s": 700.0}
    told = words(ended, report | {"steady_tokens_per_s": 5_300.0}, own_text=True)
    assert "budget spent (steps): 1.234 " in told and "bits per byte" in told
    assert "25.0% of the validation" in told
    assert f"(goal 0.9) after {format_count(41_000)} tokens and {format_seconds(700)}, " in told
    assert f"{format_count(5_300)} tokens/s in steady steps" in told
    told = words(ended, report | {"steady_tokens_per_s": None}, own_text=True)
    assert "speed not measured" in told


@pytest.mark.parametrize("shut", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_messages_that_nobody_takes_fail_no_run(
    workshop: Path,
    tiny_demo: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    as_json: bool,
    shut: bool,
) -> None:
    """Check that a run ends well where standard error is closed or its disk is full."""
    monkeypatch.chdir(tmp_path)
    taken: Any = open("/dev/full", "w")  # noqa: SIM115 - it cannot be flushed, and so not closed
    if shut:
        taken = io.StringIO()
        taken.close()
    monkeypatch.setattr(sys, "stderr", taken)
    argv = ["train", *tiny_demo, "name=quiet", "goal.steps=1", *["--json"] * as_json]
    with pytest.raises(SystemExit) as left:
        app(argv, prog_name="headrace")
    assert not left.value.code
    report = json.loads(Path("runs/quiet/report.json").read_text())
    assert report["status"] == "done" and report["not_made"] == {}
    assert Path("runs/quiet/report.html").is_file()


def signalled(number: signal.Signals) -> Callable[..., Any]:
    """Something that is being made when a signal comes, and comes again."""

    def made(*args: Any, **kwargs: Any) -> Any:
        for _ in range(3):
            os.kill(os.getpid(), number)
        return {"prompt": "", "text": "nobody waited for it"}

    return made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("name", "left_out"),
    [("advise", {"findings", "sample", "page"}), ("sample_of", {"sample", "page"})],
)
def test_a_signal_while_it_is_made_leaves_out_the_rest(
    ended: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    left_out: set[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setattr(ending, name, signalled(number))
    with Closing() as closing:
        closing.begin()
        report = conclude(ended, closing).report
    assert report == json.loads((ended / "report.json").read_text())
    assert report["status"] == "done" and report["sample"] is None
    assert report["not_made"] == dict.fromkeys(left_out, number.name)
    told = capsys.readouterr().err
    assert told.count(number.name) == 1
    assert {*told.partition("leaves out its ")[2].strip().split(", ")} == left_out


def test_a_signal_while_the_report_is_written_loses_none_of_it(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, again = RunFolder.write, signalled(signal.SIGINT)

    def slow(self: RunFolder, name: str, value: Any) -> None:
        again() if name == "report" else None
        write(self, name, value)

    monkeypatch.setattr(RunFolder, "write", slow)
    with Closing() as closing:
        closing.begin()
        report = conclude(ended, closing).report
    assert report["sample"]["text"] and report["not_made"] == {"page": "SIGINT"}
    assert report == json.loads((ended / "report.json").read_text())


@pytest.mark.parametrize("where", ["sample", "report", "begin"])
def test_ctrl_c_at_the_end_of_a_run_fails_no_command(
    workshop: Path, tiny_demo: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Check that Ctrl-C before the first step ends the command, and after the last one does not."""
    monkeypatch.chdir(workshop)
    again, last = signalled(signal.SIGINT), session.last_look
    if where == "sample":
        monkeypatch.setattr(ending, "sample_of", again)
    elif where == "report":
        monkeypatch.setattr(session, "last_look", lambda *a: (again(), last(*a))[1])
    else:
        monkeypatch.setattr(trainer, "run", again)
    name = f"name=ctrl-{where}"
    made = CliRunner().invoke(app, ["train", *tiny_demo, name, "goal.steps=3", "--json"])
    told = json.loads(made.stdout)
    if where == "begin":
        assert made.exit_code == told["exit_code"] == 130 and "before its first step" in str(told)
        return
    assert made.exit_code == 0, made.output
    assert told["status"] == "done" and told["steps"] == 3 and told["narrowest"]
    assert (told["sample"] is None) == (where == "sample")
    kept = workshop / "runs" / name.removeprefix("name=") / "report.json"
    assert json.loads(kept.read_text()).items() <= told.items()


def test_a_page_that_cannot_be_drawn_fails_no_run(
    ended: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in [name for name in sys.modules if name.startswith("headrace.report")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "headrace.report.chart", None)
    report = conclude(ended).report
    assert set(report["not_made"]) == {"page"} and report["sample"]["text"]
    assert report == json.loads((ended / "report.json").read_text())
    told = words(ended, report, own_text=True)
    assert "report.json" in told and "diverged" not in told
    lost = outcome_of(
        [{"loss_nats": 64.0, "step": 9}], 5.0, 64.0, step=9, vocab=300, ended_wild=False
    )
    report["outcome"] = lost.to_dict()
    assert words(ended, report, own_text=True).lstrip().startswith("diverged (92.3 bits ")


def test_a_disk_that_is_full_after_the_report_fails_no_run(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, name: str, value: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write", full)
    not_made = conclude(ended).not_made
    assert {what.split()[0] for what in not_made} >= {"findings", "report"}
    assert all("No space left" in why for why in not_made.values())


def test_a_sample_of_learned_positions_ends_with_them(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, asked = ending.open_model, []

    def learned(*args: Any, **kwargs: Any) -> Any:
        build = opened(*args, **kwargs)
        build.config = build.config.model_copy(update={"position": "learned", "context": 16})
        return build

    def generate(build: Any, prompt: str, *, new_tokens: int, **how: Any) -> str:
        asked.append(new_tokens)
        return "text"

    monkeypatch.setattr(ending, "SAMPLE_TOKENS", 80)  # more than the tests' own
    monkeypatch.setattr(ending, "open_model", learned)
    monkeypatch.setattr(ending, "generate_text", generate)
    assert ending.sample_of(ended, installed()) == {"prompt": "", "text": "text"} and asked == [15]


def test_a_logger_that_fails_is_told_once_and_the_others_go_on() -> None:
    class Logger:
        def __init__(self, good: bool) -> None:
            self.good, self.rows, self.closed = good, [], False

        def log(self, row: Any) -> None:
            self.rows.append(row) if self.good else broken()

        def close(self) -> None:
            self.closed = True

    told: list[str] = []
    bad, good = Logger(False), Logger(True)
    trackers = Trackers([bad, good], told.append)  # type: ignore[list-item]
    for step in (1, 2):
        trackers.log({"step": step})
    trackers.close()
    assert [row["step"] for row in good.rows] == [1, 2] and good.closed
    assert len(told) == 1 and "metrics.jsonl has all" in told[0]
