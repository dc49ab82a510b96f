"""A well-known method that is not here is told as such."""

import pytest

from headrace.core.errors import ConfigError
from headrace.core.known import KNOWN
from headrace.core.technique import installed


def test_every_nearest_name_exists_and_no_known_name_does() -> None:
    techniques = installed().techniques
    assert {near for names in KNOWN.values() for near in names} <= set(techniques)
    assert not set(KNOWN) & set(techniques)


@pytest.mark.parametrize(
    ("name", "near"),
    [("lion", "muon"), ("zero", "fsdp"), ("qat", "qlora"), ("Ring-Attention", "context_parallel")],
)
def test_a_known_name_is_told_with_what_comes_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        installed().find(name)
    message = caught.value.message
    assert "not built here" in message and near in message and "did you mean" not in message


def test_what_nothing_comes_near_is_told_so() -> None:
    with pytest.raises(ConfigError, match="nothing here comes near it"):
        installed().find("ema")
