"""`allowed` against its own words, one query and one key at a time."""

from itertools import product

import pytest
import torch

from headrace.model.mask import MaskSpec, Rows, allowed

LENGTH = 7
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
PREFIX = torch.tensor([3, 0])


def sees(spec: MaskSpec, row: int, query: int, key: int) -> bool:
    """The words of MaskSpec."""
    visible = key <= query or not spec.causal
    if spec.window is not None and abs(query - key) >= spec.window:
        visible = False
    if spec.prefix and key < PREFIX[row]:
        visible = True
    if spec.document and SEGMENTS[row, query] != SEGMENTS[row, key]:
        visible = False
    return visible


@pytest.mark.parametrize(
    ("causal", "document", "window", "prefix"),
    list(product((True, False), (True, False), (None, 1, 3), (True, False))),
)
def test_allowed_is_what_the_words_say(
    causal: bool, document: bool, window: int | None, prefix: bool
) -> None:
    spec = MaskSpec(causal=causal, document=document, window=window, prefix=prefix)
    rows = Rows(torch.arange(LENGTH).expand(2, -1), SEGMENTS, PREFIX)
    found = allowed(spec, rows, LENGTH).expand(2, 1, LENGTH, LENGTH)
    for row, query, key in product(range(2), range(LENGTH), range(LENGTH)):
        assert bool(found[row, 0, query, key]) == sees(spec, row, query, key), (row, query, key)


def test_only_the_default_is_plain_causal() -> None:
    assert MaskSpec().is_plain_causal
    for other in (MaskSpec(causal=False), MaskSpec(document=True), MaskSpec(window=4)):
        assert not other.is_plain_causal
