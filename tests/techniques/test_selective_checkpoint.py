"""The save policy, operation by operation: what is kept, what is run again, and what it costs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.costs.count import block_linears
from headrace.data.loader import Micro
from headrace.kernels import grouped_linear
from headrace.parallel import ring
from headrace.techniques.memory.selective_checkpoint import (
    MATMULS,
    SAVED,
    SelectiveCheckpoint,
    operation_of,
    widening,
)
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.selective_checkpoint"
COMPILE = "techniques.torch_compile.backend=aot_eager"
ATEN = torch.ops.aten
FIRST_POLICY = [
    ATEN.mm,
    ATEN.bmm,
    ATEN.addmm,
    ATEN.linear,
    ATEN._scaled_mm,
    ATEN._grouped_mm,
    ATEN.convolution,
    ATEN._scaled_dot_product_flash_attention,
    ATEN._scaled_dot_product_flash_attention_for_cpu,
    ATEN._scaled_dot_product_efficient_attention,
    ATEN._scaled_dot_product_cudnn_attention,
    ATEN._scaled_dot_product_attention_math,
    ATEN._scaled_dot_product_fused_attention_overrideable,
    torch.ops.headrace.ring_attention,
]
"""What "matmul+attention" has meant since it was there."""


def test_the_default_keeps_what_it_always_kept() -> None:
    assert ring and SelectiveCheckpoint().kept() == SAVED["matmul+attention"]
    assert all(operation_of(op.default) in SAVED["matmul+attention"] for op in FIRST_POLICY)


@pytest.mark.parametrize(
    ("op", "operation"),
    [
        (ATEN._scaled_grouped_mm.default, "grouped_mm"),
        (torch.ops.headrace.looped_linear.default, "grouped_mm"),
        (ATEN._flash_attention_forward.default, "attention"),
        (ATEN._efficient_attention_forward.default, "attention"),
        (torch.ops.higher_order.flex_attention, "attention"),
        (torch.ops.higher_order.flex_attention_backward, None),
        (ATEN._scaled_dot_product_cudnn_attention_backward.default, None),
        (torch.ops.headrace.ring_attention_backward.default, None),
        (torch.ops.headrace.looped_outer.default, None),
        ("flash_attn_3::fwd", "attention"),
        ("flash_attn_3::bwd", None),
        (ATEN.mul.Tensor, None),
        (ATEN.silu.default, None),
        (ATEN._to_copy.default, None),
    ],
    ids=str,
)
def test_operations_are_told_by_their_names(op: Any, operation: str | None) -> None:
    assert grouped_linear and operation_of(op) == operation


def saved_in_forward(build: Build, micros: list[Micro]) -> int:
    """Results that the policy had kept when the loss was computed."""
    saved, loss = [], build.model.loss

    def watched(*args: object) -> Tensor:
        saved.append(build.notes["selective_checkpoint"]["saved"])
        return loss(*args)  # type: ignore[arg-type]

    build.model.loss = watched  # type: ignore[method-assign]
    step(build, micros, 0)
    return saved[0]


@pytest.mark.parametrize(
    ("knobs", "per_block"),
    [
        (["every_matmul=2"], 3),  # qkv, gate_up and attention
        (["every_matmul=3"], 3),  # qkv, down and attention
        (["every_matmul=4", "save=matmul"], 1),
        (["every_matmul=2", "save=matmul"], 2),
        (['operations=["mm"]'], 4),
        (['operations=["mm"]', "every_matmul=2"], 2),
        (['operations=["attention"]'], 1),
        (['operations=["bmm","convolution"]'], 0),
        (['operations=["addmm","attention"]'], 1),  # linears without a bias are mm
    ],
    ids=str,
)
def test_what_is_kept_of_each_block(
    make_tiny: Make, batch: Batch, knobs: list[str], per_block: int
) -> None:
    build = make_tiny(*(f"{ON}.{knob}" for knob in knobs))
    assert saved_in_forward(build, batch(build)) == 2 * per_block


def test_a_linear_with_a_bias_is_addmm(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny(f'{ON}.operations=["addmm"]', "model.bias=true")
    assert saved_in_forward(build, batch(build)) == 2 * 4


@pytest.mark.parametrize(
    "knobs",
    [
        (f"{ON}.every_matmul=2",),
        (f'{ON}.operations=["mm"]',),
        pytest.param(
            (f"{ON}.every_matmul=2", COMPILE), id="compiled-matmuls", marks=pytest.mark.slow
        ),
        pytest.param(  # a set of the contract compiles it by block
            (f"{ON}.every_matmul=3", COMPILE, "techniques.torch_compile.scope=block"),
            id="compiled-blocks",
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_gradients_are_those_without_it(
    make_tiny: Make, batch: Batch, knobs: tuple[str, ...]
) -> None:
    with_it, without = make_tiny(*knobs), make_tiny()
    for build in (with_it, without):
        step(build, batch(build), 0)
    right = dict(without.model.named_parameters())
    for name, parameter in with_it.model.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name].grad, rtol=1e-5, atol=1e-7, msg=name)
    assert check_active(with_it)["selective_checkpoint"].active


@pytest.mark.parametrize(("every", "blocks"), [(1, 3), (2, 2), (3, 1), (4, 1)])
def test_of_every_so_many_blocks_the_first_is_checkpointed(
    make_tiny: Make, batch: Batch, every: int, blocks: int
) -> None:
    build = make_tiny(f"{ON}.every={every}", "model.layers=3")
    (micro,) = batch(build)
    step(build, [micro], 0)
    numbers = check_active(build)["selective_checkpoint"].numbers
    assert numbers["forwards"] == numbers["recomputed_blocks"] == blocks
    kept = [n for n in build.predicted(build.plan).memory if n.endswith("/activation")]
    assert len(kept) == 3 - blocks


@pytest.mark.parametrize(("outer", "wide"), [(15, False), (16, False), (17, True)])
def test_a_product_is_wide_beyond_twice_its_input(outer: int, wide: bool) -> None:
    x, weight = torch.ones(3, 8), torch.ones(outer, 8)
    assert (widening(ATEN.linear.default, (x, weight)) > 2) == wide
    assert (widening(ATEN.mm.default, (x, weight.t())) > 2) == wide
    assert (widening(ATEN.addmm.default, (torch.ones(outer), x, weight.t())) > 2) == wide


@pytest.mark.parametrize(("rank", "long"), [(2, 0), (8, 2)])
def test_a_correction_with_a_short_sum_runs_again(
    make_tiny: Make, batch: Batch, rank: int, long: int
) -> None:
    """Keep what is frozen of four linears, and rerun the adapter's first matmul, which is small."""
    build = make_tiny(
        f"{ON}.save=matmul", f"techniques.lora.rank={rank}", "model.dim=64", "model.ffn=96"
    )
    (micro,) = batch(build)
    step(build, [micro], 0)
    numbers = check_active(build)["selective_checkpoint"].numbers
    assert numbers["saved"] == build.config.layers * (8 + long)


def test_every_block_counts_its_own_products(make_tiny: Make, batch: Batch) -> None:
    """Three of four: the count begins anew in each block, so each keeps its first and last."""
    one, three = (
        saved_in_forward(build, batch(build))
        for build in (
            make_tiny(f"{ON}.every_matmul=3", f"model.layers={layers}") for layers in (1, 3)
        )
    )
    assert three == 3 * one


@pytest.mark.parametrize(
    "share", [*(f"every_matmul={k}" for k in range(1, 6)), "wide_every=2", "wide_every=3"]
)
def test_the_work_again_is_predicted(make_tiny: Make, batch: Batch, share: str) -> None:
    counted, told = [], 0.0
    for more in ((), (f"{ON}.{share}",)):
        build = make_tiny(*more)
        with FlopCounterMode(display=False) as counter:
            step(build, batch(build), 0)
        counted.append(counter.get_total_flops())
        told = make_ledger(build.plan, build.context).flops.get("recompute", 0.0)
    assert (counted[1] - counted[0]) / build.plan.batch.tokens == pytest.approx(told, rel=1e-6)


def test_compiled_blocks_do_not_share_what_they_keep(make_tiny: Make, batch: Batch) -> None:
    """One block's graph would be reused for all, with the first one's policy."""
    build = make_tiny(f"{ON}.wide_every=2", COMPILE, "techniques.torch_compile.scope=block")
    step(build, batch(build), 0)
    numbers = check_active(build)["selective_checkpoint"].numbers
    assert numbers["narrowed"] > 0 and check_active(build)["torch_compile"].numbers["graphs"] >= 2


def test_wide_products_are_kept_in_some_blocks_only(make_tiny: Make, batch: Batch) -> None:
    saved = []
    for every in (1, 2):
        build = make_tiny(f"{ON}.wide_every={every}", "model.layers=3")
        step(build, batch(build), 0)
        saved.append(check_active(build)["selective_checkpoint"].numbers["saved"])
    per_block = saved[0] / 3
    wide = sum(outer > 2 * inner for inner, outer in block_linears(build.config).values())
    runs = per_block / (len(block_linears(build.config)) + 1)  # and attention, for each time kept
    assert wide and saved[1] == saved[0] - wide * runs
    technique = build.plan.techniques["selective_checkpoint"]
    build.notes["selective_checkpoint"]["narrowed"] = 0
    assert not technique.active(build).active, "no wide product was left out"


def test_a_share_of_no_products_is_refused(make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match="every_matmul"):
        make_tiny(f"{ON}.every_matmul=2", f"{ON}.save=attention")
    assert SelectiveCheckpoint(operations=("bmm",), every_matmul=2).kept() <= MATMULS


SAVE, WIDE = f"{ON}.save=attention", f"{ON}.wide_every=2"
NARROW = "model.kv_heads=1"  # so that of a block's products gate_up alone is wide
LINEAR = "techniques.linear_attention.rule=sum"
CONVOLVES = "techniques.short_convolution.between=1"


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ([SAVE, LINEAR], "linear_attention has none"),
        ([f'{ON}.operations=["attention"]', LINEAR], "linear_attention has none"),
        ([SAVE, "techniques.logit_soft_cap.cap=2.0"], "logit_soft_cap makes plain products"),
        ([SAVE, f"{ON}.every=2", CONVOLVES], "short_convolution has none in the blocks"),
        ([WIDE, SAVE], "no product that it keeps"),
        ([WIDE, f"{ON}.every_matmul=3", NARROW], "no product that it keeps"),
        ([WIDE, f'{ON}.operations=["addmm","attention"]'], "no product that it keeps"),
        ([WIDE, f'{ON}.operations=["bmm"]'], "no product that it keeps"),
    ],
    ids=str,
)
def test_what_would_keep_nothing_is_refused(make_tiny: Make, knobs: list[str], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why) as caught:
        make_tiny(*knobs)
    make_tiny(*knobs, *caught.value.remedy.changes[0])


@pytest.mark.parametrize(
    "knobs",
    [
        [SAVE, CONVOLVES],
        [SAVE, "techniques.alibi={}"],
        [WIDE, f"{ON}.every_matmul=2", NARROW],
        [WIDE, f"{ON}.every_matmul=3"],  # qkv is wide here
        [WIDE, f"{ON}.every_matmul=3", NARROW, "techniques.lora.rank=2"],  # an adapter's product
        [WIDE, f'{ON}.operations=["addmm"]', "model.bias=true"],
        [f"{ON}.wide_every=9"],
    ],
    ids=str,
)
def test_what_keeps_something_is_in_force(make_tiny: Make, batch: Batch, knobs: list[str]) -> None:
    build = make_tiny(*knobs)
    step(build, batch(build), 0)
    assert check_active(build)["selective_checkpoint"].active
