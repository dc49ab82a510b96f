"""Needles are found by the number that a plain forward pass has for the likeliest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.assemble.sockets import Build
from headrace.inference.load import open_model
from headrace.inference.needle import CANDIDATES, DEPTHS, find_needles, needle_row
from headrace.model.head import Vocabulary
from headrace.model.mask import Rows
from headrace.plan.technique import installed

LENGTH = 128
QUESTIONS = 6


Train = Callable[..., Path]


def copying(vocab: int, *, knows: bool) -> Any:
    """Return an engine that predicts what followed a row's last five tokens before, or nothing."""

    def engine(build: Build, micros: Any, objective: Any, scale: Any) -> Any:
        (work,) = micros
        logits_BTV = torch.zeros(*work.ids_BT.shape, vocab)
        for row_TV, ids_T in zip(logits_BTV, work.ids_BT, strict=True):
            count = len(ids_T) - 1
            seen = [t for t in range(4, count) if torch.equal(ids_T[t - 4 : t + 1], ids_T[-5:])]
            if knows:
                row_TV[-1, ids_T[seen[-1] + 1]] = 1.0
        return objective(logits_BTV.flatten(0, 1), work.targets_BT.flatten(), None, Vocabulary())

    return engine


def test_a_row_holds_one_needle_that_a_model_which_copies_finds(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = open_model(train("goal.steps=1"), installed(), with_data=True)
    tokenizer = build.prepared.tokenizer
    places = []
    for depth in DEPTHS:
        row = needle_row(build, LENGTH, depth, 3, seed=1)
        assert row is not None and len(row.ids) == LENGTH
        assert len({*row.candidates.tolist()}) == CANDIDATES
        text = tokenizer.decode(row.ids)
        first, last = text.index("The number of the"), text.rindex("The number of the")
        assert first < last and text.count("The number of the") == 2
        number = text[first:].partition(" is ")[2].partition(".")[0]
        assert number.isdigit() and int(number[0]) == row.right
        answer = tokenizer.decode([row.candidates[row.right]]).strip()
        assert answer == "" or number.startswith(answer)
        places.append(first)
        same = needle_row(build, LENGTH, depth, 3, seed=1)
        assert same is not None and np.array_equal(same.ids, row.ids)
    assert places == sorted(places) and places[0] < 3, places
    assert needle_row(build, 32, 0.5, 0, seed=1) is None
    for knows in (True, False):
        monkeypatch.setattr(build, "engine", copying(tokenizer.vocab, knows=knows))
        found = find_needles(build, [LENGTH], questions=QUESTIONS)
        assert {cell.share for cell in found} == {float(knows)}, "a tie finds none"


@pytest.mark.parametrize("keys", [(), ("techniques.document_packing={}",)])
def test_the_likeliest_is_that_of_a_plain_forward_pass(train: Train, keys: tuple[str, ...]) -> None:
    build = open_model(train("goal.steps=1", *keys), installed(), with_data=True)
    cells = find_needles(build, [32, LENGTH], questions=QUESTIONS, seed=5)
    assert [(cell.length, cell.depth) for cell in cells] == [(LENGTH, depth) for depth in DEPTHS]
    for cell in cells:
        right = 0
        for number in range(QUESTIONS):
            row = needle_row(build, LENGTH, cell.depth, number, 5)
            assert row is not None
            ids, positions = torch.tensor(row.ids)[None], torch.arange(LENGTH)[None]
            with torch.no_grad():
                hidden = build.model.hidden(ids, Rows(positions, None, None), None)
                logits_V = build.model.head.logits(hidden[0, -1:], build.model.unembedding)[0]
            right += int(logits_V[torch.tensor(row.candidates)].argmax()) == row.right
        assert (cell.right, cell.questions) == (right, QUESTIONS)
        assert cell.to_dict()["share"] == right / QUESTIONS
