"""Prepare raw text as shards: once, whole or not at all, and with nothing left behind."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from facts import INGEST, begins, in_order

from headrace.cli.plans import named_plan
from headrace.core.errors import ConfigError, MemoryFull, RunError
from headrace.data import formats, ingest, survey, training
from headrace.data.heldout import Weights
from headrace.data.ingest import prepare
from headrace.data.prepared import Prepared
from headrace.data.shards import Shards, ShardWriter
from headrace.plan.plan import Plan

MakePlan = Callable[..., Plan]


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    texts = [f"document {i} says {i * i} and {'again ' * (i % 7)}" for i in range(200)]
    return write_lines(tmp_path / "a.jsonl", texts)


def documents(prepared: Prepared, shards: Shards) -> list[str]:
    starts = [*shards.document_starts(0, shards.tokens).tolist(), shards.tokens]
    ids = [shards.read(a + 1, b - a - 1) for a, b in pairwise(starts)]
    return [prepared.tokenizer.decode(i) for i in ids]


def sides(prepared: Prepared) -> tuple[list[str], list[str]]:
    train = [text for shards in prepared.train for text in documents(prepared, shards)]
    return train, documents(prepared, prepared.validation)


def test_every_document_is_on_one_side(make_plan: MakePlan, source: str) -> None:
    calls: list[tuple[str, float, float | None]] = []
    plan = make_plan(sources=source, validation=0.2)
    prepared = prepare(plan, progress=lambda *call: calls.append(call))
    train, validation = sides(prepared)
    texts = [json.loads(line)["text"] for line in Path(source).read_text().splitlines()]
    assert sorted(train + validation) == sorted(texts)
    assert 20 <= len(validation) <= 60
    total = sum(len(t.encode()) for t in texts)
    assert prepared.train[0].text_bytes + prepared.validation.text_bytes == total
    assert [c[0] for c in calls[::200]] == ["reading", "training the tokenizer"]
    assert calls[-1] == ("encoding", total, total)
    manifest = prepared.train[0].manifest
    assert manifest.tokenizer == prepared.tokenizer.fingerprint == prepared.fingerprint["tokenizer"]
    assert manifest.source == source and manifest.vocab == prepared.tokenizer.vocab == 300


def test_equal_texts_fall_on_one_side(make_plan: MakePlan, tmp_path: Path) -> None:
    texts = [f"text {i % 10}" for i in range(100)]
    train, validation = sides(
        prepare(make_plan(sources=write_lines(tmp_path / "a.jsonl", texts), validation=0.5))
    )
    assert train and validation and not set(train) & set(validation)


def test_the_end_of_a_single_document_is_held_out(make_plan: MakePlan, tmp_path: Path) -> None:
    lines = [f"line {n}\n" for n in range(100)]
    (tmp_path / "a.txt").write_text("".join(lines))
    source = str(tmp_path / "a.txt")
    train, validation = sides(prepare(make_plan(sources=source, validation=0.25)))
    assert len(train) == len(validation) == 1
    assert train[0] + validation[0] == "".join(lines)
    assert 0.2 < len(validation[0]) / len("".join(lines)) < 0.3
    assert validation[0].startswith("line ")


@pytest.mark.parametrize(("text", "message"), [("x", "give one short"), ("", "give no text")])
def test_too_little_text(make_plan: MakePlan, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        prepare(make_plan(sources=str(tmp_path / "a.txt")))
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    with pytest.raises(ConfigError, match=r"sources = \[\] give no text") as told:
        prepare(make_plan(sources=[]))
    assert told.value.remedy.text == "data.sources=PATH"


def test_validation_of_its_own_and_several_sources(
    make_plan: MakePlan, source: str, tmp_path: Path
) -> None:
    own = write_lines(tmp_path / "own.jsonl", ["held", "out"])
    other = write_lines(tmp_path / "b.jsonl", ["one", "two"])
    plan = make_plan(sources=[source, other], validation=own, weights=[3, 1])
    prepared = prepare(plan)
    assert [s.documents for s in prepared.train] == [200, 2]
    assert documents(prepared, prepared.validation) == ["held", "out"]
    elsewhere = write_lines(tmp_path / "elsewhere.jsonl", ["held", "back"])
    judged = prepare(plan.replaced(data=plan.data.model_copy(update={"validation": elsewhere})))
    assert [s.fingerprint for s in judged.train] == [s.fingerprint for s in prepared.train]
    assert judged.fingerprint["data"] != prepared.fingerprint["data"], "losses are of other text"
    assert prepared.fingerprint["mixture"] == "[3.0, 1.0]"
    assert f'data.sources=["{source}", "{other}"]' in prepared.train[0].manifest.rebuild


def test_the_second_time_is_a_look(
    make_plan: MakePlan, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(make_plan(sources=source))
    other_seed = make_plan(sources=source).replaced(seed=9)
    with monkeypatch.context() as patched:
        patched.delattr(ingest, "_build")
        second = prepare(other_seed)
    assert (second.directory, second.fingerprint) == (first.directory, first.fingerprint)
    changes: list[dict[str, Any]] = [{"vocab": 290}, {"validation": 0.3}]
    first.tokenizer.save(tmp_path / "tokenizer.json")
    changes.append({"tokenizer": str(tmp_path / "tokenizer.json")})
    others = [prepare(make_plan(sources=source, **change)) for change in changes]
    assert len({first.directory, *(o.directory for o in others)}) == 4
    # The same tokenizer, loaded: the same tokens, whatever the folder is called.
    assert others[-1].fingerprint == first.fingerprint
    with open(source, "a") as file:
        file.write('{"text": "one more"}\n')
    assert prepare(make_plan(sources=source)).fingerprint["data"] != first.fingerprint["data"]


def test_another_field_of_the_same_file_is_other_data(make_plan: MakePlan, tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    rows = [{"text": f"text {n}", "title": f"title {n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [prepare(make_plan(sources=str(path), text_key=key)) for key in ("text", "title")]
    assert found[0].directory != found[1].directory
    for prepared, word in zip(found, ("text", "title"), strict=True):
        train, validation = sides(prepared)
        assert all(read.startswith(f"{word} ") for read in train + validation)


def test_damage_is_found_before_training(make_plan: MakePlan, source: str) -> None:
    plan = make_plan(sources=source)
    prepared = prepare(plan)
    path = prepared.train[0].directory / "tokens-00000.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ConfigError, match=in_order(path, "changed")) as error:
        prepare(plan)
    assert begins(error.value.remedy.text, "rm", "-r", prepared.directory, "&&", *INGEST)
    shutil.rmtree(prepared.train[0].directory)  # half of it, which is not made anew
    with pytest.raises(ConfigError, match="no manifest") as half:
        prepare(plan)
    assert half.value.remedy.text == error.value.remedy.text
    shutil.rmtree(prepared.directory)
    again = prepare(plan)
    assert again.fingerprint == prepared.fingerprint
    tokenizer = again.directory / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(
        ConfigError, match=in_order(tokenizer, "not the tokenizer", again.directory)
    ):
        prepare(plan)


@pytest.mark.parametrize(("field", "value"), [("vocab", 301), ("document_token", 5)])
def test_a_manifest_sealed_anew_that_is_not_of_its_tokenizer(
    make_plan: MakePlan, source: str, field: str, value: int
) -> None:
    plan = make_plan(sources=source, vocab=300)
    shards = prepare(plan).validation
    other = shards.manifest.model_copy(update={field: value})
    sealed = other.model_copy(update={"seal": other.digest})
    (shards.directory / "manifest.json").write_text(sealed.model_dump_json())
    with pytest.raises(ConfigError, match=rf"{field} {value}.*; it: 300 and 299\)") as error:
        prepare(plan)
    assert error.value.remedy.text.startswith(f"rm -r {shards.directory.parent} && ")


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize(
    "changes", [{"text_bytes": 1}, {"counted_bytes": 1}, {"text_bytes": 9, "counted_bytes": 9}]
)
def test_bytes_sealed_anew_are_compared_with_the_tokens(
    make_plan: MakePlan, source: str, lossy: bool, changes: dict[str, int]
) -> None:
    plan = make_plan(sources=source, vocab=300, lossy_tokenizer=lossy)
    shards = prepare(plan).validation
    more = {key: getattr(shards.manifest, key) + value for key, value in changes.items()}
    other = shards.manifest.model_copy(update=more)
    sealed = other.model_copy(update={"seal": other.digest})
    (shards.directory / "manifest.json").write_text(sealed.model_dump_json())
    if lossy and "counted_bytes" not in changes:  # tokens do not say what they lost
        prepare(plan)
        return
    with pytest.raises(ConfigError, match="bytes") as error:
        prepare(plan)
    assert error.value.remedy.text.startswith(f"rm -r {shards.directory.parent} && ")


@pytest.mark.parametrize("vocab", [300, 2048, 4096])
def test_the_command_that_prepares_again_prepares_the_same(
    make_plan: MakePlan, source: str, vocab: int
) -> None:
    plan = make_plan(sources=source, vocab=vocab)
    prepared = prepare(plan)
    (prepared.validation.directory / "manifest.json").unlink()
    with pytest.raises(ConfigError) as error:
        prepare(plan)
    remove, _, again = error.value.remedy.text.partition(" && ")
    subprocess.run(remove, shell=True, check=True)
    _, _, verb, recipe, *overrides = shlex.split(again)  # headrace data ingest demo ...
    assert verb == "ingest" and not prepared.directory.exists()
    made = prepare(named_plan(recipe, overrides))
    assert (made.directory, made.fingerprint) == (prepared.directory, prepared.fingerprint)


def test_a_full_disk(
    make_plan: MakePlan, source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: ShardWriter, ids: np.ndarray, **sizes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "add", full)
        with pytest.raises(
            RunError, match=in_order("disk is full", "left in", tmp_path / "prepared")
        ):
            prepare(make_plan(sources=source))
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be prepared"):
        prepare(make_plan(sources=source, directory=str(tmp_path / "file" / "x")))


def test_the_sample_is_bounded_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 100_000)
    monkeypatch.setattr(survey, "PIECE_CHARACTERS", 100)
    kept = survey.Survey(Weights(0.05))
    for i in range(1000):
        kept.add(f"{i} " + "x" * 990, keep_sample=True)
        assert kept.sample_bytes <= 100_000
    assert kept.sample_bytes == sum(len(t) for *_, t in kept.sample) > 40_000
    assert len({place for _, place, _, _ in kept.sample}) > 300
    numbered = [int(t.split()[0]) for *_, t in kept.sample if " " in t]
    assert min(numbered) < 100 and max(numbered) > 900


SCRIPT = """
import sys, time
from headrace.plan.plan import Plan
from headrace.core.strict import read_table
from headrace.data.ingest import prepare

def slowly(description, done, total):
    print(description, flush=True)
    time.sleep(float(sys.argv[3]))

data = {"sources": sys.argv[1], "directory": sys.argv[2], "vocab": 300}
plan = {"data": data, "goal": {"steps": 1}, "schedule": {"kind": "constant"}}
print("done", prepare(read_table(Plan, plan), progress=slowly).fingerprint["data"])
"""


def start(source: str, directory: Path, pause_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, source, str(directory), str(pause_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moment", ["reading", "training the tokenizer", "encoding"])
def test_kill_leaves_nothing_half_valid(
    make_plan: MakePlan, source: str, tmp_path: Path, moment: str
) -> None:
    plan = make_plan(sources=source)
    root = Path(plan.data.directory)
    process = start(source, root, 0.002)
    assert process.stdout
    for line in process.stdout:
        if line.strip() == moment:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait()
    assert [p.name for p in root.iterdir() if p.is_dir()] == [f".{ingest._key(plan)}.partial"]
    prepared = prepare(plan)
    assert [p for p in root.iterdir() if p.is_dir()] == [prepared.directory]


def test_an_interrupt_as_the_folder_appears_removes_it(
    make_plan: MakePlan, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(sources=source)
    make = Path.mkdir

    def interrupted(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if path.suffix == ".partial":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(plan)
    assert not [p for p in Path(plan.data.directory).iterdir() if p.is_dir()]


def test_two_at_once_do_the_work_once(make_plan: MakePlan, source: str) -> None:
    plan = make_plan(sources=source)
    both = [start(source, Path(plan.data.directory), 0.005) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert [p.returncode for p in both] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sorted(len(lines) > 1 for lines in outputs) == [False, True]
    assert outputs[0][-1] == f"done {prepare(plan).fingerprint['data']}"


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (formats, "_check_text", pa.ArrowMemoryError("malloc of size 9 failed")),
        (formats, "_check_text", OSError(errno.ENOMEM, "Cannot allocate memory")),
        (training, "train_tokenizer", MemoryError()),
        (ShardWriter, "add", MemoryError("Unable to allocate 572. MiB")),
    ],
)
def test_a_full_memory_names_what_helps_in_preparing(
    make_plan: MakePlan,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    error: Exception,
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(where, name, full)
    with pytest.raises(MemoryFull, match=in_order("prepared", "memory")) as told:
        prepare(make_plan(sources=source))
    assert "data.tokenizer=PATH" in told.value.remedy.text and ".jsonl" in told.value.remedy.text
    assert not any(of_a_step in told.value.remedy.text for of_a_step in ("micro", "checkpoint"))
