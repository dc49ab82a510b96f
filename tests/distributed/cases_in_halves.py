"""The compositions of matrices that are stored in bf16 with what splits a model over ranks."""

from typing import Any

from cases import (
    BUCKETS,
    CHUNKED,
    COMPILE,
    EXPERTS,
    FLAT,
    FLOAT8,
    FSDP,
    GATHER8,
    NARROW,
    SAC,
    TP,
    case,
)

BF16 = 2.0**-8
"""A unit in the last place of a number in bf16."""
BY_CHANCE: dict[str, Any] = {"bf16_parameters": {"rounding": "stochastic"}}

IN_HALVES = [
    case("fsdp-narrow", FSDP, NARROW, data=4, micro_rows=1, rounded=BF16),
    case("fsdp-narrow-by-chance", FSDP, BY_CHANCE, data=4, slow=True, rounded=BF16),
    case("fsdp-narrow-tp", FSDP, NARROW, TP, data=2, tensor=2, slow=True, approximate=True),
    case(
        "fsdp-narrow-tied",
        FSDP,
        NARROW,
        CHUNKED,
        data=2,
        shape="tied",
        slow=True,
        rounded=BF16,
    ),
    case(
        "fsdp-narrow-compile",
        FSDP,
        NARROW,
        SAC,
        COMPILE,
        data=2,
        packing=True,
        slow=True,
        rounded=BF16,
    ),
    case("fsdp-narrow-experts", FSDP, NARROW, EXPERTS, data=2, slow=True, rounded=BF16),
    case("hybrid-narrow", FSDP, NARROW, data=4, replicate=2, shape="gpt2", slow=True, rounded=BF16),
    case("overlapped-narrow", BUCKETS, NARROW, data=2, micro_rows=4, rounded=BF16),
    case("fsdp-narrow-pairs", FSDP, NARROW, data=2, micro_rows=4, rounded=BF16),
    case("fsdp-narrow-fp8", FSDP, NARROW, FLOAT8, data=2, **FLAT, approximate=True, slow=True),
    case(
        "fsdp-narrow-gather8", GATHER8, NARROW, FLOAT8, data=2, **FLAT, approximate=True, slow=True
    ),
    case("zero-narrow", {"zero": {}}, NARROW, data=4, slow=True, rounded=BF16),
]
