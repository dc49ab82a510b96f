"""Read the words of a verb that needs no plan: sources, and keys of a plan's table `data`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.core.overrides import write_override
from headrace.core.strict import read_table
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan

_SETTING = re.compile(r"data\.[a-z0-9_.]+=")


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names among words, and the settings such as `data.text_key=body`."""
    settings = [word for word in words if _SETTING.match(word)]
    return [word for word in words if word not in settings], settings


def read_words(words: Sequence[str], table: Mapping[str, Any] | None = None) -> DataConfig:
    """Return what a verb was asked for, as the table `data` of a plan.

    Args:
        words: sources, and settings as `data.text_key=body`, which are the stronger ones.
        table: what the verb itself asks for.

    Raises:
        ConfigError: a setting is none, or a value is not allowed.
    """
    sources, settings = split_words(words)
    values: dict[str, Any] = {"data": {**(table or {}), "sources": sources}}
    for setting in settings:
        write_override(values, setting, Plan)
    return read_table(DataConfig, values["data"], "data")
