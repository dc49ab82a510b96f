"""List the text that a plan asks for: its sources, and what they are compared with."""

from dataclasses import replace

from headrace.data.fields import TextReading
from headrace.data.listing import Asked
from headrace.data.quality.installed import evaluation_source
from headrace.plan.cleaning import DecontaminationConfig
from headrace.plan.data_config import DataConfig

VALIDATION = "data.validation"
"""The key that names a validation text of its own."""


def asked_sources(data: DataConfig) -> list[Asked]:
    """Return the sources, each with those that the plan names beside it."""
    every = (data.sources,) if isinstance(data.sources, str) else data.sources
    return [Asked(source, beside=every) for source in every]


def evaluation_sets(data: DataConfig) -> list[tuple[Asked, TextReading]]:
    """Return what the text is compared with, each with how its rows become texts.

    It is the validation text, where it is no share of the sources, and the other sets.
    """
    sets = []
    if isinstance(data.validation, str):
        sets.append((Asked(data.validation, VALIDATION), TextReading.of(data)))
    if (table := data.decontamination) is not None:
        key = "data.decontamination.against"
        named = [Asked(one, key, table.against, as_list=True) for one in table.against]
        sources = tuple(evaluation_source(asked) for asked in named)
        for source in sources:
            sets.append((replace(named[0], source=source, beside=sources), _reading(data, table)))
    return sets


def _reading(data: DataConfig, table: DecontaminationConfig) -> TextReading:
    """Return how rows of an evaluation set become texts."""
    key, reading = table.against_key, TextReading.of(data)
    if "{" in key:
        reading = replace(reading, template=key, chat=None)
    elif key:
        reading = replace(reading, text_key=key, template="", chat=None)
    return replace(reading, setting="data.decontamination.against_key")
