"""Every key moves something: a setting that nobody reads is as wrong as one that is read badly.

Each key of the optimizer and of the schedule, and every knob of every technique, is turned to
another value. What three steps leave must differ: the weights, the operations that were run with
their shapes, or the evidence that a technique reads.
"""

import hashlib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import annotated_types
import house
import pytest
import torch
from house import Variant
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.plan.plan import OptimizerConfig, Plan
from headrace.plan.schedule import ScheduleConfig
from headrace.train.train import step

STEPS = 3
TURNED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "optimizer.lr": ({}, {"optimizer": {"lr": 2e-2}}),
    "optimizer.betas": ({}, {"optimizer": {"betas": (0.8, 0.95)}}),
    "optimizer.eps": ({}, {"optimizer": {"eps": 1e-2}}),
    "optimizer.weight_decay": ({}, {"optimizer": {"weight_decay": 0.3}}),
    "optimizer.clip_norm": ({}, {"optimizer": {"clip_norm": 0.01}}),
    "optimizer.lr_factors": ({}, {"optimizer": {"lr_factors": {"embeddings": 5.0}}}),
    "optimizer.decay_factors": ({}, {"optimizer": {"decay_factors": {"vectors": 1.0}}}),
    "schedule.kind": ({}, {"schedule": {"kind": "constant"}}),
    "schedule.warmup_steps": ({}, {"schedule": {"warmup_steps": 2}}),
    "schedule.decay_fraction": (
        {"schedule": {"kind": "warmup_stable_decay", "decay_fraction": 0.25}},
        {"schedule": {"kind": "warmup_stable_decay", "decay_fraction": 0.75}},
    ),
    "schedule.decay_shape": (
        {"schedule": {"kind": "warmup_stable_decay", "decay_fraction": 0.75}},
        {
            "schedule": {
                "kind": "warmup_stable_decay",
                "decay_fraction": 0.75,
                "decay_shape": "sqrt",
            }
        },
    ),
    "schedule.final_fraction": ({}, {"schedule": {"final_fraction": 0.5}}),
    "schedule.steps": ({}, {"schedule": {"steps": 9}}),
}
"""Keys of the plan -> tables without and with another value of it."""

ASKED: Mapping[str, Mapping[str, Any]] = {
    "adamw.betas": {"betas": (0.7, 0.9)},
    "adamw_8bit.compiled": {"compiled": True},
    "adamw_8bit.smallest": {"smallest": 1 << 10},
    "batch_ramp.until": {"until": 3.0},
    "curriculum.score": {"score": "length"},
    "curriculum.start": {"start": 1.0},
    "curriculum.until": {"until": 2.0},
    "cosine.final_fraction": {"final_fraction": 0.25},
    "deep_thin.base_dim": {"base_dim": 64},
    "deep_thin.base_ffn": {"base_ffn": 128},
    "deep_thin.base_heads": {"base_heads": 8},
    "deep_thin.base_kv_heads": {"base_kv_heads": 2},
    "dora.ranks": {"targets": ("mlp.down",), "ranks": (3,)},
    "dora.targets": {"targets": ("mlp.down",)},
    "dora.train_also": {"train_also": ("head",)},
    "float8_linear.min_size": {"min_size": 24},
    "float8_linear.multiple_of": {"multiple_of": 16},
    "gqa.queries_per_key": {"queries_per_key": 4},
    "length_mixing.lengths": {"lengths": (7, 0)},
    "length_mixing.shares": {"shares": (0.25, 0.75)},
    "lora.ranks": {"targets": ("mlp.down",), "ranks": (3,)},
    "lora.targets": {"targets": ("mlp.down",)},
    "lora.train_also": {"train_also": ("embedding",)},
    "muon.cautious_decay": {"weight_decay": 0.1, "cautious_decay": True},
    "muon.compiled": {"compiled": True},
    "muon.momentum_start": {"momentum_start": 0.5},
    "muon.momentum_warmup_steps": {"momentum_warmup_steps": 2},
    "muon.weight_decay": {"weight_decay": 0.1},
    "mup.base_dim": {"base_dim": 64},
    "qlora.ranks": {"targets": ("mlp.down",), "ranks": (3,)},
    "qlora.targets": {"targets": ("mlp.down",)},
    "qlora.train_also": {"train_also": ("embedding", "head")},
    "selective_checkpoint.operations": {"operations": ("mm",)},
    "sequence_length_schedule.start": {"start": 7},
    "sequence_length_schedule.until": {"until": 2.0},
    "sophia.every": {"every": 2},
    "sparse_attention.stride": {"stride": 3},
    "warmup_stable_decay.decay_fraction": {"decay_fraction": 0.75},
    "warmup_stable_decay.final_fraction": {"final_fraction": 0.5},
    "weight_pruning.end": {"end": 0.9},
    "weight_pruning.every": {"every": 1},
    "weight_pruning.start": {"start": 0.5},
    "yarn.beta_fast": {"beta_fast": 2.0},
    "yarn.beta_slow": {"beta_slow": 0.1},
    "yarn.factor": {"factor": 8.0},
    "yarn.high_frequency_factor": {"high_frequency_factor": 40.0},
    "yarn.low_frequency_factor": {"low_frequency_factor": 0.5},
    "yarn.original_length": {"original_length": 64},
}
"""Other values of knobs that their types do not tell, or that a tiny model does not take."""
BASE: Mapping[str, Mapping[str, Any]] = {
    "dora.ranks": {"targets": ("mlp.down",)},
    "lora.ranks": {"targets": ("mlp.down",)},
    "qlora.ranks": {"targets": ("mlp.down",)},
    "muon.cautious_decay": {"weight_decay": 0.1},
    "muon.momentum_start": {"momentum_warmup_steps": 2},
    "torch_compile.mode": {"backend": "inductor"},
    "warmup_stable_decay.final_fraction": {"decay_fraction": 0.75},
    "warmup_stable_decay.shape": {"decay_fraction": 0.75},
    "sequence_length_schedule.until": {"until": 9.0},
    "sparse_attention.stride": {"random": 0},
    "weight_pruning.every": {"end": 1.0},
    "yarn.beta_fast": {"original_length": 4096},
    "yarn.beta_slow": {"original_length": 4096},
    "yarn.factor": {"original_length": 32},
    "yarn.high_frequency_factor": {"kind": "llama3"},
    "yarn.low_frequency_factor": {"kind": "llama3"},
    "yarn.original_length": {"original_length": 32},
}
"""Other knobs that both sides of a comparison have."""
KEYS: Mapping[str, Mapping[str, Any]] = {
    "muon.head_pairs": {"model": {"kv_heads": 2}},
    "selective_checkpoint.wide_every": {"model": {"ffn": 80}},
    "short_convolution.between": {"model": {"layers": 3}},
    "value_embeddings.tables": {"model": {"layers": 3}},
    "sophia.share": {"micro_rows": 1},
    "weight_pruning.pattern": {"model": {"ffn": 24}},
}
"""Keys of the plan that both sides have."""
GPU, RUN = "needs a GPU", "what it changes is not in a step"
ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "bf16_parameters.fused": (GPU, "techniques/test_bf16_parameters"),
    "chunked_cross_entropy.fused": (GPU, "techniques/test_chunked_cross_entropy"),
    "compile_cache.directory": (RUN, "techniques/test_compile_cache"),
    "cpu_threads.bind": (RUN, "techniques/test_cpu_runs"),
    "distillation.teacher": (RUN, "techniques/test_distillation"),
    "distillation.top_k": (RUN, "techniques/test_distillation"),
    "dynamic_batch.headroom": (RUN, "techniques/test_dynamic_batch"),
    "fp16_loss_scaling.patience": (RUN, "techniques/test_fp16_loss_scaling"),
    "linear_attention.kernels": (GPU, "techniques/test_linear_attention_fla"),
    "batch_ramp.divide": (RUN, "techniques/test_batch_ramp"),
    "curriculum.until": (RUN, "techniques/test_curriculum"),
    "deduplication.method": (RUN, "techniques/test_deduplication"),
    "deduplication.scope": (RUN, "data/quality/test_near_duplicates"),
    "deduplication.keep": (RUN, "data/quality/test_near_duplicates"),
    "deduplication.threshold": (RUN, "data/quality/test_near_duplicates"),
    "deduplication.recall": (RUN, "data/quality/test_near_duplicates"),
    "deduplication.false_positive_rate": (RUN, "data/quality/test_bloom"),
    "loader_workers.side_copy": (GPU, "techniques/test_loader_workers"),
    "muon.symmetric_matmuls": (GPU, "techniques/test_muon"),
    "spike_rewind.every": (RUN, "techniques/test_spike_rewind"),
    "spike_rewind.most": (RUN, "techniques/test_spike_rewind"),
    "spike_rewind.patience": (RUN, "techniques/test_spike_rewind"),
    "spike_rewind.skip": (RUN, "techniques/test_spike_rewind"),
    "spike_rewind.states": (RUN, "techniques/test_spike_rewind"),
    "spike_rewind.within": (RUN, "techniques/test_spike_rewind"),
    "weight_averaging.decay": (RUN, "techniques/test_weight_averaging"),
    "weight_averaging.every": (RUN, "techniques/test_weight_averaging"),
    "weight_averaging.keep": (RUN, "techniques/test_weight_averaging"),
}
"""Knobs that three steps of a CPU cannot show -> why, and the file of the tests that do."""


class Operations(TorchDispatchMode):
    """Hash every operation that runs, with shapes, types and numbers that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.digest = hashlib.sha256()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [
            (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else leaf
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, Tensor | int | float | bool | str)
        ]
        self.digest.update(f"{func}{taken}".encode())
        return func(*args, **(kwargs or {}))


def left_by(plan: Plan) -> tuple[str, str, str]:
    """What three steps leave: weights, operations, and evidence with how the compiler was asked.

    Only what acts inside of the compiler needs it to run.
    """
    asked: list[str] = []
    compile_ = torch.compile

    def recorded(function: Any, **how: Any) -> Any:
        asked.append(repr(how))
        return compile_(function, **how) if "memory_budget" in plan.techniques else function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", recorded)
        weights, operations, evidence = _left_by(plan)
    return weights, operations, repr((evidence, asked))


def _left_by(plan: Plan) -> tuple[str, str, str]:
    build = house.random_build(plan)
    micros = house.make_micros(
        house.make_rows(build.config.vocab - 7, ignored=False),
        micro_rows=plan.batch.micro_sequences,
        segments=build.mask.document,
    )
    compiled = any("compiled" in t.composes for t in plan.techniques.values())
    operations = Operations()
    with house.flags_of(build):
        for index in range(STEPS):
            if compiled:
                step(build, micros, index)
            else:
                with operations:
                    step(build, micros, index)
        evidence = [repr(t.active(build)) for t in build.techniques]
    weights = hashlib.sha256()
    for parameter in build.model.parameters():
        if type(parameter.data) is Tensor:
            raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            weights.update(raw.numpy().tobytes())
    return weights.hexdigest(), operations.digest.hexdigest(), repr(evidence)


def test_no_key_of_the_optimizer_or_the_schedule_is_left_out() -> None:
    tables = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}
    keys = {f"{name}.{key}" for name, table in tables.items() for key in table.model_fields}
    assert keys == set(TURNED)


@pytest.mark.parametrize("key", TURNED)
def test_every_key_of_the_optimizer_and_the_schedule_moves_the_weights(key: str) -> None:
    before, after = (left_by(house.make_plan(**tables)) for tables in TURNED[key])
    assert before[0] != after[0]


def test_the_same_plan_leaves_the_same() -> None:
    """Check that a plan leaves the same twice; else every key would seem to move something."""
    assert left_by(house.make_plan()) == left_by(house.make_plan())


def another(annotation: Any, now: Any, bounds: list[Any]) -> Any:
    """Another value of a knob, within its bounds; None where its type does not tell one."""
    if typing.get_origin(annotation) is typing.Literal:
        return next(choice for choice in typing.get_args(annotation) if choice != now)
    inner = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    if inner and now is None:
        return another(inner[0], {bool: True, float: 2.0}.get(inner[0]), bounds)
    if isinstance(now, bool):
        return not now
    if not isinstance(now, int | float):
        return None
    tried = [now + 1, now * 2, now - 1] if isinstance(now, int) else [now / 2, now * 2 or 0.5]
    return next((value for value in tried if value != now and within(value, bounds)), None)


def within(value: float, bounds: list[Any]) -> bool:
    """Whether a number keeps the bounds of a field."""
    keeps: dict[type, Callable[[Any], bool]] = {
        annotated_types.Ge: lambda bound: value >= bound.ge,
        annotated_types.Gt: lambda bound: value > bound.gt,
        annotated_types.Le: lambda bound: value <= bound.le,
        annotated_types.Lt: lambda bound: value < bound.lt,
    }
    return all(keeps[type(bound)](bound) for bound in bounds if type(bound) in keeps)


def knobs() -> Iterator[tuple[str, str]]:
    """Every knob of every technique that runs on a CPU."""
    for name in house.names_on("cpu"):
        yield from ((name, key) for key in house.CATALOGUE.find(name).model_fields)


@pytest.mark.slow
@pytest.mark.parametrize("knob", [f"{n}.{k}" for n, k in knobs() if f"{n}.{k}" not in ELSEWHERE])
def test_every_knob_moves_something(knob: str) -> None:
    name, key = knob.split(".")
    kind = house.CATALOGUE.find(name)
    plain = {**house.tiny_knobs(name, "cpu"), **BASE.get(knob, {})}
    info = kind.model_fields[key]
    now = getattr(kind.model_validate(plain), key)
    turned = {**plain, key: another(info.annotation, now, info.metadata), **ASKED.get(knob, {})}
    keys = {**KEYS.get(knob, {})}
    variants = [Variant(name, plain), Variant(name, turned)]
    one, two = (left_by(house.plan_of(v, **keys)) for v in variants)
    assert one != two, f"{knob} = {turned[key]!r} leaves what {now!r} leaves"


@pytest.mark.parametrize("knob", ELSEWHERE)
def test_what_no_step_shows_is_tested_by_name(knob: str) -> None:
    name, key = knob.split(".")
    assert key in house.CATALOGUE.find(name).model_fields
    tests = Path(__file__).parent.parent / f"{ELSEWHERE[knob][1]}.py"
    assert key in tests.read_text()
