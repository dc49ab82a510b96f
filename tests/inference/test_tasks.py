"""Questions are scored as one forward pass of each prompt with each answer would score them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.core.errors import ConfigError
from headrace.inference.load import open_model
from headrace.inference.tasks import FORMS, encode_pairs, read_task, score_tasks
from headrace.model.mask import Rows
from headrace.plan.technique import installed

CHOICES = [
    {"query": "The river bends ", "choices": ["to the mill", "up", "x" * 9], "gold": 1},
    {"query": "", "choices": ["water flows", "stone"], "gold": 0},
    {"query": "A mill stands by the river and " * 3, "choices": ["turns.", "is."], "gold": 0},
]
SCHEMAS = [
    {"context_options": ["A river", "The mill"], "continuation": "turns a wheel", "gold": 1},
    {"context_options": ["water", "a river of"], "continuation": "flows", "gold": 0},
]
CLOZES = [{"context": "the water flows", "continuation": "down"}]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def write(name: str, rows: list[Any]) -> Path:
        file = tmp_path_factory.mktemp("tasks") / f"{name}.jsonl"
        file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
        return file

    return write


def plain(build: Any, before: str, after: str) -> tuple[float, bool]:
    """Return nats and greediness of an answer by a forward pass of its own."""
    tokenizer, length = build.prepared.tokenizer, build.plan.data.sequence_length
    stripped = before.rstrip()
    whole, alone = tokenizer.encode_batch([before + after, stripped])
    count = len(whole) - len(alone)
    cut = [tokenizer.document_token, *alone.tolist(), *whole[len(alone) :].tolist()]
    ids = torch.tensor(cut)[-(length + 1) :]
    positions = torch.arange(len(ids) - 1)[None]
    hidden = build.model.hidden(ids[None, :-1], Rows(positions, None, None), None)
    logits = build.model.head.logits(hidden[0], build.model.unembedding).float()[-count:]
    targets = ids[-count:]
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return nats, bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("keys", [(), ("techniques.document_packing={}",)])
def test_scores_are_those_of_single_passes(
    train: Callable[..., Path], make: Callable[..., Path], keys: tuple[str, ...]
) -> None:
    build = open_model(train("data.sequence_length=32", *keys), installed())
    files = {"multiple choice": CHOICES, "schema": SCHEMAS, "cloze": CLOZES}
    tasks = [read_task(make(name, rows)) for name, rows in files.items()]
    assert [task.form for task in tasks] == [*FORMS]
    with torch.no_grad():
        scores = score_tasks(build, tasks, lambda *_: None)
        chosen, normal = [], []
        for row in CHOICES:
            nats = [plain(build, row["query"], " " + choice)[0] for choice in row["choices"]]
            costs = [n / len(choice) for n, choice in zip(nats, row["choices"], strict=True)]
            chosen.append(float(np.argmin(nats) == row["gold"]))
            normal.append(float(np.argmin(costs) == row["gold"]))
        fits = [
            float(
                np.argmin([plain(build, c, " " + r["continuation"])[0] for c in options])
                == r["gold"]
            )
            for r in SCHEMAS
            for options in [r["context_options"]]
        ]
        nats, greedy = plain(build, CLOZES[0]["context"], " down")
    choice, schema, cloze = scores
    assert choice.values == {"acc": np.mean(chosen), "acc_norm": np.mean(normal)}
    assert choice.errors["acc"] == pytest.approx(np.std(chosen, ddof=1) / math.sqrt(3))
    assert (choice.chance, choice.questions) == (pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3), 3)
    assert choice.shortened == 2 and choice.left_out == 0, "both choices of the long prompt"
    assert schema.values == {"acc": np.mean(fits)}
    assert cloze.values["acc"] == greedy and cloze.chance is None
    assert cloze.values["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)


def test_an_answer_is_cut_as_the_whole_is(train: Callable[..., Path]) -> None:
    """Check that blanks that end a prompt count to the answer."""
    tokenizer = open_model(train(), installed()).prepared.tokenizer
    ((ids, count), (bare, all_of_it)) = encode_pairs(
        tokenizer, [("the river ", "bends"), ("", " the river")]
    )
    assert tokenizer.decode(ids[1:-count].tolist()) == "the river"
    assert tokenizer.decode(ids[-count:].tolist()) == " bends"
    assert ids[0] == bare[0] == tokenizer.document_token and all_of_it == len(bare) - 1


def test_what_has_no_room_is_left_out_or_refused(
    train: Callable[..., Path], make: Callable[..., Path]
) -> None:
    build = open_model(train(), installed())
    long = {"query": "q", "choices": ["river " * 99, "x"], "gold": 0}
    (score,) = score_tasks(build, [read_task(make("some", [long, *CHOICES]))], lambda *_: None)
    assert (score.left_out, score.questions) == (1, 3)
    with pytest.raises(ConfigError, match="every question"):
        score_tasks(build, [read_task(make("none", [long]))], lambda *_: None)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1], "its keys are none"),
        ({"question": "q"}, "its keys are question"),
        ({"query": "q", "choices": ["a"], "gold": 0}, "2 to 100 choices"),
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, "gold = 2"),
        ({"query": "q", "choices": ["a", "b"], "gold": True}, "gold = True"),
        ({"query": "q", "choices": ["a", 1], "gold": 0}, "no text"),
        ({"query": "q", "choices": ["a", ""], "gold": 0}, "empty"),
        ({"context": "c", "continuation": ""}, "no text"),
    ],
)
def test_a_line_that_is_no_question_is_named(make: Callable[..., Path], row: Any, why: str) -> None:
    file = make("bad", [CHOICES[0], row])
    with pytest.raises(ConfigError, match=why) as told:
        read_task(file)
    assert f"line 2 of {file}" in told.value.message


def test_one_form_a_file_and_a_limit(make: Callable[..., Path]) -> None:
    file = make("mixed", [CHOICES[0], CLOZES[0]])
    with pytest.raises(ConfigError, match="the first line is"):
        read_task(file)
    assert len(read_task(file, limit=1).questions) == 1
