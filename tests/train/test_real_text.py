"""On real text, where a folder is given: make test DATA=DIR."""

import json
from collections.abc import Callable
from pathlib import Path

from headrace.data.ingest import prepare
from headrace.plan.plan import Plan


def test_a_tokenizer_compresses_real_text_and_a_model_learns_from_it(
    real_text: Path, tiny_plan: Callable[..., Plan], train: Callable[..., Path]
) -> None:
    source = f"data.sources={real_text}"
    prepared = prepare(tiny_plan(source, "data.vocab=2048"))
    tokens = sum(s.tokens for s in prepared.train)
    text_bytes = sum(s.text_bytes for s in prepared.train)
    assert text_bytes / tokens > 2.5
    run = train(source, "data.vocab=2048", "goal.steps=60", "optimizer.lr=1e-2")
    rows = (run / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(row)["loss"] for row in rows]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
