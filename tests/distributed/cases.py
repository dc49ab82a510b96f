"""The compositions that must run, by the words of the design."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import house
from composition import Composition

FSDP: dict[str, Any] = {"fsdp": {}}
TP: dict[str, Any] = {"tensor_parallel": {}}
PP: dict[str, Any] = {"pipeline_parallel": {}}
INTERLEAVED: dict[str, Any] = {"pipeline_parallel": {"schedule": "interleaved", "chunks": 2}}
CP: dict[str, Any] = {"context_parallel": {}}
COMPILE: dict[str, Any] = {"torch_compile": {"backend": "aot_eager", "scope": "block"}}
SAC: dict[str, Any] = {"selective_checkpoint": {}}
CHUNKED: dict[str, Any] = {"chunked_cross_entropy": {"chunk_tokens": 7}}


def case(name: str, *techniques: dict[str, Any], **more: Any) -> Composition:
    """A composition from tables of techniques; `data` and the like are its mesh."""
    mesh = {a: more.pop(a) for a in ("data", "tensor", "context", "pipeline") if a in more}
    tables = {n: k for table in techniques for n, k in table.items()}
    return Composition(name, mesh, tables, **more)


COMPOSITIONS = [
    case("replicas", data=4),
    case("fsdp", FSDP, data=4),
    case("fsdp-gpt2", FSDP, data=4, shape="gpt2", micro_rows=1),
    case("fsdp-tied-no-reshard", {"fsdp": {"reshard": False}}, data=4, shape="tied"),
    case("fsdp-everything", FSDP, SAC, COMPILE, CHUNKED, data=4, packing=True, micro_rows=1),
    case("fsdp-muon", FSDP, {"muon": {}}, data=4, tolerance=1e-4),
    case("pp-fsdp", PP, FSDP, pipeline=2, data=2, layers=5),
    case("pp-fsdp-checkpoint-compile", PP, FSDP, SAC, COMPILE, pipeline=2, data=2),
    case("pp4-tied", PP, pipeline=4, layers=5, shape="tied", micro_rows=1),
    case(
        "pp-interleaved-fsdp-gpt2",
        {"pipeline_parallel": {"schedule": "interleaved", "chunks": 2}},
        FSDP,
        pipeline=2,
        data=2,
        layers=5,
        shape="gpt2",
        micro_rows=1,
        packing=True,
    ),
    case("tp-fsdp-gpt2", TP, FSDP, tensor=2, data=2, shape="gpt2"),
    case("tp-fsdp-compile", TP, FSDP, COMPILE, tensor=2, data=2),
    case(
        "tp-fsdp-everything",
        TP,
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        tensor=2,
        data=2,
        packing=True,
        shape="tied",
        micro_rows=1,
    ),
    case("tp-pp-tied", TP, PP, tensor=2, pipeline=2, shape="tied"),
    case("tp-no-sequence", {"tensor_parallel": {"sequence": False}}, tensor=2, data=2),
    case("tp-fsdp-muon", TP, FSDP, {"muon": {}}, tensor=2, data=2, tolerance=1e-4),
    case("cp-tp", CP, TP, context=2, tensor=2, length=12, packing=True),
    case("cp-fsdp-packing", CP, FSDP, context=2, data=2, length=16, packing=True),
    case("cp4-tied", CP, context=4, length=16, shape="tied", packing=True),
    case(
        "cp-fsdp-checkpoint-compile-chunked",
        CP,
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        context=2,
        data=2,
        length=12,
        packing=True,
    ),
    case("cp-pp-gpt2", CP, PP, context=2, pipeline=2, length=12, shape="gpt2"),
]


def fitted(composition: Composition, ranks: int) -> Composition | None:
    """The composition on another number of ranks, or None if its axes do not fit.

    Axes that split the model stay while they fit, from the tensor axis outwards; replicas take the
    rest.
    """
    left, mesh = ranks, {}
    for axis in ("tensor", "context", "pipeline"):
        wanted = composition.mesh.get(axis, 1)
        if wanted > 1 and left % wanted == 0:
            mesh[axis], left = wanted, left // wanted
    if any(composition.mesh.get(a, 1) > 1 for a in ("tensor", "context", "pipeline")) and not mesh:
        return None
    if set(mesh) != {a for a in composition.mesh if a != "data"}:
        return None
    return replace(composition, mesh={**mesh, "data": left})


# --- pairs -----------------------------------------------------------------------------------

AXES_OF: Mapping[str, Mapping[str, int]] = {
    "fsdp": {"data": 2},
    "tensor_parallel": {"tensor": 2},
    "pipeline_parallel": {"pipeline": 2},
    "context_parallel": {"context": 2},
}
"""What splits the model, and the axis that it needs; the rest of 4 ranks are replicas."""
TOLERANCES: Mapping[str, float] = {}
"""Of techniques whose arithmetic magnifies rounding, each with its reason."""
PAIR_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "torch_compile": {"backend": "aot_eager", "scope": "block"},
}


def pair_composition(one: str, two: str) -> Composition:
    """Two techniques on a model whose sizes suit all of them."""
    mesh = {axis: n for name in (one, two) for axis, n in AXES_OF.get(name, {}).items()}
    if mesh:
        split = 1
        for axis, ranks in mesh.items():
            split *= ranks if axis != "data" else 1
        mesh["data"] = 4 // split
    knobs = {n: {**house.tiny_knobs(n, "cpu"), **PAIR_KNOBS.get(n, {})} for n in (one, two)}
    whole_step = "optimizer_in_backward" in knobs  # no norm and one micro-batch
    return Composition(
        f"pair {one} {two}", mesh, knobs, shape="even", layers=4, length=16,
        micro_rows=0 if whole_step else 2, clip_norm=0.0 if whole_step else 0.3,
    )  # fmt: skip
