"""muP: starting values and rates by Table 3, and activations that do not grow with width."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.init import random_source
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.design.mup import Mup, is_slow
from headrace.train.train import step

BASE = "techniques.mup.base_dim=8"
WIDTHS = (32, 64, 128, 256)


def test_starting_values_and_rates_are_table_3(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(BASE, "model.dim=32", "model.heads=4", "model.position=rope")
    plain = random_source(build.config, build.plan.seed)
    rate, decay = build.plan.optimizer.lr, build.plan.optimizer.weight_decay
    groups = {
        p: group
        for optimizer in build.optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    slow = 0
    for name, parameter in build.model.named_parameters():
        ratio, group = 1.0, groups[parameter]
        if name == "head.weight":
            ratio = 4.0
        elif name.startswith("blocks.") and parameter.ndim == 2:
            ratio = 2.0
        torch.testing.assert_close(parameter.data * ratio, plain(name, parameter.shape))
        m = 4.0 if ratio > 1 else 1.0
        slow += m > 1
        assert group["initial_lr"] == pytest.approx(rate / m)
        kept = decay * m if parameter.ndim >= 2 else 0.0
        assert group["weight_decay"] == pytest.approx(kept)
    assert slow == 1 + 4 * build.config.layers


@pytest.mark.parametrize("kind", ["zero_output", "he", "orthogonal"])
def test_another_start_of_matrices_is_scaled_by_width_once(
    make_tiny: Callable[..., Build], kind: str
) -> None:
    """Matrices by He's rule and orthonormal ones are smaller by the root of the width already."""
    build = make_tiny(BASE, f"techniques.weight_init.kind={kind}", "model.dim=64", "model.heads=8")
    plain = random_source(build.config, build.plan.seed)
    for name, power in (("blocks.0.mlp.gate_up.weight", 0.5), ("head.weight", 1.0)):
        weight, own = build.model.get_parameter(name), kind != "zero_output"
        ratio = 8 ** (power - 0.5 * (own and name != "head.weight"))
        torch.testing.assert_close(weight.data * ratio, plain(name, weight.shape))
    assert build.plan.techniques["weight_init"].active(build).active


def test_evidence_wants_every_matrix_at_its_rate(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(BASE, "optimizer.lr_factors.matrices=3")
    mup, rate = build.plan.techniques["mup"], build.plan.optimizer.lr / 2
    assert mup.active(build).active
    assert f"learn at {rate:g} and {3 * rate:g}, the rest" in mup.active(build).detail
    matrices, group = build.routed["mup"], build.optimizers["mup"].param_groups[0]
    build.routed["mup"] = dict([*matrices.items()][1:])
    assert not mup.active(build).active, "one is another optimizer's"
    build.routed["mup"] = matrices
    one = {**group, "params": group["params"][:1], "initial_lr": build.plan.optimizer.lr}
    build.optimizers["mup"].param_groups.append(one)
    assert not mup.active(build).active, "one learns at the plan's own rate"


def test_gradients_are_the_baselines_at_the_same_weights(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    build, baseline = make_tiny(BASE), make_tiny()
    baseline.model.load_state_dict(build.model.state_dict())
    losses = [float(step(b, batch(b), 0)[0]) for b in (build, baseline)]
    assert losses[0] == losses[1]
    for name, parameter in baseline.model.named_parameters():
        found = build.model.get_parameter(name).grad
        assert found is not None and parameter.grad is not None and found.equal(parameter.grad)


def growth(make_tiny: Callable[..., Build], *more: str) -> dict[str, float]:
    """Return how states and logits grow with width: the widest's change over the narrowest's.

    The change is a root mean square over four steps.
    """
    sizes: dict[str, list[float]] = {}
    for width in WIDTHS:
        build = make_tiny(
            f"model.dim={width}",
            f"model.heads={width // 8}",
            f"model.ffn={2 * width}",
            "optimizer.lr=0.02",
            "optimizer.clip_norm=0",
            "optimizer.weight_decay=0",
            "optimizer.eps=1e-12",
            "schedule.kind=constant",
            "model.init_std=0.1",
            *more,
        )
        micros = build.loader.step(0).micros
        ids, rows = micros[0].ids_BT, Rows(torch.arange(micros[0].ids_BT.size(1))[None])

        def look(build: Build = build, ids: Any = ids, rows: Any = rows) -> dict[str, Any]:
            with torch.no_grad():
                shared = build.model.share(rows, ids.size(1))
                x, seen = build.model.embed(ids), {}
                for name, block in build.model.blocks.items():
                    x = block(x, shared)
                    seen[f"block {name}"] = x
                return {**seen, "logits": build.model.logits(ids, rows)}

        before = look()
        for index in range(4):
            step(build, micros, index)
        for name, value in look().items():
            change = (value - before[name]).square().mean().sqrt()
            sizes.setdefault(name, []).append(float(change))
    return {name: values[-1] / values[0] for name, values in sizes.items()}


def test_activations_do_not_grow_with_width(make_tiny: Callable[..., Build]) -> None:
    """Run the coordinate check (arXiv 2203.03466, appendix D.1), from width 32 to 256."""
    with_mup = growth(make_tiny, "techniques.mup.base_dim=32")
    without = growth(make_tiny)
    assert all(ratio < 1.5 for ratio in with_mup.values()), with_mup
    assert all(ratio > 1.8 for ratio in without.values()), without


def test_which_inputs_widen() -> None:
    config = ModelConfig(
        dim=16, heads=2, vocab=64, position="learned", context=8, bias=True, qk_norm=True
    )
    named = dict(Decoder(config, baseline_parts(config), MaskSpec()).named_parameters())
    slow = {n for n, p in named.items() if is_slow(n, p.ndim)}
    assert {n.split(".", 2)[-1] for n in slow if n.startswith("blocks")} == {
        "mixer.qkv.weight",
        "mixer.out.weight",
        "mlp.gate_up.weight",
        "mlp.down.weight",
    }
    assert {n for n in slow if not n.startswith("blocks")} == {"head.weight"}


def test_refuses_what_table_3_does_not_cover(tiny_plan: Callable[..., Any]) -> None:
    def asked(technique: Mup, *overrides: str) -> Any:
        return technique.supports(make_context(tiny_plan(*overrides), torch.device("cpu")))

    assert isinstance(asked(Mup(base_dim=8)), Supported)
    for technique, overrides, says in (
        (Mup(base_dim=8), ("model.tied_embeddings=true",), "multiplier"),
        (Mup(base_dim=12), (), "heads of 8"),
        (Mup(base_dim=8), ("techniques.muon.lr=0.01",), "muon"),
    ):
        answer = asked(technique, *overrides)
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text
    assert asked(Mup(base_dim=13)).remedy.text == "techniques.mup.base_dim=16"
