"""This module holds the work of the verb `data tokenizer`."""

from collections.abc import Iterator
from pathlib import Path

from headrace.cli.terminal import make_progress, show_json, show_table
from headrace.core.errors import ConfigError
from headrace.core.progress import OnProgress
from headrace.data.asked_text import asked_sources
from headrace.data.bpe import check_entries
from headrace.data.fields import TextReading
from headrace.data.left_out import LeftOutTally
from headrace.data.sources import read_documents
from headrace.data.survey import sample_texts
from headrace.data.training import train_for
from headrace.plan.data_config import DataConfig
from headrace.train.interrupts import Preparing


def train_file(data: DataConfig, output: Path, *, as_json: bool) -> None:
    """Train a tokenizer on all of the sources, and write its tokenizer.json whole or not at all.

    Args:
        data: what to train on and how.
        output: the file, or a folder that gets a tokenizer.json.
        as_json: print one JSON value.

    Raises:
        ConfigError: a source cannot be read or gives no text, or a special token is no name.
    """
    check_entries(data.vocab, data.special_tokens, of_verb=True)
    if output.is_dir():
        output /= "tokenizer.json"
    progress, tally = make_progress(as_json), LeftOutTally()
    try:
        with Preparing():
            if data.tokenizer_text == "sample":
                texts, text_bytes = sample_texts(_texts(data, tally, progress.task))
            else:
                texts, text_bytes = _texts(data, tally), None
            tokenizer, trained_on = train_for(data, texts, text_bytes, progress.task)
    finally:
        progress.close()
    if not trained_on.of_bytes:
        why = "; ".join(record.format() for record in tally.records)
        sources = [asked.source for asked in asked_sources(data)]
        message = f"data.sources = {sources} give no text"
        raise ConfigError(message + (why and f": {why}"), "data.sources=PATH")
    tokenizer.save(output)
    value = {
        "file": str(output),
        "sha256": tokenizer.fingerprint,
        "vocab": tokenizer.vocab,
        "pattern": data.tokenizer_pattern,
        "special_tokens": list(data.special_tokens),
        "trained_on": trained_on.model_dump(),
        "left_out": [record.to_dict() for record in tally.records],
    }
    if as_json:
        show_json(value)
        return
    for record in tally.records:
        progress.note(record.line())
    rows = value | {"trained_on": trained_on.format(), "left_out": []}
    show_table(["what", "value"], [[key, str(val)] for key, val in rows.items() if val != []])
    if tokenizer.vocab < data.vocab:
        progress.note(f"the text has no more pairs: {tokenizer.vocab:,} of {data.vocab:,} entries")


def _texts(
    data: DataConfig, tally: LeftOutTally, progress: OnProgress | None = None
) -> Iterator[str]:
    """Yield the text of every document of the sources, in their order."""
    read_bytes = 0
    for asked in asked_sources(data):
        for document in read_documents(asked, reading=TextReading.of(data), left_out=tally):
            yield document.text
            if progress is not None:
                read_bytes += len(document.text.encode())
                progress("reading", read_bytes, None)
