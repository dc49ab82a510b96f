"""What the suite does not try on a GPU stands in pytest's summary, with the reason.

A technique that the place refuses, for want of a package say, has no tests there, and neither has a
choice of a knob: each such technique is one skip that names them. On a CPU nothing is told: what is
left out there needs a GPU or another plan, and is the same on every CPU with a compiler.
"""

from collections.abc import Iterator

import house
import pytest
import torch

from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention import flash_attention_3

MESHED = {
    *(
        "context_parallel",
        "data_parallel",
        "expert_parallel",
        "fsdp",
        "pipeline_parallel",
        "tensor_parallel",
        "ulysses",
    ),
    "zero",
}
"""They share one run among processes, and the suite is one."""
OF_A_CPU = {"cpu_threads", "kept_memory"}
"""They change how a processor computes, which on a GPU computes nothing of a step."""
OF_PAIRS = {"preference"}
"""They learn from pairs of answers, which the suite's text is not; `tests/techniques` has some."""

LEFT_OUT = [name for name in house.CATALOGUE.techniques if house.left_out(name, "cuda")]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """A test that changes what a place supports neither reads nor leaves an answer."""
    house.variants.cache_clear()
    yield
    house.variants.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out_on_a_gpu(name: str) -> None:
    pytest.skip(f"left out on this GPU: {house.left_out(name, 'cuda')}")


def test_one_gpu_tries_all_that_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its own plan can give a technique to act on is there (`house.BESIDE`)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # an H200 stands in
    whole = {
        name: house.left_out(name, "cuda")
        for name in house.CATALOGUE.techniques
        if not house.variants(name, "cuda")
    }
    assert {name for name, why in whole.items() if "is not installed" not in why} == (
        MESHED | OF_A_CPU | OF_PAIRS
    )


# What is beside float8_linear are sizes, which its kernels ask for and the plan does not. What is
# beside the others they rewrite: where the baseline does it too they have nothing of their own.
UNASKED = {"float8_linear", "rope", "rms_norm", "swiglu", "weight_init"}


@pytest.mark.parametrize("name", sorted({name for name, _ in house.BESIDE} - UNASKED))
def test_nothing_stands_beside_without_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it is refused on an H200 that has FlashAttention 4, and in its plan it is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    four = flash_attention_3.RELEASES["FA4"].module
    monkeypatch.setattr(flash_attention_3, "is_installed", lambda module: module == four)
    variant = house.choices(name, "cuda")[0]
    alone = house.make_plan(variant.technique(), device="cuda")
    answer = variant.technique().supports(house.context_on("cuda", alone))
    assert isinstance(answer, Unsupported)
    assert house.fits(variant, device="cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_choice_is_tried_or_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, absent = "sliding_window", Unsupported("it is not installed", "pip install it")
    kind, (*others, last) = house.CATALOGUE.find(name), house.choices(name, device)
    assert others

    def answers(gone: list[house.Variant]) -> None:
        refused = [v.technique() for v in gone]
        monkeypatch.setattr(
            kind, "supports", lambda self, _: absent if self in refused else Supported()
        )
        house.variants.cache_clear()

    answers([])
    assert house.variants(name, device) == [*others, last] and not house.left_out(name, device)
    answers([last])
    assert house.variants(name, device) == others
    assert house.left_out(name, device) == f"{last}: it is not installed"
    answers([*others, last])
    assert name not in house.names_on(device)
    told = ", ".join(map(str, [*others, last]))
    assert house.left_out(name, device) == f"{told}: it is not installed"
