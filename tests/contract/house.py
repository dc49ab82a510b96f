"""What the contract suite is made from: techniques and variants, and tiny plans of them.

Batches are in tiny_rows.py, results and their references in equality.py, toys in toys.py; what
tests use of them is here too. Nothing here names a technique but `TINY`, the knobs without which a
technique would do nothing on a tiny model or would not be cheap, `BESIDE`, what it would have
nothing to act on without, and the two that the design crosses all others with.
"""

import subprocess
import sys
import typing
import zlib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import annotated_types
import torch
from equality import BAND_BF16 as BAND_BF16
from equality import BANDS as BANDS
from equality import MAGNIFIED as MAGNIFIED
from equality import MAGNIFIED_BF16 as MAGNIFIED_BF16
from equality import TOLERANCE_FP32 as TOLERANCE_FP32
from equality import UNIT_BF16 as UNIT_BF16
from equality import UNIT_FP32 as UNIT_FP32
from equality import Result
from equality import assert_equal as assert_equal
from equality import at_the_update as at_the_update
from equality import distances as distances
from equality import flags_of as flags_of
from equality import gradients_of as gradients_of
from equality import reference as reference
from equality import rounding as rounding
from equality import take_step as take_step
from pieces import h200
from tiny import save_weights
from tiny_rows import LENGTH, ROWS
from tiny_rows import make_micros as make_micros
from tiny_rows import make_rows as make_rows
from torch import Tensor
from toys import toy as toy

import headrace.techniques
from headrace.assemble.build import make_build, make_context
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.data.prepared import Prepared
from headrace.data.rows import Row
from headrace.model.zoo import families
from headrace.observe.signals import Signals
from headrace.parallel.world import World
from headrace.plan.doubts import doubts_of
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import (
    Catalogue,
    Context,
    Stage,
    Supported,
    Technique,
    Unsupported,
    discover,
)

CATALOGUE = Catalogue(discover(headrace.techniques), families())
PACKING, COMPILE = "document_packing", "torch_compile"

SIXTEENS = {"dim": 32, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 320}
MODEL = "model"
BESIDE: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {
    ("compile_cache", "any"): {COMPILE: {"backend": "inductor"}},  # no other backend is kept
    ("cuda_graphs", "cuda"): {COMPILE: {}},
    ("length_mixing", "any"): {PACKING: {}},
    ("cudnn_autotune", "cuda"): {"short_convolution": {}},
    # Sizes that matrix units of 8 bits take, and weights that do not magnify what they round.
    ("float8_linear", "cuda"): {MODEL: {**SIXTEENS, "init_std": 0.05}},
    ("flash_attention_3", "cuda"): {MODEL: {"head_dim": 32}},  # FA4's narrowest
    ("example_loss", "any"): {PACKING: {}},
    ("fp16_loss_scaling", "cuda"): {MODEL: {"precision": "fp16"}},  # on a CPU exact in fp32
    ("memory_budget", "cpu"): {COMPILE: {"scope": "block"}},  # half of the time to trace
    ("memory_budget", "cuda"): {COMPILE: {}},
    ("shape_buckets", "any"): {
        COMPILE: {"backend": "eager"},
        "sequence_length_schedule": {"until": 9.0},
    },  # all of a test's steps
    ("rope", "any"): {MODEL: {"position": "none"}},  # which it rewrites: the baseline rotates too
    ("rms_norm", "any"): {MODEL: {"norm": "layer_norm"}},
    ("swiglu", "any"): {MODEL: {"activation": "gelu"}},
    ("weight_init", "any"): {MODEL: {"matrix_init": "he", "output_init": "zero"}},  # of no kind
    ("tf32", "cuda"): {MODEL: {"precision": "fp32"}},
    ("window_schedule", "any"): {"sliding_window": {}},
}
"""(technique, device or "any") -> what its plan must have beside it, or there is nothing that it
acts on: techniques, with knobs over their tiny ones, and keys of the model over any shape's."""
BASELINE = {"adamw", "quantization_aware_training", "weight_pruning"}
"""Techniques that are remedies for nothing: one makes a part of the baseline explicit, and two buy
what a model keeps or saves when it is stored, which no run shows."""
TINY: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("activation_offload", "any"): {"min_bytes": 1},
    ("bigram_embeddings", "any"): {"multiple": 2},
    ("batch_ramp", "any"): {"divide": 2, "until": 2.0},
    ("chunked_cross_entropy", "any"): {"chunk_tokens": 7},
    ("chunked_mlp", "any"): {"chunk_tokens": 7},
    ("deduplication", "any"): {"method": "minhash"},  # which reads most of the keys
    ("deep_thin", "any"): {"base_dim": 32, "base_heads": 4, "base_layers": 1},
    ("cosine", "any"): {"final_fraction": 0.5},  # the baseline's ends at a tenth
    ("length_mixing", "any"): {"lengths": (2, 0)},
    ("linear_attention", "any"): {"chunk_tokens": 4},
    ("dora", "any"): {"rank": 2, "alpha": 4.0},
    ("lora", "any"): {"rank": 2, "alpha": 4.0},
    ("mixture_of_experts", "any"): {"experts": 4},
    ("mixture_of_experts", "cuda"): {"experts": 2},  # half precision flips what is chosen
    ("mup", "any"): {"base_dim": 48},
    ("quantization_aware_training", "any"): {"group": 0},  # no size divides these shapes
    ("sequence_length_schedule", "any"): {"start": 2},
    ("shape_buckets", "any"): {"multiple": 4},
    ("short_convolution", "any"): {"between": 1},
    ("sliding_window", "any"): {"window": 5},
    ("sparse_attention", "any"): {"block": 2, "local": 1, "random": 1},
    ("stochastic_depth", "any"): {"rate": 1e-7},
    ("prefix_lm", "any"): {"tokens": 5},
    ("qlora", "any"): {"rank": 2, "alpha": 4.0},
    ("float8_linear", "any"): {"min_size": 1},
    ("float8_linear", "cpu"): {"multiple_of": 1},
    ("fp16_loss_scaling", "cuda"): {"exponent": 12},  # few targets make large gradients
    ("adamw", "any"): {"betas": (0.8, 0.9)},  # none of the baseline's
    ("adamw_8bit", "any"): {"smallest": 256},
    ("torch_compile", "cpu"): {"backend": "aot_eager"},
    ("value_embeddings", "any"): {"tables": 1},
    ("warmup", "any"): {"steps": 2},
    ("weight_averaging", "any"): {"every": 1},
    ("weight_pruning", "any"): {"pattern": "unstructured"},  # no four divides these shapes
    ("window_schedule", "any"): {"start": 2, "until": 9.0},
    ("yarn", "any"): {"factor": 2.0},
}
"""(technique, device or "any") -> knobs for a tiny model."""
WITH: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("deduplication", "false_positive_rate"): {"method": "bloom"},
}
"""(technique, knob) -> knobs without which it is refused, in the place of the tiny model's."""
DEAR = {
    ("cpu", "torch_compile", "backend", "inductor"),
    ("cpu", "torch_compile", "mode", "max-autotune-no-cudagraphs"),  # read by inductor alone
    ("cpu", "torch_compile", "fullgraph", False),  # no other graph where none breaks
    ("cuda", "torch_compile", "mode", "max-autotune-no-cudagraphs"),
}
"""Choices of a knob that take a minute, or compute what another does: they run with the slow
tests."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"dim": 32, "heads": 4, "kv_heads": 1, "ffn": 22, "vocab": 307},
    "tied": {
        "dim": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 20,
        "vocab": 311,
        "tied_embeddings": True,
        "qk_norm": True,
        "position": "none",
        "activation": "relu2",
    },
    "gpt2": {
        "dim": 40,
        "heads": 5,
        "ffn": 27,
        "vocab": 313,
        "norm": "layer_norm",
        "bias": True,
        "activation": "gelu",
        "position": "learned",
    },
}
"""Decoders that differ in everything, with sizes that divide nothing."""

LAYERS = 2


# --- techniques and their variants -----------------------------------------------------------


def context_on(device: str, plan: Plan | None = None) -> Context:
    """The place where tests on `device` run; an H200 stands in for a GPU that is not here."""
    plan = plan or make_plan()
    asked = plan.model.precision
    if device == "cuda" and not torch.cuda.is_available():
        precision = "bf16" if asked == "auto" else asked
        return h200(plan, precision=precision, ranks=plan.mesh.ranks)
    return make_context(plan, torch.device(device))


def tiny_knobs(name: str, device: str) -> dict[str, Any]:
    """The knobs with which `name` does its work on a tiny model."""
    return {**TINY.get((name, "any"), {}), **TINY.get((name, device), {})}


def beside(name: str, device: str) -> dict[str, dict[str, Any]]:
    """Knobs of the techniques that a plan of `name` has beside it, by name."""
    asked = {**BESIDE.get((name, "any"), {}), **BESIDE.get((name, device), {})}
    asked.pop(MODEL, None)
    return {other: {**tiny_knobs(other, device), **given} for other, given in asked.items()}


def model_keys(name: str, device: str) -> dict[str, Any]:
    """Keys of the model that a plan of `name` has, over any shape's."""
    return {**BESIDE.get((name, "any"), {}), **BESIDE.get((name, device), {})}.get(MODEL, {})


@dataclass(frozen=True)
class Variant:
    """A variant is a technique with knobs."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dear: bool = False
    turned: bool = field(default=False, compare=False)
    """A knob is not where a tiny model has it."""

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.knobs.items())])

    def technique(self) -> Technique[Build]:
        """Return the technique."""
        return CATALOGUE.find(self.name).model_validate(dict(self.knobs))

    def companions(self, device: str) -> list[Technique[Build]]:
        """The techniques that its plan has beside it."""
        return [Variant(*other).technique() for other in beside(self.name, device).items()]


def knob_choices(technique: type[Technique[Any]]) -> Iterator[tuple[str, Any]]:
    """Yield all choices of a Literal, both of a bool, closed bounds of a number and the next."""
    for key, info in technique.model_fields.items():
        if typing.get_origin(info.annotation) is Literal:
            yield from ((key, choice) for choice in typing.get_args(info.annotation))
        elif info.annotation is bool:
            yield from ((key, choice) for choice in (False, True))
        elif info.annotation is int:
            lows = [m.ge for m in info.metadata if isinstance(m, annotated_types.Ge)]
            yield from ((key, low + more) for low in lows for more in (0, 1))
        elif info.annotation is float:
            yield from ((key, m.ge) for m in info.metadata if isinstance(m, annotated_types.Ge))
            yield from ((key, m.le) for m in info.metadata if isinstance(m, annotated_types.Le))


@cache
def choices(name: str, device: str) -> list[Variant]:
    """The technique as it is on a tiny model, and with each other choice of each knob."""
    technique = CATALOGUE.find(name)
    plain = tiny_knobs(name, device)
    others = [
        (device, other, *knob)
        for other, knobs in beside(name, device).items()
        for knob in knobs.items()
    ]
    dear_beside = not DEAR.isdisjoint(others)
    found = [Variant(name, plain, dear_beside)]
    for key, choice in knob_choices(technique):
        knobs = {**plain, **WITH.get((name, key), {}), key: choice}
        dear = dear_beside or (device, name, key, choice) in DEAR
        if all(v.technique() != technique.model_validate(knobs) for v in found):
            found.append(Variant(name, knobs, dear, turned=True))
    return found


@cache
def variants(name: str, device: str) -> list[Variant]:
    """Return the choices of a technique that run on `device`; every file of tests asks for all."""
    return [v for v in choices(name, device) if refusal(v, device) is None]


def left_out(name: str, device: str) -> str:
    """Its choices that do not run on `device`, each with the reason; empty if there is none."""
    refused: dict[str, list[str]] = {}
    for variant in choices(name, device):
        if (answer := refusal(variant, device)) is not None:
            refused.setdefault(answer.reason, []).append(str(variant))
    return "; ".join(f"{', '.join(found)}: {reason}" for reason, found in refused.items())


def refusal(variant: Variant, device: str) -> Unsupported | None:
    """Why it, or what it needs beside it, does not run on `device`, if it does not."""
    others = variant.companions(device)
    plan = make_plan(*others, device=device, model=model_keys(variant.name, device))
    context = context_on(device, plan)
    answers = [technique.supports(context) for technique in (variant.technique(), *others)]
    return next((answer for answer in answers if isinstance(answer, Unsupported)), None)


def fits(variant: Variant, **keys: Any) -> bool:
    """Whether it can run in a tiny plan with these keys."""
    plan = plan_of(variant, **keys)
    context = context_on(plan.device, plan)
    return all(isinstance(t.supports(context), Supported) for t in plan.techniques.values())


def compiles(variant: Variant, device: str) -> bool:
    """Whether a graph is compiled in its plans."""
    return any("compiled" in t.composes for t in (variant.technique(), *variant.companions(device)))


def is_a_knob_of_a_graph(variant: Variant, device: str) -> bool:
    """Whether it takes seconds on a CPU: such a choice is quick in test_equal alone."""
    return variant.turned and device == "cpu" and compiles(variant, device)


def names_on(device: str) -> list[str]:
    """Return the techniques that run on `device`."""
    return [n for n in CATALOGUE.techniques if variants(n, device)]


# --- plans and builds ------------------------------------------------------------------------

_FOLDERS: dict[str, str] = {}


def put_data_in(corpus: str, prepared: str) -> None:
    """Where the tests' text lies and its shards go."""
    _FOLDERS.update(sources=corpus, directory=prepared)


def make_plan(
    *techniques: Technique[Any],
    shape: str = "grouped",
    precision: str = "auto",
    micro_rows: int = 0,
    device: str = "cpu",
    **keys: Any,
) -> Plan:
    """A tiny plan; `keys` are set in it, tables key by key."""
    values: dict[str, Any] = {
        "device": device,
        "model": {
            "layers": LAYERS,
            "vocab_multiple": 1,
            "init_std": 0.2,
            "precision": precision,
            **SHAPES[shape],
        },
        "data": {**_FOLDERS, "vocab": 300, "sequence_length": LENGTH, "workers": 0},
        "batch": {"tokens": ROWS * LENGTH, "micro_sequences": micro_rows},
        "optimizer": {"clip_norm": 0.0, "eps": 1e-3, "lr": 1e-2},
        "goal": {"steps": 4},
    }
    for key, value in keys.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
    mesh = MeshConfig.model_validate(values.pop("mesh", {}))
    plan = Plan.model_validate(values)
    on = {t.name(): t for t in techniques}
    return plan.replaced(mesh=mesh, techniques=on).with_keys({})


def plan_of(*variants: Variant, device: str = "cpu", **keys: Any) -> Plan:
    """A tiny plan of techniques, each with what it must have beside it; `keys` as `make_plan`'s."""
    techniques = [v.technique() for v in variants]
    techniques += [t for v in variants for t in v.companions(device)]
    needed = [model_keys(v.name, device) for v in variants]
    keys["model"] = dict(ChainMap(keys.get("model", {}), *needed))
    return make_plan(*techniques, device=device, **keys)


def plan_without(variant: Variant, device: str = "cpu", **keys: Any) -> Plan:
    """Return the same plan without the technique.

    It is in fp32 where the technique asks for a precision: fp16 is refused without a scale of the
    loss,
    and TF32 is less than fp32.
    """
    model = model_keys(variant.name, device)
    fp32 = {"precision": "fp32"} if "precision" in model else {}
    keys["model"] = {**model, **fp32, **keys.get("model", {})}
    return make_plan(*variant.companions(device), device=device, **keys)


def with_weights(plan: Plan, folder: Path) -> Plan:
    """The plan over weights of a folder, where it would mean nothing over random ones."""
    if not any(doubt.meaningless for doubt in doubts_of(plan)):
        return plan
    start = save_weights(plan, folder / "given")
    return plan.replaced(model=plan.model.model_copy(update={"pretrained": start})).with_keys({})


_PREPARED: dict[str, Prepared] = {}


def prepared_of(plan: Plan) -> Prepared:
    """The data of a plan, opened once: nothing writes to it."""
    key = plan.data.model_dump_json()
    if key not in _PREPARED:
        _PREPARED[key] = prepare(plan)
    return _PREPARED[key]


def build_of(plan: Plan, *, until: Stage = Stage.STEP) -> Build:
    """Return the build of a plan, ready for `step`."""
    device = torch.device(plan.device)
    build = make_build(plan, prepared_of(plan), World(), device, until=until)
    if device.type != "cpu":
        build.phases = Signals(device)
    return build


def random_build(
    plan: Plan, *, of: Mapping[str, Tensor] = MappingProxyType({}), nudged: float = 0.0
) -> Build:
    """Return a build with every parameter off its starting value, so that all of them matter.

    Args:
        plan: the plan.
        of: weights to take as they are, by name.
        nudged: and then moved by this share of itself, up or down.
    """
    build = build_of(plan)
    with torch.no_grad():
        for name, parameter in build.model.named_parameters():
            if type(parameter.data) is not Tensor:  # kept in few bits
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.add_(0.1 * noise.to(parameter))
            if name in of:
                parameter.copy_(of[name])
            if nudged:
                sign = torch.randn(parameter.shape, generator=draw).sign()
                parameter.mul_(1 + nudged * sign.to(parameter))
    return build


def baseline_reference(
    shape: str,
    rows: Sequence[Row],
    *,
    documents: bool,
    device: str,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Result:
    """Run `reference` on a baseline made for it in fp32, `model` over the shape's sizes."""
    plan = make_plan(shape=shape, device=device, model={**model, "precision": "fp32"})
    return reference(random_build(plan), rows, documents=documents)


def run_python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
    )
