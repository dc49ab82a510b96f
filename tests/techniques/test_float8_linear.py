"""Compare fp8 linears with three matmuls of operands that an independent function rounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crosses import crossed
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.data.loader import Micro
from headrace.plan.technique import Context, Supported, Unsupported
from headrace.techniques.precision.float8_linear import Float8Linear
from headrace.train.train import step

pytest.importorskip("torchao")
Make = Callable[..., Build]
ON = 'techniques.float8_linear={{recipe="{}",min_size=1}}'
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values: Tensor, dim: int | None, kind: torch.dtype = E4M3) -> Tensor:
    """Numbers that fp8 can say under a scale, a power of two, of the tensor or along `dim`."""
    largest = values.abs().max() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.log2(torch.finfo(kind).max / largest.double()).floor()).float()
    return (values * scale).to(kind).float() / scale


def three_products(
    x: Tensor, w: Tensor, grad: Tensor, recipe: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw: each operand is scaled along the dimension that its product sums over."""
    rows = recipe == "rowwise"
    kind = E4M3 if rows else E5M2
    y = rounded(x, 1 if rows else None) @ rounded(w, 1 if rows else None).T
    dx = rounded(grad, 1 if rows else None, kind) @ rounded(w, 0 if rows else None)
    dw = rounded(grad, 0 if rows else None, kind).T @ rounded(x, 0 if rows else None)
    return y, dx, dw


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_its_products_are_those_of_rounded_operands(make_tiny: Make, recipe: str) -> None:
    build = make_tiny(ON.format(recipe))
    linear = build.model.get_submodule("blocks.0.mlp.gate_up")
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 13, 16, generator=draw) * 3).requires_grad_()
    y = linear(x)
    grad = torch.randn(y.shape, generator=draw)
    y.backward(grad)
    weight = linear.weight.detach()
    right = three_products(x.detach().flatten(0, 1), weight, grad.flatten(0, 1), recipe)
    for found, wanted in zip((y, x.grad, linear.weight.grad), right, strict=True):
        torch.testing.assert_close(found, wanted.view(found.shape), rtol=1e-5, atol=1e-5)
    plain = F.linear(x, weight)
    off = (y - plain).norm() / plain.norm()
    assert 0.01 < off < 0.06  # two operands of 4 significant bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_gpus_products_are_those_of_rounded_operands(make_tiny: Make, recipe: str) -> None:
    """Compare these three matmuls from the matrix units, to the rounding of results to bf16."""
    sizes = ["model.dim=64", "model.ffn=96", "model.heads=4", "model.kv_heads=2"]
    build = make_tiny(ON.format(recipe), "device=cuda", "model.precision=bf16", *sizes)
    linear = build.model.get_submodule("blocks.0.mlp.gate_up")
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).bfloat16().cuda()

    x = (drawn(2, 24, 64) * 3).requires_grad_()
    with torch.no_grad():
        linear.weight.copy_(drawn(*linear.weight.shape))
    with build.autocast():
        y = linear(x)
    grad = drawn(*y.shape)
    y.backward(grad)
    operands = (x.detach().flatten(0, 1), linear.weight.detach(), grad.flatten(0, 1))
    right = three_products(*(t.float().cpu() for t in operands), recipe)
    for found, wanted in zip((y, x.grad, linear.weight.grad), right, strict=True):
        off = (found.float().cpu().view(wanted.shape) - wanted).norm() / wanted.norm()
        assert off < 0.004  # bf16 rounds by 2 ** -9 at most


BORDER = 1.7535
"""A largest magnitude whose scale is one power of two, and another one after it is bf16's 1.75."""


def past_the_border(linear: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """y, dx and dw where operands are made, and rounded to bf16, in the code that is compiled."""
    x = x.clone().requires_grad_()
    y = linear((x * BORDER).bfloat16())
    (BORDER * (y.float() * grad)).sum().backward()
    weights, linear.weight.grad = linear.weight.grad, None
    assert weights is not None and x.grad is not None
    return y.detach().float(), x.grad, weights.float()


def operands_of(linear: nn.Module, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and gradients whose largest magnitude is 1."""
    draw = torch.Generator().manual_seed(0)
    made = (torch.randn(tokens, n, generator=draw) for n in linear.weight.shape[::-1])
    x, grad = ((t / t.abs().max()).to(device) for t in made)
    return x, grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_compiled_scale_has_no_rounded_magnitude(make_tiny: Make, recipe: str) -> None:
    """A compiler rounds where it stores: one kernel has the bf16 number, another has not."""
    linear = make_tiny(ON.format(recipe)).model.get_submodule("blocks.0.mlp.gate_up").bfloat16()
    graphs: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(past_the_border, backend=aot_autograd(fw_compiler=keep))
    compiled(linear, *operands_of(linear, 32, "cpu"))
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    largest = [n for n in nodes if str(n.target) in ("aten.max.default", "aten.amax.default")]
    assert len(largest) >= 3
    assert {n.meta["val"].dtype for n in largest} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [32, 4096])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_scale_at_a_border_is_the_same_in_every_kernel(
    make_tiny: Make, recipe: str, tokens: int
) -> None:
    sizes = ["model.dim=64", "model.ffn=96", "model.heads=4", "model.kv_heads=2"]
    build = make_tiny(ON.format(recipe), "device=cuda", "model.precision=bf16", *sizes)
    linear = build.model.get_submodule("blocks.0.mlp.gate_up").bfloat16()
    given = operands_of(linear, tokens, "cuda")
    right = past_the_border(linear, *given)
    for found, wanted in zip(torch.compile(past_the_border)(linear, *given), right, strict=True):
        assert (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_cutting_the_batch_hardly_changes_a_result(make_tiny: Make, recipe: str) -> None:
    """Scales are powers of two, so only numbers near underflow are rounded otherwise."""
    found = []
    for rows in (0, 2):
        build = make_tiny(ON.format(recipe), f"batch.micro_sequences={rows}")
        step(build, build.loader.step(0).micros, 0)
        found.append({n: p.grad for n, p in build.model.named_parameters()})
    for name, right in found[0].items():
        off = (found[1][name] - right).abs().max() / right.abs().max()
        assert off <= 1e-4, f"{name} is off by {off}"


@crossed(together=1, backend=("none", "aot_eager"), precision=("fp32", "bf16"))
def test_is_in_force_under_autocast_and_compiled(
    make_tiny: Make, batch: Callable[[Build], list[Micro]], precision: str, backend: str
) -> None:
    more = [] if backend == "none" else [f"techniques.torch_compile.backend={backend}"]
    build = make_tiny(ON.format("tensorwise"), f"model.precision={precision}", *more)
    loss, norm, *_ = step(build, batch(build), 0)
    assert loss.isfinite() and norm.isfinite()
    numbers = check_active(build)["float8_linear"].numbers
    assert numbers["linears"] == 8 and numbers["products"] == numbers["rounded"] > 0


def test_names_what_fits_none(make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match=r"multiples of 48.* 48 x 16"):
        make_tiny("techniques.float8_linear={multiple_of=48,min_size=1}")
    with pytest.raises(ConfigError, match="at least 1024") as caught:
        make_tiny("techniques.float8_linear={}")
    assert "min_size=16" in caught.value.remedy.text


def test_takes_what_is_wide_enough(make_tiny: Make) -> None:
    """Multiples cannot say it: those of 64 would leave out 96 features and not 48 alone."""
    from torchao.float8.float8_linear import Float8Linear as Module

    sizes = ["model.dim=64", "model.ffn=48", "model.heads=4"]
    for least, narrow in ((48, set()), (64, {"mlp.down"})):
        build = make_tiny(f"techniques.float8_linear.min_size={least}", *sizes)
        block = build.model.get_submodule("blocks.1")
        kinds = {n: type(m) for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        assert {n for n, kind in kinds.items() if kind is not Module} == narrow
        assert len(kinds) == 4


def test_says_where_it_runs(make_tiny: Make) -> None:
    def place(**how: object) -> Context:
        known = {"device": "cuda", "device_name": "GPU", "capability": (9, 0)}
        return Context(**{**vars(make_tiny().context), **known, **how})  # type: ignore[arg-type]

    assert isinstance(Float8Linear().supports(place()), Supported)
    for technique, context, why in (
        (Float8Linear(), place(capability=(8, 0)), "8.0"),
        (Float8Linear(multiple_of=8), place(), "multiples of 16"),
        (Float8Linear(), place(device="mps"), "no fp8"),
    ):
        answer = technique.supports(context)
        assert isinstance(answer, Unsupported) and why in answer.reason and answer.remedy.text
