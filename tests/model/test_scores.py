"""What the baseline's backend does to scores, one query at a time; and who refuses such a mask."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from facts import in_order
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.inference.sample import generate
from headrace.model.attention import Sdpa, check_mask, weights
from headrace.model.decoder import Decoder
from headrace.model.mask import BlockPattern, MaskSpec, Rows, allowed

B, H, G, K = 2, 4, 2, 6
SLOPES = (1 / 4, 1 / 16, 1 / 64, 1 / 256)
SPECS = {
    "slopes": MaskSpec(alibi=H),
    "slopes by document": MaskSpec(alibi=H, document=True),
    "cap": MaskSpec(soft_cap=1.5),
    "cap by document": MaskSpec(soft_cap=1.5, document=True),
    "both": MaskSpec(soft_cap=1.5, alibi=H, document=True, window=4),
    "blocks": MaskSpec(blocks=BlockPattern(3, random=1), document=True),
    "all": MaskSpec(True, True, 7, True, BlockPattern(2, 1, 2, 1), H, 0.7),
}


def rows_of(length: int) -> Rows:
    """Return documents and prefixes of different lengths."""
    places = torch.arange(length).expand(B, -1)
    cuts = torch.tensor([[length // 3], [1]])
    return Rows(places, (places >= cuts).long(), torch.tensor([0, length // 4]))


def qkv(length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, length, heads, K, requires_grad=True) for heads in (H, G, G)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec, rows: Rows) -> Tensor:
    """Compute one query and one key after the other, in fp64."""
    length = q.size(1)
    ok = allowed(spec, rows, length).expand(B, 1, -1, -1)
    q, k, v = q.double(), k.double(), v.double()
    out = []
    for b in range(B):
        for t in range(length):
            for h in range(H):
                keys = [s for s in range(length) if ok[b, 0, t, s]]
                scores = []
                for s in keys:
                    score = (q[b, t, h] * k[b, s, h // (H // G)]).sum() / math.sqrt(K)
                    if spec.soft_cap:
                        score = spec.soft_cap * torch.tanh(score / spec.soft_cap)
                    scores.append(score - (SLOPES[h] * abs(t - s) if spec.alibi else 0.0))
                weight = torch.stack(scores).softmax(0)
                out.append((weight[:, None] * v[b, keys, h // (H // G)]).sum(0))
    return torch.stack(out).view(B, length, H, K)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("length", [1, 13])
def test_attention_is_the_formula(spec: MaskSpec, length: int) -> None:
    rows, sdpa, given = rows_of(length), Sdpa(), qkv(length)
    found = sdpa(*given, sdpa.prepare(spec, rows, length))
    right = by_hand(*given, spec, rows)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
    weigh = torch.linspace(-1, 1, K)
    for one, other in zip(
        torch.autograd.grad((found * weigh).sum(), given),
        torch.autograd.grad((right * weigh).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_bias_has_the_dtype_of_the_products() -> None:
    spec, rows = MaskSpec(alibi=H), rows_of(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mask = Sdpa().prepare(spec, rows, 5)
        assert isinstance(mask, Tensor) and mask.dtype == torch.bfloat16
        out = Sdpa()(*(x.bfloat16() for x in qkv(5)), mask)
    assert out.dtype == torch.bfloat16
    right = by_hand(*(x.bfloat16() for x in qkv(5)), spec, rows)
    assert (out.double() - right).norm() / right.norm() < 0.01


def test_weights_are_read_off_the_backend() -> None:
    length, spec = 13, SPECS["all"]
    rows, sdpa, (q, k, _) = rows_of(length), Sdpa(), qkv(length)
    group = torch.arange(length) // 2  # more groups than features
    with torch.no_grad():
        found = weights(sdpa, sdpa.prepare(spec, rows, length), q, k, group)
    assert found.shape == (B, length, H, 7)
    torch.testing.assert_close(found.sum(-1), torch.ones(B, length, H))
    block = (torch.arange(length) // 2)[None] == torch.arange(7)[:, None]
    seen = (allowed(spec, rows, length)[:, 0, :, None] & block).any(-1)
    assert (found > 0).equal(seen[:, :, None].expand(-1, -1, H, -1))


class Kernel(Sdpa):
    """A subclass that chooses a kernel."""


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (MaskSpec(alibi=H), "alibi"),
        (MaskSpec(prefix=True), "prefix"),
        (MaskSpec(soft_cap=1.0), "soft_cap"),
        (MaskSpec(soft_cap=1.0, blocks=BlockPattern(2)), "blocks and soft_cap"),
    ],
)
def test_a_backend_that_does_not_say_that_it_knows_refuses(spec: MaskSpec, says: str) -> None:
    config = ModelConfig(heads=H, position="none")
    check_mask(config, Sdpa(), spec)
    with pytest.raises(ConfigError, match=in_order("test_scores", says, "mask")):
        check_mask(config, Kernel(), spec)
    check_mask(config, Kernel(), MaskSpec(document=True, window=3))


@pytest.mark.parametrize("keys", [{"heads": 8, "position": "none"}, {"heads": H}])
def test_slopes_of_another_model_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=in_order("slopes", "4 heads", f"{keys['heads']} heads")
    ) as told:
        check_mask(ModelConfig(**keys), Sdpa(), MaskSpec(alibi=H))
    assert told.value.remedy.changes == (("-alibi",),)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if not s.prefix], ids=str)
def test_sampling_sees_the_same(make_decoder: Callable[..., Decoder], spec: MaskSpec) -> None:
    model = make_decoder(position="none", mask=spec)
    ids = torch.tensor([[3, 14, 15, 9, 2], [60, 0, 7, 7, 31]])
    found = generate(model, ids, new_tokens=9, temperature=0)
    for end in range(5, 14):
        rows = Rows(torch.arange(end).expand(2, -1))
        assert model.logits(found[:, :end], rows)[:, -1].argmax(-1).equal(found[:, end])
