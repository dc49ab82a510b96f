"""An update waits for a checkpoint's copies, where nothing else changes what is saved."""

import house
import pytest
import torch

from headrace.assemble.build import absorb


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("weight_averaging", False),
        ("sophia", False),
        ("optimizer_in_backward", False),
        ("adaptive_clipping", False),
        ("spike_rewind", False),
        ("muon", True),
        ("lora", True),
    ],
)
def test_copies_go_on_beside_kernels_only_where_updates_alone_change_what_is_saved(
    name: str, beside: bool
) -> None:
    knobs = house.tiny_knobs(name, "cpu")
    build = house.build_of(house.plan_of(house.Variant(name, knobs)))
    assert (build.change_hooks is build.before_change) == beside
    assert beside or build.change_hooks is None


def test_an_update_is_held_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build = house.build_of(house.make_plan())
    called: list[str] = []
    for name, optimizer in build.optimizers.items():
        monkeypatch.setattr(optimizer, "step", lambda name=name: called.append(name))
    assert build.change_hooks is not None
    build.change_hooks.append(lambda: called.append("held back"))
    for _ in range(2):
        absorb(build, torch.ones(()))
    assert called == ["held back", "adamw", "adamw"]
