"""Every fused kernel equals its definition; on a CPU it runs in Triton's interpreter.

What a kernel alone does is tested in a file of its own.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_kernels import DEVICES, DTYPES, HAS_GPU, KERNELS, ON_A_GPU, Kernel, Shape
from torch import Tensor

pytest.importorskip("triton")
EACH = pytest.mark.parametrize("kernel", KERNELS, ids=str)


def cases(sizes: str) -> Any:
    """Cross a test with each kernel and its shapes of a size."""
    return pytest.mark.parametrize(
        ("kernel", "shape"),
        [
            pytest.param(kernel, shape, id=f"{kernel}-{name}")
            for kernel in KERNELS
            for name, shape in getattr(kernel, sizes).items()
        ],
    )


@cases("shapes")
@DTYPES
@DEVICES
def test_equals_the_definition(
    kernel: Kernel, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    kernel.check(kernel.draw(shape, dtype, device), dtype)


@EACH
def test_torchs_own_operations_equal_the_definition(kernel: Kernel) -> None:
    for shape in kernel.shapes.values():
        kernel.check(kernel.draw(shape, torch.float32, "cpu"), torch.float32, kernel.plain)


@EACH
@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled here")
def test_is_an_operation_that_a_compiler_can_take(kernel: Kernel) -> None:
    given = kernel.draw(kernel.shapes["odd"], torch.float32, "cpu")
    args = [kernel.view(given.leaves[0]), *given.leaves[1:]]
    leaves = [t.detach().requires_grad_() for t in args]
    operation = getattr(torch.ops.headrace, kernel.name).default
    torch.library.opcheck(operation, (*leaves, *given.rest, *kernel.more))


@EACH
@DEVICES
def test_a_gradient_may_lie_otherwise(kernel: Kernel, device: str) -> None:
    given = kernel.draw(kernel.shapes["odd"], torch.float32, device)
    strided = [g.transpose(0, -1).contiguous().transpose(0, -1) for g in given.grads]
    assert not any(g.is_contiguous() for g in strided)
    seen = [
        kernel.run(kernel.call, replace(given, grads=grads))
        for grads in (strided, [g.contiguous() for g in given.grads])
    ]
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.name != "swiglu"], ids=str)
def test_torchs_own_operations_round_once(kernel: Kernel) -> None:
    """A norm in bf16 would round before a rotation and after it."""
    shape = max(kernel.shapes.values(), key=lambda s: torch.Size(s).numel())
    given = kernel.draw(shape, torch.bfloat16, "cpu")
    found = kernel.run(kernel.plain, given)
    wanted = kernel.run(lambda *args: kernel.exact(found, *args), given, torch.float64)
    result = len(given.grads) - 1
    assert found[result].dtype == torch.bfloat16
    assert (found[result] == wanted[result].bfloat16()).float().mean() > 0.99


@cases("large")
@DTYPES
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_large_shapes_and_the_same_bits_twice(
    kernel: Kernel, shape: Shape, dtype: torch.dtype, device: str
) -> None:
    first, second = (kernel.check(kernel.draw(shape, dtype, device), dtype) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


@EACH
@DTYPES
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)])
def test_compiled_without_a_graph_break(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    given = kernel.draw(kernel.shapes["odd"], dtype, device)
    leaves = [t.requires_grad_() for t in given.leaves]

    def around(*leaves: Tensor) -> Tensor:
        first, *others = (2 * t for t in leaves)
        out = kernel.call(kernel.view(first), *others, *given.rest)
        outs = [out] if isinstance(out, Tensor) else out
        return sum(((n + o.float()).sin().sum() for n, o in enumerate(outs)), torch.zeros(()))

    torch._dynamo.reset()  # other cases compiled the same function
    compiled = torch.compile(around, fullgraph=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    wanted = torch.autograd.grad(around(*leaves), leaves)
    unit = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=unit, atol=unit)
