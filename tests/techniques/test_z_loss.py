"""The z-loss follows the paper's formula: whole logits, chunks and slices, and their memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import house
import pytest
import test_predicts as traced
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.model.head import IGNORED, Vocabulary
from headrace.techniques.loss.z_loss import ZLoss
from headrace.train.evaluate import evaluate
from headrace.train.train import step

FUNCTIONS = Path(__file__).with_name("z_loss_ranks.py")
WEIGHT = "techniques.z_loss.weight=0.5"
CHUNKED = "techniques.chunked_cross_entropy.chunk_tokens=7"


@pytest.fixture(autouse=True)
def data(corpus: Path, prepared_folder: Path) -> dict[str, str]:
    """Where the tests' text lies."""
    house.put_data_in(str(corpus), str(prepared_folder))
    return {"corpus": str(corpus), "prepared": str(prepared_folder)}


def test_term_and_gradient_are_the_papers() -> None:
    build: Any = SimpleNamespace(
        device=torch.device("cpu"),
        notes={},
        model=SimpleNamespace(head=object()),
        objective=lambda *given: torch.zeros(()),
    )
    ZLoss(weight=0.5).apply(build)
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 7)).requires_grad_()
    kept = [0, 2, 3]
    found = build.objective(logits, torch.tensor([1, IGNORED, 3, 0]), None, Vocabulary())
    found.backward()
    z = logits.detach().exp().sum(-1).log()
    torch.testing.assert_close(found.detach(), 0.5 * (z[kept] ** 2).sum())
    right = torch.zeros(4, 7)
    right[kept] = (z[:, None] * logits.detach().softmax(-1))[kept]
    torch.testing.assert_close(logits.grad, right)
    assert ZLoss().active(build).numbers["added_nats"] == pytest.approx(found.item())
    build.model.head = None
    assert ZLoss().active(build).active is None


def test_a_step_has_it_and_validation_has_not(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    plain, termed = make_tiny(), make_tiny(WEIGHT)
    read = [evaluate(build).loss_nats for build in (plain, termed)]
    assert read[0] == read[1] and not ZLoss().active(termed).active
    losses = [float(step(build, batch(build), 0)[0]) for build in (plain, termed)]
    found = ZLoss().active(termed)
    per_target = found.numbers["added_nats"] / termed.plan.batch.tokens
    assert losses[1] - losses[0] == pytest.approx(per_target, rel=1e-4)
    assert per_target > 1


def test_chunks_change_nothing(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    whole, chunked = make_tiny(WEIGHT), make_tiny(WEIGHT, CHUNKED)
    losses = [float(step(build, batch(build), 0)[0]) for build in (whole, chunked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(chunked.model.get_parameter(name), parameter)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_grows_by_two_tensors_of_logits(precision: str) -> None:
    """At a vocabulary where they are most of it."""
    plain = traced.plan_of(layers=2, vocab=4096, precision=precision)
    trunk = traced.Traced(plain)
    termed = traced.Traced(plain.replaced(techniques={"z_loss": ZLoss()}))
    grown = termed.peak - trunk.peak
    assert grown == pytest.approx(2 * 4 * 4096 * plain.batch.tokens, rel=0.02)
    told = termed.ledger.peak()[1] - trunk.ledger.peak()[1]
    assert told == pytest.approx(grown, rel=0.02)


@pytest.mark.parametrize(("precision", "tensors"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("chunk_tokens", [64, 128])
def test_beside_chunks_the_peak_grows_by_what_they_do_not_keep(
    precision: str, tensors: int, chunk_tokens: int
) -> None:
    """The chunk's logits are a leaf, so that those of fp32 are kept already."""
    knobs = {"chunk_tokens": chunk_tokens, "native": False}  # it is autograd that keeps a leaf
    head = house.Variant("chunked_cross_entropy", knobs).technique()
    plan = traced.plan_of(layers=2, vocab=4096, precision=precision)
    plain = traced.Traced(plan.replaced(techniques={"chunked_cross_entropy": head}))
    both = {"chunked_cross_entropy": head, "z_loss": ZLoss()}
    termed = traced.Traced(plan.replaced(techniques=both))
    grown = termed.peak - plain.peak
    tokens = min(chunk_tokens, plan.batch.tokens)
    assert grown == pytest.approx(tensors * 4 * 4096 * tokens, rel=0.02)
    assert termed.ledger.peak()[1] - plain.ledger.peak()[1] == pytest.approx(grown, rel=0.02)
    assert termed.ledger.peak()[1] == pytest.approx(termed.peak, rel=0.02)


@pytest.mark.parametrize("head", ["fused_cross_entropy", "chunked_cross_entropy"])
def test_kernels_make_it_in_passing(head: str) -> None:
    """By the ledger of a GPU: nothing more is held or read, unless autograd makes the loss."""
    plain = traced.plan_of(house.Variant(head)).replaced(device="cuda")
    termed = plain.replaced(techniques={**plain.techniques, "z_loss": ZLoss()})
    context = house.context_on("cuda", termed)
    without, found = make_ledger(plain, context), make_ledger(termed, context)
    fact = {"other_objective": without.sizes["other_objective"]}
    assert replace(found, sizes={**found.sizes, **fact}) == without
    assert isinstance(plain.techniques[head].supports(context), house.Supported)
    chunks = house.Variant("chunked_cross_entropy", {"fused": False}).technique()
    alone = {"chunked_cross_entropy": chunks}
    grown, less = (
        make_ledger(plain.replaced(techniques=on), context).memory["logits"].bytes
        for on in ({**alone, "z_loss": ZLoss()}, alone)
    )
    assert grown > 1.5 * less


def test_a_slice_of_the_vocabulary_is_enough(
    zygote: Any, tmp_path: Path, data: dict[str, str]
) -> None:
    house.prepare(traced.plan_of(layers=2, vocab=4096))
    zygote.call(2, tmp_path, FUNCTIONS, "split", ranks=2, **data)
