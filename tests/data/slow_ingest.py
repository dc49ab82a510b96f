"""Run the command line with one moment of its preparation made longer."""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from headrace.cli import data, train
from headrace.cli.app import app
from headrace.core.progress import Progress
from headrace.data import training
from headrace.data.tokenizer import Tokenizer

LONG = 200_000_000
"""Rounds of a hash; its library takes minutes for them, and listens to nobody."""


def run(argv: list[str], moment: str) -> None:
    """Run `headrace ARGV`, which touches the file `reached` and then stays at a moment."""

    class Slow(Progress):
        def task(self, description: str, done: float, total: float | None) -> None:
            if description == moment:
                Path("reached").touch()
                for _ in range(600):  # a signal just before a sleep is answered after it
                    time.sleep(0.1)

    def native(*_: Any, **__: Any) -> Any:
        Path("reached").touch()
        hashlib.pbkdf2_hmac("sha256", b"", b"", LONG)

    data.make_progress = train.make_progress = lambda as_json: Slow()
    if moment == "inside of the tokenizer's training":
        training.train_tokenizer = native
    if moment == "inside of the tokenizer":
        Tokenizer.encode_batch = native
    sys.argv = ["headrace", *argv]
    app()
