"""Take fused matrices apart and put them together."""

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model.fusion import Fusion, fusions


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("trailing", [(), (5,)])
def test_fuse_is_the_inverse_of_pieces(kv_heads: int, trailing: tuple[int, ...]) -> None:
    config = ModelConfig(dim=30, heads=6, kv_heads=kv_heads, head_dim=8, ffn=21)
    for fusion in fusions(config).values():
        rows = fusion.groups * sum(fusion.split)
        fused = torch.randn(rows, *trailing)
        pieces = fusion.pieces(fused)
        assert [len(p) for p in pieces] == [fusion.groups * part for part in fusion.split]
        assert torch.equal(fusion.fuse(pieces), fused)


def test_rows_are_grouped_by_kv_head() -> None:
    q, k = Fusion(groups=2, split=(2, 1)).pieces(torch.arange(6))
    assert q.tolist() == [0, 1, 3, 4]
    assert k.tolist() == [2, 5]


def test_plain_mlps_have_nothing_to_take_apart() -> None:
    assert list(fusions(ModelConfig(activation="gelu"))) == ["mixer.qkv"]
