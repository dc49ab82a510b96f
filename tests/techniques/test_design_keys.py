"""Design techniques that rewrite keys: the recipe of the speed records, and deeper, thinner models.

What the keys themselves compute is compared with the plainest code of it in
tests/model/test_from_embedding.py; that each technique is in force is the contract's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble import keyed
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.costs.count import block_linears
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Technique, Unsupported, check_claims
from headrace.techniques.design.gqa import Gqa
from headrace.techniques.design.qk_norm import QkNorm
from headrace.techniques.design.rms_norm import RmsNorm
from headrace.techniques.design.value_embeddings import ValueEmbeddings
from headrace.train.train import step

RECIPE = {
    "techniques.relu_squared={}": {"activation": "relu2"},
    "techniques.rms_norm.weight=false": {"norm": "unit_rms_norm"},
    "techniques.qk_norm={}": {"qk_norm": True},
    "techniques.logit_cap.cap=15": {"logit_cap": 15.0},
    "techniques.embedding_residual={}": {"embedding_residual": True, "embedding_norm": True},
    "techniques.embedding_norm={}": {"embedding_norm": True},
    "techniques.value_embeddings.tables=1": {"value_embeddings": 1},
    "techniques.bigram_embeddings.multiple=3": {"bigram_multiple": 3},
    "techniques.embedding_smear={}": {"embedding_smear": True},
    "techniques.weight_init.zero_head=true": {
        "matrix_init": "normal",
        "output_init": "zero",
        "head_init": "zero",
    },
}
"""Each technique of the speed records' recipe -> the keys that it stands for."""
OTHER = {
    "activation": "gelu",
    "norm": "layer_norm",
    "qk_norm": "false",
    "logit_cap": "7.0",
    "embedding_residual": "false",
    "embedding_norm": "false",
    "value_embeddings": "2",
    "bigram_multiple": "2",
    "embedding_smear": "false",
    "matrix_init": "he",
}
"""Values of keys that no technique here gives them."""


def read(*words: str) -> Plan:
    """A plan that says nothing but these words."""
    return Plan.read("goal = { steps = 4 }", catalogue(), overrides=words)


def blocks(model: ModelConfig) -> int:
    """Count the weights of the matrices of all blocks."""
    return model.layers * sum(i * o for i, o in block_linears(model).values())


def test_the_recipe_is_a_plan(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Any]]
) -> None:
    keys = {key: value for given in RECIPE.values() for key, value in given.items()}
    build = make_tiny(*RECIPE)
    assert {key: getattr(build.config, key) for key in keys} == keys
    start = dict(build.model.named_parameters())
    assert not [name for name in start if name.endswith("norm.weight")]
    zero = {name for name, p in start.items() if not p.any()}
    ends = ("mixer.out.weight", "mlp.down.weight", "head.weight", "pairs.embed.weight")
    ends += ("smear.weight",)
    assert zero == {name for name in start if name.endswith(ends)}
    assert start["blocks.1.stream.weight"].tolist() == [1.0, 0.0]
    assert start["blocks.1.mixer.value.weight"].tolist() == [0.5, 0.5]
    step(build, batch(build), 0)
    assert build.techniques and all(t.active(build).active for t in build.techniques)


@pytest.mark.parametrize("word", RECIPE)
def test_each_is_its_keys_alone(word: str) -> None:
    plan, name = read(word), word.split(".")[1].split("=")[0]
    plain = read()
    by_key = plain.replaced(model={**plain.model.model_dump(exclude_unset=True), **RECIPE[word]})
    assert plan.model == by_key.model
    assert Plan.read(plan.to_toml(), catalogue()) == plan
    key = next(iter(RECIPE[word]))
    with pytest.raises(ConfigError, match=in_order(f"model.{key}", name)):
        read(word, f"model.{key}={OTHER[key]}")


@pytest.mark.parametrize(
    ("family", "ratio"),
    [
        ("headrace", 2),
        ("headrace-small", 1.5),
        ("gpt2", 2.5),
        ("llama3-1b", 2),
        ("qwen3-0.6b", 1.5),
    ],
)
def test_deeper_and_thinner_at_equal_parameters(family: str, ratio: float) -> None:
    base = read(f"model.family={family}").model
    plan = read(f"model.family={family}", f"techniques.deep_thin.ratio={ratio}")
    deep = plan.model
    assert deep.layers == round(base.layers * ratio) and deep.dim < base.dim
    assert (
        deep.heads < base.heads
        and deep.heads * base.resolved_kv_heads == base.heads * deep.kv_heads
    )
    assert deep.resolved_head_dim == base.resolved_head_dim
    assert blocks(deep) == pytest.approx(blocks(base), rel=0.02)
    proportion = deep.resolved_ffn / deep.dim * base.dim / base.resolved_ffn
    assert 0.6 < proportion < 1.7
    assert Plan.read(plan.to_toml(), catalogue()) == plan, "reading it again changes nothing"
    assert plan.techniques["deep_thin"].supports(make_context(plan, torch.device("cpu"))) == (
        Supported()
    )


def test_a_base_of_ones_own(tiny_plan: Callable[..., Plan]) -> None:
    sizes = ("dim=64", "layers=3", "heads=4", "ffn=160")
    base = tuple(f"techniques.deep_thin.base_{size}" for size in sizes)
    plan = read(*base)
    wanted = read(*(f"model.{size}" for size in sizes)).model
    assert plan.model.layers == 6
    assert blocks(plan.model) == pytest.approx(blocks(wanted), rel=0.02)
    with pytest.raises(ConfigError, match=in_order("model.dim", "deep_thin")):
        tiny_plan(*base)
    with pytest.raises(ConfigError, match=r"config\.kv_heads"):
        check_claims([*plan.techniques.values(), Gqa()])


def test_what_no_shape_has_is_refused() -> None:
    words = ("techniques.deep_thin.base_dim=64", "techniques.deep_thin.base_heads=2")
    plan = read(*words, "techniques.deep_thin.ratio=60")
    technique: Any = plan.techniques["deep_thin"]
    assert technique.keys(plan) == {}
    answer = technique.supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported)
    ((word,),) = answer.remedy.changes
    near = read(*words, word)
    assert near.model.layers > read().model.layers


@pytest.mark.parametrize(
    ("technique", "key", "value"),
    [
        (QkNorm(), "qk_norm", False),
        (RmsNorm(), "norm", "layer_norm"),
        (ValueEmbeddings(), "value_embeddings", 0),
    ],
)
def test_given_weights_have_learned_with_their_keys(
    tiny_plan: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    technique: Technique[Any],
    key: str,
    value: Any,
) -> None:
    plan = tiny_plan("model={pretrained = 'there'}")
    context = make_context(plan, torch.device("cpu"))
    monkeypatch.setattr(keyed, "shape_of", lambda model: ModelConfig(**{key: value}))
    answer = technique.supports(context)
    assert isinstance(answer, Unsupported) and f"model.{key} = {value!r}" in answer.reason
    assert answer.remedy.changes == ((f"-{technique.name()}",),)
    asked = technique.keys(plan)[f"model.{key}"]
    monkeypatch.setattr(keyed, "shape_of", lambda model: ModelConfig(**{key: asked}))
    assert isinstance(technique.supports(context), Supported)


def test_a_mixer_without_values_is_refused(make_tiny: Callable[..., Build]) -> None:
    with pytest.raises(ConfigError, match=in_order("value_embeddings", "GatedConvolution")):
        make_tiny("model.value_embeddings=1", "techniques.short_convolution.between=1")


def test_embeddings_are_no_matrices_of_blocks(make_tiny: Callable[..., Build]) -> None:
    """Muon takes blocks' matrices alone; factors have no weight decay."""
    build = make_tiny("techniques.muon={}", *RECIPE)
    muon = build.routed["muon"]
    ends = ("stream.weight", "value.weight", "smear.weight")
    assert not [name for name in muon if name.endswith(ends)]
    assert not [name for name in muon if name.startswith(("value_embed", "embed", "pairs", "head"))]
    groups = build.optimizers["adamw"].param_groups
    still = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    named = dict(build.model.named_parameters())
    assert {id(p) for n, p in named.items() if n.endswith(ends)} <= still
