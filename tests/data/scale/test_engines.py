"""The pipeline over parts: on any engine the bytes of one process, and a killed job goes on."""

import errno
import json
import os
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scaled import Here, digests

from headrace.core.errors import ConfigError, HeadraceError, RunError, Stopped
from headrace.data import parts
from headrace.data.ingest import folder_of, prepare
from headrace.data.scale import local, serve
from headrace.data.scale.job import ingest_on, job_folder, missing_parts
from headrace.data.scale.local import Processes
from headrace.data.scale.serve import PartFailure
from headrace.data.scale.slurm import SlurmArray, run_task
from headrace.data.shards import ShardWriter
from headrace.plan.cleaning import DecontaminationConfig, DeduplicationConfig
from headrace.plan.curriculum import CurriculumConfig
from headrace.plan.plan import Plan

PARTS = 7


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"validation": 0.003},
        {"tokenizer": "tiktoken:gpt2"},
        {"tokenizer_text": "all", "text_template": "it is said: {text}", "separator": "says"},
    ],
    ids=["share", "cut", "given", "read"],
)
def test_parts_in_any_order_give_the_bytes_of_one_process(
    plan: Plan, texts: Path, keys: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if keys.get("tokenizer"):
        prepare(plan)
        tokenizer = next(folder_of(plan).glob("tokenizer.json"))
        keys = {"tokenizer": str(tokenizer)}
    plan = plan.replaced(data=plan.data.model_copy(update=keys))
    calls: list[tuple[str, float, float | None]] = []
    workers = Here()
    made = ingest_on(plan, workers, progress=lambda *call: calls.append(call))
    expected, left_out = digests(made), made.left_out
    assert sorted(workers.made) == sorted(
        (s, n) for s in ("survey", "encode") for n in range(PARTS)
    )
    assert not job_folder(made.directory).exists()
    assert {call[0] for call in calls} >= {"reading", "encoding"} and calls[-1][1] == calls[-1][2]
    subprocess.run(["rm", "-r", str(made.directory)], check=True)
    alone = prepare(plan)
    assert digests(alone) == expected and alone.left_out == left_out
    assert left_out[-1].count == PARTS and made.fingerprint == alone.fingerprint
    assert ingest_on(plan, Here(), progress=None).directory == alone.directory


@pytest.mark.parametrize(
    "method",
    [
        "exact",
        "paragraph",
        pytest.param("minhash", marks=pytest.mark.slow),  # Numba compiles for seconds
        pytest.param("bloom", marks=pytest.mark.slow),
    ],
)
def test_cleaners_over_parts_give_the_bytes_of_one_process(
    plan: Plan, texts: Path, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts fall for those of other parts and sources, whoever learns them; scores stay beside."""
    tale = {n: " ".join(f"word{(n * k) % 97} of {n}" for k in range(2, 60)) for n in range(2, 12)}
    for name, numbers in (("a/1", (2, 3)), ("a/3", (4, 5, 2)), ("b/0", (3, 6, 5)), ("b/1", (7,))):
        rows = [f"page {n} of {name}\n\n{tale[n]}" if n % 2 else tale[n] for n in numbers]
        with (texts / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in rows)
    (texts / "own.jsonl").write_text(json.dumps({"text": tale[7]}) + '\n{"text": "new here"}\n')
    (texts / "quiz.jsonl").write_text(json.dumps({"text": tale[6]}))
    for file in [*texts.glob("?/*.jsonl"), texts / "own.jsonl"]:
        rows = [json.loads(line) | {"hard": len(line)} for line in file.read_text().splitlines()]
        file.write_text("\n".join(map(json.dumps, rows)))
    keys = {
        "validation": str(texts / "own.jsonl"),
        "deduplication": DeduplicationConfig(method=method),
        "decontamination": DecontaminationConfig(against=(str(texts / "quiz.jsonl"),)),
        "curriculum": CurriculumConfig(score="column:hard", until=2),
    }
    plan = plan.replaced(data=plan.data.model_copy(update=keys))
    made = ingest_on(plan, workers := Here())
    stages = {stage for stage, _ in workers.made}
    learned = {"decontamination"} | ({"deduplication"} if method != "bloom" else set())
    assert stages == learned | {"survey", "encode"} and len(workers.made) == len(stages) * PARTS
    by_parts = digests(made)
    assert made.cleaning and made.scores and made.split and made.split.overlap
    dropped = [(s.report.dropped_documents, s.report.cut_documents) for s in made.cleaning.steps]
    assert all(map(any, dropped)) and any("scores-" in name for name in by_parts)
    subprocess.run(["rm", "-r", str(made.directory)], check=True)
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 30)
    assert digests(prepare(plan)) == by_parts


def test_processes_give_the_same_and_a_killed_one_loses_nothing(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def recorded(*args: Any, **keys: Any) -> Any:
        started.append(popen(*args, **keys))
        return started[-1]

    monkeypatch.setattr(local.subprocess, "Popen", recorded)
    seen: list[float] = []

    def kill_it(description: str, done: float, total: float | None) -> None:
        if description == "encoding" and done:
            seen.append(done)
            os.kill(started[-1].pid, signal.SIGKILL)

    with pytest.raises(RunError, match="a worker ended by SIGKILL while it was at part"):
        ingest_on(plan, Processes(1), progress=kill_it)
    folder = job_folder(folder_of(plan))
    (stage,) = [path.name for path in folder.glob("encode-*")]
    left = missing_parts(folder, stage, PARTS)
    assert 0 < len(left) < PARTS and not missing_parts(folder, "survey", PARTS)
    assert not folder_of(plan).exists() and all(p.poll() is not None for p in started)
    (folder / stage / f".{left[0]:05d}.elsewhere.1").mkdir()  # what a kill leaves is not taken
    finished = {p: p.stat().st_mtime_ns for p in (folder / stage).glob("0*")}
    workers = Here(lambda f, s: None)
    again = []

    class Rest(Processes):
        def run(self, folder: Path, stage: str, numbers: Sequence[int], done: Any) -> None:
            again.append((stage, list(numbers)))
            assert finished == {p: p.stat().st_mtime_ns for p in finished}
            super().run(folder, stage, numbers, done)

    made = digests(ingest_on(plan, Rest(3)))
    assert again == [(stage, left)]
    assert len(started) == 2 + min(3, len(left))
    subprocess.run(["rm", "-r", str(folder_of(plan))], check=True)
    assert digests(prepare(plan)) == made
    assert not workers.made


def test_answers_that_come_together_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[int] = []
    workers = Processes(1, module="answers_at_once", words=["3"], slots=3)
    workers.run(tmp_path, "survey", [2, 5, 7], made.append)
    assert made == [2, 5, 7]


def test_a_source_that_changes_is_refused(plan: Plan, texts: Path) -> None:
    def change(folder: Path, stage: str) -> None:
        if stage != "survey":
            with (texts / "a/3.jsonl").open("a") as file:
                file.write('{"text": "one more"}\n')

    with pytest.raises(ConfigError, match=r"3\.jsonl changed while data.sources") as told:
        ingest_on(plan, Here(change))
    assert told.value.remedy.text == "the same command again"
    assert not folder_of(plan).exists()
    assert ingest_on(plan, workers := Here()).train[0].documents
    assert len(workers.made) == 2 * PARTS, "all of it is another job now"


def test_a_file_that_changes_while_it_is_read_is_refused(plan: Plan, texts: Path) -> None:
    def change(description: str, done: float, total: float | None) -> None:
        os.utime(texts / "b/1.jsonl", ns=(1, int(done)))

    with pytest.raises(ConfigError, match=r"1\.jsonl changed while .* written since"):
        prepare(plan, progress=change)
    assert not folder_of(plan).exists()


def test_a_damaged_part_is_refused_and_made_again(plan: Plan, tmp_path: Path) -> None:
    def run(self: Here, folder: Path, stage: str, numbers: Sequence[int], done: Any) -> None:
        Here.run(self, folder, stage, numbers, done)
        if stage != "survey":
            (folder / stage / "00004/train/tokens-00000.bin").write_bytes(b"")

    damaging = type("Damaging", (Here,), {"run": run})()
    with pytest.raises(ConfigError, match="has 0 bytes") as told:
        ingest_on(plan, damaging)
    remedy, _, rest = told.value.remedy.text.partition(", and ")
    assert rest == "the same command again"
    subprocess.run(remedy, shell=True, check=True)
    ingest_on(plan, workers := Here())
    assert workers.made == [("encode", 4)]


def test_what_fails_in_a_worker_is_told_as_here(
    plan: Plan, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (texts / "b/0.jsonl").write_text('{"text": "good"}\nno row\n')
    told: list[HeadraceError] = []
    for make in (prepare, lambda plan: ingest_on(plan, Here())):
        with pytest.raises(ConfigError, match=r"0\.jsonl:2 is not JSON") as error:
            make(plan)
        told.append(error.value)
    assert (told[0].message, told[0].remedy.text) == (told[1].message, told[1].remedy.text)
    (texts / "b/0.jsonl").write_text('{"text": "good"}\n')

    def full(*args: Any, **keys: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(RunError, match="the disk is full"):
            ingest_on(plan, Here())
    assert len(missing_parts(job_folder(folder_of(plan)), "survey", PARTS)) == 0
    ingest_on(plan, workers := Here())
    assert {stage for stage, _ in workers.made} == {"encode"}


SBATCH = """#!/bin/sh
echo 17
for task in 0 1; do
    SLURM_ARRAY_TASK_ID=$task bash "$3" "$4" > /dev/null 2>> "$(dirname "$3")/slurm-17_$task.log"
done
"""


@pytest.mark.slow
def test_an_array_makes_its_parts_by_plain_sbatch(
    plan: Plan, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command := tmp_path / "bin/sbatch").parent.mkdir()
    command.write_text(SBATCH)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    (texts / "a/1.jsonl").write_text("no row\n")
    with pytest.raises(ConfigError, match=r"1\.jsonl:1 is not JSON"):
        ingest_on(plan, SlurmArray(2))
    (texts / "a/1.jsonl").write_text(json.dumps({"text": "a row"}))
    made = digests(ingest_on(plan, SlurmArray(2)))
    subprocess.run(["rm", "-r", str(folder_of(plan))], check=True)
    assert digests(prepare(plan)) == made


def test_a_task_makes_its_share_and_tells_what_fails(
    plan: Plan, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(HeadraceError, match="needs the command `sbatch`"):
        ingest_on(plan, SlurmArray(2))
    monkeypatch.undo()
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    folder = job_folder(folder_of(plan))
    run_task(folder, "survey", 1, 2, PARTS)
    assert missing_parts(folder, "survey", PARTS) == [0, 2, 4, 6]
    (texts / "a/4.jsonl").write_text("no row\n")
    with pytest.raises(ConfigError, match=r"4\.jsonl changed while"):
        run_task(folder, "survey", 0, 2, PARTS)
    assert missing_parts(folder, "survey", PARTS) == [4, 6]
    told = PartFailure.model_validate_json((folder / "failure-00004.json").read_bytes())
    assert "changed while" in told.message

    def stopped(*given: Any) -> None:
        raise Stopped("SIGTERM ended it", "again", 143)

    monkeypatch.setattr(serve, "run_part", stopped)
    with pytest.raises(Stopped):
        run_task(folder, "survey", 0, 2, PARTS)
    assert not (folder / "failure-00006.json").exists()
