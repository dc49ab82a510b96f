"""Scores are a document's own, lie beside the shards with their hashes, and go on where cut."""

import json
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from facts import in_order

from headrace.core.errors import ConfigError
from headrace.data.ingest import prepare
from headrace.data.quality import scores as kept
from headrace.data.quality.scores import NotFinite, lengths, open_scores, save_scores
from headrace.data.rows import Cut, Weighing
from headrace.data.shards import Shards
from headrace.plan.plan import Plan

Make = Callable[..., Shards]


def silent(what: str, done: float, total: float | None) -> None:
    """Show no progress."""


@pytest.mark.parametrize("length", [3, 16, 50])
def test_a_row_has_the_token_weighted_mean_of_its_documents(make_shards: Make, length: int) -> None:
    part = make_shards([30, 0, 77, 41, 2, 1])
    values = np.array([3.0, -1.0, 0.5, 8.0, 2.0, 100.0], dtype=np.float32)
    cut = Cut([part], length)
    assert isinstance(cut, Weighing)
    sizes = np.diff(part.document_starts(0, part.tokens), append=part.tokens)
    by_token = np.repeat(values, sizes)
    slow = [by_token[u * length : (u + 1) * length].mean() for u in range(cut.units[0])]
    assert cut.means(0, values) == pytest.approx(slow, rel=1e-5)


def test_an_interrupted_scoring_goes_on_behind_what_is_written(
    make_shards: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "AT_ONCE", 2)
    sets = [make_shards([5, 6, 7, 8, 9]), make_shards([1])]
    asked: list[int] = []

    def broken(part: Shards, first: int) -> Iterator[float]:
        for number, value in enumerate(lengths(part, first), first):
            if number == 3 and not asked:
                asked.append(first)
                raise KeyboardInterrupt
            yield value

    folder = tmp_path / "scores"
    with pytest.raises(KeyboardInterrupt):
        save_scores(folder, "length", sets, broken, silent)
    assert not folder.exists()
    partial = next(tmp_path.glob(".scores.partial")) / "train-00.bin"
    assert partial.stat().st_size == 2 * 4
    with partial.open("ab") as file:
        file.write(b"\x01\x02")  # a torn value

    def rest(part: Shards, first: int) -> Iterator[float]:
        asked.append(first)
        yield from lengths(part, first)

    save_scores(folder, "length", sets, rest, silent)
    assert asked == [0, 2, 0]
    found = open_scores(folder, sets)
    assert [v.tolist() for v in found.values] == [[6, 7, 8, 9, 10], [2]]
    assert (found.record.least, found.record.mean, found.record.largest) == (2, 7, 10)
    with pytest.raises(NotFinite, match=in_order("document 1", "length", "1e+300")):
        save_scores(tmp_path / "x", "length", sets, lambda part, first: iter([1e300]), silent)


def test_changed_scores_are_no_scores(make_shards: Make, tmp_path: Path) -> None:
    sets, folder = [make_shards([5, 6, 7])], tmp_path / "scores"
    save_scores(folder, "length", sets, lengths, silent)
    before = open_scores(folder, sets).fingerprint
    file, record = folder / "train-00.bin", folder / "scores.json"
    raw, told = file.read_bytes(), record.read_text()
    file.write_bytes(raw[:-4] + raw[:4])
    with pytest.raises(ConfigError, match=in_order("train-00.bin", "sha256")) as error:
        open_scores(folder, sets)
    assert "rm -r" in str(error.value.remedy)
    file.write_bytes(raw)
    record.write_text(told.replace('"length"', '"other"'))
    with pytest.raises(ConfigError, match=in_order("was changed", "seal")):
        open_scores(folder, sets)
    record.write_text(told)
    assert open_scores(folder, sets).fingerprint == before
    with pytest.raises(ConfigError, match="other documents"):
        open_scores(folder, [make_shards([5, 6, 8])])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write rows of very unequal text, each with a number of its own."""
    rows = [
        {"text": ("mill " * (n + 3) + " ".join(f"{n * k % 97}" for k in range(n))).strip(), "d": n}
        for n in range(40)
    ]
    for row in rows:
        row["meta"] = {"hard": row.pop("d") * 0.5}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(plan: Plan) -> tuple[list[str], np.ndarray]:
    """Return the documents of the training side, and their scores."""
    prepared = prepare(plan)
    assert prepared.scores is not None
    (part,) = prepared.train
    bounds = [*part.document_starts(0, part.tokens), part.tokens]
    read = [
        prepared.tokenizer.decode(part.read(a + 1, b - a - 1).tolist()) for a, b in pairwise(bounds)
    ]
    return read, prepared.scores.values[0]


def test_compression_is_that_of_the_text(make_plan: Callable[..., Plan], source: Path) -> None:
    read, values = texts(make_plan(sources=str(source), curriculum={"until": 3}))
    wanted = [len(zlib.compress(t.encode(), 6)) / len(t.encode()) for t in read]
    assert values == pytest.approx(wanted) and len(read) > 20


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv"])
def test_a_column_follows_its_text_to_its_side(
    kind: str, make_plan: Callable[..., Plan], source: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    hard = {row["text"]: row["meta"]["hard"] for row in rows}
    file, score = tmp_path / f"other.{kind}", "column:meta.hard"
    if kind == "parquet":
        pq.write_table(
            pa.Table.from_pylist([{"meta": r["meta"], "text": r["text"]} for r in rows]), file
        )
    elif kind == "csv":
        lines = [f'{row["meta"]["hard"]},"{row["text"]}"' for row in rows]
        file.write_text("hard,text\n" + "\n".join(lines))
        score = "column:hard"
    else:
        file.write_text(source.read_text() if kind == "jsonl" else json.dumps(rows))
    read, values = texts(make_plan(sources=str(file), curriculum={"score": score, "until": 3}))
    assert values == pytest.approx([hard[text] for text in read])


def test_a_column_follows_its_text_through_cleaning(
    make_plan: Callable[..., Plan], source: Path
) -> None:
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    hard = {f"a {row['text']}": row["meta"]["hard"] for row in rows}
    again = [{**row, "meta": {"hard": -1}} for row in rows[::2]]  # which fall, with their numbers
    both = [row for pair in zip(rows[::2], again, rows[1::2], strict=True) for row in pair]
    source.write_text("".join(json.dumps(row) + "\n" for row in both))
    read, values = texts(
        make_plan(
            sources=str(source),
            text_template="a {text}",
            deduplication={"method": "exact"},
            curriculum={"score": "column:meta.hard", "until": 3},
        )
    )
    assert len(read) > 20 and len(set(read)) == len(read)
    assert values.tolist() == [hard[text] for text in read]


def test_a_row_without_text_lends_its_number_to_no_other(
    make_plan: Callable[..., Plan], source: Path
) -> None:
    """Its row is the last one read before a file of no rows."""
    with source.open("a") as file:
        file.write(json.dumps({"text": None, "meta": {"hard": 3}}) + "\n")
    source.with_name("sea.txt").write_text("salt and bread of the mill")
    curriculum = {"score": "column:meta.hard", "until": 3}
    with pytest.raises(ConfigError, match=in_order("sea.txt", "has no field 'meta.hard'")):
        prepare(
            make_plan(
                sources=[str(source), str(source.with_name("sea.txt"))], curriculum=curriculum
            )
        )


def test_other_columns_are_other_data(make_plan: Callable[..., Plan], source: Path) -> None:
    def made(**curriculum: object) -> tuple[str, dict[str, str]]:
        more = {"curriculum": {"until": 3, **curriculum}} if curriculum else {}
        prepared = prepare(make_plan(sources=str(source), **more))
        return prepared.directory.name, prepared.fingerprint

    plain, length = made(), made(score="length")
    paced, column = made(score="length", pacing="step"), made(score="column:meta.hard")
    assert plain[0] == length[0] == paced[0] != column[0]
    assert length[1]["scores"] == paced[1]["scores"] != column[1]["scores"]
    assert length[1]["curriculum"] != paced[1]["curriculum"]
    assert plain[1].keys() < length[1].keys() and plain[1]["data"] == length[1]["data"]
