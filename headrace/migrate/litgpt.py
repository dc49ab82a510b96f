"""Make a plan of a YAML config of litgpt, for pretraining and for fine-tuning.

Keys are those of `config_hub/` (github.com/Lightning-AI/litgpt: `pretrain/tinystories.yaml`,
`pretrain/tinyllama.yaml`, `finetune/llama-3.2-1B/lora.yaml`, `finetune/gemma2-2b/qlora.yaml`),
defaults those of `litgpt/args.py`, and shapes those of `litgpt/config.py`.
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
    never,
    text_to,
    to,
)
from headrace.migrate.read import read_yaml
from headrace.migrate.sizes import set_passes, set_rows

DEFAULTS: Mapping[str, Any] = {
    "train.global_batch_size": 64,
    "train.micro_batch_size": 1,
    "train.lr_warmup_steps": 100,
    "train.save_interval": 1000,
    "eval.interval": 600,
    "optimizer.init_args.lr": 1e-3,
    "optimizer.init_args.weight_decay": 0.01,
    "optimizer.init_args.betas": [0.9, 0.999],
    "seed": 42,
}
"""What litgpt and torch's AdamW take where a config does not say it."""
NAMES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3-8B": {"family": "llama3-8b"},
    "Llama-3.2-1B": {"family": "llama3-1b"},
    "Llama-3.2-3B": {"family": "llama3-3b"},
    "Qwen2.5-0.5B": {"family": "qwen2.5-0.5b"},
    "Qwen2.5-1.5B": {"family": "qwen2.5-1.5b"},
    "SmolLM2-135M": {"family": "smollm2-135m"},
    "SmolLM2-360M": {"family": "smollm2-360m"},
    "SmolLM2-1.7B": {"family": "smollm2-1.7b"},
    "Gemma-2-2b": {"family": "gemma2-2b"},
    "Gemma-2-9b": {"family": "gemma2-9b"},
    "tiny-llama-1.1b": {
        **{"dim": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn": 5632},
        **{"vocab": 32_000, "norm_eps": 1e-5},
    },
    "micro-llama-300M": {
        **{"dim": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 5632},
        **{"vocab": 32_000, "norm_eps": 1e-5},
    },
    "stories15M": {"dim": 288, "layers": 6, "heads": 6, "ffn": 768, "vocab": 32_000},
}
"""Names of models that are pretrained -> `model.*` of a plan."""
MLPS = {"LLaMAMLP": "swiglu", "GemmaMLP": "geglu", "GptNeoxMLP": "gelu"}
"""Classes of litgpt's MLPs -> `model.activation`."""
NORMS = {"RMSNorm": "rms_norm", "LayerNorm": "layer_norm"}
"""Names of litgpt's norms -> `model.norm`."""
LORA = {
    "lora_query": "mixer.qkv",
    "lora_key": "mixer.qkv",
    "lora_value": "mixer.qkv",
    "lora_projection": "mixer.out",
    "lora_mlp": "mlp",
}
"""Switches of litgpt's adapters -> ends of names here."""


def import_litgpt(file: Path, ranks: int) -> Draft:
    """Return the draft of a plan that says what a config of litgpt does.

    Args:
        file: the YAML file.
        ranks: processes that it was run on, where it leaves `devices` to what is there.

    Raises:
        ConfigError: the file is no YAML.
    """
    values = flat(read_yaml(file), str(file))
    shape = "model" if any(key.startswith("model.") for key in values) else "model_config"
    named = next((k for k in ("model_name", f"{shape}.name") if values.get(k)), "")
    draft = Draft("litgpt", values, DEFAULTS, ranks)
    _model(draft, shape, named)
    _devices(draft)
    _rows(draft, shape)
    _length(draft)
    _final(draft)
    if "lora_r" in values:
        _adapter(draft)
    draft.follow({**RULES, **_shape_rules(shape)})
    return draft


def _model(draft: Draft, shape: str, named: str) -> None:
    """Set `model.*` by the model's name, unless the config has the sizes themselves."""
    if draft.is_on(f"{shape}.n_layer"):
        for key in ("model_name", f"{shape}.name"):
            draft.idle(key, "its sizes stand beside it")
        if not draft.is_on(f"{shape}.norm_class_name"):
            draft.need("model.norm", "layer_norm", "litgpt's default")
        if not draft.is_on(f"{shape}.mlp_class_name"):
            draft.need("model.activation", "gelu", "litgpt's default")
        return
    if named:
        name = str(draft.value(named))
        if name in NAMES:
            words = [draft.put(f"model.{key}", value) for key, value in NAMES[name].items()]
            draft.carry(named, *words)
        else:
            draft.leave(named, "model.family names a shape: headrace list --families")


def _shape_rules(shape: str) -> dict[str, KeyRule]:
    """Return the rules of a model's sizes, which stand in `model` or in `model_config`."""
    whole = {
        "n_layer": "layers",
        "n_head": "heads",
        "n_query_groups": "kv_heads",
        "n_embd": "dim",
        "head_size": "head_dim",
        "intermediate_size": "ffn",
        "norm_eps": "norm_eps",
        "rope_base": "rope_theta",
        "padded_vocab_size": "vocab",
        "bias": "bias",
        "sliding_window_size": "window",
        "final_logit_softcapping": "logit_cap",
        "attention_logit_softcapping": "attention_cap",
    }
    rules = {name: to(f"model.{key}") for name, key in whole.items()}
    rules |= {
        "norm_class_name": _class("model.norm", NORMS),
        "mlp_class_name": _class("model.activation", MLPS),
        "block_size": _block,
        "vocab_size": always("padded_vocab_size counts the rows of the table"),
        "padding_multiple": always("padded_vocab_size counts the rows of the table"),
        "rotary_percentage": never("all features of a head are rotated", 1, 1.0),
        "parallel_residual": never("attention and MLP follow each other here"),
        "shared_attention_norm": never("each part of a block has its norm"),
        "lm_head_bias": never("the output matrix has no bias"),
        "scale_embeddings": never("model.embedding_scale=SQRT_OF_DIM scales them"),
        "rope_condense_ratio": never("model.rope_scaling.kind=linear slows rotations", 1),
        "hf_config": never("names of the model elsewhere"),
        "gelu_approximate": never("model.activation=gelu_tanh is the approximate one", "none"),
        "n_expert": never("experts are a technique: --with mixture_of_experts"),
        "n_expert_per_token": never("techniques.mixture_of_experts.top_k"),
        "name": always("its sizes stand beside it"),
    }
    return {f"{shape}.{name}": rule for name, rule in rules.items()}


def _class(path: str, names: Mapping[str, str]) -> KeyRule:
    def rule(draft: Draft, key: str) -> None:
        name = str(draft.value(key))
        if name in names:
            draft.carry(key, draft.put(path, names[name]))
        else:
            draft.leave(key, f"{path} has {', '.join(names.values())}")

    return rule


def _block(draft: Draft, key: str) -> None:
    draft.near(key, why="data.sequence_length says how long rows are; rotations have no limit")


def _devices(draft: Draft) -> None:
    """Set `mesh.data`: litgpt cuts all weights over its processes."""
    devices, nodes = draft.value("devices"), max(1, draft.whole("num_nodes", 1))
    count = as_number(devices)
    ranks = draft.ranks if count is None else max(1, int(count)) * nodes
    words = [draft.put("mesh.data", ranks), *(draft.add("fsdp") if ranks > 1 else ())]
    if count is None:
        draft.near("devices", *words, why="--ranks N says how many there are")
    else:
        draft.carry("devices", *words)
    draft.idle("num_nodes", "devices x nodes are mesh.data")


def _rows(draft: Draft, shape: str) -> None:
    """Set the rows of a step, and how long they are."""
    length = draft.whole("train.max_seq_length") or draft.whole(f"{shape}.block_size") or 2048
    word = draft.put("data.sequence_length", max(2, length))
    key = "train.max_seq_length"
    if draft.is_on(key):
        draft.carry(key, word)
    else:
        draft.idle(key, "has no value")
        draft.need("data.sequence_length", length, "of the model's longest rows, else 2048")
    data = draft.tables["mesh"]["data"]
    rows = max(1, draft.whole("train.global_batch_size", 64))
    rows = -(-rows // data) * data
    set_rows(draft, "train.micro_batch_size", "train.global_batch_size", rows, max(2, length))


def _length(draft: Draft) -> None:
    """Set what ends the run: steps, tokens, or passes over the text."""
    steps, tokens = draft.whole("train.max_steps"), draft.whole("train.max_tokens")
    for key, count, path in (
        ("train.max_steps", steps, "goal.steps"),
        ("train.max_tokens", tokens, "goal.tokens"),
    ):
        if count > 0:
            draft.carry(key, draft.put(path, count))
        else:
            draft.idle(key, "has no value")
    if steps > 0 or tokens > 0:
        draft.idle("train.epochs", "steps or tokens end the run sooner")
    else:
        set_passes(draft, "train.epochs")


def _final(draft: Draft) -> None:
    """Set the curve: a warmup and a cosine that ends at `min_lr`, which is a rate."""
    rate = draft.number("optimizer.init_args.lr", 1e-3)
    rate = draft.number("train.learning_rate", rate) or 1e-3
    low = draft.number("train.min_lr")
    draft.put("schedule.kind", "cosine")
    word = draft.put("schedule.final_fraction", round(min(1.0, max(0.0, low / rate)), 9))
    draft.carry("train.min_lr", "schedule.kind=cosine", word)


def _adapter(draft: Draft) -> None:
    """Set the adapters: lora, or qlora where the frozen weights are quantized."""
    kind = str(draft.value("quantize", "") or "")
    technique = "qlora" if "nf4" in kind or "int8" in kind else "lora"
    knobs: dict[str, Any] = {"base": "int8"} if "int8" in kind else {}
    knobs |= {"rank": draft.whole("lora_r", 8), "alpha": float(draft.number("lora_alpha", 16))}
    if draft.is_on("lora_dropout"):
        knobs["dropout"] = float(draft.number("lora_dropout"))
    chosen = {LORA[key] for key in LORA if draft.is_on(key)}
    ends = {"mixer.qkv", "mixer.out"} & chosen
    ends |= {"mlp.gate_up", "mlp.down"} if "mlp" in chosen else set()
    if ends and ends != {"mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down"}:
        knobs["targets"] = sorted(ends)
    if draft.is_on("lora_head"):
        knobs["train_also"] = ["head"]
    words = draft.add(technique, **knobs)
    draft.carry("lora_r", *words)
    draft.carry("lora_alpha", words[-1])
    draft.near("lora_dropout", *words, why="the same features are left out for a whole step")
    if technique == "qlora":
        draft.carry("quantize", *words)
    why = "queries, keys and values are one linear here, and gate and up another"
    for key in (*LORA, "lora_head"):
        if draft.is_on(key):
            more = "the head learns whole, not by an adapter" if key == "lora_head" else why
            draft.near(key, *words, why=more)


def _precision(draft: Draft, key: str) -> None:
    names = {"bf16-mixed": "bf16", "32-true": "fp32", "bf16-true": "bf16", "16-mixed": "fp16"}
    name = str(draft.value(key))
    if name not in names:
        draft.leave(key, "model.precision is fp32, bf16 or fp16")
        return
    word = draft.put("model.precision", names[name])
    if name == "bf16-true":
        why = "weights stay in fp32; --with bf16_parameters keeps them in bf16"
        draft.near(key, word, why=why)
    elif name == "16-mixed":
        draft.carry(key, word, *draft.add("fp16_loss_scaling"))
    else:
        draft.carry(key, word)


def _data(draft: Draft, key: str) -> None:
    """Note a class of litgpt's data, which is code: where its text lies must be said anew."""
    draft.leave(key, "data.sources takes a file, a folder or hf:NAME; stdlib stands there now")
    draft.need("data.sources", "stdlib", "a text that is on every machine")


def _prompt(draft: Draft, key: str) -> None:
    draft.leave(key, "with data.chat.kind=auto the chat template writes prompts and counts answers")


def _logger(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if name in ("tensorboard", "wandb", "mlflow"):
        draft.carry(key, draft.put("track.to", [name]))
    else:
        draft.idle(key, "metrics.jsonl has a row of every step")


def _tokenizer(draft: Draft, key: str) -> None:
    draft.carry(key, draft.put("data.tokenizer", str(draft.value(key))))


def _optimizer(draft: Draft, key: str) -> None:
    name = str(draft.value(key)).rpartition(".")[2]
    if name in ("AdamW", "FusedAdam"):
        draft.idle(key, "every plan has AdamW without a name")
    else:
        draft.leave(key, "AdamW stands in its place; headrace list names other optimizers")


_FOLDER = "a folder of safetensors and config.json, not litgpt's lit_model.pth"
_RATE = to("optimizer.lr")
RULES: Mapping[str, KeyRule] = {
    "checkpoint_dir": text_to(
        "model.pretrained",
        why="a folder of safetensors and config.json, not litgpt's lit_model.pth",
    ),
    "initial_checkpoint_dir": text_to(
        "model.pretrained",
        why="a folder of safetensors and config.json, not litgpt's lit_model.pth",
    ),
    "out_dir": to("directory"),
    "precision": _precision,
    "quantize": never("frozen weights in few bits are qlora's: --with qlora"),
    "tokenizer_dir": _tokenizer,
    "data": _data,
    "data.class_path": _data,
    "data.init_args.train_data_path": text_to("data.sources"),
    "data.init_args.val_data_path": text_to("data.validation"),
    "data.init_args.val_split_fraction": to("data.validation"),
    "data.init_args.mask_prompt": _prompt,
    "data.init_args.prompt_style": _prompt,
    "data.init_args.ignore_index": always("ignored targets are -100"),
    "data.init_args.num_workers": to("data.workers"),
    "data.init_args.seed": never("seed decides the order of rows"),
    "train.learning_rate": _RATE,
    "optimizer.init_args.lr": _RATE,
    "train.weight_decay": to("optimizer.weight_decay"),
    "optimizer.init_args.weight_decay": to("optimizer.weight_decay"),
    "optimizer.init_args.betas": to("optimizer.betas"),
    "train.beta1": lambda draft, key: draft.carry(
        key, draft.put("optimizer.betas", [draft.number(key), draft.number("train.beta2", 0.95)])
    ),
    "train.beta2": lambda draft, key: draft.carry(
        key, draft.put("optimizer.betas", [draft.number("train.beta1", 0.9), draft.number(key)])
    ),
    "optimizer.class_path": _optimizer,
    "optimizer": _optimizer,
    "train.max_norm": to("optimizer.clip_norm"),
    "train.lr_warmup_steps": to("schedule.warmup_steps"),
    "train.save_interval": to("checkpoint.every_steps"),
    "train.log_interval": always("metrics.jsonl has a row of every step"),
    "train.tie_embeddings": to("model.tied_embeddings"),
    "eval.interval": to("eval.every_steps"),
    "eval.max_iters": lambda draft, key: draft.carry(
        key,
        draft.put(
            "eval.tokens",
            draft.whole(key, 100)
            * draft.whole("train.micro_batch_size", 1)
            * draft.tables["data"]["sequence_length"],
        ),
    ),
    "eval.max_new_tokens": never("headrace sample RUN continues a prompt"),
    "eval.initial_validation": to("eval.before"),
    "eval.final_validation": always("a run always ends with an evaluation"),
    "logger_name": _logger,
    "seed": to("seed"),
    "resume": never("headrace train PLAN --resume"),
}
"""What becomes of each key that is no size of a model."""
