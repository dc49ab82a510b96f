"""The pipeline on a Ray and on a Slurm that are started and stopped, and that lose their work."""

import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from scaled import digests
from slurm_here import INSTALL, missing, slurm_here

from headrace.core.errors import RunError
from headrace.data.cleaning import asked_sources
from headrace.data.ingest import folder_of, prepare
from headrace.data.left_out import LeftOutTally
from headrace.data.parts import SourcePart, list_parts
from headrace.data.scale.engines import EngineChoice, EngineName
from headrace.data.scale.job import ingest_on, job_folder, missing_parts
from headrace.plan.cleaning import DeduplicationConfig
from headrace.plan.plan import Plan


def processes_of(session: int) -> list[tuple[int, str]]:
    """Return the processes of a session, with their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                found.append((int(folder.name), (folder / "cmdline").read_text()))
        except (OSError, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
def test_ray_gives_the_bytes_of_one_process_and_may_die(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="pip install 'headrace[engines]'")
    plan = plan.replaced(data=plan.data.model_copy(update={"deduplication": DeduplicationConfig()}))
    from headrace.data.scale import local

    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def recorded(*given: object, **named: object) -> subprocess.Popen[str]:
        started.append(popen(*given, **named))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(local.subprocess, "Popen", recorded)
    workers = EngineChoice(name=EngineName.RAY, workers=2).part_workers()
    killed: list[int] = []

    def kill_the_node(description: str, done: float, total: float | None) -> None:
        if description == "encoding" and done and not killed:
            for pid, command in processes_of(started[-1].pid):
                if "raylet/raylet" in command.split("\0")[0]:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(RunError, match=r"finished parts|parts that are finished") as told:
        ingest_on(plan, workers, progress=kill_the_node)
    assert killed and "Ray" in told.value.message
    folder = job_folder(folder_of(plan))
    assert not missing_parts(folder, "survey", 7) and not folder_of(plan).exists()
    (stage,) = (path.name for path in folder.glob("encode-*"))
    sizes = [sum(file.size for file in part.files) for part in list_of(plan)]
    left = missing_parts(folder, stage, 7)
    calls: list[tuple[str, float]] = []
    made = digests(ingest_on(plan, workers, progress=lambda *call: calls.append(call[:2])))
    begun = next(done for doing, done in calls if doing == "encoding")
    assert len(left) < 7 and begun == sum(sizes) - sum(sizes[n] for n in left) > 0
    shutil.rmtree(folder_of(plan))
    assert digests(prepare(plan)) == made
    assert all(process.poll() is not None for process in started)


@pytest.mark.slow
def test_a_slurm_array_gives_the_bytes_of_one_process_and_may_be_cancelled(
    plan: Plan, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleaned text is sharded by an array, of which one run is cancelled after its first part."""
    if absent := missing():
        pytest.skip(f"no {absent[0]}: {INSTALL}")
    for file in texts.glob("?/*.jsonl"):
        words = [f"{file} {n} {n * n} {n % 7}" for n in range(10_000)]
        file.write_text("\n".join(json.dumps({"text": text}) for text in words))
    with (texts / "b/1.jsonl").open("a") as file:
        file.write("\n" + (texts / "a/0.jsonl").read_text()[:100_000].rpartition("\n")[0])
    keys = {"deduplication": DeduplicationConfig(), "validation": 0.01}
    plan = plan.replaced(data=plan.data.model_copy(update=keys))
    workers = EngineChoice(name=EngineName.SLURM, workers=2).part_workers()
    folder = job_folder(folder_of(plan))
    with slurm_here() as env, ThreadPoolExecutor(1) as beside:
        for name, value in env.items():
            monkeypatch.setenv(name, value)

        ended = Event()

        def cancel() -> None:
            while not [*folder.glob("encode-*/0*")]:
                if ended.wait(0.05):
                    return
            subprocess.run(["scancel", "--name=headrace-data"], check=True)

        cancelled = beside.submit(cancel)
        with pytest.raises(RunError, match=r"the Slurm job \d+ left \d of 7 parts unmade") as told:
            try:
                ingest_on(plan, workers)
            finally:
                ended.set()
        cancelled.result()
        assert "goes on with the parts that are finished" in told.value.remedy.text
        assert not folder_of(plan).exists()
        (stage,) = (path.name for path in folder.glob("encode-*"))
        left = missing_parts(folder, stage, 7)
        calls: list[tuple[str, float]] = []
        made = ingest_on(plan, workers, progress=lambda *call: calls.append(call[:2]))
    sizes = [sum(file.size for file in part.files) for part in list_of(plan)]
    begun = next(done for doing, done in calls if doing == "encoding")
    assert 0 < len(left) < 7 and begun == sum(sizes) - sum(sizes[n] for n in left)
    assert made.cleaning and made.cleaning.steps[0].report.dropped_documents
    by_slurm = digests(made)
    shutil.rmtree(folder_of(plan))
    assert digests(prepare(plan)) == by_slurm


def list_of(plan: Plan) -> tuple[SourcePart, ...]:
    """Return the parts of a plan's sources."""
    return list_parts(asked_sources(plan.data), LeftOutTally())
