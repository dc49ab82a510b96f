"""What an evaluation counts where not every target does."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.assemble.build import make_build
from headrace.core.errors import ConfigError
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.model.head import IGNORED
from headrace.model.mask import Rows
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train import evaluate as evaluation


def test_bytes_are_those_of_targets_that_count(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is left out is no loss, no token and no text."""
    plan = tiny_plan("guard=false")
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    whole = evaluation.evaluate(build)
    read, counted = evaluation.validation_batches, []

    def fewer(*args: Any, **how: Any) -> Iterator[Micro]:
        for micro in read(*args, **how):
            targets_BT = micro.targets_BT.clone()
            targets_BT[:, ::3] = IGNORED
            counted.extend(targets_BT[targets_BT != IGNORED].tolist())
            yield replace(micro, targets_BT=targets_BT)

    monkeypatch.setattr(evaluation, "validation_batches", fewer)
    found = evaluation.evaluate(build)
    build.loader.close()
    assert 0 < found.tokens == len(counted) < whole.tokens
    of_token = build.prepared.tokenizer.token_bytes
    assert found.bytes == sum(int(of_token[token]) for token in counted) < whole.bytes


def test_a_tokenizer_that_changes_text_is_accepted_by_name_and_measured_by_raw_bytes(
    tiny_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    """Composed accents are fewer bytes than the text has: the text's own are the denominator."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):
        lines = [f"re\u0301sume\u0301 {number} {line} cafe\u0301\n" for line in range(40)]
        (text / f"{number}.txt").write_text("".join(lines))
    plain = tiny_plan(f"data.sources={text}", f"data.directory={tmp_path / 'a'}")
    spec = json.loads(prepare(plain).tokenizer.text)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(spec | {"normalizer": {"type": "NFC"}}))
    keys = [f"data.sources={text}", f"data.tokenizer={file}", f"data.directory={tmp_path / 'b'}"]
    with pytest.raises(ConfigError, match="loses text") as told:
        prepare(tiny_plan(*keys))
    assert "data.lossy_tokenizer=true" in told.value.remedy.text
    plan = tiny_plan(*keys, "data.lossy_tokenizer=true")
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="loses text"):  # whatever is prepared already
        prepare(tiny_plan(*keys))
    found = evaluation.evaluate(build)
    build.loader.close()
    held_out = build.prepared.validation
    assert build.prepared.tokenizer.loses
    assert held_out.manifest.counted_bytes < held_out.text_bytes
    assert found.bytes == pytest.approx(held_out.text_bytes, rel=0.01)


@pytest.fixture
def untrained(tiny_plan: Callable[..., Plan]) -> Iterator[Callable[..., Any]]:
    """Make a build of random weights that differ enough for their losses to be told apart."""
    made = []

    def make(*overrides: str) -> Any:
        plan = tiny_plan("model.init_std=0.3", "model.layers=2", *overrides)
        made.append(make_build(plan, prepare(plan), World(), torch.device("cpu")))
        return made[-1]

    yield make
    for build in made:
        build.loader.close()


def test_loss_by_place_is_the_loss_of_rows_that_are_cut_there(
    untrained: Callable[..., Any],
) -> None:
    """Compare rows of 32 with a plan of such rows, and their first half with rows of 16."""
    build = untrained()
    places = evaluation.LossByPlace(evaluation.bins_of(16, 32), build.device)
    found = evaluation.evaluate(build, length=32, places=places)
    right = evaluation.evaluate(untrained("data.sequence_length=32"))
    assert found.loss_nats == pytest.approx(right.loss_nats, rel=1e-6)
    assert (found.tokens, found.bytes, found.share) == (right.tokens, right.bytes, right.share)
    rows = places.rows(16)
    assert [row["end"] for row in rows] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert [row["trained"] for row in rows] == [True] * 4 + [False] * 4
    assert sum(row["targets"] for row in rows) == found.tokens
    total = sum(row["loss_nats"] * row["targets"] for row in rows)
    assert total / found.tokens == pytest.approx(found.loss_nats, rel=1e-6)
    _check_first_half(build, rows)


def _check_first_half(build: Any, rows: list[dict[str, Any]]) -> None:
    """A causal model gives the first 16 targets of a row what it gives them in a row of 16."""
    targets = nats = 0.0
    shards, model = build.prepared.validation, build.model
    whole = torch.from_numpy(shards.read(0, shards.tokens)).long()
    with torch.no_grad():
        for start in range(0, len(whole) - 1, 32):
            ids = whole[start : start + 17][None]
            if ids.size(1) < 2:
                continue
            place = torch.arange(ids.size(1) - 1)[None]
            hidden = model.hidden(ids[:, :-1], Rows(place))
            logits = model.head.logits(hidden[0], model.unembedding)
            nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            targets += ids.size(1) - 1
    found = rows[:4]
    assert targets == sum(row["targets"] for row in found)
    assert nats == pytest.approx(sum(r["loss_nats"] * r["targets"] for r in found), rel=1e-5)


@pytest.mark.parametrize("stride", [5, 16])
def test_overlapping_rows_give_the_plain_sliding_windows_loss(
    untrained: Callable[..., Any], stride: int
) -> None:
    """Each target counts once, behind at least 16 - stride tokens where the text has them."""
    build = untrained()
    found = evaluation.evaluate(build, stride=stride)
    shards, model = build.prepared.validation, build.model
    whole, length = torch.from_numpy(shards.read(0, shards.tokens)).long(), 16
    seen, begin, nats = 0, 0, 0.0
    with torch.no_grad():
        while seen < len(whole) - 1:
            ids = whole[begin : begin + length + 1]
            fresh = begin + len(ids) - 1 - seen
            hidden = model.hidden(ids[None, :-1], Rows(torch.arange(len(ids) - 1)[None]))
            logits = model.head.logits(hidden[0, -fresh:], model.unembedding)
            nats += float(torch.nn.functional.cross_entropy(logits, ids[-fresh:], reduction="sum"))
            assert begin == 0 or len(ids) - 1 - fresh >= length - stride
            seen, begin = seen + fresh, begin + stride
    assert (found.tokens, found.share) == (len(whole) - 1, 1.0)
    assert found.loss_nats == pytest.approx(nats / seen, rel=1e-5)
    if stride == length:
        assert found == evaluation.evaluate(build)


def test_a_limit_of_overlapping_rows_counts_its_share(untrained: Callable[..., Any]) -> None:
    build = untrained()
    found = evaluation.evaluate(build, 40, stride=4)
    whole = build.prepared.validation.tokens - 1
    assert found.tokens == 40 and found.share == pytest.approx(40 / whole)
    with pytest.raises(ConfigError, match="--stride 17") as told:
        evaluation.check_stride(17, 16)
    assert told.value.remedy.text == "--stride 8"


def test_masked_documents_are_places_of_their_own(untrained: Callable[..., Any]) -> None:
    """Under document masks a target's place is that in its document, not that in its row."""
    build = untrained("techniques.document_packing={}")
    places = evaluation.LossByPlace([1, 1000], build.device)
    evaluation.evaluate(build, length=64, places=places)
    rows = evaluation.ValidationRows.of(build.prepared.validation, 64, None).numbers
    documents = build.prepared.validation.document_starts(0, build.prepared.validation.tokens)
    begins = {int(start) for start in documents} | {64 * row for row in rows}
    last = build.prepared.validation.tokens - 1
    assert places.targets.tolist()[0] == len({start for start in begins if start < last})


@pytest.mark.parametrize(
    ("trained", "length", "ends"),
    [
        (16, 16, [4, 8, 12, 16]),
        (16, 8, [2, 4, 6, 8]),
        (10, 13, [3, 5, 8, 10, 12, 13]),
        (2, 4, [1, 2, 3, 4]),
    ],
)
def test_bins_end_where_training_did(trained: int, length: int, ends: list[int]) -> None:
    assert evaluation.bins_of(trained, length) == ends
    many = evaluation.bins_of(trained, 100 * trained)
    assert trained in many and len(many) <= evaluation.INSIDE + evaluation.BEYOND + 1


def test_learned_positions_end(untrained: Callable[..., Any]) -> None:
    build = untrained("model.position=learned")
    evaluation.check_length(build, 16)
    with pytest.raises(ConfigError, match="learned") as told:
        evaluation.check_length(build, 17)
    assert told.value.remedy.text == "data.sequence_length=16"
