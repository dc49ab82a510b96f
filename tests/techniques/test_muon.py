"""Compare Muon's update with an independent computation, matrix by matrix, in fp64.

The reference knows the layout of the decoder's fused matrices from the definition alone: rows of
`qkv` are groups of [queries, key, value], rows of `gate_up` alternate in groups of both.
"""

from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import report
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.kernels.orthogonalize import (
    POLYNOMIALS,
    orthogonalize,
    reference_orthogonalize,
)
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.optim import muon
from headrace.optim.muon import MuonOptimizer, MuonRule
from headrace.plan.plan import Plan
from headrace.techniques.optim.muon import cuts_of
from headrace.train.checkpoint import Saved
from headrace.train.train import step

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


def exact_update(name: str, direction: Tensor, *, kind: Any, pairs: bool = False) -> Tensor:
    """Every projection orthogonalised alone, or every two heads, longer where it is tall."""
    found = torch.empty_like(direction)
    pieces = rows_of_projections(name) or [list(range(len(direction)))]
    if pairs and name.endswith("qkv.weight"):
        pieces = [rows[n : n + 2 * HEAD] for rows in pieces for n in range(0, len(rows), 2 * HEAD)]
    for rows in pieces:
        part = direction[rows]
        even = (
            reference_orthogonalize(part) if kind == "svd" else orthogonalize(part, kind).double()
        )
        found[rows] = max(1.0, part.size(0) / part.size(1)) ** 0.5 * even.double()
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


@pytest.mark.parametrize("pairs", [False, True], ids=["whole", "pairs"])
@pytest.mark.parametrize("kind", ["jordan", "polar_express", "svd"])
def test_three_updates_equal_the_reference(
    named: dict[str, nn.Parameter], kind: Any, pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare to 1e-5 with the same polynomials, and with the SVD within [0.86, 1.14].

    A batch of the largest shape is updated in two chunks.
    """
    monkeypatch.setattr(muon, "CHUNK_NUMBERS", 300)
    rule = MuonRule(name="polar_express" if kind == "svd" else kind)
    optimizer = MuonOptimizer(
        named,
        cuts_of(CONFIG, head_pairs=pairs),
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        rule=rule,
    )
    velocity = {n: torch.zeros_like(p).double() for n, p in named.items()}
    for index in range(3):
        before = {n: p.detach().double() for n, p in named.items()}
        for name, parameter in named.items():
            seed = torch.Generator().manual_seed(index)
            parameter.grad = torch.randn(parameter.shape, generator=seed)
            grad = parameter.grad.double()
            velocity[name] = MOMENTUM * velocity[name] + (1 - MOMENTUM) * grad
        optimizer.step()
        for name, parameter in named.items():
            grad = parameter.grad.double()  # type: ignore[union-attr]
            nesterov = MOMENTUM * velocity[name] + (1 - MOMENTUM) * grad
            direction = exact_update(name, nesterov, kind=kind, pairs=pairs)
            found = (before[name] * (1 - LR * DECAY) - parameter.detach().double()) / LR
            off = (found - direction).norm() / direction.norm()
            assert off < (0.2 if kind == "svd" else 1e-5), f"{name} is off by {off}"
            torch.testing.assert_close(
                optimizer.state[parameter]["momentum"].double(),
                velocity[name],
                rtol=1e-5,
                atol=1e-6,
            )
    of_heads = (GROUPS * QUERIES + 2 * GROUPS) // 2 if pairs else 3
    assert optimizer.orthogonalized == 3 * CONFIG.layers * (of_heads + 1 + 2 + 1)


def test_batching_changes_nothing(named: dict[str, nn.Parameter]) -> None:
    """All matrices in one optimizer move as each does in one of its own."""
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    how: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    alone = [MuonOptimizer({n: p}, cuts_of(CONFIG), **how) for n, p in copies.items()]
    together = MuonOptimizer(named, cuts_of(CONFIG), **how)
    for name, parameter in named.items():
        parameter.grad = torch.randn_like(parameter)
        copies[name].grad = parameter.grad.clone()
    for optimizer in (together, *alone):
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, copies[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        MuonRule(),
        MuonRule(name="jordan", nesterov=False),
        MuonRule(cautious=True),
        MuonRule(rows=True),
        MuonRule(cautious=True, rows=True, nesterov=False),
    ],
    ids=str,
)
def test_two_steps_are_those_that_a_hand_computes(rule: MuonRule) -> None:
    """A diagonal matrix stays one: each polynomial, norm and mean is of single numbers.

    The momentum changes between the steps, as in its warmup.
    """
    weight = nn.Parameter(torch.diag(torch.tensor([0.5, -0.25])))
    now = iter((0.85, 0.9))
    optimizer = MuonOptimizer(
        {"w": weight}, {}, lr=0.1, momentum=0.99, weight_decay=0.2, rule=rule, now=lambda: next(now)
    )
    w, m, v = [0.5, -0.25], [0.0, 0.0], [0.0, 0.0]
    for beta, gradient in ((0.85, (3.0, -4.0)), (0.9, (-5.0, -1.0))):
        weight.grad = torch.diag(torch.tensor(gradient))
        optimizer.step()
        m = [beta * old + (1 - beta) * g for old, g in zip(m, gradient, strict=True)]
        d = [
            beta * new + (1 - beta) * g if rule.nesterov else new
            for new, g in zip(m, gradient, strict=True)
        ]
        coefficients, margin = POLYNOMIALS[rule.name]
        norm = margin * sum(x**2 for x in d) ** 0.5
        u = [x / norm for x in d]
        for a, b, c in coefficients:
            u = [a * x + b * x**3 + c * x**5 for x in u]
        if rule.rows:
            v = [0.95 * old + 0.05 * x**2 / 2 for old, x in zip(v, u, strict=True)]
            even = [x / (old**0.5 + 1e-8) for x, old in zip(u, v, strict=True)]
            back = (sum(x**2 for x in u) / sum(x**2 for x in even)) ** 0.5
            u = [x * back for x in even]
        decays = [not rule.cautious or x * y >= 0 for x, y in zip(u, w, strict=True)]
        w = [y - 0.1 * x - 0.1 * 0.2 * y * decay for x, y, decay in zip(u, w, decays, strict=True)]
        torch.testing.assert_close(weight.data, torch.diag(torch.tensor(w)), rtol=2e-5, atol=1e-6)
    assert optimizer.momentum == 0.9


def test_a_matrix_without_a_gradient_stays(named: dict[str, nn.Parameter]) -> None:
    """The matrices of its shape beside it move as they do without it."""
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    idle = "blocks.0.mlp.down.weight"
    how: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    optimizer = MuonOptimizer(named, cuts_of(CONFIG), **how)
    rest = MuonOptimizer({n: p for n, p in copies.items() if n != idle}, cuts_of(CONFIG), **how)
    for name, parameter in named.items():
        parameter.grad = None if name == idle else torch.randn_like(parameter)
        copies[name].grad = parameter.grad
    optimizer.step()
    rest.step()
    for name, parameter in named.items():
        assert parameter.equal(copies[name]), name


def test_one_graph_a_shape_and_none_for_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more shapes than the compiler takes of one function, and each is compiled once."""
    from torch._dynamo.utils import counters

    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compiler(function, backend="eager", **how)
    )
    monkeypatch.setattr(muon, "CHUNK_NUMBERS", 59)  # two at once, or one of [6, 5]
    sizes = range(4, 7)
    sides = []
    for compiled in (False, True):
        named = {
            f"{n}.{copy}": nn.Parameter(torch.ones(n, 5) * n) for n in sizes for copy in range(4)
        }
        how: dict[str, Any] = {
            "lr": LR,
            "momentum": MOMENTUM,
            "weight_decay": DECAY,
            "compiled": compiled,
        }
        sides.append((named, MuonOptimizer(named, {}, rule=MuonRule(cautious=True), **how)))
    before = counters["stats"]["unique_graphs"]
    for index, (named, optimizer) in product(range(4), sides):
        draw = torch.Generator().manual_seed(index)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.found_inf = torch.tensor(float(index == 1))
        optimizer.param_groups[0] |= {"lr": LR / (index + 1), "momentum": 0.8 + 0.05 * index}
        with torch._dynamo.config.patch(recompile_limit=1):
            optimizer.step()
    graphs = len(sides[1][1].graphs)
    assert graphs == len(sizes) and not sides[0][1].graphs
    assert counters["stats"]["unique_graphs"] - before == graphs
    for one, two in zip(*(named.values() for named, _ in sides), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.4])
def test_a_compiled_update_is_the_plain_one(named: dict[str, nn.Parameter], part: float) -> None:
    """It takes the compiler a minute on a CPU."""
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
    how: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    how["rule"] = MuonRule(rows=True, fraction=part)
    plain = MuonOptimizer(named, cuts_of(CONFIG), **how)
    compiled = MuonOptimizer(copies, cuts_of(CONFIG), compiled=True, **how)
    for _ in range(2):
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            copies[name].grad = parameter.grad.clone()
        plain.step()
        compiled.step()
    assert len(compiled.graphs) == 4
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, copies[name], rtol=1e-4, atol=1e-5)


def test_even_rows_are_seen_behind_a_head_that_begins_at_zero(train: Callable[..., Path]) -> None:
    """Check that a first step in which no gradient reaches a matrix is no fault of the update."""
    knobs = ("techniques.muon.normalize_rows=true", "model.head_init=zero", "goal.steps=3")
    muon = report(train(*knobs))["techniques"]["muon"]
    assert muon["active"] and muon["numbers"]["normalized"] > 0


@pytest.mark.slow
def test_a_run_with_a_compiled_update_reads_no_memory_under_its_compiler(
    train: Callable[..., Path],
) -> None:
    """On a CPU the second step is watched by torch's dispatch modes, which no compiler takes."""
    run = report(train("techniques.muon.compiled=true", "goal.steps=3"))
    assert run["status"] == "done" and run["techniques"]["muon"]["active"]


ALL = (
    "techniques.muon.momentum_warmup_steps=5",
    "techniques.muon.weight_decay=0.1",
    "techniques.muon.cautious_decay=true",
    "techniques.muon.normalize_rows=true",
    "techniques.muon.head_pairs=true",
)


PART = (*ALL, "techniques.muon.fraction=0.4")


@pytest.mark.parametrize("keys", [("techniques.muon={}",), ALL, PART], ids=["plain", "all", "part"])
def test_a_resumed_run_is_the_same_run(train: Callable[..., Path], keys: tuple[str, ...]) -> None:
    """Bit for bit, in the middle of the momentum's warmup; a checkpoint holds states by name."""
    keys = (*keys, "goal.steps=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    ends = []
    for again in ({}, {"resume": True, "checkpoint": "step-3"}):
        saved = Saved(train(*keys, **again) / "checkpoints" / "latest")
        found = {}
        for name in saved.names():
            shape, kind = saved.shape_of(name)
            saved.fill_(name, found.setdefault(name, torch.empty(shape, dtype=kind)))
        ends.append(found)
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][name].equal(tensor) for name, tensor in ends[1].items())
    own = {n.removeprefix("optimizer/blocks.0.mixer.qkv.weight/") for n in ends[0]} & STATES
    assert own == (STATES if "rows" in str(keys) else {"momentum"})
    assert ends[0]["optimizer/blocks.0.mixer.qkv.weight/momentum"].shape == (48, 16)


STATES = {"momentum", "rows"}


def test_the_momentum_rises_by_the_step_alone(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    build = make_tiny("techniques.muon.momentum_warmup_steps=4")
    technique, seen = build.plan.techniques["muon"], []
    for index in (0, 1, 3, 4, 9, 2):
        step(build, batch(build), index)
        seen.append(technique.active(build).numbers["momentum"])
        assert technique.active(build).active
    assert seen == pytest.approx([0.85, 0.875, 0.925, 0.95, 0.95, 0.9])
    build.now["muon_momentum"] = 0.5
    assert not technique.active(build).active


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


def test_heads_that_ranks_divide_are_predicted_by_the_whole(tiny_plan: Callable[..., Plan]) -> None:
    """Pairs of one head a rank there are none; a matrix is taken apart as the model has it."""
    words = ("techniques.muon.head_pairs=true", "model.heads=4", "model.kv_heads=2")
    split = ("techniques.tensor_parallel={}", "mesh.tensor=2", "techniques.fsdp={}", "mesh.data=2")
    whole, parts = tiny_plan(*words), tiny_plan(*words, *split)
    works = [make_ledger(p, make_context(p, torch.device("cpu"))).work for p in (whole, parts)]
    kinds = [{name for name in work if "muon" in name or "x" in name} for work in works]
    assert kinds[0] and kinds[0] <= kinds[1]


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


@pytest.mark.parametrize("part", [1.0, 0.3])
@pytest.mark.parametrize("pairs", [False, True])
def test_its_products_and_what_is_left_to_adamw_are_foreseen(
    tiny_plan: Callable[..., Plan], pairs: bool, part: float
) -> None:
    """Pairs of queries have the shape of pairs of keys, and are priced beside them."""
    knobs = f"techniques.muon={{fraction={part},head_pairs={str(pairs).lower()}}}"
    heads = ("model.heads=8", "model.kv_heads=4", "model.head_dim=4")
    plain, plan = tiny_plan(*heads), tiny_plan(*heads, knobs)
    before, ledger = (make_ledger(p, make_context(p, torch.device("cpu"))) for p in (plain, plan))
    named = {name: nn.Parameter(torch.randn(m.shape)) for name, m in ledger.updates("muon").items()}
    for p in named.values():
        p.grad = torch.randn_like(p)
    model = plan.model.model_copy(update={"vocab": int(ledger.sizes["vocab"])})
    how: dict[str, Any] = {"lr": LR, "momentum": 0.9, "weight_decay": DECAY}
    optimizer = MuonOptimizer(named, cuts_of(model, pairs), rule=MuonRule(fraction=part), **how)
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
        launches = func.namespace in ("aten", "headrace")
        self.count += launches and not func.is_view and func not in FREE
        return func(*args, **kwargs or {})


FREE = {
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.empty_like.default,
}


@pytest.mark.gpu
def test_a_step_of_muon_multiplies_halves(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shape = ("model.dim=768", "model.heads=12", "model.ffn=1024", "model.layers=1")
    muon = "techniques.muon.symmetric_matmuls"
    builds = []
    for halved in (True, False):  # one after the other: products are counted since a build
        build = make_tiny("device=cuda", *shape, f"{muon}={str(halved).lower()}")
        step(build, batch(build), 0)
        builds.append(build)
        evidence = next(t for t in build.techniques if t.name() == "muon").active(build)
        assert evidence.active and (evidence.numbers["halves"] > 0) is halved
    for half, whole in zip(*(b.model.parameters() for b in builds), strict=True):
        torch.testing.assert_close(half, whole, rtol=0, atol=2e-3)
