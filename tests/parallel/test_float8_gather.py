"""Compare linears whose weights are gathered in fp8 with the same linears whose weights are not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import house
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.parallel.float8_gather import Float8Gather
from headrace.parallel.layout import local_of

pytest.importorskip("torchao")
FUNCTIONS = Path(__file__).with_name("float8_gather_ranks.py")
LARGER = 3.0
"""Times that all weights grow, so that another power of two is their scale."""


@pytest.fixture
def alone() -> Iterator[None]:
    """Make a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def linears() -> nn.Module:
    """Return two fp8 linears, and a third as a router's."""
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
    draw = torch.Generator().manual_seed(0)

    def made(inner: int, outer: int) -> nn.Module:
        linear = nn.Linear(inner, outer, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(outer, inner, generator=draw))
        return Float8Linear.from_float(linear, config)

    names = {"up": made(16, 48), "down": made(48, 16), "router": made(16, 16)}
    return Chain(names)


class Chain(nn.Module):
    """Linears one after another, by their names."""

    def __init__(self, linears: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.children():
            x = linear(x)
        return x.clone()


def gathered() -> tuple[Any, Float8Gather]:
    """Return them sliced, and what gathers their weights."""
    model, float8 = linears(), Float8Gather(None)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    float8.take(model)
    model.register_forward_pre_hook(float8.refresh, prepend=True)
    return model, float8


@torch.no_grad()
def grow(*models: nn.Module) -> None:
    for model in models:
        for parameter in model.parameters():
            local_of(parameter).mul_(LARGER)


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return y, dx and the gradients of all weights."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(local_of(p.grad) for p in model.parameters())]  # type: ignore[arg-type]
    model.zero_grad()
    return found  # type: ignore[return-value]


def test_computes_the_same_bits_as_weights_change(alone: None) -> None:
    """Scales are those of the newest weights, in an evaluation too; slices stay plain and fp32."""
    plain, (model, float8) = linears(), gathered()
    x = torch.randn(13, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for _ in range(2):  # micro-batches
            for found, wanted in zip(passes(model, x), passes(plain, x), strict=True):
                assert torch.equal(found, wanted)
        grow(plain, model)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        model.reshard()
        float8.outdate()
    assert {type(local_of(p)) for p in model.parameters()} == {Tensor}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_counts_what_was_gathered_in_fp8(alone: None) -> None:
    model, float8 = gathered()
    assert float8.sent() == (0, 2, 0)  # nothing yet
    model(torch.ones(2, 16))
    assert float8.sent() == (2, 0, 2 * 16 * 48)  # a router is sent as it is


@pytest.mark.gpu
def test_gathers_in_fp8_on_gpus(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    house.put_data_in(str(corpus), str(prepared_folder))
    house.prepare(house.make_plan())
    more = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, FUNCTIONS, "check", **more)
