"""Add a technique in a file of its own, to check that doctor, planner and tuner find it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace.techniques.loss

NEW = '''
"""A technique that nothing has ever heard of."""

from typing import ClassVar

from headrace.costs.ledger import Ledger
from headrace.plan.technique import Card, Context, Evidence, Stage, Supported, Technique
from headrace.assemble.sockets import Build


class FewerBytes(Technique[Build]):
    """Move half of the bytes of every stream."""

    room: ClassVar[str] = "loss"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    timed: ClassVar[bool] = True
    symptoms: ClassVar[tuple[str, ...]] = ("memory bandwidth",)
    card: ClassVar[Card] = Card("bytes", "a thought", "all", "none", "this test")

    def supports(self, context: Context) -> Supported:
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        return ledger.reworked(
            lambda _, w: w.compiled().whole(w.compiled().bytes / 2) if w.kind == "stream" else w
        )

    def apply(self, build: Build) -> None:
        """Nothing."""

    def active(self, build: Build) -> Evidence:
        return Evidence(True, "")
'''


@pytest.fixture
def fewer_bytes(tmp_path: Path) -> Iterator[str]:
    """Add one file with a technique to the room `loss`, and remove it at the end."""
    (tmp_path / "fewer_bytes.py").write_text(NEW)
    room = headrace.techniques.loss
    room.__path__.append(str(tmp_path))
    try:
        yield "fewer_bytes"
    finally:
        room.__path__.remove(str(tmp_path))
        sys.modules.pop("headrace.techniques.loss.fewer_bytes", None)
        delattr(room, "fewer_bytes")
