"""Compare adapters and quantized weights with plain linears in all that they compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from headrace.core.model_config import ModelConfig
from headrace.kernels.quantized_weight import (
    BLOCK,
    NF4,
    Int8Weight,
    NF4Weight,
    QuantizedWeight,
    quantize,
)
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.lora import LoraLinear, merged_state
from headrace.model.mask import MaskSpec, Rows

BASES = ("nf4", "int8")
SHAPES = ((96, 130), (5, 7), (64, 64), (1, 300))


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapted(rows: int, columns: int, base: str | None, *, bias: bool = False) -> LoraLinear:
    """An adapter off its starting value, over a weight that is stored as `base`."""
    linear = LoraLinear(nn.Linear(columns, rows, bias=bias), rank=3, scale=2.0)
    with torch.no_grad():
        linear.lora_a.copy_(matrix(3, columns, seed=1))
        linear.lora_b.copy_(matrix(rows, 3, seed=2))
        linear.weight.copy_(matrix(rows, columns, seed=3))
        if bias:
            linear.bias.copy_(matrix(rows, seed=4))
    stored = quantize(linear.weight, base) if base else linear.weight.detach()
    linear.weight = nn.Parameter(stored, requires_grad=False)
    return linear


def exact_nf4(weight: Tensor) -> Tensor:
    """Return NF4 number by number, in fp64, from the definition."""
    levels, found = torch.tensor(NF4).double(), torch.empty_like(weight).double()
    for r, row in enumerate(weight.double()):
        blocks = row.split(BLOCK)
        largest = torch.stack([block.abs().max() for block in blocks])
        step = (largest.max() - largest.min()) / 255
        codes = ((largest - largest.min()) / step).round() if step else torch.zeros_like(largest)
        scales = largest.min() + codes * step
        rebuilt = [
            s * levels[(block[:, None] / s - levels).abs().argmin(1)]
            for s, block in zip(scales, blocks, strict=True)
        ]
        found[r] = torch.cat(rebuilt)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_its_definition(shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    found, right = quantize(weight, "nf4").dequantize(), exact_nf4(weight)
    off = (found - right).abs() > 1e-5  # a number that lies between two levels may take either
    assert off.float().mean() <= 1e-3
    assert (weight - found).norm() / weight.norm() < 0.1  # 0.0921 in the limit, for a normal


def test_nf4_takes_the_level_that_is_nearest_once_scales_are_rounded() -> None:
    """Blocks of a row that are far apart in size, so that a code of a scale is a coarse one."""
    weight = matrix(6, 8 * BLOCK).unflatten(1, (8, BLOCK))
    weight = (weight * torch.logspace(-2, 0, 8)[:, None]).flatten(1)
    stored = quantize(weight, "nf4")
    found = stored.dequantize()
    scales = stored.spans[:, :1] + stored.scales * stored.spans[:, 1:]
    levels = torch.tensor(NF4) * scales.repeat_interleave(BLOCK, 1)[..., None]
    nearest = (weight[..., None] - levels).abs().amin(-1)
    torch.testing.assert_close((weight - found).abs(), nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_its_definition(shape: tuple[int, int]) -> None:
    weight = matrix(*shape)
    steps = weight.abs().amax(1, keepdim=True) / 127
    found = quantize(weight, "int8").dequantize()
    torch.testing.assert_close(found, (weight / steps).round() * steps, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("base", BASES)
def test_a_row_or_block_of_zeros_stays_zero(base: str) -> None:
    weight = matrix(4, 200)
    weight[1], weight[2, :BLOCK] = 0.0, 0.0
    found = quantize(weight, base).dequantize()
    assert found.isfinite().all()
    assert found[1].abs().max() == 0 and found[2, :BLOCK].abs().max() == 0


def test_bits_of_a_number() -> None:
    weight = matrix(64, 4096)
    bits = {base: 8 * quantize(weight, base).nbytes / weight.numel() for base in BASES}
    assert bits["int8"] == 8 + 32 / 4096
    assert bits["nf4"] == 4 + 8 / BLOCK + 64 / 4096 + 8 * 64 / weight.numel()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_its_product_is_that_of_the_whole_weight(base: str, precision: torch.dtype) -> None:
    weight = nn.Parameter(quantize(matrix(33, 70), base), requires_grad=False)
    whole, bias = weight.dequantize().requires_grad_(), matrix(33, seed=5)
    grads = []
    for one in (weight, whole):
        x = matrix(2, 9, 70, seed=6).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            y = F.linear(x, one, bias)
        assert y.dtype == precision
        y.float().square().sum().backward()
        grads.append((y, x.grad))
    limit = 1e-6 if precision == torch.float32 else 1e-2  # the bias: fused, or added after rounding
    for found, right in zip(*grads, strict=True):
        assert (found - right).abs().max() <= limit * right.abs().max()
    assert weight.grad is None


@pytest.mark.parametrize("base", [None, *BASES])
@pytest.mark.parametrize("shape", [(33, 70), (70, 33), (20, 70)], ids=str)
def test_an_adapter_is_the_merged_linear(base: str | None, shape: tuple[int, int]) -> None:
    """Compare output, input gradient, and adapters' gradients by the chain rule of W + s B A.

    Stored weights make the sum in one matmul or in two, by their shape.
    """
    linear = adapted(*shape, base, bias=True)
    merged = linear.merged().requires_grad_()
    x, y = (matrix(5, shape[1], seed=6).requires_grad_() for _ in range(2))
    found, right = linear(x), F.linear(y, merged, linear.bias)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4)
    found.square().sum().backward()
    linear.bias.grad = None
    right.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-2)
    assert linear.scale == 2.0 and merged.grad is not None
    chain = {
        "lora_b": 2.0 * merged.grad @ linear.lora_a.T,
        "lora_a": 2.0 * linear.lora_b.T @ merged.grad,
    }
    for name, wanted in chain.items():
        gradient = getattr(linear, name).grad
        assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("base", [None, *BASES])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_decoder_with_merged_weights_has_the_same_logits(
    base: str | None, tied: bool
) -> None:
    config = ModelConfig(
        dim=24,
        heads=3,
        kv_heads=1,
        ffn=22,
        layers=2,
        vocab=37,
        tied_embeddings=tied,
        bias=True,
        init_std=0.2,
    )
    model, plain = (Decoder(config, baseline_parts(config), MaskSpec()) for _ in range(2))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            new = adapted(module.out_features, module.in_features, base, bias=True)
            setattr(model.get_submodule(parent), child, new)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.2 * matrix(*parameter.shape, seed=number))
    state = merged_state(model)
    assert state.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(state)
    ids, rows = torch.arange(18).view(2, 9) * 2, Rows(torch.arange(9)[None])
    with torch.no_grad():
        found, right = model.logits(ids, rows), plain.logits(ids, rows)
        assert (found - right).abs().max() <= 1e-6 * right.abs().max()
        for module in model.modules():  # and the adapters matter
            if isinstance(module, LoraLinear):
                module.lora_b.zero_()
        assert (model.logits(ids, rows) - right).abs().max() > 0.1 * right.abs().max()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(33, 70), (70, 33)], ids=str)
def test_compiled_it_is_the_same(base: str, shape: tuple[int, int]) -> None:
    linear = adapted(*shape, base)
    x, y = (matrix(5, shape[1], seed=6).requires_grad_() for _ in range(2))
    found = torch.compile(linear, backend="aot_eager", fullgraph=True)(x)
    found.square().sum().backward()
    compiled = [linear.lora_a.grad, linear.lora_b.grad]
    linear.lora_a.grad = linear.lora_b.grad = None
    linear(y).square().sum().backward()
    for a, b in zip(
        [x.grad, *compiled], [y.grad, linear.lora_a.grad, linear.lora_b.grad], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)


# --- sharded ---------------------------------------------------------------------------------


def two_blocks(base: str | None) -> nn.Module:
    """Adapters whose rows divide by the ranks, do not, or are fewer than the ranks."""
    return nn.Sequential(
        nn.Sequential(adapted(34, 70, base), nn.Tanh(), adapted(7, 34, base, bias=True)),
        nn.Sequential(adapted(1, 7, base), adapted(65, 1, base)),
    )


def compare_sharded(base: str | None, compiled: bool = False) -> None:
    """Compare FSDP2's loss and gradients, over each rank's rows, with the whole model's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, model = two_blocks(base), two_blocks(base)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model:
        if compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    stored = {n: p.to_local() for n, p in model.named_parameters() if not p.requires_grad}
    kinds = {"nf4": NF4Weight, "int8": Int8Weight, None: Tensor}
    weights = [t for n, t in stored.items() if n.endswith("weight") and t.numel()]
    assert weights and all(isinstance(t, kinds[base]) for t in weights)
    x = matrix(6 * ranks, 70, seed=7)
    for _ in range(2):  # the second gathers into the same storage
        model.zero_grad()
        whole.zero_grad()
        loss = model(x[rank::ranks]).square().sum()
        loss.backward()
        right = whole(x).square().sum()
        right.backward()
        dist.all_reduce(loss.detach_())
        torch.testing.assert_close(loss, right.detach(), rtol=1e-6, atol=0)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert p.requires_grad == q.requires_grad == ("lora" in name or "bias" in name)
            if q.grad is not None:
                off = (p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()
                assert off <= 2e-6, f"{name} is off by {off}"
    dist.destroy_process_group()


@pytest.mark.parametrize("base", [None, *BASES])
def test_fsdp_on_two_ranks_equals_the_whole(base: str | None, zygote, tmp_path: Path) -> None:
    zygote.call(2, tmp_path, Path(__file__), "compare_sharded", base=base)


@pytest.mark.slow  # sharded on two ranks, and compiled in one process, it is quick
def test_fsdp_of_compiled_blocks_on_three_ranks(zygote, tmp_path: Path) -> None:
    zygote.call(3, tmp_path, Path(__file__), "compare_sharded", base="nf4", compiled=True)


def test_a_quantized_weight_refuses_what_it_does_not_know() -> None:
    weight = quantize(matrix(4, 8), "int8")
    assert isinstance(weight, QuantizedWeight)
    with pytest.raises(NotImplementedError, match=r"aten\.add"):
        weight + 1


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(96, 130), (130, 96)], ids=str)
def test_a_compiled_backward_pass_keeps_no_whole_weight(base: str, shape: tuple[int, int]) -> None:
    kept: list[Tensor] = []

    def note(graph: Any, given: Any) -> Any:
        (results,) = graph.graph.find_nodes(op="output")[0].args
        kept.extend(node.meta["val"] for node in results if hasattr(node, "meta"))
        return make_boxed_func(graph.forward)

    back = aot_autograd(
        fw_compiler=note,
        bw_compiler=lambda graph, given: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    layer, x = adapted(*shape, base), matrix(8, shape[1]).requires_grad_()
    layer(x).square().sum().backward()
    wanted, x.grad = x.grad, None
    torch.compile(layer, backend=back, dynamic=False)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    whole = [t for t in kept if t.is_floating_point() and t.numel() >= 96 * 130]
    assert kept and not whole
