"""The compositions that must run, by the words of the design."""

from dataclasses import replace
from typing import Any

from composition import Composition

FSDP: dict[str, Any] = {"fsdp": {}}
ZERO2: dict[str, Any] = {"zero": {"zero_stage": 2}}
FLOAT8_RECIPES: dict[str, Any] = {
    recipe: {"recipe": recipe, "min_size": 1} for recipe in ("rowwise", "tensorwise")
}
FLOAT8: dict[str, Any] = {"float8_linear": {"min_size": 1}}
GATHER8: dict[str, Any] = {"fsdp": {"gather": "fp8"}}
ZERO8: dict[str, Any] = {"zero": {"gather": "fp8"}}
FLAT: dict[str, Any] = {"shape": "even", "length": 16}
NARROW: dict[str, Any] = {"bf16_parameters": {}}
BUCKETS: dict[str, Any] = {"data_parallel": {}}
TP: dict[str, Any] = {"tensor_parallel": {}}
PP: dict[str, Any] = {"pipeline_parallel": {}}
INTERLEAVED: dict[str, Any] = {"pipeline_parallel": {"schedule": "interleaved", "chunks": 2}}
ZBV: dict[str, Any] = {"pipeline_parallel": {"schedule": "zbv", "chunks": 2}}
DUAL: dict[str, Any] = {"pipeline_parallel": {"schedule": "dualpipev", "chunks": 2}}
CP: dict[str, Any] = {"context_parallel": {}}
ULYSSES: dict[str, Any] = {"ulysses": {}}
COMPILE: dict[str, Any] = {"torch_compile": {"backend": "aot_eager", "scope": "block"}}
SAC: dict[str, Any] = {"selective_checkpoint": {}}
CHUNKED: dict[str, Any] = {"chunked_cross_entropy": {"chunk_tokens": 7}}
DEPTH: dict[str, Any] = {"stochastic_depth": {"rate": 0.5}}
LENGTHS: dict[str, Any] = {"sequence_length_schedule": {"start": 8, "until": 0.1}}
MUON: dict[str, Any] = {
    "muon": {
        "momentum_warmup_steps": 3,
        "weight_decay": 0.1,
        "cautious_decay": True,
        "normalize_rows": True,
        "head_pairs": True,
    }
}
SOPHIA: dict[str, Any] = {"sophia": {"every": 2}}
ROUNDED: dict[str, Any] = {"quantization_aware_training": {"group": 0}}
PRUNED: dict[str, Any] = {"weight_pruning": {"pattern": "unstructured"}}
BY_READING: dict[str, Any] = {"weight_pruning": {"pattern": "unstructured", "metric": "wanda"}}
TWICE: dict[str, Any] = {"steps": 3}
"""Steps of which Sophia sweeps before the first and the third."""
EXPERTS: dict[str, Any] = {"mixture_of_experts": {"experts": 4}}
DIVIDED: dict[str, Any] = {"mixture_of_experts": {"experts": 5}, "expert_parallel": {}}
"""Experts that no two or four ranks divide evenly."""
EVEN: dict[str, Any] = {"mixture_of_experts": {"experts": 4}, "expert_parallel": {}}

SPEEDRUN: dict[str, Any] = {
    "relu_squared": {},
    "rms_norm": {"weight": False},
    "qk_norm": {},
    "logit_cap": {"cap": 2.0},
    "embedding_residual": {},
    "value_embeddings": {"tables": 2},
    "weight_init": {"kind": "orthogonal", "zero_head": True},
}
"""The recipe of modded-nanogpt's records, but for its optimizer."""
BEFORE: dict[str, Any] = {"bigram_embeddings": {"multiple": 2}, "embedding_smear": {}}
"""What reads the token before, which may lie on another rank where these share rows."""
THREE: dict[str, Any] = {"layers": 3}
"""Blocks that two tables of value embeddings serve."""
ROLES: dict[str, Any] = {
    "optimizer": {
        "lr_factors": {"matrices": 0.5, "embeddings": 3.0, "vectors": 2.0},
        "decay_factors": {"embeddings": 0.0, "vectors": 1.0},
    }
}
"""Keys by which each role of a parameter has a rate and a decay of its own."""


def case(name: str, *techniques: dict[str, Any], **more: Any) -> Composition:
    """A composition from tables of techniques; `data` and the like are its mesh."""
    axes = ("data", "tensor", "context", "pipeline", "replicate", "expert")
    mesh = {a: more.pop(a) for a in axes if a in more}
    tables = {n: k for table in techniques for n, k in table.items()}
    return Composition(name, mesh, tables, **more)


# Quick are each axis and each kind of technique over ranks once, over two ranks where four show no
# more; a cross of two quick ones is slow, and so is what compiles (10 to 20 s) but fsdp-compile.
COMPOSITIONS = [
    case("replicas", data=4),
    case("overlapped", BUCKETS, MUON, data=4, micro_rows=1),
    case("overlapped-tp", BUCKETS, TP, tensor=2, data=2, shape="tied", packing=True, slow=True),
    case(
        "overlapped-tp-compile",
        BUCKETS,
        TP,
        COMPILE,
        tensor=2,
        data=2,
        shape="tied",
        packing=True,
        slow=True,
    ),
    case("overlapped-compile", BUCKETS, COMPILE, data=2, shape="tied", packing=True, slow=True),
    case("overlapped-pp-tied", BUCKETS, INTERLEAVED, pipeline=2, data=2, shape="tied", layers=4),
    case("overlapped-experts", BUCKETS, EXPERTS, data=4, micro_rows=1, slow=True),
    case("fsdp", FSDP, data=4, slow=True),
    case("fsdp-gpt2", FSDP, data=4, shape="gpt2", micro_rows=1),
    case("fsdp-tied-no-reshard", {"fsdp": {"reshard": False}}, data=2, shape="tied"),
    case(
        "fsdp-everything",
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        data=4,
        packing=True,
        micro_rows=1,
        slow=True,
    ),
    case("fsdp-compile", FSDP, SAC, COMPILE, CHUNKED, data=2, packing=True, micro_rows=1),
    case("hybrid", FSDP, data=4, replicate=2, shape="gpt2", micro_rows=1),
    case("hybrid-muon-tied", FSDP, MUON, data=4, replicate=2, shape="tied", slow=True),
    case("hybrid-8bit", {"adamw_8bit": {"smallest": 256}}, FSDP, data=4, replicate=2, slow=True),
    case("hybrid-zero-2", ZERO2, data=4, replicate=2, micro_rows=1, slow=True),
    case(
        "hybrid-everything",
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        data=4,
        replicate=2,
        packing=True,
        micro_rows=1,
        slow=True,
    ),
    case("hybrid-cp", FSDP, CP, data=2, replicate=2, context=2, length=12, packing=True),
    case("hybrid-tp", FSDP, TP, data=4, replicate=2, tensor=2, micro_rows=1, slow=True),
    case("hybrid-pp-tied", FSDP, PP, data=4, replicate=2, pipeline=2, shape="tied", slow=True),
    case("fsdp-muon", FSDP, {"muon": {}}, data=4, slow=True),
    case("zero-muon", {"zero": {}}, {"muon": {}}, data=4, micro_rows=1),
    case(
        "zero-2-tp-everything", ZERO2, TP, SAC, COMPILE, tensor=2, data=2, micro_rows=1, slow=True
    ),
    case("zero-2-tp", ZERO2, TP, SAC, tensor=2, data=2, micro_rows=1, slow=True),
    case("zero-2", ZERO2, data=2, micro_rows=1),
    case("zero-2-compile", ZERO2, SAC, COMPILE, data=2, micro_rows=1, slow=True),
    case("zero-2-pp-tied", ZERO2, PP, pipeline=2, data=2, micro_rows=1, shape="tied", slow=True),
    case("replicas-muon", MUON, data=4, slow=True),
    case("pp-fsdp", PP, FSDP, pipeline=2, data=2, layers=5, slow=True),
    case("pp-fsdp-checkpoint-compile", PP, FSDP, SAC, COMPILE, pipeline=2, data=2, slow=True),
    case("pp-checkpoint-compile", PP, SAC, COMPILE, pipeline=2, slow=True),
    case("zbv-tied", ZBV, pipeline=2, layers=5, shape="tied", micro_rows=1),
    case("dualpipev-tied", DUAL, pipeline=2, layers=5, shape="tied", micro_rows=1, slow=True),
    case("dualpipev4-gpt2", DUAL, pipeline=4, layers=9, shape="gpt2", micro_rows=1, slow=True),
    case("dualpipev-experts", DUAL, DIVIDED, pipeline=2, data=2, expert=2, layers=4, slow=True),
    case("zbv4-gpt2", ZBV, pipeline=4, layers=9, shape="gpt2", micro_rows=2, slow=True),
    case("zbv-tp", ZBV, TP, pipeline=2, tensor=2, layers=4, slow=True),
    case("zbv-experts", ZBV, EXPERTS, pipeline=2, data=2, layers=4, micro_rows=1, slow=True),
    case("zbv-muon-cp", ZBV, CP, MUON, pipeline=2, context=2, layers=4, length=12, slow=True),
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
        slow=True,
    ),
    case("tp-fsdp-gpt2", TP, FSDP, tensor=2, data=2, shape="gpt2", slow=True),
    case("tp-fsdp-compile", TP, FSDP, COMPILE, tensor=2, data=2, slow=True),
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
        slow=True,
    ),
    case("tp-compile", TP, SAC, COMPILE, CHUNKED, tensor=2, packing=True, shape="tied", slow=True),
    case("tp-pp-tied", TP, PP, tensor=2, pipeline=2, shape="tied", slow=True),
    case("tp-no-sequence", {"tensor_parallel": {"sequence": False}}, tensor=2, data=2, slow=True),
    case("tp-fsdp-muon", TP, FSDP, MUON, tensor=2, data=2),
    case("tp-fsdp-one-muon", TP, FSDP, MUON, tensor=2, slow=True),
    case("cp-tp", CP, TP, context=2, tensor=2, length=12, packing=True),
    case("cp-fsdp-packing", CP, FSDP, context=2, data=2, length=16, packing=True, slow=True),
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
        slow=True,
    ),
    case("ulysses-fsdp-packing", ULYSSES, FSDP, SAC, context=2, data=2, length=14, packing=True),
    case(
        "ulysses-tp-compile",
        ULYSSES,
        TP,
        COMPILE,
        context=2,
        tensor=2,
        length=12,
        shape="gpt2",
        slow=True,
    ),
    case("ulysses-tp", ULYSSES, TP, context=2, tensor=2, length=12, shape="gpt2", slow=True),
    case("ulysses-compile", ULYSSES, COMPILE, context=2, length=12, shape="gpt2", slow=True),
    case("ulysses-pp-tied", ULYSSES, PP, context=2, pipeline=2, length=14, shape="tied", slow=True),
    case(
        "ulysses-window-zero",
        {"sliding_window": {"window": 5}},
        ULYSSES,
        ZERO2,
        context=2,
        data=2,
        length=14,
        packing=True,
        micro_rows=1,
        slow=True,
    ),
    case("cp-pp-gpt2", CP, PP, context=2, pipeline=2, length=12, shape="gpt2", slow=True),
    # What learns otherwise, sharded: each beside itself in one process.
    case("sophia-fsdp", SOPHIA, FSDP, data=4, slow=True, **TWICE),
    case("sophia-tp-fsdp", SOPHIA, TP, FSDP, CHUNKED, tensor=2, data=2, **TWICE),
    case("sophia-pp-fsdp", SOPHIA, PP, FSDP, pipeline=2, data=2, slow=True, **TWICE),
    case("lion-tp-fsdp-roles", {"lion": {}}, TP, FSDP, tensor=2, data=2, keys=ROLES),
    case("schedule-free-fsdp", {"schedule_free": {}}, FSDP, data=4, slow=True),
    case(
        "ademamix-pp-tied-roles",
        {"ademamix": {}},
        PP,
        pipeline=2,
        shape="tied",
        keys=ROLES,
        slow=True,
    ),
    case("8bit-fsdp", {"adamw_8bit": {"smallest": 256}}, FSDP, data=2),
    case(
        "8bit-tp-fsdp",
        {"adamw_8bit": {}},
        TP,
        FSDP,
        tensor=2,
        data=2,
        shape="wide",
        layers=2,
        slow=True,
    ),
    case("dora-fsdp", {"dora": {"rank": 2, "alpha": 4.0, "dropout": 0.5}}, FSDP, data=4),
    case(
        "lora-tables-fsdp", {"lora": {"rank": 2, "train_also": ("head",)}}, FSDP, data=2, slow=True
    ),
    case(
        "lora-tables-tied-fsdp",
        {"lora": {"rank": 2, "train_also": ("embedding",)}},
        FSDP,
        data=2,
        shape="tied",
    ),
    case("rounded-fsdp-checkpoint-compile", ROUNDED, FSDP, SAC, COMPILE, data=4, slow=True),
    case("rounded-lora-fsdp", ROUNDED, {"lora": {"rank": 2, "alpha": 4.0}}, FSDP, data=2),
    case("pruned-tp-fsdp", PRUNED, TP, FSDP, tensor=2, data=2, slow=True),
    case("pruned-pp-fsdp", BY_READING, PP, FSDP, pipeline=2, data=2, slow=True),
    case("pruned-fsdp-cp", BY_READING, FSDP, CP, data=2, context=2, length=16, micro_rows=1),
    case("rounded-pp-tied", ROUNDED, PP, pipeline=2, data=2, shape="tied", slow=True),
    case("lora-fsdp", {"lora": {"rank": 2, "alpha": 4.0}}, FSDP, data=4, slow=True),
    case(
        "qlora-nf4-fsdp-checkpoint",
        {"qlora": {"rank": 2, "alpha": 4.0, "base": "nf4"}},
        FSDP,
        SAC,
        data=2,
    ),
    case(
        "qlora-nf4-fsdp",
        {"qlora": {"rank": 2, "alpha": 4.0, "base": "nf4"}},
        FSDP,
        SAC,
        COMPILE,
        data=4,
        slow=True,
    ),
    case(
        "qlora-int8-fsdp",
        {"qlora": {"rank": 2, "alpha": 4.0, "base": "int8"}},
        FSDP,
        data=4,
        slow=True,
    ),
    case(
        "qlora-int8-tp-fsdp",
        {"qlora": {"rank": 2, "alpha": 4.0, "base": "int8"}},
        TP,
        FSDP,
        tensor=2,
        data=2,
        slow=True,
    ),
    case("distillation-fsdp", {"distillation": {}}, FSDP, data=4, slow=True),
    case("distillation-tp-chunked", {"distillation": {}}, TP, CHUNKED, tensor=2, data=2),
    case("distillation-pp-fsdp", {"distillation": {}}, PP, FSDP, pipeline=2, data=2, slow=True),
    case("depth-fsdp-checkpoint-compile", DEPTH, FSDP, SAC, COMPILE, data=4, slow=True),
    case("depth-pp-fsdp", DEPTH, PP, FSDP, pipeline=2, data=2, layers=4, slow=True),
    case("lengths-fsdp", LENGTHS, FSDP, data=4, length=16, steps=5, slow=True),
    case("lengths-fsdp-compile", LENGTHS, FSDP, COMPILE, data=4, length=16, steps=5, slow=True),
    case("lengths-pp-fsdp", LENGTHS, PP, FSDP, pipeline=2, data=2, length=16, steps=5),
    case("scaling-pp-fsdp", {"fp16_loss_scaling": {}}, PP, FSDP, pipeline=2, data=2),
    case("scaling-tp-fsdp", {"fp16_loss_scaling": {}}, TP, FSDP, tensor=2, data=2, slow=True),
    case("experts-fsdp", EXPERTS, FSDP, data=4, slow=True),
    case("experts-tp-fsdp", EXPERTS, TP, FSDP, tensor=2, data=2),
    case("divided", DIVIDED, data=2, expert=2, slow=True),
    case("divided-4", DIVIDED, data=4, expert=4, micro_rows=1, shape="tied"),
    case("divided-checkpoint-fsdp", EVEN, FSDP, SAC, data=4, expert=2, micro_rows=1),
    case("divided-fsdp-rows", EVEN, FSDP, data=4, expert=2, slow=True),
    case("divided-all-fsdp", DIVIDED, FSDP, data=4, expert=4, slow=True),
    case("divided-zero-2", EVEN, ZERO2, data=4, expert=2, micro_rows=1, slow=True),
    case("divided-hybrid", EVEN, FSDP, data=4, replicate=2, expert=2, micro_rows=1, slow=True),
    case("divided-tp", DIVIDED, TP, tensor=2, data=2, expert=2, slow=True),
    case("divided-pp", DIVIDED, PP, pipeline=2, data=2, expert=2),
    case("divided-overlapped", DIVIDED, BUCKETS, data=4, expert=2, micro_rows=1),
    case("divided-muon", EVEN, MUON, data=4, expert=2, slow=True),
    case("divided-compile", EVEN, COMPILE, data=2, expert=2, slow=True),
    case("divided-checkpoint-compile", EVEN, SAC, COMPILE, data=2, expert=2, slow=True),
    case("experts-pp-fsdp", EXPERTS, PP, FSDP, pipeline=2, data=2, slow=True),
    *(
        case(f"float8-{recipe}-fsdp", {"float8_linear": how}, FSDP, data=4, **FLAT, slow=True)
        for recipe, how in FLOAT8_RECIPES.items()
    ),
    case(
        "float8-gathered",
        {"float8_linear": {"min_size": 1, "multiple_of": 1}},
        GATHER8,
        data=2,
        **{**FLAT, "shape": "tied", "keys": {"model": {"ffn": 21}}},  # rows that do not divide
    ),
    case(
        "float8-gathered-compile",
        FLOAT8,
        GATHER8,
        SAC,
        COMPILE,
        data=4,
        replicate=2,
        **FLAT,
        slow=True,
    ),
    case("float8-gathered-pp", FLOAT8, ZERO8, PP, data=2, pipeline=2, **FLAT, slow=True),
    case(
        "linear-attention-tp-fsdp",
        {"linear_attention": {"chunk_tokens": 4}},
        TP,
        FSDP,
        tensor=2,
        data=2,
        packing=True,
    ),
    case(
        "window-cp-fsdp",
        {"sliding_window": {"window": 5}},
        CP,
        FSDP,
        context=2,
        data=2,
        length=12,
        packing=True,
    ),
    case(
        "in-backward-fsdp", {"optimizer_in_backward": {}}, FSDP, data=2, micro_rows=0, clip_norm=0.0
    ),
    case(
        "in-backward-8bit-fsdp",
        {"optimizer_in_backward": {}, "adamw_8bit": {"smallest": 256}},
        FSDP,
        data=4,
        micro_rows=0,
        clip_norm=0.0,
        slow=True,
    ),
    case("mup-fsdp", {"mup": {"base_dim": 64}}, FSDP, data=4, slow=True),
    case(
        "tied-gqa-tp-fsdp",
        {"tied_embeddings": {}, "gqa": {"queries_per_key": 3}},
        TP,
        FSDP,
        tensor=2,
        data=2,
        slow=True,
    ),
    case(
        "float8-tp",
        {"float8_linear": {"recipe": "rowwise", "multiple_of": 1, "min_size": 1}},
        TP,
        tensor=2,
        data=2,
        shape="even",
        length=16,
        approximate=True,
    ),
    case(
        "speedrun-tp-fsdp-everything",
        SPEEDRUN,
        TP,
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        tensor=2,
        data=2,
        packing=True,
        micro_rows=1,
        slow=True,
        **THREE,
    ),
    case(
        "speedrun-tp-fsdp",
        SPEEDRUN,
        BEFORE,
        TP,
        FSDP,
        SAC,
        CHUNKED,
        tensor=2,
        data=2,
        packing=True,
        **THREE,
    ),
    case(
        "speedrun-tp-no-sequence",
        SPEEDRUN,
        BEFORE,
        {"tensor_parallel": {"sequence": False}},
        tensor=2,
        slow=True,
        **THREE,
    ),
    case("speedrun-cp-fsdp", SPEEDRUN, CP, FSDP, context=2, data=2, length=12, slow=True, **THREE),
    # Eight ranks.
    case("pp-tp-fsdp", PP, TP, FSDP, pipeline=2, tensor=2, data=2, slow=True),
    case(
        "pp-tp-fsdp-everything",
        INTERLEAVED,
        TP,
        FSDP,
        SAC,
        COMPILE,
        CHUNKED,
        pipeline=2,
        tensor=2,
        data=2,
        layers=5,
        shape="tied",
        packing=True,
        micro_rows=2,
        slow=True,
    ),
]


ADDS_NO_RANKS = ("data", "replicate", "expert")
"""Sizes of a mesh that split no model, or share the ranks of another."""


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
    if set(mesh) != {a for a in composition.mesh if a not in ADDS_NO_RANKS}:
        return None
    if (groups := composition.mesh.get("replicate", 1)) > 1:
        if left % groups or left == groups:
            return None
        mesh["replicate"] = groups
    if (among := composition.mesh.get("expert", 1)) > 1:
        if left * mesh.get("context", 1) // groups % among:
            return None
        mesh["expert"] = among
    return replace(composition, mesh={**mesh, "data": left})
