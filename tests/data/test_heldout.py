"""What is held out: a share of the text within its bounds, the same however the text is given."""

import json
import random
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from facts import INGEST, begins, in_order
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import ConfigError
from headrace.data import heldout
from headrace.data.heldout import LEAST, MOST, Split, Weights, cut_at
from headrace.data.ingest import _key, prepare, reopen
from headrace.data.prepared import Prepared
from headrace.data.shards import Shards
from headrace.data.sides import FEW_TARGETS
from headrace.plan.plan import Plan

MakePlan = Callable[..., Plan]
Sources = list[list[str]]


def place_of(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")


def weigh(sources: Sources, share: float) -> Weights:
    weights = Weights(share)
    for number, texts in enumerate(sources):
        for text in texts:
            weights.add(text.encode(), place_of(text), number)
    return weights


def sides(split: Split, texts: list[str]) -> tuple[list[str], list[str]]:
    parts = [split.parts(text, place_of(text)) for text in texts]
    return [a for a, _ in parts if a], [b for _, b in parts if b]


def offered_share(error: ConfigError) -> float:
    """Return the share of validation that a refusal offers."""
    ((change,),) = error.remedy.changes
    key, _, share = change.partition("=")
    assert key == "data.validation"
    return float(share)


def size(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@cache
def prose(length: int, seed: int) -> str:
    """Return lines of words, `length` bytes."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij\u00e9", k=draw.randint(1, 9))) for _ in range(60)]
    text = "".join(draw.choice(words) + draw.choice("  \n") for _ in range(1 + length // 2))
    return f"{seed} {text}".encode()[:length].decode(errors="ignore")


lengths = st.one_of(
    st.integers(200, 400), st.integers(1, 60), st.integers(2_000, 20_000), st.just(500)
)
collections = st.lists(
    st.lists(st.tuples(lengths, st.integers(0, 3)), min_size=1, max_size=25), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(collections, st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5, 0.9]), st.randoms())
def test_any_collection_is_split_within_the_bounds(
    drawn: list[list[tuple[int, int]]], share: float, draw: random.Random
) -> None:
    """Within the bounds, whatever the order; equal documents together; every source trains."""
    sources = [[prose(length, length + copy) for length, copy in texts] for texts in drawn]
    every = [text for texts in sources for text in texts]
    split = weigh(sources, share).split()
    if split is None:  # only where the share is a few bytes; equal documents are one
        assert share * size([*{*every}]) < 10
        return
    train, held = sides(split, every)
    assert size(held) == split.validation_bytes and size(train) + size(held) == split.text_bytes
    assert LEAST * share <= size(held) / size(every) <= MOST * share
    assert all(sides(split, texts)[0] for texts in sources)
    shuffled = [draw.sample(texts, len(texts)) for texts in sources]
    assert weigh(shuffled, share).split() == split


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_many_documents_are_held_out_whole_and_by_hash_alone(share: float) -> None:
    """Where the share alone is within the bounds nothing is cut, and no document changes sides."""
    texts = [prose(300, seed) for seed in range(2000)]
    split = weigh([texts], share).split()
    assert split and not split.cut
    natural = [t for t in texts if place_of(t) < share * heldout.PLACES]
    assert sides(split, texts)[1] == natural
    more = weigh([texts + [prose(300, seed) for seed in range(2000, 3000)]], share).split()
    assert more and sides(more, texts) == sides(split, texts)


def test_a_large_text_is_cut_and_stays_cut_at_its_place() -> None:
    large, small = prose(221_000, 1), prose(1_500, 2)
    split = weigh([[large, small]], 0.05).split()
    assert split
    head, end = split.parts(large, place_of(large))
    assert head + end == large and 0.03 < len(end.encode()) / 221_000 < 0.06
    later = weigh([[large, small, *(prose(1_000, seed) for seed in range(50))]], 0.05).split()
    assert later and later.parts(large, place_of(large)) == (head, end)


def test_equal_documents_are_weighed_as_one() -> None:
    """Check that 1,000 copies of a document stay on one side, and 2.5 to 7.5% is held out."""
    texts = [prose(100, 1)] * 1000 + [prose(100, seed) for seed in range(2, 300)]
    split = weigh([texts], 0.05).split()
    assert split
    train, held = sides(split, texts)
    assert 0.025 <= size(held) / size(texts) <= 0.075
    parts = {split.parts(text, place_of(text)) for text in texts if text == texts[0]}
    assert len(parts) == 1 and train


def test_neighbours_by_hash_are_counted_together_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heldout, "MOST_UNITS", 100)
    texts = [prose(100, seed) for seed in range(3000)] + [prose(40_000, 5)]
    weights = weigh([texts], 0.05)
    assert len(weights._units) <= 100
    split = weights.split()
    assert split == weigh([texts[::-1]], 0.05).split() and split
    train, held = sides(split, texts)
    assert size(held) == split.validation_bytes and train
    assert LEAST * 0.05 <= size(held) / size(texts) <= MOST * 0.05


@pytest.mark.parametrize(
    "text", ["", "\u00e9" * 40, "\u65e5\u672c\u8a9e" * 30, "a b " * 30, "one line\n" * 30]
)
@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 0.99])
def test_a_cut_is_between_characters(text: str, share: float) -> None:
    raw = text.encode()
    cut = cut_at(raw, share)
    assert raw[:cut].decode() + raw[cut:].decode() == text
    assert bool(cut) == bool(raw)


# --- through prepare -------------------------------------------------------------------------


def documents(prepared: Prepared, shards: Shards) -> list[str]:
    starts = [*shards.document_starts(0, shards.tokens).tolist(), shards.tokens]
    return [prepared.tokenizer.decode(shards.read(a + 1, b - a - 1)) for a, b in pairwise(starts)]


def test_one_large_and_one_small_text(make_plan: MakePlan, tmp_path: Path) -> None:
    """Whichever of two files is the large one, about the share of the text is held out."""
    for seed in (1, 2, 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "large.txt").write_text(prose(221_000, seed))
        (folder / "small.txt").write_text(prose(1_500, seed + 10))
        prepared = prepare(make_plan(sources=str(folder)))
        (train,), held = prepared.train, prepared.validation
        whole = sum(path.stat().st_size for path in folder.iterdir())
        assert train.text_bytes + held.text_bytes == whole
        assert 0.025 <= held.text_bytes / whole <= 0.075
        assert train.tokens > 50_000
        assert prepared.split is not None and prepared.split.cut_documents == 1
        assert prepared.split.overlap is None and not prepared.split.loses


def test_every_source_keeps_text_to_train_on(make_plan: MakePlan, tmp_path: Path) -> None:
    paths = []
    for seed in range(6):
        paths.append(str(tmp_path / f"{seed}.txt"))
        Path(paths[-1]).write_text(prose(20_000 if seed else 4_000, seed))
    prepared = prepare(make_plan(sources=paths, validation=0.2))
    whole = sum(Path(path).stat().st_size for path in paths)
    assert all(shards.text_bytes > 1_500 for shards in prepared.train)
    assert 0.1 <= prepared.validation.text_bytes / whole <= 0.3


def test_the_tokenizer_does_not_learn_from_what_is_held_out(
    make_plan: MakePlan, tmp_path: Path
) -> None:
    """The tokenizer learns from the head alone of a text that is cut."""
    head, end = "aa bb " * 4_000, "zqzqzqzq " * 140
    (tmp_path / "a.txt").write_text(head + end)
    prepared = prepare(make_plan(sources=str(tmp_path / "a.txt"), vocab=270))
    assert documents(prepared, prepared.validation)[0] in head + end
    assert "zq" not in prepared.tokenizer.text and "aa" in prepared.tokenizer.text


@pytest.mark.parametrize("share", [0.0, 1.0, 1e-9])
def test_a_share_that_cannot_be_is_refused_with_one_that_can(
    make_plan: MakePlan, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text number {n}"}) + "\n" for n in range(200)))
    with pytest.raises(ConfigError) as told:
        prepare(make_plan(sources=str(path), validation=share))
    assert f"data.validation = {share:g}" in told.value.message
    prepared = prepare(make_plan(sources=str(path), validation=offered_share(told.value)))
    assert prepared.validation.documents and prepared.train[0].documents


@pytest.mark.parametrize("texts", [["ab", "cd", "ef"], ["abcdef"], ["abcd"] * 50])
def test_a_few_short_documents_are_refused_with_numbers(
    make_plan: MakePlan, tmp_path: Path, texts: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.raises(ConfigError, match=f"give .* {size(texts)} bytes; data.validation") as told:
        prepare(make_plan(sources=str(path)))
    if told.value.remedy.changes:
        assert prepare(make_plan(sources=str(path), validation=offered_share(told.value))).train


def test_what_an_earlier_rule_prepared_is_kept_for_its_runs_and_not_taken_for_others(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(prose(5_000, 1))
    plan = make_plan(sources=str(path))
    with monkeypatch.context() as patched:
        patched.setattr("headrace.data.ingest.RULE", 1)
        before = prepare(plan)
        (before.directory / heldout.FILE).unlink()
    now = prepare(plan)
    assert now.directory != before.directory and now.directory.name == _key(plan)
    opened = reopen(plan, before.record(), before.directory)
    assert (opened.directory, opened.split) == (before.directory, None)
    assert opened.fingerprint == before.fingerprint
    gone = {**before.record(), "directory": "gone", "absolute": str(tmp_path / "gone")}
    gone["fingerprint"] = {**before.fingerprint, "data": "0" * 64}  # as another rule gives
    with pytest.raises(ConfigError, match=in_order("data", "changed", "older version")):
        reopen(plan, gone, tmp_path)


def test_a_damaged_record_of_the_sides_is_one_message(make_plan: MakePlan, tmp_path: Path) -> None:
    """A run goes on without it; a plan that is prepared makes everything again."""
    (tmp_path / "a.txt").write_text(prose(5_000, 1))
    plan = make_plan(sources=str(tmp_path / "a.txt"))
    prepared = prepare(plan)
    file = prepared.directory / heldout.FILE
    file.write_text('{"rule": 2, "cut_documents": -1}')
    with pytest.raises(ConfigError, match=r"held-out\.json is damaged") as told:
        prepare(plan)
    assert begins(told.value.remedy.text, "rm", "-r", prepared.directory, "&&", *INGEST)
    with pytest.raises(ConfigError, match=r"held-out\.json is damaged") as told:
        reopen(plan, prepared.record(), tmp_path)
    assert told.value.remedy.text == f"rm {file}"
    file.unlink()
    assert reopen(plan, prepared.record(), tmp_path).fingerprint == prepared.fingerprint


@pytest.mark.parametrize(("row", "enough"), [(16, FEW_TARGETS), (600, 600)])
def test_just_enough_targets_are_not_few(tiny_plan: MakePlan, row: int, enough: int) -> None:
    sides = prepare(tiny_plan()).sides(0.05)
    assert not sides.doubts(row, targets=enough)
    (few,) = sides.doubts(row, targets=enough - 1)
    assert few.kind == "few_targets" and few.numbers["targets"] == enough - 1
