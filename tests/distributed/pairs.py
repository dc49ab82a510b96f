"""How each pair of techniques is combined on a tiny model: its mesh, its knobs and its shape."""

from collections.abc import Mapping
from typing import Any

import house
from cases import ADDS_NO_RANKS
from composition import Composition

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
NEEDS: Mapping[str, tuple[str, ...]] = {"expert_parallel": ("mixture_of_experts",)}
"""Techniques that a technique is refused without."""
PAIR_KNOBS: Mapping[str, Mapping[str, Any]] = {
    "torch_compile": {"backend": "aot_eager", "scope": "block"},
}


def pair_composition(one: str, two: str) -> Composition:
    """Combine two techniques on a model whose sizes suit all of them."""
    mesh = {axis: n for name in (one, two) for axis, n in AXES_OF.get(name, {}).items()}
    if mesh:
        split = 1
        for axis, ranks in mesh.items():
            split *= ranks if axis not in ADDS_NO_RANKS else 1
        mesh["data"] = 4 // split
    names = dict.fromkeys(n for name in (one, two) for n in (*NEEDS.get(name, ()), name))
    knobs = {n: {**house.tiny_knobs(n, "cpu"), **PAIR_KNOBS.get(n, {})} for n in names}
    whole_step = "optimizer_in_backward" in knobs  # no norm and one micro-batch
    scales = {"float8_linear", "tensor_parallel"} <= knobs.keys()
    blocks = any(  # of 256 columns, or of 64
        {name, "tensor_parallel"} <= knobs.keys() for name in ("adamw_8bit", "qlora")
    )
    heads = {"ulysses", "tensor_parallel"} <= knobs.keys()  # both share key-value heads
    return Composition(
        f"pair {one} {two}",
        mesh,
        knobs,
        shape="wide" if blocks else "gpt2" if heads else "even",
        layers=4,
        length=16,
        micro_rows=0 if whole_step else 2,
        clip_norm=0.0 if whole_step else 0.3,
        steps=5,  # a schedule of lengths changes them
        approximate=scales,
    )
