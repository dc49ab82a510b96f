"""Shards hold what was written, find it at once, and notice damage."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.data.shards import OPEN_MAPS, Shards, ShardWriter

LENGTHS = [5, 0, 250, 1, 99, 100, 98]
Make = Callable[..., Shards]


def whole(lengths: list[int], vocab: int, seed: int) -> np.ndarray:
    """The stream that `make_shards` writes: each document behind its token."""
    random = np.random.RandomState(seed)
    documents = [random.randint(1, vocab, n) for n in lengths]
    return np.concatenate([np.concatenate([[0], d]) for d in documents])


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1000, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_reads_back_across_files(make_shards: Make, vocab: int, dtype: str) -> None:
    shards = make_shards(LENGTHS, vocab=vocab)
    stream = whole(LENGTHS, vocab, 1)
    assert (shards.tokens, shards.documents) == (len(stream), len(LENGTHS))
    assert shards.manifest.dtype == dtype and len(shards.manifest.files) == 6
    for start, count in [(0, len(stream)), (99, 2), (100, 100), (150, 301), (7, 0)]:
        found = shards.read(start, count)
        assert found.dtype == np.int64 and (found == stream[start : start + count]).all()
    for start, count in [(-1, 2), (0, len(stream) + 1), (len(stream), 1)]:
        with pytest.raises(IndexError):
            shards.read(start, count)


def test_the_largest_ids_fit(tmp_path: Path) -> None:
    for vocab in (65_536, 65_537, 2**32 - 1):
        writer = ShardWriter(tmp_path / str(vocab), vocab, document_token=vocab - 1)
        writer.add(np.array([0, vocab - 1], dtype=np.uint32))
        writer.close()
        shards = Shards.open(tmp_path / str(vocab))
        assert shards.read(0, 3).tolist() == [vocab - 1, 0, vocab - 1]


def test_document_starts(make_shards: Make) -> None:
    shards = make_shards(LENGTHS)
    starts = np.flatnonzero(whole(LENGTHS, 1000, 1) == 0)
    for start, stop in [(0, shards.tokens), (0, 1), (6, 8), (8, 257), (50, 50), (257, 260)]:
        expected = starts[(starts >= start) & (starts < stop)]
        assert (shards.document_starts(start, stop) == expected).all()


def test_the_fingerprint_is_of_the_content(make_shards: Make, tmp_path: Path) -> None:
    first, second = make_shards([10, 20]), make_shards([10, 20])
    assert first.fingerprint != second.fingerprint
    assert Shards.open(first.directory).fingerprint == first.fingerprint


def test_nothing_counts_before_close(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "set", 300, document_token=0)
    with pytest.raises(ConfigError, match="gives no documents"):
        ShardWriter(tmp_path / "empty", 300, document_token=0).close()
    writer.add(np.arange(5, dtype=np.uint32))
    with pytest.raises(ConfigError, match="no manifest"):
        Shards.open(tmp_path / "set")


def damaged(shards: Shards, *, at_open: bool) -> str:
    with pytest.raises(ConfigError) as caught:
        Shards.open(shards.directory).verify()
    message = str(caught.value)
    if at_open:
        with pytest.raises(ConfigError):
            Shards.open(shards.directory)
    assert f"try: rm -r {shards.directory} && headrace data ingest" in message
    return message


@pytest.mark.parametrize("name", ["tokens-00002.bin", "tokens-00005.bin", "offsets.bin"])
def test_damage_is_named(make_shards: Make, name: str) -> None:
    shards = make_shards(LENGTHS)
    path = shards.directory / name
    raw = path.read_bytes()
    path.write_bytes(raw[:3] + bytes([raw[3] ^ 1]) + raw[4:])
    message = damaged(shards, at_open=False)
    assert f"{path} has changed since it was written" in message
    path.write_bytes(raw[:-2])
    message = damaged(shards, at_open=True)
    assert f"{path} has {len(raw) - 2:,} bytes, expected {len(raw):,} bytes" in message
    path.unlink()
    assert f"{path} is missing" in damaged(shards, at_open=True)
    path.write_bytes(raw)
    Shards.open(shards.directory).verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("tokens"), "tokens: field required"),
        (lambda m: m.update(dtype="object"), "dtype: input should be"),
        (lambda m: m.update(format=99), "has shard format 99, this version reads 1"),
    ],
)
def test_a_damaged_manifest(
    make_shards: Make, change: Callable[[dict], None], message: str
) -> None:
    shards = make_shards([5])
    path = shards.directory / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert message in damaged(shards, at_open=True)
    path.write_text("{")
    assert "is damaged" in damaged(shards, at_open=True)


def test_ten_thousand_files_open_at_once(
    make_shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    directory = make_shards([19_999], shard_tokens=2).directory
    shards = Shards.open(directory)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert (shards.read(0, 20_000) == whole([19_999], 1000, 1)).all()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + OPEN_MAPS
