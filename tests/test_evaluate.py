"""What an evaluation counts where not every target does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace import evaluate as evaluation
from headrace.build import make_build
from headrace.core.plan import Plan
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.model.head import IGNORED
from headrace.parallel.world import World


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
