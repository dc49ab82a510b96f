"""How each pair of techniques is combined on a tiny model: its mesh, its knobs and its shape.

`stands` says what becomes of a pair before anything runs. Its plan is accepted on a CPU, on a CPU
once there is beside it what one of the two acts on, likewise on a GPU, or nowhere. The GPU is an
H200 that need not be here, with every package.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import house
import torch
from cases import ADDS_NO_RANKS
from composition import Composition
from pieces import h200

from headrace.assemble.context import check_supported, make_context
from headrace.core.errors import HeadraceError
from headrace.techniques.attention import flash_attention_3
from headrace.techniques.fusion import liger_kernels

AXES_OF: Mapping[str, Mapping[str, int]] = {
    "fsdp": {"data": 2},
    "zero": {"data": 2},
    "data_parallel": {"data": 2},
    "tensor_parallel": {"tensor": 2},
    "pipeline_parallel": {"pipeline": 2},
    "context_parallel": {"context": 2},
    "ulysses": {"context": 2},
    "expert_parallel": {"expert": 2},
}
"""What splits the model, and the axis that it needs; the rest of 4 ranks are replicas."""
AMONG_RANKS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "expert_parallel": {"mixture_of_experts": {}},
    "optimizer_in_backward": {"fsdp": {}},
}
"""Technique -> what it is refused without on several ranks, beyond `house.BESIDE`."""
KEYS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "preference": {"data": {"chat": {"kind": "preference"}}},
    "tf32": {"model": {"precision": "fp32"}},
}
"""Technique -> the keys of a plan that it is refused without."""
SIZES: Mapping[str, Mapping[str, Any]] = {"flash_attention_3": {"head_dim": 32}}
"""Technique -> sizes of the model on a GPU that its kernels take."""
PAIR_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "torch_compile": {"backend": "aot_eager", "scope": "block"},
}
UNRUN: Mapping[str, str] = {
    "compile_cache": "only what inductor compiles is kept, which takes a minute a pair",
    "preference": "its rows are pairs of answers",
}
"""Technique -> why no test runs its pairs where something stands beside them."""


def pair_composition(
    one: str, two: str, *, beside: bool = True, device: str = "cpu"
) -> Composition:
    """Combine two techniques on a model whose sizes suit all of them.

    Args:
        one: a technique.
        two: another one.
        beside: with what the two are refused without.
        device: where the plan is for.
    """
    mesh = {axis: n for name in (one, two) for axis, n in AXES_OF.get(name, {}).items()}
    if mesh:
        split = 1
        for axis, ranks in mesh.items():
            split *= ranks if axis not in ADDS_NO_RANKS else 1
        mesh["data"] = 4 // split
    names = (one, two)
    others = companions(*names, device=device) if beside else {}
    on = dict.fromkeys([*others, *names])
    knobs = {
        n: {**house.tiny_knobs(n, device), **PAIR_KNOBS.get(n, {}), **others.get(n, {})} for n in on
    }
    if "context" in mesh and "sequence_length_schedule" in knobs:
        knobs["sequence_length_schedule"]["start"] = 4  # a row has two parts a rank
    whole_step = "optimizer_in_backward" in knobs  # no norm and one micro-batch
    scales = {"float8_linear", "tensor_parallel"} <= knobs.keys()
    blocks = any(  # of 256 columns, or of 64
        {name, "tensor_parallel"} <= knobs.keys() for name in ("adamw_8bit", "qlora")
    )
    heads = {"ulysses", "tensor_parallel"} <= knobs.keys()  # both share key-value heads
    keys = {table: value for n in on if beside for table, value in KEYS.get(n, {}).items()}
    sizes = {key: n for name in on if device == "cuda" for key, n in SIZES.get(name, {}).items()}
    if sizes:
        keys["model"] = {**keys.get("model", {}), **sizes}
        if "mup" in knobs:
            knobs["mup"]["base_dim"] = 64  # heads of the same size
    return Composition(
        f"pair {one} {two}",
        mesh,
        knobs,
        shape="wide" if blocks else "gpt2" if heads else "even",
        layers=4,
        length=16,
        micro_rows=0 if whole_step else 2,
        clip_norm=0.0 if whole_step else 0.3,
        keys=keys,
        steps=5,  # a schedule of lengths changes them
        approximate=scales,
    )


def companions(*names: str, device: str) -> dict[str, dict[str, Any]]:
    """Return what techniques are refused without, by name, with its knobs over the tiny ones."""
    found: dict[str, dict[str, Any]] = {}
    ranks = any(name in AXES_OF for name in names)
    for name in names:
        found |= house.beside(name, device)
        if ranks:
            found |= {other: dict(knobs) for other, knobs in AMONG_RANKS.get(name, {}).items()}
    return found


def needs(one: str, two: str, device: str) -> list[str]:
    """Return what must stand beside a pair: names of techniques, and keys as they are typed."""
    techniques = [n for n in companions(one, two, device=device) if n not in (one, two)]
    tables = [table for name in (one, two) for table in KEYS.get(name, {}).items()]
    return [*techniques, *(word for table, value in tables for word in _typed(table, value))]


def _typed(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _typed(f"{prefix}.{key}", inner)
    else:
        yield f"{prefix}={value}"


def refusal(composition: Composition, device: str) -> HeadraceError | None:
    """Return the error of a plan that is refused on a device before it is built, if it is."""
    try:
        plan = composition.plan(device=device)
        if device == "cpu":
            context = make_context(plan, torch.device(device))
        else:
            asked = plan.model.precision
            precision = "bf16" if asked == "auto" else asked
            context = h200(plan, precision=precision, ranks=plan.mesh.ranks)
        with _every_package():
            check_supported([*plan.techniques.values()], context)
    except HeadraceError as error:
        return error
    return None


@contextmanager
def _every_package() -> Iterator[None]:
    """Let techniques find the packages of their kernels."""
    oldest = ".".join(map(str, liger_kernels.OLDEST))
    with (
        patch.object(flash_attention_3, "is_installed", lambda module: True),
        patch.object(liger_kernels, "version", lambda package: oldest),
    ):
        yield


def stands(one: str, two: str) -> tuple[dict[str, Any], Composition | None]:
    """Return a pair's entry as it is known before a run, and what is to be run, if anything is."""
    error = None
    for device in ("cpu", "cuda"):
        for beside in (False, True):
            needed = needs(one, two, device) if beside else []
            composition = pair_composition(one, two, beside=beside, device=device)
            error = refusal(composition, device)
            if error is None:
                entry: dict[str, Any] = {"needs": needed} if needed else {}
                if device == "cuda":
                    return {"outcome": "gpu", "why": "gpu", **entry}, None
                if not needed:
                    return {"outcome": "equal"}, composition
                entry["outcome"] = "needs"
                unrun = [UNRUN[name] for name in (one, two) if name in UNRUN]
                if unrun:
                    return {**entry, "why": f"accepted; not run: {unrun[0]}"}, None
                return entry, composition
    return {"outcome": "refuses", "why": str(error)}, None
