"""The command that prepares data again, which damaged or missing data names as its remedy."""

import json
import shlex

from headrace.data.scored import column_of
from headrace.data.training import TRAINING_KEYS
from headrace.plan.changes import flatten
from headrace.plan.data_config import DataConfig


def rebuild_command(data: DataConfig) -> str:
    """Return `headrace data ingest` with all keys that are not at their defaults or not demo's."""
    keys = {"sources", "validation", "text_key", "text_template", "separator", "invalid_utf8"}
    keys |= {"deduplication", "decontamination", "chat"}
    keys |= {"tokenizer", "lossy_tokenizer", "vocab", "directory"}
    keys |= TRAINING_KEYS
    asked = data.model_dump(mode="json", include=keys, exclude_defaults=True, exclude_none=True)
    if data.deduplication is not None:  # one that is at its defaults is asked for all the same
        asked["deduplication"] = data.deduplication.model_dump(mode="json", exclude_none=True)
    if data.chat is not None:
        asked["chat"] = data.chat.model_dump(mode="json", exclude_none=True)
    if column := column_of(data):
        asked["curriculum"] = {"score": f"column:{column}"}
    words = ["headrace data ingest demo"]
    for key, value in flatten({**asked, "vocab": data.vocab}).items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(shlex.quote(f"data.{key}={text}"))
    return " ".join(words)
