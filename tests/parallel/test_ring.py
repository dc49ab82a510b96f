"""The ring equals ordinary attention over whole rows, whatever the mask and the ranks.

One world of each size runs all cases (`ring_ranks.py`) and leaves its numbers in files; every test
here reads some of them. Which blocks are computed is checked without any process.
"""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import ring_of
from ring_ranks import CASES

from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.parallel.ring import RingMask, merge_, visible

FUNCTIONS = Path(__file__).with_name("ring_ranks.py")
TOLERANCE_FP32 = 1e-5
BAND_BF16 = 0.02
CPU = torch.device("cpu")
MASKS = [
    RingMask(causal, window)
    for causal, window in itertools.product((True, False), (None, 1, 2, 3, 5, 100))
]


@pytest.fixture(scope="module")
def numbers(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what every rank of a world of the given size wrote."""
    folder = tmp_path_factory.mktemp("ring")

    @cache
    def of(ranks: int) -> list[dict[str, Any]]:
        zygote.call(ranks, folder, FUNCTIONS, "check", folder=str(folder))
        return [json.loads((folder / f"{ranks}-{r}.json").read_text()) for r in range(ranks)]

    return of


def below(numbers: list[dict[str, Any]], names: list[str], limit: float) -> None:
    """Every rank's number of every name is there and at most `limit`."""
    for rank, found in enumerate(numbers):
        broken = [text for text in found.values() if isinstance(text, str)]
        assert not broken, broken[0]
        wrong = {name: found[name] for name in names if not found[name] <= limit}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])  # cp4-tied
class TestRanks:
    """Run real processes."""

    def test_output_and_gradients_equal_whole_rows(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), list(CASES), TOLERANCE_FP32)

    def test_twice_is_the_same_to_the_bit(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), [f"{name}, again" for name in CASES], 0)

    def test_blocks_are_computed_by_the_kernel_that_is_asked_for(
        self, numbers: Any, ranks: int
    ) -> None:
        below(numbers(ranks), ["by plain", "by flash_cpu"], TOLERANCE_FP32)
        below(numbers(ranks), ["by plain alone", "by flash_cpu alone"], 0)

    def test_low_precision_merges_in_fp32(self, numbers: Any, ranks: int) -> None:
        names = [n for n in numbers(ranks)[0] if n.endswith((", autocast", ", bf16"))]
        assert len(names) == 8
        below(numbers(ranks), names, BAND_BF16)

    def test_evaluation_keeps_nothing(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), ["no gradient"], TOLERANCE_FP32)

    def test_layers_in_flight_and_recomputed(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), ["deep", "deep, recomputed"], TOLERANCE_FP32)
        below(numbers(ranks), ["deep, calls", "deep, recomputed, calls"], 0)

    def test_compiled_without_a_break(self, numbers: Any, ranks: int) -> None:
        names = [n for n in numbers(ranks)[0] if "compiled" in n]
        assert len(names) == 4
        below(numbers(ranks), names, 0)

    def test_ranks_out_of_step(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), ["out of step"], TOLERANCE_FP32)

    def test_traffic_is_what_shapes_say(self, numbers: Any, ranks: int) -> None:
        below(numbers(ranks), ["bytes", "blocks", "skipped"], 0)


@pytest.mark.gpu
def test_on_two_gpus(zygote: Any, tmp_path: Path) -> None:
    """Run through NCCL, in fp32 and in bf16, eager and compiled."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    zygote.call(2, tmp_path, FUNCTIONS, "check_gpus", folder=str(tmp_path))
    numbers = [json.loads((tmp_path / f"gpu-{r}.json").read_text()) for r in range(2)]
    names = [n for n, x in numbers[0].items() if not isinstance(x, str)]
    below(numbers, [n for n in names if "float32" in n], TOLERANCE_FP32)
    below(numbers, [n for n in names if "bfloat16" in n], BAND_BF16)
    assert len(names) == 4 * len(CASES) + 2


# --- without processes -----------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_cover_exactly_what_the_mask_allows(ranks: int, mask: RingMask) -> None:
    """Written back at their places, all ranks' blocks are the project's one definition."""
    for c in (1, 2, 3):
        T = 2 * ranks * c
        place_1T = torch.arange(T)[None]
        right = allowed(MaskSpec(mask.causal, window=mask.window), Rows(place_1T), T)[0, 0]
        found = torch.zeros(T, T, dtype=torch.int32)
        for rank, owner in itertools.product(range(ranks), repeat=2):
            block = ring_of(rank, ranks).block(owner, 2 * c, mask, CPU)
            if block is None:
                continue
            mine = ring_of(rank, ranks).cut(place_1T)[0, block.queries]
            theirs = ring_of(owner, ranks).cut(place_1T)[0, block.keys]
            seen = torch.ones(len(mine), len(theirs), dtype=torch.int32)
            if isinstance(block.mask, torch.Tensor):
                seen = block.mask[0].int()
            elif block.mask == "causal":
                seen = seen.tril()
            found[mine[:, None], theirs[None]] += seen
        assert torch.equal(found, right.int())


def test_the_definition_of_visible_is_the_projects() -> None:
    for mask in MASKS:
        right = allowed(MaskSpec(mask.causal, window=mask.window), Rows(torch.arange(9)[None]), 9)
        place = torch.arange(9)
        assert torch.equal(visible(place, place, mask.causal, mask.window), right[0, 0])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_balanced_and_needs_no_mask(ranks: int) -> None:
    """Every rank computes as many pairs, and no flagless block appears."""
    work = []
    for rank in range(ranks):
        pairs = 0.0
        for owner in range(ranks):
            block = ring_of(rank, ranks).block(owner, 8, RingMask(), CPU)
            assert block is not None and block.mask == ("causal" if owner == rank else "full")
            size = len(range(8)[block.queries]) * len(range(8)[block.keys])
            pairs += size / 2 if block.mask == "causal" else size
        work.append(pairs)
    assert len(set(work)) == 1 and work[0] == (8 * ranks) ** 2 / 2 / ranks


def test_merging_what_sees_nothing_changes_nothing() -> None:
    o, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3)
    lse[0, 0, 0] = -torch.inf
    o[0, 0, 0] = 0
    kept, kept_lse = o.clone(), lse.clone()
    merge_(o, lse, torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3), -torch.inf))
    assert torch.equal(o, kept) and torch.equal(lse, kept_lse)
