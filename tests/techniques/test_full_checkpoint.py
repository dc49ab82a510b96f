"""Compare full checkpointing beside other techniques: gradients, and the work of one more pass."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from facts import in_order
from pieces import gradients
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.loader import Micro
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.full_checkpoint.every"
COMPILE = "techniques.torch_compile.backend=aot_eager"


@pytest.mark.parametrize(("every", "blocks"), [(1, 2), (2, 1), (3, 1)])
def test_chosen_blocks_run_again_once_per_micro_batch(
    make_tiny: Make, batch: Batch, every: int, blocks: int
) -> None:
    build = make_tiny(f"{ON}={every}", "batch.tokens=128", "batch.micro_sequences=2")
    step(build, batch(build), 0)
    numbers = check_active(build)["full_checkpoint"].numbers
    assert numbers["forwards"] == numbers["recomputed_blocks"] == 4 * blocks


@pytest.mark.parametrize(
    "beside",
    [
        ("techniques.mixture_of_experts.experts=4",),
        ("techniques.stochastic_depth.rate=0.4",),
        ("techniques.chunked_mlp.chunk_tokens=5",),
        ("techniques.lora.rank=2",),
        # A set of the contract compiles it by block, and among experts.
        pytest.param((COMPILE,), id="compiled", marks=pytest.mark.slow),
        pytest.param(
            (COMPILE, "techniques.torch_compile.scope=block"), id="block", marks=pytest.mark.slow
        ),
        pytest.param(
            (COMPILE, "techniques.mixture_of_experts.experts=4"),
            id="compiled-experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (COMPILE, "techniques.chunked_mlp.chunk_tokens=5"),
            id="compiled-chunked",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                COMPILE,
                "techniques.torch_compile.scope=block",
                "techniques.stochastic_depth.rate=0.4",
            ),
            id="compiled-depth",
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_gradients_are_those_without_it(
    make_tiny: Make, batch: Batch, beside: tuple[str, ...]
) -> None:
    with_it, without = (make_tiny(*beside, *more) for more in ((f"{ON}=1",), ()))
    found, wanted = (gradients(build, batch(build)) for build in (with_it, without))
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=1e-5, atol=1e-7, msg=name)
    assert check_active(with_it)["full_checkpoint"].active


def test_a_step_without_its_wrap_is_no_evidence(make_tiny: Make, batch: Batch) -> None:
    build, notes = make_tiny(COMPILE), make_tiny(f"{ON}=1", COMPILE).notes
    step(build, batch(build), 0)
    technique = make_tiny(f"{ON}=1").plan.techniques["full_checkpoint"]
    build.notes["full_checkpoint"] = notes["full_checkpoint"]
    assert not technique.active(build).active


@pytest.mark.parametrize(
    "more", [(), pytest.param(("techniques.chunked_mlp.chunk_tokens=5",), marks=pytest.mark.slow)]
)
def test_compiled_blocks_hold_nothing_wider_than_their_input(
    make_tiny: Make, batch: Batch, more: tuple[str, ...]
) -> None:
    widest = []
    for knobs in ((f"{ON}=1", *more), ()):
        build = make_tiny(COMPILE, "techniques.torch_compile.scope=block", *knobs)
        held: list[int] = []

        def watched(hidden: Tensor, *args: Any, loss: Any = build.model.loss) -> Tensor:
            held.extend(activations_behind(hidden))  # noqa: B023
            return loss(hidden, *args)

        build.model.loss = watched  # type: ignore[method-assign]
        step(build, batch(build), 0)
        widest.append(max(held))
    stream = build.plan.batch.tokens * build.config.dim
    assert widest[0] == stream < widest[1]


def activations_behind(hidden: Tensor) -> Iterator[int]:
    """Yield numbers of each tensor that compiled graphs behind `hidden` keep, but parameters."""
    waiting: list[Any] = [hidden.grad_fn]
    while waiting:
        node = waiting.pop()
        waiting += [behind for behind, _ in getattr(node, "next_functions", ()) if behind]
        if "CompiledFunction" in node.name():
            saved = [t for t in node.saved_tensors if t.is_floating_point()]
            yield from (t.numel() for t in saved if not isinstance(t, torch.nn.Parameter))


@pytest.mark.parametrize("beside", [(), ("techniques.chunked_mlp.chunk_tokens=5",)])
@pytest.mark.parametrize("every", [1, 2])
def test_the_work_again_is_predicted(
    make_tiny: Make, batch: Batch, every: int, beside: tuple[str, ...]
) -> None:
    """To the operation: products as torch counts them, attention beside them as it stands."""
    counted, told = [], []
    for more in ((), (f"{ON}={every}",)):
        build = make_tiny(*beside, *more)
        with FlopCounterMode(display=False) as counter:
            step(build, batch(build), 0)
        products = counter.get_flop_counts()["Global"]
        counted.append(sum(n for op, n in products.items() if "attention" not in str(op)))
        ledger = make_ledger(build.plan, build.context)
        attention = ledger.sizes["attention_flops"] / every if more else 0.0
        told.append(ledger.flops.get("recompute", 0.0) - attention)
    tokens = build.plan.batch.tokens
    assert (counted[1] - counted[0]) / tokens == pytest.approx(told[1] - told[0], rel=1e-6)


def test_one_of_the_two_checkpoints(make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match=in_order("full_checkpoint", "selective_checkpoint")):
        make_tiny(f"{ON}=1", "techniques.selective_checkpoint.every=1")
