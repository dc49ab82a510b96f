"""The MLP in pieces: what a linear sees, what is kept, and whose gradients come out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crosses import crossed
from facts import in_order
from pieces import gradients
from torch import Tensor

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.data.loader import Micro
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.chunked_mlp.chunk_tokens"
COMPILE = "techniques.torch_compile.backend=aot_eager"


@pytest.mark.parametrize("chunk", [5, 64, 127])
def test_no_linear_of_the_mlp_sees_more_than_a_piece(
    make_tiny: Make, batch: Batch, chunk: int
) -> None:
    build = make_tiny(f"{ON}={chunk}")
    seen: list[int] = []
    for block in build.model.blocks.values():
        mlp: Any = block.mlp
        mlp.down.register_forward_hook(lambda linear, given, out: seen.append(len(given[0])))
    step(build, batch(build), 0)
    assert max(seen) == chunk
    numbers = check_active(build)["chunked_mlp"].numbers
    assert numbers["largest_piece_tokens"] == max(seen)
    assert numbers["pieces"] == numbers["recomputed_pieces"] == 2 * -(-128 // chunk)


@pytest.mark.parametrize(
    "beside",
    [
        (),
        ("model.bias=true", "model.activation=gelu"),
        ("techniques.lora.rank=2",),
        ("techniques.stochastic_depth.rate=0.4",),
        pytest.param((COMPILE,), id="compiled", marks=pytest.mark.slow),
        pytest.param(  # a set of the contract compiles it so
            (COMPILE, "techniques.torch_compile.scope=block", "batch.micro_sequences=2"),
            id="compiled-block",
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_gradients_are_those_without_it(
    make_tiny: Make, batch: Batch, beside: tuple[str, ...]
) -> None:
    with_it, without = (make_tiny(*beside, *more) for more in ((f"{ON}=7",), ()))
    found, wanted = (gradients(build, batch(build)) for build in (with_it, without))
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, rtol=1e-5, atol=1e-6, msg=name)
    numbers = check_active(with_it)["chunked_mlp"].numbers
    assert numbers["largest_piece_tokens"] == 7


def test_hidden_features_are_not_kept(make_tiny: Make, batch: Batch) -> None:
    """Between forward and backward nothing is as wide as the MLP."""
    widths: list[set[int]] = []
    for more in ((f"{ON}=7",), ()):
        build = make_tiny("model.ffn=96", *more)
        seen: set[int] = set()

        def keep(tensor: Tensor, seen: set[int] = seen) -> Tensor:
            seen.update(tensor.shape if not isinstance(tensor, torch.nn.Parameter) else ())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step(build, batch(build), 0)
        widths.append(seen & {96, 192, 2 * 96 // build.config.resolved_kv_heads})
    assert not widths[0] and widths[1]


def test_evaluation_runs_in_pieces_and_leaves_no_trace(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny(f"{ON}=7")
    with torch.no_grad():
        step_free = build.engine(
            build, [build.place(build, m) for m in batch(build)], build.objective, torch.ones(())
        )
    assert torch.isfinite(step_free)
    technique = build.plan.techniques["chunked_mlp"]
    assert not technique.active(build).active


@pytest.mark.parametrize("chunk", [128, 8192])
def test_a_chunk_that_cuts_nothing_is_refused(make_tiny: Make, chunk: int) -> None:
    with pytest.raises(
        UnsupportedError, match=in_order("chunk_tokens", chunk, "128 tokens")
    ) as caught:
        make_tiny(f"{ON}={chunk}")
    assert (f"{ON}=64",) in caught.value.remedy.changes
    with pytest.raises(UnsupportedError, match=in_order("chunk_tokens", 32, "32 tokens")):
        make_tiny(f"{ON}=32", "batch.micro_sequences=2")


@crossed(together=1, chunk=(64, 128), beside={"eager": (), "compiled": (COMPILE,)})
def test_one_piece_is_no_evidence(
    make_tiny: Make, batch: Batch, chunk: int, beside: tuple[str, ...]
) -> None:
    """Whoever makes micro-batches smaller than the plan says: each call is then one piece."""
    build = make_tiny(f"{ON}=64", *beside)
    build.notes["chunked_mlp"].size = chunk
    step(build, batch(build), 0)
    technique = build.plan.techniques["chunked_mlp"].model_copy(update={"chunk_tokens": chunk})
    evidence = technique.active(build)
    assert evidence.numbers["largest_piece_tokens"] == chunk
    assert evidence.active == (chunk == 64)


def test_a_router_and_a_list_of_kept_products_are_refused(make_tiny: Make) -> None:
    for other in ("mixture_of_experts.experts=4", "selective_checkpoint.every=1"):
        with pytest.raises(ConfigError, match="chunked_mlp cannot stand beside"):
            make_tiny(f"{ON}=7", f"techniques.{other}")
