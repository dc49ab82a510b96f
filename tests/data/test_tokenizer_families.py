"""Import a tokenizer.json of every family: ids as transformers has them, or refused by name."""

import pytest
import tokenizers
from facts import tells
from test_tokenizer import AWKWARD, listed
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.core.errors import HeadraceError
from headrace.data.tokenizer import Tokenizer

CORPUS = ["the old mill by the weir grinds the corn of the valley, day by day. "] * 30
SPECIAL = ["<s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
FALLBACK = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
)


def byte_level() -> tokenizers.Tokenizer:
    """Train one as GPT-2's, with special token first."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, learner)
    return made


def sentencepiece_bpe() -> tokenizers.Tokenizer:
    """Train one as Llama 2's: blanks are U+2581, and what has no piece falls back to bytes."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = FALLBACK
    learner = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", *SPECIAL, *BYTES], show_progress=False
    )
    made.train_from_iterator(CORPUS, learner)
    return made


def unigram(byte_fallback: bool = True) -> tokenizers.Tokenizer:
    """Make one as SentencePiece's unigram model: pieces with scores, with or without bytes."""
    fixed = [(piece, 0.0) for piece in ("<unk>", *SPECIAL, *(BYTES if byte_fallback else ()))]
    pieces = ["\u2581", *"theoldmi", "\u2581the", "\u2581mill", "th", "ill"]
    scored = [(piece, -1.0 - 0.1 * at) for at, piece in enumerate(dict.fromkeys(pieces))]
    made = tokenizers.Tokenizer(
        models.Unigram([*fixed, *scored], unk_id=0, byte_fallback=byte_fallback)
    )
    made.pre_tokenizer = METASPACE
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", *SPECIAL])
    return made


def word_piece() -> tokenizers.Tokenizer:
    """Train one as BERT's: words apart at blanks, which it does not give back."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    learner = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", *SPECIAL], show_progress=False
    )
    made.train_from_iterator(CORPUS, learner)
    return made


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe, unigram])
def test_a_family_has_the_ids_of_transformers_and_counts_its_bytes(make) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=make(), split_special_tokens=True)
    ours = Tokenizer(make().to_str())
    assert ours.vocab == len(theirs)
    texts = [*CORPUS[:1], *AWKWARD[1:], "the <s> mill"][: -1 if make is unigram else None]
    expected = [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert listed(ours.encode_batch(texts)) == expected
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ours.decode(ids) == text and ours.bytes_of(ids) == len(text.encode())
        assert ours.document_token not in ids
        ours.check_document(text, ids, is_validation=True)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (word_piece, ("WordPiece", "neither byte-level nor with byte fallback")),
        (lambda: unigram(byte_fallback=False), ("Unigram", "no exact length in bytes")),
        (unigram, ("loses text", "comes back as")),
    ],
    ids=["WordPiece", "Unigram without bytes", "Unigram that takes spelled bytes for bytes"],
)
def test_what_is_not_reversible_is_refused_with_its_reason(make, facts: tuple[str, ...]) -> None:
    with pytest.raises(HeadraceError) as caught:
        Tokenizer(make().to_str(), name="given.json").refuse_losses()
    assert tells(caught.value.message, "given.json", *facts)
    assert "data.tokenizer=bpe" in caught.value.remedy.text
