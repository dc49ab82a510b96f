"""List keys as other trainers call them, each with the key of a plan that means the same."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.core.known import KNOWN
from headrace.core.remedy import NONE, Remedy, mend

SAME: dict[str, str] = {
    **dict.fromkeys(("learning_rate", "max_lr", "peak_lr", "base_lr", "lr"), "optimizer.lr"),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "epsilon"), "optimizer.eps"),
    **dict.fromkeys(("wd", "weight_decay", "decay"), "optimizer.weight_decay"),
    **dict.fromkeys(
        (
            "grad_clip",
            "max_grad_norm",
            "clip",
            "gradient_clip",
            "gradient_clipping",
            "gradient_clip_val",
            "clip_grad",
            "clip_grad_norm",
            "max_norm",
            "clip_norm",
        ),
        "optimizer.clip_norm",
    ),
    **dict.fromkeys(
        (
            "warmup",
            "warmup_steps",
            "warmup_iters",
            "num_warmup_steps",
            "lr_warmup_steps",
            "lr_warmup_iters",
        ),
        "schedule.warmup_steps",
    ),
    **dict.fromkeys(
        (
            "lr_scheduler_type",
            "lr_scheduler",
            "lr_schedule",
            "lr_decay_style",
            "scheduler",
            "schedule.type",
            "schedule.name",
        ),
        "schedule.kind",
    ),
    **dict.fromkeys(("lr_decay_iters", "lr_decay_steps", "decay_steps", "t_max"), "schedule.steps"),
    **dict.fromkeys(
        (
            "steps",
            "max_steps",
            "num_steps",
            "train_steps",
            "total_steps",
            "max_iters",
            "train_iters",
            "num_train_steps",
            "iterations",
            "num_iterations",
        ),
        "goal.steps",
    ),
    **dict.fromkeys(("max_tokens", "total_tokens", "train_tokens", "num_tokens"), "goal.tokens"),
    **dict.fromkeys(("batch_tokens", "tokens_per_step", "tokens_per_batch"), "batch.tokens"),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "per_device_train_batch_size",
            "device_batch_size",
            "micro_batch",
            "train_micro_batch_size_per_gpu",
            "per_gpu_batch_size",
        ),
        "batch.micro_sequences",
    ),
    **dict.fromkeys(
        ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth"), "model.layers"
    ),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "emb_dim",
            "embed_dim",
            "hidden_dim",
            "width",
            "embedding_dim",
            "n_embed",
        ),
        "model.dim",
    ),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(
        (
            "kv_heads",
            "n_kv_heads",
            "n_kv_head",
            "num_kv_heads",
            "num_query_groups",
            "num_key_value_heads",
        ),
        "model.kv_heads",
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "d_ff", "ffn_dim", "mlp_dim"), "model.ffn"
    ),
    **dict.fromkeys(("data.vocab_size",), "data.vocab"),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), "model.vocab"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "model.norm_eps"),
    **dict.fromkeys(("initializer_range",), "model.init_std"),
    **dict.fromkeys(
        ("tie_word_embeddings", "tie_embeddings", "weight_tying"), "model.tied_embeddings"
    ),
    **dict.fromkeys(("hidden_act", "act_fn", "activation_function"), "model.activation"),
    **dict.fromkeys(("rope_base", "rotary_base"), "model.rope_theta"),
    **dict.fromkeys(("final_logit_softcapping", "logit_softcap"), "model.logit_cap"),
    **dict.fromkeys(
        (
            "init_from",
            "model_name_or_path",
            "base_model",
            "pretrained_model",
            "from_pretrained",
            "load_from",
            "model_path",
        ),
        "model.pretrained",
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "max_seq_len",
            "max_seq_length",
            "seq_length",
            "seq_len",
            "sequence_len",
            "block_size",
            "max_length",
            "context_length",
            "ctx_len",
            "n_ctx",
            "n_positions",
            "cutoff_len",
        ),
        "data.sequence_length",
    ),
    **dict.fromkeys(
        (
            "dataset",
            "dataset_name",
            "dataset_path",
            "data_path",
            "data_dir",
            "train_data",
            "train_file",
            "train_files",
            "corpus",
            "data.path",
            "data.files",
            "data.source",
            "data.input",
            "data.train",
            "data.name",
        ),
        "data.sources",
    ),
    **dict.fromkeys(
        (
            "val_split",
            "validation_split",
            "valid",
            "val_data",
            "val_fraction",
            "validation_file",
            "eval_data",
            "holdout",
            "test_size",
            "data.val",
            "validation_split_percentage",
        ),
        "data.validation",
    ),
    **dict.fromkeys(
        ("text_column", "text_field", "content_key", "data.column", "data.field"), "data.text_key"
    ),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "data.workers"),
    **dict.fromkeys(("prefetch_factor",), "data.prefetch"),
    **dict.fromkeys(("tokenizer_path", "tokenizer_name", "tokenizer_file"), "data.tokenizer"),
    **dict.fromkeys(
        (
            "eval_interval",
            "eval_steps",
            "eval_every",
            "val_interval",
            "eval.interval",
            "eval.every",
            "val_check_interval",
        ),
        "eval.every_steps",
    ),
    **dict.fromkeys(
        (
            "save_interval",
            "save_steps",
            "save_every",
            "save.every",
            "checkpoint_interval",
            "checkpoint.interval",
            "checkpoint.every",
        ),
        "checkpoint.every_steps",
    ),
    **dict.fromkeys(("save_total_limit", "keep_last_k", "max_checkpoints"), "checkpoint.keep_last"),
    **dict.fromkeys(("out_dir", "output_dir", "run_dir", "log_dir", "save_dir"), "directory"),
    **dict.fromkeys(("run_name", "experiment", "experiment_name"), "name"),
    **dict.fromkeys(("random_seed", "rng_seed", "manual_seed", "seed"), "seed"),
    **dict.fromkeys(("report_to", "log_with", "logger", "loggers"), "track.to"),
    **dict.fromkeys(
        ("tp", "tensor_parallel_size", "tensor_model_parallel_size", "tp_size"), "mesh.tensor"
    ),
    **dict.fromkeys(
        ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"), "mesh.pipeline"
    ),
    **dict.fromkeys(("cp", "context_parallel_size", "cp_size", "sp"), "mesh.context"),
    **dict.fromkeys(
        (
            "dp",
            "data_parallel_size",
            "dp_size",
            "gpus",
            "num_gpus",
            "n_gpus",
            "nproc_per_node",
            "devices",
            "world_size",
            "ngpus",
            "mesh.fsdp",
            "mesh.ddp",
        ),
        "mesh.data",
    ),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "techniques.lora.rank"),
    **dict.fromkeys(("lora_alpha",), "techniques.lora.alpha"),
    **dict.fromkeys(("lora_dropout",), "techniques.lora.dropout"),
    **dict.fromkeys(("use_rslora",), "techniques.lora.scaling"),
    **dict.fromkeys(("loraplus_lr_ratio",), "techniques.lora.b_rate"),
    **dict.fromkeys(("target_modules", "lora_target_modules"), "techniques.lora.targets"),
    **dict.fromkeys(
        ("num_experts", "n_experts", "num_local_experts", "n_routed_experts"),
        "techniques.mixture_of_experts.experts",
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "experts_per_token", "moe_top_k"),
        "techniques.mixture_of_experts.top_k",
    ),
}
"""Each name, or table and name, with the key that counts the same in the same unit."""

UNLIKE: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "train_batch_size", "total_batch_size", "batch.size"),
        ("batch.tokens", "which counts tokens, not rows"),
    ),
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "accumulate",
            "grad_accum",
            "accum_steps",
            "gradient_accumulation",
            "accumulation_steps",
            "accumulate_grad_batches",
        ),
        (
            "batch.micro_sequences",
            "the rows of one forward pass; how often gradients "
            "are summed follows from batch.tokens",
        ),
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs"),
        ("goal.tokens", "which counts tokens; text that is used up begins again"),
    ),
    **dict.fromkeys(
        ("goal.hours", "hours", "max_hours", "max_time"), ("goal.minutes", "which counts minutes")
    ),
    **dict.fromkeys(
        ("goal.loss", "target_loss", "goal.perplexity"),
        ("goal.bits_per_byte", "which counts bits per byte of text"),
    ),
    **dict.fromkeys(
        ("min_lr", "lr_min", "final_lr", "min_lr_ratio", "eta_min"),
        ("schedule.final_fraction", "the last rate as a share of optimizer.lr"),
    ),
    **dict.fromkeys(
        ("warmup_ratio", "warmup_fraction", "warmup_percent"),
        ("schedule.warmup_steps", "which counts steps"),
    ),
    **dict.fromkeys(
        ("eval_iters", "eval_batches", "limit_val_batches"), ("eval.tokens", "which counts tokens")
    ),
    **dict.fromkeys(("momentum",), ("optimizer.betas", "decays of both moments")),
}
"""Each name with the key that is nearest, which counts something else, and what that is."""

OPTIONS: dict[str, Remedy] = {
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "recompute"),
        mend("+full_checkpoint"),
    ),
    **dict.fromkeys(("compile", "torch_compile"), mend("+torch_compile")),
    **dict.fromkeys(
        ("dtype", "bf16", "mixed_precision", "torch_dtype", "precision", "amp"),
        mend("model.precision=bf16"),
    ),
    **dict.fromkeys(("fp16",), mend("+fp16_loss_scaling")),
    **dict.fromkeys(("tf32", "allow_tf32"), mend("+tf32")),
    "fsdp": mend("+fsdp"),
    **dict.fromkeys(("zero_stage", "zero"), mend("+zero")),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout"), mend("+stochastic_depth")),
    **dict.fromkeys(
        ("flash_attention", "use_flash", "use_flash_attention"), mend("+flash_attention")
    ),
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor"), mend("+label_smoothing")),
    **dict.fromkeys(("packing", "sample_packing"), mend("+document_packing")),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_from"), Remedy(text="--resume")),
    **dict.fromkeys(("wandb", "use_wandb", "wandb_project"), mend('track.to=["wandb"]')),
    **dict.fromkeys(("tensorboard", "use_tensorboard"), mend('track.to=["tensorboard"]')),
}
"""Another trainer's name of a key -> the remedy that says what is typed instead."""

NAMES = ("optimizer", "optim", "optimizer.name", "optimizer.type", "optimizer.kind")
"""Keys that name the optimizer, which is AdamW unless a technique is another."""
OPTIMIZERS = ("muon", "sophia", "lion", "schedule_free", "ademamix", "adamw_8bit")
"""Techniques that are an optimizer."""


@dataclass(frozen=True)
class Meant:
    """What a key of another trainer means in a plan.

    Args:
        key: the plan's key; empty where an option says it.
        unlike: what that key counts, where it is not what was given.
        option: what is typed instead.
    """

    key: str = ""
    unlike: str = ""
    option: Remedy = NONE


def meant_by(key: str, choices: Collection[str] = (), given: Any = None) -> Meant | None:
    """Return what a key that no plan has means; None where it is no well-known one.

    Args:
        key: as it was written, with its table.
        choices: keys of that table, among which the meant one is looked for first.
        given: the value behind it, which may name an optimizer.
    """
    table, _, _ = key.rpartition(".")
    if key.lower() in NAMES and isinstance(given, str):
        word = given.lower().replace("-", "_")
        near = [one for one in (word, *KNOWN.get(word, ())) if one in OPTIMIZERS]
        usual = Meant("optimizer.lr", "of AdamW, which every plan has without a name")
        return Meant(option=mend(f"+{near[0]}")) if near else usual
    if [*_names(key)][-1] in choices:  # written in another case, or with other dashes
        return None
    for name in _names(key):
        if name in SAME:
            own = SAME[name].rpartition(".")[2]
            return Meant(f"{table}.{own}" if table and own in choices else SAME[name])
        if name in UNLIKE:
            return Meant(*UNLIKE[name])
        if name in OPTIONS:
            return Meant(option=OPTIONS[name])
    return None


def _names(key: str) -> Iterator[str]:
    """Yield a key and its last part, spelled as in the tables above: lower case, underscores."""
    plain = key.lower().replace("-", "_")
    yield plain
    yield plain.rpartition(".")[2]
