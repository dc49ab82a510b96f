"""Steps with the fused head are the trunk's; on a CPU its kernels run in Triton's interpreter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import house
import pytest
import torch
import torch.nn.functional as F
from crosses import crossed
from facts import in_order
from house import Variant
from pieces import h200
from torch import Tensor

from headrace.assemble.build import make_ledger
from headrace.assemble.context import check_supported
from headrace.assemble.filled import check_active
from headrace.core.errors import ConfigError
from headrace.kernels.launches import COUNTS
from headrace.model.head import IGNORED
from headrace.observe.signals import TrackedMemory
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.loss.fused_cross_entropy import FusedCrossEntropy
from headrace.train.evaluate import evaluate
from headrace.train.train import step

pytest.importorskip("triton")

COMPILE = {"backend": "aot_eager"}
CASES: dict[str, tuple[str, dict[str, dict[str, Any]], dict[str, Any]]] = {
    "alone": ("grouped", {}, {}),
    "tied, accumulated": ("tied", {}, {"micro_rows": 2}),
    "packed": ("gpt2", {"document_packing": {}}, {}),
    "compiled blocks": ("grouped", {"torch_compile": {**COMPILE, "scope": "block"}}, {}),
    "compiled": ("grouped", {"torch_compile": COMPILE}, {"micro_rows": 2}),
}
"""(shape, techniques beside it, keys of the plan)"""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, corpus: Path, prepared_folder: Path) -> None:
    """Let it run here, where the kernels are interpreted."""
    house.put_data_in(str(corpus), str(prepared_folder))
    monkeypatch.setattr(FusedCrossEntropy, "supports", lambda self, context: Supported())
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")


def plan_with(beside: dict[str, dict[str, Any]], *, fused: bool = True, **keys: Any) -> Plan:
    """Make a tiny plan with techniques by name."""
    names = {**({"fused_cross_entropy": {}} if fused else {}), **beside}
    return house.make_plan(*(Variant(n, k).technique() for n, k in names.items()), **keys)


@crossed(together=1, case=CASES, ignored=(False, True))
def test_a_step_equals_the_reference(case: Any, ignored: bool, on_a_cpu: None) -> None:
    shape, beside, keys = case
    rows = house.make_rows(house.SHAPES[shape]["vocab"], ignored=ignored)[:4]
    few: dict[str, Any] = {"tokens": len(rows) * house.LENGTH}  # each is interpreted slowly
    build = house.random_build(plan_with(beside, shape=shape, batch=few, **keys))
    found = house.take_step(build, rows)
    documents = "document_packing" in beside
    house.assert_equal(
        found, house.baseline_reference(shape, rows, documents=documents, device="cpu")
    )
    evidence = check_active(build)["fused_cross_entropy"]
    micros = len(rows) // (keys.get("micro_rows") or len(rows))
    assert evidence.numbers["backward_launches"] == micros
    assert evidence.numbers["forward_launches"] >= micros  # other evidence runs the model too


@crossed(
    together=1,
    head=("fused_cross_entropy", "chunked_cross_entropy"),
    shape=("grouped", "tied"),
)
def test_a_z_loss_is_made_by_the_kernels(head: str, shape: str, on_a_cpu: None) -> None:
    """Loss and gradients are the formula's, accumulated over targets of which some are ignored."""
    knobs = {"chunk_tokens": 11} if head == "chunked_cross_entropy" else {}
    plan = plan_with(
        {head: knobs, "z_loss": {"weight": 0.3}},
        fused=False,
        shape=shape,
        micro_rows=2,
        eval={"tokens": 56},
    )
    rows = house.make_rows(house.SHAPES[shape]["vocab"], ignored=True)
    nats = []

    def z_loss(build: Any, ids: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        added = 0.3 * (logits_NV.logsumexp(-1)[targets_N != IGNORED] ** 2).sum()
        nats.append(added.item())
        return added

    build = house.random_build(plan)
    build.model.head.fused = True  # what the chunked one is on a GPU
    before = COUNTS["cross_entropy_backward"]
    found = house.take_step(build, rows)
    trunk = house.random_build(plan_with({}, fused=False, shape=shape, eval=plan.eval.model_dump()))
    house.assert_equal(found, house.reference(trunk, rows, more=z_loss))
    # A micro-batch is two rows of 14 tokens: one launch, or three chunks of 11.
    assert COUNTS["cross_entropy_backward"] - before == (9 if knobs else 3)
    told = check_active(build)
    assert told["z_loss"].numbers["added_nats"] == pytest.approx(sum(nats), rel=1e-5)
    read = evaluate(build).loss_nats
    assert build.plan.techniques["z_loss"].active(build) == told["z_loss"]
    trunk.model.load_state_dict(build.model.state_dict())
    assert read == pytest.approx(evaluate(trunk).loss_nats, rel=1e-6)


def test_sophias_second_sweep_is_the_trunks(on_a_cpu: None) -> None:
    rows = house.make_rows(house.SHAPES["grouped"]["vocab"], ignored=True)
    ends = []
    for fused in (False, True):
        build = house.random_build(plan_with({"sophia": {"every": 1}}, fused=fused))
        before = COUNTS["cross_entropy_backward"]
        house.take_step(build, rows)
        assert COUNTS["cross_entropy_backward"] - before == (2 if fused else 0)
        ends.append(build.model.state_dict())
    for name, right in ends[0].items():
        torch.testing.assert_close(ends[1][name], right, rtol=1e-4, atol=1e-5)


def test_is_not_active_without_launches(on_a_cpu: None) -> None:
    build = house.build_of(plan_with({}))
    technique = build.techniques[0]
    assert not technique.active(build).active
    with torch.no_grad():
        house.build_of(plan_with({}, fused=False))
    assert not technique.active(build).active


def forward_by_rows(logits_NV: Tensor, targets_N: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    """What the first kernel computes, row by row."""
    losses_N = [F.cross_entropy(x, t) for x, t in zip(logits_NV, targets_N, strict=True)]
    largest_N = logits_NV.amax(-1)
    rest_N = torch.stack([x.logsumexp(-1) for x in logits_NV]) - largest_N
    return torch.stack(losses_N), torch.stack([largest_N, rest_N, torch.ones_like(rest_N)], -1)


def backward_by_rows(
    out_NV: Tensor,
    logits_NV: Tensor,
    targets_N: Tensor,
    norms_N3: Tensor,
    grad_N: Tensor,
    *how: Any,
) -> None:
    """What the second kernel computes."""
    for row, (x, t) in enumerate(zip(logits_NV, targets_N, strict=True)):
        p = (x - norms_N3[row, :2].sum()).exp()
        out_NV[row] = grad_N[row] * (p - F.one_hot(t, len(x)))


@crossed(
    together=1,
    sizes={
        "plain": {},
        "vocab": {"vocab": 2003},
        "tied": {"tied_embeddings": True},
        "capped": {"logit_cap": 15.0},
    },
    beside={"alone": {}, "z_loss": {"z_loss": {}}, "smoothed": {"label_smoothing": {}}},
)
def test_the_predicted_peak_is_the_traced(
    sizes: dict[str, Any], beside: dict[str, Any], on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter keeps the tensors of its last call, and these two let go as a GPU does."""
    from headrace.kernels import fused_cross_entropy_triton

    monkeypatch.setattr(fused_cross_entropy_triton, "forward", forward_by_rows)
    monkeypatch.setattr(fused_cross_entropy_triton, "backward", backward_by_rows)
    peaks = []
    for fused in (True, False):
        model = {"vocab": 521, "dim": 48, "heads": 4, "kv_heads": 0, "ffn": 96, **sizes}
        plan = plan_with(
            beside, fused=fused, model=model, data={"sequence_length": 64}, batch={"tokens": 256}
        )
        build = house.build_of(plan)
        micros = [build.loader.step(n).micros for n in range(2)]
        step(build, micros[0], 0)
        build.model.zero_grad()
        tracked = TrackedMemory(build.model, list(build.optimizers.values()))
        with tracked:
            step(build, micros[1], 1)
        peaks.append(tracked.peak_bytes()["Total"])
        assert make_ledger(build.plan, build.context).peak()[1] == pytest.approx(
            peaks[-1], rel=0.02
        )
    assert peaks[0] < peaks[1]


def test_refuses_where_its_kernels_cannot_run() -> None:
    gpu = replace(h200(torch=(2, 11)), plan=None)
    split = house.make_plan().model_copy(update={"mesh": MeshConfig(tensor=2)})
    taught, kept = (house.make_plan(Variant(n).technique()) for n in ("distillation", "z_loss"))
    for plan in (None, kept, split):
        assert isinstance(FusedCrossEntropy().supports(replace(gpu, plan=plan)), Supported)
    for how, says, helps in (
        ({"device": "cpu"}, "NVIDIA GPU", "device=cuda"),
        ({"has_triton": False}, "Triton", "pip install triton"),
        ({"capability": (7, 5)}, "Ampere", "leave"),
        ({"plan": taught}, "distillation", "--without distillation"),
    ):
        answer = FusedCrossEntropy().supports(replace(gpu, **how))
        assert isinstance(answer, Unsupported)
        assert says in answer.reason and helps in answer.remedy.text


def test_the_chunked_head_is_named_beside_it() -> None:
    both = [Variant(n).technique() for n in ("fused_cross_entropy", "chunked_cross_entropy")]
    with pytest.raises(ConfigError, match=in_order("socket", "'parts.head'")) as told:
        check_supported(both, house.context_on("cpu", house.make_plan()))
    assert {*told.value.remedy.changes} == {(f"-{t.name()}",) for t in both}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("beside", [{}, {"torch_compile": {}}, {"z_loss": {}}], ids=str)
def test_writes_over_the_logits_on_a_gpu(
    beside: dict[str, dict[str, Any]], corpus: Path, prepared_folder: Path
) -> None:
    """The head's step holds one tensor of bf16 logits, and its gradients."""
    house.put_data_in(str(corpus), str(prepared_folder))
    vocab, tokens, dim = 32_003, 8 * 512, 64
    plan = plan_with(
        beside,
        device="cuda",
        model={"vocab": vocab, "dim": dim, "heads": 4, "ffn": 96},
        data={"sequence_length": 512},
        batch={"tokens": tokens},
    )
    build = house.build_of(plan)
    micros = [build.loader.step(n).micros for n in range(2)]
    step(build, micros[0], 0)
    for parameter in build.model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(build, micros[1], 1)
    rise = torch.cuda.max_memory_allocated() - before
    logits = 2 * tokens * vocab
    assert logits <= rise < 1.5 * logits
    assert check_active(build)["fused_cross_entropy"].active
