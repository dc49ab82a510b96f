"""What selective checkpointing and compilation say of themselves, in numbers to be checked."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import RunError
from headrace.data.loader import Micro
from headrace.plan.technique import Stage
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
COMPILE = "techniques.torch_compile.backend=aot_eager"
EIGHT_ROWS = "batch.tokens=128"


@pytest.mark.parametrize(("every", "blocks"), [(1, 2), (2, 1), (3, 1)])
def test_checkpointed_blocks_run_again_once_per_micro_batch(
    make_tiny: Make, batch: Batch, every: int, blocks: int
) -> None:
    build = make_tiny(
        f"techniques.selective_checkpoint.every={every}", EIGHT_ROWS, "batch.micro_sequences=2"
    )
    step(build, batch(build), 0)
    numbers = check_active(build)["selective_checkpoint"].numbers
    assert numbers["forwards"] == numbers["recomputed_blocks"] == 4 * blocks


@pytest.mark.parametrize(
    ("save", "per_block"), [("matmul+attention", 5), ("matmul", 4), ("attention", 1)]
)
def test_the_policy_keeps_products_and_attention(
    make_tiny: Make, batch: Batch, save: str, per_block: int
) -> None:
    """Keep qkv, out, gate_up, down and attention of each block, once each in the forward pass."""
    build = make_tiny(f"techniques.selective_checkpoint.save={save}")
    saved, loss = [], build.model.loss

    def watched(*args: object) -> Tensor:
        saved.append(build.notes["selective_checkpoint"]["saved"])
        return loss(*args)  # type: ignore[arg-type]

    build.model.loss = watched  # type: ignore[method-assign]
    step(build, batch(build), 0)
    assert saved == [2 * per_block]


def test_one_blocks_graph_serves_all(make_tiny: Make, batch: Batch) -> None:
    """The head is one more graph; blocks share theirs, however deep the model."""
    graphs = []
    for layers in (2, 4):
        build = make_tiny(COMPILE, "techniques.torch_compile.scope=block", f"model.layers={layers}")
        step(build, batch(build), 0)
        graphs.append(check_active(build)["torch_compile"].numbers["graphs"])
    assert graphs == [2, 2]


def test_a_second_build_of_a_process_proves_itself_anew(make_tiny: Make, batch: Batch) -> None:
    for _ in range(2):
        build = make_tiny(COMPILE)
        step(build, batch(build), 0)
        assert check_active(build)["torch_compile"].numbers == {"graphs": 2, "graph_breaks": 0}


class Breaking(torch.nn.Identity):
    """A module that no graph can hold."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, after a graph break."""
        torch._dynamo.graph_break()
        return input


def test_a_graph_break_is_told_and_with_fullgraph_an_error(
    make_tiny: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.assemble import build as building

    def with_break(build: Build) -> None:
        build.parts = building.baseline_parts(build.config)
        norm = build.parts.norm
        build.parts.norm = lambda config: torch.nn.Sequential(norm(config), Breaking())

    monkeypatch.setitem(building.BEGIN, Stage.PARTS, with_break)  # type: ignore[arg-type]
    build = make_tiny(COMPILE, "techniques.torch_compile.fullgraph=false")
    step(build, batch(build), 0)
    evidence = check_active(build)["torch_compile"]
    assert evidence.numbers["graph_breaks"] > 0 and "graph breaks" in evidence.detail
    build = make_tiny(COMPILE)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(build, batch(build), 0)


def test_compiled_and_checkpointed_are_both_in_force(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny(COMPILE, "techniques.selective_checkpoint.every=1")
    with pytest.raises(RunError, match="not in force"):
        check_active(build)
    step(build, batch(build), 0)
    assert check_active(build).keys() == {"selective_checkpoint", "torch_compile"}
