"""Compare `allowed`, `bias` and the pattern of blocks with their own words, pair by pair."""

from itertools import product

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa
from headrace.model.backend_needs import check_plain
from headrace.model.mask import (
    BlockPattern,
    MaskSpec,
    Rows,
    allowed,
    bias,
    dense,
    mask_of,
    mixed,
    slopes,
)

LENGTH = 7
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])
PREFIX = torch.tensor([3, 0])
DRAWN = [0, 0, 2, 3, 2, 1, 5, 5, 7, 3, 2]
"""What seed 3 draws for blocks 1 to 11; a change would change what trained models see."""


def sees(spec: MaskSpec, row: int, query: int, key: int) -> bool:
    """Return whether a query sees a key by the words of MaskSpec."""
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


def test_a_window_as_long_as_the_rows_limits_nothing() -> None:
    """A backend with a causal flag alone then computes it, and needs no mask."""
    rows, spec = Rows(torch.arange(6)[None]), MaskSpec(window=6, between=1)
    assert spec.within(6).is_plain_causal and spec.within(7) == spec
    assert Sdpa().prepare(spec, rows, 6) is None
    check_plain(spec.within(6))
    mask = Sdpa().prepare(spec.of_layer(0), Rows(torch.arange(7)[None]), 7)
    assert isinstance(mask, torch.Tensor) and not mask[..., 6, 0]
    config = ModelConfig(vocab=64, window=6, window_between=1, attention_cap=3.0)
    assert mask_of(config) == MaskSpec(window=6, between=1, soft_cap=3.0)


def test_only_the_default_is_plain_causal() -> None:
    assert MaskSpec().is_plain_causal
    for other in (
        MaskSpec(causal=False),
        MaskSpec(document=True),
        MaskSpec(window=4),
        MaskSpec(alibi=2),
        MaskSpec(soft_cap=5.0),
        MaskSpec(blocks=BlockPattern(4)),
    ):
        assert not other.is_plain_causal
        assert other.sees_all_before == (other == MaskSpec(document=True))


@pytest.mark.parametrize(
    ("block", "local", "stride", "first"),
    [(1, 1, 0, 0), (2, 1, 0, 1), (3, 2, 0, 0), (2, 1, 3, 0), (5, 1, 2, 2), (100, 1, 0, 0)],
)
@pytest.mark.parametrize("document", [False, True])
def test_a_pattern_is_what_the_words_say(
    block: int, local: int, stride: int, first: int, document: bool
) -> None:
    length = 23
    spec = MaskSpec(document=document, blocks=BlockPattern(block, local, stride, first))
    segments = (torch.arange(length) >= 9).long()[None]
    found = allowed(spec, Rows(torch.arange(length)[None], segments), length)[0, 0]
    for query, key in product(range(length), range(length)):
        apart, of = query // block - key // block, key // block
        near = abs(apart) < local or of < first or (stride > 0 and apart % stride == 0)
        visible = near and key <= query and not (document and query >= 9 > key)
        assert bool(found[query, key]) == visible, (query, key)


@pytest.mark.parametrize(("local", "stride", "first", "random"), [(1, 0, 0, 2), (2, 3, 1, 3)])
def test_a_draw_is_of_its_place_alone(local: int, stride: int, first: int, random: int) -> None:
    """A draw adds `random` of the blocks before, alike in longer rows, others for another seed."""
    rest = BlockPattern(1, local, stride, first).seen(40)
    one, other = (BlockPattern(1, local, stride, first, random, seed).seen(40) for seed in (0, 1))
    drawn = one & ~rest
    for query in range(40):
        free = int((~rest[query, :query]).sum())
        assert int(drawn[query].sum()) == min(random, free)
    assert not drawn.triu().any() and (one & rest).equal(rest)
    for count in (1, 2, 7, 39):
        shorter = BlockPattern(1, local, stride, first, random).seen(count)
        assert shorter.equal(one[:count, :count])
    assert not one.equal(other)
    places = drawn.nonzero()[:, 1].float()  # all over what stands before, not at one end
    assert 0.3 < (places / drawn.nonzero()[:, 0]).mean() < 0.7


def test_a_draw_is_the_same_everywhere_and_always() -> None:
    drawn = BlockPattern(1, 1, random=1, seed=3).seen(12) & ~torch.eye(12, dtype=torch.bool)
    assert drawn.nonzero()[:, 1].tolist() == DRAWN


def test_density_counts_blocks_below_the_diagonal() -> None:
    assert BlockPattern(4).density(16) == 4 / 10
    assert BlockPattern(4).density(13) == 4 / 10
    assert BlockPattern(4, local=2).density(16) == 7 / 10
    assert BlockPattern(4, local=9).density(16) == 1


@pytest.mark.parametrize(
    ("heads", "right"),
    [
        (1, [1 / 256]),
        (2, [1 / 16, 1 / 256]),
        (4, [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (8, [2.0**-n for n in range(1, 9)]),
        (3, [1 / 16, 1 / 256, 1 / 4]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
    ],
)
def test_slopes_are_the_papers(heads: int, right: list[float]) -> None:
    torch.testing.assert_close(slopes(heads), torch.tensor(right))


def test_a_bias_is_minus_slope_times_distance_where_a_key_is_seen() -> None:
    spec = MaskSpec(document=True, window=3, alibi=2)
    rows = Rows(torch.arange(LENGTH).expand(2, -1), SEGMENTS)
    found, ok = dense(spec, rows, LENGTH, torch.float32), allowed(spec, rows, LENGTH)
    assert found.shape == (2, 2, LENGTH, LENGTH)
    for head, slope in enumerate((1 / 16, 1 / 256)):
        for query, key in product(range(LENGTH), range(LENGTH)):
            right = -slope * abs(query - key)
            assert bias(spec, LENGTH)[0, head, query, key] == right
            for row in range(2):
                seen = bool(ok[row, 0, query, key])
                assert found[row, head, query, key] == (right if seen else float("-inf"))


@pytest.mark.parametrize("seed", [2_863_311_529, 2**32 + 3, 2**63 - 1])
def test_large_seeds_draw_by_their_low_bits(seed: int) -> None:
    place = torch.arange(50)
    assert mixed(place, place, seed).equal(mixed(place, place, seed % 2**32))
    assert not mixed(place, place, seed).equal(mixed(place, place, seed - 1))
