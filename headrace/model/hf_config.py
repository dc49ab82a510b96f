"""Map our `model.*` to config.json of Hugging Face `transformers` and back, where it is exact.

One table serves both directions and the tensors, so they cannot drift: an `Architecture` says what
it implies of our keys, which of its fields are ours under another name, and what our modules are
called there.

A field of config.json that changes the mathematics and that we do not model is refused by name.
What counts are the fields that the reference class itself reads; transformers ignores the others
too. Dropout is not modelled: it changes nothing outside of training.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headrace.core.errors import ConfigError, UnsupportedError, interpreting, nearest
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.core.strict import read_table
from headrace.model.hf_families import (
    ARCHITECTURES,
    GEMMA3,
    GPT2,
    GPT2_ACTIVATIONS,
    LLAMA,
    PHI3,
    QWEN2,
    Architecture,
)
from headrace.model.mask import mask_of

PUBLISHED = "the config.json that was published with these weights"
"""What mends a config.json that describes no model."""


def architecture(config: ModelConfig, prefer: str = "") -> Architecture:
    """Return the class of transformers that computes exactly what `config` describes.

    Args:
        config: the model.
        prefer: the class that its weights came in, which several may compute.

    Raises:
        UnsupportedError: there is none; names the keys in the way and the nearest values.
    """
    gaps = {kind: _gaps(kind, config) for kind in ARCHITECTURES}
    best = min(gaps, key=lambda kind: len(gaps[kind]))
    if prefer in gaps and not gaps[prefer]:
        return ARCHITECTURES[prefer]
    if not gaps[best]:
        return ARCHITECTURES[best]
    gap_values = ", ".join(f"model.{key} = {_value(config, key)!r}" for key in gaps[best])
    wanted = [f"model.{key}={_toml(value)}" for key, value in gaps[best].items()]
    raise UnsupportedError(
        f"no architecture of transformers matches this model: {gap_values} has no counterpart in "
        f"{best}, the nearest of {', '.join(ARCHITECTURES)}",
        mend(*wanted),
    )


def _gaps(name: str, config: ModelConfig) -> dict[str, Any]:
    """Return the keys of `config` that the architecture cannot express, with the nearest values."""
    kind = ARCHITECTURES[name]
    gaps = {k: fit[0] for k, fit in kind.implies.items() if getattr(config, k) not in fit}
    scaled, square = config.rope_scaling.kind, abs(config.embedding_scale - config.dim**0.5)
    if kind.norm_offset and square > 1e-6 * config.embedding_scale:
        gaps["embedding_scale"] = config.dim**0.5
    if kind is PHI3 and scaled != "none":
        gaps["rope_scaling.kind"] = "none"
    if kind.windows == "all" and config.window_between:
        gaps["window_between"] = 0
    square_heads = config.heads * config.resolved_head_dim == config.dim
    if kind in (QWEN2, PHI3) and not square_heads:
        gaps["head_dim"] = config.dim // config.heads
    if kind is GPT2 and config.resolved_kv_heads != config.heads:
        gaps["kv_heads"] = config.heads
    width = config.heads * config.resolved_head_dim
    if (kind is GPT2 and width != config.dim) or (kind is LLAMA and config.dim % config.heads):
        gaps["dim"] = width
    return gaps


def _value(config: ModelConfig, key: str) -> Any:
    """Return the value of a key, of a table of the model too."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


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
    with interpreting("config.json", PUBLISHED):
        return _config_from_hf(values, key)


def _config_from_hf(values: Mapping[str, Any], key: str) -> ModelConfig:
    """Return the model that a config.json describes; see `config_from_hf`."""
    kind = named_architecture(values, key)
    _refuse_other_mathematics(kind, values, key)
    values = {**kind.defaults, **values}
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
        ours |= _rotations(kind, values, key)
    if kind.windows != "none":
        ours |= _windows(kind, values, int(ours["layers"]), key)
    if kind.norm_offset:
        ours |= _scales(values, ours)
    if kind is LLAMA:
        ours["bias"] = _llama_bias(values, key)
    try:
        return read_table(ModelConfig, ours, "model")
    except ConfigError as error:  # under our keys, and no key of a plan mends given weights
        name = next((kind.fields[key] for key in error.keys if key in kind.fields), "")
        raise ConfigError(
            f"config.json of a {kind.name} describes no model{f' ({name})' * bool(name)}: "
            f"{error.message}",
            PUBLISHED,
        ) from None


def named_architecture(values: Mapping[str, Any], key: str = "model.pretrained") -> Architecture:
    """Return the architecture that a config.json names.

    Raises:
        UnsupportedError: none of those that Headrace reads.
    """
    by_type = {kind.model_type: kind.name for kind in ARCHITECTURES.values()}
    model_type = str(values.get("model_type", ""))
    listed = values.get("architectures")
    named = (
        listed[0] if isinstance(listed, list) and listed else by_type.get(model_type, model_type)
    )
    name = str(named)
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
        if values.get(name) is not None and values[name] != only:
            raise _refuse(name, values[name], f"{name} = {only!r}", key)
    for name in ("quantization_config", "auto_map"):
        if values.get(name) is not None:
            raise _refuse(name, values[name], f"a config.json without {name}", key)
    layer_types = kind.windows == "layer_types"
    if not layer_types and "sliding_attention" in (values.get("layer_types") or ()):
        raise _refuse("layer_types", "sliding_attention", "layers of full_attention", key)


def _rotations(kind: Architecture, values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Read the rotation from tables (transformers 5) or fields (4): its base, and its scaling."""
    tables = values.get("rope_parameters") or {}
    ours: dict[str, Any] = {}
    if kind is GEMMA3:
        local = tables.get("sliding_attention") or {}
        _refuse_partial(local, key)
        if local.get("rope_type", "default") != "default":
            raise _refuse("rope_parameters.sliding_attention", local, "rope_type = 'default'", key)
        ours["local_rope_theta"] = local.get("rope_theta", values["rope_local_base_freq"])
        tables = tables.get("full_attention") or {}
    theta = values.get("rope_theta")
    for name, table in (
        ("rope_parameters", tables),
        ("rope_scaling", values.get("rope_scaling") or {}),
    ):
        scaling = _scaling(name, table, key)
        if scaling is not None and scaling["kind"] == "dynamic":
            scaling = _with_longest_row(scaling, name, values, key)
        if scaling is not None:
            ours["rope_scaling"] = scaling
        theta = table.get("rope_theta", theta)
        _refuse_partial(table, key)
    _refuse_partial(values, key)
    return {**ours, "rope_theta": 10_000.0 if theta is None else theta}


def _refuse_partial(table: Mapping[str, Any], key: str) -> None:
    if (part := table.get("partial_rotary_factor")) not in (None, 1.0):
        raise _refuse("partial_rotary_factor", part, "partial_rotary_factor = 1.0", key)


_SCALINGS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
}
"""What a scaled rotation is made of, and the keys of `model.rope_scaling`."""


def _scaling(name: str, table: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return `model.rope_scaling` of a table, or None where it scales nothing.

    Raises:
        UnsupportedError: a rule, or a part of one, that we do not model.
    """
    rule = table.get("rope_type", table.get("type", "default"))
    if rule == "default":
        return None
    if rule not in ("yarn", "linear", "llama3", "dynamic"):
        ours = "rope_type = 'default', 'dynamic', 'linear', 'llama3' or 'yarn'"
        raise _refuse(f"{name}.rope_type", rule, ours, key)
    given = {k: value for k, value in table.items() if value is not None}
    by_factor = rule in ("linear", "dynamic")
    wanted = {"factor"} if by_factor else {"factor", "original_max_position_embeddings"}
    rest = {"rope_type", "type", "rope_theta", "attention_factor", "partial_rotary_factor"}
    if lacks := sorted(wanted - given.keys()):
        raise _refuse(f"{name}.{lacks[0]}", None, f"a {name} of {rule} with {lacks[0]}", key)
    if other := sorted(given.keys() - {*_SCALINGS, *rest}):
        field = f"{name}.{other[0]}"
        raise _refuse(field, given[other[0]], f"a {name} of {rule} without {other[0]}", key)
    temperature = 0.1 * math.log(given["factor"]) + 1 if rule == "yarn" else 1.0
    if abs(given.get("attention_factor", temperature) - temperature) > 1e-6:
        has, right = given["attention_factor"], f"attention_factor = {temperature:.6g}"
        raise _refuse(f"{name}.attention_factor", has, right, key)
    return {"kind": rule, **{ours: given[k] for k, ours in _SCALINGS.items() if k in given}}


def _with_longest_row(
    scaling: dict[str, Any], name: str, values: Mapping[str, Any], key: str
) -> dict[str, Any]:
    """Return a dynamic rule with its original rows: transformers takes the config's longest row.

    Raises:
        UnsupportedError: the config has none, or the table says another length, which transformers
            reads and never uses.
    """
    if (longest := values.get("max_position_embeddings")) is None:
        wanted = "max_position_embeddings = N beside a dynamic rope_type"
        raise _refuse("max_position_embeddings", None, wanted, key)
    if (other := scaling.get("original_length", longest)) != longest:
        raise _refuse(
            f"{name}.original_max_position_embeddings",
            other,
            f"max_position_embeddings = {other} beside a dynamic rope_type",
            key,
        )
    return {**scaling, "original_length": longest}


def _windows(
    kind: Architecture, values: Mapping[str, Any], layers: int, key: str
) -> dict[str, Any]:
    """Return which layers see how many tokens.

    Raises:
        UnsupportedError: layers with a window and without it do not alternate regularly.
    """
    window = values.get("sliding_window") or 0
    if kind.windows == "all" or not window:
        return {"window": window, "window_between": 0}
    pattern = values.get("sliding_window_pattern") or layers + 1
    usual = [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(layers)
    ]
    types = values.get("layer_types") or usual
    first = next((n for n, one in enumerate(types) if one == "full_attention"), None)
    if first == 0:
        if set(types) == {"full_attention"}:
            return {"window": 0, "window_between": 0}
        raise _irregular(types, key)
    between = 0 if first is None else first
    for layer, one in enumerate(types):
        is_open = between > 0 and (layer + 1) % (between + 1) == 0
        if one != ("full_attention" if is_open else "sliding_attention"):
            raise _irregular(types, key)
    return {"window": window, "window_between": between}


def _irregular(types: Sequence[str], key: str) -> UnsupportedError:
    wanted = "one layer of full_attention after each n of sliding_attention"
    return _refuse("layer_types", list(types), wanted, key)


def _scales(values: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Gemma multiplies the embedding and the queries by."""
    head_dim = ours["head_dim"] or ours["dim"] / ours["heads"]
    before = values["query_pre_attn_scalar"]
    return {"embedding_scale": ours["dim"] ** 0.5, "query_scale": (head_dim / before) ** 0.5}


def _llama_bias(values: Mapping[str, Any], key: str) -> bool:
    attention, mlp = bool(values.get("attention_bias")), bool(values.get("mlp_bias"))
    if attention != mlp:
        raise _refuse(
            "attention_bias", attention, f"attention_bias equal to mlp_bias, which is {mlp}", key
        )
    return attention


def _gpt2_activation(name: str, key: str) -> str:
    if name not in GPT2_ACTIVATIONS:
        raise _refuse("activation_function", name, "one of " + ", ".join(GPT2_ACTIVATIONS), key)
    return GPT2_ACTIVATIONS[name]


def config_to_hf(
    config: ModelConfig,
    *,
    sequence_length: int,
    end_id: int | None = None,
    position: Mapping[str, Any] = MappingProxyType({}),
    prefer: str = "",
) -> dict[str, Any]:
    """Return the config.json of `config`, read alike by transformers 4 and 5.

    Args:
        config: the model.
        sequence_length: most tokens of a row, unless learned positions say it.
        end_id: the token that ends a document.
        position: fields of a rotation that is not the plain one, over the others.
        prefer: the class that the weights came in.

    Raises:
        UnsupportedError: no architecture of transformers matches; names the keys in the way.
    """
    kind = architecture(config, prefer)
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
        back = {ours: theirs for theirs, ours in reversed(GPT2_ACTIVATIONS.items())}
        return values | {"activation_function": back[config.activation]}
    values |= {"max_position_embeddings": sequence_length, "rope_theta": config.rope_theta}
    if kind is LLAMA:
        values |= {"attention_bias": config.bias, "mlp_bias": config.bias}
    if kind.windows != "none":
        values["sliding_window"] = config.window or None
    if kind.windows == "layer_types":
        spec = mask_of(config)
        values["layer_types"] = [
            "full_attention" if not config.window or spec.is_open(layer) else "sliding_attention"
            for layer in range(config.layers)
        ]
    if kind.norm_offset:
        scalar = config.resolved_head_dim / config.query_scale**2
        whole = abs(scalar - round(scalar)) < 1e-6 * scalar
        values["query_pre_attn_scalar"] = round(scalar) if whole else scalar
        caps = {"final_logit_softcapping": config.logit_cap}
        caps["attn_logit_softcapping"] = config.attention_cap
        values |= {name: cap or None for name, cap in caps.items()}
    if kind is GEMMA3:
        values["rope_local_base_freq"] = config.local_rope_theta or config.rope_theta
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
