"""What the suite does not try on a GPU stands in pytest's summary, with the reason.

A technique that the place refuses, for want of a package say, has no tests there, and neither has a
choice of a knob: each such technique is one skip that names them. On a CPU nothing is told: what is
left out there needs a GPU or another plan, and is the same on every CPU with a compiler.
"""

import house
import pytest

from headrace.core.technique import Supported, Unsupported

LEFT_OUT = [name for name in house.CATALOGUE.techniques if house.left_out(name, "cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out_on_a_gpu(name: str) -> None:
    pytest.skip(f"left out on this GPU: {house.left_out(name, 'cuda')}")


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

    answers([])
    assert house.variants(name, device) == [*others, last] and not house.left_out(name, device)
    answers([last])
    assert house.variants(name, device) == others
    assert house.left_out(name, device) == f"{last}: it is not installed"
    answers([*others, last])
    assert name not in house.names_on(device)
    told = ", ".join(map(str, [*others, last]))
    assert house.left_out(name, device) == f"{told}: it is not installed"
