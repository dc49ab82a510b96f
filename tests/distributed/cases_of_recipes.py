"""The compositions of what changes learning with what splits heads, rows or layers over ranks."""

from typing import Any

from cases import (
    COMPILE,
    FSDP,
    PP,
    SAC,
    TP,
    ULYSSES,
    case,
)

ALIBI: dict[str, Any] = {"alibi": {}}

RECIPES = [
    case("alibi-tp", ALIBI, TP, tensor=2, data=2, packing=True),
    case("alibi-tp-no-sequence", ALIBI, {"tensor_parallel": {"sequence": False}}, tensor=2),
    case("alibi-tp4", ALIBI, TP, tensor=4, shape="twelve", micro_rows=1, slow=True),
    case("alibi-tp-pp", ALIBI, TP, PP, tensor=2, pipeline=2, shape="twelve", layers=3),
    case("alibi-tp-fsdp-compile", ALIBI, TP, FSDP, SAC, COMPILE, tensor=2, data=2, slow=True),
    case("alibi-ulysses", ALIBI, ULYSSES, context=2, length=14, packing=True),
    case("alibi-ulysses-fsdp", ALIBI, ULYSSES, FSDP, context=2, data=2, length=14, micro_rows=1),
    case("alibi-ulysses-tp", ALIBI, ULYSSES, TP, context=2, tensor=2, length=14, shape="twelve"),
    case("alibi-ulysses-compile", ALIBI, ULYSSES, COMPILE, context=2, length=14, slow=True),
]
