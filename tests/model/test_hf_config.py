"""Read and write config.json, and meet every refusal by the name of its field."""

from typing import Any

import pytest

from headrace.core.errors import ConfigError, HeadraceError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.core.strict import read_table
from headrace.model.decoder import baseline_parts
from headrace.model.hf_config import architecture, config_from_hf, config_to_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
QWEN3 = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 10,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
GEMMA2 = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 10,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 40,
    "sliding_window": 512,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 67,
    "n_embd": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 19,
    "n_ctx": 19,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "attn_pdrop": 0.1,
}

OURS = {
    "llama": {"heads": 4, "kv_heads": 2, "ffn": 44, "bias": True, "rope_theta": 5e5},
    "llama tied": {"heads": 4, "tied_embeddings": True, "norm_eps": 1e-6},
    "headrace": {"heads": 4, "kv_heads": 2, "head_dim": 10, "qk_norm": True},
    "llama, scaled": {
        "heads": 4,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_length": 512},
    },
    "qwen2": {"heads": 4, "kv_heads": 2, "qkv_bias": True},
    "mistral": {"heads": 4, "kv_heads": 2, "window": 9},
    "gemma2": {
        "heads": 4,
        "head_dim": 10,
        "activation": "geglu",
        "post_norms": True,
        "embedding_scale": 24**0.5,
        "query_scale": 0.5,
        "logit_cap": 30.0,
        "attention_cap": 50.0,
        "window": 9,
        "window_between": 1,
    },
    "gemma3": {
        "heads": 4,
        "head_dim": 10,
        "qk_norm": True,
        "activation": "geglu",
        "post_norms": True,
        "embedding_scale": 24**0.5,
        "local_rope_theta": 1e4,
        "window": 9,
        "window_between": 1,
    },
    "gpt2": {
        "heads": 4,
        "norm": "layer_norm",
        "activation": "gelu",
        "position": "learned",
        "context": 19,
        "bias": True,
        "ffn": 50,
    },
}


def resolved(config: ModelConfig) -> dict[str, Any]:
    sizes = (config.resolved_kv_heads, config.resolved_head_dim, config.resolved_ffn)
    return {**dict(config), "sizes": sizes, "kv_heads": 0, "head_dim": 0, "ffn": 0}


@pytest.mark.parametrize("name", OURS)
def test_a_round_trip_describes_the_same_model(name: str) -> None:
    config = ModelConfig.model_validate({"vocab": 67, "dim": 24, "layers": 2, **OURS[name]})
    position = baseline_parts(config).position(config).config_fields()
    values = config_to_hf(config, sequence_length=33, end_id=5, position=position)
    assert resolved(config_from_hf(values)) == resolved(config)
    assert values["eos_token_id"] == 5
    assert values.get("n_positions", 33) == (19 if name == "gpt2" else 33)


def test_what_config_json_leaves_out_has_the_class_s_default() -> None:
    llama = {k: v for k, v in LLAMA.items() if k not in ("rms_norm_eps", "rope_theta")}
    del llama["num_key_value_heads"]
    config = config_from_hf(llama)
    assert (config.norm_eps, config.rope_theta, config.kv_heads) == (1e-6, 10_000.0, 0)
    assert not config.tied_embeddings
    gpt2 = config_from_hf(GPT2)
    assert (gpt2.ffn, gpt2.tied_embeddings, gpt2.activation) == (160, True, "gelu_tanh")


def test_theta_of_both_generations_of_transformers() -> None:
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
    assert config_from_hf(new).rope_theta == 777.0
    assert config_from_hf({**LLAMA, "rope_scaling": None}).rope_theta == 500_000.0


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling.original_max_position_embeddings",
    ),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "max_position_embeddings = None"),
    (LLAMA, {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_scaling.rope_type"),
    (
        LLAMA,
        {
            "max_position_embeddings": 32,
            "rope_scaling": {
                "type": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
            },
        },
        "rope_scaling.original_max_position_embeddings",
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}},
        "rope_scaling.mscale",
    ),
    (
        LLAMA,
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.0,
            }
        },
        "rope_scaling.attention_factor",
    ),
    (PHI3, {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
    (GEMMA2, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation"),
    (GEMMA2, {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCausalLM"),
    (
        {**GEMMA2, "architectures": ["Gemma3ForCausalLM"]},
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention",
    ),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA, {"attention_bias": True}, "attention_bias"),
    (LLAMA, {"mlp_bias": True}, "attention_bias equal to mlp_bias"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map"),
    (QWEN3, {"attention_bias": True}, "attention_bias"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    (GPT2, {"activation_function": "silu"}, "activation_function"),
    (LLAMA, {"architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
    (LLAMA, {"architectures": None, "model_type": "mamba"}, "mamba"),
]


@pytest.mark.parametrize(("base", "change", "name"), REFUSED)
def test_other_mathematics_is_refused_by_name(
    base: dict[str, Any], change: dict[str, Any], name: str
) -> None:
    config_from_hf(base)
    with pytest.raises(UnsupportedError) as caught:
        config_from_hf({**base, **change})
    assert name in caught.value.message
    assert caught.value.remedy.text


def test_an_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match="nearest is Qwen3ForCausalLM"):
        config_from_hf({**QWEN3, "architectures": ["Qwen3MoeForCausalLM"]})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": "wide"},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 0},
    ],
)
def test_impossible_sizes_are_config_errors(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_hf({**LLAMA, **change})
    assert next(iter(change)) in caught.value.message or "heads = 5" in caught.value.message


def test_a_refused_table_has_its_keys_in_a_field() -> None:
    """Who words the error anew needs the keys, whatever the message says."""
    with pytest.raises(ConfigError) as caught:
        read_table(ModelConfig, {"dim": -3, "layers": 0, "heads": "many"}, "model")
    assert {*caught.value.keys} == {"dim", "layers", "heads"}
    with pytest.raises(ConfigError) as caught:
        read_table(ModelConfig, {"dim": 66, "heads": 4}, "model")
    assert caught.value.keys == ()


NO_COUNTERPART = [
    ({"activation": "relu2"}, ("model.activation = 'relu2'", "model.activation=swiglu")),
    ({"position": "none"}, ("model.position = 'none'", "model.position=rope")),
    ({"qk_norm": True, "bias": True}, ("model.", "model.")),
    ({"qk_norm": True, "position": "none"}, ("model.position = 'none'", "Qwen3ForCausalLM")),
    ({"norm": "layer_norm"}, ("model.norm = 'layer_norm'", "model.norm=rms_norm")),
    ({"heads": 5, "head_dim": 8, "bias": True}, ("model.dim = 24", "model.dim=40")),
]


@pytest.mark.parametrize(("keys", "words"), NO_COUNTERPART)
def test_models_without_a_counterpart_say_which_key(
    keys: dict[str, Any], words: tuple[str, str]
) -> None:
    config = ModelConfig.model_validate({"vocab": 67, "dim": 24, "layers": 2, **keys})
    with pytest.raises(UnsupportedError) as caught:
        config_to_hf(config, sequence_length=8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_gpt2_wants_as_many_key_heads_as_heads() -> None:
    config = ModelConfig.model_validate({"vocab": 67, "dim": 24, **OURS["gpt2"], "kv_heads": 2})
    with pytest.raises(HeadraceError, match=r"model\.kv_heads=4"):
        architecture(config)
