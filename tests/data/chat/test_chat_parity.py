"""Chat templates, tokens and masks are those of transformers and trl, for six families."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import (
    NAMES,
    TEMPLATES,
    chat_tokenizer,
    conversations,
    expected,
    template,
)

from headrace.data.chat.encode import ChatEncoder
from headrace.plan.chat import ChatConfig


@pytest.mark.parametrize("family", TEMPLATES)
def test_text_tokens_and_masks_are_those_of_transformers_and_trl(family: str) -> None:
    """They were computed by both, and lie beside this test."""
    tokenizer = chat_tokenizer()
    encoder = ChatEncoder(ChatConfig(), template(family), tokenizer)
    for given, wanted in zip(conversations(family), expected()[family], strict=True):
        messages, tools = given["messages"], given.get("tools")
        prompt = encoder.template.render(messages[:-1], tools, add_generation_prompt=True).text
        assert encoder.template.render(messages, tools).text == wanted["text"]
        assert prompt == wanted["prompt"]
        (made,) = encoder.encode([json.dumps({"kind": "messages", **given})])
        assert made is not None
        assert made.ids.tolist() == wanted["ids"]
        assert "".join(map(str, made.counted)) == wanted["mask"]


@pytest.mark.slow
def test_expected_is_what_transformers_and_trl_make(tmp_path: Path) -> None:
    """`trl` masks a prompt's answer; the masks of all turns are those of all prompts together."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = chat_tokenizer()
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **NAMES)
    theirs.pad_token = NAMES["eos_token"]
    made: dict[str, list[dict[str, Any]]] = {}
    for family, text in TEMPLATES.items():
        theirs.chat_template, made[family] = text, []
        for given in conversations(family):
            messages, tools = given["messages"], given.get("tools")
            rendered = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
            prompt = theirs.apply_chat_template(
                messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
            )
            ids, mask = _of_trl(theirs, messages, tools, marks="{% generation" in text)
            row = {"text": rendered, "prompt": prompt, "ids": ids}
            made[family].append({**row, "mask": "".join(map(str, mask))})
    assert made == expected()


def _of_trl(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, marks: bool
) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and which of them `trl` trains on."""
    if marks:
        return _rows_of_trl(tokenizer, [{"messages": messages}], assistant_only_loss=True)[0]
    answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    rows = [{"prompt": messages[:i], "completion": messages[i : i + 1]} for i in answers]
    made = _rows_of_trl(tokenizer, [row | ({"tools": tools} if tools else {}) for row in rows])
    ids = made[-1][0]
    mask = np.zeros(len(ids), dtype=int)
    for own_ids, own in made:
        same = [a == b for a, b in zip(own_ids, ids, strict=False)]
        shared = same.index(False) if False in same else len(same)
        mask[:shared] |= np.array(own[:shared])  # Phi-3 ends any conversation with one more token
    return ids, mask.tolist()


def _rows_of_trl(
    tokenizer: Any, rows: list[dict[str, Any]], **options: Any
) -> list[tuple[list[int], list[int]]]:
    import tempfile

    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl import SFTConfig, SFTTrainer

    config = GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_layer=1, n_head=1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, use_cpu=True, report_to=[], max_length=None, bf16=False, **options
        )
        trainer = SFTTrainer(
            GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        made = []
        for row in trainer.train_dataset:
            if (labels := row.get("labels")) is not None:
                mask = [int(label != -100) for label in labels]
            else:
                mask = row.get("assistant_masks") or row["completion_mask"]
            made.append((list(row["input_ids"]), [int(one) for one in mask]))
        return made
