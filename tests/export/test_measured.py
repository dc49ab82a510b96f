"""A file is measured by its own runtime, on the rows on which its model is evaluated."""

import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from headrace.export.measured import GrownMemory, _documents

RUN = ("model.dim=32", "data.tokenizer_pattern=gpt4", "goal.steps=20", "name=a")


def test_memory_that_is_taken_is_told() -> None:
    """Pages of its own are taken: an allocator may have others that were given back to it."""
    memory, size = GrownMemory(), 64 << 20
    with mmap.mmap(-1, size) as block:
        for first in range(0, size, mmap.PAGESIZE):
            block[first] = 1
        peak = memory.read()
    assert peak is None or size <= peak < 2 * size


def test_a_row_is_cut_where_a_document_begins() -> None:
    assert [*_documents([0, 1, 2, 0, 1])] == [(0, 3), (3, 5)]
    assert [*_documents([5, 6])] == [(0, 2)]


def test_a_gguf_has_the_loss_of_its_model(tmp_path: Path, plan_file: Path, zygote: Any) -> None:
    """Check that losses of 32 bits are equal, and that a file which was moved needs its own run."""
    pytest.importorskip("xllamacpp")
    assert zygote.run(tmp_path, "train", str(plan_file), *RUN).code == 0
    other = ("data.vocab=290", "model.vocab=320", "name=b", "goal.steps=1")
    assert zygote.run(tmp_path, "train", str(plan_file), *RUN[:2], *other).code == 0
    words = ("--quantize", "f32", "--output", "a.gguf")
    assert zygote.run(tmp_path, "export", "a", "--to", "gguf", *words).code == 0
    ask = ("run", "a.gguf", "--measure", "--tokens", "64", "--json")
    lost = zygote.run(tmp_path, *ask)
    assert lost.code == 2 and "--of RUN" in json.loads(lost.out)["remedy"]
    told = zygote.run(tmp_path, *ask, "--of", "a")
    assert told.code == 0, told.err
    said = json.loads(told.out)
    assert said["bits_per_byte"] == pytest.approx(said["model_bits_per_byte"], rel=1e-4)
    assert said["tokens"] >= 32 and said["largest_nats"] < 1e-2 and said["tokens_per_s"] > 0
    assert said["bytes"] == (tmp_path / "a.gguf").stat().st_size
    loss = json.loads(zygote.run(tmp_path, "eval", "a", "--tokens", "64", "--json").out)
    assert said["model_bits_per_byte"] == pytest.approx(loss["bits_per_byte"], rel=0.05)
    wrong = zygote.run(tmp_path, *ask, "--of", "b")
    assert wrong.code == 2 and "another tokenizer" in json.loads(wrong.out)["error"]
