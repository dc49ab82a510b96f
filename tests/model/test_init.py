"""Test that initial values depend on (seed, name, shape) and on nothing else."""

import pytest
import torch

from headrace.core.model_config import ModelConfig
from headrace.model import init
from headrace.model.fusion import fusions
from headrace.model.init import random_source

SHAPES = {
    "embed.weight": torch.Size([300, 40]),
    "blocks.0.mixer.out.weight": torch.Size([200, 200]),
    "blocks.0.mlp.down.weight": torch.Size([200, 200]),
    "blocks.1.mlp.gate_up.weight": torch.Size([200, 200]),
}


def test_order_and_global_state_do_not_matter() -> None:
    config = ModelConfig()
    forward = {name: random_source(config, 7)(name, shape) for name, shape in SHAPES.items()}
    torch.manual_seed(123)
    one = random_source(config, 7)
    for name in reversed(SHAPES):
        assert torch.equal(one(name, SHAPES[name]), forward[name])
        assert torch.equal(one(name, SHAPES[name]), forward[name])


def test_names_and_seeds_give_different_values() -> None:
    source, other = random_source(ModelConfig(), 0), random_source(ModelConfig(), 1)
    a = source("blocks.0.mixer.qkv.weight", torch.Size([9, 9]))
    assert not torch.equal(a, source("blocks.1.mixer.qkv.weight", torch.Size([9, 9])))
    assert not torch.equal(a, other("blocks.0.mixer.qkv.weight", torch.Size([9, 9])))


def test_the_scheme() -> None:
    def std(name: str, **keys: object) -> float:
        config = ModelConfig.model_validate({"layers": 8, "init_std": 0.03, **keys})
        return random_source(config, 0)(name, SHAPES[name]).std().item()

    inner, writer = "blocks.1.mlp.gate_up.weight", "blocks.0.mlp.down.weight"
    assert abs(std(inner) / 0.03 - 1) < 0.02
    assert abs(std(writer) / (0.03 / 4) - 1) < 0.02
    assert abs(std("blocks.0.mixer.out.weight") / (0.03 / 4) - 1) < 0.02
    assert abs(std(writer, output_init="plain") / 0.03 - 1) < 0.02
    assert std(writer, output_init="zero") == 0
    assert abs(std(inner, output_init="zero") / 0.03 - 1) < 0.02


def test_he_and_orthogonal_are_of_the_blocks_alone() -> None:
    keys: dict[str, object] = {"dim": 96, "heads": 6, "kv_heads": 2, "ffn": 160, "layers": 2}

    def drawn(kind: str, name: str, *shape: int, **more: object) -> torch.Tensor:
        config = ModelConfig.model_validate(
            {**keys, "matrix_init": kind, "output_init": "plain", **more}
        )
        return random_source(config, 3)(name, torch.Size(shape))

    assert abs(drawn("he", "blocks.1.mlp.down.weight", 96, 160).std() * 80**0.5 - 1) < 0.03
    for kind in ("he", "orthogonal"):
        plain = drawn("normal", "embed.weight", 300, 96)
        assert torch.equal(drawn(kind, "embed.weight", 300, 96), plain)
    config = ModelConfig.model_validate(keys)
    for name, rows in (("mixer.qkv", 160), ("mlp.gate_up", 320)):
        fused = drawn("orthogonal", f"blocks.0.{name}.weight", rows, 96)
        for piece in fusions(config)[name].pieces(fused):  # each projection, not their stack
            tall = piece if piece.size(0) >= 96 else piece.t()
            torch.testing.assert_close(tall.t() @ tall, torch.eye(tall.size(1)))
    out = drawn("orthogonal", "blocks.0.mixer.out.weight", 96, 96, output_init="depth_scaled")
    torch.testing.assert_close(out @ out.t(), torch.eye(96) / 4)
    expert = drawn("orthogonal", "blocks.0.mlp.down", 3, 96, 40)
    torch.testing.assert_close(expert.mT @ expert, torch.eye(40).expand(3, -1, -1))
    assert not drawn("normal", "head.weight", 300, 96, head_init="zero").any()
    assert drawn("normal", "embed.weight", 300, 96, head_init="zero").any()


def test_an_orthogonal_start_is_the_same_by_any_number_of_threads() -> None:
    config, threads = ModelConfig(matrix_init="orthogonal"), torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(
                random_source(config, 0)("blocks.0.mlp.down.weight", torch.Size([90, 200]))
            )
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_norms_are_one_and_biases_zero() -> None:
    source = random_source(ModelConfig(), 0)
    for name in ("norm.weight", "blocks.0.mixer_norm.weight", "blocks.0.mixer.q_norm.weight"):
        assert torch.equal(source(name, torch.Size([5])), torch.ones(5))
    assert torch.equal(source("blocks.0.mixer.qkv.bias", torch.Size([5])), torch.zeros(5))


def test_pieces_are_drawn_alike_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "PIECE_NUMBERS", 1000)
    found = []
    for threads in (1, 4):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        found.append(random_source(ModelConfig(), 0)("embed.weight", torch.Size([50, 90])))
    assert torch.equal(*found)
    pieces = found[0].flatten().split(1000)
    assert len(pieces) == 5 and abs(found[0].std().item() / ModelConfig().init_std - 1) < 0.05
    assert not any(torch.equal(pieces[0][:500], other[:500]) for other in pieces[1:])
