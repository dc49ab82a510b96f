"""This module holds the work of the verb `data fertility`."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.cli.plans import named_plan, place
from headrace.cli.terminal import make_progress, show_json, show_table
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.limits import TextGrouping
from headrace.data.asked_text import asked_sources
from headrace.data.fertility import TextGroup, measure, total
from headrace.data.fields import TextReading
from headrace.data.tokenizer import Tokenizer, open_tokenizer
from headrace.plan.data_config import DataConfig
from headrace.plan.plan import Plan
from headrace.predict.text_cost import EncodedText, TextCost, text_costs
from headrace.report.fertility import COST_HEAD, HEAD, cost_rows, fertility_page, rows_of
from headrace.report.page import write_page
from headrace.train.interrupts import Preparing


def _opened(name: str, names: Sequence[str], sources: Sequence[str]) -> Tokenizer:
    """Open a tokenizer that the command names.

    Raises:
        ConfigError, UnsupportedError: it cannot be had.
    """
    try:
        return open_tokenizer(name)
    except ConfigError as error:
        text = f"--text {shlex.join(sources)}"
        if others := [other for other in names if other != name]:
            remedy = f"headrace data fertility {shlex.join(others)} {text}"
        else:
            train = f"headrace data tokenizer {shlex.join(sources)}"
            remedy = f"{train} && headrace data fertility tokenizer.json {text}"
        raise ConfigError(error.message, remedy) from None


def compare(
    names: Sequence[str],
    data: DataConfig,
    *,
    by: TextGrouping,
    plan: str,
    device_name: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare tokenizers on texts; print a table or JSON, and write the page where one is asked.

    Args:
        names: tokenizers, as `data.tokenizer` names them.
        data: the texts, and how they are read.
        by: how texts are grouped.
        plan: a plan whose cost is told; "" for none.
        device_name: a GPU that is not here, whose rates are assumed; "" for the plan's device.
        output: where the page goes; None for no page.
        as_json: print one JSON value.

    Raises:
        ConfigError, UnsupportedError: a tokenizer, a text or the plan cannot be had.
    """
    wanted = named_plan(plan, verb="data fertility") if plan else None
    sources = [asked.source for asked in asked_sources(data)]
    tokenizers = {name: _opened(name, names, sources) for name in names}
    progress = make_progress(as_json)
    try:
        with Preparing():
            reading = TextReading.of(data)
            groups = measure(tokenizers, sources, by=by, reading=reading, progress=progress.task)
    finally:
        progress.close()
    whole = total(groups)
    costs = _costs(wanted, device_name, tokenizers, whole, progress.note) if wanted else []
    loses = {name: t.loses for name, t in tokenizers.items() if t.loses}
    every = [*groups, whole] if len(groups) > 1 else groups
    page = None
    if output is not None:
        text = fertility_page(every, costs, plan=wanted.name if wanted else "", notes=loses)
        page = write_page(output, text)
    if as_json:
        vocabs = [
            {"name": n, "vocab": t.vocab, "sha256": t.fingerprint, "loses": t.loses}
            for n, t in tokenizers.items()
        ]
        value = {"tokenizers": vocabs, "texts": [group.to_dict() for group in groups]}
        value |= {"all": whole.to_dict(), "costs": [cost.to_dict() for cost in costs]}
        show_json(value | {"page": str(page) if page else None})
        return
    show_table(HEAD, rows_of(every))
    if costs:
        show_table(COST_HEAD, cost_rows(costs))
    for name, lost in loses.items():
        progress.note(f"{name} loses text: {lost}")
    for group in groups:
        if not group.is_whole:
            progress.note(f"only the first {group.text_bytes:,} bytes of {group.name} were read")
    if page:
        print(f"page: {page}")


def _costs(
    plan: Plan,
    device_name: str,
    tokenizers: Mapping[str, Tokenizer],
    whole: TextGroup,
    note: Callable[[str], None],
) -> list[TextCost]:
    """Return what a plan costs with each tokenizer, without hours where its device is not here.

    Raises:
        UnsupportedError: the GPU that is to be assumed is not known.
    """
    try:
        where = place(plan, device_name)
    except UnsupportedError as error:
        if device_name:
            raise
        where = None
        note(f"no hours are predicted: {error.message}")
    texts = [_encoded(name, tokenizer, whole) for name, tokenizer in tokenizers.items()]
    return text_costs(plan, texts, where)


def _encoded(name: str, tokenizer: Tokenizer, whole: TextGroup) -> EncodedText:
    """Return all the text as a tokenizer cuts it, with one token to begin each document."""
    tokens = whole.tokens[name] + whole.documents
    words = whole.words if whole.has_words else None
    return EncodedText(name, tokenizer.vocab, tokens, words, whole.text_bytes)
