"""Text is cleaned before it is surveyed: what falls is gone from both sides, told, and checked."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from facts import INGEST, begins, in_order

from headrace.core.errors import ConfigError, RunError
from headrace.data.cleaning import FILE, METHOD_RULES, RULE, Cleaning
from headrace.data.heldout import Overlap
from headrace.data.ingest import _key, is_current, prepare, reopen
from headrace.data.left_out import LeftOutTally
from headrace.data.pipeline import Pipeline
from headrace.data.prepared import Prepared
from headrace.data.quality.installed import installed_sets
from headrace.data.shards import Shards
from headrace.plan.plan import Plan
from headrace.techniques.data.deduplication import Deduplication

MakePlan = Callable[..., Plan]
WORDS = [f"w{n}" for n in range(400)]


def prose(seed: int, sentences: int = 3) -> str:
    """Return sentences of 20 words that no other seed has."""
    draw = random.Random(seed)
    return "".join(" ".join(draw.choices(WORDS, k=20)) + ".\n" for _ in range(sentences))


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(prepared: Prepared, shards: Shards) -> list[str]:
    starts = [*shards.document_starts(0, shards.tokens).tolist(), shards.tokens]
    return [prepared.tokenizer.decode(shards.read(a + 1, b - a - 1)) for a, b in pairwise(starts)]


def trained(prepared: Prepared) -> list[str]:
    return [text for shards in prepared.train for text in texts_of(prepared, shards)]


def test_nothing_changes_where_nothing_is_asked(make_plan: MakePlan, tmp_path: Path) -> None:
    """Without a table there is no pass, no record and no part of the name of the shards."""
    plan = make_plan(sources=write(tmp_path / "a.jsonl", [prose(n % 30) for n in range(40)]))
    assert Cleaning(plan.data).facts() == []
    doing: list[str] = []
    prepared = prepare(plan, progress=lambda what, done, total: doing.append(what))
    assert {*doing} == {"reading", "training the tokenizer", "encoding"}
    assert prepared.cleaning is None and "cleaning" not in prepared.fingerprint
    assert not (prepared.directory / FILE).exists()
    assert "cleaning" not in prepared.to_dict(0.05)
    assert prepared.train[0].documents + prepared.validation.documents >= 40


def test_equal_documents_fall_across_sources_or_within(make_plan: MakePlan, tmp_path: Path) -> None:
    """Check that these documents remain in whatever order they stand, and the counts are told."""
    one, two = [prose(n) for n in (*range(20), 3, 3)], [prose(n) for n in (5, 6, *range(30, 40))]
    sources = (write(tmp_path / "a.jsonl", one), write(tmp_path / "b.jsonl", two))
    every = prepare(make_plan(sources=sources, deduplication={}))
    assert every.cleaning is not None
    report = every.cleaning.step("deduplication")
    assert report is not None and (report.documents, report.dropped_documents) == (34, 4)
    size = len(prose(3).encode())
    assert report.dropped_bytes == 2 * size + len((prose(5) + prose(6)).encode())
    assert report.across_sources == 2
    assert every.cleaning.steps[0].line().endswith("; 2 for text of another source")
    assert report.examples[0] == ("document 20 of source 0", "document 3 of source 0")
    remain = sorted([*trained(every), *texts_of(every, every.validation)])
    assert remain == sorted({*one, *two})
    within = prepare(make_plan(sources=sources, deduplication={"scope": "source"}))
    assert sum(s.documents for s in (*within.train, within.validation)) == 32
    assert within.directory != every.directory
    assert within.fingerprint["cleaning"] != every.fingerprint["cleaning"]
    order = random.Random(1)
    shuffled = (
        write(tmp_path / "c.jsonl", order.sample(one, len(one))),
        write(tmp_path / "d.jsonl", order.sample(two, len(two))),
    )
    again = prepare(make_plan(sources=shuffled, deduplication={}))
    assert sorted([*trained(again), *texts_of(again, again.validation)]) == remain


@pytest.mark.parametrize("method", ["paragraph", "minhash", "bloom"])
def test_each_method_is_connected(make_plan: MakePlan, tmp_path: Path, method: str) -> None:
    """A copy with other words at its end falls, or its paragraph does."""
    texts = [prose(n, 10) for n in range(30)]
    near = prose(3, 10).replace(".\n", ". ", 8) + "\n\nother words"
    again = prose(4, 10) + "\n\nnew"
    source = write(tmp_path / "a.jsonl", [*texts, near if method == "minhash" else again])
    prepared = prepare(make_plan(sources=source, deduplication={"method": method}))
    assert prepared.cleaning is not None
    report = prepared.cleaning.step("deduplication")
    assert report is not None and report.documents == 31
    assert prepared.cleaning.rule == METHOD_RULES.get(method, RULE)
    assert (report.dropped_documents, report.cut_documents) == (
        (1, 0) if method == "minhash" else (0, 1)
    )
    assert report.dropped_bytes >= len(prose(4, 10).encode()) - 20


def test_validation_text_is_taken_out_of_the_training_text(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    """Check that passages fall with the rest of their sentences; by key documents, or nothing."""
    quoted = prose(1) + prose(100, 2) + prose(2)
    texts = [quoted, prose(101), *(prose(n) for n in range(3, 20))]
    own = write(tmp_path / "own.jsonl", [prose(100, 2), prose(101).upper(), prose(102)])
    keys = {"sources": write(tmp_path / "a.jsonl", texts), "validation": own}
    passages = prepare(make_plan(**keys))
    assert trained(passages) == [prose(1) + prose(2), *texts[2:]]
    assert passages.split is not None
    none_left = passages.split.overlap
    assert none_left is not None and (none_left.passages, none_left.documents) == (0, 0)
    report = passages.to_dict(own)["cleaning"]["decontamination"]
    assert (report["dropped_documents"], report["cut_documents"]) == (1, 1)
    assert report["dropped_bytes"] == len((prose(100, 2) + prose(101)).encode())

    whole = prepare(make_plan(**keys, decontamination={"remove": "document"}))
    assert trained(whole) == texts[2:]

    told = prepare(make_plan(**keys, decontamination={"remove": "nothing"}))
    assert trained(told) == texts and told.split is not None
    overlap = told.split.overlap
    assert overlap is not None and (overlap.documents, overlap.of_documents) == (2, 3)
    assert overlap.passages_share == pytest.approx((28 + 48) / (28 + 48 + 48), abs=0.001)
    (doubt,) = [one for one in told.sides(own).doubts(16) if one.kind == "overlap"]
    assert doubt.numbers["documents"] == 2
    names = {p.directory.name for p in (passages, whole, told)}
    assert len(names) == 3 and len({p.fingerprint["cleaning"] for p in (passages, whole)}) == 2


def test_duplicates_fall_before_evaluation_sets_are_looked_for(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    """Any file can be an evaluation set, by its own field; two cleaners follow each other."""
    source = write(tmp_path / "a.jsonl", [prose(n % 20) for n in range(25)])
    asked = tmp_path / "questions.jsonl"
    asked.write_text(json.dumps({"question": prose(2, 1)}) + "\n")
    table = {"against": [str(asked)], "against_key": "question", "remove": "document"}
    plan = make_plan(sources=source, deduplication={}, decontamination=table)
    prepared = prepare(plan)
    assert prepared.cleaning is not None
    first, second = prepared.cleaning.steps
    assert (first.report.documents, first.report.dropped_documents) == (25, 5)
    assert (second.report.documents, second.report.dropped_documents) == (20, 1)
    assert sum(s.documents for s in (*prepared.train, prepared.validation)) >= 19
    assert prose(2) not in trained(prepared)
    asked.write_text(json.dumps({"question": prose(3, 1)}) + "\n" + " " * 9)
    assert _key(plan) != prepared.directory.name, "its evaluation set is another one"


def test_an_installed_set_is_taken_by_its_name(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets lie in folders that the user names, and where Hugging Face keeps what it fetched."""
    source = write(tmp_path / "a.jsonl", [prose(n) for n in range(20)])
    row = {"query": prose(2, 2), "choices": [prose(2).splitlines()[2]]}
    sets, hub = (tmp_path / ".cache" / name for name in ("headrace/benchmarks", "huggingface/hub"))
    sets.mkdir(parents=True)
    (sets / "mill_easy.jsonl").write_text(json.dumps(row) + "\n")
    snapshot = hub / "datasets--mills--quiz" / "snapshots" / "abc"
    (snapshot / "hard").mkdir(parents=True)
    (snapshot / "README.md").write_text(prose(5))
    pq.write_table(pa.table({"query": [prose(3)]}), snapshot / "hard" / "test-0.parquet")
    pq.write_table(pa.table({"query": [prose(4)]}), snapshot / "all.parquet")
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HOME", str(tmp_path))

    def fallen(against: list[str], key: str) -> list[int]:
        table = {"against": against, "against_key": key, "remove": "document"}
        data = make_plan(sources=source, decontamination=table).data
        cleaning = Pipeline.of(data, LeftOutTally()).cleaning
        cleaning.learn(lambda *_: None)
        left = {document.text for document in cleaning.documents(0)}
        return [n for n in range(20) if prose(n) not in left]

    assert fallen(["mill_easy"], "{query}{choices.0}") == [2]
    assert fallen(["mills/quiz:hard"], "query") == [3]
    assert fallen(["mill_easy", "mills/quiz"], "query") == [2, 3, 4]
    assert sorted(installed_sets()) == ["mill_easy", "mills/quiz", "mills/quiz:hard"]
    with pytest.raises(ConfigError, match="cache are mill_easy, mills/quiz") as caught:
        fallen(["mill_eazy"], "query")
    assert 'against=["mill_easy"]' in caught.value.remedy.text.replace("'", "")
    with pytest.raises(ConfigError, match="no field 'question'") as caught:
        fallen(["mill_easy"], "question")
    assert caught.value.remedy.text.startswith("data.decontamination.against_key=query")


def test_a_run_that_was_recorded_before_goes_on_with_its_text(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan says nothing of decontamination, which is on for a plan of today."""
    own = write(tmp_path / "own.jsonl", [prose(1)])
    plan = make_plan(sources=write(tmp_path / "a.jsonl", [prose(1), prose(2)]), validation=own)
    without = plan.data.model_copy(update={"decontamination": None})
    before = prepare(plan.model_copy(update={"data": without}))
    assert before.cleaning is None and len(trained(before)) == 2
    record = before.record()
    assert "cleaning" not in record["fingerprint"]
    opened = reopen(plan, record, tmp_path)
    assert opened.directory == before.directory and is_current(plan, opened)
    before.directory.rename(tmp_path / "elsewhere")
    made_again = reopen(plan, record, tmp_path)
    assert made_again.fingerprint == before.fingerprint
    now = prepare(plan)
    assert len(trained(now)) == 1 and now.cleaning is not None
    lines = Overlap.model_validate_json(
        '{"documents": 1, "of_documents": 2, "bytes": 3, "of_bytes": 4, "lines": 5, "of_lines": 6}'
    )
    assert lines.passages_share == 5 / 6, "an earlier record counted lines"


def test_changed_cleaning_is_refused_by_name(make_plan: MakePlan, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [prose(n % 20) for n in range(30)])
    plan = make_plan(sources=source, deduplication={})
    prepared = prepare(plan)
    file = prepared.directory / FILE
    record = json.loads(file.read_text())
    record["steps"][0]["report"]["dropped_documents"] = 9
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=in_order("cleaning", "changed", "->")):
        reopen(plan, prepared.record(), tmp_path)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"cleaning\.json is damaged") as told:
        prepare(plan)
    assert begins(told.value.remedy.text, "rm", "-r", prepared.directory, "&&", *INGEST)
    assert "data.deduplication.method=exact" in told.value.remedy.text


def test_a_source_of_which_nothing_is_left_is_refused(make_plan: MakePlan, tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", [prose(1), prose(2)]), tmp_path / "b.jsonl"
    plan = make_plan(sources=(a, write(b, [prose(2)])), deduplication={})
    with pytest.raises(ConfigError, match=in_order("nothing of the 1 document of", b.name)) as told:
        prepare(plan)
    assert told.value.remedy.text == f"data.deduplication.scope=source or data.sources={a}"
    with pytest.raises(ConfigError, match=r"1 document of data\.sources") as told:
        prepare(make_plan(sources=str(b), validation=str(b)))
    assert told.value.remedy.text.startswith("data.decontamination.remove=nothing or data.sources=")


def test_a_source_that_changes_between_two_passes_is_told(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    """Nothing is left behind that is taken for whole."""
    source = Path(write(tmp_path / "a.jsonl", [prose(n) for n in range(30)]))

    def change(what: str, done: float, total: float | None) -> None:
        if what == "training the tokenizer":
            source.write_text("".join(source.read_text().splitlines(keepends=True)[:7]))

    plan = make_plan(sources=str(source), deduplication={})
    with pytest.raises(
        ConfigError, match=in_order("changed while", "was read", "when it was listed", "now")
    ):
        prepare(plan, progress=change)
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]


def test_evidence_counts_the_documents_in_the_shards(make_plan: MakePlan, tmp_path: Path) -> None:
    """Shards that hold other documents than cleaning left, or none that was cleaned, are told."""
    source = write(tmp_path / "a.jsonl", [prose(n % 30) for n in range(40)])
    plan = make_plan(sources=source, deduplication={})
    prepared = prepare(plan)
    assert prepared.cleaning is not None and prepared.cleaning.documents_left == 30

    def active(**changed: Any) -> tuple[bool | None, str]:
        build: Any = SimpleNamespace(plan=plan, prepared=replace(prepared, **changed))
        evidence = Deduplication().active(build)
        return evidence.active, evidence.detail

    found, detail = active()
    assert found and "10 of 40 documents fell" in detail
    whole = prepare(make_plan(sources=source))
    left = f"{whole.sides(0.05).source_documents} documents stand in the shards"
    assert whole.sides(0.05).source_documents == 40
    asked = plan.data.validation
    assert prepared.sides(asked).source_documents == 30
    found, detail = active(train=whole.train, validation=whole.validation, split=whole.split)
    assert not found and left in detail and "left 30" in detail
    assert active(cleaning=None)[0] is False


def test_other_text_of_as_many_documents_is_told(make_plan: MakePlan, tmp_path: Path) -> None:
    """Without a cleaner nothing compares the documents; the files' sizes and times are."""
    source = Path(write(tmp_path / "a.jsonl", [prose(n) for n in range(30)]))

    def change(what: str, done: float, total: float | None) -> None:
        if what == "encoding":
            write(source, [prose(n, 2) for n in range(30)])

    plan = make_plan(sources=str(source))
    with pytest.raises(RunError, match=in_order(source.name, "changed while it was read")):
        prepare(plan, progress=change)
    assert not [*Path(plan.data.directory).glob("*/validation")]
