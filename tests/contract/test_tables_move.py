"""Every key of a plan that is no knob of the optimizer: another value leaves another run.

The optimizer, the schedule and the knobs of techniques are turned in test_keys_move.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data import loader
from headrace.data.loader import Loader
from headrace.plan.doubts import doubts_of
from headrace.plan.hardware_config import HardwareConfig
from headrace.plan.plan import (
    Batch,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    Goal,
    Plan,
    TraceConfig,
)

TABLES = {
    "data": DataConfig,
    "goal": Goal,
    "batch": Batch,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "trace": TraceConfig,
    "hardware": HardwareConfig,
}
QUIET = ("goal.steps=30", "eval.every_steps=100", "checkpoint.every_steps=0")
LONG = (*QUIET, "trace.every_steps=20")
OTHER = "data.directory=elsewhere"
TURNED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data.sources": ((), ("data.sources=text",)),
    "data.weights": (
        ('data.sources=["text", "more"]', "data.weights=[1, 1]"),
        ('data.sources=["text", "more"]', "data.weights=[1, 5]"),
    ),
    "data.mixture": (
        ('data.sources=["text", "more"]',),
        ('data.sources=["text", "more"]', "data.mixture.max_epochs=[1,0]"),
    ),
    "data.validation": ((), ("data.validation=0.2",)),
    "data.text_key": (
        ("data.sources=rows.jsonl",),
        ("data.sources=rows.jsonl", "data.text_key=body"),
    ),
    "data.text_template": (
        ("data.sources=rows.jsonl",),
        ("data.sources=rows.jsonl", "data.text_template={text} {body}"),
    ),
    "data.separator": ((), ("data.separator=level",)),
    "data.tokenizer": ((), ("data.tokenizer=own.json",)),
    "data.vocab": ((), ("data.vocab=290",)),
    "data.sequence_length": ((), ("data.sequence_length=32",)),
    "data.directory": ((), (OTHER,)),
    "data.workers": (("data.workers=0",), ("data.workers=2",)),
    "data.prefetch": (("data.workers=1",), ("data.workers=1", "data.prefetch=2")),
    "goal.bits_per_byte": ((), ("goal.bits_per_byte=8",)),
    "goal.steps": ((), ("goal.steps=5",)),
    "goal.tokens": ((), ("goal.tokens=512",)),
    "goal.minutes": ((), ("goal.minutes=0.000001",)),
    "goal.dollars": (
        ("hardware.dollars_per_hour=1",),
        ("hardware.dollars_per_hour=1", "goal.dollars=1e-9"),
    ),
    "batch.tokens": ((), ("batch.tokens=64",)),
    "batch.micro_sequences": ((), ("batch.micro_sequences=2",)),
    "eval.every_steps": ((), ("eval.every_steps=3",)),
    "eval.tokens": ((), ("eval.tokens=64",)),
    "eval.before": ((), ("eval.before=true",)),
    "eval.general": ((), ("eval.general=more",)),
    "checkpoint.every_steps": ((), ("checkpoint.every_steps=3",)),
    "checkpoint.keep_last": ((), ("checkpoint.keep_last=3",)),
    "checkpoint.keep_best": ((), ("checkpoint.keep_best=false",)),
    "trace.every_steps": (QUIET, LONG),
    "trace.steps": (LONG, (*LONG, "trace.steps=2")),
    "hardware.dollars_per_hour": ((), ("hardware.dollars_per_hour=1",)),
}
"""Each key with the overrides of two runs that differ in it."""
ELSEWHERE = {
    "data.lossy_tokenizer": "tests/data/test_lossless.py",
    "data.invalid_utf8": "tests/data/test_real_inputs.py",
    "data.deduplication": "tests/data/test_cleaning.py",
    "data.decontamination": "tests/data/test_cleaning.py",
    "data.chat": "tests/data/chat/test_conversations.py",
    "data.curriculum": "tests/techniques/test_curriculum.py",
    "data.tokenizer_pattern": "tests/data/test_bpe.py",
    "data.tokenizer_text": "tests/data/test_bpe.py",
    "data.special_tokens": "tests/data/test_bpe.py",
    "data.special_from_text": "tests/data/test_bpe.py",
    "checkpoint.memory_every_steps": "tests/distributed/test_memory_copies.py",
    "hardware.network_gb_per_s": "tests/predict/test_hosts_joined.py",
    "hardware.failures_per_1000_gpu_days": "tests/predict/test_goodput.py",
    "hardware.restart_minutes": "tests/predict/test_goodput.py",
}
"""Keys that a run of this text does not show, and the test that does."""


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write two other texts, rows with two fields, and a tokenizer."""
    from headrace.data.tokenizer import train_tokenizer

    monkeypatch.chdir(tmp_path)
    source = random.Random(1)
    for name, words in (("text", "gate level flow deep"), ("more", "bank reed boat weir")):
        Path(name).mkdir()
        for number in range(24):
            line = " ".join(source.choices(words.split(), k=200))
            Path(name, f"{number}.txt").write_text(line)
    rows = [{"text": "mill " * n, "body": "lock " * n} for n in range(40, 80)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_tokenizer(["the mill grinds what the water brings " * 20], vocab=270).save(
        Path("own.json")
    )


@pytest.fixture
def left_by(
    train: Callable[..., Path], texts: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """What a run leaves that no clock decides, and how it was read."""
    read: list[tuple[int, int]] = []
    whole = Loader.__init__

    def begin(self: Loader, *given: Any, **named: Any) -> None:
        whole(self, *given, **named)
        read.append((named.get("workers", 0), named.get("prefetch", 4)))

    monkeypatch.setattr(loader.Loader, "__init__", begin)

    def run(*overrides: str) -> dict[str, Any]:
        read.clear()
        folder = train("guard=false", *overrides)
        report = json.loads((folder / "report.json").read_text())
        data = json.loads((folder / "data.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        traces = sorted(path.name for path in folder.rglob("*.json.gz"))
        seen = report["signals"]["traces"]
        return {
            "saved": saved,
            "best": [path.name for path in (folder / "checkpoints").glob("best")],
            "val": [(one["step"], one["bits_per_byte"]) for one in report["val"]],
            "before": report["before"],
            "general": report["general"],
            "losses": [row["loss"] for row in rows],
            "ended": (report["steps"], report["goal"]["ended_by"]),
            "targets": report["data"]["targets"],
            "stream": report["stream_sha256"],
            "costs": report["dollars"] is not None,
            "data": data["directory"],
            "traces": (traces, seen and seen.get("steps")),
            "read": [*read],
        }

    return run


_LEFT: dict[tuple[str, ...], dict[str, Any]] = {}
"""What runs of the tests' own text have left, which most keys are compared with."""


def left_once(left_by: Callable[..., dict[str, Any]], *overrides: str) -> dict[str, Any]:
    """Return what a run leaves; one of the tests' own text is trained once for all keys."""
    if any(word.startswith("data.sources=") for word in overrides):  # a text of this test's folder
        return left_by(*overrides)
    if overrides not in _LEFT:
        _LEFT[overrides] = left_by(*overrides)
    return _LEFT[overrides]


def test_no_key_is_left_out() -> None:
    keys = {f"{name}.{key}" for name, table in TABLES.items() for key in table.model_fields}
    assert keys == {*TURNED, *ELSEWHERE}
    alone = {"name", "directory", "seed", "device", "guard", "attention", "techniques"}
    others = {"model", "optimizer", "schedule", "mesh", "track", "vision"}
    assert {*Plan.model_fields} == {*TABLES, *alone, *others}


def test_the_same_plan_leaves_the_same_run(left_by: Callable[..., dict[str, Any]]) -> None:
    """Check that a plan leaves the same run twice; else every key would seem to move something."""
    assert left_by() == left_by()


@pytest.mark.parametrize("key", TURNED)
def test_every_key_moves_something(key: str, left_by: Callable[..., dict[str, Any]]) -> None:
    before, after = (left_once(left_by, *overrides) for overrides in TURNED[key])
    moved = [name for name in before if before[name] != after[name]]
    assert moved, f"{key} leaves what the other value leaves"


def test_traces_without_room_are_told_and_what_is_told_makes_room(
    left_by: Callable[..., dict[str, Any]], tiny_plan: Callable[..., Plan]
) -> None:
    """Let evaluations and checkpoints come too often."""
    keys = (
        "goal.steps=30",
        "trace.every_steps=20",
        "eval.every_steps=4",
        "checkpoint.every_steps=4",
    )
    (doubt,) = [one for one in doubts_of(tiny_plan(*keys)) if "trace" in one.reason]
    assert doubt.remedy.text == "eval.every_steps=5 checkpoint.every_steps=5"
    assert not left_by(*keys)["traces"][0]
    mended = (*keys, *doubt.remedy.text.split())
    assert left_by(*mended)["traces"][0]
    assert not [one for one in doubts_of(tiny_plan(*mended)) if "trace" in one.reason]


def test_how_many_checkpoints_are_kept(left_by: Callable[..., dict[str, Any]]) -> None:
    for kept in (1, 3):
        found = left_by(
            f"checkpoint.keep_last={kept}", "checkpoint.keep_best=false", "checkpoint.every_steps=2"
        )
        assert len(found["saved"]) == kept and not found["best"]
