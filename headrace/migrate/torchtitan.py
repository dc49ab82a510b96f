"""Make a plan of a TOML config of torchtitan.

Keys and defaults are those of `torchtitan/config/job_config.py`, of 2025 (`batch_size`, `lr_min`,
`tokenizer_path`, `enable_checkpoint`) and later (`local_batch_size`, `min_lr_factor`,
`hf_assets_path`, `enable`), at github.com/pytorch/torchtitan. Sizes of its flavors are those of
`torchtitan/models/llama3/__init__.py` and `torchtitan/models/qwen3/__init__.py`. Its Python configs
(`config_registry.py`) are code, which is not read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import UnsupportedError, nearest
from headrace.migrate.draft import (
    Draft,
    KeyRule,
    always,
    as_number,
    flat,
    never,
    only_with,
    switch,
    to,
)
from headrace.migrate.read import read_toml

DEFAULTS: Mapping[str, Any] = {
    "optimizer.lr": 8e-4,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "lr_scheduler.warmup_steps": 200,
    "training.dataset": "c4_test",
    "training.local_batch_size": 8,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.steps": 10_000,
    "activation_checkpoint.mode": "selective",
    "model.flavor": "debugmodel",
    "model.name": "llama3",
}
"""What torchtitan takes where a config does not say it."""
_LLAMA: Mapping[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tied_embeddings": False,
    "vocab": 128_256,
    "kv_heads": 8,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama3/debugmodel": {
        **_LLAMA,
        **{"dim": 256, "layers": 6, "heads": 16, "kv_heads": 0, "ffn": 768, "vocab": 2048},
    },
    "llama3/8B": {"family": "llama3-8b"},
    "llama3/70B": {**_LLAMA, "dim": 8192, "layers": 80, "heads": 64, "ffn": 28_672},
    "llama3/405B": {**_LLAMA, "dim": 16_384, "layers": 126, "heads": 128, "ffn": 53_248},
    "qwen3/0.6B": {"family": "qwen3-0.6b"},
    "qwen3/1.7B": {"family": "qwen3-1.7b"},
    "qwen3/4B": {"family": "qwen3-4b"},
    "qwen3/8B": {"family": "qwen3-8b"},
}
"""Model and flavor -> `model.*` of a plan."""
DATASETS = {"c4": "hf:allenai/c4:en"}
"""Names of torchtitan's datasets -> sources."""
SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Ends of flavors that differ in the backend of attention alone."""


def import_torchtitan(file: Path, ranks: int) -> Draft:
    """Return the draft of a plan that says what a config of torchtitan does.

    Args:
        file: the TOML file.
        ranks: processes that it was run on, which `data_parallel_shard_degree = -1` divides.

    Raises:
        ConfigError: the file is no TOML.
        UnsupportedError: its model is none that Headrace builds.
    """
    values = flat(read_toml(file), str(file))
    draft = Draft("torchtitan", values, DEFAULTS, ranks)
    _model(draft, "model.name")
    _schedule(draft)
    _parallel(draft)
    _batch(draft)
    _checkpoint(draft)
    draft.follow(RULES)
    return draft


def _model(draft: Draft, key: str) -> None:
    """Set `model.*` by the model's name and flavor."""
    name, flavor = str(draft.value(key)), str(draft.value("model.flavor"))
    backend = next((end for end in SUFFIXES if flavor.endswith(end)), "")
    shape = SHAPES.get(f"{name}/{flavor.removesuffix(backend)}")
    if shape is None:
        near = nearest(f"{name}/{flavor}", SHAPES)
        raise UnsupportedError(
            f"torchtitan's model {name}, flavor {flavor}, is none that Headrace builds; those of "
            f"which it knows the sizes: {', '.join(SHAPES)}",
            f"model.name and model.flavor of one of these, as {near}; then model.KEY=VALUE behind "
            "headrace plan changes its sizes",
        )
    words = [draft.put(f"model.{one}", value) for one, value in shape.items()]
    draft.carry("model.name", words[0])
    why = "torchtitan may slow rotations as Llama 3.1 does; model.rope_scaling.kind=llama3 does so"
    if backend:
        draft.near("model.flavor", why=f"{backend[1:]} is a choice of attention=measured here")
    elif name == "llama3":
        draft.near("model.flavor", *words, why=why)
    else:
        draft.carry("model.flavor", *words)


def _schedule(draft: Draft) -> None:
    """Set `schedule.*`: torchtitan's decay begins after the warmup, or covers a last share."""
    steps, warmup = draft.whole("training.steps"), draft.whole("lr_scheduler.warmup_steps")
    low = "lr_scheduler.min_lr_factor" if "lr_scheduler.min_lr_factor" in draft.values else ""
    low = low or "lr_scheduler.lr_min"
    kind = str(draft.value("lr_scheduler.decay_type", "linear"))
    share = draft.number("lr_scheduler.decay_ratio", max(0, steps - warmup) / max(1, steps))
    final = draft.put("schedule.final_fraction", draft.number(low))
    if kind == "cosine":
        draft.carry("lr_scheduler.decay_type", draft.put("schedule.kind", "cosine"))
        draft.leave("lr_scheduler.decay_ratio", "cosine falls from the warmup on")
    else:
        words = [
            draft.put("schedule.kind", "warmup_stable_decay"),
            draft.put("schedule.decay_shape", "sqrt" if kind == "sqrt" else "linear"),
        ]
        draft.carry("lr_scheduler.decay_type", *words)
        fraction = draft.put("schedule.decay_fraction", round(min(1.0, share), 6))
        draft.carry("lr_scheduler.decay_ratio", fraction)
    draft.carry(low, final)
    warmup = min(warmup, steps)
    draft.carry("lr_scheduler.warmup_steps", draft.put("schedule.warmup_steps", warmup))


def _parallel(draft: Draft) -> None:
    """Set `mesh.*`, and the technique that splits along each axis."""
    table = "parallelism."
    others = 1
    for axis, technique in (
        ("tensor", "tensor_parallel"),
        ("pipeline", "pipeline_parallel"),
        ("context", "context_parallel"),
    ):
        key = f"{table}{axis}_parallel_degree"
        size = max(1, draft.whole(key, 1))
        others *= size
        if size > 1:
            draft.carry(key, draft.put(f"mesh.{axis}", size), *draft.add(technique))
        else:
            draft.idle(key)
    copies = max(1, draft.whole(f"{table}data_parallel_replicate_degree", 1))
    shard = draft.whole(f"{table}data_parallel_shard_degree", -1)
    shard = max(1, draft.ranks // (others * copies)) if shard < 1 else shard
    key, both = f"{table}data_parallel_shard_degree", f"{table}data_parallel_replicate_degree"
    word = draft.put("mesh.data", copies * shard)
    if shard > 1 and copies > 1:
        draft.carry(key, word, *draft.add("fsdp"))
        draft.carry(both, draft.put("mesh.replicate", copies))
    elif shard > 1:
        draft.carry(key, word, *draft.add("fsdp"))
        draft.idle(both)
    else:
        draft.carry(both, word)
        if str(draft.values.get(key)) == "-1":
            draft.near(key, word, why="--ranks N says over how many processes to cut")
        else:
            draft.idle(key)


def _batch(draft: Draft) -> None:
    """Set the batch: torchtitan counts rows of a rank, and a plan the tokens of a step."""
    old = "training.batch_size" in draft.values
    local = "training.batch_size" if old else "training.local_batch_size"
    rows, data = max(1, draft.whole(local, 8)), draft.tables["mesh"]["data"]
    whole = draft.whole("training.global_batch_size", -1)
    whole = rows * data if whole < 1 else whole
    tokens = whole * max(2, draft.whole("training.seq_len"))
    draft.carry("training.global_batch_size", draft.put("batch.tokens", tokens))
    inner = "parallelism.pipeline_parallel_microbatch_size"
    micro = rows
    if draft.tables["mesh"].get("pipeline", 1) > 1:
        micro = max(1, draft.whole(inner, 1))
        draft.carry(inner, f"batch.micro_sequences={micro}")
    draft.carry(local, draft.put("batch.micro_sequences", micro))


def _checkpoint(draft: Draft) -> None:
    """Set how often a checkpoint is saved: never, where saving is off."""
    old = "checkpoint.enable_checkpoint"
    key = old if old in draft.values else "checkpoint.enable"
    if draft.is_on(key):
        word = draft.put("checkpoint.every_steps", draft.whole("checkpoint.interval", 500))
        draft.carry(key, word)
        draft.carry("checkpoint.interval", word)
    else:
        draft.carry(key, draft.put("checkpoint.every_steps", 0))
        draft.idle("checkpoint.interval", f"counts only with {key}")


def _dataset(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if draft.is_on("training.dataset_path"):
        draft.idle(key, "training.dataset_path says where the text lies")
    elif name in DATASETS:
        draft.carry(key, draft.put("data.sources", DATASETS[name]))
    elif key in draft.values:
        draft.leave(key, "data.sources takes a file, a folder or hf:NAME; stdlib stands there now")
        draft.need("data.sources", "stdlib", "a text that is on every machine")


def _tokenizer(draft: Draft, key: str) -> None:
    path = str(draft.value(key))
    if path.endswith(".model"):
        draft.leave(key, "data.tokenizer reads a tokenizer.json, which transformers writes of it")
    else:
        draft.carry(key, draft.put("data.tokenizer", path))


def _precision(draft: Draft, key: str) -> None:
    names = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    name = names.get(str(draft.value(key)), "")
    if name:
        draft.carry(key, draft.put("model.precision", name))
    else:
        draft.leave(key, "model.precision is fp32, bf16 or fp16")


def _dtype(draft: Draft, key: str) -> None:
    if draft.value(key) == "bfloat16":
        why = "weights in bf16, and 16 more bits of each in the optimizer, which torchtitan lacks"
        draft.near(key, *draft.add("bf16_parameters"), why=why)
    else:
        draft.idle(key, "weights are fp32")


def _optimizer(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if name.lower() == "adamw":
        draft.idle(key, "every plan has AdamW without a name")
    elif name.lower() == "muon":
        draft.carry(key, *draft.add("muon"))
    else:
        draft.leave(key, "AdamW stands in its place; headrace list names other optimizers")


def _betas(draft: Draft, key: str) -> None:
    first, second = draft.number("optimizer.beta1", 0.9), draft.number("optimizer.beta2", 0.95)
    draft.carry(key, draft.put("optimizer.betas", [first, second]))


def _activation(draft: Draft, key: str) -> None:
    mode = str(draft.value(key))
    option = str(draft.value("activation_checkpoint.selective_ac_option", "2"))
    more = "activation_checkpoint.selective_ac_option"
    if mode == "full":
        draft.carry(key, *draft.add("full_checkpoint"))
        draft.idle(more, "counts only with mode = selective")
    elif mode == "selective" and option == "op":
        words = draft.add("selective_checkpoint", every_matmul=2)
        why = "both keep attention and every second matmul; the lists of operations differ"
        draft.near(key, *words, why=why)
        draft.near(more, *words, why=why)
    elif mode == "selective":
        words = draft.add("selective_checkpoint", every=max(1, int(as_number(option) or 1)))
        why = "in these blocks matmuls and attention are kept here, and nothing there"
        draft.near(key, *words, why=why)
        draft.near(more, *words, why=why)
    else:
        draft.idle(key)
        draft.idle(more, "counts only with mode = selective")


def _converters(draft: Draft, key: str) -> None:
    given = draft.value(key)
    names = given if isinstance(given, list) else str(given).split(",")
    names = [str(name).strip() for name in names if name]
    if names in (["float8"], ["quantize.linear.float8"]):
        rowwise = str(draft.value("float8.recipe_name", "")).startswith("rowwise")
        words = draft.add("float8_linear", recipe="rowwise" if rowwise else "tensorwise")
        draft.carry(key, *words)
        draft.carry("float8.recipe_name", words[-1])
    elif names:
        draft.leave(key, "float8 is the converter that Headrace has, as float8_linear")
    else:
        draft.idle(key)


def _reshard(draft: Draft, key: str) -> None:
    frees = {"always": True, "never": False}.get(str(draft.value(key)))
    if frees is not None and "fsdp" in draft.tables.get("techniques", {}):
        draft.carry(key, *draft.add("fsdp", reshard=frees))
    else:
        draft.idle(key, "fsdp frees weights after the forward pass where they are much memory")


def _asynchronous(draft: Draft, key: str) -> None:
    if draft.is_on(key) and "tensor_parallel" in draft.tables.get("techniques", {}):
        draft.carry(key, *draft.add("tensor_parallel", asynchronous=True))
    else:
        draft.idle(key)


def _gather_fp8(draft: Draft, key: str) -> None:
    techniques = draft.tables.get("techniques", {})
    recipe = techniques.get("float8_linear", {}).get("recipe")
    if draft.is_on(key) and "fsdp" in techniques and recipe == "tensorwise":
        draft.carry(key, *draft.add("fsdp", gather="fp8"))
    else:
        draft.idle(key, "counts only with slices of weights and one scale a tensor")


def _track(name: str) -> KeyRule:
    def rule(draft: Draft, key: str) -> None:
        if not draft.is_on(key):
            draft.idle(key)
            return
        to_ = [*draft.tables.get("track", {}).get("to", []), name]
        draft.carry(key, draft.put("track.to", to_))

    return rule


def _validation(draft: Draft, key: str) -> None:
    if not draft.is_on(key):
        draft.idle(key, "a plan validates on 5% of the text all the same")
        return
    word = draft.put("eval.every_steps", draft.whole("validation.freq", 10))
    draft.carry(key, word)
    draft.carry("validation.freq", word)


def _validation_steps(draft: Draft, key: str) -> None:
    steps, rows = draft.whole(key), draft.whole("validation.local_batch_size", 8)
    length = draft.whole("validation.seq_len", draft.whole("training.seq_len"))
    if steps > 0:
        tokens = steps * rows * length * draft.tables["mesh"]["data"]
        draft.carry(key, draft.put("eval.tokens", tokens))
    else:
        draft.near(key, why="eval.tokens bounds it; headrace eval RUN reads all of the text")


def _pipeline_schedule(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if draft.tables["mesh"].get("pipeline", 1) == 1:
        draft.idle(key, "counts only with several pipeline ranks")
    elif name == "1F1B":
        draft.carry(key, *draft.add("pipeline_parallel", schedule="1f1b"))
    elif name == "Interleaved1F1B":
        draft.carry(key, *draft.add("pipeline_parallel", schedule="interleaved", chunks=2))
    else:
        draft.near(key, *draft.add("pipeline_parallel"), why="1f1b and interleaved are here")


_TRACED = "profiling.enable_profiling"
_ON_DISK = "a run's files lie in its folder, under names of Headrace's own"
RULES: Mapping[str, KeyRule] = {
    "job.dump_folder": to("directory"),
    "job.description": never("a plan has no description; name=NAME names the run's folder"),
    "job.print_args": always("headrace explain PLAN prints every key"),
    "job.use_for_integration_test": always("torchtitan's own tests read it"),
    _TRACED: lambda draft, key: (
        draft.carry(key, draft.put("trace.every_steps", draft.whole("profiling.profile_freq", 10)))
        if draft.is_on(key)
        else draft.idle(key)
    ),
    "profiling.profile_freq": only_with(_TRACED, to("trace.every_steps")),
    "profiling.save_traces_folder": only_with(_TRACED, never(_ON_DISK)),
    "metrics.log_freq": always("metrics.jsonl has a row of every step"),
    "metrics.enable_tensorboard": _track("tensorboard"),
    "metrics.enable_wandb": _track("wandb"),
    "metrics.save_tb_folder": only_with("metrics.enable_tensorboard", never(_ON_DISK)),
    "model.tokenizer_path": _tokenizer,
    "model.hf_assets_path": _tokenizer,
    "model.converters": _converters,
    "optimizer.name": _optimizer,
    "optimizer.lr": to("optimizer.lr"),
    "optimizer.beta1": _betas,
    "optimizer.beta2": _betas,
    "optimizer.eps": to("optimizer.eps"),
    "optimizer.weight_decay": to("optimizer.weight_decay"),
    "optimizer.implementation": always("the fastest of the device is taken"),
    "optimizer.early_step_in_backward": switch("optimizer_in_backward"),
    "training.dataset_path": to("data.sources"),
    "training.dataset": _dataset,
    "training.seq_len": to("data.sequence_length"),
    "training.max_norm": to("optimizer.clip_norm"),
    "training.steps": to("goal.steps"),
    "training.seed": to("seed"),
    "training.compile": switch("torch_compile", scope="block"),
    "compile.enable": switch("torch_compile", scope="block"),
    "compile.components": only_with("compile.enable", always("each block and the loss")),
    "training.mixed_precision_param": _precision,
    "training.mixed_precision_reduce": never("gradients are summed in fp32", "float32"),
    "training.dtype": _dtype,
    "training.enable_cpu_offload": switch(
        "optimizer_offload", "the optimizer's states go to the host, and weights stay"
    ),
    "training.gc_freq": always("torchtitan's own loop collects garbage by it"),
    "parallelism.fsdp_reshard_after_forward": _reshard,
    "parallelism.enable_async_tensor_parallel": _asynchronous,
    "parallelism.pipeline_parallel_schedule": _pipeline_schedule,
    "parallelism.context_parallel_rotate_method": only_with(
        "mesh.context", always("context_parallel sends keys round a ring")
    ),
    "parallelism.expert_parallel_degree": never(
        "mesh.expert=N with expert_parallel divides the experts of mixture_of_experts", 1
    ),
    "checkpoint.keep_latest_k": to("checkpoint.keep_last"),
    "checkpoint.folder": always("checkpoints lie in the run's folder"),
    "checkpoint.async_mode": always("a checkpoint is always written beside the steps"),
    "checkpoint.export_dtype": always("headrace export writes a run's model"),
    "checkpoint.last_save_model_only": always("a run can go on from its last checkpoint"),
    "checkpoint.model_weights_only": always("a run can go on from its last checkpoint"),
    "checkpoint.initial_load_path": never("model.pretrained=FOLDER starts from safetensors"),
    "activation_checkpoint.mode": _activation,
    **{
        f"float8.{name}": only_with("model.converters", never(why))
        for name, why in (
            ("filter_fqns", "linears of the blocks are multiplied in fp8, and the output is not"),
            ("precompute_float8_dynamic_scale_for_fsdp", "gather=fp8 finds all scales together"),
            ("force_recompute_fp8_weight_in_bwd", "+full_checkpoint recomputes blocks"),
        )
    },
    "float8.enable_fsdp_float8_all_gather": only_with("model.converters", _gather_fp8),
    "float8.recipe_name": always("counts only with model.converters"),
    "validation.enable": _validation,
    "validation.enabled": _validation,
    "validation.dataset": never(
        "data.validation=PATH is text of its own; 5% is held out otherwise", "c4_validation"
    ),
    "validation.dataset_path": to("data.validation"),
    "validation.freq": always("counts only with validation.enable"),
    "validation.steps": _validation_steps,
    "metrics.disable_color_printing": always("colors are for terminals alone"),
}
"""What becomes of each key; a line of `_model`, `_schedule`, `_parallel` ... stands before."""
