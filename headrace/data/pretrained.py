"""The tokenizer that given weights were trained with: another gives their embeddings other text."""

import json
import shlex
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.tokenizer import Tokenizer


def check_tokenizer(used: Tokenizer, folder: str, key: str, entries: int, remedy: str = "") -> None:
    """Refuse a tokenizer under which the ids of the weights in `folder` mean other text.

    A folder without a tokenizer.json says of its ids only how many there are.

    Args:
        used: the run's.
        folder: the weights, in Hugging Face format.
        key: the plan's key that names the folder.
        entries: the vocabulary entries of the weights.
        remedy: what mends it, where it is not the folder's own tokenizer.

    Raises:
        ConfigError: with both digests, or both sizes.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        if used.vocab == entries:
            return
        raise ConfigError(
            f"{key} = {folder!r} has no tokenizer.json; its weights have {entries} vocabulary "
            f"entries and the run's tokenizer has {used.vocab}, so it is not known to be theirs",
            remedy
            or f"cp PATH {shlex.quote(str(file))}, where PATH is the tokenizer.json that these "
            f"weights were trained with, and data.tokenizer={shlex.quote(folder)}",
        )
    own = Tokenizer.load(file)
    if own.fingerprint != used.fingerprint and _meaning(own) != _meaning(used):
        raise ConfigError(
            f"the run's tokenizer (sha256 {used.fingerprint[:12]}) is not the one of {key} = "
            f"{folder!r} (sha256 {own.fingerprint[:12]}): its ids stand for other text",
            remedy or mend(f"data.tokenizer={folder}"),
        )


def unchecked_tokenizer(spec: str, folder: str, key: str) -> str:
    """Return a line that nothing says whether a tokenizer is that of given weights, or "".

    Args:
        spec: `data.tokenizer`.
        folder: the weights, in Hugging Face format.
        key: the plan's key that names the folder.
    """
    if (Path(folder) / "tokenizer.json").is_file():
        return ""
    return (
        f"{key} = {folder!r} has no tokenizer.json: it has as many vocabulary entries as "
        f"data.tokenizer = {spec!r}, and whether its ids mean the same text is not checked"
    )


def _meaning(tokenizer: Tokenizer) -> str:
    """Return how text becomes ids: all but templates and what is put around a text."""
    spec = json.loads(tokenizer.text)
    parts = ("model", "normalizer", "pre_tokenizer")
    added = sorted((t["id"], t["content"]) for t in spec.get("added_tokens") or [])
    return json.dumps([added, *(spec.get(part) for part in parts)], sort_keys=True)
