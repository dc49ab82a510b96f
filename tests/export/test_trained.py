"""A checkpoint that was trained here, in transformers: the same greedy text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


def test_a_trained_run_generates_the_same_greedy_text_in_transformers(
    tmp_path: Path, plan_file: Path, run_cli: Callable[..., Any]
) -> None:
    plan = [str(plan_file), "model.qk_norm=true", "goal.steps=20", "name=trained"]
    assert run_cli(tmp_path, "train", *plan).code == 0
    ended = run_cli(tmp_path, "export", "trained", "--to", "hf", "--output", "out")
    assert ended.code == 0
    ours = run_cli(
        tmp_path, "sample", "trained", "--temperature", "0", "--tokens", "12", "--prompt", "the",
        "--json",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    prompt = [tokenizer.bos_token_id, *tokenizer("the", add_special_tokens=False).input_ids]
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    new = [i for i in theirs[0, len(prompt) :].tolist() if i != tokenizer.eos_token_id]
    assert json.loads(ours.out)["text"] == tokenizer.decode(new)
