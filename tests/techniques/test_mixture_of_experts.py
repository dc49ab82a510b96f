"""Run a mixture of experts: its balance loss is in the gradient; its start and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pieces import gradients

from headrace.assemble.context import make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build, auxiliary_loss
from headrace.core.errors import ConfigError
from headrace.model.head import IGNORED
from headrace.model.mask import Rows
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.design.mixture_of_experts import MixtureOfExperts
from headrace.train.train import step

NAME = "techniques.mixture_of_experts"
CHECKPOINT = "techniques.selective_checkpoint.every=1"


@pytest.mark.parametrize("micro", [0, 2, 1])
def test_the_step_adds_the_mean_balance(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]], micro: int
) -> None:
    """Its loss is cross-entropy plus balance x (1 / tokens) x the sum over rows and layers."""
    rows = f"batch.micro_sequences={micro}"
    build = make_tiny(f"{NAME}.experts=4", f"{NAME}.balance=0.5", rows)
    plain = make_tiny(f"{NAME}.experts=4", f"{NAME}.balance=0.0", rows)
    with_balance = float(step(build, batch(build), 0)[0])
    entropy = float(step(plain, batch(plain), 0)[0])
    fresh = make_tiny(f"{NAME}.experts=4", f"{NAME}.balance=0.5")
    (micro_batch,) = fresh.loader.step(0).micros
    rows_of_all = torch.arange(micro_batch.ids_BT.size(1))[None]
    fresh.model.hidden(micro_batch.ids_BT, Rows(rows_of_all))
    kept = float(sum(b.mlp.take_balance() for b in fresh.model.blocks.values()).detach())
    tokens = micro_batch.ids_BT.numel()
    assert with_balance - entropy == pytest.approx(kept / tokens, rel=1e-3)
    assert kept / tokens >= 2 * 0.5 * 0.99, "two layers of at least `balance` each"


@pytest.mark.parametrize("micro", [0, 1])
def test_ignored_targets_leave_the_balance_as_it_is(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]], micro: int
) -> None:
    found = []
    for ignored in (False, True):
        losses = []
        for balance in (0.5, 0.0):
            rows = f"batch.micro_sequences={micro}"
            build = make_tiny(f"{NAME}.experts=4", f"{NAME}.balance={balance}", rows)
            micros = batch(build)
            if ignored:
                for one in micros:
                    one.targets_BT[:, ::2] = IGNORED
            losses.append(float(step(build, micros, 0)[0]))
        found.append(losses[0] - losses[1])
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpointed_gradients_are_the_plain_ones(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]], compiled: bool
) -> None:
    how = [f"{NAME}.experts=4", f"{NAME}.balance=0.5"]
    more = ["techniques.torch_compile.backend=aot_eager", "techniques.torch_compile.scope=block"]
    plain = make_tiny(*how)
    right = gradients(plain, batch(plain))
    build = make_tiny(*how, CHECKPOINT, *(more if compiled else []))
    found = gradients(build, batch(build))
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert all(b.mlp.take_balance() is None for b in build.model.blocks.values())


def test_tensor_parallel_ranks_share_the_gradient_and_not_the_value(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    build = make_tiny(f"{NAME}.experts=4", f"{NAME}.balance=0.5")
    found = []
    for ranks in (1, 2):
        build.world = replace(build.world, sizes={"tensor": ranks})
        with torch.enable_grad():
            ids = batch(build)[0].ids_BT
            build.model.hidden(ids, Rows(torch.arange(ids.size(1))[None]))
            value = auxiliary_loss(build)
            assert value is not None
        router: Any = build.model.blocks["0"].mlp.router.weight
        found.append((float(value.detach()), torch.autograd.grad(value, router)[0]))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], 2 * found[1][1])


def test_a_block_that_is_left_out_has_routed_nothing(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    """Beside stochastic depth a layer may not have run yet when evidence is asked for."""
    build = make_tiny(f"{NAME}.experts=4", "techniques.stochastic_depth.rate=0.999")
    step(build, batch(build), 0)
    assert build.notes["stochastic_depth"]["left_out"] == 1
    found = check_active(build)["mixture_of_experts"]
    assert found.active and "1 of 2 layers" in found.detail


def test_experts_start_as_the_dense_matrices_do(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(f"{NAME}.experts=8", f"{NAME}.expert_ffn=64")
    named = dict(build.model.named_parameters())
    std = build.config.init_std
    assert named["blocks.0.mlp.gate_up"].std().item() == pytest.approx(std, rel=0.05)
    written = std / (2 * build.config.layers) ** 0.5
    assert named["blocks.0.mlp.down"].std().item() == pytest.approx(written, rel=0.05)
    first, second = named["blocks.0.mlp.down"][:2]
    assert not first.equal(second)


def test_more_choices_than_experts_is_refused(tiny_plan: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"top_k = 5 .* experts = 4"):
        tiny_plan(f"{NAME}.experts=4", f"{NAME}.top_k=5")


def test_refuses_what_it_cannot_do(tiny_plan: Callable[..., Any]) -> None:
    plan = tiny_plan()
    here = make_context(plan, torch.device("cpu"))
    gpu = replace(here, device="cuda", capability=(9, 0), precision="bf16")

    def asked(context: Any, technique: Any = None, **tables: Any) -> Any:
        technique = technique or MixtureOfExperts()
        copy = plan.model_copy(
            update={k: getattr(plan, k).model_copy(update=v) for k, v in tables.items()}
        )
        return technique.supports(replace(context, plan=copy))

    assert isinstance(asked(here), Supported) and isinstance(asked(gpu), Supported)
    for context, how, says in (
        (here, {"model": {"pretrained": "there"}}, "dense"),
        (here, {"model": {"bias": True}}, "biases"),
        (replace(gpu, capability=(8, 0)), {}, "older than Hopper"),
        (replace(gpu, precision="fp32"), {}, "bf16 only"),
        (gpu, {"model": {"dim": 20}}, "model.dim = 20"),
        (gpu, {"technique": MixtureOfExperts(expert_ffn=12)}, "expert_ffn = 12"),
    ):
        answer = asked(context, **how)
        assert isinstance(answer, Unsupported) and says in answer.reason and answer.remedy.text
