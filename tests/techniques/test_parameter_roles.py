"""Give factors of rate and decay to every optimizer's parameters by their role."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.data.loader import Micro
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.model.zoo import families
from headrace.optim.roles import role_of
from headrace.plan.plan import Plan
from headrace.train.identity import back, differences
from headrace.train.train import step

FACTORS = {"matrices": 0.5, "embeddings": 4.0, "head": 2.0, "vectors": 8.0}
DECAYS = {"matrices": 2.0, "embeddings": 0.0, "head": 0.5, "vectors": 4.0}
QUIET = ("optimizer.clip_norm=0", "optimizer.weight_decay=0", "schedule.kind=constant")
TAKERS = {
    "adamw": (),
    "sophia": ("techniques.sophia.every=5",),
    "muon": ("techniques.muon.lr=0.01",),
    "mup": ("techniques.mup.base_dim=8",),
    "adamw_8bit": ("techniques.adamw_8bit.smallest=64",),
    "optimizer_in_backward": ("techniques.optimizer_in_backward={}",),
    "bf16_parameters": ("techniques.bf16_parameters={}",),
}
"""Optimizers that take parameters, with what puts them into a plan."""


def test_every_parameter_of_every_family_has_its_role() -> None:
    seen: dict[str, set[str]] = {}
    for values in families().values():
        small = {"dim": 16, "heads": 2, "kv_heads": 0, "layers": 1, "vocab": 32, "context": 8}
        config = ModelConfig(**{**values, **small, "head_dim": 0, "ffn": 16})
        with torch.device("meta"):
            model = Decoder(config, baseline_parts(config), MaskSpec())
        for name, parameter in model.named_parameters():
            role = role_of(name, parameter.ndim)
            seen.setdefault(role, set()).add(name.partition(".")[0])
            assert (role == "vectors") == (parameter.ndim == 1), name
            assert (role == "matrices") == (parameter.ndim > 1 and name.startswith("blocks.")), name
    assert seen["embeddings"] == {"embed", "position"} and seen["head"] == {"head"}
    assert role_of("blocks.0.value_embed.weight", 2) == "embeddings"
    assert role_of("blocks.0.mlp.down", 3) == "matrices", "experts lie in one tensor"


def moved(build: Build, micros: list[Micro]) -> dict[str, Tensor]:
    """Return by how much a step moves each parameter."""
    before = {name: p.detach().clone() for name, p in build.model.named_parameters()}
    step(build, micros, 0)
    return {n: (p.detach() - before[n]).float() for n, p in build.model.named_parameters()}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_factor_multiplies_the_step_of_whatever_optimizer_takes_the_parameter(
    taker: str, make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    factors = [f"optimizer.lr_factors.{role}={factor}" for role, factor in FACTORS.items()]
    plain, scaled = (make_tiny(*QUIET, *TAKERS[taker], *more) for more in ((), factors))
    assert taker in scaled.optimizers
    one, other = (moved(build, batch(build)) for build in (plain, scaled))
    roles = set()
    for name, change in one.items():
        role = role_of(name, change.ndim)
        roles.add(role)
        rounded = 0.2 if taker == "bf16_parameters" and change.ndim > 1 else 1e-3
        wanted = FACTORS[role] * change
        assert change.abs().max() > 0, name
        assert (other[name] - wanted).norm() <= rounded * wanted.norm(), name
    assert roles == {*FACTORS}
    if taker != "bf16_parameters":  # whose forward pass rounds, and so its factor shows less
        groups = [g for o in scaled.optimizers.values() for g in o.param_groups]
        assert all(g["lr"] == g["initial_lr"] * g["lr_factor"] for g in groups)


def test_decay_follows_the_role_and_the_rate(make_tiny: Callable[..., Build]) -> None:
    """Take what a step without a gradient leaves: the weight x (1 - rate x decay)."""
    words = [f"optimizer.lr_factors.{role}={factor}" for role, factor in FACTORS.items()]
    words += [f"optimizer.decay_factors.{role}={factor}" for role, factor in DECAYS.items()]
    build = make_tiny(*words, "optimizer.weight_decay=0.25", "schedule.kind=constant")
    before = {name: p.detach().clone() for name, p in build.model.named_parameters()}
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * group["lr_factor"]
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in build.model.named_parameters():
        role = role_of(name, parameter.ndim)
        kept = 1 - build.plan.optimizer.lr * FACTORS[role] * 0.25 * DECAYS[role]
        torch.testing.assert_close(parameter.detach(), before[name] * kept, rtol=1e-6, atol=1e-7)


def test_roles_with_equal_factors_share_a_group(make_tiny: Callable[..., Build]) -> None:
    for words, count in (((), 2), (("optimizer.lr_factors.embeddings=3",), 3)):
        groups = make_tiny(*words).optimizers["adamw"].param_groups
        assert len(groups) == count, [sorted(group) for group in groups]


def test_a_tied_head_has_the_factor_of_the_embeddings(tiny_plan: Callable[..., Plan]) -> None:
    tied, one = "model.tied_embeddings=true", "optimizer.lr_factors.head=3"
    tiny_plan(tied, one, "optimizer.lr_factors.embeddings=3")
    tiny_plan(tied, "optimizer.lr_factors.embeddings=3")
    for key in ("lr_factors", "decay_factors"):
        with pytest.raises(ConfigError, match=f"optimizer.{key}.head = 3 cannot") as caught:
            tiny_plan(tied, f"optimizer.{key}.head=3")
        assert caught.value.remedy.text == f"optimizer.{key}.head=1"


def test_a_run_from_before_the_factors_is_the_same_run(tiny_plan: Callable[..., Plan]) -> None:
    class Saved:
        values: Any

    plan, saved = tiny_plan(), Saved()
    dumped = plan.dump()
    del dumped["optimizer"]["lr_factors"], dumped["optimizer"]["decay_factors"]["vectors"]
    saved.values = {"plan": dumped}
    assert differences(saved, plan) == {}  # type: ignore[arg-type]
    other = tiny_plan("optimizer.lr_factors.embeddings=5")
    found = differences(saved, other)  # type: ignore[arg-type]
    assert found == {"optimizer.lr_factors.embeddings": (1.0, 5.0)}


def test_muon_of_before_its_polynomials_is_another_run(tiny_plan: Callable[..., Plan]) -> None:
    """A resumed run has today's default, and what was in force before is another rule."""

    class Saved:
        values: Any

    plan, saved = tiny_plan("techniques.muon={}"), Saved()
    dumped = plan.dump()
    for knob in {*dumped["techniques"]["muon"]} - {"lr", "momentum", "weight_decay"}:
        del dumped["techniques"]["muon"][knob]
    saved.values = {"plan": dumped}
    found = differences(saved, plan)  # type: ignore[arg-type]
    assert found == {"techniques.muon.polynomials": ("jordan", "polar_express")}
    mended = back(saved, "techniques.muon.polynomials", ("jordan", ""))  # type: ignore[arg-type]
    assert mended == "techniques.muon.polynomials=jordan"
    kept = tiny_plan(mended)
    assert differences(saved, kept) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("knob", ["cosine={}", "warmup.steps=2"])
def test_a_schedule_is_in_force_beside_factors(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]], knob: str
) -> None:
    build = make_tiny(f"techniques.{knob}", "optimizer.lr_factors.embeddings=4")
    step(build, batch(build), 0)
    technique = build.plan.techniques[knob.partition("=")[0].partition(".")[0]]
    assert technique.active(build).active
    for group in build.optimizers["adamw"].param_groups:
        group["lr"] *= 2
    assert not technique.active(build).active
