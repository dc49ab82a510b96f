"""Predicts: a technique's edit of the ledger is what a traced step shows.

Memory is measured with torch's MemTracker, which sees every tensor by its storage; being a dispatch
mode it does not stand beside a compiler, so these tests run uncompiled. The slope over layers
leaves out what is there once. FLOPs are counted by torch's FlopCounterMode; attention counts whole,
causal or not, and its backward as the four products of the mathematics, without the scores that a
fused kernel computes again.
"""

import copy
import gc
from functools import cache
from typing import Any

import house
import numpy as np
import pytest
import torch
from house import Variant
from torch.utils.flop_counter import FlopCounterMode
from uncounted import UNCOUNTED

from headrace.assemble.build import make_ledger
from headrace.assemble.sockets import place
from headrace.core.errors import ConfigError
from headrace.costs.count import baseline_ledger
from headrace.costs.ledger import INSTANTS, Ledger
from headrace.data.rows import Row
from headrace.observe.signals import TrackedMemory, memory_tracker
from headrace.plan.plan import Batch, Plan
from headrace.train.train import step

SLOPE_BAND = 0.01
"""Relative error of what a layer keeps; the masks and statistics of one token are not lines."""
PEAK_BAND = 0.05
SLOPE_BAND_GPU, PEAK_BAND_GPU = 0.05, 0.10
"""An allocator rounds up, and the libraries of matrix products keep workspaces."""
LENGTH, ROWS = 64, 4
DEEP, FLAT = 3, 2
"""Layers of the two models whose difference is what a layer keeps."""
SIZES = {"dim": 48, "heads": 4, "kv_heads": 0, "ffn": 96, "vocab": 521}

TRUNKS: dict[str, dict[str, Any]] = {
    "headrace": {},
    "grouped": {"kv_heads": 2},
    "grouped-none": {"kv_heads": 1, "position": "none", "activation": "relu2"},
    "qk_norm": {"qk_norm": True},
    "qk_norm-grouped": {"qk_norm": True, "kv_heads": 2},
    "qk_norm-learned": {"qk_norm": True, "kv_heads": 2, "position": "learned"},
    "gpt2": {
        "norm": "layer_norm",
        "position": "learned",
        "activation": "gelu",
        "bias": True,
        "tied_embeddings": True,
    },
    "gelu_tanh": {"activation": "gelu_tanh", "bias": True},
    "wide-heads": {"head_dim": 24, "norm": "layer_norm"},
    "tied": {"tied_embeddings": True, "position": "none"},
    "qwen2": {"qkv_bias": True, "kv_heads": 2},
    "mistral": {"window": 5, "kv_heads": 2},
    "post norms": {"post_norms": True},
    "gemma": {
        "activation": "geglu",
        "post_norms": True,
        "tied_embeddings": True,
        "kv_heads": 2,
        "qk_norm": True,
        "window": 5,
        "window_between": 1,
        "local_rope_theta": 50.0,
        "attention_cap": 2.0,
        "logit_cap": 3.0,
        "query_scale": 0.5,
        "embedding_scale": 5.0,
    },
    "speedrun": {
        "norm": "unit_rms_norm",
        "qk_norm": True,
        "kv_heads": 2,
        "activation": "relu2",
        "embedding_norm": True,
        "embedding_residual": True,
        "value_embeddings": 1,
        "bigram_multiple": 3,
        "embedding_smear": True,
    },
}
CPU_VARIANTS = [
    v
    for name in house.names_on("cpu")
    for v in house.variants(name, "cpu")
    if not house.compiles(v, "cpu")
]
knobs_are_slow = pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.slow] * v.turned) for v in CPU_VARIANTS], ids=str
)
"""Each technique; what a knob predicts is also read without a model, quickly."""
SMALL = {"rows": 1, "vocab": 307}
"""Sizes at which the update is the peak."""
COMPOSED: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "one shape": ({"muon": {}}, {**SMALL, "ffn": 48, "activation": "gelu"}),
    "a part of one shape": (
        {"muon": {"fraction": 0.5}},
        {**SMALL, "ffn": 48, "activation": "gelu"},
    ),
    "a part with even rows": (
        {"muon": {"fraction": 0.5, "normalize_rows": True}},
        {**SMALL, "ffn": 48},
    ),
    "a shape of experts": ({"muon": {}, "mixture_of_experts": {}}, SMALL),
    "shapes of adapters": ({"muon": {}, "lora": {"rank": 32}}, SMALL),
    "one linear": ({"lora": {"targets": ("mlp.down",)}}, {}),
    "one linear in few bits": ({"qlora": {"targets": ("mlp.down",)}}, {}),
    "a head beside adapters": ({"lora": {"train_also": ("head",)}}, {}),
    "an embedding beside one linear": (
        {"lora": {"train_also": ("embedding",), "targets": ("mlp.down",)}},
        {},
    ),
    "one table for both": (
        {"lora": {"train_also": ("head",), "targets": ("mixer.out",)}},
        {"tied_embeddings": True},
    ),
    "frozen states": ({"lora": {"targets": ("mixer.out",)}, "linear_attention": {}}, {}),
    "a frozen mixer": ({"lora": {"targets": ("mlp.gate_up",)}, "linear_attention": {}}, {}),
    "frozen gates": ({"lora": {"targets": ("mixer.qkv",)}, "linear_attention": {}}, {}),
    "frozen strengths": (
        {"lora": {"targets": ("mixer.qkv",)}, "linear_attention": {"rule": "gated_delta"}},
        {},
    ),
    "corrections that run again": ({"lora": {}, "selective_checkpoint": {}}, {}),
    "one that is corrected": (
        {"qlora": {"targets": ("mlp.down",)}, "selective_checkpoint": {"save": "matmul"}},
        {},
    ),
    "corrections that are not kept": (
        {"lora": {}, "selective_checkpoint": {"save": "attention"}},
        {},
    ),
    "a taught chunk": (
        {"distillation": {}, "chunked_cross_entropy": {"chunk_tokens": 128}},
        {"vocab": 2048},
    ),
    "a taught chunk that is capped": (
        {"distillation": {}, "chunked_cross_entropy": {"chunk_tokens": 128}},
        {"vocab": 2048, "logit_cap": 30.0},
    ),
    "two terms": ({"distillation": {}, "z_loss": {}}, {"vocab": 2048}),
}
"""Techniques that change what each other hold, and sizes that show it."""

GPU_LENGTH, GPU_ROWS = 512, 8
GPU_SIZES = {"dim": 576, "heads": 12, "kv_heads": 12, "ffn": 1408, "vocab": 8192}
"""Sizes whose memory an allocator shows."""
POOLED = {"cuda_graphs": "replays allocate nothing: what they use stays in a pool of recordings"}
"""Techniques whose peak no counter of the allocator shows."""


def sized(*, layers: int = DEEP, rows: int = ROWS, **model: Any) -> dict[str, Any]:
    """Return keys of a plan."""
    return {
        "model": {**SIZES, **model, "layers": layers},
        "data": {"sequence_length": LENGTH},
        "batch": {"tokens": rows * LENGTH},
    }


def sized_for_a_gpu(*, layers: int = 4, **model: Any) -> dict[str, Any]:
    """Return such keys where an allocator is read."""
    return {
        "model": {**GPU_SIZES, **model, "layers": layers},
        "data": {"sequence_length": GPU_LENGTH},
        "batch": {"tokens": GPU_ROWS * GPU_LENGTH},
    }


def plan_of(*variants: Variant, **sizes: Any) -> Plan:
    return house.plan_of(*variants, **sized(**sizes))


class Traced:
    """Run the second step of a plan under the tracker: kept at the loss, and the peak, in bytes."""

    def __init__(self, plan: Plan) -> None:
        build = house.build_of(plan)
        self.ledger = make_ledger(build.plan, build.context)
        random = np.random.default_rng(0)
        rows = [
            Row(random.integers(0, build.config.vocab, LENGTH + 1), np.array([5, 20]))
            for _ in range(plan.rows_per_step)
        ]
        micros = house.make_micros(
            rows, micro_rows=plan.batch.micro_sequences, segments=build.mask.document
        )
        step(build, micros, 0)
        build.model.zero_grad()
        state = [t for keeper in build.state.values() for t in keeper.tensors().values()]
        tracker = memory_tracker(build.model, [*build.optimizers.values(), *state])
        loss, kept = build.model.loss, {}

        def watched(*args: Any) -> Any:
            kept.update(self._read(tracker, "current"))
            return loss(*args)

        build.model.loss = watched
        with tracker:
            step(build, micros, 1)
        self.kept = kept["Activation"] + kept["Temp"]
        self.state = kept["Optstate"]
        self.peak = self._read(tracker, "peak")["Total"]
        self.parameters = sum(p.nbytes for p in build.model.parameters())

    def _read(self, tracker: Any, which: str) -> dict[str, int]:
        (found,) = tracker.get_tracker_snapshot(which).values()
        return {getattr(name, "value", str(name)): int(size) for name, size in found.items()}


@cache
def trace_of(text: str) -> Traced:
    return Traced(Plan.read(text, house.CATALOGUE))


def traced(plan: Plan) -> Traced:
    """Its trace: taken once, and no test changes it."""
    return trace_of(plan.to_toml())


def kept_by_layers(ledger: Ledger) -> float:
    return sum(
        line.bytes
        for line in ledger.memory.values()
        if line.layer is not None and "loss" in line.instants
    )


def check_against_trace(*variants: Variant, **model: Any) -> None:
    deep, flat = (traced(plan_of(*variants, layers=n, **model)) for n in (DEEP, FLAT))
    measured = deep.kept - flat.kept
    predicted = kept_by_layers(deep.ledger) - kept_by_layers(flat.ledger)
    assert predicted == pytest.approx(measured, rel=SLOPE_BAND)
    assert deep.ledger.peak()[1] == pytest.approx(deep.peak, rel=PEAK_BAND)
    held = deep.ledger.memory["parameters"].bytes
    assert held == deep.parameters
    assert deep.ledger.memory["optimizer"].bytes == pytest.approx(deep.state, rel=0.01)


@pytest.mark.parametrize("model", TRUNKS.values(), ids=TRUNKS)
def test_the_baselines_memory(model: dict[str, Any]) -> None:
    check_against_trace(**model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("norm", ["rms_norm", "unit_rms_norm", "layer_norm"])
def test_the_final_norms_memory(norm: str, precision: str) -> None:
    """Check the peak that the final norm sets, to half of a tensor of hidden states."""
    plan = plan_of(layers=2, norm=norm, precision=precision)
    found = traced(plan)
    hidden = (4 if precision == "fp32" else 2) * plan.batch.tokens * plan.model.dim
    assert abs(found.peak - found.ledger.peak()[1]) < hidden / 2


@knobs_are_slow
def test_the_matrices_that_are_predicted_are_the_models(variant: Variant) -> None:
    """By name and shape, and each is updated by the optimizer that takes it."""
    build = house.build_of(plan_of(variant, layers=2))
    predicted = make_ledger(build.plan, build.context).matrices
    matrices = {n: p for n, p in build.model.named_parameters() if p.ndim >= 2}
    assert {n: m.shape for n, m in predicted.items()} == {n: p.shape for n, p in matrices.items()}
    owners = {name: owner for owner, taken in build.routed.items() for name in taken}
    assert {n: m.by for n, m in predicted.items()} == {n: owners.get(n, "") for n in matrices}


def stands_in(variant: Variant, model: str) -> bool:
    """Whether a technique can run in that baseline; some need a rotation."""
    try:
        plan = plan_of(variant, **TRUNKS[model])
    except ConfigError:
        return False
    answer = variant.technique().supports(house.context_on("cpu", plan))
    return isinstance(answer, house.Supported)


@pytest.mark.parametrize(
    ("variant", "model"),
    [
        pytest.param(
            variant,
            model,
            id=f"{model}-{variant}",
            marks=[pytest.mark.slow] * (variant.turned or model != "headrace"),
        )
        for model in ("headrace", "qk_norm-learned")
        for variant in CPU_VARIANTS
        if stands_in(variant, model)
    ],
)
def test_a_techniques_memory(variant: Variant, model: str) -> None:
    check_against_trace(variant, **TRUNKS[model])


@pytest.mark.parametrize(("techniques", "model"), COMPOSED.values(), ids=COMPOSED)
def test_a_compositions_memory(
    techniques: dict[str, dict[str, Any]], model: dict[str, Any]
) -> None:
    found = [Variant(n, {**house.tiny_knobs(n, "cpu"), **k}) for n, k in techniques.items()]
    check_against_trace(*found, **model)


@knobs_are_slow
def test_a_small_batch_peaks_elsewhere_and_is_predicted(variant: Variant) -> None:
    """With one row the optimizer or the backward pass is the peak, not the loss."""
    plan = plan_of(variant, layers=4, rows=1, vocab=307, dim=96, ffn=160, kv_heads=2)
    answer = variant.technique().supports(house.context_on("cpu", plan))
    if isinstance(answer, house.Unsupported):
        pytest.skip(answer.reason)
    small = traced(plan)
    assert small.ledger.peak()[1] == pytest.approx(small.peak, rel=PEAK_BAND)


def test_accumulation_holds_gradients_all_the_time() -> None:
    plan = plan_of().replaced(batch=Batch(tokens=ROWS * LENGTH, micro_sequences=1))
    build = house.build_of(plan)
    micros = [build.loader.step(n).micros for n in range(2)]
    step(build, micros[0], 0)
    for parameter in build.model.parameters():
        parameter.grad = None
    tracked = TrackedMemory(build.model, list(build.optimizers.values()))
    with tracked:
        step(build, micros[1], 1)
    ledger = baseline_ledger(
        build.config, rows=1, length=LENGTH, precision="fp32", device="cpu", accumulates=True
    )
    assert ledger.peak()[1] == pytest.approx(tracked.peak_bytes()["Total"], rel=PEAK_BAND)


@knobs_are_slow
def test_an_edit_has_the_measured_sign(variant: Variant) -> None:
    baseline, edited = traced(house.plan_without(variant, **sized())), traced(plan_of(variant))
    for measured, predicted in (
        (
            edited.kept - baseline.kept,
            kept_by_layers(edited.ledger) - kept_by_layers(baseline.ledger),
        ),
        (edited.peak - baseline.peak, edited.ledger.peak()[1] - baseline.ledger.peak()[1]),
    ):
        matters = max(abs(measured), abs(predicted)) > 0.01 * baseline.peak
        assert not matters or np.sign(measured) == np.sign(predicted)


def test_prediction_is_pure_and_edits_only_with_reason(device: str, variant: Variant) -> None:
    technique = variant.technique()
    plan = house.plan_of(variant, device=device, **sized())
    others = {name: t for name, t in plan.techniques.items() if name != variant.name}
    before = make_ledger(plan.replaced(techniques=others), house.context_on(device, plan))
    kept = copy.deepcopy(before)
    after = technique.predict(before)
    assert before == kept
    assert after == technique.predict(before)
    assert all(line.bytes >= 0 for line in after.memory.values())
    assert all(set(line.instants) <= {*INSTANTS, "always"} for line in after.memory.values())
    assert all(work >= 0 for work in after.flops.values())


class Allocated:
    """Read these two instants from a GPU's allocator, under the run's flags.

    The step is the second, or the first that has the whole batch.
    """

    def __init__(self, plan: Plan) -> None:
        gc.collect()  # what earlier builds held is no part of this one
        base = torch.cuda.memory_allocated()
        build = house.build_of(plan)
        self.ledger = make_ledger(build.plan, build.context)
        last = max(1, plan.batches.stages[-1][0])
        micros = [build.loader.step(n).micros for n in range(last + 1)]
        with house.flags_of(build):
            for index in range(last):
                step(build, micros[index], index)
            for parameter in build.model.parameters():
                parameter.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, kept = torch.cuda.memory_allocated(), []
            loss = build.model.loss
            build.model.loss = lambda *a: kept.append(torch.cuda.memory_allocated()) or loss(*a)
            step(build, micros[last], last)
            torch.cuda.synchronize()
        self.kept = kept[0] - before
        self.peak = torch.cuda.max_memory_allocated() - base


@pytest.fixture
def workspaces() -> None:
    """Let a first step take the libraries' own memory, which they keep from then on."""
    Allocated(house.make_plan(device="cuda", **sized_for_a_gpu(layers=1)))


@pytest.mark.gpu
@pytest.mark.parametrize("model", TRUNKS.values(), ids=TRUNKS)
def test_the_baselines_memory_on_a_gpu(model: dict[str, Any], workspaces: None) -> None:
    deep, flat = (
        Allocated(house.make_plan(device="cuda", **sized_for_a_gpu(layers=n, **model)))
        for n in (4, 2)
    )
    measured = (deep.kept - flat.kept) / 2
    predicted = (kept_by_layers(deep.ledger) - kept_by_layers(flat.ledger)) / 2
    assert predicted == pytest.approx(measured, rel=SLOPE_BAND_GPU)
    assert deep.ledger.peak()[1] == pytest.approx(deep.peak, rel=PEAK_BAND_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in house.names_on("cuda") if n not in POOLED])
def test_an_edit_has_the_measured_sign_on_a_gpu(name: str, workspaces: None) -> None:
    variant, sizes = house.variants(name, "cuda")[0], sized_for_a_gpu()
    baseline = Allocated(house.plan_without(variant, "cuda", **sizes))
    edited = Allocated(house.plan_of(variant, device="cuda", **sizes))
    measured = edited.peak - baseline.peak
    predicted = edited.ledger.peak()[1] - baseline.ledger.peak()[1]
    matters = max(abs(measured), abs(predicted)) > 0.02 * baseline.peak
    assert not matters or np.sign(measured) == np.sign(predicted), (measured, predicted)


def counted_flops(plan: Plan) -> tuple[float, Ledger]:
    """Count FLOPs per token of one step's forward and backward; return them with the ledger."""
    build = house.build_of(plan)
    rows = [Row(np.arange(LENGTH + 1), np.array([5, 20])) for _ in range(plan.rows_per_step)]
    (micro,) = house.make_micros(rows, micro_rows=0, segments=build.mask.document)
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with counter:
        works = [place(build, micro)]
        build.now = {"step": 0.0}
        for enrich in build.enrich:
            works = list(enrich(build, works))
        build.engine(build, works, build.objective, torch.ones(()))
    return counter.get_total_flops() / plan.batch.tokens, make_ledger(build.plan, build.context)


@pytest.mark.parametrize("model", TRUNKS.values(), ids=TRUNKS)
def test_the_baselines_flops(model: dict[str, Any]) -> None:
    counted, ledger = counted_flops(plan_of(layers=2, **model))
    assert ledger.flops_per_token() == pytest.approx(counted, rel=1e-6)


@knobs_are_slow
def test_a_techniques_flops(variant: Variant) -> None:
    counted, ledger = counted_flops(plan_of(variant, layers=2))
    ledger.flops.pop("curvature", None)  # of a second sweep every few steps
    assert ledger.flops_per_token() == pytest.approx(counted, rel=1e-6)
