"""The compositions of what changes learning with what splits heads, rows or layers over ranks."""

from typing import Any

from cases import (
    COMPILE,
    CP,
    DUAL,
    FSDP,
    INTERLEAVED,
    MUON,
    PP,
    SAC,
    TP,
    ULYSSES,
    ZBV,
    case,
)

ALIBI: dict[str, Any] = {"alibi": {}}
RAMP: dict[str, Any] = {"batch_ramp": {"divide": 4, "until": 2.0}}
NOISE: dict[str, Any] = {"neftune": {"alpha": 9.0}}
PREFIX: dict[str, Any] = {"prefix_lm": {"tokens": 7}}
PART: dict[str, Any] = {"muon": {**MUON["muon"], "fraction": 0.4}}
"""Muon that updates a part of each matrix: ranks find the longest rows of whole matrices."""
GROWS: dict[str, Any] = {"steps": 3, "layers": 5}
"""Steps of 2, 4 and 8 rows."""

RECIPES = [
    case("part-of-muon-fsdp", PART, FSDP, data=2, steps=4),
    case("part-of-muon-hybrid", PART, FSDP, data=4, replicate=2, steps=4, slow=True),
    case("part-of-muon-replicas", PART, data=4, steps=4, slow=True),
    case("part-of-muon-tp-fsdp", PART, TP, FSDP, tensor=2, data=2, steps=4, slow=True),
    case("alibi-tp", ALIBI, TP, tensor=2, data=2, packing=True),
    case("alibi-tp-no-sequence", ALIBI, {"tensor_parallel": {"sequence": False}}, tensor=2),
    case("alibi-tp4", ALIBI, TP, tensor=4, shape="twelve", micro_rows=1, slow=True),
    case("alibi-tp-pp", ALIBI, TP, PP, tensor=2, pipeline=2, shape="twelve", layers=3),
    case("alibi-tp-fsdp-compile", ALIBI, TP, FSDP, SAC, COMPILE, tensor=2, data=2, slow=True),
    case("alibi-ulysses", ALIBI, ULYSSES, context=2, length=14, packing=True),
    case("alibi-ulysses-fsdp", ALIBI, ULYSSES, FSDP, context=2, data=2, length=14, micro_rows=1),
    case("alibi-ulysses-tp", ALIBI, ULYSSES, TP, context=2, tensor=2, length=14, shape="twelve"),
    case("alibi-ulysses-compile", ALIBI, ULYSSES, COMPILE, context=2, length=14, slow=True),
    case("ramp-pp", RAMP, PP, pipeline=2, micro_rows=1, packing=True, **GROWS),
    case("ramp-pp-smaller", RAMP, PP, pipeline=2, micro_rows=4, shape="tied", **GROWS),
    case("ramp-pp4-gpt2", RAMP, PP, pipeline=4, shape="gpt2", **GROWS),
    case("ramp-fsdp", RAMP, FSDP, data=2, slow=True, **GROWS),
    case("ramp-pp-fsdp", RAMP, PP, FSDP, pipeline=2, data=2, micro_rows=1, slow=True, **GROWS),
    case("ramp-interleaved", RAMP, INTERLEAVED, pipeline=2, micro_rows=1, shape="tied", **GROWS),
    case(
        "ramp-interleaved-fsdp-compile",
        {"batch_ramp": {"divide": 2, "until": 2.0}},
        INTERLEAVED,
        FSDP,
        SAC,
        COMPILE,
        pipeline=2,
        data=2,
        micro_rows=1,
        slow=True,
        **GROWS,
    ),
    case("ramp-zbv", RAMP, ZBV, pipeline=2, micro_rows=1, **GROWS),
    case("ramp-dualpipev", RAMP, DUAL, pipeline=2, micro_rows=1, shape="tied", **GROWS),
    case("noise-cp", NOISE, CP, context=2, length=12, packing=True),
    case("noise-cp4-tp", NOISE, CP, TP, context=2, tensor=2, length=20, shape="tied", slow=True),
    case("noise-cp-fsdp", NOISE, CP, FSDP, context=2, data=2, length=12, micro_rows=1),
    case("noise-cp-compile", NOISE, CP, COMPILE, context=2, length=12, packing=True, slow=True),
    case("noise-ulysses", NOISE, ULYSSES, context=2, length=14, shape="tied", packing=True),
    case("noise-ulysses-pp", NOISE, ULYSSES, PP, context=2, pipeline=2, length=14, micro_rows=1),
    case("prefix-ulysses", PREFIX, ULYSSES, context=2, length=14, packing=True),
    case("prefix-ulysses-fsdp", PREFIX, ULYSSES, FSDP, context=2, data=2, length=14, micro_rows=1),
    case(
        "prefix-ulysses-compile",
        PREFIX,
        ULYSSES,
        COMPILE,
        context=2,
        length=14,
        packing=True,
        slow=True,
    ),
    case(
        "alibi-prefix-window-noise-ulysses-tp",
        ALIBI,
        PREFIX,
        {"sliding_window": {"window": 5}},
        NOISE,
        ULYSSES,
        TP,
        context=2,
        tensor=2,
        length=14,
        shape="twelve",
        packing=True,
    ),
]
