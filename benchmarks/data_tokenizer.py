"""Measure BPE training and ingest of text beside the packages that do the same, in one process.

    python benchmarks/data_tokenizer.py --data NOVELS --rounds 5

Each round takes every side once, in turn, so that what else the machine does meets all of them.
Training learns 32,768 entries: Headrace whole (a tokenizer that is ready to use), rustbpe, and once
the counted words and `tokenizers` alone. Ingest reads, encodes and shards; the `tokenizers` library
beside it encodes the same texts, which are in memory already, with as many threads as it takes.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import receipts
import rustbpe
import tokenizers

from headrace.cli.catalogue import catalogue
from headrace.data.bpe import PATTERNS, WordCounts
from headrace.data.ingest import prepare
from headrace.data.sources import read_documents
from headrace.data.tokenizer import ALPHABET, Tokenizer, train_tokenizer
from headrace.plan.plan import Plan

VOCAB = 32768
PATTERN = "gpt4"


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def by_rustbpe(texts: list[str]) -> list[bytes]:
    learner = rustbpe.Tokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    learner.train_from_iterator(iter(texts), VOCAB - 1, pattern=PATTERNS[PATTERN])
    return [bytes(token) for token, _ in learner.get_mergeable_ranks()]


def by_tokenizers(texts: list[str]) -> int:
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[PATTERN]), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 1, initial_alphabet=ALPHABET, show_progress=False
    )
    learner.train_from_iterator(iter(texts), trainer)
    return learner.get_vocab_size()


def by_counts(texts: list[str]) -> Tokenizer:
    counts = WordCounts(PATTERN)
    for text in texts:
        counts.add(text)
    return train_tokenizer(counts, vocab=VOCAB)


def ingest(source: str, tokenizer: Path) -> int:
    """Return the tokens of a source that is read, encoded and sharded into a new folder."""
    with tempfile.TemporaryDirectory() as scratch:
        keys = {"sources": source, "directory": scratch, "tokenizer": tokenizer}
        words = [f"data.{key}='{value}'" for key, value in keys.items()]
        prepared = prepare(Plan.read("", catalogue(), overrides=[*words, "goal.steps=1"]))
        return sum(s.tokens for s in prepared.train) + prepared.validation.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="text, as data.sources names it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    parser.add_argument("--skip", choices=("training", "ingest"), default=None)
    parser.add_argument("--slow-peer", action="store_true", help="train by `tokenizers`, too")
    args = parser.parse_args()
    texts = [document.text for document in read_documents(args.data)]
    text_bytes = sum(len(text.encode()) for text in texts)
    rates: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        took, result = seconds(call)
        rates.setdefault(name, []).append(text_bytes / 1e6 / took)
        return result

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "tokenizer.json"
        for number in range(args.rounds if args.skip != "training" else 0):
            theirs = timed("train_rustbpe", lambda: by_rustbpe(texts))
            ours = timed("train", lambda: train_tokenizer(texts, vocab=VOCAB, pattern=PATTERN))
            assert ours.vocab == len(theirs) + 1
            assert [ours.decode([at]).encode() for at in range(256, 300)] == theirs[256:300]
            if number == 0:
                counted = timed("train_counts", lambda: by_counts(texts))
                assert counted.fingerprint == ours.fingerprint
                if args.slow_peer:
                    timed("train_tokenizers", lambda: by_tokenizers(texts))
            ours.save(file)
        if not file.exists():
            train_tokenizer(texts, vocab=VOCAB, pattern=PATTERN).save(file)
        alone = tokenizers.Tokenizer.from_file(str(file))
        alone.encode_special_tokens = True
        for _ in range(args.rounds if args.skip != "ingest" else 0):
            encoded = timed(
                "encode_tokenizers",
                lambda: alone.encode_batch_fast(texts, add_special_tokens=False),
            )
            expected = sum(len(each.ids) for each in encoded)
            del encoded
            made = timed("ingest", lambda: ingest(args.data, file))
            assert abs(made - expected) < 0.001 * expected  # documents begin with a token each
    metrics = {name: receipts.spread(readings, "MB/s") for name, readings in rates.items()}
    for name, ours, theirs in (
        ("train_by_rustbpe", "train", "train_rustbpe"),
        ("ingest_by_tokenizers", "ingest", "encode_tokenizers"),
    ):
        if ours in rates:
            pairs = zip(rates[ours], rates[theirs], strict=True)
            metrics[name] = receipts.spread([a / b for a, b in pairs], "x")
    versions = {name: receipts.installed(name) for name in ("rustbpe", "tokenizers", "tiktoken")}
    row = receipts.append(
        "data",
        metrics,
        results=args.results,
        n=args.rounds,
        kind="tokenizer",
        shape=f"vocab{VOCAB} {PATTERN}",
        text_bytes=text_bytes,
        packages=versions,
    )
    print(row["metrics"])


if __name__ == "__main__":
    main()
