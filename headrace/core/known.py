"""Well-known names of training methods that are no technique here, and what comes nearest."""

KNOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lion", "adafactor", "shampoo", "soap", "adam", "sgd", "prodigy", "lamb",
                     "lars", "adagrad", "rmsprop", "adopt", "ademamix", "cautious", "came", "dion",
                     "adan", "nadam", "radam", "mars"),
                    ("muon", "sophia")),
    **dict.fromkeys(("galore", "apollo", "8bit", "adam8bit", "adamw8bit", "bitsandbytes",
                     "paged_adamw", "paged_adamw_8bit", "adamw_bnb_8bit", "adam_mini"),
                    ("adamw_8bit",)),
    **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "deepspeed", "ddp", "fsdp2", "hsdp",
                     "zero_1", "zero_2", "zero_3", "distributed_optimizer"),
                    ("fsdp",)),
    **dict.fromkeys(("zero_offload", "cpu_offload", "offload"),
                    ("optimizer_offload", "activation_offload")),
    **dict.fromkeys(("megatron", "tp", "async_tp", "loss_parallel", "tensor_model_parallel"),
                    ("tensor_parallel",)),
    **dict.fromkeys(("pp", "gpipe", "zero_bubble", "1f1b", "dualpipe"), ("pipeline_parallel",)),
    **dict.fromkeys(("ring_attention", "ulysses", "cp", "ulysses_sp"), ("context_parallel",)),
    "sequence_parallel": ("tensor_parallel", "context_parallel"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recompute",
                     "recompute_activations", "ac", "activation_checkpoint"),
                    ("full_checkpoint", "selective_checkpoint")),
    **dict.fromkeys(("flash_attn", "flash", "sdpa", "fa2", "xformers"), ("flash_attention",)),
    **dict.fromkeys(("fa3", "flash_attn_3"), ("flash_attention_3",)),
    **dict.fromkeys(("bf16", "amp", "autocast", "mixed_precision"), ("bf16_autocast",)),
    **dict.fromkeys(("fp16", "grad_scaler"), ("fp16_loss_scaling",)),
    **dict.fromkeys(("fp8", "transformer_engine", "mxfp8", "mxfp4", "nvfp4"), ("float8_linear",)),
    **dict.fromkeys(("qat", "gptq", "awq", "int8", "int4", "nf4", "quantization"), ("qlora",)),
    **dict.fromkeys(("dora", "peft", "adapters", "ia3", "prefix_tuning", "loraplus", "lora_plus",
                     "rslora", "pissa", "vera", "relora", "loftq", "lisa", "spectrum"),
                    ("lora", "qlora")),
    **dict.fromkeys(("unsloth", "liger", "apex"), ("liger_kernels",)),
    **dict.fromkeys(("moe", "switch", "mixtral", "expert_parallel", "ep", "grouped_gemm"),
                    ("mixture_of_experts",)),
    **dict.fromkeys(("mqa", "mla"), ("gqa",)),
    **dict.fromkeys(("swa_attention", "longformer"), ("sliding_window",)),
    **dict.fromkeys(("ntk", "rope_scaling", "longrope"), ("yarn",)),
    **dict.fromkeys(("mamba", "rwkv", "deltanet", "gla"), ("linear_attention",)),
    **dict.fromkeys(("compile", "inductor", "dynamo"), ("torch_compile",)),
    **dict.fromkeys(("packing", "sequence_packing", "sample_packing", "multipack"),
                    ("document_packing",)),
    **dict.fromkeys(("kd", "knowledge_distillation"), ("distillation",)),
    **dict.fromkeys(("dropout", "layerdrop", "droppath"), ("stochastic_depth",)),
    **dict.fromkeys(("fused_adam", "galore_layerwise", "lomo"), ("optimizer_in_backward",)),
    **dict.fromkeys(("ema", "swa", "schedule_free", "lookahead", "sam", "paged_attention", "vllm",
                     "pruning", "dpo", "ppo", "grpo", "orpo", "kto",
                     "simpo", "rlhf", "reinforce", "rloo", "neftune", "mixup"), ()),
}  # fmt: skip
"""Each name with the techniques that serve the same end; none where there is nothing like it."""


def near_to(name: str) -> str | None:
    """Return the technique that comes nearest in meaning to a well-known name; None of any other.

    It is "" where nothing here comes near.
    """
    near = KNOWN.get(_folded(name))
    return None if near is None else next(iter(near), "")


def _folded(name: str) -> str:
    return name.lower().replace("-", "_")


def told_of(name: str) -> str | None:
    """Return what a user is told of a well-known `name` that is not here; None of any other."""
    key = _folded(name)
    if key not in KNOWN:
        return None
    near = " or ".join(KNOWN[key])
    end = f"nearest in meaning: {near}" if near else "nothing here comes near it"
    return f"there is no technique {name!r}: it is a known method that is not built here; {end}"
