"""`compress` prunes single weights: the file is smaller, is opened, and is exported with zeros."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.cli.catalogue import catalogue
from headrace.compress.sparsity import SparseMatrix
from headrace.export.point import pruned_build, read_point

Call = Callable[..., Any]
FEW = ("--tokens", "256")


def test_a_run_is_pruned_opened_and_exported(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "small"
    made = call("compress", "demo", "--to", "2:4,30%", "--output", str(out), *FEW)
    page = (out / "compression.html").read_text()
    assert "2:4" in page and "SparseSemiStructuredTensor" in page
    sizes = []
    for point, share in zip(made["points"], (0.5, 0.3), strict=True):
        folder = out / point["folder"]
        assert point["bytes"] == (folder / "model.safetensors").stat().st_size
        assert point["logits_from_reference"] < 1e-6 < point["logits_from_whole"]
        loss = call("eval", str(folder), *FEW)["bits_per_byte"]
        assert loss == pytest.approx(point["bits_per_byte"], rel=1e-6)
        _, stored, whole = read_point(folder)
        assert "embed.weight" in whole and not any(name in whole for name in stored)
        dense = kept = 0
        for one in stored.values():
            assert isinstance(one, SparseMatrix)
            zeros = one.dequantize() == 0
            assert float(zeros.float().mean()) == pytest.approx(share, abs=0.02)
            dense, kept = dense + 4 * zeros.numel(), kept + one.values_N.nbytes + one.bits.nbytes
        if share == 0.5:
            assert kept == dense * 17 // 32
        assert point["bytes"] < made["whole"]["bytes"] - dense + kept + 400 * (2 + len(whole)) * 4
        sizes.append(point["bytes"])
    assert sizes[0] < sizes[1] < made["whole"]["bytes"]
    first = str(out / "2:4")
    assert call("sample", first, "--tokens", "2", "--temperature", "0")["text"] is not None
    weights = tmp_path / "hf"
    call("export", first, "--to", "hf", "--output", str(weights))
    tensors = load_file(weights / "model.safetensors")
    down = next(value for name, value in tensors.items() if "down_proj" in name)
    assert torch.equal(down, read_point(out / "2:4")[1]["blocks.0.mlp.down.weight"].dequantize())
    assert bool(((down == 0).view(-1, 4).sum(1) == 2).all())
    build = pruned_build(out / "2:4", catalogue())  # what goes into files for devices
    assert torch.equal(build.model.get_parameter("blocks.0.mlp.down.weight"), down)


def test_a_run_that_was_pruned_is_stored_as_it_was_trained(
    call: Call, tmp_path: Path, tiny_demo: list[str]
) -> None:
    """Its zeros are those of the file, whichever measure chose them: nothing more is lost."""
    report = call("train", *tiny_demo, "name=sparse", "--with", "weight_pruning")
    assert report["techniques"]["weight_pruning"]["active"]
    out = str(tmp_path / "small")
    made = call("compress", "sparse", "--to", "2:4,50%", "--output", out, *FEW)
    for point in made["points"]:
        assert point["rise"] == 0 == point["logits_from_whole"]
        assert point["pruned"] == pytest.approx(0.5, abs=1e-3)
