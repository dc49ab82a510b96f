"""The doctor on natural runs: said before it is measured, and nothing measured is lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import natural
import natural_gate
import natural_runs
import natural_said
import natural_times
import pytest
import tuner_trials
from programs import rows, run
from scoring import compute
from tiny import READ

ROOT = Path(__file__).parents[2]

CHECKPOINTED = READ.replace("steps = 3", "steps = 12") + "[techniques.full_checkpoint]\n"
Call = Callable[..., int]


@pytest.fixture
def call(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Call:
    """The program in this process, on one run that nobody would tune; its exit status."""
    plan = tmp_path / "tiny.toml"
    plan.write_text(CHECKPOINTED.format(corpus=corpus, prepared=prepared_folder))
    listed = natural_runs.Run("tiny checkpointed", "cpu", str(plan), "batch.tokens=128", 12)
    pace = natural_times.Pace(0.0, 1, 1, 1.0, 0.0)
    monkeypatch.setattr(natural, "RUNS", (listed,))
    monkeypatch.setattr(natural_times, "PACES", {"cpu": pace})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def go(*words: Any) -> int:
        common = ("--device", "cpu", "--results", tmp_path, "--work", tmp_path / "work")
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, natural, *words, *common, "--most", "0")
        return int(ended.value.code or 0)

    return go


def only(folder: Path, topic: str, **changed: Any) -> dict[str, Any]:
    """The only row, which is also written again with other values."""
    (row,) = rows(folder, topic)
    if changed:
        (folder / f"{topic}.jsonl").write_text(json.dumps(row | changed) + "\n")
    return row


@pytest.mark.slow
def test_a_run_is_said_and_then_measured_where_a_call_ended(
    tmp_path: Path, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("measure") == 1 and "before all is said" in capsys.readouterr().out
    assert call("say") == 0
    changes = [["-full_checkpoint"], ["+cuda_graphs"], ["batch.micro_sequences=2"]]
    said = only(tmp_path, "natural_said", changes=changes, peaks=[1e6] * 3)
    assert {"verdict", "share", "said", "healthy", "first", "remedies", "commit"} <= said.keys()
    assert (said["id"], said["device"], said["precision"]) == ("tiny checkpointed", "cpu", "fp32")
    assert said["parameters"] > 1000 and not said["compiled"] and said["steps"] == 12
    key = {name: said[name] for name in ("id", "hardware", "plan_sha256", "commit")}
    done = {
        **key,
        "change": changes[2],
        "gain": {"low": -0.2, "value": -0.1, "high": 0, "n": 4},
        "before_s": 1.0,
    }
    cut = json.dumps(done) + '\n{"id": "tiny'  # as a call that was killed leaves it
    (tmp_path / "natural_parts.jsonl").write_text(cut + "\n")
    assert call("measure", "--minutes", "-1") == 1
    assert "2 of 3 changes" in capsys.readouterr().out
    assert call("all") == 0
    assert len(rows_of_parts(tmp_path)) == 3
    row = only(tmp_path, "natural")
    found = {" ".join(one["change"]): one for one in row["measured"]}
    assert row["left"] == [] and row["plan_sha256"] == said["plan_sha256"]
    assert found["batch.micro_sequences=2"]["gain"] == done["gain"]
    assert "CUDA graphs" in found["+cuda_graphs"]["refused"]
    gain = found["-full_checkpoint"]["gain"]
    assert gain["n"] >= 2 and gain["low"] <= gain["value"] <= gain["high"]
    assert call("all") == 0 and len(rows(tmp_path, "natural")) == 1
    assert call("measure", "--commit", "0ther") == 1  # whose doctor may say something else
    with (tmp_path / "natural.jsonl").open("a") as file:
        file.write('{"retracts": 1, "reason": "to be measured again"}\n')
    assert call("measure", "--minutes", "-1") == 0 and len(rows(tmp_path, "natural")) == 3
    (tmp_path / "natural.jsonl").write_text(json.dumps(row) + "\n")
    score = compute(tmp_path)["doctor_first_remedy_near_best"]
    assert (score["n"] + score["thin"], score["late"], score["open"]) == (1, 0, 0)


def rows_of_parts(folder: Path) -> list[str]:
    """Lines that were written whole."""
    lines = (folder / "natural_parts.jsonl").read_text().splitlines()
    return [line for line in lines if line.endswith("}")]


def test_the_list_is_of_plans_that_can_be_read() -> None:
    runs = natural_runs.RUNS
    assert len({run.id for run in runs}) == len(runs) >= 40
    assert len({run.shape for run in runs}) >= 8
    sizes = [run.parameters for run in runs if run.device == "cuda"]
    assert min(sizes) < 2e6 and max(sizes) > 1e9
    for device in ("cpu", "cuda"):
        plans = [run.plan for run in runs if run.device == device]
        assert {"torch_compile" in plan.techniques for plan in plans} == {True, False}
        assert len({run.sha256 for run in runs if run.device == device}) == len(plans)


def test_runs_and_trials_of_small_keep_the_plan_that_their_rows_are_of() -> None:
    """Recipe `small` has changed since: it trains with Muon, and its model has no `ffn`."""
    runs = [run for run in natural_runs.RUNS if run.shape == "small"]
    own = {"torch_compile", "document_packing"}
    assert len(runs) == 6 and all({*run.plan.techniques} <= own for run in runs)
    assert {(run.plan.model.ffn, run.plan.optimizer.lr) for run in runs} == {(1024, 2e-3)}
    listed = {run.id: run.sha256[:16] for run in runs}
    assert listed["small eager"] == "46ee38fee55e1b97"
    assert tuner_trials.SHAPES["small"] == (natural_runs.receipts.plan_file("small"), "")


def test_what_is_measured_beside_what_was_said() -> None:
    """Check that only the first remedy may change learning, and that the others differ in kind."""
    (listed,) = (run for run in natural_runs.RUNS if run.id == "5m bf16 eager micro")
    asking = asked("NVIDIA H100 80GB HBM3", listed.plan)
    found = natural_said.to_measure(asking, [("+tied_embeddings",)], 9, 60e9)
    words = [" ".join(change) for change in found["changes"]]
    assert words[0] == "+tied_embeddings" and "+cuda_graphs +torch_compile" in words
    assert "batch.micro_sequences=16" in words and "+bf16_autocast" not in words
    assert sum("batch.micro_sequences" in one for one in words) == 1
    assert sum("attention" in one for one in words) <= 1 and len(words) <= 9
    assert 2e9 < found["bytes"] < 60e9 and len(found["peaks"]) == len(words)
    said = [("+cuda_graphs", "+torch_compile"), ("+stochastic_depth",), ("data.prefetch=8",)]
    few = natural_said.to_measure(asking, said, 4, 60e9)["changes"]
    assert few[0] == [*said[0]] and [*said[1]] not in few and len(few) == 4


def test_of_changes_that_compute_the_same_one_is_measured() -> None:
    """A technique that does nothing but set the precision is what the key alone does."""
    (listed,) = (run for run in natural_runs.RUNS if run.id == "60m fp32 eager")
    asking = asked("NVIDIA H100 80GB HBM3", listed.plan)
    found = natural_said.to_measure(asking, [("model.precision=bf16",)], 9, 60e9)
    words = [" ".join(change) for change in found["changes"]]
    assert words[0] == "model.precision=bf16" and "+tf32" in words
    assert not any("+bf16_autocast" in one for one in words)
    assert any("+bf16_parameters" in one for one in words)


def test_changes_that_are_built_side_by_side() -> None:
    """Check that graphs, large changes and changes of the process are each in a group apart."""
    (plan,) = (run.plan for run in natural_runs.RUNS if run.id == "1m fp32 eager")
    names = ["+tf32", "+cuda_graphs", "+torch_compile", "-cuda_graphs +cuda_graphs", "+kept_memory"]
    changes, peaks = [tuple(name.split()) for name in names], [1e9, 1e9, 11 << 30, 1e9, 1e9]
    wanted = natural_times.Wanted(changes, peaks, changes[0])
    one, two, three, four, five = changes
    assert wanted.groups(plan) == [[one, two], [three], [four], [five]]
    assert natural_times.Wanted(changes, peaks, one, True).groups(plan) == [[c] for c in changes]
    small = next(run.plan for run in natural_runs.RUNS if run.id == "1m eager")
    assert wanted.groups(small) == [[c] for c in changes]


def test_a_gain_is_the_middle_of_its_pairs() -> None:
    gain = natural_times.gain_of([2.0, 2.0, 2.0, 9.0], [1.0, 1.0, 0.5, 1.0])
    assert gain == {"low": 1.0, "value": 2.0, "high": 8.0, "n": 4}
    gain = natural_times.gain_of([1.0] * 7 + [50.0], [1.0] * 8)
    assert (gain["low"], gain["value"], gain["high"], gain["n"]) == (0.0, 0.0, 0.0, 8)


class Sleeper:
    """A plan whose steps take as long as it says."""

    def __init__(self, name: str, step_s: float) -> None:
        self.words, self.step_s, self.by_host = (name,), step_s, True
        self.seconds: list[float] = []
        self.beside: list[float] = []

    def run(self, blocks: int, steps: int) -> None:
        self.seconds += [self.step_s] * blocks


def test_the_first_remedy_and_the_best_are_timed_to_the_end() -> None:
    base = Sleeper("", 1.0)
    sides = [Sleeper(name, s) for name, s in (("+first", 0.9), ("+best", 0.5), ("+other", 1.0))]
    pace = natural_times.Pace(0.0, 2, 4, 0.1, 0.0)
    natural_times.time_blocks(base, sides, ("+first",), 1.0, pace)
    assert [len(side.seconds) for side in sides] == [8, 8, 4]
    assert [len(side.beside) for side in sides] == [8, 8, 4]


def test_a_commit_is_told_where_the_checkout_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receipts = natural.receipts
    monkeypatch.setattr(receipts, "given_commit", "f00dface")
    assert receipts.commit() == "f00dface"
    monkeypatch.setattr(receipts, "given_commit", None)
    here = receipts.commit()
    first = receipts._git("rev-list", "--max-parents=0", "HEAD").stdout.split()[0]
    monkeypatch.setattr(receipts, "given_commit", first)
    assert receipts.commit().endswith("-dirty") and here != receipts.commit()


def asked(device: str, plan: Any) -> Any:
    """Who answers for a GPU that is not here."""
    import torch

    from headrace.assemble.context import elsewhere, make_context
    from headrace.cli.catalogue import catalogue
    from headrace.costs.machine import Machine
    from headrace.predict.candidates import Asking

    here = make_context(plan.replaced(device="cpu"), torch.device("cpu"))
    return Asking(plan, elsewhere(here, device), Machine.assumed(device), catalogue())


def state(process: "subprocess.Popen[bytes]") -> str:
    """T where it is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_who_is_alone_stops_the_others_and_lets_them_go_on(tmp_path: Path) -> None:
    gate = natural_gate.Gate(tmp_path / "lock", os.getpid())
    inside = (
        f"import sys; sys.path.append({str(ROOT / 'benchmarks')!r}); import natural_gate as g\n"
    )
    inside += "from pathlib import Path\nimport time\n"
    inside += f"gate = g.Gate(Path({str(gate.file)!r}), {os.getpid()})\n"
    inside += f"with gate.alone(): Path({str(tmp_path / 'in')!r}).touch(); time.sleep(60)\n"
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        subprocess.Popen([sys.executable, "-c", inside], env=os.environ) as timing,
    ):
        try:
            while not (tmp_path / "in").exists() and timing.poll() is None:
                time.sleep(0.02)
            assert state(other) == "T" and state(timing) != "T"
            gate.wake()
            assert state(other) == "T"  # somebody is inside
            timing.kill()
            timing.wait()
            gate.wake()
            assert state(other) != "T"
        finally:
            other.send_signal(signal.SIGCONT)
            other.kill()
            timing.kill()


def test_a_crew_takes_the_next_that_fits(tmp_path: Path) -> None:
    taken: list[str] = []
    gate = natural_gate.Gate(tmp_path / "lock", os.getpid())
    tasks = [
        natural_gate.Task(name, size, lambda worker, name=name: taken.append(name))
        for name, size in (("small", 1.0), ("too large", 99.0), ("large", 9.0))
    ]
    logs, now_s = tmp_path / "logs", time.monotonic()
    with natural_gate.Crew(1, 10.0, gate, now_s + 60, logs, here=True) as crew:
        crew.run(tasks)
        assert taken == ["small", "too large", "large"]
    with natural_gate.Crew(1, 10.0, gate, now_s - 1, logs, here=True) as crew:
        crew.run(tasks)
    assert len(taken) == 3


def test_a_crew_ends_what_it_began_and_nothing_else(tmp_path: Path) -> None:
    gate = natural_gate.Gate(tmp_path / "lock", os.getpid())
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            with natural_gate.Crew(1, 10.0, gate, time.monotonic(), tmp_path / "logs", here=True):
                mine = subprocess.Popen(["sleep", "60"])
            assert mine.wait(30) == -signal.SIGTERM
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.slow
def test_processes_that_take_turns_measure_a_list_to_its_end(
    tmp_path: Path, corpus: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs, two processes, and real turns: every row is there, and nothing stays stopped."""
    plan = tmp_path / "tiny.toml"
    plan.write_text(CHECKPOINTED.format(corpus=corpus, prepared=prepared_folder))
    listed = [
        natural_runs.Run(f"tiny {rows}", "cpu", str(plan), f"batch.tokens={16 * rows}", 12)
        for rows in (2, 4, 8)
    ]
    monkeypatch.setattr(natural, "RUNS", tuple(listed))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--device", "cpu", "--results", tmp_path, "--work", tmp_path / "work"]
    words += ["--workers", "2", "--most", "0", "--minutes", "4"]
    before = signal.getsignal(signal.SIGTERM)
    for what in ("say", "measure"):
        monkeypatch.setattr(sys, "argv", ["natural.py", what, *map(str, words)])
        try:
            with pytest.raises(SystemExit) as ended:
                natural.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        assert ended.value.code == 0
        if what == "say":  # compiling takes long here
            changes = [["-full_checkpoint"], ["batch.micro_sequences=1"]]
            more = {"changes": changes, "peaks": [1e6] * 2}
            lines = [json.dumps(r | more) for r in rows(tmp_path, "natural_said")]
            (tmp_path / "natural_said.jsonl").write_text("\n".join(lines) + "\n")
    said, measured = rows(tmp_path, "natural_said"), rows(tmp_path, "natural")
    assert {row["id"] for row in measured} == {run.id for run in listed}
    assert all("refused" not in row for row in said) and measured[0]["how"] == natural_gate.HOW
    assert all(any("gain" in one for one in row["measured"]) for row in measured)
    begun = natural_gate.descendants(os.getpid())
    stats = [Path(f"/proc/{pid}/stat") for pid in begun]
    assert not [file for file in stats if file.exists() and ") T " in file.read_text()]
