"""Map our `model.*` to config.json of Hugging Face `transformers` and back, where it is exact.

One table serves both directions and the tensors, so they cannot drift: an `Architecture` says what
it implies of our keys, which of its fields are ours under another name, and what our modules are
called there.

A field of config.json that changes the mathematics and that we do not model is refused by name.
What counts are the fields that the reference class itself reads; transformers ignores the others
too. Dropout is not modelled: it changes nothing outside of training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.model_config import ModelConfig
from headrace.core.strict import read_table

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
}
"""Keys that no architecture has, and the value at which they do nothing."""
_LLAMA_PARTS = {
    "norm": ("rms_norm",),
    "activation": ("swiglu",),
    "position": ("rope",),
    "logit_cap": (0.0,),
    **_OURS_ALONE,
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
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    implies={
        "norm": ("layer_norm",),
        "activation": ("gelu_tanh", "gelu", "relu2"),
        "position": ("learned",),
        "qk_norm": (False,),
        "bias": (True,),
        "logit_cap": (0.0,),
        **_OURS_ALONE,
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
ARCHITECTURES = {kind.name: kind for kind in (LLAMA, QWEN3, GPT2)}

_GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu2",
}


def architecture(config: ModelConfig) -> Architecture:
    """Return the class of transformers that computes exactly what `config` describes.

    Raises:
        UnsupportedError: there is none; names the keys in the way and the nearest values.
    """
    gaps = {kind: _gaps(kind, config) for kind in ARCHITECTURES}
    best = min(gaps, key=lambda kind: len(gaps[kind]))
    if not gaps[best]:
        return ARCHITECTURES[best]
    gap_values = ", ".join(f"model.{key} = {getattr(config, key)!r}" for key in gaps[best])
    wanted = " ".join(f"model.{key}={_toml(value)}" for key, value in gaps[best].items())
    raise UnsupportedError(
        f"no architecture of transformers matches this model: {gap_values} has no counterpart in "
        f"{best}, the nearest of {', '.join(ARCHITECTURES)}",
        wanted,
    )


def _gaps(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return the keys of `config` that the architecture cannot express, with the nearest values."""
    kind = ARCHITECTURES[name]
    gaps = {k: fit[0] for k, fit in kind.implies.items() if getattr(config, k) not in fit}
    if kind is GPT2 and config.resolved_kv_heads != config.heads:
        gaps["kv_heads"] = config.heads
    width = config.heads * config.resolved_head_dim
    if (kind is GPT2 and width != config.dim) or (kind is LLAMA and config.dim % config.heads):
        gaps["dim"] = width
    return gaps


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def config_from_hf(values: Mapping[str, Any], key: str = "model.pretrained") -> ModelConfig:
    """Return the model that a config.json describes.

    Args:
        values: of the file.
        key: the plan's key that names its folder.

    Raises:
        UnsupportedError: another architecture, or a field that changes the mathematics in a way
            that we do not model.
        ConfigError: a size is missing or cannot be.
    """
    kind = _named_architecture(values, key)
    _refuse_other_mathematics(kind, values, key)
    ours: dict[str, Any] = {key: fit[0] for key, fit in kind.implies.items()}
    for name, theirs in kind.fields.items():
        value = values.get(theirs)
        ours[name] = kind.absent.get(name) if value is None else value
        if ours[name] is None:
            raise ConfigError(
                f"config.json of a {kind.name} has no {theirs!r}", f"{theirs!r}: N in it"
            )
    if kind is GPT2:
        ours["activation"] = _gpt2_activation(values.get("activation_function", "gelu_new"), key)
        ours["ffn"] = ours["ffn"] or 4 * ours["dim"]
    else:
        ours["rope_theta"] = _rope_theta(values, key)
    if kind is LLAMA:
        ours["bias"] = _llama_bias(values, key)
    try:
        return read_table(ModelConfig, ours, "model")
    except ConfigError as error:  # under our keys, and no key of a plan mends given weights
        name = next((kind.fields[key] for key in error.keys if key in kind.fields), "")
        raise ConfigError(
            f"config.json of a {kind.name} describes no model{f' ({name})' * bool(name)}: "
            f"{error.message}",
            "the config.json that was published with these weights",
        ) from None


def _named_architecture(values: Mapping[str, Any], key: str) -> Architecture:
    by_type = {kind.model_type: kind.name for kind in ARCHITECTURES.values()}
    model_type = str(values.get("model_type", ""))
    name = str((values.get("architectures") or [by_type.get(model_type, model_type)])[0])
    if name not in ARCHITECTURES:
        near = nearest(name, ARCHITECTURES)
        raise UnsupportedError(
            f"config.json is of a {name or 'nameless architecture'}; Headrace reads "
            f"{', '.join(ARCHITECTURES)}, the nearest is {near}",
            f"{key}=FOLDER of a model of one of these architectures",
        )
    return ARCHITECTURES[name]


def _refuse(field: str, value: Any, wanted: str, key: str) -> UnsupportedError:
    return UnsupportedError(
        f"config.json has {field} = {value!r}, which Headrace does not model; it reads {wanted}",
        f"{key}=FOLDER of a model with {wanted}",
    )


def _refuse_other_mathematics(kind: Architecture, values: Mapping[str, Any], key: str) -> None:
    for name, only in kind.fixed.items():
        if values.get(name, only) != only:
            raise _refuse(name, values[name], f"{name} = {only!r}", key)
    for name in ("quantization_config", "auto_map"):
        if values.get(name) is not None:
            raise _refuse(name, values[name], f"a config.json without {name}", key)
    if "sliding_attention" in (values.get("layer_types") or ()):
        raise _refuse("layer_types", "sliding_attention", "layers of full_attention", key)


def _rope_theta(values: Mapping[str, Any], key: str) -> float:
    """Read theta from a table (transformers 5) or a field (4); refuse a scaled rotation."""
    theta = values.get("rope_theta")
    for name in ("rope_parameters", "rope_scaling"):
        table = values.get(name) or {}
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise _scaled(name, kind, table, key)
        theta = table.get("rope_theta", theta)
    for table in (values, values.get("rope_parameters") or {}):
        part = table.get("partial_rotary_factor")
        if part not in (None, 1.0):
            raise _refuse("partial_rotary_factor", part, "partial_rotary_factor = 1.0", key)
    return 10_000.0 if theta is None else theta


_SCALINGS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
"""What a scaled rotation is made of, and the knobs of the technique that makes it here."""


def _scaled(name: str, kind: str, table: Mapping[str, Any], key: str) -> UnsupportedError:
    """Refuse a scaled rotation, and name the technique that can say it, if one can."""
    refusal = _refuse(f"{name}.rope_type", kind, "rope_type = 'default', which is no scaling", key)
    given = {k: value for k, value in table.items() if value is not None}
    wanted = {"linear": {"factor"}}.get(kind, {"factor", "original_max_position_embeddings"})
    other = given.keys() - {*_SCALINGS, "rope_type", "type", "rope_theta", "attention_factor"}
    if kind not in ("yarn", "linear", "llama3") or wanted - given.keys() or other:
        return refusal
    temperature = 0.1 * math.log(given["factor"]) + 1 if kind == "yarn" else 1.0
    if abs(given.get("attention_factor", temperature) - temperature) > 1e-6:
        return refusal
    knobs = {ours: given[k] for k, ours in _SCALINGS.items() if k in given}
    settings = " ".join(f"techniques.yarn.{k}={v}" for k, v in {"kind": kind, **knobs}.items())
    return UnsupportedError(
        refusal.message + "; a plan can scale it",
        f"rope_type = 'default' in config.json, and --with yarn {settings}",
    )


def _llama_bias(values: Mapping[str, Any], key: str) -> bool:
    attention, mlp = bool(values.get("attention_bias")), bool(values.get("mlp_bias"))
    if attention != mlp:
        raise _refuse(
            "attention_bias", attention, f"attention_bias equal to mlp_bias, which is {mlp}", key
        )
    return attention


def _gpt2_activation(name: str, key: str) -> str:
    if name not in _GPT2_ACTIVATIONS:
        raise _refuse("activation_function", name, "one of " + ", ".join(_GPT2_ACTIVATIONS), key)
    return _GPT2_ACTIVATIONS[name]


def config_to_hf(
    config: ModelConfig,
    *,
    sequence_length: int,
    end_id: int | None = None,
    position: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the config.json of `config`, read alike by transformers 4 and 5.

    Args:
        config: the model.
        sequence_length: most tokens of a row, unless learned positions say it.
        end_id: the token that ends a document.
        position: fields of a rotation that is not the plain one, over the others.

    Raises:
        UnsupportedError: no architecture of transformers matches; names the keys in the way.
    """
    kind = architecture(config)
    sizes = {
        "kv_heads": config.resolved_kv_heads,
        "head_dim": config.resolved_head_dim,
        "ffn": config.resolved_ffn,
        "context": config.context or sequence_length,
    }
    values: dict[str, Any] = {"architectures": [kind.name], "model_type": kind.model_type}
    for key, theirs in kind.fields.items():
        values[theirs] = sizes.get(key, getattr(config, key))
    values |= {**kind.fixed, **kind.extra, "initializer_range": config.init_std}
    # Written even when there is none: the classes' defaults are ids of other tokenizers.
    values |= {"bos_token_id": end_id, "eos_token_id": end_id}
    if kind is GPT2:
        back = {ours: theirs for theirs, ours in reversed(_GPT2_ACTIVATIONS.items())}
        return values | {"activation_function": back[config.activation]}
    values |= {"max_position_embeddings": sequence_length, "rope_theta": config.rope_theta}
    if kind is LLAMA:
        values |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    return values | dict(position)


_THEIR_OWN = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
"""Fields that training here does not change, whatever it would write itself."""
_DROPPED = (
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "auto_map",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
)
"""Fields of the first weights' config.json that are not true of the trained ones; the rotation is
written anew as it was trained."""


def merged_config(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], position: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json of a trained model, with what that of its first weights adds.

    Args:
        ours: what `config_to_hf` wrote.
        theirs: the config.json that came with the first weights.
        position: the fields of a rotation that is not the plain one.
    """
    kind = ARCHITECTURES[ours["architectures"][0]]
    same_class = theirs.get("model_type", kind.model_type) == kind.model_type
    own = (*_THEIR_OWN, *kind.extra) if same_class else _THEIR_OWN
    kept = {key: value for key, value in theirs.items() if key not in _DROPPED and same_class}
    merged = {**kept, **ours} | {key: theirs[key] for key in own if key in theirs}
    longest = "max_position_embeddings"
    both = [values[longest] for values in (ours, theirs) if type(values.get(longest)) is int]
    if longest in ours and longest not in position:
        merged[longest] = max(both)
    return merged
