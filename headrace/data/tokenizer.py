"""Turn text into ids and back by byte-level BPE, trained here or brought along.

The state of a tokenizer is the text of its tokenizer.json, as Hugging Face reads it; the
fingerprint is that text's sha256. A trained one has the 256 bytes first, then the merges in the
order learned, then `<|endoftext|>`, whoever trained it.

Encoding goes through tiktoken where that is provably the same thing, since it is some 4 times
faster than `tokenizers` (results/data.jsonl). tiktoken joins any two neighbours whose bytes
together are a token; `tokenizers` joins listed pairs only. The two agree when every token's own
bytes are rebuilt by the listed merges into that one token, in order of rank: then, between any two
borders, merging runs as it does for the token alone. That is checked for each vocabulary; whatever
fails the check, or uses parts that tiktoken lacks, is encoded by `tokenizers`.

Special tokens are never produced from text: a document that spells `<|endoftext|>` gets ordinary
ids.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tiktoken
import tokenizers

from headrace.core.errors import ConfigError, TextLost, UnsupportedError, interpreting, nearest
from headrace.core.files import python, write_whole
from headrace.core.folders import refuse_absent, refuse_no_tokenizer
from headrace.core.limits import TokenizerPattern
from headrace.core.native import silent_panics
from headrace.core.remedy import mend
from headrace.data.bpe import (
    PATTERNS,
    WordCounts,
    check_entries,
    learn_from_texts,
)
from headrace.data.document_token import END_OF_TEXT, find_document_token
from headrace.data.lossless import (
    check_parts,
    difference,
    example_of_loss,
    guarded,
    vanishing,
)
from headrace.data.merges import learn_from_counts, learned_pairs, parents
from headrace.data.spelling import (
    ALPHABET,
    BYTE_OF,
    is_byte_level,
    make_decoder,
    missing_bytes,
    rewrites,
    spec_of,
    spell,
    steps_of,
    token_bytes,
    unspell,
)
from headrace.plan.data_config import DataConfig

_OWN = mend("data.tokenizer=bpe")
_WHOLE_ALPHABET = _OWN | (
    "a tokenizer.json trained with the whole byte alphabet "
    "(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())"
)
Trainer = Literal["auto", "rustbpe", "counts"]
_PROBED: dict[str, tuple[str | None, bool]] = {}
"""By fingerprint what a tokenizer was found to lose, and whether tiktoken does as it does."""
_LAST_READ: dict[str, "Tokenizer"] = {}
"""By fingerprint the tokenizer that was read last: preparing data reads the same one thrice."""


class Tokenizer:
    """A vocabulary and how text falls into it.

    Attributes:
        vocab: ids run over range(vocab).
        document_token: the id at the start of every document.
        token_bytes: int32 [vocab], UTF-8 bytes that each id stands for; 0 for special ones. Where
            a space is put before every text (Llama 2, Mistral), the document token stands for -1
            byte, so that a document's tokens add up to its text.
        fingerprint: sha256 of the tokenizer.json.
        note: what a user is told of it; "" for nothing.
        loses: an example of text that it does not give back, "" where it gives back all.
    """

    def __init__(self, text: str, *, name: str = "tokenizer.json") -> None:
        with interpreting(name, _OWN):
            self._open(text, name)

    def _open(self, text: str, name: str) -> None:
        wrong = f"{name} is not a tokenizer.json"
        with silent_panics():
            self._slow = guarded(lambda: tokenizers.Tokenizer.from_str(text), wrong)
        spec = spec_of(text)
        spec["model"].setdefault("type", type(self._slow.model).__name__)
        self._text, self._name = text, name
        self._slow.no_truncation()
        self._slow.no_padding()
        self._slow.encode_special_tokens = True
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        ids = self._slow.get_vocab(with_added_tokens=True)
        check_parts(spec, ids, name)
        self.vocab = max(ids.values()) + 1
        encode = self._encode_slowly
        self.document_token, self.note = find_document_token(spec, ids, encode, name)
        self._rewrites = rewrites(spec)
        self.token_bytes = token_bytes(spec, ids, self.vocab, name)
        self.token_bytes[self.document_token] = 0
        self._fast = _as_tiktoken(spec)
        self._hides_a_space = False
        added = self._bytes_of("a") - 1  # a space put before every text
        self._hides_a_space = added == 1 and self._bytes_of(" a") == 2
        if added == 1:
            self.token_bytes[self.document_token] = -1
        if spec["decoder"] is None:
            self._slow.decoder = make_decoder(is_byte_level(spec), strip=added == 1)
        self.loses, self._remedy = vanishing(missing_bytes(spec, ids)), _WHOLE_ALPHABET
        if not self.loses:
            self._find_losses(spec)

    @property
    def text(self) -> str:
        """Return the text of the tokenizer.json."""
        return self._text

    @property
    def special_texts(self) -> list[str]:
        """Return how its special tokens are spelled; a text that spells one is still text."""
        return [t["content"] for t in json.loads(self._text).get("added_tokens") or []]

    def _bytes_of(self, text: str) -> int:
        return int(self.token_bytes[self.encode_batch([text])[0]].sum())

    def _find_losses(self, spec: dict[str, Any]) -> None:
        """Probe the tokenizer, once a process for each tokenizer.json."""
        self._remedy = _OWN
        added_tokens = [t["content"] for t in spec["added_tokens"]]
        if self.fingerprint not in _PROBED:
            with silent_panics():  # as of a pattern that never ends
                lost = example_of_loss(self._returned, added_tokens)
                if lost is not None and self._fast is not None:
                    self._fast = None  # tiktoken drops what its pattern does not match
                    lost = example_of_loss(self._returned, added_tokens)
            _PROBED[self.fingerprint] = lost, self._fast is not None
        lost, is_fast = _PROBED[self.fingerprint]
        self._fast = self._fast if is_fast else None
        if lost is not None:
            normalizers = [part["type"] for part in steps_of(spec["normalizer"])]
            changes = [k for k in normalizers if k not in ("Replace", "Prepend", "ByteLevel")]
            change = "a tokenizer.json that gives back every text"
            if changes:
                change = f"a copy of it without its normalizer {', '.join(changes)}"
            self.loses, self._remedy = lost, _OWN | change

    def _returned(self, texts: list[str]) -> list[tuple[str, int]]:
        """Return what the ids of each text decode to, and the bytes that they stand for."""
        encoded = self.encode_batch(texts)
        every = [ids.tolist() for ids in encoded]
        decoded = self._slow.decode_batch(every, skip_special_tokens=False)
        return list(zip(decoded, map(self.bytes_of, encoded), strict=True))

    def refuse_losses(self) -> None:
        """Refuse a tokenizer that does not give back every text.

        Raises:
            TextLost: with an example.
        """
        if self.loses:
            raise TextLost(
                f"{self._name} loses text: {self.loses}",
                mend(
                    "data.lossy_tokenizer=true",
                    text="data.lossy_tokenizer=true, which every report tells;",
                )
                | self._remedy,
            )

    def check_document(self, text: str, ids: np.ndarray, *, is_validation: bool = False) -> None:
        """Compare a document with what its ids give back.

        Args:
            text: the document.
            ids: what `encode_batch` made of it.
            is_validation: it is evaluated, so its text is compared and not only its bytes.

        Raises:
            TextLost: the tokenizer lost some of the text.
        """
        if lost := self.lost_of(text, ids, is_validation=is_validation):
            raise TextLost(
                f"{self._name} loses text: {lost}",
                mend(
                    "data.lossy_tokenizer=true",
                    text="data.lossy_tokenizer=true, which every report tells;",
                )
                | mend("data.tokenizer=bpe"),
            )

    def lost_of(self, text: str, ids: np.ndarray, *, is_validation: bool = False) -> str:
        """Return what of a document is lost, as `check_document` looks for it; "" for nothing.

        A normalizer may put other characters of as many bytes in the place of some.
        """
        raw, kept = len(text.encode()), self.bytes_of(ids)
        if not text or (raw == kept and not (is_validation or self._rewrites)):
            return ""
        returned = self.decode(ids)
        if raw == kept and returned == text:
            return ""
        message = f"a document that begins {text[:40]!a}"
        if raw != kept:
            message += f" has {raw:,} bytes, its tokens stand for {kept:,}"
        return message + (f", {difference(text, returned)}" if returned != text else "")

    def bytes_of(self, ids: np.ndarray) -> int:
        """Return the UTF-8 bytes that a document's ids stand for."""
        added = max(0, -int(self.token_bytes[self.document_token]))
        return int(self.token_bytes[ids].sum(dtype=np.int64)) - added * bool(len(ids))

    @staticmethod
    def load(path: Path | str) -> "Tokenizer":
        """Read a tokenizer.json, or the one in a folder.

        Raises:
            ConfigError: it is not there, not a tokenizer.json, or has no token for documents.
            UnsupportedError: the bytes of its tokens cannot be told.
        """
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8-sig")  # tools of Windows put a mark before it
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.tokenizer: {path} cannot be read: {error}",
                "data.tokenizer=bpe, a path of a tokenizer.json, or tiktoken:NAME",
            ) from None
        known = _LAST_READ.get(digest := hashlib.sha256(text.encode()).hexdigest())
        if known is None or known.note:  # which names the file
            known = Tokenizer(text, name=str(path))
            _LAST_READ.clear()
            _LAST_READ[digest] = known
        renamed = copy(known)
        renamed._name = str(path)
        return renamed

    @property
    def spec(self) -> dict[str, Any]:
        """Return the object in the tokenizer.json."""
        return spec_of(self._text)

    def save(self, path: Path | str) -> None:
        """Write the tokenizer.json."""
        write_whole(Path(path), self._text)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [n], nothing added and nothing special recognised."""
        if self._hides_a_space:  # a space that begins the text would pass for the added one
            texts = [" " + text if text.startswith(" ") else text for text in texts]
        if self._fast is None:
            return self._encode_slowly(texts)
        if len(texts) == 1:
            return [self._encode(texts[0])]
        with ThreadPoolExecutor() as pool:  # tiktoken releases the interpreter lock
            return list(pool.map(self._encode, texts))

    def _encode(self, text: str) -> np.ndarray:
        assert self._fast is not None
        try:
            return self._fast.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # its regex gives up on a million spaces in a row
            return self._encode_slowly([text])[0]

    def _encode_slowly(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = guarded(
            lambda: self._slow.encode_batch_fast(list(texts), add_special_tokens=False),
            f"{self._name} cannot encode a text of {max(map(len, texts), default=0):,} characters",
        )
        return [np.array(e.ids, dtype=np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids, special tokens spelled out; broken UTF-8 becomes U+FFFD."""
        return self._slow.decode([int(i) for i in ids], skip_special_tokens=False)


def entries(data: DataConfig) -> int:
    """Return the vocabulary size of the tokenizer that a plan names, or will train.

    Raises:
        ConfigError, UnsupportedError: as `open_tokenizer`.
    """
    return data.vocab if data.tokenizer == "bpe" else _entries_of(data.tokenizer)


@cache
def _entries_of(spec: str) -> int:
    return open_tokenizer(spec).vocab


def open_tokenizer(spec: str, key: str = "data.tokenizer") -> Tokenizer:
    """Open a tokenizer by the path of a tokenizer.json (or its folder), or by `tiktoken:NAME`.

    Args:
        spec: which one.
        key: the plan's key that says it.

    Raises:
        ConfigError: it cannot be had.
        UnsupportedError: the bytes of its tokens cannot be told.
    """
    if not spec.startswith("tiktoken:"):
        if spec.lower() == "bpe":
            raise ConfigError(f"{key} = {spec!r} is none; bpe trains one", mend(f"{key}=bpe"))
        if not spec:
            raise ConfigError(f"{key} names an empty path", mend(f"{key}=bpe"))
        path = Path(spec).expanduser()
        known = key == "data.tokenizer" and spec in tiktoken.list_encoding_names()
        if known and not path.exists():
            raise ConfigError(f"{key} = {spec!r} does not exist", mend(f"{key}=tiktoken:{spec}"))
        refuse_absent(path, key, folder=False)
        if path.is_dir():
            refuse_no_tokenizer(path, key)
        return Tokenizer.load(path)
    name, known = spec.removeprefix("tiktoken:"), tiktoken.list_encoding_names()
    if name not in known:
        near = nearest(name, known)
        raise ConfigError(
            f"{key} = {spec!r} is none of tiktoken's: {', '.join(known)}",
            mend(f"{key}=tiktoken:{(near if near in known else known[-1])}"),
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # any of the network's failures
        fetch = f"import tiktoken; tiktoken.get_encoding({name!r})"
        raise ConfigError(
            f"data.tokenizer = {spec!r} cannot be had: {error}",
            f"TIKTOKEN_CACHE_DIR=kept {python(fetch)} where there is a network, and "
            "a copy of kept here, with TIKTOKEN_CACHE_DIR=kept before the same command; or "
            "data.tokenizer=bpe",
        ) from None
    ranks = encoding._mergeable_ranks
    pairs = [parents(token, ranks) for token in sorted(ranks, key=ranks.__getitem__)]
    text = _to_json(ranks, filter(None, pairs), encoding._pat_str, encoding._special_tokens)
    return Tokenizer(text, name=spec)


def train_tokenizer(
    texts: Iterable[str] | WordCounts,
    *,
    vocab: int,
    trainer: Trainer = "auto",
    pattern: TokenizerPattern = "nanochat",
    special_tokens: tuple[str, ...] = (),
    special_from_text: bool = False,
) -> Tokenizer:
    """Learn a byte-level BPE of at most `vocab` entries, `<|endoftext|>` included.

    Args:
        texts: what to learn from, which is held in memory as counts of words; or those counts.
        vocab: 256 bytes, merges and special tokens; fewer when the text has no more pairs.
        trainer: who learns from texts. `auto` takes rustbpe where it is installed, since it is
            quicker; `counts` counts the words in Python and learns the same.
        pattern: how text falls into words; counts have theirs.
        special_tokens: further special tokens, printable ASCII without blanks.
        special_from_text: text that spells one of these becomes it.

    Raises:
        ConfigError: there is no room for 256 bytes and the special tokens, or one is no name.
        UnsupportedError: rustbpe was asked for and is not installed.
    """
    check_entries(vocab, special_tokens)
    merges = vocab - 257 - len(special_tokens)
    if isinstance(texts, WordCounts):
        pattern, ranks = texts.pattern, learn_from_counts(texts.words, merges)
    else:
        ranks = _learn(texts, merges, pattern, trainer)
    end = len(ranks)
    special = {token: end + at for at, token in enumerate((END_OF_TEXT, *special_tokens))}
    plain = special_tokens if special_from_text else ()
    return Tokenizer(_to_json(ranks, learned_pairs(ranks), PATTERNS[pattern], special, plain))


def _learn(
    texts: Iterable[str], merges: int, pattern: TokenizerPattern, trainer: Trainer
) -> dict[bytes, int]:
    """Return the rank of every token that a trainer learns from texts.

    Both learn from every word, so a plan's tokenizer is the same with and without rustbpe. Counts
    take some 600 bytes for each different word of the texts.

    Raises:
        UnsupportedError: rustbpe was asked for and is not installed.
    """
    if trainer != "counts":
        try:
            return learn_from_texts(texts, merges, pattern)
        except ImportError:
            if trainer == "rustbpe":
                raise UnsupportedError("rustbpe is not installed", "pip install rustbpe") from None
    counts = WordCounts(pattern, most=sys.maxsize)
    for text in texts:
        counts.add(text)
    return learn_from_counts(counts.words, merges)


def _splitter(pattern: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    spell = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([split, spell])


def _pairs(merges: Iterable[str | Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield merges as pairs; older files spell them 'a b'."""
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def _to_json(
    ranks: dict[bytes, int],
    pairs: Iterable[tuple[bytes, bytes]],
    pattern: str,
    special: dict[str, int],
    plain: Sequence[str] = (),
) -> str:
    """Return a tokenizer.json from tiktoken's way of writing the same thing.

    Args:
        ranks: the id of each token that is not special.
        pairs: the two tokens whose merge made each token, by rank.
        pattern: how text falls into words.
        special: the id of each special token.
        plain: those of the special tokens that text becomes.
    """
    vocab = {spell(token): rank for token, rank in ranks.items()}
    model = tokenizers.models.BPE(
        vocab=vocab | special,  # listed here too, so that ids with gaps stay as they are
        merges=[(spell(first), spell(second)) for first, second in pairs],
    )
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = _splitter(pattern)
    built.decoder = tokenizers.decoders.ByteLevel()
    by_id = sorted(special, key=special.__getitem__)
    for token in by_id:
        own = tokenizers.AddedToken(token, special=token not in plain, normalized=False)
        (built.add_tokens if token in plain else built.add_special_tokens)([own])
    return built.to_str()


def _as_tiktoken(spec: dict[str, Any]) -> tiktoken.Encoding | None:
    """Return the same encoding in tiktoken, or None where it is not certain to be the same."""
    model, pattern = spec["model"], split_pattern(spec)
    if model["type"] != "BPE" or pattern is None:
        return None
    odd = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")
    special = {t["content"]: t["id"] for t in spec["added_tokens"] if t.get("special")}
    plain = {t: i for t, i in model["vocab"].items() if t not in special}
    if (
        spec["normalizer"] is not None
        or any(model.get(key) for key in odd)
        or len(special) != len(spec["added_tokens"])
        or not all(character in plain for character in ALPHABET)
        or not BYTE_OF.keys() >= set("".join(plain))
        or not _rebuilds(plain, model["merges"])
    ):
        return None
    ranks = {unspell(token): i for token, i in plain.items()}
    return tiktoken.Encoding(
        "headrace", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


def split_pattern(spec: dict[str, Any]) -> str | None:
    """Return the split pattern where the pre-tokenizer is one of the two usual shapes."""
    match steps_of(spec["pre_tokenizer"]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return PATTERNS["gpt2"]
        case [
            {"type": "Split", "pattern": {"Regex": str(found)}, "behavior": "Isolated"} as split,
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if not split["invert"]:
            return found
    return None


def _rebuilds(vocab: dict[str, int], merges: Iterable[Any]) -> bool:
    """Return whether ids rise with the merges and every token is what its own bytes merge into."""
    pairs = list(_pairs(merges))
    made = [vocab.get(left + right, -1) for left, right in pairs]
    if made != sorted(set(made)) or len(made) + 256 != len(vocab):
        return False
    strict = tokenizers.models.BPE(vocab=vocab, merges=pairs)
    return all([t.id for t in strict.tokenize(token)] == [i] for token, i in vocab.items())
