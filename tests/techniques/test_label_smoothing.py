"""Label smoothing against the paper's formula: whole logits, chunks, slices, and their memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import house
import logit_traffic
import pytest
import test_predicts as traced
import torch
import torch.nn.functional as F
from crosses import crossed

from headrace.assemble.build import make_ledger
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.costs.ledger import Ledger
from headrace.data.loader import Micro
from headrace.model.head import IGNORED, Vocabulary, cross_entropy
from headrace.plan.plan import Plan
from headrace.techniques.loss.label_smoothing import LabelSmoothing
from headrace.techniques.loss.z_loss import ZLoss
from headrace.train.evaluate import evaluate
from headrace.train.train import step

SMOOTHED = "techniques.label_smoothing.smoothing=0.3"
TERMED = "techniques.z_loss.weight=0.5"
CHUNKED = "techniques.chunked_cross_entropy.chunk_tokens=7"
TOLD: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}


@pytest.fixture(autouse=True)
def data(corpus: Path, prepared_folder: Path) -> None:
    """Where the tests' text lies."""
    house.put_data_in(str(corpus), str(prepared_folder))


def alone(objective: Any = cross_entropy) -> Any:
    """As much of a build as it asks for."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        notes={},
        model=SimpleNamespace(head=object()),
        objective=objective,
        config=SimpleNamespace(vocab=1003),
    )


@pytest.mark.parametrize("z_loss", [0.0, 0.5])
def test_loss_and_gradient_are_the_papers(z_loss: float) -> None:
    """The target's share and everybody's, written out; a z-loss goes around it."""
    build = alone()
    LabelSmoothing(smoothing=0.3).apply(build)
    if z_loss:
        ZLoss(weight=z_loss).apply(build)
    torch.manual_seed(0)
    logits = (3 * torch.randn(5, 1003)).requires_grad_()
    targets, kept = torch.tensor([1, IGNORED, 1002, 0, IGNORED]), [0, 2, 3]
    found = build.objective(logits, targets, None, Vocabulary())
    (gradient,) = torch.autograd.grad(found, logits)
    twin = logits.detach().double().requires_grad_()
    share = torch.full((3, 1003), 0.3 / 1003, dtype=torch.float64)
    share[range(3), targets[kept]] += 0.7
    plain = -(share * twin[kept].log_softmax(-1)).sum()
    right = plain + z_loss * (twin[kept].logsumexp(-1) ** 2).sum()
    (wanted,) = torch.autograd.grad(right, twin)
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-7)
    moved = LabelSmoothing().active(build).numbers["moved_nats"]
    hard = F.cross_entropy(twin, targets, **TOLD)
    assert moved == pytest.approx((plain - hard).item(), rel=1e-5) and moved > 0.5
    build.model.head = None
    assert LabelSmoothing().active(build).active is None


def test_a_step_has_it_and_validation_has_not(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    plain, smoothed = make_tiny(), make_tiny(SMOOTHED)
    read = [evaluate(build).loss_nats for build in (plain, smoothed)]
    assert read[0] == read[1] and not LabelSmoothing().active(smoothed).active
    losses = [float(step(build, batch(build), 0)[0]) for build in (plain, smoothed)]
    found = LabelSmoothing().active(smoothed)
    per_target = found.numbers["moved_nats"] / smoothed.plan.batch.tokens
    assert found.active and losses[1] - losses[0] == pytest.approx(per_target, rel=1e-3)
    assert abs(per_target) > 1e-3


@pytest.mark.parametrize("beside", [(), (TERMED,), ("model.logit_cap=2.0",)], ids=str)
def test_chunks_change_nothing(
    beside: tuple[str, ...],
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
) -> None:
    whole, chunked = make_tiny(SMOOTHED, *beside), make_tiny(SMOOTHED, *beside, CHUNKED)
    found = []
    for build in (whole, chunked):
        found.append(seen := house.Result(0.0, {}))
        with house.at_the_update(
            build, lambda b=build, s=seen: s.gradients.update(house.gradients_of(b))
        ):
            seen.loss = float(step(build, batch(build), 0)[0])
    house.assert_equal(found[1], found[0])
    told = [LabelSmoothing().active(build).numbers["moved_nats"] for build in (whole, chunked)]
    assert told[0] == pytest.approx(told[1], rel=1e-5)


# --- memory and time -------------------------------------------------------------------------


def sized(precision: str, *techniques: Any, **model: Any) -> Plan:
    """A plan at a vocabulary whose logits are most of a step's memory."""
    plan = traced.plan_of(layers=2, vocab=4096, precision=precision, **model)
    return plan.replaced(techniques={t.name(): t for t in techniques})


def chunks(tokens: int, **knobs: Any) -> Any:
    return house.Variant("chunked_cross_entropy", {"chunk_tokens": tokens, **knobs}).technique()


@crossed(
    together=2,
    beside={"alone": (), "z_loss": (ZLoss(),)},
    head={"whole": (), "chunks": (64,), "halves": (128,)},
    precision=("fp32", "bf16"),
)
def test_the_peak_does_not_grow(precision: str, head: Any, beside: Any) -> None:
    heads = [chunks(*head, native=False)] if head else []  # torch's own smooths nothing
    plain = traced.Traced(sized(precision, *heads, *beside))
    smoothed = traced.Traced(sized(precision, *heads, *beside, LabelSmoothing()))
    assert smoothed.peak == pytest.approx(plain.peak, rel=0.001)
    assert smoothed.ledger.peak() == plain.ledger.peak()
    assert smoothed.ledger.peak()[1] == pytest.approx(smoothed.peak, rel=0.02)


def on_a_gpu(*techniques: Any) -> Ledger:
    plan = sized("bf16", *techniques).replaced(device="cuda")
    return make_ledger(plan, house.context_on("cuda", plan))


@pytest.mark.parametrize("head", ["fused_cross_entropy", "chunked_cross_entropy"])
def test_kernels_make_it_in_passing(head: str) -> None:
    """By the ledger of a GPU, where nothing of them is read again; nor by what a compiler makes."""
    made = house.Variant(head).technique()
    plan = sized("bf16", made, LabelSmoothing()).replaced(device="cuda")
    answer = made.supports(house.context_on("cuda", plan))
    assert isinstance(answer, house.Supported)
    compiled = house.Variant("torch_compile", {}).technique()
    for technique in (made, compiled):
        plain, smoothed = on_a_gpu(technique), on_a_gpu(technique, LabelSmoothing())
        fact = {"other_objective": plain.sizes["other_objective"]}
        assert replace(smoothed, sizes={**smoothed.sizes, **fact}) == plain


@pytest.mark.parametrize("head", [(), (64,)], ids=["whole", "chunks"])
def test_eager_passes_are_counted(head: Any) -> None:
    """Count by what torch's own operations of the loss move of tensors of the logits' size."""
    heads = [chunks(*head, fused=False)] if head else []
    plain, smoothed = on_a_gpu(*heads), on_a_gpu(*heads, LabelSmoothing())
    build = alone()
    LabelSmoothing().apply(build)
    moved = [logit_traffic.of_loss(objective) for objective in (cross_entropy, build.objective)]
    logits = 4096 * traced.ROWS * traced.LENGTH
    for part in ("forward", "backward"):
        before, after = (ledger.work[f"loss/{part}"] for ledger in (plain, smoothed))
        more = after.count * (after.bytes - before.bytes)
        assert more == pytest.approx(logits * (moved[1][part] - moved[0][part])) and more > 0
    others = {n: w for n, w in smoothed.work.items() if not n.startswith("loss/")}
    assert others == {n: w for n, w in plain.work.items() if not n.startswith("loss/")}


# --- over slices of the vocabulary -----------------------------------------------------------


@pytest.mark.slow
def test_a_slice_of_the_vocabulary_is_enough(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    """Compare two ranks with one, beside a cap, a z-loss, chunks and compiled blocks."""
    house.prepare(house.make_plan())
    functions = Path(__file__).with_name("tensor_parallel_ranks.py")
    smoothed: dict[str, Any] = {"label_smoothing": {"smoothing": 0.3}}
    capped = {"model": {"logit_cap": 2.0}}
    cases = [
        {"shape": "grouped", "beside": smoothed},
        {"shape": "tied", "beside": {**smoothed, "z_loss": {"weight": 0.1}}, **capped},
        {"shape": "gpt2", "beside": {"document_packing": {}}, "micro_rows": 2, **capped},
        {
            "shape": "biased",
            "beside": smoothed,
            **capped,
            "micro_rows": 2,
            "others": {
                "chunked_cross_entropy": {"chunk_tokens": 7},
                "torch_compile": {"backend": "aot_eager", "scope": "block"},
            },
        },
    ]
    zygote.call(
        2,
        tmp_path,
        functions,
        "equals",
        ranks=2,
        cases=cases,
        corpus=str(corpus),
        prepared=str(prepared_folder),
    )


def test_smoothing_out_of_range_is_refused(make_tiny: Callable[..., Build]) -> None:
    for wrong in ("0", "1", "-0.1"):
        with pytest.raises(ConfigError, match=r"label_smoothing\.smoothing"):
            make_tiny(f"techniques.label_smoothing.smoothing={wrong}")
