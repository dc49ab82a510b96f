"""What `export_hf` writes and refuses, without transformers."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.data.tokenizer import train_tokenizer
from headrace.export import hf
from headrace.export.hf import export_hf
from headrace.model.adapter import load_pretrained
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec

CONFIG = ModelConfig(vocab=320, dim=32, layers=2, heads=4, kv_heads=2, qk_norm=True)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec())
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["the mill grinds what the water brings " * 20], vocab=270).save(path)
    return path


def test_what_is_written_reads_back(
    state: dict[str, Tensor], tokenizer_path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "exported"
    export_hf(state, CONFIG, tokenizer_path, out, sequence_length=77)
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [file.name for file in out.parent.iterdir()] == ["exported"]
    assert (out / "tokenizer.json").read_bytes() == tokenizer_path.read_bytes()
    values = json.loads((out / "config.json").read_text())
    assert values["architectures"] == ["Qwen3ForCausalLM"]
    assert values["max_position_embeddings"] == 77
    _, source = load_pretrained(out)
    assert all(torch.equal(source(name, t.shape), t) for name, t in state.items())


def test_shards_and_dtype(state: dict[str, Tensor], tokenizer_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    export_hf(
        state,
        CONFIG,
        tokenizer_path,
        out,
        sequence_length=77,
        dtype=torch.bfloat16,
        shard_bytes=20_000,
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for t in state.values())
    sizes = [(out / name).stat().st_size for name in files]
    assert max(sizes) < 20_000 + 2_500  # and the header's names
    _, source = load_pretrained(out)
    for name, tensor in state.items():
        assert torch.equal(source(name, tensor.shape), tensor.bfloat16().float())


def test_nothing_is_overwritten(
    state: dict[str, Tensor], tokenizer_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="exists already") as told:
        export_hf(state, CONFIG, tokenizer_path, tmp_path, sequence_length=8)
    assert "--output" in told.value.remedy.text  # as `headrace export` calls it
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    export_hf(state, CONFIG, tokenizer_path, empty, sequence_length=8)
    assert (empty / "config.json").is_file()


def test_a_full_disk_leaves_nothing_behind(
    state: dict[str, Tensor], tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(RunError, match=os.strerror(errno.ENOSPC)):
        export_hf(state, CONFIG, tokenizer_path, tmp_path / "out", sequence_length=8)
    assert list(tmp_path.iterdir()) == []


def test_refusals_come_before_any_file(
    state: dict[str, Tensor], tokenizer_path: Path, tmp_path: Path
) -> None:
    odd = CONFIG.model_copy(update={"activation": "relu2"})
    with pytest.raises(UnsupportedError, match="activation = 'relu2'"):
        export_hf(state, odd, tokenizer_path, tmp_path / "out", sequence_length=8)
    lacking = {name: t for name, t in state.items() if name != "norm.weight"}
    with pytest.raises(ConfigError, match=r"missing: norm\.weight"):
        export_hf(lacking, CONFIG, tokenizer_path, tmp_path / "out", sequence_length=8)
    with pytest.raises(ConfigError, match="cannot be read"):
        export_hf(state, CONFIG, tmp_path / "no.json", tmp_path / "out", sequence_length=8)
    assert list(tmp_path.iterdir()) == []
