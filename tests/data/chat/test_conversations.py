"""Conversations become shards, of which the loss counts the assistant's tokens alone."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_families import TURNS, chat_tokenizer
from tiny import WORDS

from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.data.ingest import prepare
from headrace.data.loader import validation_batches
from headrace.data.packing.best_fit import BestFit
from headrace.data.prepared import Prepared
from headrace.data.rows import IGNORE, Cut, Packer
from headrace.data.shards import Shards
from headrace.plan.plan import Plan

MakePlan = Callable[..., Plan]


def _words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def _conversations(count: int = 40) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    for number in range(count):
        turns = [{"role": "system", "content": _words(rng, 2, 4)}] * (number % 3 == 0)
        for _ in range(1 + number % 3):
            turns += [
                {"role": "user", "content": _words(rng, 2, 8)},
                {"role": "assistant", "content": _words(rng, 1, 12)},
            ]
        rows.append({"messages": turns})
    return rows


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer's folder, without a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def make_plan(tmp_path: Path, tokenizer_folder: Path) -> MakePlan:
    """Return what makes a plan of rows, and of further words."""

    def make(rows: list[Any], *words: str, template: str = "chatml") -> Plan:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = [
            "goal = { steps = 2 }",
            "batch = { tokens = 64 }",
            f'[data]\nsources = "{source}"\ntokenizer = "{tokenizer_folder}"',
            f'directory = "{tmp_path / "data"}"\nsequence_length = 64\nvalidation = 0.2',
            f'[data.chat]\ntemplate = "{template}"',
        ]
        return Plan.read("\n".join(lines), catalogue(), overrides=words)

    return make


def _counted(prepared: Prepared, shards: Shards) -> list[str]:
    """Return each run of tokens that the loss counts, as text."""
    counted, runs, last = shards.counted(0, shards.tokens), list[list[int]](), -2
    assert counted is not None
    ids = shards.read(0, shards.tokens)
    for place in np.flatnonzero(counted).tolist():
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(ids[place]))
        last = place
    return [prepared.tokenizer.decode(run) for run in runs]


def test_only_answers_count_in_every_row_and_in_validation(make_plan: MakePlan) -> None:
    """Each answer with the end of its turn is counted once, whoever packs and whichever side."""
    rows = _conversations()
    plan = make_plan(rows)
    prepared = prepare(plan)
    answers = sorted(
        f"{turn['content']}<|im_end|>\n"
        for row in rows
        for turn in row["messages"]
        if turn["role"] == "assistant"
    )
    sides = (*prepared.train, prepared.validation)
    assert sorted(text for side in sides for text in _counted(prepared, side)) == answers
    (train,) = prepared.train
    wanted = int(train.counted(0, train.tokens).sum())  # type: ignore[union-attr]
    assert _targets(BestFit(prepared.train, 64)) == wanted
    cut = Cut(prepared.train, 64)
    covered = cut.units[0] * 64
    in_rows = train.counted(1, covered)
    assert in_rows is not None and _targets(cut) == int(in_rows.sum())
    micros = validation_batches(prepared.validation, 64, tokens=None, micro_rows=1)
    evaluated = sum(int((micro.targets_BT != IGNORE).sum()) for micro in micros)
    assert evaluated == len(
        np.flatnonzero(prepared.validation.counted(0, prepared.validation.tokens))
    )
    assert prepared.chat is not None and prepared.chat.counts.answers == len(answers)
    assert prepared.chat.counts.counted == wanted + evaluated


def _targets(packer: Packer) -> int:
    """Return the targets that count over all rows; each is the next token of its row."""
    count = 0
    for unit in range(packer.units[0]):
        row = packer.row(0, unit)
        assert row.targets is not None
        is_counted = row.targets != IGNORE
        assert (row.targets == row.ids[1:])[is_counted].all()
        count += int(is_counted.sum())
    return count


def test_conversations_are_held_out_whole(make_plan: MakePlan) -> None:
    """No part of one that is trained on is held out, however large it is beside the others."""
    rows = _conversations(12)
    rows[5]["messages"] = rows[5]["messages"] * 30
    prepared = prepare(make_plan(rows))
    sides = [side.documents for side in (*prepared.train, prepared.validation)]
    assert sum(sides) == 12 and min(sides) > 0
    assert prepared.split is not None and prepared.split.cut_documents == 0


def test_kinds_are_told_apart_by_their_fields(make_plan: MakePlan, tmp_path: Path) -> None:
    """Each row becomes the same conversation, whichever fields say it; plain text counts whole."""
    ask, answer = "Where does it end?", "At the mill."
    same = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]},
        {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": answer}]},
        {"prompt": ask, "completion": answer},
        {"prompt": ask, "response": answer, "id": 7},
        {"instruction": ask, "input": "", "output": answer},
        {
            "prompt": [{"role": "user", "content": [{"type": "text", "text": ask}]}],
            "completion": [{"role": "assistant", "content": answer}],
        },
    ]
    more = [same[0], same[2], {"text": "the deep river"}, {}]
    names = ("messages", "prompt", "completion", "text")
    table = pa.table({name: [row.get(name) for row in more] for name in names})
    pq.write_table(table, tmp_path / "more.parquet")
    plan = make_plan(
        [*same, {"text": "the cold weir"}],
        f'data.sources=["{tmp_path}/rows.jsonl","{tmp_path}/more.parquet"]',
        "data.validation=0.5",
    )
    prepared = prepare(plan)
    texts = [
        text for side in (*prepared.train, prepared.validation) for text in _counted(prepared, side)
    ]
    assert texts.count(f"{answer}<|im_end|>\n") == 8 and len(texts) == 10
    assert {"the deep river<|endoftext|>", "the cold weir<|endoftext|>"} <= {*texts}
    assert prepared.chat is not None
    assert prepared.chat.counts.conversations == {"messages": 3, "completion": 5, "text": 2}


def test_what_the_length_cuts_is_counted_and_told(make_plan: MakePlan) -> None:
    """Answers that fall away, those whose end does, and conversations that keep none."""
    long = {"messages": [{"role": "user", "content": "the river " * 40}, TURNS[2]]}
    most, rows = 90, [*_conversations(20), {"messages": TURNS[1:] * 4}, long]
    plan = make_plan(rows, "data.chat.system=Be kind.")
    whole = prepare(plan)
    chat = plan.data.chat.model_copy(update={"max_tokens": most}) if plan.data.chat else None
    data = plan.data.model_copy(update={"chat": chat})
    prepared = prepare(plan.model_copy(update={"data": data}))
    masks = list[str]()
    for side in (*whole.train, whole.validation):
        counted = side.counted(0, side.tokens)
        assert counted is not None
        pieces = np.split(counted.astype(int), side.bounds(0, side.documents)[1:-1])
        masks += ["".join(map(str, piece)) for piece in pieces]
    begins = [[m.start() for m in re.finditer("(?<!1)1", mask)] for mask in masks]
    assert prepared.chat is not None
    counts, lines = prepared.chat.counts, "\n".join(prepared.chat.lines())
    assert counts.cut == sum(len(mask) > most for mask in masks) > 5
    assert counts.lost_answers == sum(at >= most for one in begins for at in one) > 5
    assert counts.cut_answers == sum(mask[most - 1 : most + 1] == "11" for mask in masks) > 1
    assert counts.without_answer == sum(one[0] >= most for one in begins) == 1
    assert f"cut to data.chat.max_tokens = {most}" in lines and "without an answer" in lines
    assert max(np.diff(s.bounds(0, s.documents)).max() for s in prepared.train) == most
    begins_with = prepared.tokenizer.decode(prepared.train[0].read(0, 30))
    assert begins_with.startswith("<|im_start|>system\n")


def test_where_the_length_leaves_no_answer_it_is_named(make_plan: MakePlan) -> None:
    """Not as a text without documents, which is what is left of it."""
    rows = _conversations(20)
    prepared = prepare(make_plan(rows))
    with pytest.raises(ConfigError) as error:
        prepare(make_plan(rows, "data.chat.max_tokens=4"))
    assert "no answer to train on: cut to data.chat.max_tokens = 4: 20" in error.value.message
    sides = (*prepared.train, prepared.validation)
    longest = max(np.diff(side.bounds(0, side.documents)).max() for side in sides)
    assert error.value.remedy.changes == ((f"data.chat.max_tokens={longest}",),)


@pytest.mark.parametrize(
    ("rows", "words", "message", "remedy"),
    [
        ([{"a": 1}], [], "is no conversation: its fields are a", "data.text_key=FIELD"),
        ([{"messages": [{"content": "x"}]}], [], "a message without a role", "sed 1d"),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            [],
            "a preference pair",
            "data.chat.kind=chosen",
        ),
        ([{"text": "a"}], ["data.chat.kind=messages"], "holds plain text", "data.chat.kind=auto"),
        (_conversations(3), ["data.chat.template="], "has no chat template", "template=chatml"),
    ],
)
def test_what_is_no_conversation_is_refused(
    make_plan: MakePlan, rows: list[Any], words: list[str], message: str, remedy: str
) -> None:
    """Each with what was found and what mends it."""
    with pytest.raises(ConfigError) as error:
        prepare(make_plan(rows, *words))
    assert message in error.value.message and remedy in str(error.value.remedy)


def test_refusals_of_a_template(make_plan: MakePlan, tmp_path: Path) -> None:
    """Roles that it refuses, and turns that it writes otherwise later."""
    refuses = tmp_path / "refuses.jinja"
    refuses.write_text("{{ raise_exception('System role not supported') }}")
    rewrites = tmp_path / "rewrites.jinja"
    rewrites.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    for path, message in (
        (refuses, "refuses a conversation of 3 messages (system, user, assistant)"),
        (rewrites, "answers cannot be told"),
        (broken, "is no template: line 1"),
    ):
        with pytest.raises(ConfigError) as error:
            prepare(make_plan(_conversations(3), template=str(path)))
        assert message in error.value.message


def test_shards_check_their_answers(make_plan: MakePlan) -> None:
    """A mask that was changed is found, and the data of another template is other data."""
    rows = _conversations(12)
    every = prepare(make_plan(rows, "data.chat.train_on=all"))
    prepared = prepare(plan := make_plan(rows))
    assert every.fingerprint["chat"] != prepared.fingerprint["chat"]
    assert every.directory != prepared.directory
    assert every.chat is not None and prepared.chat is not None
    assert every.chat.counts.counted > prepared.chat.counts.counted
    file = prepared.train[0].directory / "answers-00000.bin"
    raw = bytearray(file.read_bytes())
    raw[3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="has changed since it was written"):
        prepare(plan)
