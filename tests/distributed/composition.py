"""Compare a plan over a mesh with the same plan unsharded in one process.

Ranks import this too. A composition is run for a few steps on batches whose rows have documents,
ignored and uneven targets; its loss, every gradient of the first step, and the weights after the
last are compared whole.
"""

import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import house
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.data.loader import Micro, collate
from headrace.data.rows import IGNORE, Row
from headrace.parallel.layout import local_of
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.train import step

ROWS = 8
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"dim": 24, "heads": 6, "kv_heads": 2, "ffn": 22, "vocab": 307},
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
        "heads": 4,
        "kv_heads": 4,
        "ffn": 28,
        "vocab": 313,
        "norm": "layer_norm",
        "bias": True,
        "activation": "gelu",
        "position": "learned",
    },
    "wide": {"dim": 512, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 307, "init_std": 0.05},
    "twelve": {"dim": 36, "heads": 12, "kv_heads": 4, "head_dim": 4, "ffn": 20, "vocab": 309},
    "even": {"dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 320},
}
"""Decoders whose key-value heads split in two, those of `twelve` in four; `even` has sizes that
kernels of 16 need, and half of `wide` is whole blocks of 256."""


@dataclass(frozen=True)
class Composition:
    """What is run over a mesh."""

    name: str
    mesh: Mapping[str, int]
    techniques: Mapping[str, Mapping[str, Any]]
    shape: str = "grouped"
    layers: int = 2
    length: int = 13
    micro_rows: int = 2
    clip_norm: float = 0.3
    keys: Mapping[str, Any] = field(default_factory=dict)
    packing: bool = False
    steps: int = 2
    """updates: the second has what the first kept"""
    slow: bool = False
    approximate: bool = False
    """a layout cuts what a scale is of: each gradient is inside its technique's band by L2"""
    rounded: float = 0.0
    """a layout rounds each gradient's sum once, to this share of it by L2"""

    def plan(self, *, alone: bool = False, device: str = "cpu", scale: int = 1) -> Plan:
        """Return the plan.

        Args:
            alone: without its mesh and what computes the same as the baseline.
            device: where; on a GPU compilation is inductor's.
            scale: times which sizes and rows' lengths are larger.
        """
        knobs = {name: dict(given) for name, given in self.techniques.items()}
        if device == "cuda" and "torch_compile" in knobs:
            knobs["torch_compile"]["backend"] = "inductor"
        if device == "cuda" and "float8_linear" in knobs:
            knobs["float8_linear"].pop("multiple_of", None)
        techniques = {n: house.Variant(n, k).technique() for n, k in knobs.items()}
        if self.packing:
            techniques["document_packing"] = house.Variant("document_packing").technique()
        if alone:
            techniques = {n: t for n, t in techniques.items() if t.equality != "exact"}
        shape = dict(SHAPES[self.shape])
        shape |= {key: shape[key] * scale for key in ("dim", "ffn")}
        shape["vocab"] *= 1 if scale == 1 else 10
        length = self.length * scale
        half = "fp16" if device == "cuda" and "fp16_loss_scaling" in techniques else "auto"
        values: dict[str, Any] = {
            "model": {
                **shape,
                "layers": self.layers,
                "precision": half,
                "init_std": shape.get("init_std", 0.2 / scale**0.5),
            },
            "data": {"sequence_length": length},
            "batch": {"tokens": ROWS * length, "micro_sequences": self.micro_rows},
            "optimizer": {"clip_norm": self.clip_norm},
            "mesh": {} if alone else dict(self.mesh),
            "goal": {"steps": 40},
        }
        for table, more in self.keys.items():
            values[table] = {**values.get(table, {}), **more}
        return house.make_plan(*techniques.values(), shape="grouped", device=device, **values)


def batches(vocab: int, length: int, steps: int = 1) -> list[list[Row]]:
    """Make a batch for each step; in the first, the first rows have no target at all."""
    found = []
    for index in range(steps):
        random = np.random.default_rng(index)
        rows = []
        for place in range(ROWS):
            ids = random.integers(0, min(vocab, 300), length + 1)
            targets = ids[1:].copy()
            share = 1.0 if place < 2 and index == 0 else 0.1 * place
            targets[random.random(length) < share] = IGNORE
            count = int(random.integers(0, 4))
            starts = np.sort(random.choice(length + 1, count, replace=False))
            rows.append(Row(ids, starts.astype(np.int64), targets))
        found.append(rows)
    return found


def micros_of(build: Build, rows: list[Row]) -> list[Micro]:
    """This rank's micro-batches of the rows of a step, as the loader would cut them."""
    world = build.world
    each = len(rows) // world.size("data")
    size = min(build.plan.micro_rows, each)
    first = world.place("data") * each
    length = build.plan.data.sequence_length
    return [
        collate(rows[at : at + size], segments=build.mask.document, first_token=at * length)
        for at in range(first, first + each, size)
    ]


def scatter_noise(build: Build, *, nudged: int = 0, unit: float = house.UNIT_FP32) -> None:
    """Move every trained number off its start, the same in every layout.

    Args:
        build: the run.
        nudged: and then by one unit in its last place, up or down; which of several such.
        unit: that unit, relative.
    """
    with torch.no_grad():
        for name, parameter in build.model.named_parameters():
            if not parameter.is_floating_point() or not parameter.requires_grad:
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise_shape = tuple(build.layouts[name].shape)
            noise = 0.1 * torch.randn(noise_shape, generator=draw)
            noise = build.part(name, noise.to(parameter.device))
            local_of(parameter).add_(noise * (build.config.init_std / 0.2))
            if nudged:
                draw.manual_seed(zlib.crc32(f"{nudged} {name}".encode()))
                sign = build.part(name, torch.randn(noise_shape, generator=draw).sign())
                local_of(parameter).mul_(1 + unit * sign)


@dataclass
class Outcome:
    """Hold what a composition computed, whole."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def wholes(build: Build, *, gradients: bool) -> dict[str, Tensor]:
    """Return every trained parameter, or its gradient, whole; collective."""
    found = {}
    for name, parameter in build.model.named_parameters():
        tensor = parameter.grad if gradients else parameter
        if tensor is None or not parameter.requires_grad:
            continue
        assert isinstance(tensor, DTensor) == isinstance(parameter, DTensor), name
        found[name] = build.whole(name, local_of(tensor.detach())).clone().contiguous()
    return found


def run(
    composition: Composition,
    world: World,
    *,
    alone: bool = False,
    device: str = "cpu",
    scale: int = 1,
    nudged: int = 0,
    unit: float = house.UNIT_FP32,
) -> tuple[Build, Outcome]:
    """Train it for its steps; arguments as in `Composition.plan` and `scatter_noise`."""
    torch.manual_seed(0)
    plan = composition.plan(alone=alone, device=device, scale=scale)
    where = torch.device(device, world.local_rank) if device == "cuda" else torch.device(device)
    build = make_build(plan, prepare(plan), world, where)
    scatter_noise(build, nudged=nudged, unit=unit)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    look = house.at_the_update(build, lambda: gradients.update(wholes(build, gradients=True)))
    with ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        length = plan.data.sequence_length
        for index, rows in enumerate(batches(build.config.vocab, length, composition.steps)):
            with look if index == 0 else nothing_from_the_host():
                count = plan.batches.at(index) // length  # the last: the first may have no target
                losses.append(float(step(build, micros_of(build, rows[-count:]), index)[0]))
    return build, Outcome(losses, gradients, wholes(build, gradients=False))


@contextmanager
def nothing_from_the_host() -> Iterator[None]:
    """Let nobody make a tensor of the host's numbers on a device: on a GPU that waits for it.

    A first step may, to make what later ones keep, and so may torch's partitioner, which runs where
    rows of another length are compiled.
    """
    made = torch.tensor

    def refused(*numbers: Any, device: Any = None, **more: Any) -> Tensor:
        compiles = sys._getframe(1).f_globals["__name__"].startswith("torch._functorch.")
        assert device is None or compiles, (
            f"numbers of the host go to the device in every step: {numbers}"
        )
        return made(*numbers, **more)

    torch.tensor = refused
    try:
        yield
    finally:
        torch.tensor = made


def differences(found: Outcome, wanted: Outcome, *, freed: bool = False) -> dict[str, float]:
    """Return the largest difference of every loss, gradient and weight, over the wanted largest.

    Args:
        found: what was computed.
        wanted: the reference.
        freed: an update in the backward pass has freed gradients: those that are left count.
    """
    off = {
        f"loss {i}": abs(a - b) / abs(b)
        for i, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True))
    }
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        if kind == "gradients" and freed:
            theirs = {name: theirs[name] for name in ours}
        missing = ours.keys() ^ theirs.keys()
        off |= {f"{kind} {name} is not in both": float("inf") for name in missing}
        for name in ours.keys() & theirs.keys():
            most = theirs[name].abs().max()
            assert most > 0, f"the reference's {kind} of {name} are zero"
            off[f"{kind} {name}"] = float((ours[name] - theirs[name]).abs().max() / most)
    return off
