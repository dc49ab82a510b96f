"""Whoever learns a BPE learns the same, in bounded memory, and no text spells a special token."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import regex
import rustbpe
import tokenizers
from facts import tells
from test_tokenizer import AWKWARD
from tokenizers import pre_tokenizers

from headrace.core.errors import ConfigError
from headrace.data import tokenizer
from headrace.data.bpe import PATTERNS, WordCounts, learn_from_texts
from headrace.data.ingest import prepare
from headrace.data.lossless import _LONG_RUN, with_limited_runs
from headrace.data.merges import learn_from_counts
from headrace.data.tokenizer import Tokenizer, train_tokenizer
from headrace.plan.plan import Plan

BLANKS = "a  b\t\tc \t d\n\n  e\r\n\r\nf   \n g\u00a0 h\u3000\u3000i  !?  12345  \x1c\x1c j"
TEXTS = [
    *AWKWARD,
    BLANKS,
    f"x{BLANKS}  " * 3,
    "aaaa aaa aa banana bandana " * 9,
    "don't DON'T " * 5,
]
MakePlan = Callable[..., Plan]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_counts_and_cut_texts_give_the_merges_of_the_whole_pattern(pattern: str) -> None:
    theirs = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    theirs.train_from_iterator(iter(TEXTS), 500, pattern=PATTERNS[pattern])
    wanted = [bytes(token) for token, _ in theirs.get_mergeable_ranks()]
    assert [*learn_from_texts(TEXTS, 500 - 256, pattern)] == wanted
    counts = WordCounts(pattern)
    for text in TEXTS:
        counts.add(text)
    assert [*learn_from_counts(counts.words, 500 - 256)] == wanted
    assert counts.occurrences == sum(counts.words.values()) and not counts.left_out
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), behavior="isolated")
    for text in TEXTS:
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert regex.findall(PATTERNS[pattern], text) == words
    if pattern == "gpt2":
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        bounds = [[place for _, place in one.pre_tokenize_str(BLANKS)] for one in (split, spell)]
        assert bounds[0] == bounds[1]


def test_numbers_fall_apart_as_their_models_have_them() -> None:
    found = {name: regex.findall(pattern, "it's 12345") for name, pattern in PATTERNS.items()}
    assert found["gpt2"] == ["it", "'s", " 12345"]
    assert found["gpt4"] == ["it", "'s", " ", "123", "45"]
    assert found["qwen"] == ["it", "'s", " ", *"12345"]
    assert found["nanochat"] == ["it", "'s", " ", "12", "34", "5"]


def test_the_rarest_words_are_left_out_and_counted() -> None:
    text = " ".join(f"word{n} the mill" for n in range(400))
    counts = [WordCounts("gpt4", most=64) for _ in range(2)]
    for each in counts:
        for piece in (text, "the mill " * 50, text):
            each.add(piece)
    first, second = counts
    assert [*first.words.items()] == [*second.words.items()]
    assert len(first.words) <= 64 and first.left_out > 0
    assert first.left_out + sum(first.words.values()) == first.occurrences
    assert first.words[" mill"] == 2 * 400 + 50
    assert first.words.most_common(1)[0][0] == " the" or first.words[" the"] > 800
    assert b" mill" in learn_from_counts(first.words, 40)
    huge = WordCounts("gpt4")
    huge.words.update({"ab": 1 << 62, "cd": (1 << 62) + 1})
    assert [*learn_from_counts(huge.words, 1)][-1] == b"cd"


def test_long_runs_are_found_where_a_look_at_every_character_finds_them() -> None:
    random = Random(0)
    for size in (500, 511, 512, 513, 520, 2000):
        for fill in ("x", " ", "\n"):
            for _ in range(20):
                before = "".join(random.choices("ab \n", k=random.randrange(40)))
                text = f"{before}{fill * size}a b{before}"
                parts = [*with_limited_runs([text])]
                assert "".join(parts) == text
                assert not any(_LONG_RUN.search(part) for part in parts)
                assert (len(parts) > 1) == bool(_LONG_RUN.search(text))


CHAT = ("<|user|>", "<|assistant|>")
SPELLED = "a<|user|>b <|assistant|> <|endoftext|>\n<|user|><|user|>"


@pytest.mark.parametrize("from_text", [False, True])
def test_text_becomes_a_special_token_only_where_it_was_asked_for(from_text: bool) -> None:
    made = train_tokenizer(TEXTS, vocab=300, special_tokens=CHAT, special_from_text=from_text)
    assert made.vocab == 300 and made.document_token == 297
    again = Tokenizer(made.text)
    for each in (made, again):
        (ids,) = each.encode_batch([SPELLED])
        control = [i for i in ids.tolist() if i >= 297]
        assert control == ([298, 299, 298, 298] if from_text else [])
        assert each.decode(ids) == SPELLED and not each.loses
        assert each.bytes_of(ids) == len(SPELLED.encode())
        each.check_document(SPELLED, ids, is_validation=True)
    assert [again.decode([i]) for i in (298, 299)] == [*CHAT]
    assert (again.token_bytes[:256] == 1).all()


@pytest.mark.parametrize("name", ["", "a", "a b", "\u00e4\u00e4", "<|endoftext|>", "<|x|>"])
def test_special_tokens_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_tokenizer(["a"], vocab=300, special_tokens=("<|x|>", name))
    assert tells(caught.value.message, "data.special_tokens", ascii(name))
    assert caught.value.remedy.only_override == 'data.special_tokens=["<|x|>"]'
    with pytest.raises(ConfigError, match="256 bytes and 3 special tokens") as caught:
        train_tokenizer(["a"], vocab=258, special_tokens=CHAT)
    assert caught.value.remedy.only_override == "data.vocab=259"


def test_a_plan_trains_on_a_sample_or_counts_all_and_says_which(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{tmp_path}/a.jsonl"
    rows = [json.dumps({"text": f"day {n} at the mill <|user|> by the weir"}) for n in range(200)]
    with open(source, "w") as file:
        file.write("\n".join(rows))
    told: list[str] = []
    sampled, counted, chat = (
        prepare(make_plan(sources=source, **keys), progress=lambda what, *_: told.append(what))
        for keys in (
            {},
            {"tokenizer_text": "all"},
            {"special_tokens": ["<|user|>"], "tokenizer_pattern": "gpt2"},
        )
    )
    assert len({each.directory for each in (sampled, counted, chat)}) == 3
    assert "counting words" in told
    assert sampled.tokenizer.fingerprint == counted.tokenizer.fingerprint  # a sample of everything
    assert sampled.trained_on and counted.trained_on
    training = sum(shards.text_bytes for shards in sampled.train)
    assert sampled.trained_on.text_bytes == counted.trained_on.text_bytes == training
    assert tells(sampled.trained_on.format(), "sample", "%", "with rustbpe")
    assert tells(counted.trained_on.format(), "all", counted.trained_on.words)
    assert counted.to_dict(0.05)["trained_on"]["counted"] is True
    assert not any((shards.read(0, 200) == 299).any() for shards in chat.train)
    brought = {"tokenizer": str(sampled.directory / "tokenizer.json"), "tokenizer_pattern": "gpt4"}
    with pytest.raises(ConfigError, match="brought along"):
        prepare(make_plan(sources=source, **brought))
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    alone = prepare(make_plan(sources=source, directory=str(tmp_path / "alone")))
    assert alone.trained_on and tells(alone.trained_on.format(), "sample", "without rustbpe")
    assert alone.tokenizer.fingerprint == sampled.tokenizer.fingerprint


def test_counts_in_the_place_of_rustbpe_leave_no_word_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the extra package makes the same tokenizer."""

    @dataclass
    class FewCounts(WordCounts):
        """Count few different words where nobody asks for more."""

        most: int = 4

    monkeypatch.setattr(tokenizer, "WordCounts", FewCounts)
    made = [train_tokenizer(TEXTS, vocab=400, trainer=kind) for kind in ("rustbpe", "counts")]
    assert made[0].fingerprint == made[1].fingerprint
