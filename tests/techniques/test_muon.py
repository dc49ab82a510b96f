"""Compare Muon's update with an independent computation, matrix by matrix, in fp64.

The reference knows the layout of the decoder's fused matrices from the definition alone: rows of
`qkv` are groups of [queries, key, value], rows of `gate_up` alternate in groups of both.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.kernels.orthogonalize import orthogonalize, reference_orthogonalize
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.optim.muon import MuonOptimizer
from headrace.plan.plan import Plan
from headrace.techniques.optim.muon import cuts_of

GROUPS, QUERIES, HEAD, FFN, DIM = 2, 3, 4, 10, 14
CONFIG = ModelConfig(
    dim=DIM,
    heads=GROUPS * QUERIES,
    kv_heads=GROUPS,
    head_dim=HEAD,
    ffn=FFN,
    layers=2,
    vocab=11,
    bias=True,
)
LR, MOMENTUM, DECAY = 0.05, 0.9, 0.2


def rows_of_projections(name: str) -> list[list[int]]:
    """Return which rows of a fused matrix belong to one projection."""
    if name.endswith("qkv.weight"):
        span, found = QUERIES + 2, [[], [], []]  # type: ignore[var-annotated]
        for group in range(GROUPS):
            for slot in range(span):
                rows = range((group * span + slot) * HEAD, (group * span + slot + 1) * HEAD)
                found[max(0, slot - QUERIES + 1)] += rows
        return found
    if name.endswith("gate_up.weight"):
        part = FFN // GROUPS
        place = range(2 * FFN)
        return [[r for r in place if r // part % 2 == half] for half in (0, 1)]
    return []


def exact_update(name: str, direction: Tensor, *, exact: bool) -> Tensor:
    """Every projection orthogonalised alone, longer where it is tall."""
    found = torch.empty_like(direction)
    for rows in rows_of_projections(name) or [list(range(len(direction)))]:
        part = direction[rows]
        even = reference_orthogonalize(part) if exact else orthogonalize(part).double()
        found[rows] = max(1.0, part.size(0) / part.size(1)) ** 0.5 * even
    return found


@pytest.fixture
def named() -> dict[str, nn.Parameter]:
    """Return the block matrices of a decoder, at random."""
    torch.manual_seed(0)
    model = Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec())
    found = {n: p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")}
    for parameter in found.values():
        nn.init.normal_(parameter)
    return found


@pytest.mark.parametrize("exact", [False, True], ids=["newton-schulz", "svd"])
def test_three_updates_equal_the_reference(named: dict[str, nn.Parameter], exact: bool) -> None:
    """Compare to 1e-5 with the same iteration, and with the SVD within its [0.67, 1.21]."""
    optimizer = MuonOptimizer(named, cuts_of(CONFIG), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    velocity = {n: torch.zeros_like(p).double() for n, p in named.items()}
    for step in range(3):
        before = {n: p.detach().double() for n, p in named.items()}
        for name, parameter in named.items():
            seed = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=seed)
            grad = parameter.grad.double()
            velocity[name] = MOMENTUM * velocity[name] + (1 - MOMENTUM) * grad
        optimizer.step()
        for name, parameter in named.items():
            grad = parameter.grad.double()  # type: ignore[union-attr]
            nesterov = MOMENTUM * velocity[name] + (1 - MOMENTUM) * grad
            direction = exact_update(name, nesterov, exact=exact)
            found = (before[name] * (1 - LR * DECAY) - parameter.detach().double()) / LR
            off = (found - direction).norm() / direction.norm()
            assert off < (0.33 if exact else 1e-5), f"{name} is off by {off}"
            torch.testing.assert_close(
                optimizer.state[parameter]["momentum"].double(),
                velocity[name],
                rtol=1e-5,
                atol=1e-6,
            )
    assert optimizer.orthogonalized == 3 * CONFIG.layers * (3 + 1 + 2 + 1)


def test_batching_changes_nothing(named: dict[str, nn.Parameter]) -> None:
    """All matrices in one optimizer move as each does in one of its own."""
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    how = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    alone = [MuonOptimizer({n: p}, cuts_of(CONFIG), **how) for n, p in copies.items()]
    together = MuonOptimizer(named, cuts_of(CONFIG), **how)
    for name, parameter in named.items():
        parameter.grad = torch.randn_like(parameter)
        copies[name].grad = parameter.grad.clone()
    for optimizer in (together, *alone):
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, copies[name], rtol=1e-6, atol=1e-6)


MUON = "techniques.muon.lr=0.02"
BESIDE = {
    "alone": [],
    "adapters": ["techniques.lora.rank=2"],
    "experts": ["techniques.mixture_of_experts.experts=4"],
    "8 bits": ["techniques.adamw_8bit.smallest=512"],
    "8 bits of experts": [
        "techniques.adamw_8bit.smallest=512",
        "techniques.mixture_of_experts.experts=4",
    ],
    "convolutions": ["techniques.short_convolution.between=1"],
}


def memory_of(plan: Plan) -> dict[str, float]:
    ledger = make_ledger(plan, make_context(plan, torch.device("cpu")))
    return {name: line.bytes for name, line in ledger.memory.items()}


@pytest.mark.parametrize("beside", BESIDE)
def test_the_predicted_states_are_those_that_it_holds(
    make_tiny: Callable[..., Build], states: Callable[[Build], tuple[Any, Any]], beside: str
) -> None:
    held, predicted = states(make_tiny(MUON, *BESIDE[beside]))
    assert predicted == held


def test_evidence_wants_matrices_that_adamw_does_not_hold(
    make_tiny: Callable[..., Build], states: Callable[[Build], tuple[Any, Any]]
) -> None:
    build = make_tiny(MUON)
    muon = build.plan.techniques["muon"]
    assert not muon.active(build).active
    states(build)
    assert muon.active(build).active
    build.routed["adamw"] = {**build.routed["adamw"], **build.routed["muon"]}
    assert not muon.active(build).active


@pytest.mark.parametrize("rest", ["adamw_8bit={}", "sophia={}", "optimizer_in_backward={}"])
def test_the_order_of_tables_predicts_nothing_else(
    tiny_plan: Callable[..., Plan], rest: str
) -> None:
    both = ["techniques.muon={}", f"techniques.{rest}"]
    plans = [tiny_plan(*given, "optimizer.clip_norm=0") for given in (both, both[::-1])]
    assert [*plans[0].techniques] == [*plans[1].techniques][::-1]
    assert memory_of(plans[0]) == memory_of(plans[1])


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("by", ["fsdp", "pipeline_parallel", "tensor_parallel"])
def test_ranks_are_predicted_to_share_its_states(
    tiny_plan: Callable[..., Plan], by: str, beside: str
) -> None:
    """Slices are all alike; a stage has ends of its own, and norms and routers are not split."""
    axis = {"fsdp": "data"}.get(by, by.partition("_")[0])
    given = [MUON, *BESIDE[beside], "model.layers=2"]
    alone = memory_of(tiny_plan(*given))
    whole, directions = alone["optimizer"], alone["update"]
    mesh = [f"mesh.{axis}=2", "batch.micro_sequences=1"]
    part = memory_of(tiny_plan(*given, f"techniques.{by}={{}}", *mesh))
    more = {"data": 64.0, "pipeline": 8.0 * 16 * 320, "tensor": 2000.0}[axis]
    if beside == "adapters":  # they are in blocks, and refused under tensor parallelism
        more = 64.0 if axis != "tensor" else whole
    assert part["optimizer"] == pytest.approx(whole / 2, abs=more)
    if axis != "pipeline" and "8 bits" not in beside:  # each rank iterates half of them
        assert 0.4 * directions < part["update"] < directions
    assert {name: bytes for name, bytes in part.items() if bytes < 0} == {}


@pytest.mark.parametrize("adapts", ["lora", "qlora"])
@pytest.mark.parametrize(
    "knob", ["adamw_8bit.smallest=1", "optimizer_in_backward={}", "sophia.rho=0.05"]
)
def test_takes_all_that_adapters_train(
    make_tiny: Callable[..., Build], adapts: str, knob: str
) -> None:
    """What updates the rest would be left with nothing; without adapters it is not."""
    other = knob.split(".")[0].split("=")[0]
    beside = ["optimizer.clip_norm=0.0", f"techniques.{knob}"]
    with pytest.raises(UnsupportedError, match=f"nothing is left to {other}") as caught:
        make_tiny(MUON, *beside, f"techniques.{adapts}.rank=2")
    assert caught.value.remedy.text.startswith(f"--without {other} ")
    assert {"muon", other} <= make_tiny(MUON, *beside).routed.keys()
    assert make_tiny(MUON, f"techniques.{adapts}.rank=2").routed.keys() == {"muon"}


def test_its_products_and_what_is_left_to_adamw_are_foreseen(
    tiny_plan: Callable[..., Plan],
) -> None:
    plain, plan = tiny_plan(), tiny_plan("techniques.muon={}")
    before, ledger = (make_ledger(p, make_context(p, torch.device("cpu"))) for p in (plain, plan))
    named = {name: nn.Parameter(torch.randn(m.shape)) for name, m in ledger.updates("muon").items()}
    for p in named.values():
        p.grad = torch.randn_like(p)
    model = plan.model.model_copy(update={"vocab": int(ledger.sizes["vocab"])})
    optimizer = MuonOptimizer(named, cuts_of(model), lr=LR, momentum=0.9, weight_decay=DECAY)
    optimizer.step()
    with FlopCounterMode(display=False) as counter, Kernels() as kernels:
        optimizer.step()
    pieces = {n: w for n, w in ledger.work.items() if n.startswith("update/muon_")}
    products = [piece for piece in pieces.values() if piece.kind == "product"]
    assert counter.get_total_flops() == sum(2 * prod(p.sizes) * p.count for p in products)
    launched = sum(piece.launches(1) / piece.launch for piece in pieces.values())
    assert launched == pytest.approx(kernels.count, rel=0.1)
    numbers = sum(p.numel() for p in named.values())
    left, all_ = (one.work["update/optimizer"].bytes for one in (ledger, before))
    assert numbers > 0 and left == all_ - 28 * numbers >= 0


class Kernels(TorchDispatchMode):
    """Counts the operations that are more than another view."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view and func not in FREE
        return func(*args, **kwargs or {})


FREE = {
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.empty_like.default,
}
