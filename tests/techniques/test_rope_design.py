"""Rotary embedding rewrites the position, keeps the plan's base, and says why where it cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order
from pieces import left

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.model import position
from headrace.plan.changes import changed, difference
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported, check_claims
from headrace.techniques.attention.alibi import Alibi
from headrace.techniques.design import rope
from headrace.techniques.design.rope import Rope
from headrace.train.train import step

ON = "techniques.rope={}"
Make = Callable[..., Build]


def added(plan: Plan, knobs: str = "{}") -> Plan:
    """The plan with the technique and what room it needs, as a sweep would say it."""
    words = ["+rope", f"techniques.rope={knobs}", 'model.position="rope"']
    words += [f"-{name}" for name in plan.techniques]
    return changed(plan, words, catalogue())


@pytest.mark.parametrize(
    "before",
    [
        ["model.position=none"],
        ["model.position=learned"],
        ["model.family=gpt2"],
        ["techniques.alibi={}"],
        [],
    ],
)
def test_any_other_position_is_rewritten(tiny_plan: Callable[..., Any], before: list[str]) -> None:
    plan = tiny_plan(*before)
    assert (plan.model.position == "rope") == (not before)
    after = added(plan)
    assert after.model.position == "rope"
    assert after.model.rope_theta == plan.model.rope_theta
    without = changed(after, ["-rope"], catalogue())
    assert without.model.position == ("learned" if "gpt2" in str(before) else "rope")


def test_the_loss_is_that_of_the_key(make_tiny: Make, batch: Callable[[Build], list[Any]]) -> None:
    """Bit for bit, from a family whose positions are learned; and they are another model's."""
    learned = (
        "model.family=gpt2",
        "model.vocab=320",
        "model.layers=2",
        "model.dim=16",
        "model.heads=2",
        "model.kv_heads=2",
        "model.ffn=32",
    )
    by_technique, by_key = (make_tiny(*learned, by) for by in (ON, "model.position=rope"))
    assert by_technique.config == by_key.config
    losses = [[float(step(b, batch(b), n)[0]) for n in range(2)] for b in (by_technique, by_key)]
    assert losses[0] == losses[1]
    for name, parameter in by_key.model.named_parameters():
        assert by_technique.model.get_parameter(name).equal(parameter)
    other = make_tiny(*learned)
    assert float(step(other, batch(other), 0)[0]) != losses[0][0]
    assert Rope().active(by_technique).active and not Rope().active(other).active


def test_a_plan_that_rotates_stays_as_it_is(
    make_tiny: Make, batch: Callable[[Build], list[Any]]
) -> None:
    on, off = make_tiny(ON, "model.rope_theta=500.0"), make_tiny("model.rope_theta=500.0")
    assert on.config == off.config and on.config.rope_theta == 500
    assert float(step(on, batch(on), 0)[0]) == float(step(off, batch(off), 0)[0])
    assert on.predicted(on.plan) == off.predicted(off.plan)
    assert Rope().active(on).active


def test_a_base_is_set_where_it_is_asked_for(
    make_tiny: Make, tiny_plan: Callable[..., Any]
) -> None:
    asked = "techniques.rope.theta=500.0"
    build = make_tiny(asked)
    assert build.config.rope_theta == 500
    found = Rope(theta=500.0).active(build)
    assert found.active and found.numbers["blocks"] == 2
    assert found.numbers["fastest"] == pytest.approx(1)
    assert found.numbers["slowest"] == pytest.approx(500 ** (-6 / 8))
    assert "not base" not in found.detail
    assert not Rope(theta=600.0).active(build).active
    with pytest.raises(ConfigError, match=in_order("model.rope_theta", 400.0, "rope", 500.0)):
        tiny_plan(asked, "model.rope_theta=400.0")
    plain = tiny_plan("model.rope_theta=400.0")
    words = ("+rope", "techniques.rope.theta=500.0")
    assert difference(tiny_plan(), changed(tiny_plan(), words, catalogue())) == words
    assert changed(plain, ["+rope"], catalogue()).model.rope_theta == 400


def test_giving_another_position_is_an_error(tiny_plan: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=in_order("model.position", "'none'", "rope", "'rope'")):
        tiny_plan(ON, "model.position=none")
    with pytest.raises(
        ConfigError, match=in_order("rope", "model.position", "'rope'", "alibi", "'none'")
    ):
        tiny_plan(ON, "techniques.alibi={}")
    with pytest.raises(ConfigError, match=in_order("alibi", "rope", "config.position")):
        check_claims([Alibi(), Rope()])
    with pytest.raises(ConfigError, match=in_order("even head_dim", 5)) as told:
        tiny_plan(ON, "model.head_dim=5")
    assert told.value.remedy.changes == (("model.head_dim=6",),)


@pytest.mark.parametrize(
    ("found", "theta", "why", "remedy"),
    [
        (ModelConfig(rope_theta=500.0), None, None, None),
        (ModelConfig(rope_theta=500.0), 500.0, None, None),
        (
            ModelConfig(rope_theta=500.0),
            400.0,
            "theta = 500, not 400",
            "techniques.rope.theta=500.0",
        ),
        (ModelConfig(position="learned"), None, "learned other positions", "leave it out"),
    ],
)
def test_weights_keep_what_they_have_learned(
    tiny_plan: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    found: ModelConfig,
    theta: float | None,
    why: str | None,
    remedy: str | None,
) -> None:
    plan = tiny_plan("model={pretrained = 'there'}", ON)
    monkeypatch.setattr(rope, "shape_of", lambda model: found)
    answer = Rope(theta=theta).supports(make_context(plan, torch.device("cpu")))
    if why is None or remedy is None:
        assert isinstance(answer, Supported)
    else:
        assert isinstance(answer, Unsupported)
        assert why in answer.reason and answer.remedy.text == remedy


class Still(position.RotaryPosition):
    """Turns every place by the same angle."""

    def prepare(self, positions_BT: torch.Tensor) -> position.Rotation:
        return super().prepare(torch.ones_like(positions_BT))


class Halting(position.RotaryPosition):
    """Turns no further than the second place."""

    def prepare(self, positions_BT: torch.Tensor) -> position.Rotation:
        return super().prepare(positions_BT.clamp(max=1))


class Partial(position.RotaryPosition):
    """Leaves the last pair as it is."""

    def frequencies(self, device: torch.device) -> torch.Tensor:
        found_P = super().frequencies(device)
        return torch.cat((found_P[:-1], 0 * found_P[-1:]))


@pytest.mark.parametrize("kind", [position.NoPosition, Still, Halting, Partial])
def test_what_does_not_turn_with_the_place_is_no_evidence(make_tiny: Make, kind: Any) -> None:
    build = make_tiny(ON)
    assert Rope().active(build).active
    build.model.position = kind(build.config)
    assert Rope().active(build).active is False
    build.filled["parts.position"] = ["another"]
    assert Rope().active(build).active is False


def test_another_base_is_no_evidence_but_of_a_technique_that_says_so(make_tiny: Make) -> None:
    build = make_tiny(ON)
    build.model.position = position.RotaryPosition(
        build.config.model_copy(update={"rope_theta": 9e3})
    )
    found = Rope().active(build)
    assert found.active is False and "not base 10000" in found.detail
    slowed = make_tiny(ON, "techniques.yarn={factor = 2.0, kind = 'linear'}")
    assert Rope().active(slowed).active


def test_a_rank_without_queries_has_nothing_to_show(make_tiny: Make) -> None:
    build = make_tiny(ON)
    for block in build.model.blocks.values():
        block.mixer = torch.nn.Identity()
    assert Rope().active(build).active is None
    assert Rope().active(left(model=left(blocks={}))).active is None
