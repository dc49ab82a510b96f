"""Compute the loss of every document under a trained run's model: how hard its text is.

Each document is read by itself, from its document token on, in sequences of at most the run's own
length. So a score depends on its document alone, and scoring can go on after any of them. It is the
loss that an evaluation computes, per document instead of per set.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.data.quality.scores import ScoreDocuments
from headrace.data.shards import Shards
from headrace.data.tokenizer import Tokenizer
from headrace.inference.continuations import Continuation, sum_losses
from headrace.inference.load import checkpoint_of, open_model
from headrace.plan.technique import installed
from headrace.train.checkpoint import Saved

DOCUMENTS_AT_ONCE = 256
"""Documents that are cut into sequences together."""


def identity(run: Path) -> str:
    """Return the digest of the checkpoint by which a run scores documents.

    Raises:
        ConfigError: it is no run, or has no checkpoint.
        RunError: the checkpoint is damaged.
    """
    return str(Saved(checkpoint_of(run), verify=False).values["seal"])[:16]


def losses(run: Path, tokenizer: Tokenizer) -> ScoreDocuments:
    """Return what computes the loss of each document, in nats per token.

    Args:
        run: the folder of the run that scores.
        tokenizer: that of the documents.

    Raises:
        ConfigError: the run has another tokenizer.
    """
    build = open_model(run, installed())
    own = build.prepared.tokenizer
    if own.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"the run {run} has another tokenizer (sha256 {own.fingerprint[:12]}) than the text "
            f"that it is to score ({tokenizer.fingerprint[:12]})",
            f"data.tokenizer={shell(run / 'tokenizer.json')}",
        )

    def scores(shards: Shards, first: int) -> Iterator[float]:
        for begin in range(first, shards.documents, DOCUMENTS_AT_ONCE):
            count = min(DOCUMENTS_AT_ONCE, shards.documents - begin)
            yield from _losses(build, shards, shards.bounds(begin, count))

    return scores


def _losses(build: Build, shards: Shards, bounds: np.ndarray) -> list[float]:
    """Return the loss of each document that these bounds enclose, in nats per token."""
    length = build.plan.data.sequence_length
    continuations = [
        Continuation(shards.read(at, min(length + 1, end - at)), 1, number)
        for number, (begin, end) in enumerate(pairwise(bounds.tolist()))
        for at in range(begin, end - 1, length)
    ]
    sums = sum_losses(build, continuations, len(bounds) - 1)
    return [n / max(1, targets) for n, targets in zip(sums.nats, sums.targets, strict=True)]
