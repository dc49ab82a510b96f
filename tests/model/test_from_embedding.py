"""Compare the speed records' block, as keys of a plan, with the plainest code of the same.

The reference is written here: modded-nanogpt's decoder with separate matrices, in one precision,
without a cache. It reads its weights from the model's own parameters.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import in_order
from torch import Tensor

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import KVCache
from headrace.model.decoder import Decoder
from headrace.model.fusion import fusions
from headrace.model.head import cross_entropy
from headrace.model.hf_config import config_to_hf
from headrace.model.mask import MaskSpec, Rows

RECIPE: dict[str, Any] = {
    "layers": 5,
    "norm": "unit_rms_norm",
    "activation": "relu2",
    "qk_norm": True,
    "embedding_norm": True,
    "embedding_residual": True,
    "value_embeddings": 2,
    "logit_cap": 2.0,
}
"""Every part of the recipe that is a key of the model; the rest is how weights start."""
B, T = 2, 9
MakeDecoder = Callable[..., Decoder]


def unit(x: Tensor) -> Tensor:
    """Normalise without weights."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def rotated(x_BTHK: Tensor, theta: float = 1e4) -> Tensor:
    """Rotate halves of each head by the place of its token."""
    K, T = x_BTHK.size(-1), x_BTHK.size(1)
    angle = torch.outer(torch.arange(T).float(), theta ** (-torch.arange(0, K, 2) / K))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x_BTHK.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_logits(model: Decoder, ids_BT: Tensor) -> Tensor:
    """The recipe's logits, by separate projections and a mask that is written out."""
    config, w = model.config, dict(model.named_parameters())
    K, G, L = config.resolved_head_dim, config.resolved_kv_heads, config.layers
    each, n = config.heads // G, config.value_embeddings
    B, T = ids_BT.shape
    x = x0 = unit(w["embed.weight"][ids_BT])
    past = torch.ones(T, T, dtype=torch.bool).tril()
    for i in range(L):
        at = f"blocks.{i}."
        a, b = w[f"{at}stream.weight"]
        x = a * x + b * x0
        pieces = fusions(config)["mixer.qkv"].pieces(w[f"{at}mixer.qkv.weight"])
        q, k, v = ((unit(x) @ p.t()).view(B, T, -1, K) for p in pieces)
        table = i if i < n else i - (L - n)
        if table >= 0 and (i < n or i >= L - n):
            c, d = w[f"{at}mixer.value.weight"]
            v = c * v + d * w[f"value_embed.{table}.weight"][ids_BT].view(B, T, G, K)
        q, k = rotated(unit(q)), rotated(unit(k)).repeat_interleave(each, 2)
        scores = torch.einsum("bthk,bshk->bhts", q, k) / K**0.5
        weights = scores.masked_fill(~past, -torch.inf).softmax(-1)
        mixed = torch.einsum("bhts,bshk->bthk", weights, v.repeat_interleave(each, 2))
        x = x + mixed.reshape(B, T, -1) @ w[f"{at}mixer.out.weight"].t()
        x = (
            x
            + F.relu(unit(x) @ w[f"{at}mlp.up.weight"].t()).square() @ w[f"{at}mlp.down.weight"].t()
        )
    z = unit(x) @ w["head.weight"].t()
    return config.logit_cap * torch.tanh(z / config.logit_cap)


def places(start: int = 0, end: int = T) -> Rows:
    return Rows(torch.arange(start, end).expand(B, -1))


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(61, (B, T + 1), generator=torch.Generator().manual_seed(3))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_recipe_is_the_plainest_code_of_it(make_decoder: MakeDecoder, kv_heads: int) -> None:
    model, (ids, targets) = make_decoder(**RECIPE, kv_heads=kv_heads), batch()
    found = model(ids, targets, places(), objective=cross_entropy, scale=torch.ones(()))
    logits = plain_logits(model, ids).flatten(0, 1)
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    named = dict(model.named_parameters())
    ours = torch.autograd.grad(found, list(named.values()))
    theirs = torch.autograd.grad(wanted, list(named.values()))
    for name, left, right in zip(named, ours, theirs, strict=True):
        assert right.abs().max() > 0, name
        error = (left - right).norm() / right.norm()
        assert error < 1e-4, (name, error)


OURS = ("embedding_norm", "embedding_residual", "value_embeddings", "norm")
"""Keys of the recipe that no architecture of another project has."""


@pytest.mark.parametrize("key", OURS)
def test_each_part_alone_matters(make_decoder: MakeDecoder, key: str) -> None:
    ids, _ = batch()
    plain, one = make_decoder(), make_decoder(**{key: RECIPE[key] if key == "norm" else 1})
    one.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.allclose(plain.logits(ids, places()), one.logits(ids, places()), atol=1e-3)


def test_a_cache_changes_nothing(make_decoder: MakeDecoder) -> None:
    model, (ids, _) = make_decoder(**RECIPE), batch()
    whole = model.logits(ids, places())
    cache = KVCache(model.config, B, T, like=whole)
    pieces = [model.logits(ids[:, :4], places(end=4), cache)]
    pieces += [model.logits(ids[:, t : t + 1], places(t, t + 1), cache) for t in range(4, T)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


def test_packed_documents_do_not_leak(make_decoder: MakeDecoder) -> None:
    model, (ids, _) = make_decoder(**RECIPE, mask=MaskSpec(document=True)), batch()
    segments = torch.tensor([[0] * 4 + [1] * 5]).expand(B, -1)
    rows = Rows(torch.tensor([[*range(4), *range(5)]]).expand(B, -1), segments)
    packed, other = model.logits(ids, rows), ids.clone()
    other[:, :4] = (other[:, :4] + 1) % 61
    assert torch.equal(model.logits(other, rows)[:, 4:], packed[:, 4:])
    alone = model.logits(ids[:, 4:], places(end=5))
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-5, atol=1e-5)


def test_tables_serve_the_first_layers_and_the_last() -> None:
    def tables(layers: int, count: int) -> dict[int, int]:
        return dict(
            sorted(ModelConfig(layers=layers, value_embeddings=count).table_of_layer.items())
        )

    assert tables(8, 2) == {0: 0, 1: 1, 6: 0, 7: 1}
    assert tables(5, 3) == {0: 0, 1: 1, 2: 2, 3: 1, 4: 2}
    assert tables(4, 0) == {}


def test_bad_keys_are_one_message(make_decoder: MakeDecoder, tiny_plan: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=in_order("value_embeddings", 3, 4, 2)) as caught:
        tiny_plan("model.layers=4", "model.value_embeddings=3")
    assert caught.value.remedy.changes == (("model.value_embeddings=2",),)
    with pytest.raises(ConfigError, match="head_init") as caught:
        tiny_plan("model.tied_embeddings=true", "model.head_init=zero")
    assert ("model.head_init=normal",) in caught.value.remedy.changes


def test_no_architecture_of_transformers_has_it() -> None:
    for key in OURS:
        config = ModelConfig(vocab=67, dim=24, heads=4, **{key: RECIPE[key]})
        with pytest.raises(UnsupportedError, match=f"model.{key} = ") as caught:
            config_to_hf(config, sequence_length=16)
        assert f"model.{key}=" in caught.value.remedy.text
