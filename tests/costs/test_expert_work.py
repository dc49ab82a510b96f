"""The pieces of a mixture are the products that torch counts and the bytes that it moves."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from headrace.assemble.build import make_ledger
from headrace.assemble.context import make_context
from headrace.cli.catalogue import catalogue
from headrace.core.model_config import ModelConfig
from headrace.costs.ledger import Ledger
from headrace.costs.work import Matmul, Stream
from headrace.model.moe import ExpertLayer
from headrace.plan.plan import Plan

DIM, FFN, LENGTH, ROWS = 32, 48, 64, 4
VIEWS = ("detach", "view", "expand", "unsqueeze", "squeeze", "select", "slice", "t", "transpose")
VIEWS += ("split", "unbind", "as_strided", "alias", "_unsafe_view", "empty_like", "new_empty")
FILLS = ("zeros", "new_zeros", "ones_like")
PRODUCTS = ("mm", "looped_linear", "looped_outer", "gelu", "gelu_backward")
"""Operations that are priced elsewhere: by their sizes, or as the decoder's activation."""


class Moved(TorchDispatchMode):
    """Count the bytes that operations read and write, but for products and for casts of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        read, written = (tensors(tree) for tree in ((args, kwargs), result))
        weights = any(t.dim() == 3 and t.size(0) == EXPERTS for t in (*read, *written))
        if name not in VIEWS + PRODUCTS and not weights:
            self.bytes += sum(t.numel() * t.element_size() for t in written)
            self.bytes += sum(t.numel() * t.element_size() for t in read) * (name not in FILLS)
        return result


EXPERTS = 8


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def ledger_of(*words: str, **sizes: float) -> Ledger:
    """Return the ledger of a plan of one layer with a mixture."""
    mixture = [f"techniques.mixture_of_experts.{key}={value}" for key, value in sizes.items()]
    shape = [f"model.dim={DIM}", "model.layers=1", f"model.ffn={FFN}"]
    data = [f"data.sequence_length={LENGTH}", f"batch.tokens={ROWS * LENGTH}"]
    plan = Plan.read(
        "[goal]\nsteps = 1\n",
        catalogue(),
        overrides=["device=cpu", *shape, *data, *mixture, *words],
        with_=["mixture_of_experts"],
    )
    return make_ledger(plan, make_context(plan, torch.device("cpu")))


def layer_of(activation: str, top_k: int, width: int) -> ExpertLayer:
    shape: dict[str, Any] = {"dim": DIM, "heads": 2, "ffn": FFN, "activation": activation}
    config = ModelConfig(layers=1, vocab=64, **shape)
    layer = ExpertLayer(
        config, 0, experts=EXPERTS, top_k=top_k, ffn=width, balance=0.01, norm_topk=True
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("top_k", "width"), [(1, 40), (2, 24), (3, 56)])
def test_products_are_those_that_torch_counts(activation: str, top_k: int, width: int) -> None:
    ledger = ledger_of(
        f'model.activation="{activation}"', experts=EXPERTS, top_k=top_k, expert_ffn=width
    )
    layer = layer_of(activation, top_k, width)
    with FlopCounterMode(display=False) as forward:
        made = layer(x := torch.randn(ROWS, LENGTH, DIM, requires_grad=True))
    with FlopCounterMode(display=False) as backward:
        (made.sum() + layer.take_balance()).backward()
    assert x.grad is not None
    for phase, counted in (("forward", forward), ("backward", backward)):
        pieces = [
            piece.count * piece.flops
            for name, piece in ledger.work.items()
            if isinstance(piece, Matmul)
            and piece.phase == phase
            and name.startswith(("router", "experts"))
        ]
        assert sum(pieces) == pytest.approx(counted.get_total_flops(), rel=1e-9)
    assert not [name for name in ledger.work if name.startswith("mlp.")]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_streams_are_the_bytes_that_operations_move(half: bool, top_k: int) -> None:
    precision = "bf16" if half else "fp32"
    ledger = ledger_of(
        'model.activation="gelu"',
        f"model.precision={precision}",
        experts=EXPERTS,
        top_k=top_k,
        expert_ffn=16,
    )
    layer = layer_of("gelu", top_k, 16)
    x = torch.randn(ROWS, LENGTH, DIM, dtype=torch.bfloat16 if half else None, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half), Moved() as forward:
        made = layer(x)
    loss = made.sum().float() + layer.take_balance()
    with Moved() as backward:
        loss.backward()
    ours = ("router", "order", "routed", "mixed", "unsorted")
    for phase, counted in (("forward", forward), ("backward", backward)):
        streams = [
            piece.count * piece.bytes
            for name, piece in ledger.work.items()
            if isinstance(piece, Stream) and piece.phase == phase and name.startswith(ours)
        ]
        print(phase, sum(streams) / counted.bytes)
        assert sum(streams) == pytest.approx(counted.bytes, rel=0.10)
