"""Heads with a cap, smoothed targets and a z-loss are compared with torch's own functions.

The reference is the plain trunk without a cap on single rows or documents; what bends its logits,
and what is computed of them, is written out here in fp32. On a CPU the kernels run in Triton's
interpreter; on a GPU inductor compiles what stands around them, at vocabularies that are real.
"""

import itertools
from pathlib import Path
from typing import Any

import house
import pytest
import torch
import torch.nn.functional as F
from crosses import pairwise_cover
from house import Result, Variant
from torch import Tensor

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.data.rows import Row
from headrace.kernels.launches import COUNTS
from headrace.model.head import IGNORED
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported
from headrace.techniques.loss.fused_cross_entropy import FusedCrossEntropy
from headrace.train.evaluate import evaluate

pytest.importorskip("triton")

CAP, SMOOTHING, WEIGHT = 2.0, 0.2, 0.3
CUDA = torch.cuda.is_available()
HEADS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {},
    "fused": {"fused_cross_entropy": {}},
    "chunks": {"chunked_cross_entropy": {"chunk_tokens": 11, "fused": False}},
    "fused chunks": {"chunked_cross_entropy": {"chunk_tokens": 11}},
}
ASKED: dict[str, tuple[dict[str, dict[str, Any]], float]] = {
    "capped": ({}, CAP),
    "smoothed": ({"label_smoothing": {"smoothing": SMOOTHING}}, 0.0),
    "smoothed z": (
        {"label_smoothing": {"smoothing": SMOOTHING}, "z_loss": {"weight": WEIGHT}},
        0.0,
    ),
    "all": ({"label_smoothing": {"smoothing": SMOOTHING}, "z_loss": {"weight": WEIGHT}}, CAP),
}
"""What is asked for: techniques, and the cap."""
COMPILE = {"torch_compile": {"backend": "aot_eager"}}
BLOCKS = {"torch_compile": {"backend": "aot_eager", "scope": "block"}}
CASES: dict[str, tuple[str, dict[str, dict[str, Any]], dict[str, Any]]] = {
    "alone": ("grouped", {}, {}),
    "tied, accumulated": ("tied", {}, {"micro_rows": 2}),
    "packed": ("gpt2", {"document_packing": {}}, {}),
    "compiled": ("grouped", COMPILE, {"micro_rows": 2}),
    "compiled blocks, packed": ("tied", {**BLOCKS, "document_packing": {}}, {}),
    "thousands": ("gpt2", {}, {"model": {"vocab": 4099}, "micro_rows": 2}),
    "thousands, compiled": ("grouped", COMPILE, {"model": {"vocab": 5003}}),
}
"""(shape, techniques, keys of the plan)"""
FEW = 4
"""First rows of a batch, which a host's interpreter reads in milliseconds a token: two that may
have no target, and two of documents."""
UNCOMPILED = ("alone", "tied, accumulated", "packed", "thousands")
PAIRS = pairwise_cover(
    {"head": [*HEADS], "asked": [*ASKED], "case": UNCOMPILED, "ignored": (True, False)}
)
QUICK = {
    *(tuple(found.values()) for found in PAIRS),
    ("fused chunks", "all", "compiled blocks, packed", True),
}
"""What runs outside of the slow tests, each pair of choices once: compiling takes seconds, and the
other heads have compiled cases in test_fused_cross_entropy and in the contract."""


@pytest.fixture(autouse=True)
def data(corpus: Path, prepared_folder: Path) -> None:
    """Where the tests' text lies."""
    house.put_data_in(str(corpus), str(prepared_folder))


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels run here, where they are interpreted."""
    monkeypatch.setattr(FusedCrossEntropy, "supports", lambda self, context: Supported())
    if CUDA:
        pytest.skip("the interpreter is for machines without a GPU")


def plan_with(names: dict[str, dict[str, Any]], cap: float = 0.0, **keys: Any) -> Plan:
    """Make a tiny plan of techniques by name, with a cap."""
    keys["model"] = {**keys.get("model", {}), "logit_cap": cap}
    return house.make_plan(*(Variant(n, k).technique() for n, k in names.items()), **keys)


def loss_of(logits: Tensor, targets: Tensor, asked: str) -> dict[str, Tensor]:
    """The sum that is asked for, of a model's raw logits; its parts, and what smoothing adds up."""
    names, cap = ASKED[asked]
    bent = cap * torch.tanh(logits.float() / cap) if cap else logits.float()
    told: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}
    smoothing = SMOOTHING if "label_smoothing" in names else 0.0
    soft = F.cross_entropy(bent, targets, label_smoothing=smoothing, **told)
    kept = bent[targets != IGNORED]
    z_loss = (WEIGHT if "z_loss" in names else 0.0) * (kept.logsumexp(-1) ** 2).sum()
    # The difference is a ten thousandth of either loss, of which fp32 would keep three digits.
    hard, softened = (
        F.cross_entropy(bent.double(), targets, label_smoothing=share, **told)
        for share in (0.0, smoothing)
    )
    moved = softened - hard
    picked = kept.gather(-1, targets[targets != IGNORED][:, None])[:, 0]
    terms = smoothing * (picked - kept.mean(-1)).abs().sum()
    return {
        "loss": soft + z_loss,
        "z": z_loss.detach(),
        "moved": moved.detach(),
        "terms": terms.detach(),
    }


def reference(trunk: Build, rows: list[Row], asked: str, documents: bool) -> tuple[Result, Any]:
    """Return loss and gradients of the plain baseline by `loss_of`, and the parts of the sum."""
    parts = {"z": 0.0, "moved": 0.0, "terms": 0.0}

    def more(build: Any, ids: Any, logits: Tensor, targets: Tensor) -> Tensor:
        found = loss_of(logits, targets, asked)
        for name in parts:
            parts[name] += found[name].item()
        # `house.reference` has added the plain loss of raw logits already.
        plain = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return found["loss"] - plain

    return house.reference(trunk, rows, documents=documents, more=more), parts


def opened(plan: Plan) -> Build:
    """The build with random weights; a chunked head with kernels as it is on a GPU."""
    build = house.random_build(plan)
    knobs = plan.techniques.get("chunked_cross_entropy")
    if knobs is not None:
        build.model.head.fused = knobs.fused is not False  # type: ignore[attr-defined]
    return build


@pytest.mark.parametrize(
    ("head", "asked", "case", "ignored"),
    [
        pytest.param(*what, marks=[pytest.mark.slow] * (what not in QUICK))
        for what in itertools.product(HEADS, ASKED, CASES, (False, True))
    ],
)
def test_a_step_equals_the_formulas(
    head: str, asked: str, case: str, ignored: bool, on_a_cpu: None
) -> None:
    shape, beside, keys = CASES[case]
    names, cap = ASKED[asked]
    few: dict[str, Any] = {"tokens": FEW * house.LENGTH}
    given: dict[str, Any] = {"shape": shape, "model": {}, "batch": few, **keys}
    vocab = {**house.SHAPES[shape], **given["model"]}["vocab"]
    rows = house.make_rows(vocab, ignored=ignored)[:FEW]
    build = opened(plan_with({**HEADS[head], **names, **beside}, cap, **given))
    before = COUNTS["cross_entropy_backward"]
    found = house.take_step(build, rows)
    launched = COUNTS["cross_entropy_backward"] - before
    assert (launched > 0) == head.startswith("fused")
    trunk = house.random_build(plan_with({}, shape=shape, model=given["model"]))
    wanted, parts = reference(trunk, rows, asked, "document_packing" in beside)
    house.assert_equal(found, wanted)
    told = check_active(build)
    if "z_loss" in names:
        assert told["z_loss"].numbers["added_nats"] == pytest.approx(parts["z"], rel=1e-4)
    if "label_smoothing" in names:
        moved = told["label_smoothing"].numbers["moved_nats"]
        assert moved == pytest.approx(parts["moved"], rel=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_validation_is_of_hard_targets_and_capped_logits(head: str, on_a_cpu: None) -> None:
    names, cap = ASKED["all"]
    keys: dict[str, Any] = {"eval": {"tokens": 56}}
    build = opened(plan_with({**HEADS[head], **names}, cap, **keys))
    plain = house.random_build(plan_with({}, cap, **keys))
    found, wanted = (evaluate(one, 56).loss_nats for one in (build, plain))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert not build.plan.techniques["label_smoothing"].active(build).active


@pytest.mark.parametrize("head", ["fused", "fused chunks"])
def test_sophias_second_sweep_is_of_capped_logits(head: str, on_a_cpu: None) -> None:
    """Its labels are drawn from what the model says, and its loss is not smoothed."""
    rows, ends = house.make_rows(house.SHAPES["grouped"]["vocab"], ignored=True), []
    beside = {"sophia": {"every": 1}, **ASKED["smoothed"][0]}
    for names in (beside, {**beside, **HEADS[head]}):
        build = opened(plan_with(names, CAP))
        house.take_step(build, rows)
        ends.append(build.model.state_dict())
    for name, right in ends[0].items():
        torch.testing.assert_close(ends[1][name], right, rtol=1e-4, atol=1e-5)


# --- on a GPU, under inductor, at real vocabularies ------------------------------------------


GPU_HEADS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {},
    "fused": {"fused_cross_entropy": {}},
    "chunks": {"chunked_cross_entropy": {"chunk_tokens": 32, "fused": False}},
    "fused chunks": {"chunked_cross_entropy": {"chunk_tokens": 32}},
}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("scope", ["block", "model"])
@pytest.mark.parametrize("head", GPU_HEADS)
def test_large_vocabularies_under_inductor(
    head: str, scope: str, vocab: int, precision: str
) -> None:
    """With ignored targets, in two micro-batches of which the first has few."""
    names, cap = ASKED["all"]
    compiled = {"torch_compile": {"backend": "inductor", "scope": scope}}
    sizes: dict[str, Any] = {"vocab": vocab, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
    keys: dict[str, Any] = {"device": "cuda", "micro_rows": 3}
    rows = house.make_rows(vocab, ignored=True)
    model = {**sizes, "precision": precision}
    build = house.random_build(
        plan_with({**GPU_HEADS[head], **names, **compiled}, cap, model=model, **keys)
    )
    found = house.take_step(build, rows)
    trunk = plan_with({}, model={**sizes, "precision": "fp32"}, device="cuda")
    wanted, parts = reference(house.random_build(trunk), rows, "all", documents=False)

    def nudged(unit: float) -> Result:
        return reference(house.random_build(trunk, nudged=unit), rows, "all", documents=False)[0]

    house.assert_equal(found, wanted, band=house.BANDS.get(precision), nudged=nudged)
    told = check_active(build)
    band = 1e-3 if precision == "fp32" else house.BAND_BF16
    assert told["z_loss"].numbers["added_nats"] == pytest.approx(parts["z"], rel=band)
    moved = told["label_smoothing"].numbers["moved_nats"]
    # In bf16 every token's part is rounded, and of 27 that nearly cancel the sum is no measure.
    of = parts["moved"] if precision == "fp32" else parts["terms"]
    assert moved == pytest.approx(parts["moved"], abs=band * abs(of))
