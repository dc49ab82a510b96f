"""Train the tokenizer of a plan, and tell plans that ask for different ones apart."""

import json
from collections.abc import Iterable
from importlib.util import find_spec

from headrace.core.errors import ConfigError
from headrace.core.native import call_native
from headrace.core.progress import OnProgress
from headrace.core.remedy import leave_out, mend
from headrace.data.bpe import TrainedOn, WordCounts
from headrace.data.tokenizer import Tokenizer, Trainer, train_tokenizer
from headrace.plan.data_config import DataConfig

TRAINING_KEYS = {"tokenizer_pattern", "tokenizer_text", "special_tokens", "special_from_text"}
"""Keys of `data` that only a tokenizer that is trained here reads, beside `vocab`."""


def training_key(data: DataConfig) -> str:
    """Return what else a trained tokenizer depends on; "" where every key is at its default."""
    keys = data.model_dump(mode="json", include=TRAINING_KEYS, exclude_defaults=True)
    return f":{json.dumps(keys, sort_keys=True)}" if keys else ""


def refuse_training_keys(data: DataConfig) -> None:
    """Refuse keys that say how to train a tokenizer where one is brought along.

    Raises:
        ConfigError: one of them is not at its default.
    """
    asked = data.model_dump(mode="json", include=TRAINING_KEYS, exclude_defaults=True)
    if asked:
        key, value = next(iter(asked.items()))
        raise ConfigError(
            f"data.{key} = {value!r} is of a tokenizer that is trained here, and data.tokenizer = "
            f"{data.tokenizer!r} is brought along",
            mend("data.tokenizer=bpe") | leave_out(f"data.{key}"),
        )


def train_for(
    data: DataConfig, texts: Iterable[str], text_bytes: int | None, progress: OnProgress
) -> tuple[Tokenizer, TrainedOn]:
    """Train a tokenizer as a plan asks, and return it with what it learned from.

    Args:
        data: the plan's table.
        texts: a sample of the text, which is held in memory; or with `tokenizer_text = "all"` every
            text in its order, of which only the words are.
        text_bytes: bytes of the whole text; None where all of it is counted here.
        progress: called with (description, done, total), in bytes of text.

    Raises:
        ConfigError: the vocabulary has no room for the special tokens, or one is no name.
    """
    trainer: Trainer = "rustbpe" if find_spec("rustbpe") else "counts"
    if data.tokenizer_text == "all":
        counts = learned = WordCounts(data.tokenizer_pattern)
        for text in texts:
            counts.add(text)
            progress("counting words", counts.text_bytes, text_bytes)
        trained_on = TrainedOn.from_counts(counts)
    else:
        learned = [*texts]
        sampled = sum(len(text.encode()) for text in learned)
        of_bytes = text_bytes or sampled
        trained_on = TrainedOn(text_bytes=sampled, of_bytes=of_bytes, trainer=trainer)
    progress("training the tokenizer", 0, None)
    tokenizer = call_native(
        lambda: train_tokenizer(
            learned,
            vocab=data.vocab,
            trainer=trainer,
            pattern=data.tokenizer_pattern,
            special_tokens=data.special_tokens,
            special_from_text=data.special_from_text,
        )
    )
    return tokenizer, trained_on
