"""Make a plan of a YAML config of axolotl.

Keys are those of its examples (github.com/axolotl-ai-cloud/axolotl: `examples/llama-3/lora-8b.yml`,
`qlora-1b.yml`, `fft-8b.yaml`, `instruct-dpo-lora-8b.yml`, `3b-fp8-fsdp2.yaml`,
`examples/archived/tiny-llama/pretrain.yml`) and defaults those of its schema of 2025.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.migrate.draft import (
    Draft,
    KeyRule,
    always,
    as_number,
    flat,
    is_off,
    never,
    switch,
    text_to,
    to,
)
from headrace.migrate.read import read_yaml
from headrace.migrate.sizes import set_passes, set_rows

DEFAULTS: Mapping[str, Any] = {
    "sequence_len": 2048,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.0,
    "lr_scheduler": "cosine",
}
"""What axolotl takes where a config does not say it."""
CHATS = ("alpaca", "chat_template", "sharegpt", "input_output", "chatml", "completion:chat")
"""How the types of datasets begin whose rows are conversations, or prompts with answers."""
TEXTS = ("completion", "pretrain")
"""How the types of datasets begin whose rows are plain text."""
TARGETS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "mixer.qkv"),
    "o_proj": "mixer.out",
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up"),
    "down_proj": "mlp.down",
}
"""Names of linears in transformers -> ends of their names here."""
EIGHT_BITS = ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_8bit", "adamw_torch_8bit")
SAME_OPTIMIZER = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
OTHERS = {"muon": "muon", "lion": "lion", "lion_32bit": "lion", "ademamix": "ademamix"}


def import_axolotl(file: Path, ranks: int) -> Draft:
    """Return the draft of a plan that says what a config of axolotl does.

    Args:
        file: the YAML file.
        ranks: processes that it was run on, which multiply its batch.

    Raises:
        ConfigError: the file is no YAML.
    """
    values = flat(read_yaml(file), str(file))
    draft = Draft("axolotl", values, DEFAULTS, ranks)
    _mesh(draft)
    _rows(draft)
    _length(draft)
    _source(draft)
    draft.follow(RULES)
    return draft


def _mesh(draft: Draft) -> None:
    """Set `mesh.*` by the degrees that the config names, and the processes that it ran on."""
    others = 1
    for keys, axis, technique in (
        (("tensor_parallel_size",), "tensor", "tensor_parallel"),
        (("context_parallel_size", "sequence_parallel_degree"), "context", "context_parallel"),
    ):
        for key in keys:
            size = max(1, draft.whole(key, 1))
            if size > 1:
                others *= size
                draft.carry(key, draft.put(f"mesh.{axis}", size), *draft.add(technique))
            else:
                draft.idle(key)
    data = max(draft.ranks // others, draft.whole("dp_shard_size", 1), 1)
    word = draft.put("mesh.data", data)
    sharded = any(key == "fsdp" or key.startswith("fsdp_config") for key in draft.values)
    sharded = sharded and (draft.is_on("fsdp") or "fsdp" not in draft.values)
    deep = "zero3" in str(draft.value("deepspeed", ""))
    if draft.is_on("dp_shard_size"):
        draft.carry("dp_shard_size", word, *draft.add("fsdp"))
    if draft.is_on("fsdp"):
        draft.carry("fsdp", *draft.add("fsdp"))
    elif sharded:
        draft.add("fsdp")
    if draft.is_on("deepspeed"):
        technique = "fsdp" if deep else "zero"
        why = "its JSON is not read: stage 3 is fsdp here, and stages 1 and 2 are zero"
        draft.near("deepspeed", *draft.add(technique), why=why)


def _rows(draft: Draft) -> None:
    """Set the batch: rows of a pass x passes that add up x ranks that read different rows."""
    summed = max(1, draft.whole("gradient_accumulation_steps", 1))
    rows = max(1, draft.whole("micro_batch_size", 1)) * summed * draft.tables["mesh"]["data"]
    length = max(2, draft.whole("sequence_len"))
    set_rows(draft, "micro_batch_size", "gradient_accumulation_steps", rows, length)


def _length(draft: Draft) -> None:
    """Set how long the run is, and its warmup, which may be a share of that."""
    steps = draft.whole("max_steps")
    if steps > 0:
        draft.carry("max_steps", draft.put("goal.steps", steps))
        draft.idle("num_epochs", "max_steps ends the run sooner")
    else:
        draft.idle("max_steps")
        set_passes(draft, "num_epochs" if "num_epochs" in draft.values else "epochs")
        steps = 0
    warmup, share = draft.whole("warmup_steps"), draft.number("warmup_ratio")
    if warmup > 0:
        draft.carry("warmup_steps", draft.put("schedule.warmup_steps", warmup))
    elif share > 0 and steps:
        word = draft.put("schedule.warmup_steps", round(share * steps))
        draft.carry("warmup_ratio", word)
    else:
        draft.leave("warmup_ratio", f"schedule.warmup_steps={share:g} x the steps of the run")


def _source(draft: Draft) -> None:
    """Set where text comes from, and whether its rows are conversations."""
    for key in ("datasets", "pretraining_dataset"):
        rows = draft.value(key)
        if rows is None or key not in draft.values:
            continue
        entries = rows if isinstance(rows, list) else [rows]
        entries = [one if isinstance(one, dict) else {"path": str(one)} for one in entries]
        sources = [_named(one) for one in entries if one.get("path")]
        if not sources:
            draft.leave(key, "it names no path")
            continue
        word = draft.put("data.sources", sources[0] if len(sources) == 1 else sources)
        types = {str(one.get("type", "completion")).partition(".")[0] for one in entries}
        fields = {str(one["field"]) for one in entries if one.get("field")}
        words = [word]
        if len(fields) == 1 and all(one.startswith(TEXTS) for one in types):
            words.append(draft.put("data.text_key", fields.pop()))
        unread = sorted({*(name for one in entries for name in one)} - READ)
        why = f"{', '.join(unread)} of its entries not read" if unread else ""
        if not all(one.startswith(TEXTS) for one in types):
            preference = draft.is_on("rl")
            kind = "preference" if preference else "auto"
            words.append(draft.put("data.chat.kind", kind))
            named = ", ".join(sorted(types))
            why = f"{why}; " * bool(why)
            why += f"the tokenizer's chat template writes prompts, not axolotl's {named}"
        (draft.near if why else draft.carry)(key, *words, why=why)


READ = {"path", "name", "split", "type", "field", "data_files", "ds_type"}
"""Keys of an entry of `datasets` that are read."""


def _named(entry: Mapping[str, Any]) -> str:
    """Return the source that an entry of `datasets` names."""
    path = str(entry["path"])
    files = entry.get("data_files")
    if entry.get("ds_type") or path.startswith((".", "/", "~")) or _is_here(path):
        return str(files[0] if isinstance(files, list) and files else files or path)
    name = f":{entry['name']}" if entry.get("name") else ""
    split = f"@{entry['split']}" if entry.get("split") else ""
    return f"hf:{path}{name}{split}"


def _is_here(path: str) -> bool:
    """Return whether a path is on this machine; one that no file can have is not."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _base(draft: Draft, key: str) -> None:
    folder = str(draft.value(key))
    if draft.is_on("reinit_weights"):
        draft.leave(key, "model.family=NAME is a shape with new weights: headrace list --families")
    elif _is_here(folder):
        draft.carry(key, draft.put("model.pretrained", folder))
    else:
        local = Path(folder).name or "FOLDER"
        word = draft.put("model.pretrained", local)
        why = f"Headrace downloads nothing: hf download {folder} --local-dir {local}"
        draft.near(key, word, why=why)


def _adapter(draft: Draft, key: str) -> None:
    name = str(draft.value(key)).lower()
    if name not in ("lora", "qlora"):
        draft.leave(key, "adapters are lora, dora and qlora: headrace finetune --with NAME")
        return
    dora = draft.is_on("peft_use_dora")
    eight = name == "lora" and draft.is_on("load_in_8bit")
    technique = "dora" if dora and name == "lora" else ("qlora" if eight else name)
    knobs: dict[str, Any] = {"base": "int8"} if eight else {}
    knobs |= {"rank": draft.whole("lora_r", 8), "alpha": float(draft.number("lora_alpha", 16))}
    knobs |= {"dropout": float(draft.number("lora_dropout"))} if draft.is_on("lora_dropout") else {}
    if draft.is_on("peft_use_rslora"):
        knobs["scaling"] = "root_of_rank"
    targets = draft.value("lora_target_modules")
    if isinstance(targets, list) and not draft.is_on("lora_target_linear"):
        knobs["targets"] = sorted({TARGETS[one] for one in map(str, targets) if one in TARGETS})
    saved = {"embed_tokens": "embedding", "lm_head": "head"}
    learned = [saved[one] for one in _names(draft, "lora_modules_to_save") if one in saved]
    if learned:
        knobs["train_also"] = learned
    draft.carry(key, *draft.add(technique, **knobs))
    stem = f"techniques.{technique}."
    draft.carry("lora_r", f"{stem}rank={knobs['rank']}")
    draft.carry("lora_alpha", f"{stem}alpha={knobs['alpha']:g}")
    why = "it leaves out input features, the same ones for all tokens of a step (arXiv 2404.09610)"
    if "dropout" in knobs:
        draft.near("lora_dropout", f"{stem}dropout={knobs['dropout']:g}", why=why)
    if "load_in_8bit" in draft.values and eight:
        draft.carry("load_in_8bit", f"{stem}base=int8")
    if name == "qlora" and draft.is_on("load_in_4bit"):
        draft.carry("load_in_4bit", f"{stem}base=nf4")
    if targets:
        other = [one for one in _names(draft, "lora_target_modules") if one not in TARGETS]
        words = f"{stem}targets={knobs.get('targets', [])}"
        why = "queries, keys and values are one linear here, and gate and up another"
        if other:
            draft.leave("lora_target_modules", f"{', '.join(other)} has no counterpart")
        else:
            draft.near("lora_target_modules", words, why=why)
    draft.idle("lora_target_linear", "without targets all linears of the blocks are adapted")
    if learned:
        draft.carry("lora_modules_to_save", f"{stem}train_also={learned}")
    for one in ("peft_use_rslora", "peft_use_dora"):
        if draft.is_on(one):
            draft.carry(one, f"--with {technique}")


def _names(draft: Draft, key: str) -> list[str]:
    """Return the names in a key's list; none where it has no list."""
    value = draft.value(key)
    return [str(one) for one in value] if isinstance(value, list) else []


def _with_adapter(draft: Draft, key: str) -> None:
    """Note a key of adapters that `_adapter` did not: it counts with one alone."""
    if is_off(draft.value(key)) or not draft.is_on("adapter"):
        draft.idle(key, "counts only with adapter")
    else:
        draft.leave(key, "adapters here have rank, alpha, dropout, targets, scaling and b_rate")


def _quantized(draft: Draft, key: str) -> None:
    if draft.is_on(key):
        draft.leave(key, "frozen weights in 4 or 8 bits are qlora's: --with qlora")
    else:
        draft.idle(key)


def _optimizer(draft: Draft, key: str) -> None:
    name = str(draft.value(key)).lower()
    if name in EIGHT_BITS:
        draft.carry(key, *draft.add("adamw_8bit"))
    elif name in SAME_OPTIMIZER:
        draft.idle(key, "every plan has AdamW without a name")
    elif name in OTHERS:
        draft.carry(key, *draft.add(OTHERS[name]))
    else:
        draft.leave(key, "AdamW stands in its place; headrace list names other optimizers")


def _rate(draft: Draft, key: str) -> None:
    rate = as_number(draft.value(key))
    if rate is None:
        draft.leave(key, "it is no number")
        return
    words = [draft.put("optimizer.lr", float(rate))]
    if str(draft.value("optimizer")).lower() == "muon":
        words.append(draft.add("muon", lr=float(rate))[-1])
    draft.carry(key, *words)


def _curve(draft: Draft, key: str) -> None:
    curves = ("cosine", "constant", "inverse_sqrt")
    name = str(draft.value(key))
    final = draft.number("cosine_min_lr_ratio", 0.0)
    if name == "linear":
        words = [draft.put("schedule.kind", "warmup_stable_decay")]
        words.append(draft.put("schedule.decay_fraction", 1.0))
        words.append(draft.put("schedule.final_fraction", 0.0))
        draft.near(key, *words, why="it falls from the first step on, and rises in the warmup")
    elif name in curves:
        word = draft.put("schedule.kind", name)
        draft.carry(key, word, draft.put("schedule.final_fraction", float(final)))
    else:
        draft.leave(key, "schedule.kind is cosine, warmup_stable_decay, inverse_sqrt or constant")


def _half(draft: Draft, key: str) -> None:
    value = draft.value(key)
    if is_off(value):
        draft.idle(key)
    elif value == "full":
        draft.near(key, draft.put("model.precision", "bf16"), why="weights stay in fp32")
    elif key == "bf16":
        word = draft.put("model.precision", "auto" if value == "auto" else "bf16")
        draft.carry(key, word)
    else:
        word = draft.put("model.precision", "fp16")
        draft.carry(key, word, *draft.add("fp16_loss_scaling"))


def _beta(draft: Draft, key: str) -> None:
    both = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    draft.carry(key, draft.put("optimizer.betas", both))


def _validated(draft: Draft, key: str) -> None:
    share = draft.number(key)
    if 0 < share < 1:
        draft.carry(key, draft.put("data.validation", float(share)))
    elif share:
        draft.leave(key, "data.validation is a share of the documents, or a path")
    else:
        draft.near(key, why="a plan always holds text out: 5% of it")


def _preference(draft: Draft, key: str) -> None:
    losses = {"dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "ipo": "ipo"}
    name = str(draft.value(key)).lower()
    if name in losses:
        draft.carry(key, *draft.add("preference", loss=losses[name]))
        beta = draft.number("rl_beta")
        if beta:
            draft.carry("rl_beta", draft.add("preference", beta=float(beta))[-1])
    else:
        draft.leave(key, "losses of pairs are knobs of the technique preference")


def _packed(draft: Draft, key: str) -> None:
    if draft.is_on(key) and not draft.is_on("rl"):
        draft.carry(key, *draft.add("best_fit_packing"))
    elif draft.is_on(key):
        draft.idle(key, "pairs always lie side by side in their rows")
    else:
        draft.near(key, why="rows are always full here; --with best_fit_packing keeps texts whole")


def _inputs(draft: Draft, key: str) -> None:
    if draft.is_on(key) and "chat" in draft.tables.get("data", {}):
        draft.carry(key, draft.put("data.chat.train_on", "all"))
    else:
        draft.idle(key, "data.chat counts answers alone")


def _per_pass(what: str, path: str) -> KeyRule:
    """Return a rule for how often something is done in a pass over the text."""

    def rule(draft: Draft, key: str) -> None:
        if draft.is_on(key):
            draft.leave(key, f"{path}=N counts steps between {what}, and passes are not known")
        else:
            draft.idle(key)

    return rule


def _attends(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if key == "attn_implementation" and not name.startswith("flash"):
        draft.near(key, why="torch chooses a backend; attention=measured times them")
    elif draft.is_on(key):
        draft.near(
            key, why="torch takes flash attention where it can; attention=measured times all"
        )
    else:
        draft.idle(key)


_SHARDS = "fsdp wraps each block, and its checkpoints are readable under any layout"
RULES: Mapping[str, KeyRule] = {
    "base_model": _base,
    "reinit_weights": switch("weight_init", "new weights follow weight_init's rule"),
    "model_type": always("config.json beside the weights says it"),
    "tokenizer_type": always("tokenizer.json is read"),
    "trust_remote_code": never("no code of a model is ever run"),
    "sequence_len": to("data.sequence_length"),
    "adapter": _adapter,
    "load_in_8bit": _quantized,
    "load_in_4bit": _quantized,
    "lora_r": _with_adapter,
    "lora_alpha": _with_adapter,
    "lora_dropout": _with_adapter,
    "lora_target_linear": _with_adapter,
    "lora_target_modules": _with_adapter,
    "lora_modules_to_save": _with_adapter,
    "lora_model_dir": text_to("model.adapter"),
    "rl": _preference,
    "rl_beta": never("it counts with dpo, ipo, simpo and orpo alone"),
    "chat_template": never("data.chat.template=FILE; without it, the tokenizer's own"),
    "val_set_size": _validated,
    "sample_packing": _packed,
    "eval_sample_packing": always("validation reads rows as training does"),
    "pad_to_sequence_len": always("rows are full"),
    "train_on_inputs": _inputs,
    "group_by_length": always("rows are full, so their lengths are one"),
    "dataset_prepared_path": to("data.directory"),
    "output_dir": to("directory"),
    "wandb_project": lambda draft, key: draft.carry(key, draft.put("track.to", ["wandb"])),
    "wandb_name": text_to("name"),
    "learning_rate": _rate,
    "optimizer": _optimizer,
    "lr_scheduler": _curve,
    "cosine_min_lr_ratio": always("counts only with lr_scheduler: cosine"),
    "weight_decay": to("optimizer.weight_decay"),
    "adam_beta1": _beta,
    "adam_beta2": _beta,
    "adam_epsilon": to("optimizer.eps"),
    "max_grad_norm": to("optimizer.clip_norm"),
    "neftune_noise_alpha": lambda draft, key: draft.carry(
        key, *draft.add("neftune", alpha=float(draft.number(key)))
    ),
    "bf16": _half,
    "fp16": _half,
    "fp8": switch("float8_linear"),
    "tf32": switch("tf32"),
    "torch_compile": switch("torch_compile", scope="block"),
    "gradient_checkpointing": switch("full_checkpoint"),
    "gradient_checkpointing_kwargs.use_reentrant": always("full_checkpoint does not reenter"),
    "activation_offloading": switch("activation_offload", "results go to the host and come back"),
    "tiled_mlp": switch("chunked_mlp"),
    "flash_attention": _attends,
    "xformers_attention": _attends,
    "sdp_attention": _attends,
    "flex_attention": switch("flex_attention"),
    "attn_implementation": _attends,
    "liger_fused_linear_cross_entropy": switch("chunked_cross_entropy"),
    "liger_rms_norm": switch("liger_kernels", "its kernels come together"),
    "liger_glu_activation": switch("liger_kernels", "its kernels come together"),
    "liger_rope": switch("fused_rope"),
    "plugins": never("what a plugin switches on is a key of its own here"),
    "fsdp_version": always("fsdp is torch's fully_shard"),
    **{
        f"fsdp_config.{prefix}{name}": always(_SHARDS)
        for prefix in ("", "fsdp_")
        for name in (
            *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "state_dict_type", "version"),
            *("sharding_strategy", "reshard_after_forward", "cpu_ram_efficient_loading"),
        )
    },
    **{
        f"fsdp_config.{prefix}offload_params": switch("optimizer_offload", "weights stay")
        for prefix in ("", "fsdp_")
    },
    **{
        f"fsdp_config.{prefix}activation_checkpointing": switch("full_checkpoint")
        for prefix in ("", "fsdp_")
    },
    "evals_per_epoch": _per_pass("evaluations", "eval.every_steps"),
    "eval_steps": to("eval.every_steps"),
    "saves_per_epoch": _per_pass("checkpoints", "checkpoint.every_steps"),
    "save_steps": to("checkpoint.every_steps"),
    "save_total_limit": to("checkpoint.keep_last"),
    "save_only_model": always("a run can go on from its last checkpoint"),
    "logging_steps": always("metrics.jsonl has a row of every step"),
    "resume_from_checkpoint": never("headrace train PLAN --resume"),
    "seed": to("seed"),
    "special_tokens.pad_token": always("rows are full, and nothing is padded"),
    **{
        f"special_tokens.{name}_token": never("the tokenizer's own are used")
        for name in ("bos", "eos", "unk")
    },
    "min_sample_len": never("headrace data inspect shows lengths; rows are not chosen by them"),
    "strict": always("keys are always checked"),
    "loss_watchdog_threshold": never("techniques.spike_rewind goes back where the loss jumps"),
    "loss_watchdog_patience": never("techniques.spike_rewind goes back where the loss jumps"),
    "dp_shard_size": always("the batch says over how many ranks"),
}
"""What becomes of each key; `_mesh`, `_rows`, `_length` and `_source` stand before."""
