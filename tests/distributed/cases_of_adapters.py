"""The compositions of adapters with a model whose linears are split over tensor ranks."""

from typing import Any

from cases import (
    BUCKETS,
    CHUNKED,
    COMPILE,
    CP,
    EXPERTS,
    FSDP,
    MUON,
    PP,
    SAC,
    SPEEDRUN,
    THREE,
    TP,
    ZERO2,
    case,
)

WHOLE_TOKENS: dict[str, Any] = {"tensor_parallel": {"sequence": False}}
LORA: dict[str, Any] = {"lora": {"rank": 3, "alpha": 6.0}}
NOISY: dict[str, Any] = {"lora": {"rank": 3, "alpha": 6.0, "dropout": 0.5, "b_rate": 4.0}}
TABLES: dict[str, Any] = {"lora": {"rank": 3, "train_also": ("embedding", "head")}}
DORA: dict[str, Any] = {"dora": {"rank": 3, "alpha": 6.0}}
NOISY_DORA: dict[str, Any] = {"dora": {"rank": 3, "alpha": 6.0, "dropout": 0.5}}
NF4: dict[str, Any] = {"qlora": {"rank": 3, "alpha": 6.0}}
INT8: dict[str, Any] = {"qlora": {"rank": 3, "alpha": 6.0, "base": "int8"}}
PARTLY_WHOLE: dict[str, Any] = {"qlora": {"rank": 3, "whole_blocks": 1, "dropout": 0.5}}
LINEAR: dict[str, Any] = {"linear_attention": {"chunk_tokens": 4}}
GATED: dict[str, Any] = {"linear_attention": {"chunk_tokens": 4, "rule": "gated_delta"}}
CONVOLUTIONS: dict[str, Any] = {"short_convolution": {"between": 1}}
LEARNED = {name: knobs for name, knobs in SPEEDRUN.items() if name != "weight_init"}
"""The recipe over weights whose head is not zero: frozen, it would stay so."""
EIGHT: dict[str, Any] = {"adamw_8bit": {"smallest": 256}}
PIECES: dict[str, Any] = {"chunked_mlp": {"chunk_tokens": 7}}


def targeted(name: str, *targets: str) -> dict[str, Any]:
    """Return a technique of adapters beside some linears alone."""
    return {name: {"rank": 3, "targets": targets}}


OF_ADAPTERS = [
    case("lora-tp", NOISY, TP, tensor=2, data=2, shape="gpt2", packing=True, micro_rows=1),
    case("lora-tp-no-sequence", NOISY, WHOLE_TOKENS, tensor=2, shape="gpt2", slow=True),
    case("lora-tp-fsdp", LORA, TP, FSDP, SAC, CHUNKED, tensor=2, data=2, slow=True),
    case("lora-tp-zero-2", LORA, TP, ZERO2, tensor=2, data=2, micro_rows=1, slow=True),
    case("lora-tp-overlapped", LORA, TP, BUCKETS, tensor=2, data=2, slow=True),
    case("lora-tp-outputs", targeted("lora", "mlp.gate_up"), TP, tensor=2, slow=True),
    case("lora-tp-inputs", targeted("lora", "mixer.out"), WHOLE_TOKENS, tensor=2, slow=True),
    case("lora-tp-pp-tied", LORA, TP, PP, tensor=2, pipeline=2, shape="tied", slow=True),
    case("lora-tp-cp", LORA, TP, CP, tensor=2, context=2, length=12, packing=True, slow=True),
    case("lora-tp-compile", NOISY, TP, COMPILE, SAC, tensor=2, shape="gpt2", slow=True),
    case("lora-tp-muon", LORA, TP, MUON, tensor=2, data=2, slow=True),
    case("lora-tp-8bit", LORA, TP, EIGHT, tensor=2, shape="wide", slow=True),
    case("lora-tp-tables", TABLES, TP, FSDP, tensor=2, data=2, slow=True),
    case("lora-tp-tables-tied", TABLES, TP, tensor=2, shape="tied", slow=True),
    case("lora-tp-experts", LORA, TP, EXPERTS, FSDP, tensor=2, data=2, slow=True),
    case("dora-tp-linear", DORA, TP, LINEAR, tensor=2, packing=True, slow=True),
    case("lora-tp-gated", NOISY, TP, GATED, tensor=2, packing=True, slow=True),
    case("qlora-int8-tp-convolutions", INT8, TP, CONVOLUTIONS, tensor=2, slow=True),
    case("lora-tp-distillation", LORA, TP, {"distillation": {}}, CHUNKED, tensor=2, slow=True),
    case("lora-tp-neftune", LORA, TP, {"neftune": {}}, tensor=2, data=2, slow=True),
    case("dora-tp-speedrun", DORA, TP, LEARNED, FSDP, tensor=2, data=2, slow=True, **THREE),
    case("dora-tp-no-sequence", NOISY_DORA, WHOLE_TOKENS, tensor=2, shape="gpt2", packing=True),
    case("dora-tp", DORA, TP, tensor=2, data=2, micro_rows=1, slow=True),
    case("dora-tp-fsdp", NOISY_DORA, TP, FSDP, SAC, tensor=2, data=2, shape="tied", slow=True),
    case("dora-tp-pieces", DORA, TP, PIECES, tensor=2, slow=True),
    case("dora-tp-pp", DORA, TP, PP, tensor=2, pipeline=2, slow=True),
    case("dora-tp-compile", DORA, TP, COMPILE, tensor=2, slow=True),
    case("qlora-nf4-tp", NF4, TP, tensor=2, shape="wide"),
    case("qlora-nf4-tp-whole", PARTLY_WHOLE, WHOLE_TOKENS, tensor=2, shape="wide", slow=True),
    case("qlora-nf4-tp-fsdp", NF4, TP, FSDP, SAC, tensor=2, data=2, shape="wide", slow=True),
    case("qlora-nf4-tp-compile", NF4, TP, COMPILE, tensor=2, shape="wide", slow=True),
    case("qlora-int8-tp", INT8, TP, tensor=2, data=2, shape="gpt2", micro_rows=1, slow=True),
]
"""Linears are cut by outputs and by inputs, and biased; ranks of three divide over nothing."""
