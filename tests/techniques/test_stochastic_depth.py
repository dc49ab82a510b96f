"""Stochastic depth: which blocks run, what kept ones are divided by, and what a step then is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.ledger import Ledger
from headrace.costs.machine import Machine
from headrace.model.mask import Rows
from headrace.predict.candidates import Asking
from headrace.techniques.design.stochastic_depth import StochasticDepth, is_kept
from headrace.train.train import step

RATE = "techniques.stochastic_depth.rate=0.6"
DEEP = ("model.layers=4", RATE)


def choices(steps: range, rate: float, layer: int = 3, seed: int = 3) -> list[bool]:
    return [is_kept(seed, step, layer, rate) for step in steps]


def test_the_choice_is_a_pure_function_with_the_right_chance() -> None:
    many = range(4000)
    assert choices(many, 0.3) == choices(many, 0.3)
    kept = sum(choices(many, 0.3)) / len(many)
    assert abs(kept - 0.7) < 4 * (0.7 * 0.3 / len(many)) ** 0.5
    assert all(choices(many, 0.0))
    other = (choices(many, 0.3, layer=2), choices(many, 0.3, seed=4))
    assert all(o != choices(many, 0.3) for o in other)


def test_rates_rise_from_nothing() -> None:
    rates = [StochasticDepth(rate=0.6).rate_of(layer, 4) for layer in range(4)]
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert StochasticDepth().rate_of(0, 1) == 0.0


def by_hand(build: Build, ids_BT: Tensor, index: int) -> Tensor:
    """Return hidden states of a step, from a build of the baseline."""
    model, technique = build.model, StochasticDepth(rate=0.6)
    x = model.embed(ids_BT)
    shared = model.share(Rows(torch.arange(ids_BT.size(1))[None]), ids_BT.size(1))
    for layer, block in enumerate(model.blocks.values()):
        rate = technique.rate_of(layer, len(model.blocks))
        if is_kept(build.plan.seed, index, layer, rate):
            x = x + (block(x, shared) - x) / (1 - rate)
    return model.norm(x)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("techniques.selective_checkpoint.every=1",),
        ("techniques.torch_compile.backend=aot_eager", "techniques.torch_compile.scope=block"),
    ],
    ids=["plain", "checkpointed", "compiled"],
)
def test_a_step_is_the_shallower_model(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]], more: tuple[str, ...]
) -> None:
    """Compare loss and gradients over steps that drop different blocks; these get none."""
    build, baseline = make_tiny(*DEEP, *more), make_tiny("model.layers=4")
    (micro,) = batch(build)
    dropped = []
    for index in range(4):
        weights = {n: p.detach().clone() for n, p in build.model.named_parameters()}
        baseline.model.load_state_dict(weights)
        loss = float(step(build, [micro], index)[0])
        hidden = by_hand(baseline, micro.ids_BT, index)
        targets = micro.targets_BT.flatten()
        right = baseline.model.loss(hidden.flatten(0, 1), targets, None, baseline.objective)
        right = right / targets.numel()
        baseline.model.zero_grad()
        right.backward()
        assert loss == pytest.approx(float(right.detach()), rel=1e-5)
        for name, parameter in build.model.named_parameters():
            want = baseline.model.get_parameter(name).grad
            if want is None:
                assert parameter.grad is None, f"{name} was dropped and has a gradient"
                assert parameter.equal(weights[name]), f"{name} was dropped and moved"
                dropped.append((index, name))
            else:
                assert parameter.grad is not None
                scale = parameter.grad.norm() / want.norm()  # the step clips
                torch.testing.assert_close(parameter.grad, scale * want, rtol=1e-4, atol=1e-6)
    assert dropped, "four steps dropped nothing: choose another seed"
    counts = build.notes["stochastic_depth"]
    blocks = {(index, name.split(".")[1]) for index, name in dropped}
    assert counts["left_out"] == len(blocks) and counts["left_out"] + counts["run"] == 4 * 3


def test_evaluation_runs_the_whole_model(make_tiny: Callable[..., Build]) -> None:
    build, baseline = make_tiny(*DEEP), make_tiny("model.layers=4")
    build.now = {f"keep/{layer}": 0.0 for layer in range(4)}
    ids, rows = torch.arange(8)[None], Rows(torch.arange(8)[None])
    with torch.no_grad():
        assert build.model.hidden(ids, rows).equal(baseline.model.hidden(ids, rows))


def test_looking_for_evidence_leaves_the_counts_alone(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    build = make_tiny(*DEEP)
    step(build, batch(build), 0)
    now, counts = dict(build.now), dict(build.notes["stochastic_depth"])
    evidence = StochasticDepth(rate=0.6).active(build)
    assert evidence.active and evidence.numbers == counts
    assert build.now == now and build.notes["stochastic_depth"] == counts


@pytest.mark.parametrize("more", [[], ["techniques.full_checkpoint={}"]], ids=str)
def test_the_work_of_a_mean_step_is_foreseen(
    tiny_plan: Callable[..., Any], more: list[str]
) -> None:
    """With rates of 0, 0.2, 0.4 and 0.6 it leaves out three blocks of ten, wherever blocks run."""

    def foreseen(*given: str) -> Ledger:
        plan = tiny_plan("model.layers=4", *given, *more)
        return make_ledger(plan, make_context(plan, torch.device("cpu")))

    ours, baselines = foreseen(RATE), foreseen()
    blocks = baselines.sizes["block_flops"] + baselines.sizes["attention_flops"]
    saved = {"forward": blocks, "backward": 2 * blocks}
    saved["recompute"] = baselines.flops.get("recompute", 0.0)
    assert bool(saved["recompute"]) == bool(more)
    for name, flops in baselines.flops.items():
        assert ours.flops[name] == pytest.approx(flops - 0.3 * saved[name])
    counted = {"mlp.down/result": 0.7, "attention/backward": 0.7, "head/result": 1.0}
    for name, share in counted.items():
        assert ours.work[name].count == pytest.approx(share * baselines.work[name].count)


def test_a_single_block_is_refused(make_tiny: Callable[..., Build]) -> None:
    with pytest.raises(UnsupportedError, match="never left out") as caught:
        make_tiny("techniques.stochastic_depth.rate=0.5", "model.layers=1")
    assert "model.layers=2" in caught.value.remedy.text


COMPILE = "techniques.torch_compile.backend=aot_eager"
BLOCK = "techniques.torch_compile.scope=block"


@pytest.mark.parametrize("more", [(), ("techniques.torch_compile.fullgraph=false",)], ids=str)
def test_one_graph_of_all_blocks_is_refused(
    make_tiny: Callable[..., Build], more: tuple[str, ...]
) -> None:
    """It would be compiled anew in most steps, and after eight times not at all."""
    with pytest.raises(UnsupportedError, match="torch_compile makes one graph") as caught:
        make_tiny(*DEEP, COMPILE, *more)
    assert "2^3 sets" in caught.value.message
    assert f"{BLOCK} (or --without stochastic_depth)" == caught.value.remedy.text
    make_tiny(*DEEP, COMPILE, *more, BLOCK)


@pytest.mark.parametrize("second", ["stochastic_depth", "torch_compile"])
def test_a_sweep_that_puts_one_beside_the_other_takes_the_blocks_scope(
    make_tiny: Callable[..., Build], second: str
) -> None:
    on = {"stochastic_depth": COMPILE, "torch_compile": RATE}[second]
    build = make_tiny("model.layers=4", on)
    asking = Asking(build.plan, build.context, Machine.assumed("cpu"), catalogue(), learning=True)
    with pytest.raises(UnsupportedError, match="makes one graph"):
        asking.answer(build.plan, (f"+{second}",))
    assert asking.attempt(build.plan, (f"+{second}",)).changes == (f"+{second}", BLOCK)
