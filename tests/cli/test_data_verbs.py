"""Train a tokenizer, compare tokenizers and price a plan by the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.data.tokenizer import train_tokenizer

ENGLISH = "the old mill by the weir " * 40
RUSSIAN = "\u043c\u0435\u043b\u044c\u043d\u0438\u0446\u0430 \u0443 \u0440\u0435\u043a\u0438 " * 40
Call = Callable[..., Any]


def test_tokenizers_are_trained_compared_and_priced(call: Call) -> None:
    Path("texts").mkdir()
    Path("texts/en.txt").write_text(ENGLISH)
    Path("texts/ru.txt").write_text(RUSSIAN)
    train_tokenizer([ENGLISH], vocab=300).save("english.json")
    train = ("data", "tokenizer", "texts", "--vocab", "280", "--special", "<|user|>")
    made = call(*train)
    assert (made["vocab"], made["pattern"], made["file"]) == (280, "gpt4", "tokenizer.json")
    assert made["trained_on"]["text_bytes"] == made["trained_on"]["of_bytes"]
    counted = call(*train, "--learn-from", "all", "--to", "counted.json")
    assert counted["sha256"] == made["sha256"] and counted["trained_on"]["counted"] is True
    words = ("english.json", "tokenizer.json", "--text", "texts", "--output", "page.html")
    words += ("--plan", "demo", "--device-name", "H200")
    told = call("data", "fertility", *words)
    assert [text["name"] for text in told["texts"]] == ["en.txt", "ru.txt"]
    dear, cheap = told["costs"]
    assert dear["tokens"] > cheap["tokens"] and dear["steps"] >= cheap["steps"]
    assert cheap["relative_cost"] == 1.0 < dear["relative_cost"]
    assert dear["context_bytes"] < cheap["context_bytes"]
    assert dear["tokens"] == told["all"]["tokens"]["english.json"] + 2  # a document begins with one
    assert dear["hours"] > 0
    page = Path("page.html").read_text()
    assert "english.json" in page and "ru.txt" in page and f"{dear['relative_cost']:.2f}x" in page


def test_both_read_text_as_the_settings_of_data_say(call: Call) -> None:
    rows = b'{"body": "the old mill by the weir"}\n{"body": "caf\xe9 by the river"}\n'
    Path("rows.jsonl").write_bytes(rows)
    settings = ("data.text_key=body", "data.invalid_utf8=replace")
    refused = call("data", "tokenizer", "rows.jsonl", settings[1], "--vocab", "270", code=2)
    assert refused["remedy"] == settings[0], "which the same command takes"
    made = call("data", "tokenizer", "rows.jsonl", *settings, "--vocab", "270")
    assert made["vocab"] == 270 and made["left_out"][0]["reason"] == "not_utf_8"
    told = call("data", "fertility", "tokenizer.json", "--text", "rows.jsonl", *settings)
    assert told["all"]["documents"] == 2
