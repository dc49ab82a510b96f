"""The tokenizer that given weights were trained with: another gives their embeddings other text."""

import json
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.data.tokenizer import Tokenizer


def check_tokenizer(used: Tokenizer, folder: str, key: str) -> None:
    """Refuse a tokenizer under which the ids of the weights in `folder` mean other text.

    A folder without a tokenizer.json says nothing of its ids, and is taken as it is.

    Args:
        used: the run's.
        folder: the weights, in Hugging Face format.
        key: the plan's key that names the folder.

    Raises:
        ConfigError: with both digests.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return
    own = Tokenizer.load(file)
    if own.fingerprint != used.fingerprint and _meaning(own) != _meaning(used):
        raise ConfigError(
            f"the run's tokenizer (sha256 {used.fingerprint[:12]}) is not the one of {key} = "
            f"{folder!r} (sha256 {own.fingerprint[:12]}): its ids stand for other text",
            f"data.tokenizer={folder}",
        )


def _meaning(tokenizer: Tokenizer) -> str:
    """How text becomes ids: all but templates and what is laid around a text."""
    spec = json.loads(tokenizer.text)
    parts = ("model", "normalizer", "pre_tokenizer")
    added = sorted((t["id"], t["content"]) for t in spec.get("added_tokens") or [])
    return json.dumps([added, *(spec.get(part) for part in parts)], sort_keys=True)
