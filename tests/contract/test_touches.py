"""Touches only what it declares: sockets, names of parameters, identities of blocks; and claims."""

from functools import cache

import house
import pytest
import torch
from facts import in_order
from house import Variant, toy
from torch import Tensor, nn

from headrace.assemble.sockets import COMPOSED, OWNED, PARTS, Build
from headrace.core.errors import ConfigError
from headrace.costs.adapters import ADAPTERS
from headrace.model.decoder import Block
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage, Technique

OTHER_MODELS = ("config.", "parts.mlp", "parts.mixer")
"""Claims of what makes another model, whose parameters have other names."""


@cache
def names_in(text: str) -> list[str]:
    """The names of the parameters of a plan without techniques, which many variants share."""
    build = house.build_of(Plan.read(text, house.CATALOGUE))
    return [name for name, _ in build.model.named_parameters()]


@pytest.mark.knobs_slow
def test_touches_what_it_declares_alone(device: str, variant: Variant) -> None:
    """It fills its sockets and no other, keeps the names of parameters and the blocks, and a block
    that hands on fp32 where bf16 goes in would double what every later block reads."""
    technique = variant.technique()
    claims = {c for c in technique.claims if not c.startswith("config.")}
    assert claims <= {*OWNED, *PARTS}
    assert set(technique.composes) <= set(COMPOSED)

    seen: list[nn.Module] = []
    witness = toy("aaa", Stage.MODEL, lambda build: seen.extend(build.model.blocks.values()))
    plan = house.plan_of(variant, device=device)
    build = house.build_of(plan.replaced(techniques={"aaa": witness, **plan.techniques}))
    filled = {socket for socket, names in build.filled.items() if variant.name in names}
    assert claims <= filled <= {*technique.claims, *technique.composes}

    if not any(claim.startswith(OTHER_MODELS) for claim in technique.claims):
        names = [n for n, _ in build.model.named_parameters() if not n.endswith(ADAPTERS)]
        assert names == names_in(house.plan_without(variant, device).to_toml())
    blocks = list(build.model.blocks.values())
    assert len(blocks) == len(seen) == house.LAYERS
    assert all(b is s and type(b) is Block for b, s in zip(blocks, seen, strict=True))

    dtypes: set[torch.dtype] = set()
    for block in blocks:
        block.register_forward_hook(lambda block, given, out: dtypes.add(out.dtype))
    house.take_step(build, house.make_rows(build.config.vocab - 7, ignored=False))
    assert dtypes == {build.model.residual_dtype}


@pytest.mark.parametrize("name", house.names_on("cpu"))
def test_every_declared_socket_is_filled_by_some_choice(name: str) -> None:
    filled: set[str] = set()
    for variant in house.variants(name, "cpu"):
        sockets = house.build_of(house.plan_of(variant)).filled
        filled |= {socket for socket, names in sockets.items() if name in names}
    technique = house.CATALOGUE.find(name)
    declared = {*technique.claims, *technique.composes}
    assert filled == {c for c in declared if not c.startswith("config.")}


UNDECLARED = {
    "engine": lambda build: setattr(build, "engine", lambda *_: None),
    "parts.head": lambda build: setattr(build.parts, "head", lambda config: nn.Identity()),
    "mask": lambda build: setattr(build, "mask", build.mask.with_document()),
    "terms": lambda build: build.terms.append(lambda *_: 0.0),
    "state": lambda build: build.state.update(mine=object()),
    "values": lambda build: build.values.update(window=lambda step: 1.0),
    "block_forward": lambda build: build.wrap_blocks("mine", lambda forward, layer: forward),
}


@pytest.mark.parametrize("socket", UNDECLARED)
def test_touching_an_undeclared_socket_is_a_bug(socket: str) -> None:
    sly = toy("sly", Stage.CHECKPOINT, UNDECLARED[socket])
    with pytest.raises(AssertionError, match=rf"sly touched undeclared .*{socket}"):
        house.build_of(house.make_plan(sly))


def test_replacing_a_value_of_the_baselines_is_noticed() -> None:
    sly = toy("sly", Stage.SCHEDULE, lambda build: build.values.update(lr=lambda step: 0.5))
    with pytest.raises(AssertionError, match=r"sly touched undeclared .*values"):
        house.build_of(house.make_plan(sly))


def nothing(build: Build) -> None:
    """Fill nothing."""


def test_two_owners_of_a_socket_are_both_named() -> None:
    first = toy("first", Stage.STEP, nothing, claims=("clip", "passes"))
    second = toy("second", Stage.DATA, nothing, claims=("passes",))
    with pytest.raises(ConfigError, match=r"'passes'") as caught:
        house.build_of(house.make_plan(first, second))
    assert "first" in str(caught.value) and "second" in str(caught.value)
    assert "--without" in caught.value.remedy.text


def test_an_excluded_technique_is_named_with_the_reason() -> None:
    shy = toy("shy", Stage.STEP, nothing, excludes={"loud": "measured to diverge"})
    loud = toy("loud", Stage.STEP, nothing)
    with pytest.raises(ConfigError, match=in_order("shy", "loud", "measured to diverge")):
        house.build_of(house.make_plan(shy, loud))
    house.build_of(house.make_plan(shy))


class Doubled(nn.Linear):
    """Compute twice a linear's value, with the same weight name."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def double(linear: nn.Linear) -> nn.Linear:
    """Return `linear` as a Doubled over the same parameters."""
    new = Doubled(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    new.weight, new.bias = linear.weight, linear.bias
    return new


def replacing(name: str, *linears: str) -> Technique[Build]:
    """Return a toy that doubles linears."""
    return toy(
        name, Stage.LINEAR, lambda b: b.replace_linears(name, linears, double), composes=("linear",)
    )


def test_a_linear_has_one_owner_and_a_model_several() -> None:
    plan = house.make_plan(
        replacing("one", "blocks.0.mlp.down"), replacing("two", "blocks.1.mlp.down")
    )
    build = house.build_of(plan)
    kinds = {n: type(m) for n, m in build.model.named_modules() if isinstance(m, nn.Linear)}
    assert {n for n, kind in kinds.items() if kind is Doubled} == {
        "blocks.0.mlp.down",
        "blocks.1.mlp.down",
    }
    assert build.filled["linear"] == ["one", "two"]

    clash = house.make_plan(
        replacing("one", "blocks.0.mlp.down"), replacing("two", "blocks.0.mlp.down")
    )
    with pytest.raises(ConfigError, match=r"two and one .*blocks\.0\.mlp\.down"):
        house.build_of(clash)
