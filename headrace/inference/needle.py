"""Test whether a model finds a sentence that stands far back in what it reads, without sampling.

A row of validation text gets one sentence with a number, the needle, at some depth, and ends with
the beginning of the same sentence. The model finds the needle where the right number is likelier
than each of nine wrong ones, so chance is 0.1. The numbers differ in their first digit, hence in
their first token, and one forward pass compares them all: what is likelier by its first token is
taken. Everything is drawn by a key of seed, length, depth and question, so two models are asked
exactly the same.

Source: the needle test of G. Kamradt, github.com/gkamradt/LLMTest_NeedleInAHaystack, by likelihood
in the place of generated answers. The haystack is cut out of the text as it is, documents of a row
included: nothing hides the needle from the question.

Shapes: B rows, T tokens, V vocabulary, C candidates.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.progress import OnProgress
from headrace.data.loader import collate
from headrace.data.rows import IGNORE, Row
from headrace.data.tokenizer import Tokenizer
from headrace.inference.continuations import TOKENS_AT_ONCE
from headrace.model.head import IGNORED, Vocabulary

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Places of the needle as shares of the haystack: 0 is furthest from the question."""
CANDIDATES = 10
"""Numbers that are compared, one for each first digit."""
QUESTIONS = 8
"""Questions of a cell, unless more are asked for."""
PLACES = ("mill", "river", "bridge", "harbour", "station", "library", "garden", "castle")
"""Words that needles are about."""


@dataclass(frozen=True)
class NeedleCell:
    """Hold how often needles were found at one depth of rows of one length.

    Args:
        length: tokens of a row, the question included.
        depth: the needle's place as a share of the haystack.
        right: questions of which the right number is the likeliest.
        questions: all that were asked.
    """

    length: int
    depth: float
    right: int
    questions: int

    @property
    def share(self) -> float:
        """Return the share of the questions that were answered right; chance is 0.1."""
        return self.right / self.questions

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "share": self.share}


@dataclass(frozen=True)
class NeedleRow:
    """Hold a row that ends in a question.

    Args:
        ids: int64 [T], what the model reads.
        candidates: int64 [C], the first token of each number.
        right: the index of the right one.
    """

    ids: np.ndarray
    candidates: np.ndarray
    right: int


def needle_row(
    build: Build, length: int, depth: float, question: int, seed: int
) -> NeedleRow | None:
    """Return a row of `length` tokens; None where needle and question alone are longer.

    Args:
        build: a run with its validation text, of at least `length` tokens.
        length: tokens of the row.
        depth: the needle's place, from 0 to 1.
        question: its number.
        seed: draws other haystacks and numbers.
    """
    draw = random.Random(f"{seed} {length} {depth:g} {question}")
    place, right = draw.choice(PLACES), draw.randrange(CANDIDATES)
    numbers = [f"{digit}{draw.randrange(100):02d}" for digit in range(CANDIDATES)]
    asked = f"\nThe number of the {place} is"
    tokenizer, text = build.prepared.tokenizer, build.prepared.validation
    needle_ids = tokenizer.encode_batch([f"{asked} {numbers[right]}.\n"])[0].astype(np.int64)
    asked_ids, candidates = _candidates(tokenizer, [f"{asked} {number}" for number in numbers])
    room = length - len(needle_ids) - len(asked_ids)
    if room < 1:
        return None
    hay_ids = text.read(draw.randrange(text.tokens - room + 1), room)
    before = round(depth * room)
    ids = np.concatenate([hay_ids[:before], needle_ids, hay_ids[before:], asked_ids])
    return NeedleRow(ids, candidates, right)


def _candidates(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that all texts begin with, and the next token of each, both int64."""
    ids = [one.astype(np.int64) for one in tokenizer.encode_batch(texts)]
    most = min(map(len, ids)) - 1
    alike = next((at for at in range(most) if len({int(one[at]) for one in ids}) > 1), most)
    return ids[0][:alike], np.array([one[alike] for one in ids])


@torch.no_grad()
def find_needles(
    build: Build,
    lengths: Sequence[int],
    *,
    questions: int = QUESTIONS,
    seed: int = 0,
    progress: OnProgress = lambda description, done, total: None,
) -> list[NeedleCell]:
    """Return how often the model finds needles, by length and depth.

    Args:
        build: a run with its validation text.
        lengths: tokens of rows; one that holds no needle and question has no cells.
        questions: of each cell.
        seed: draws other haystacks and numbers.
        progress: called with ("finding needles", cells that are done, all).
    """
    cells = []
    asked = [(length, depth) for length in lengths for depth in DEPTHS]
    for done, (length, depth) in enumerate(asked):
        progress("finding needles", done, len(asked))
        rows = [
            row
            for number in range(questions)
            if (row := needle_row(build, length, depth, number, seed)) is not None
        ]
        if rows:
            right = sum(_right(build, rows))
            cells.append(NeedleCell(length, depth, right, len(rows)))
    progress("finding needles", len(asked), len(asked))
    return cells


def _right(build: Build, rows: Sequence[NeedleRow]) -> Iterator[int]:
    """Yield for rows of one length how many of those that are read together are answered right."""
    most = max(1, TOKENS_AT_ONCE // len(rows[0].ids))
    scale = torch.ones((), device=build.device)
    for first in range(0, len(rows), most):
        now = rows[first : first + most]
        candidates_BC = torch.tensor(np.stack([row.candidates for row in now]), device=build.device)
        right_B1 = torch.tensor([[row.right] for row in now], device=build.device)
        count = torch.zeros((), dtype=torch.int64, device=build.device)

        def objective(
            logits_NV: Tensor,
            targets_N: Tensor,
            extras: Any,
            vocabulary: Vocabulary,
            candidates_BC: Tensor = candidates_BC,
            right_B1: Tensor = right_B1,
            count: Tensor = count,
        ) -> Tensor:
            """Count the rows whose right number is likelier than all others; ties are wrong."""
            asked_BV = logits_NV[targets_N != IGNORED]
            value_BC = torch.stack([vocabulary.pick(asked_BV, c_B) for c_B in candidates_BC.T], -1)
            right_B = value_BC.gather(1, right_B1)
            count.add_(((value_BC >= right_B).sum(-1) == 1).sum())
            return logits_NV.new_zeros(())

        made = [_as_row(row) for row in now]
        work = build.place(build, collate(made, segments=build.mask.document))
        build.engine(build, [work], objective, scale)
        yield int(count)


def _as_row(row: NeedleRow) -> Row:
    """Return the row with one target, the right number behind the last token."""
    answer = row.candidates[row.right]
    targets = np.full(len(row.ids), IGNORE, dtype=np.int64)
    targets[-1] = answer
    return Row(np.append(row.ids, answer), np.empty(0, dtype=np.int64), targets)
