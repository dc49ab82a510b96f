"""Sum the loss of texts behind their prompts under a trained run's model, each read by itself.

What scores documents and what scores answers both come to this: rows whose targets count from some
place on, and a number that each row's loss is added to. The loss is that of an evaluation, in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.progress import OnProgress
from headrace.data.loader import collate
from headrace.data.rows import IGNORE, Row
from headrace.model.head import IGNORED, Vocabulary
from headrace.train.evaluate import LossByPlace

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass, padding included."""


@dataclass(frozen=True)
class Continuation:
    """Hold tokens that one row begins with.

    Args:
        ids: int [n], at least two and at most one more than a sequence of training has.
        first: the first of them that is a target, at least 1; all after it are.
        number: what its loss is added to.
    """

    ids: np.ndarray
    first: int
    number: int


@dataclass(frozen=True)
class ContinuationLosses:
    """Hold sums by number: the loss in nats, the targets, and those that are not the likeliest."""

    nats: list[float]
    targets: list[int]
    missed: list[int]


@torch.no_grad()
def sum_losses(
    build: Build,
    continuations: Sequence[Continuation],
    numbers: int,
    progress: OnProgress = lambda description, done, total: None,
) -> ContinuationLosses:
    """Return the loss of continuations, added up by their numbers.

    Args:
        build: a run that `open_model` opened.
        continuations: in any order.
        numbers: how many sums there are; each continuation's number is below it.
        progress: called with ("scoring", continuations that are done, all).
    """
    length, padding = build.plan.data.sequence_length, build.prepared.tokenizer.document_token
    sums = LossByPlace(range(1, numbers + 1), build.device)
    missed = torch.zeros(numbers, dtype=torch.int64, device=build.device)

    def objective(
        logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
    ) -> Tensor:
        missed_N = (vocabulary.argmax(logits_NV) != targets_N) & (targets_N != IGNORED)
        missed.index_add_(0, extras["bin"], missed_N.long())
        return sums.objective(logits_NV, targets_N, extras, vocabulary)

    left = sorted(continuations, key=lambda one: -len(one.ids))  # so that little is padded
    scale = torch.ones((), device=build.device)
    while left:
        progress("scoring", len(continuations) - len(left), len(continuations))
        # Few widths, each of which every model takes: the length of training, or a power of two.
        width = min(length, 1 << (len(left[0].ids) - 2).bit_length())
        now, left = left[: (most := max(1, TOKENS_AT_ONCE // width))], left[most:]
        rows = [_row(one, width, padding) for one in now]
        work = build.place(build, collate(rows, segments=build.mask.document))
        number_B1 = torch.tensor(
            [[continuation.number] for continuation in now], device=build.device
        )
        number_BT = number_B1.expand(work.targets_BT.shape)
        work = work._replace(extras={**(work.extras or {}), "bin": number_BT.reshape(-1)})
        build.engine(build, [work], objective, scale)
    return ContinuationLosses(sums.nats.tolist(), sums.targets.tolist(), missed.tolist())


def _row(continuation: Continuation, width: int, padding: int) -> Row:
    """Return a row of `width` inputs that begins with a continuation."""
    count = len(continuation.ids)
    ids = np.full(width + 1, padding, dtype=np.int64)
    ids[:count] = continuation.ids
    targets = np.full(width, IGNORE, dtype=np.int64)
    targets[continuation.first - 1 : count - 1] = ids[continuation.first : count]
    return Row(ids, np.empty(0, dtype=np.int64), targets)
