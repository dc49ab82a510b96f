"""Compare norms, rotation, MLPs and attention with their plainest definitions."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa
from headrace.model.decoder import Decoder
from headrace.model.mask import MaskSpec, Rows, allowed
from headrace.model.norm import LayerNorm, RMSNorm
from headrace.model.position import RotaryPosition, rotate


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rms_norm() -> None:
    norm, x = RMSNorm(7, eps=1e-2), torch.randn(3, 5, 7)
    torch.nn.init.normal_(norm.weight)
    near(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_layer_norm() -> None:
    norm, x = LayerNorm(7, eps=1e-2), 3 + torch.randn(3, 5, 7)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    near(norm(x), scaled * norm.weight + norm.bias)


def test_rope_turns_pairs_of_halves() -> None:
    rope = RotaryPosition(ModelConfig(dim=6, heads=1, head_dim=6, rope_theta=100.0))
    positions, x = torch.tensor([[0, 1, 5], [2, 3, 11]]), torch.randn(2, 3, 1, 6)
    found = rotate(x, rope.prepare(positions))
    for b in range(2):
        for t in range(3):
            for pair in range(3):
                angle = positions[b, t].item() * 100.0 ** (-2 * pair / 6)
                turn = complex(math.cos(angle), math.sin(angle))
                value = complex(x[b, t, 0, pair].item(), x[b, t, 0, pair + 3].item()) * turn
                near(found[b, t, 0, [pair, pair + 3]], torch.tensor([value.real, value.imag]))


def test_rope_sees_only_distances() -> None:
    rope = RotaryPosition(ModelConfig(dim=8, heads=1))
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at_q: int, at_k: int) -> Tensor:
        turned = [
            rotate(x, rope.prepare(torch.tensor([[place]]))) for x, place in ((q, at_q), (k, at_k))
        ]
        return (turned[0] * turned[1]).sum()

    near(score(9, 4), score(105, 100))
    assert (score(9, 4) - score(9, 5)).abs() > 1e-3


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh", "relu2"])
def test_mlp(make_decoder: Callable[..., Decoder], activation: str) -> None:
    mlp = make_decoder(activation=activation, ffn=15, bias=True).blocks["1"].mlp
    weights = dict(mlp.named_parameters())
    x = torch.randn(2, 3, 24)
    if activation == "swiglu":  # gcd(2 kv heads, 15) = 1 group: gate rows, then up rows
        hidden = F.linear(x, weights["gate_up.weight"], weights["gate_up.bias"])
        hidden = hidden[..., :15] * hidden[..., :15].sigmoid() * hidden[..., 15:]
    else:
        up = F.linear(x, weights["up.weight"], weights["up.bias"])
        cube = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        hidden = {
            "gelu": up * 0.5 * (1 + torch.erf(up / math.sqrt(2))),
            "gelu_tanh": up * 0.5 * (1 + torch.tanh(cube)),
            "relu2": up.clamp(min=0) ** 2,
        }[activation]
    near(mlp(x), F.linear(hidden, weights["down.weight"], weights["down.bias"]))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "spec", [MaskSpec(), MaskSpec(window=3), MaskSpec(document=True), MaskSpec(prefix=True)]
)
def test_sdpa_is_a_softmax_over_allowed_keys(groups: int, spec: MaskSpec) -> None:
    B, T, H, K = 2, 7, 4, 6
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 1, 1]])
    rows = Rows(torch.arange(T).expand(B, T), segments, torch.tensor([4, 2]))
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, groups, K), torch.randn(B, T, groups, K)
    attend = Sdpa()
    wide_k, wide_v = (x.repeat_interleave(H // groups, dim=2) for x in (k, v))
    score = torch.einsum("bthk,bshk->bhts", q, wide_k) / math.sqrt(K)
    weight = score.masked_fill(~allowed(spec, rows, T), float("-inf")).softmax(-1)
    near(
        attend(q, k, v, attend.prepare(spec, rows, T)),
        torch.einsum("bhts,bshk->bthk", weight, wide_v),
    )
