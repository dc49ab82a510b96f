"""Describe architectures of transformers in our words: families as data.

Each is one class of transformers. hf_config reads its config.json by them and writes it, adapter
moves the tensors.

Gemma's norms multiply by 1 + weight: our weight is that sum, so every kernel of a norm serves them,
and both compute the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Architecture:
    """An architecture is one class of transformers, described in our words.

    Args:
        name: the class, as `architectures` of config.json has it.
        model_type: its `model_type`.
        implies: our keys and the values that it can be; the first is the nearest to any other.
        fields: our keys that are numbers of its config, and what they are called there.
        absent: our values for `fields` that config.json may leave out or null.
        fixed: its fields that change the mathematics, and the one value that we model.
        block: the prefix of a block's modules.
        modules: what each of our modules is called; several names make one fused matrix.
        conv1d: matrices of its blocks are stored as [in, out].
        extra: fields that are written beside the others.
        defaults: its fields whose default in the class says something of ours.
        norm_offset: what its norms add to their weights, where our weights are the sums.
        windows: which layers have a window: all, those of `layer_types`, or none.
    """

    name: str
    model_type: str
    implies: Mapping[str, tuple[Any, ...]]
    fields: Mapping[str, str]
    absent: Mapping[str, Any]
    fixed: Mapping[str, Any]
    block: str
    modules: Names
    conv1d: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    windows: Literal["none", "all", "layer_types"] = "none"


_LLAMA_FIELDS = {
    "vocab": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA_MODULES: Names = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "mixer_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mixer.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_OURS_ALONE: dict[str, tuple[Any, ...]] = {
    "embedding_norm": (False,),
    "embedding_residual": (False,),
    "value_embeddings": (0,),
    "bigram_multiple": (0,),
    "embedding_smear": (False,),
}
"""Keys that no architecture has, and the value at which they do nothing."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    **_OURS_ALONE,
    "logit_cap": (0.0,),
    "attention_cap": (0.0,),
    "query_scale": (1.0,),
    "embedding_scale": (1.0,),
    "post_norms": (False,),
    "local_rope_theta": (0.0,),
    "window": (0,),
    "window_between": (0,),
    "qkv_bias": (False,),
}
"""Keys that most architectures have not, and the value at which they do nothing."""
_LLAMA_PARTS = {
    "norm": ("rms_norm",),
    "activation": ("swiglu",),
    "position": ("rope",),
    **_PLAIN,
}

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    implies={**_LLAMA_PARTS, "qk_norm": (False,), "bias": (False, True)},
    fields=_LLAMA_FIELDS,
    absent={"kv_heads": 0, "head_dim": 0, "norm_eps": 1e-6, "tied_embeddings": False},
    fixed={"hidden_act": "silu"},
    block="model.layers.{}.",
    modules=_LLAMA_MODULES,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    implies={**_LLAMA_PARTS, "qk_norm": (True,), "bias": (False,)},
    fields=_LLAMA_FIELDS,
    absent={"head_dim": 128, "norm_eps": 1e-6, "tied_embeddings": False},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    block="model.layers.{}.",
    modules={
        **_LLAMA_MODULES,
        "mixer.q_norm": ("self_attn.q_norm",),
        "mixer.k_norm": ("self_attn.k_norm",),
    },
)
QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    implies={**_LLAMA_PARTS, "qk_norm": (False,), "bias": (False,), "qkv_bias": (True,)},
    fields={key: theirs for key, theirs in _LLAMA_FIELDS.items() if key != "head_dim"},
    absent={"kv_heads": 32, "norm_eps": 1e-6, "tied_embeddings": False},
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    block="model.layers.{}.",
    modules=_LLAMA_MODULES,
)
MISTRAL = Architecture(
    name="MistralForCausalLM",
    model_type="mistral",
    implies={
        **{key: values for key, values in _LLAMA_PARTS.items() if key != "window"},
        "qk_norm": (False,),
        "bias": (False,),
    },
    fields=_LLAMA_FIELDS,
    absent={"kv_heads": 8, "head_dim": 0, "norm_eps": 1e-6, "tied_embeddings": False},
    fixed={"hidden_act": "silu"},
    block="model.layers.{}.",
    modules=_LLAMA_MODULES,
    defaults={"sliding_window": 4096},
    windows="all",
)
PHI3 = Architecture(
    name="Phi3ForCausalLM",
    model_type="phi3",
    implies=MISTRAL.implies,
    fields={key: theirs for key, theirs in _LLAMA_FIELDS.items() if key != "head_dim"},
    absent={"kv_heads": 0, "norm_eps": 1e-5, "tied_embeddings": False},
    fixed={"hidden_act": "silu"},
    block="model.layers.{}.",
    modules={
        **_LLAMA_MODULES,
        "mixer.qkv": ("self_attn.qkv_proj",),
        "mlp.gate_up": ("mlp.gate_up_proj",),
    },
    # Its class has an id of another tokenizer where none is written.
    extra={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": None},
    windows="all",
)
_GEMMA_PARTS: dict[str, tuple[Any, ...]] = {
    **_OURS_ALONE,
    "norm": ("rms_norm",),
    "activation": ("geglu",),
    "position": ("rope",),
    "bias": (False,),
    "qkv_bias": (False,),
    "post_norms": (True,),
}
_GEMMA_MODULES: Names = {
    **_LLAMA_MODULES,
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mixer_post_norm": ("post_attention_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
_GEMMA_FIELDS = {**_LLAMA_FIELDS, "logit_cap": "final_logit_softcapping"} | {
    "attention_cap": "attn_logit_softcapping"
}
GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    implies={**_GEMMA_PARTS, "qk_norm": (False,), "local_rope_theta": (0.0,)},
    fields=_GEMMA_FIELDS,
    absent={
        "kv_heads": 4,
        "head_dim": 256,
        "norm_eps": 1e-6,
        "tied_embeddings": True,
        "logit_cap": 0.0,
        "attention_cap": 0.0,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": False,
    },
    block="model.layers.{}.",
    modules=_GEMMA_MODULES,
    extra={"pad_token_id": None},
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    norm_offset=1.0,
    windows="layer_types",
)
GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    implies={**_GEMMA_PARTS, "qk_norm": (True,)},
    modules={
        **_GEMMA_MODULES,
        "mixer.q_norm": ("self_attn.q_norm",),
        "mixer.k_norm": ("self_attn.k_norm",),
    },
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    implies={
        "norm": ("layer_norm",),
        "activation": ("gelu_tanh", "gelu", "relu2"),
        "position": ("learned",),
        "qk_norm": (False,),
        "bias": (True,),
        **_PLAIN,
    },
    fields={
        "vocab": "vocab_size",
        "dim": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "context": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied_embeddings": "tie_word_embeddings",
    },
    absent={"ffn": 0, "norm_eps": 1e-5, "tied_embeddings": True},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    block="transformer.h.{}.",
    modules={
        "embed": ("transformer.wte",),
        "position": ("transformer.wpe",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
        "mixer_norm": ("ln_1",),
        "mlp_norm": ("ln_2",),
        "mixer.qkv": ("attn.c_attn",),
        "mixer.out": ("attn.c_proj",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    conv1d=True,
    # Its class would otherwise train on with a dropout that these weights never saw.
    extra={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)
ARCHITECTURES = {
    kind.name: kind for kind in (LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, GEMMA2, GEMMA3, GPT2)
}

GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}
