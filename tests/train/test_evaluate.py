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
