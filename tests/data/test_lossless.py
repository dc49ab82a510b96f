"""Open tokenizers that others made: see what they give back, lose and refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import in_order, tells
from test_tokenizer import AWKWARD, fallback_tokenizer, listed, metaspace_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.core.errors import TextLost
from headrace.data import tokenizer as ours
from headrace.data.ingest import prepare
from headrace.data.lossless import difference
from headrace.plan.plan import Plan


def unigram_tokenizer(*pieces: str) -> Tokenizer:
    """As sentencepiece trains one: special pieces, bytes, then pieces with their scores."""
    fixed = [(p, 0.0) for p in ("<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)))]
    scored = [(piece, -1.0 - 0.01 * i) for i, piece in enumerate(("\u2581", "a", *pieces))]
    theirs = Tokenizer(models.Unigram([*fixed, *scored], unk_id=0, byte_fallback=True))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    metaspace = decoders.Metaspace(prepend_scheme="first")
    theirs.decoder = decoders.Sequence([decoders.ByteFallback(), metaspace])
    theirs.add_special_tokens(["<unk>", "<s>", "</s>"])
    return theirs


def test_a_unigram_tokenizer_counts_its_bytes_and_tells_which_text_it_takes_for_a_token() -> None:
    """Its pieces are found in any text, so what spells a byte's or a special piece is lost."""
    found = ours.Tokenizer(unigram_tokenizer("\u2581a", "ab").to_str())
    for text in ("a", "  a b ", "ab\u00e4 \u4e2d\u6587", "\t\n", *AWKWARD[6:]):
        (ids,) = found.encode_batch([text])
        assert found.decode(ids) == text and found.bytes_of(ids) == len(text.encode())
        found.check_document(text, ids)
    assert "<0x41>' comes back as" in found.loses
    with pytest.raises(TextLost, match=in_order("<0x41>'", "comes back as", "A'")):
        found.refuse_losses()
    spelled = "a <s> a"
    (ids,) = found.encode_batch([spelled])
    with pytest.raises(TextLost, match=in_order("7 bytes", "tokens", 3)):
        found.check_document(spelled, ids)


@pytest.mark.parametrize("blanks", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}])
@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_gives_back_what_stands_around_it_or_is_refused(
    blanks: dict[str, bool], special: bool
) -> None:
    theirs = fallback_tokenizer(prefix=False)
    (theirs.add_special_tokens if special else theirs.add_tokens)(
        [AddedToken("<x>", normalized=False, **blanks)]
    )
    found = ours.Tokenizer(theirs.to_str())
    swallows = not special and any(key.endswith("strip") for key in blanks)
    assert bool(found.loses) == swallows, found.loses
    text = "a  <x>  a<bos>\n<x>a"
    (ids,) = found.encode_batch([text])
    if swallows:
        assert "<x>" in found.loses
        return
    assert found.decode(ids) == text and found.bytes_of(ids) == len(text.encode())
    assert found.document_token not in ids


@pytest.mark.parametrize("key", ["truncation", "padding", "post_processor"])
def test_nothing_is_cut_filled_or_put_around_a_text(key: str) -> None:
    """A tokenizer.json may say so for a model's input; a document is encoded whole and alone."""
    theirs = fallback_tokenizer(prefix=False)
    plain = ours.Tokenizer(theirs.to_str())
    theirs.enable_truncation(3, stride=1)
    theirs.enable_padding(length=64, pad_id=1, pad_token="<0x00>")
    template = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}},
    }
    parts = json.loads(theirs.to_str()) | {"post_processor": template}
    changed = json.loads(plain.text) | {key: parts[key]}
    found = ours.Tokenizer(json.dumps(changed))
    assert changed[key] and not found.loses
    assert listed(found.encode_batch(AWKWARD)) == listed(plain.encode_batch(AWKWARD))


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_a_loss_that_no_probe_has_is_found_in_the_text_itself(scheme: Any) -> None:
    found = ours.Tokenizer(metaspace_tokenizer(scheme).to_str())
    assert not found.loses
    text = "a\u2581b"
    (ids,) = found.encode_batch([text])
    with pytest.raises(TextLost, match=in_order("tokens", 3, r"'a\u2581b'", "'a b'")) as told:
        found.check_document(text, ids)
    assert str(told.value).isascii() and "data.lossy_tokenizer=true" in told.value.remedy.text


def test_a_tokenizer_is_probed_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    text = metaspace_tokenizer("never").to_str()
    first = ours.Tokenizer(text)
    monkeypatch.setattr(ours, "example_of_loss", lambda *given: pytest.fail("probed again"))
    again = ours.Tokenizer(text)
    assert (again.loses, again._fast is None) == (first.loses, first._fast is None)


def test_a_difference_that_nobody_could_see_is_spelled_out() -> None:
    assert tells(difference("cafe\u0301", "caf\u00e9"), r"'cafe\u0301'", r"'caf\xe9'")


def test_bytes_that_are_marked_as_special_are_bytes_all_the_same() -> None:
    """As whoever trains one with its bytes among the `special_tokens` gets them."""
    theirs = fallback_tokenizer(prefix=False)
    theirs.add_special_tokens([f"<0x{b:02X}>" for b in range(256)])
    found = ours.Tokenizer(theirs.to_str())
    found.refuse_losses()
    for text in ("b", "a \u4e2d", *AWKWARD[6:]):
        (ids,) = found.encode_batch([text])
        assert found.decode(ids) == text and found.bytes_of(ids) == len(text.encode())


ALIKE = {
    "normalizer": normalizers.Replace("mill", "lime"),
    "decoder": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("mill", "lime")]),
}
"""Parts that put as many bytes in the place of some, which no count of bytes shows."""


@pytest.mark.parametrize("part", ALIKE)
def test_text_that_comes_back_as_other_text_of_its_length_is_refused_or_told(
    make_plan: Callable[..., Plan], tmp_path: Path, part: str
) -> None:
    theirs = Tokenizer.from_str(ours.train_tokenizer(["the mill and the weir"], vocab=290).text)
    setattr(theirs, part, ALIKE[part])
    theirs.save(str(tmp_path / "tokenizer.json"))
    rows = [json.dumps({"text": f"day {n} at the mill by the weir"}) for n in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    keys = {"sources": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path / "tokenizer.json")}
    with pytest.raises(TextLost, match=in_order("mill", "comes back as", "lime")):
        prepare(make_plan(**keys))
    for _ in range(2):  # made, and found again
        found = prepare(make_plan(**keys, lossy_tokenizer=True))
        assert "mill" in found.loses and "lime" in found.loses
        assert found.loss_fields == {"tokenizer_loses": found.loses}
        assert found.about_tokenizer["loses"] == found.loses
