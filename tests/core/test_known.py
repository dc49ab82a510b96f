"""A well-known method that is not here is told as such."""

from collections.abc import Callable

import pytest
from facts import in_order

from headrace.core.errors import ConfigError
from headrace.core.known import KNOWN
from headrace.plan.plan import Plan
from headrace.plan.technique import installed


def test_every_nearest_name_exists_and_no_known_name_does() -> None:
    techniques = installed().techniques
    assert {near for names in KNOWN.values() for near in names} <= set(techniques)
    assert not set(KNOWN) & set(techniques)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("soap", "muon"),
        ("signum", "lion"),
        ("zero3", "fsdp"),
        ("qat", "qlora"),
        ("Ring-Attention", "context_parallel"),
        ("mxfp8", "float8_linear"),
        ("async_tp", "tensor_parallel"),
        ("relora", "lora"),
        ("sample_packing", "document_packing"),
        ("bin_packing", "best_fit_packing"),
        ("rslora", "qlora"),
    ],
)
def test_a_known_name_is_told_with_what_comes_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        installed().find(name)
    message = caught.value.message
    assert "not built here" in message and near in message and "did you mean" not in message


def test_what_nothing_comes_near_is_told_so() -> None:
    with pytest.raises(ConfigError, match=in_order("pruning", "not built here", "nothing")) as told:
        installed().find("pruning")
    assert not told.value.remedy.changes


def test_a_wrong_item_of_a_list_is_mended_by_its_key(tiny_plan: Callable[..., Plan]) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_plan("optimizer.betas=[1,1]")
    assert caught.value.remedy.text == "'optimizer.betas=[0.9, 0.95]'"
