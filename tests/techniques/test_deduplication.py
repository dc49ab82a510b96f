"""The technique `deduplication` is refused without Numba where its method needs it."""

import sys
from typing import Any

import pytest

from headrace.core.errors import RefusalKind
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.data.deduplication import Deduplication


@pytest.mark.parametrize("method", ["exact", "paragraph", "minhash", "bloom"])
def test_what_needs_numba_is_refused_without_it(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before any text is read, and names the command that installs it."""
    context: Any = None
    assert isinstance(Deduplication(method=method).supports(context), Supported)
    monkeypatch.setitem(sys.modules, "numba", None)
    answer = Deduplication(method=method).supports(context)
    if method in ("exact", "paragraph"):
        assert isinstance(answer, Supported)
        return
    assert isinstance(answer, Unsupported) and answer.kind is RefusalKind.PACKAGE
    assert answer.remedy.text == "pip install 'headrace[data]'"
