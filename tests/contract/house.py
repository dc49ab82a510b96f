"""What the contract suite is made from: techniques and variants, tiny plans, batches, references.

Nothing here names a technique but `TINY`, the knobs without which a technique would do nothing on a
tiny model or would not be cheap, and the two that the design crosses all others with.
"""

import itertools
import subprocess
import sys
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import annotated_types
import numpy as np
import torch
from torch import Tensor

import headrace.techniques
from headrace.build import make_build, make_context
from headrace.core.plan import MeshConfig, Plan
from headrace.core.technique import (
    Catalogue,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
    discover,
)
from headrace.data.ingest import prepare
from headrace.data.loader import Micro, collate
from headrace.data.rows import IGNORE, Row
from headrace.model.head import Vocabulary, cross_entropy
from headrace.model.mask import Rows
from headrace.model.zoo import families
from headrace.parallel.world import World
from headrace.signals import Signals
from headrace.sockets import Build, Pass
from headrace.train import step

CATALOGUE = Catalogue(discover(headrace.techniques), families())
PACKING, COMPILE = "document_packing", "torch_compile"

SIXTEENS = {"dim": 32, "heads": 4, "kv_heads": 2, "ffn": 32, "vocab": 320}
SHAPED: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("float8_linear", "cuda"): SIXTEENS,  # what the matrix units of 8 bits take
}
"""(technique, device) -> sizes without which it cannot run there, over any shape's."""
TINY: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("activation_offload", "any"): {"min_bytes": 1},
    ("chunked_cross_entropy", "any"): {"chunk_tokens": 7},
    ("chunked_mlp", "any"): {"chunk_tokens": 7},
    ("linear_attention", "any"): {"chunk_tokens": 4},
    ("lora", "any"): {"rank": 2, "alpha": 4.0},
    ("mixture_of_experts", "any"): {"experts": 4},
    ("mixture_of_experts", "cuda"): {"experts": 2},  # half precision flips what is chosen
    ("mup", "any"): {"base_dim": 48},
    ("sequence_length_schedule", "any"): {"start": 2},
    ("sliding_window", "any"): {"window": 5},
    ("sparse_attention", "any"): {"block": 2, "local": 1, "random": 1},
    ("stochastic_depth", "any"): {"rate": 1e-7},
    ("qlora", "any"): {"rank": 2, "alpha": 4.0},
    ("float8_linear", "any"): {"min_size": 1},
    ("float8_linear", "cpu"): {"multiple_of": 1},
    ("adamw_8bit", "any"): {"smallest": 256},
    ("torch_compile", "cpu"): {"backend": "aot_eager"},
    ("yarn", "any"): {"factor": 2.0},
}
"""(technique, device or "any") -> knobs for a tiny model."""
DEAR = {
    ("cpu", "torch_compile", "backend", "inductor"),
    ("cuda", "torch_compile", "mode", "max-autotune-no-cudagraphs"),
}
"""Choices of a knob that take a minute: they run with the slow tests."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"dim": 32, "heads": 4, "kv_heads": 1, "ffn": 22, "vocab": 307},
    "tied": {
        "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 20, "vocab": 311, "tied_embeddings": True,
        "qk_norm": True, "position": "none", "activation": "relu2",
    },
    "gpt2": {
        "dim": 40, "heads": 5, "ffn": 27, "vocab": 313, "norm": "layer_norm", "bias": True,
        "activation": "gelu", "position": "learned",
    },
}  # fmt: skip
"""Decoders that differ in everything, with sizes that divide nothing."""

TOLERANCE_FP32 = 1e-5
"""Largest difference of any number of a gradient, over the gradient's largest number."""
MAGNIFIED, MAGNIFIED_BF16 = 10.0, 2.0
"""A nudge is one rounding of each weight; a layout or a cut rounds in every product, and bf16 every
result once."""
BAND_BF16 = 0.05
"""L2 distance of a gradient in bf16 from the fp32 reference's, over the reference's norm."""
UNIT_FP32, UNIT_BF16 = 2.0**-23, 2.0**-9
"""What a nudge moves a weight by: a unit in its last place, and the most that bf16 rounds by."""
ROWS, LENGTH = 6, 14
LAYERS = 2


# --- techniques and their variants -----------------------------------------------------------


def context_on(device: str, plan: Plan | None = None) -> Context:
    """The place where tests on `device` run; an H200 stands in for a GPU that is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        return Context(
            plan=plan or make_plan(), device="cuda", device_name="NVIDIA H200",
            capability=(9, 0), torch=(2, 13),
            has_triton=True, has_compiler=True, ranks=1, precision="bf16",
        )  # fmt: skip
    return make_context(plan or make_plan(), torch.device(device))


def tiny_knobs(name: str, device: str) -> dict[str, Any]:
    """The knobs with which `name` does its work on a tiny model."""
    return {**TINY.get((name, "any"), {}), **TINY.get((name, device), {})}


@dataclass(frozen=True)
class Variant:
    """A technique with knobs."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dear: bool = False

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.knobs.items())])

    def technique(self) -> Technique[Build]:
        """The technique."""
        return CATALOGUE.find(self.name).model_validate(dict(self.knobs))


def knob_choices(technique: type[Technique[Any]]) -> Iterator[tuple[str, Any]]:
    """Every choice of a Literal, both of a bool, the closed bounds of a number and the next."""
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


def variants(name: str, device: str) -> list[Variant]:
    """The technique as it is on a tiny model, and with each other choice of each knob."""
    technique = CATALOGUE.find(name)
    plain = tiny_knobs(name, device)
    found = [Variant(name, plain)]
    for key, choice in knob_choices(technique):
        knobs = {**plain, key: choice}
        dear = (device, name, key, choice) in DEAR
        if all(v.technique() != technique.model_validate(knobs) for v in found):
            found.append(Variant(name, knobs, dear))
    return [v for v in found if supported(v.technique(), device)]


def supported(technique: Technique[Any], device: str) -> bool:
    """Whether it runs on `device`."""
    return isinstance(technique.supports(context_on(device)), Supported)


def fits(variant: Variant, **keys: Any) -> bool:
    """Whether it can run in a tiny plan with these keys."""
    plan = make_plan(variant.technique(), **keys)
    answer = variant.technique().supports(context_on(plan.device, plan))
    return isinstance(answer, Supported)


def names_on(device: str) -> list[str]:
    """Techniques that run on `device`."""
    return [n for n in CATALOGUE.techniques if variants(n, device)]


# --- plans and builds ------------------------------------------------------------------------

_FOLDERS: dict[str, str] = {}


def put_data_in(corpus: str, prepared: str) -> None:
    """Where the tests' text lies and its shards go."""
    _FOLDERS.update(sources=corpus, directory=prepared)


def make_plan(
    *techniques: Technique[Any], shape: str = "grouped", precision: str = "auto",
    micro_rows: int = 0, device: str = "cpu", **keys: Any,
) -> Plan:  # fmt: skip
    """A tiny plan; `keys` are set in it, tables key by key."""
    values: dict[str, Any] = {
        "device": device,
        "model": {
            "layers": LAYERS, "vocab_multiple": 1, "init_std": 0.2, "precision": precision,
            **SHAPES[shape],
        },
        "data": {**_FOLDERS, "vocab": 300, "sequence_length": LENGTH, "workers": 0},
        "batch": {"tokens": ROWS * LENGTH, "micro_sequences": micro_rows},
        "optimizer": {"clip_norm": 0.0, "eps": 1e-3, "lr": 1e-2},
        "goal": {"steps": 4},
    }  # fmt: skip
    for technique in techniques:
        values["model"] |= SHAPED.get((technique.name(), device), {})
    for key, value in keys.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
    mesh = MeshConfig.model_validate(values.pop("mesh", {}))
    plan = Plan.model_validate(values)
    on = {t.name(): t for t in techniques}
    return plan.replaced(mesh=mesh, techniques=on).with_keys({})


def build_of(plan: Plan, *, until: Stage = Stage.STEP) -> Build:
    """The build of a plan, ready for `step`."""
    device = torch.device(plan.device)
    build = make_build(plan, prepare(plan), World(), device, until=until)
    if device.type != "cpu":
        build.phases = Signals(device)
    return build


def random_build(plan: Plan, *, nudged: float = 0.0) -> Build:
    """The build with every parameter off its starting value, so that all of them matter.

    Args:
        plan: the plan.
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
            if nudged:
                sign = torch.randn(parameter.shape, generator=draw).sign()
                parameter.mul_(1 + nudged * sign.to(parameter))
    return build


# --- batches ---------------------------------------------------------------------------------


def make_rows(vocab: int, *, ignored: bool, seed: int = 0) -> list[Row]:
    """Rows whose documents begin anywhere, one of them at a row's first token."""
    random = np.random.default_rng(seed)
    starts = [[0, 5], [], [1, 2, 12], [7], [4, 9], [LENGTH - 1, LENGTH]]
    rows = []
    for place, begins in enumerate(starts):
        ids = random.integers(0, vocab, LENGTH + 1)
        targets = ids[1:].copy()
        if ignored:  # rows 0 and 1 wholly, the others unevenly
            targets[random.random(LENGTH) < (1.0 if place < 2 else 0.15 * place)] = IGNORE
        rows.append(Row(ids, np.array(begins, dtype=np.int64), targets))
    return rows


def make_micros(rows: Sequence[Row], *, micro_rows: int, segments: bool) -> list[Micro]:
    """The rows as micro-batches, as the loader would hand them out."""
    size = micro_rows or len(rows)
    length = len(rows[0].ids) - 1
    return [
        collate(rows[i : i + size], segments=segments, first_token=i * length)
        for i in range(0, len(rows), size)
    ]


# --- results and the reference ---------------------------------------------------------------


@dataclass
class Result:
    """What a step computed, before its update."""

    loss: float
    gradients: dict[str, Tensor]


def gradients_of(build: Build) -> dict[str, Tensor]:
    """Every parameter's gradient by name, fp32 on the host."""
    return {
        name: torch.zeros(()) if p.grad is None else p.grad.float().cpu()
        for name, p in build.model.named_parameters()
        if p.requires_grad
    }


def take_step(build: Build, rows: Sequence[Row], *, index: int = 0) -> Result:
    """One step of the run's own `step`."""
    micros = make_micros(
        rows, micro_rows=build.plan.batch.micro_sequences, segments=build.mask.document
    )
    gradients: dict[str, Tensor] = {}
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        flags.enter_context(at_the_update(build, lambda: gradients.update(gradients_of(build))))
        loss = float(step(build, micros, index)[0])
    return Result(loss, gradients)


@contextmanager
def at_the_update(build: Build, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` when the first sweep of a step is about to be absorbed, with its gradients."""
    passes = build.passes

    def watched(build: Build, index: int) -> list[Pass]:
        first, *rest = passes(build, index)

        def absorb(build: Build, finite: Tensor) -> None:
            look()
            first.absorb(build, finite)

        return [replace(first, absorb=absorb), *rest]

    build.passes = watched
    try:
        yield
    finally:
        build.passes = passes


def documents_of(row: Row) -> list[slice]:
    """The row's documents as slices of its inputs."""
    inner = [int(s) for s in row.starts if 0 < s < LENGTH]
    return [slice(a, b) for a, b in itertools.pairwise([0, *inner, LENGTH])]


def reference(
    build: Build, rows: Sequence[Row], *, documents: bool = False,
    more: Callable[[Build, Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Result:  # fmt: skip
    """The plain trunk on each row, or on each document as a row of its own: no batch at all.

    Args:
        build: of the trunk alone, in fp32.
        rows: the batch.
        documents: whether documents are blind to each other.
        more: (build, ids, logits, targets) of a row -> what its loss has beside cross-entropy.
    """
    model = build.model
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), device=build.device)
    targets = 0
    for row in rows:
        assert row.targets is not None
        for part in documents_of(row) if documents else [slice(0, LENGTH)]:
            ids_BT = torch.from_numpy(row.ids[:-1][part])[None].to(build.device)
            targets_N = torch.from_numpy(row.targets[part]).to(build.device)
            place_BT = torch.arange(ids_BT.size(1), device=build.device)[None]
            logits_NV = model.logits(ids_BT, Rows(place_BT))[0]
            total = total + cross_entropy(logits_NV, targets_N, None, Vocabulary())
            if more is not None:
                total = total + more(build, ids_BT[0], logits_NV, targets_N)
            targets += int((targets_N != IGNORE).sum())
    loss = total / targets
    loss.backward()
    return Result(float(loss.detach()), gradients_of(build))


def trunk_reference(
    shape: str, rows: Sequence[Row], *, documents: bool, device: str,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Result:  # fmt: skip
    """`reference` of a trunk made for it, `model` over the shape's sizes."""
    plan = make_plan(shape=shape, precision="fp32", device=device, model=model)
    return reference(random_build(plan), rows, documents=documents)


def distances(found: Result, wanted: Result, *, by_norm: bool = False) -> dict[str, float]:
    """Of the loss and every gradient: largest difference over the largest number, or L2."""
    assert found.gradients.keys() == wanted.gradients.keys()
    off: dict[str, float] = {"loss": abs(found.loss - wanted.loss) / abs(wanted.loss)}
    for name, right in wanted.gradients.items():
        difference = found.gradients[name] - right
        assert right.abs().max() > 0, f"the reference's gradient of {name} is zero"
        if by_norm:
            off[name] = float(difference.norm() / right.norm())
        else:
            off[name] = float(difference.abs().max() / right.abs().max())
    return off


def assert_equal(
    found: Result, wanted: Result, *, band: float | None = None,
    nudged: Callable[[float], Result] | None = None,
) -> None:  # fmt: skip
    """Loss and every gradient agree: within TOLERANCE_FP32 by number, or within `band` by L2.

    Args:
        found: what was computed.
        wanted: the reference.
        band: of half precision, or of an approximation.
        nudged: the reference from weights that are moved by a unit; where it is given, a multiple
            of its distance from the reference is rounding too.
    """
    off = distances(found, wanted, by_norm=band is not None)
    limit = TOLERANCE_FP32 if band is None else band
    if nudged is not None and max(off.values()) > limit:
        limit = max(limit, rounding(wanted, nudged, half=band is not None))
    wrong = {name: round(value, 9) for name, value in off.items() if not value <= limit}
    assert not wrong, f"beyond {limit}: {wrong}"


def rounding(wanted: Result, nudged: Callable[[float], Result], *, half: bool) -> float:
    """How far rounding alone can move a gradient, as fp32 numbers or as L2 in half precision."""
    unit, more = (UNIT_BF16, MAGNIFIED_BF16) if half else (UNIT_FP32, MAGNIFIED)
    return more * max(distances(nudged(unit), wanted, by_norm=half).values())


def run_python(code: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False
    )


# --- toys ------------------------------------------------------------------------------------


def toy(
    name: str, stage: Stage, apply: Callable[[Build], Any], *,
    claims: tuple[str, ...] = (), composes: tuple[str, ...] = (),
    excludes: Mapping[str, str] | None = None,
    answer: Supported | Unsupported = Supported(),  # noqa: B008
    active: bool = True,
) -> Technique[Build]:  # fmt: skip
    """A technique in a line, for what no real one does yet."""

    class Toy(Technique[Build]):
        """A toy."""

        @classmethod
        def name(cls) -> str:
            return name

        def supports(self, context: Context) -> Supported | Unsupported:
            return answer

        def predict(self, ledger: Any) -> Any:
            return ledger

        def apply(self, build: Build) -> None:
            apply(build)

        def active(self, build: Build) -> Evidence:
            return Evidence(active, "a toy")

    Toy.stage, Toy.claims, Toy.composes = stage, claims, composes
    Toy.excludes = excludes or {}
    return Toy()
