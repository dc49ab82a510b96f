"""Two trainers and two encoders give one meaning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rustbpe
import tiktoken
import tokenizers
from facts import in_order
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.data.bpe import PATTERNS, WordCounts
from headrace.data.lossless import RUN_CHARACTERS
from headrace.data.sources import read_documents
from headrace.data.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    open_tokenizer,
    train_tokenizer,
)

AWKWARD = [
    "",
    " ",
    "\x00",
    "plain words, and 12345 numbers: don't",
    "tabs\tand\r\n\r\n   lines  \n",
    "a<|endoftext|>b<|endoftext|>",
    "\u00fcml\u00e4ut \u4e2d\u6587 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0001 \U0001f469\u200d\U0001f680 \ufffd",
    "\u017f'\u017f \u0130 \u2028 \u0085 \u3000x",
    "=" * 300 + " " * 300 + "x",
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [d.text for d in read_documents("stdlib") if d.origin.startswith("json/")]


@pytest.fixture(scope="module", params=["rustbpe", "counts"])
def tokenizer(request: pytest.FixtureRequest, texts: list[str]) -> Tokenizer:
    return train_tokenizer(texts, vocab=600, trainer=request.param)


def listed(encoded: list[np.ndarray]) -> list[list[int]]:
    return [ids.tolist() for ids in encoded]


def test_text_survives_and_bytes_are_counted(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert (tokenizer.vocab, tokenizer.document_token) == (600, 599)
    for text, ids in zip(
        [*AWKWARD, *texts], tokenizer.encode_batch([*AWKWARD, *texts]), strict=True
    ):
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.document_token not in ids
    assert tokenizer.token_bytes[tokenizer.document_token] == 0
    assert tokenizer.decode([tokenizer.document_token]) == END_OF_TEXT
    assert (tokenizer.token_bytes[:256] == 1).all()


def test_tiktoken_and_tokenizers_agree(tokenizer: Tokenizer, texts: list[str]) -> None:
    """They agree on every character of the first three planes too, beside letters and digits."""
    characters = [chr(c) for c in range(0x30000) if not 0xD800 <= c < 0xE000]
    runs = ["".join(characters[i : i + 97]) for i in range(0, len(characters), 97)]
    mixed = ["".join(f"a{c} {c}1{c}\n" for c in run) for run in runs[::4]]
    everything = [*AWKWARD, *texts, *runs, *mixed]
    assert tokenizer._fast is not None
    fast = tokenizer.encode_batch(everything)
    assert listed(fast) == listed(tokenizer._encode_slowly(everything))


def test_a_run_of_blanks_that_tiktoken_refuses(tokenizer: Tokenizer) -> None:
    text = " " * 1_500_000 + "x"
    assert tokenizer._fast is not None
    with pytest.raises(ValueError, match="stack"):
        tokenizer._fast.encode_to_numpy(text)
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text


def test_the_saved_file_is_the_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    again = open_tokenizer(str(tmp_path))
    assert again.fingerprint == tokenizer.fingerprint
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert [theirs.encode(t).ids for t in AWKWARD] == listed(tokenizer.encode_batch(AWKWARD))


def test_rustbpe_says_the_same_as_our_copy_of_it(texts: list[str]) -> None:
    theirs = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    theirs.train_from_iterator(iter(texts), 599, pattern=PATTERNS["nanochat"])
    ours = train_tokenizer(texts, vocab=600, trainer="rustbpe")
    everything = [*AWKWARD, *texts]
    assert [theirs.encode(t) for t in everything] == listed(ours.encode_batch(everything))


def test_training_is_repeatable_and_stops_when_nothing_is_left(texts: list[str]) -> None:
    for trainer in ("rustbpe", "counts"):
        twice = {train_tokenizer(texts, vocab=500, trainer=trainer).fingerprint for _ in range(2)}
        assert len(twice) == 1
        assert 257 < train_tokenizer(["abab abab"], vocab=500, trainer=trainer).vocab < 300
    assert train_tokenizer(["abc"], vocab=257).vocab == 257
    with pytest.raises(ConfigError, match="no room for 256 bytes"):
        train_tokenizer(texts, vocab=256)


def test_rustbpe_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rustbpe", None)
    assert train_tokenizer(["aa aa"], vocab=300).vocab > 257
    with pytest.raises(UnsupportedError, match="pip install rustbpe"):
        train_tokenizer(["aa"], vocab=300, trainer="rustbpe")


def test_gpt2_style(texts: list[str], tmp_path: Path) -> None:
    """Special token first, split by the ByteLevel step, truncation that must not cut a text."""
    theirs = tokenizers.Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    theirs.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    expected = [theirs.encode(t).ids for t in texts]
    theirs.enable_truncation(8)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path / "tokenizer.json")
    assert ours.document_token == 0 and ours._fast is not None
    assert listed(ours.encode_batch(texts)) == expected
    assert listed(ours._encode_slowly(AWKWARD)) == listed(ours.encode_batch(AWKWARD))
    lengths = [ours.token_bytes[ids].sum() for ids in ours.encode_batch(AWKWARD)]
    assert lengths == [len(t.encode()) for t in AWKWARD]


def altered(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    spec = json.loads(tokenizer._text)
    spec["model"].update({k: v for k, v in changes.items() if k in spec["model"]})
    spec.update({k: v for k, v in changes.items() if k not in spec["model"]})
    return Tokenizer(json.dumps(spec))


def test_what_tiktoken_would_get_wrong_goes_the_slow_way(tokenizer: Tokenizer) -> None:
    merges = json.loads(tokenizer._text)["model"]["merges"]
    swapped = altered(tokenizer, merges=[merges[1], merges[0], *merges[2:]])
    assert swapped._fast is None
    for text, ids in zip(AWKWARD, swapped.encode_batch(AWKWARD), strict=True):
        assert swapped.decode(ids) == text


def test_a_token_that_its_own_bytes_do_not_reach() -> None:
    """tiktoken joins ab+c on sight; the merges, in their order, only ever make a+bc."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab = alphabet | {"bc": 256, "ab": 257, "abc": 258, END_OF_TEXT: 259}
    theirs = tokenizers.Tokenizer(models.BPE(vocab, [("b", "c"), ("a", "b"), ("ab", "c")]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([END_OF_TEXT])
    ours = Tokenizer(theirs.to_str())
    assert ours._fast is None
    assert listed(ours.encode_batch(["abc"])) == [[alphabet["a"], 256]]


def fallback_tokenizer(prefix: bool) -> tokenizers.Tokenizer:
    vocab = {"<bos>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "a": 257, "\u2581": 258}
    vocab |= {"\u2581a": 259, "\u00e4": 260}
    theirs = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "\u2581")
    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    theirs.normalizer = prepend if prefix else replace
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if prefix else []
    theirs.decoder = decoders.Sequence(steps)
    theirs.add_special_tokens(["<bos>"])
    return theirs


def test_byte_fallback_is_counted_exactly_or_refused() -> None:
    ours = Tokenizer(fallback_tokenizer(prefix=False).to_str())
    text = "a a\u00e4 \u4e2d<bos>"
    (ids,) = ours.encode_batch([text])
    assert ours.decode(ids) == text and ours.document_token == 0 and 0 not in ids
    assert ours.token_bytes[ids].sum() == len(text.encode())


def metaspace_tokenizer(scheme: Any) -> tokenizers.Tokenizer:
    theirs = fallback_tokenizer(prefix=False)
    theirs.normalizer = None
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    theirs.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    )
    return theirs


@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
@pytest.mark.parametrize("decoder", [True, False])
def test_a_space_before_every_text_is_no_byte_of_it(scheme: str, decoder: bool) -> None:
    """Take Llama 2's Prepend, Mistral's Metaspace, and either without its decoder."""
    theirs = fallback_tokenizer(True) if scheme == "prepend" else metaspace_tokenizer(scheme)
    spec = json.loads(theirs.to_str())
    if not decoder:
        del spec["decoder"]
    ours = Tokenizer(json.dumps(spec))
    theirs.encode_special_tokens = True
    for text in AWKWARD[1:]:
        (ids,) = ours.encode_batch([text])
        assert ours.decode(ids) == text
        if not text.startswith(" ") or scheme in ("prepend", "never"):
            assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
        whole = [ours.document_token, *ids.tolist()]
        assert ours.token_bytes[whole].sum() == len(text.encode())
        ours.check_document(text, ids)


@pytest.mark.parametrize(
    "normalizer", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt"]
)
def test_a_normalizer_that_changes_bytes_is_refused(tokenizer: Tokenizer, normalizer: str) -> None:
    with pytest.raises(ConfigError, match=in_order("loses text", "comes back as")) as caught:
        altered(tokenizer, normalizer={"type": normalizer}).refuse_losses()
    assert "data.lossy_tokenizer=true" in caught.value.remedy.text
    assert f"without its normalizer {normalizer}" in str(caught.value)


def test_missing_bytes_are_named(tokenizer: Tokenizer) -> None:
    spec = json.loads(tokenizer._text)
    vocab, gone = spec["model"]["vocab"], "\u00e4"  # the spelling of byte E4
    merges = [m for m in spec["model"]["merges"] if gone not in "".join(m)]
    vocab = {t: i for t, i in vocab.items() if gone not in t}
    with pytest.raises(ConfigError, match=in_order("no token", 1, "243 bytes", "E4")):
        altered(tokenizer, vocab=vocab, merges=merges).refuse_losses()


@pytest.mark.parametrize("key", ["normalizer", "decoder"])
@pytest.mark.parametrize("null", [True, False])
def test_a_part_may_be_left_out(tokenizer: Tokenizer, key: str, null: bool) -> None:
    spec = json.loads(tokenizer._text)
    spec[key] = None
    if not null:
        del spec[key]
    ours = Tokenizer(json.dumps(spec))
    assert listed(ours.encode_batch(AWKWARD)) == listed(tokenizer.encode_batch(AWKWARD))
    assert [ours.decode(ids) for ids in ours.encode_batch(AWKWARD)] == AWKWARD


def test_a_pattern_that_leaves_text_out_goes_the_slow_way(tokenizer: Tokenizer) -> None:
    steps = json.loads(tokenizer._text)["pre_tokenizer"]["pretokenizers"]
    steps[0]["pattern"] = {"Regex": "[0-9]+"}
    ours = altered(tokenizer, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    assert ours._fast is None
    assert [ours.decode(ids) for ids in ours.encode_batch(AWKWARD)] == AWKWARD


def test_broken_files_are_one_error_each(tokenizer: Tokenizer) -> None:
    for null in (True, False):
        spec = json.loads(tokenizer._text)
        spec["pre_tokenizer"] = None
        if not null:
            del spec["pre_tokenizer"]
        with pytest.raises(ConfigError):
            Tokenizer(json.dumps(spec)).refuse_losses()
    for text in ("[]", "null", "3", '{"model": {}}', '{"model": {"type": "BPE"}}', "{", ""):
        with pytest.raises(ConfigError):
            Tokenizer(text)
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    level = json.loads(tokenizer._text)["pre_tokenizer"]["pretokenizers"][1]
    for pattern in ("(", r"(x+x+)+y"):
        steps = [{**split, "pattern": {"Regex": pattern}}, level]
        with pytest.raises(ConfigError):
            altered(tokenizer, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    with pytest.raises(ConfigError, match=r"dropout = 0\.1"):
        altered(tokenizer, dropout=0.1)


@pytest.mark.parametrize("text", [" " * 500_000, "0" * 500_000, "ab" * 250_000])
def test_a_huge_word_is_learned_from_in_short_runs(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's time grows with the square of a word: none is handed a long one."""
    handed: list[str] = []

    class Recorded:
        """Stand in for rustbpe, and keep what it is handed."""

        def train_from_iterator(self, pieces: Iterator[str], *_: int, pattern: str) -> None:
            handed.extend(pieces)

        def get_mergeable_ranks(self) -> list[tuple[bytes, int]]:
            return [(bytes([byte]), byte) for byte in range(256)]

    monkeypatch.setattr(rustbpe, "Tokenizer", Recorded)
    train_tokenizer([text, "plain words"], vocab=300, trainer="rustbpe")
    assert "".join(handed) == f"{text}plain words"
    assert max(map(len, handed)) <= RUN_CHARACTERS
    assert len(handed) <= len(text) // RUN_CHARACTERS + 4
    counts = WordCounts("nanochat")
    counts.add(text)
    assert max(map(len, counts.words)) <= RUN_CHARACTERS
    assert sum(len(word) * count for word, count in counts.words.items()) == len(text)


def test_a_tiktoken_encoding_keeps_its_ids(
    tokenizer: Tokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer._fast is not None
    ranks = tokenizer._fast._mergeable_ranks
    special = {END_OF_TEXT: 610, "<|fim|>": 613}  # with gaps, as cl100k_base has
    encoding = tiktoken.Encoding(
        "x", pat_str=PATTERNS["nanochat"], mergeable_ranks=ranks, special_tokens=special
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["x"])
    ours = open_tokenizer("tiktoken:x")
    assert (ours.vocab, ours.document_token) == (614, 610)
    everything = [*AWKWARD, *texts]
    expected = [encoding.encode_ordinary(t) for t in everything]
    assert listed(ours.encode_batch(everything)) == expected
    assert listed(ours._encode_slowly(everything)) == expected
    assert ours.decode([613]) == "<|fim|>"


def test_errors_name_the_remedy(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str) -> tiktoken.Encoding:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ConfigError, match="TIKTOKEN_CACHE_DIR"):
        open_tokenizer("tiktoken:gpt2")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        open_tokenizer(str(tmp_path))
    for name, near in (("gpt3", "gpt2"), ("o200k", "o200k_base")):
        with pytest.raises(
            ConfigError, match=in_order(f"tiktoken:{name}", "gpt2", "o200k_base")
        ) as error:
            open_tokenizer(f"tiktoken:{name}")
        assert error.value.remedy.text == f"data.tokenizer=tiktoken:{near}"
    for spec in ("", "BPE"):
        with pytest.raises(ConfigError) as error:
            open_tokenizer(spec)
        assert error.value.remedy.text == "data.tokenizer=bpe"
    (tmp_path / "tokenizer.json").write_text("\ufeff" + tokenizer.text)
    assert open_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_a_vocabulary_may_name_the_document_token(tokenizer: Tokenizer) -> None:
    ours, own = altered(tokenizer, added_tokens=[]), tokenizer.document_token
    assert ours.document_token == own and f"{END_OF_TEXT} (id {own})" in ours.note
    assert not tokenizer.note and not ours.loses and ours.token_bytes[own] == 0
    texts = [*AWKWARD, END_OF_TEXT, f"a {END_OF_TEXT}"]
    assert listed(ours.encode_batch(texts)) == listed(tokenizer.encode_batch(texts))
    assert [ours.bytes_of(ids) for ids in ours.encode_batch(texts)] == [
        len(text.encode()) for text in texts
    ]


@pytest.mark.parametrize("why", ["two", "none", "text"])
def test_a_vocabulary_that_leaves_the_document_token_open_is_refused(
    tokenizer: Tokenizer, why: str
) -> None:
    vocab = dict(json.loads(tokenizer.text)["model"]["vocab"])
    if why == "two":
        vocab["</s>"] = len(vocab)
    elif why == "none":
        del vocab[END_OF_TEXT]
    changes: dict[str, Any] = {"vocab": vocab, "added_tokens": []}
    if why == "text":  # a text that is in the vocabulary as a whole is one token
        whole = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        changes |= {"ignore_merges": True, "pre_tokenizer": {**whole, "trim_offsets": True}}
    with pytest.raises(ConfigError, match=in_order("special token", END_OF_TEXT)):
        altered(tokenizer, **changes)
