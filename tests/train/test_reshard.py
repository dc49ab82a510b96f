"""What one set of ranks wrote, another reads: odd sizes, empty shards, two-dimensional meshes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import RunError
from headrace.train.checkpoint import Saved

FUNCTIONS = Path(__file__).parents[1] / "reshard.py"


def test_any_layout_reads_what_any_layout_wrote(zygote: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for ranks in (1, 2, 4):
        zygote.call(ranks, tmp_path, FUNCTIONS, "write", folder=str(folder))
    for ranks in (1, 2, 4):
        zygote.call(ranks, tmp_path, FUNCTIONS, "read", folder=str(folder))
    root = folder / "ranks-4-layout-2"
    files = sorted(p.name for p in (root / "step-1").iterdir())
    assert files == ["checkpoint.json", *(f"rank-{r:05d}.safetensors" for r in range(4))]
    alone = torch.zeros(7, 5)  # a process without a group reads it too
    Saved(root / "latest").fill_("odd", alone)
    assert torch.equal(alone, torch.arange(1.0, 36.0).reshape(7, 5))
    (root / "step-1" / "rank-00002.safetensors").unlink()
    with pytest.raises(RunError, match=r"rank-00002\.safetensors: it is missing"):
        Saved(root / "latest")
