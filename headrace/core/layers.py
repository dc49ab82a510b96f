"""What a plan's file says that a later layer, the command line, decides anew."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig


def left_to_weights(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return what a file says of the model and its tokenizer where an override names weights.

    The folder has the model's shape and its tokenizer, and the later layer wins.

    Args:
        values: the file's tables.
        overrides: the command line's.
    """
    overridden = _keys(overrides)
    if "model.pretrained" not in overridden:
        return {}
    decided = {
        "model": {*ModelConfig.model_fields} - {"pretrained", "precision"},
        "data": {"tokenizer", "vocab"},
    }
    return {
        f"{table}.{key}": section[key]
        for table, keys in decided.items()
        if isinstance(section := values.get(table), Mapping)
        for key in sorted(keys & {*section})
        if f"{table}.{key}" not in overridden
    }


def left_to_techniques(
    values: Mapping[str, Any],
    overrides: Sequence[str],
    without: Iterable[str],
    made_by_file: Callable[[], Mapping[str, Mapping[str, Any]]],
) -> list[str]:
    """Return the keys of a file that its own techniques make, where an override may change them.

    A resolved plan says both `techniques.rope.theta` and the `model.rope_theta` that follows from
    it. Where an override changes the one, the other follows again.

    Args:
        values: the file's tables, with the overrides.
        overrides: the command line's.
        without: techniques that it leaves out: what they made stays as it is.
        made_by_file: reads what each technique of the file makes of which key, without the command
            line.
    """
    overridden, tables = _keys(overrides), values.get("techniques")
    changes = any(key.startswith(("techniques.", "model.")) for key in overridden)
    if not changes or not isinstance(tables, Mapping):
        return []
    try:
        made = made_by_file()
    except ConfigError:  # what is wrong with it is told of the whole
        return []
    kept = {*tables} - {*without}
    return [
        key
        for name, keys in made.items()
        for key, value in keys.items()
        if name in kept and key not in overridden and _find(values, key) == value
    ]


def _find(values: Mapping[str, Any], key: str) -> Any:
    table, _, leaf = key.partition(".")
    section = values.get(table)
    return section.get(leaf) if isinstance(section, Mapping) else None


def _keys(overrides: Iterable[str]) -> set[str]:
    return {item.partition("=")[0].strip() for item in overrides}
