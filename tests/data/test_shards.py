"""Shards hold what was written, find it at once, and notice damage."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from facts import INGEST, begins, in_order, tells

from headrace.core.errors import ConfigError
from headrace.data import shards as shards_module
from headrace.data.shard_files import OPEN_MAPS
from headrace.data.shards import OtherFormat, Shards, ShardWriter

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
    assert begins(caught.value.remedy.text, "rm", "-r", shards.directory, "&&", *INGEST)
    return message


@pytest.mark.parametrize("name", ["tokens-00002.bin", "tokens-00005.bin", "offsets.bin"])
def test_damage_is_named(make_shards: Make, name: str) -> None:
    shards = make_shards(LENGTHS)
    path = shards.directory / name
    raw = path.read_bytes()
    path.write_bytes(raw[:3] + bytes([raw[3] ^ 1]) + raw[4:])
    message = damaged(shards, at_open=name == "offsets.bin")
    told = "documents start" if name == "offsets.bin" else "changed"
    assert tells(message, path, told)
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
        (lambda m: m.update(format=99), "has shard format 99,"),
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


def test_no_bit_of_a_manifest_flips_unseen(make_shards: Make) -> None:
    shards = make_shards(LENGTHS)
    path = shards.directory / "manifest.json"
    raw = path.read_bytes()
    for place in range(len(raw)):
        for bit in (1 << (place % 8), 1 << ((place + 3) % 8)):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ bit]) + raw[place + 1 :])
            with pytest.raises(ConfigError):
                Shards.open(shards.directory)


def resealed(shards: Shards, **changes: Any) -> None:
    """Write a manifest whose seal and hashes fit what its files hold now."""
    path = shards.directory / "manifest.json"
    values = shards.manifest.model_dump(mode="json") | {"seal": ""}
    for entry, file in [
        (values["offsets"], "offsets.bin"),
        *((e, f"tokens-{n:05d}.bin") for n, e in enumerate(values["files"])),
    ]:
        entry["sha256"] = hashlib.sha256((shards.directory / file).read_bytes()).hexdigest()
    fields = {**values, **changes}
    fields.pop("seal")
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**fields, "seal": seal}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_tokens": 0}, "shard_tokens: input should be greater than or equal to 1"),
        ({"shard_tokens": -4}, "shard_tokens"),
        ({"shard_tokens": 5}, "do not hold 5 tokens each"),
        ({"tokens": 1 << 63}, "tokens"),
        ({"tokens": 3}, "its files hold"),
        ({"documents": 2}, "offsets, for 2 documents"),
        ({"document_token": 70_000}, "is none of"),
        ({"document_token": -1}, "document_token"),
        ({"vocab": 100_000}, "uint16 is not how 100,000 ids are kept"),
        ({"text_bytes": -1}, "text_bytes"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    make_shards: Make, changes: dict[str, Any], message: str
) -> None:
    shards = make_shards(LENGTHS)
    resealed(shards, **changes)
    assert message in damaged(shards, at_open=True)


def test_nonsense_with_hashes_made_again_is_refused(make_shards: Make) -> None:
    shards = make_shards(LENGTHS)
    path = shards.directory / "offsets.bin"
    raw = path.read_bytes()
    for place, value in ((1, 2**64 - 1), (1, 0), (0, 1)):
        offsets = np.frombuffer(raw, dtype="<u8").copy()
        offsets[place] = value
        path.write_bytes(offsets.tobytes())
        resealed(shards)
        assert tells(damaged(shards, at_open=True), path, "documents start")
    path.write_bytes(raw)
    path = shards.directory / "tokens-00000.bin"
    ids = np.frombuffer(path.read_bytes(), dtype="<u2").copy()
    ids[0] = 2**16 - 1
    path.write_bytes(ids.tobytes())
    resealed(shards)
    assert "holds the id 65,535" in damaged(shards, at_open=False)


@pytest.mark.parametrize("shard_tokens", [7, 1 << 20])
def test_an_offset_falls_on_a_document_token_or_is_refused(
    make_shards: Make, shard_tokens: int
) -> None:
    """A hash may be made again around an offset that rises as it should and cuts a document."""
    shards = make_shards([4, 9, 3, 12], shard_tokens=shard_tokens)
    path = shards.directory / "offsets.bin"
    raw = path.read_bytes()
    for place in (1, 2, 3):
        offsets = np.frombuffer(raw, dtype="<u8").copy()
        offsets[place] += 2
        path.write_bytes(offsets.tobytes())
        resealed(shards)
        told = f"begin where none does, the first at token {offsets[place]}:"
        assert told in damaged(shards, at_open=False)


@pytest.mark.parametrize("place", range(len(LENGTHS)))
@pytest.mark.parametrize("at_once", [1, 2, 3, 1 << 20])
def test_every_offset_is_looked_at_whatever_the_parts(
    make_shards: Make, monkeypatch: pytest.MonkeyPatch, place: int, at_once: int
) -> None:
    monkeypatch.setattr(shards_module, "OFFSETS_AT_ONCE", at_once)
    shards = make_shards(LENGTHS)
    path = shards.directory / "offsets.bin"
    offsets = np.frombuffer(path.read_bytes(), dtype="<u8").copy()
    offsets[place] = offsets[place + 1] if place + 1 < len(offsets) else shards.tokens
    path.write_bytes(offsets.tobytes())
    with pytest.raises(ConfigError, match=in_order(path, "documents start")):
        Shards.open(shards.directory)


def test_an_older_format_is_told_as_such(make_shards: Make) -> None:
    """Format 2 had no `counted_bytes` in the beginning: it is no damaged file of this format."""
    shards = make_shards([5])
    path = shards.directory / "manifest.json"
    manifest = json.loads(path.read_text()) | {"format": 2, "rebuild": "headrace data ingest x"}
    manifest.pop("counted_bytes")
    path.write_text(json.dumps(manifest))
    with pytest.raises(OtherFormat, match=in_order(shards.directory, "format 2", 3)) as caught:
        Shards.open(shards.directory)
    assert begins(caught.value.remedy.text, "rm", "-r", shards.directory, "&&", *INGEST, "x")


@pytest.mark.slow
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


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("added", [0, -1])
def test_the_bytes_of_documents_are_summed_in_parts(
    make_shards: Make, monkeypatch: pytest.MonkeyPatch, at_once: int, added: int
) -> None:
    monkeypatch.setattr(shards_module, "DOCUMENTS_AT_ONCE", at_once)
    monkeypatch.setattr(shards_module, "TOKENS_AT_ONCE", at_once)
    shards = make_shards([3, 1, 0, 250, 7, 1, 99, 1], shard_tokens=11)
    token_bytes = np.full(1000, 2, dtype=np.int32)
    token_bytes[0] = added
    counted = sum(max(0, 2 * n + added) for n in (3, 1, 0, 250, 7, 1, 99, 1))
    resealed(shards, counted_bytes=counted)
    Shards.open(shards.directory).verify_bytes(token_bytes)
    resealed(shards, counted_bytes=counted + 1)
    with pytest.raises(ConfigError, match=f"stand for {counted:,} bytes"):
        Shards.open(shards.directory).verify_bytes(token_bytes)
