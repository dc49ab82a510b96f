"""Well-known names of training methods that are no technique here, and what comes nearest."""

KNOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lion", "adafactor", "shampoo", "soap", "adam", "sgd", "prodigy", "lamb",
                     "lars", "adagrad", "rmsprop", "adopt", "ademamix", "cautious", "came", "dion",
                     "adan", "nadam", "radam", "mars", "sign_sgd", "signsgd", "signum", "tiger",
                     "kron",
                     "psgd", "scion", "normuon", "adamuon", "spam", "adamax", "ranger", "adabelief",
                     "novograd", "schedule_free_adamw", "grams", "fromage", "distributed_shampoo"),
                    ("muon", "sophia")),
    **dict.fromkeys(("galore", "apollo", "8bit", "adam8bit", "adamw8bit", "bitsandbytes",
                     "paged_adamw", "paged_adamw_8bit", "adamw_bnb_8bit", "adam_mini"),
                    ("adamw_8bit",)),
    **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "deepspeed", "ddp", "fsdp2", "hsdp",
                     "zero_1", "zero_2", "zero_3", "distributed_optimizer", "deepspeed_zero3",
                     "deepspeed_zero2", "accelerate", "data_parallel", "fairscale", "simple_fsdp"),
                    ("fsdp",)),
    **dict.fromkeys(("zero_offload", "cpu_offload", "offload"),
                    ("optimizer_offload", "activation_offload")),
    **dict.fromkeys(("megatron", "tp", "async_tp", "loss_parallel", "tensor_model_parallel"),
                    ("tensor_parallel",)),
    **dict.fromkeys(("pp", "gpipe", "zero_bubble", "1f1b", "dualpipe"), ("pipeline_parallel",)),
    **dict.fromkeys(("ring_attention", "ulysses", "cp", "ulysses_sp"), ("context_parallel",)),
    "sequence_parallel": ("tensor_parallel", "context_parallel"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing", "recompute",
                     "recompute_activations", "ac", "activation_checkpoint", "checkpointing",
                     "rematerialization", "remat", "sac"),
                    ("full_checkpoint", "selective_checkpoint")),
    **dict.fromkeys(("flash_attn", "flash", "sdpa", "fa2", "xformers", "flash_attention_2",
                     "flash_attn_2", "memory_efficient_attention"), ("flash_attention",)),
    **dict.fromkeys(("fa3", "flash_attn_3", "fa4", "flash_attention_4", "flash_attn_4"),
                    ("flash_attention_3",)),
    **dict.fromkeys(("bf16", "amp", "autocast", "mixed_precision"), ("bf16_autocast",)),
    **dict.fromkeys(("fp16", "grad_scaler"), ("fp16_loss_scaling",)),
    **dict.fromkeys(("fp8", "transformer_engine", "mxfp8", "mxfp4", "nvfp4", "torchao",
                     "int8_mixed", "fp8_linear", "te"), ("float8_linear",)),
    **dict.fromkeys(("qat", "gptq", "awq", "int8", "int4", "nf4", "quantization", "hqq",
                     "smoothquant", "bitnet", "aqlm", "quip", "eetq", "ptq", "gguf", "llm_int8"),
                     ("qlora",)),
    **dict.fromkeys(("dora", "peft", "adapters", "ia3", "prefix_tuning", "loraplus", "lora_plus",
                     "rslora", "pissa", "vera", "relora", "loftq", "lisa", "spectrum"),
                    ("lora", "qlora")),
    **dict.fromkeys(("unsloth", "liger", "apex"), ("liger_kernels",)),
    **dict.fromkeys(("moe", "switch", "mixtral", "expert_parallel", "ep", "grouped_gemm",
                     "deepseek_moe", "experts", "megablocks", "mixture_of_depths"),
                    ("mixture_of_experts",)),
    **dict.fromkeys(("mqa", "mla", "grouped_query_attention", "multi_query_attention",
                     "multi_head_latent_attention"), ("gqa",)),
    **dict.fromkeys(("swa_attention", "longformer", "sliding_window_attention", "local_attention",
                     "streaming_llm", "attention_sinks"), ("sliding_window",)),
    **dict.fromkeys(("ntk", "rope_scaling", "longrope", "rope_ntk", "dynamic_ntk", "dca",
                     "position_interpolation", "linear_scaling", "self_extend"), ("yarn",)),
    **dict.fromkeys(("mamba", "rwkv", "deltanet", "gla", "mamba2", "hyena", "retnet", "xlstm",
                     "gated_deltanet", "kda", "kimi", "ssm", "performer", "linformer", "mamba_2"),
                     ("linear_attention",)),
    **dict.fromkeys(("nsa", "dsa", "native_sparse_attention", "moba", "bigbird",
                     "block_sparse_attention"), ("sparse_attention",)),
    **dict.fromkeys(("rotary", "rotary_embedding", "rotary_embeddings"), ("rope",)),
    **dict.fromkeys(("curriculum", "curriculum_learning", "seq_len_warmup", "slw",
                     "sequence_length_warmup"), ("sequence_length_schedule",)),
    **dict.fromkeys(("cudagraphs", "cuda_graph"), ("cuda_graphs",)),
    **dict.fromkeys(("weight_tying", "tie_word_embeddings"), ("tied_embeddings",)),
    **dict.fromkeys(("cut_cross_entropy", "cce", "chunked_loss", "fused_linear_cross_entropy"),
                    ("chunked_cross_entropy", "fused_cross_entropy")),
    **dict.fromkeys(("compile", "inductor", "dynamo"), ("torch_compile",)),
    **dict.fromkeys(("packing", "sequence_packing", "sample_packing", "multipack"),
                    ("document_packing",)),
    **dict.fromkeys(("kd", "knowledge_distillation", "teacher", "gkd"), ("distillation",)),
    **dict.fromkeys(("dropout", "layerdrop", "droppath"), ("stochastic_depth",)),
    **dict.fromkeys(("fused_adam", "galore_layerwise", "lomo"), ("optimizer_in_backward",)),
    **dict.fromkeys(("ema", "swa", "schedule_free", "lookahead", "sam", "paged_attention", "vllm",
                     "pruning", "dpo", "ppo", "grpo", "orpo", "kto",
                     "simpo", "rlhf", "reinforce", "rloo", "neftune", "mixup", "sft", "mtp",
                     "multi_token_prediction", "fim", "kv_cache", "speculative_decoding", "medusa",
                     "eagle", "llama_cpp", "ollama", "chinchilla", "qk_clip", "lazy_adam",
                     "model_soup", "merging", "mergekit", "zero_plus_plus", "polyak", "r_drop"),
                     ()),
}  # fmt: skip
"""Each name with the techniques that serve the same end; none where there is nothing like it."""


BY_KEY: dict[str, str] = {
    **dict.fromkeys(("adamw", "torch_adamw"), "optimizer.lr=0.001"),
    **dict.fromkeys(("cosine", "cosine_decay", "cosine_schedule"), "schedule.kind=cosine"),
    **dict.fromkeys(("wsd", "trapezoidal"), "schedule.kind=warmup_stable_decay"),
    **dict.fromkeys(("warmup", "linear_warmup", "lr_warmup"), "schedule.warmup_steps=100"),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "clip_grad_norm", "clip_norm"),
                    "optimizer.clip_norm=1"),
    "weight_decay": "optimizer.weight_decay=0.1",
    **dict.fromkeys(("gradient_accumulation", "grad_accum", "accumulation", "micro_batching",
                     "microbatching"), "batch.micro_sequences=1"),
    **dict.fromkeys(("bpe", "tokenizer"), "data.tokenizer=bpe"),
    **dict.fromkeys(("rmsnorm", "rms_norm"), "model.norm=rms_norm"),
    **dict.fromkeys(("layernorm", "layer_norm"), "model.norm=layer_norm"),
    "swiglu": "model.activation=swiglu",
    **dict.fromkeys(("relu2", "squared_relu"), "model.activation=relu2"),
    "gelu": "model.activation=gelu",
    "nope": "model.position=none",
    **dict.fromkeys(("learned_positions", "absolute_positions"), "model.position=learned"),
    **dict.fromkeys(("qk_norm", "qknorm", "qk_layernorm"), "model.qk_norm=true"),
    **dict.fromkeys(("logit_softcap", "softcap"), "model.logit_cap=30"),
    **dict.fromkeys(("wandb", "weights_and_biases"), "track.to=[\"wandb\"]"),
    **{name: f"track.to=[\"{name}\"]" for name in ("tensorboard", "mlflow")},
    **dict.fromkeys(("profiler", "torch_profiler"), "trace.every_steps=100"),
}  # fmt: skip
"""Each name of what a plan does by a key, with that key and a value."""


def told_of(name: str) -> tuple[str, str] | None:
    """Return what a user is told of a well-known `name` that is not here; None of any other.

    The second part is the nearest technique, or the key that does it; empty where nothing does.
    """
    key = name.lower().strip("+")
    key = "".join(letter if letter.isalnum() else "_" for letter in key)
    opening = f"there is no technique {name!r}: it is"
    if key in BY_KEY:
        return f"{opening} what a key of the plan says, as in {BY_KEY[key]}", BY_KEY[key]
    if key not in KNOWN:
        return None
    near = " or ".join(KNOWN[key])
    end = f"nearest in meaning: {near}" if near else "nothing here comes near it"
    return f"{opening} a known method that is not built here; {end}", (*KNOWN[key], "")[0]
