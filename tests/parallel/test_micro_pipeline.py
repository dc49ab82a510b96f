"""Matmuls that run while their operands are sent compute what plain tensor parallelism does."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import house
import pytest
import torch
from torch.distributed import _symmetric_memory as memory

from headrace.core.errors import ConfigError
from headrace.parallel.micro_pipeline import share_memory

FUNCTIONS = Path(__file__).with_name("micro_pipeline_ranks.py")


def check(zygote: Any, cwd: Path, corpus: Path, prepared: Path, kind: str) -> None:
    house.put_data_in(str(corpus), str(prepared))
    house.prepare(house.make_plan())
    more = {"corpus": str(corpus), "prepared": str(prepared)}
    zygote.call(2, cwd, FUNCTIONS, "check", kind=kind, **more)


def test_ranks_that_cannot_share_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has no memory that another process's GPU reads, so torch says so."""

    def refuse(*given: Any) -> None:
        raise RuntimeError("no peer access between devices 0 and 1")

    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    monkeypatch.setattr(memory, "enable_symm_mem_for_group", refuse)
    with pytest.raises(ConfigError, match="no peer access") as caught:
        share_memory(SimpleNamespace(group_name="a"))  # type: ignore[arg-type]
    assert caught.value.remedy.changes == (("techniques.tensor_parallel.asynchronous=false",),)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.slow
def test_a_compiled_block_has_overlapped_matmuls(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    check(zygote, tmp_path, corpus, prepared_folder, "cpu")


@pytest.mark.gpu
def test_overlapped_matmuls_on_gpus(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    check(zygote, tmp_path, corpus, prepared_folder, "cuda")
