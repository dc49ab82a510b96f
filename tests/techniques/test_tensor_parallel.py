"""Tensor parallelism against one process: shapes, sequence or not, and what stands beside it."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import house
import pytest
import torch
from facts import in_order
from torch import nn

from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.model.attention import Sdpa, SelfAttention
from headrace.parallel.layout import Layout
from headrace.parallel.tensor import Peers
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.parallel.tensor_parallel import TensorParallel

FUNCTIONS = Path(__file__).with_name("tensor_parallel_ranks.py")
Case = dict[str, Any]
PACKED: Case = {"beside": {"document_packing": {}}, "micro_rows": 2}
CLIPPED: Case = {"optimizer": {"clip_norm": 0.05}}
CHUNKED: Case = {"chunked_cross_entropy": {"chunk_tokens": 7}}
SAC: Case = {"selective_checkpoint": {}}


def compiled(scope: str) -> Case:
    return {"torch_compile": {"backend": "aot_eager", "scope": scope}}


SHAPES = ("grouped", "tied", "gpt2", "biased")


def run(zygote: Any, cwd: Path, ranks: int, data: dict[str, str], *cases: Case) -> None:
    zygote.call(ranks, cwd, FUNCTIONS, "equals", ranks=ranks, cases=list(cases), **data)


def test_two_ranks_equal_one(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    """Check a shape with sequence and one without; each shape with each choice is a slow test."""
    bare = {"shape": "gpt2", "sequence": False, "ignored": False}
    run(zygote, tmp_path, 2, data, {"shape": "biased", **PACKED, **CLIPPED}, bare)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, False])
def test_each_shape_packed(
    zygote: Any, tmp_path: Path, data: dict[str, str], sequence: bool
) -> None:
    packed = [{"shape": s, "sequence": sequence, **PACKED, **CLIPPED} for s in SHAPES]
    plain = {"shape": SHAPES[0], "sequence": sequence}
    run(zygote, tmp_path, 2, data, plain, *packed, {**plain, "ignored": False})


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, False])
def test_other_shapes_unpacked(
    zygote: Any, tmp_path: Path, data: dict[str, str], sequence: bool
) -> None:
    run(zygote, tmp_path, 2, data, *({"shape": s, "sequence": sequence} for s in SHAPES[1:]))


@pytest.mark.slow  # and a quick one is the composition cp-tp, over uneven parts of two
def test_four_ranks_equal_one(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    """13 tokens are 4 + 4 + 4 + 1, 311 entries 78 + 78 + 78 + 77."""
    run(
        zygote,
        tmp_path,
        4,
        data,
        {"shape": "tied", **PACKED, **CLIPPED},
        {"shape": "gpt2", "sequence": False},
    )


@pytest.mark.slow
def test_four_ranks_in_chunks(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    run(zygote, tmp_path, 4, data, {"shape": "biased", "others": {**CHUNKED, **SAC}})


@pytest.mark.slow  # quick are the composition fsdp-compile and graphs that blocks share
def test_compiled_equals_one(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    everything = {**compiled("block"), **SAC, **CHUNKED}
    run(zygote, tmp_path, 2, data, {"shape": "biased", "others": everything, **PACKED})


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "model"])
def test_compiled_shapes_equal_one(
    zygote: Any, tmp_path: Path, data: dict[str, str], scope: str
) -> None:
    run(
        zygote,
        tmp_path,
        2,
        data,
        {"shape": "grouped", "others": {**compiled(scope), **SAC, **CHUNKED}, **PACKED},
        {"shape": "tied", "others": compiled(scope)},
        {"shape": "gpt2", "sequence": False, "others": compiled(scope)},
    )


@pytest.mark.slow  # and a quick one is the composition speedrun-tp-fsdp
def test_other_techniques_beside_it(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    run(
        zygote,
        tmp_path,
        2,
        data,
        {"shape": "grouped", "others": {**SAC, **CHUNKED}, **PACKED, **CLIPPED},
        {"shape": "tied", "others": CHUNKED, "sequence": False},
    )


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_share_one_graph(
    zygote: Any, tmp_path: Path, data: dict[str, str], sequence: bool
) -> None:
    zygote.call(2, tmp_path, FUNCTIONS, "graphs", ranks=2, sequence=sequence, **data)


@pytest.mark.parametrize("crossed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_is_what_was_predicted(
    zygote: Any, tmp_path: Path, data: dict[str, str], crossed: bool
) -> None:
    """Each of two models has one choice of the knob, and `crossed` the other."""
    zygote.call(2, tmp_path, FUNCTIONS, "memory", ranks=2, crossed=crossed, **data)


def test_bf16_parts_are_predicted(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    zygote.call(4, tmp_path, FUNCTIONS, "bf16_memory", ranks=4, **data)


def test_a_missing_collective_is_noticed(zygote: Any, tmp_path: Path, data: dict[str, str]) -> None:
    zygote.call(2, tmp_path, FUNCTIONS, "sees_errors", ranks=2, **data)


# --- refusals --------------------------------------------------------------------------------


def supports(ranks: int, **model: Any) -> Supported | Unsupported:
    config = ModelConfig(**{"dim": 48, "heads": 12, "ffn": 96, **model})
    plan = SimpleNamespace(mesh=SimpleNamespace(tensor=ranks), model=config)
    return TensorParallel().supports(replace(house.context_on("cpu"), plan=plan))


@pytest.mark.parametrize(
    ("ranks", "model", "reason", "remedy"),
    [
        (1, {}, "nothing to split", "mesh.tensor=2"),
        (2, {"kv_heads": 3}, "3 key-value heads", "model.kv_heads=2"),
        (4, {"kv_heads": 6}, "6 key-value heads", "mesh.tensor=3"),
        (8, {"kv_heads": 1}, "1 key-value heads", "model.heads=16"),
        (3, {"ffn": 100}, r"100 hidden features \(model.ffn\)", "mesh.tensor=2"),
        (5, {"kv_heads": 12, "heads": 60, "head_dim": 2}, "12 key-value", "mesh.tensor=4"),
    ],
)
def test_refuses_with_what_fits(
    ranks: int, model: dict[str, Any], reason: str, remedy: str
) -> None:
    answer = supports(ranks, **model)
    assert isinstance(answer, Unsupported) and re.search(reason, answer.reason)
    assert answer.remedy.text == remedy


def test_what_it_refuses_it_names_a_remedy_that_runs() -> None:
    assert supports(2, kv_heads=2) == supports(3, kv_heads=6) == Supported()


@pytest.mark.parametrize("name", ["float8_linear", "lora", "dora", "qlora"])
def test_what_torch_does_not_overlap_is_refused(name: str) -> None:
    """Torch overlaps plain matmuls alone, and not one whose sum begins at a correction."""
    compiler = SimpleNamespace(backend="inductor")
    plan = SimpleNamespace(
        mesh=SimpleNamespace(tensor=2),
        model=ModelConfig(),
        techniques={"torch_compile": compiler, name: None},
    )
    context = replace(house.context_on("cuda"), plan=plan)
    answer = TensorParallel(asynchronous=True).supports(context)
    assert isinstance(answer, Unsupported) and name in answer.reason
    assert answer.remedy.changes == (
        (f"-{name}",),
        ("techniques.tensor_parallel.asynchronous=false",),
    )


class Opaque(nn.Module):
    """A part that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


def cut(part: nn.Module, ranks: int = 2) -> dict[str, Layout]:
    """Return the layouts of a part's parameters."""
    layouts = {f"blocks.0.mlp.{n}": Layout(p.shape) for n, p in part.named_parameters()}
    build: Any = SimpleNamespace(layouts=layouts)
    TensorParallel()._cut_part(build, "blocks.0.mlp", part, Peers("", ranks, 0))
    return layouts


def test_a_part_that_does_not_say_how_it_splits_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=in_order("blocks.0.mlp", "Opaque", "does not say")
    ) as caught:
        cut(Opaque())
    assert caught.value.remedy.text.startswith("mesh.tensor=1")


def test_a_part_with_too_few_groups_is_refused() -> None:
    config = ModelConfig(dim=12, heads=3, kv_heads=3, head_dim=4)
    with pytest.raises(ConfigError, match="3 groups of features") as caught:
        cut(SelfAttention(config, 0, Sdpa()))
    assert caught.value.remedy.text.startswith("mesh.tensor=1")


def test_an_adapted_linear_that_does_not_say_how_it_splits_is_refused() -> None:
    attention = SelfAttention(ModelConfig(dim=8, heads=2), 0, Sdpa())
    attention.qkv.register_parameter("more", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ConfigError, match=in_order("blocks.0.mlp.qkv", "Linear", "does not say")):
        cut(attention)


def test_parts_say_their_own_dimensions() -> None:
    part: Any = Opaque()
    part.units, part.column_parameters, part.row_parameters = 4, {"up": 1}, {"down": 2}
    part.register_parameter("up", nn.Parameter(torch.zeros(3, 8, 4)))
    part.register_parameter("down", nn.Parameter(torch.zeros(3, 4, 8)))
    layouts = cut(part)
    assert layouts["blocks.0.mlp.up"].split == {"tensor": 1}
    assert layouts["blocks.0.mlp.down"].split == {"tensor": 2}
    inner = layouts["blocks.0.mlp.inner.weight"]
    assert not inner.split and inner.partial == {"shard", "tensor"}
