"""FSDP's accumulation sends gradients once a step: collectives are counted."""

from pathlib import Path
from typing import Any

from composition import Composition

from headrace.data.ingest import prepare

FUNCTIONS = Path(__file__).with_name("collectives.py")


def test_accumulation_skips_communication(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    prepare(Composition("count", {"data": 2}, {"fsdp": {}}).plan())
    zygote.call(
        2,
        tmp_path,
        FUNCTIONS,
        "count",
        corpus=str(corpus),
        prepared=str(prepared_folder),
        micro_rows=[4, 2, 1],
        layers=3,
    )
