"""Compare tokenizers on texts whose tokens, words and bytes are known, and price a plan by them."""

import json
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.data.fertility import measure, total
from headrace.data.tokenizer import Tokenizer, train_tokenizer

ENGLISH = "the old mill by the weir " * 40
RUSSIAN = "\u043c\u0435\u043b\u044c\u043d\u0438\u0446\u0430 \u0443 \u0440\u0435\u043a\u0438 " * 40
CHINESE = "\u6c34\u8f66\u548c\u6cb3\u6d41" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in (("en.txt", ENGLISH), ("ru.txt", RUSSIAN), ("zh.txt", CHINESE)):
        (texts / name).write_text(text)
    train_tokenizer([ENGLISH], vocab=300).save(tmp_path / "english.json")
    train_tokenizer([ENGLISH, RUSSIAN, CHINESE], vocab=400).save(tmp_path / "all.json")
    return tmp_path


def test_every_file_is_a_column_and_scripts_are_told_apart(folder: Path) -> None:
    names = {"english": folder / "english.json", "all": folder / "all.json"}
    tokenizers = {name: Tokenizer.load(path) for name, path in names.items()}
    groups = measure(tokenizers, [str(folder / "texts")])
    assert [group.name for group in groups] == ["en.txt", "ru.txt", "zh.txt"]
    for group, text in zip(groups, (ENGLISH, RUSSIAN, CHINESE), strict=True):
        assert (group.text_bytes, group.characters) == (len(text.encode()), len(text))
        for name, tokenizer in tokenizers.items():
            (ids,) = tokenizer.encode_batch([text])
            rates = group.rates(name)
            assert rates["tokens_per_character"] == len(ids) / len(text)
            assert rates["tokens_per_byte"] == len(ids) / len(text.encode())
            words = None if text is CHINESE else len(text.split())
            assert rates["tokens_per_word"] == (words and len(ids) / words)
    english, russian, _ = groups
    for name in ("tokens_per_word", "tokens_per_character"):
        assert english.rates("english")[name] < russian.rates("english")[name]
        assert russian.rates("all")[name] < russian.rates("english")[name]
    whole = total(groups)
    assert whole.tokens == {n: sum(g.tokens[n] for g in groups) for n in names}
    scripts = measure(tokenizers, [str(folder / "texts")], by="script")
    assert [group.name for group in scripts] == ["Cyrillic", "Han", "Latin"]
    cut = measure(tokenizers, [str(folder / "texts")], most_bytes=1)  # whole documents all the same
    assert [group.text_bytes for group in cut] == [group.text_bytes for group in groups]
    rows = [json.dumps({"text": ENGLISH}) for _ in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (part,) = measure(tokenizers, [str(folder / "rows.jsonl")], most_bytes=1)
    assert not part.is_whole and part.documents == 1
    (folder / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="gives no text"):
        measure(tokenizers, [str(folder / "empty.txt")])
