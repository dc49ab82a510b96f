"""The compositions of a mixture of experts with what gives each rank a part of every row."""

from typing import Any

from cases import COMPILE, CP, DEPTH, FSDP, MUON, PP, SAC, TP, ULYSSES, ZBV, ZERO2, case

FULL: dict[str, Any] = {"full_checkpoint": {}}
UNEVEN: dict[str, Any] = {"mixture_of_experts": {"experts": 5, "top_k": 2, "balance": 0.5}}
"""A mixture whose balance loss is a large part of each gradient, so that ranks which share rows
cannot count only their own tokens."""
SHARED: dict[str, Any] = {**UNEVEN, "expert_parallel": {}}
"""A mixture like `UNEVEN`, whose experts ranks divide."""

SHARING_ROWS = [
    case("experts-cp", UNEVEN, CP, context=2, data=2, length=12, packing=True),
    case("experts-cp4", UNEVEN, CP, context=4, length=24, shape="tied", micro_rows=1, slow=True),
    case("experts-cp-tp", UNEVEN, CP, TP, context=2, tensor=2, length=12, slow=True),
    case("experts-cp-pp", UNEVEN, CP, PP, context=2, pipeline=2, length=12, slow=True),
    case("experts-cp-zbv", UNEVEN, CP, ZBV, context=2, pipeline=2, length=12, layers=4, slow=True),
    case("experts-cp-depth", UNEVEN, CP, DEPTH, context=2, length=12, layers=4, slow=True),
    case("experts-cp-full", UNEVEN, CP, FSDP, FULL, context=2, data=2, length=12, slow=True),
    case(
        "experts-cp-checkpoint-compile", UNEVEN, CP, SAC, COMPILE, context=2, length=12, slow=True
    ),
    case("experts-ulysses", UNEVEN, ULYSSES, context=2, length=14, micro_rows=1),
    case(
        "experts-ulysses-fsdp-packing",
        UNEVEN,
        ULYSSES,
        FSDP,
        SAC,
        context=2,
        data=2,
        length=14,
        packing=True,
        slow=True,
    ),
    case("experts-ulysses-compile", UNEVEN, ULYSSES, COMPILE, context=2, length=14, slow=True),
    case("divided-cp", SHARED, CP, context=2, data=2, expert=4, length=12, packing=True),
    case("divided-cp-inside", SHARED, CP, context=2, expert=2, length=12, slow=True),
    case(
        "divided-cp-fsdp",
        SHARED,
        CP,
        FSDP,
        SAC,
        context=2,
        data=2,
        expert=2,
        length=12,
        micro_rows=1,
        slow=True,
    ),
    case("divided-cp-tp", SHARED, CP, TP, context=2, tensor=2, expert=2, length=12, slow=True),
    case(
        "divided-cp-compile",
        SHARED,
        CP,
        SAC,
        COMPILE,
        context=2,
        expert=2,
        length=12,
        slow=True,
    ),
    case("divided-ulysses", SHARED, ULYSSES, context=2, data=2, expert=4, length=14, slow=True),
    case(
        "divided-ulysses-fsdp",
        SHARED,
        ULYSSES,
        FSDP,
        context=2,
        data=2,
        expert=2,
        length=14,
        packing=True,
        slow=True,
    ),
    case(
        "divided-cp-hybrid",
        SHARED,
        CP,
        FSDP,
        context=2,
        data=2,
        replicate=2,
        expert=2,
        length=12,
        slow=True,
    ),
    case("divided-cp-muon", SHARED, CP, MUON, context=2, expert=2, length=12, slow=True),
    case("divided-ulysses-zero", SHARED, ULYSSES, ZERO2, context=2, expert=2, length=14, slow=True),
]
