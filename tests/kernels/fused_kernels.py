"""Fused kernels and their definitions in fp64 are listed here, for the tests that they share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import rms_norm, rope, swiglu

EPS = 1e-5
FP32_UNIT = torch.finfo(torch.float32).eps
HAS_GPU = torch.cuda.is_available()
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
HOST = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="kernels are compiled here"))
DEVICES = pytest.mark.parametrize("device", [HOST, pytest.param("cuda", marks=ON_A_GPU)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
Shape = tuple[int, ...]
Found = list[Tensor]
Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """A kernel takes leaves, which have gradients, and the rest; its results get `grads`."""

    leaves: list[Tensor]
    rest: tuple[Any, ...]
    grads: list[Tensor]


@dataclass(frozen=True)
class Kernel:
    """A fused kernel and what it is held to.

    Args:
        name: the custom operation's.
        call: the kernel.
        plain: torch's own operations on the same arguments.
        exact: the definition: (what the kernel found, *the same arguments in fp64) -> results.
        draw: (shape, dtype, device) -> inputs.
        shapes: small shapes for the interpreter.
        large: shapes for a GPU.
        atol: (unit of a dtype, largest number of a result) -> how far a number may be off.
        view: what of the first leaf is the kernel's argument.
        more: what the custom operation takes after the kernel's arguments.
    """

    name: str
    call: Callable[..., Results]
    plain: Callable[..., Results]
    exact: Callable[..., Results]
    draw: Callable[[Shape, torch.dtype, str], Inputs]
    shapes: dict[str, Shape]
    large: dict[str, Shape]
    atol: Callable[[float, float], float]
    view: Callable[[Tensor], Tensor] = lambda x: x
    more: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name

    def run(
        self, call: Callable[..., Results], given: Inputs, wide: torch.dtype | None = None
    ) -> Found:
        """Return results and gradients of a call, all of it in the dtype `wide` if there is one."""
        leaves = [t.to(wide or t.dtype).clone().requires_grad_() for t in given.leaves]
        rest = [t.to(wide or t.dtype) if isinstance(t, Tensor) else t for t in given.rest]
        out = call(self.view(leaves[0]), *leaves[1:], *rest)
        outs = [out] if isinstance(out, Tensor) else list(out)
        grads = [g.to(o.dtype) for g, o in zip(given.grads, outs, strict=True)]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]

    def check(
        self, given: Inputs, dtype: torch.dtype, call: Callable[..., Results] | None = None
    ) -> Found:
        """Compare results and gradients with the definition; returns what was found.

        They may be off by two roundings to their own dtype, and by `atol`.
        """
        found = self.run(call or self.call, given)
        wanted = self.run(lambda *args: self.exact(found, *args), given, torch.float64)
        results = len(given.grads)
        assert [t.dtype for t in found[:results]] == [dtype] * results
        assert [t.dtype for t in found[results:]] == [t.dtype for t in given.leaves]
        for ours, right in zip(found, wanted, strict=True):
            unit = torch.finfo(ours.dtype).eps
            atol = self.atol(unit, right.abs().max().item())
            torch.testing.assert_close(ours.double(), right, rtol=2 * unit, atol=atol)
        return found


# --- definitions -----------------------------------------------------------------------------


def exact_norm(found: Found, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square and multiply by the weight."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def exact_norm_add(
    found: Found, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, and normalise the sum as the kernel rounded it; rounding has no gradient."""
    total = x + delta
    rounded = found[0].double()
    assert (rounded - total).abs().max() <= torch.finfo(found[0].dtype).eps * total.abs().max()
    total = total + (rounded - total).detach()
    return total, exact_norm(found, total, weight, eps)


def exact_rope(found: Found, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair by its angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def exact_rope_norm(
    found: Found, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """Normalise each head, and rotate it."""
    return exact_rope(found, exact_norm(found, x, weight, eps), cos, sin)


def exact_swiglu(found: Found, gate_up: Tensor, group: int) -> Tensor:
    """Multiply silu(gate) by up."""
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return (gate * gate.sigmoid() * up).flatten(-2)


# --- inputs ----------------------------------------------------------------------------------


def normal(shape: Shape, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers on the host, the same for every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_inputs(
    shape: Shape, dtype: torch.dtype, device: str, weight: torch.dtype = torch.float32
) -> Inputs:
    """Draw rows and a weight."""
    leaves = [normal(shape, 0, device, dtype), normal(shape[-1:], 1, device, weight)]
    return Inputs(leaves, (EPS,), [normal(shape, 2, device, dtype)])


def norm_add_inputs(
    shape: Shape, dtype: torch.dtype, device: str, delta: torch.dtype | None = None
) -> Inputs:
    """Draw a stream in `dtype`, what is added to it in another, and a weight."""
    leaves = [
        normal(shape, 0, device, dtype),
        normal(shape, 1, device, delta or dtype),
        normal(shape[-1:], 2, device),
    ]
    return Inputs(leaves, (EPS,), [normal(shape, seed, device, dtype) for seed in (3, 4)])


def angles(rows: int, length: int, head_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Make cosine and sine of any angles, [rows, length, 1, head_dim / 2]."""
    angle = torch.arange(rows * length * head_dim / 2).view(rows, length, 1, -1).to(device)
    return angle.cos(), angle.sin()


def rope_inputs(
    shape: Shape, dtype: torch.dtype, device: str, *, factor: float = 1.0, normed: bool = False
) -> Inputs:
    """Draw keys as they lie in a fused projection, and gradients as attention gives them back.

    Args:
        shape: (rows, tokens, heads, features of a head, rows of angles).
        dtype: the keys'.
        device: where they lie.
        factor: what the angles' cosine and sine are multiplied by.
        normed: whether there is the weight of a norm.
    """
    B, T, H, K, rows = shape
    fused = normal((B, T, H, 3, K), 0, device, dtype)
    grad = normal((B, H, T, K), 1, device, dtype).transpose(1, 2)
    tables = tuple(factor * table for table in angles(rows, T, K, device))
    if normed:
        return Inputs([fused, normal((K,), 2, device)], (EPS, *tables), [grad])
    return Inputs([fused], tables, [grad])


def rope_norm_inputs(
    shape: Shape, dtype: torch.dtype, device: str, *, factor: float = 1.0
) -> Inputs:
    """Draw keys, gradients and the weight of a norm."""
    return rope_inputs(shape, dtype, device, factor=factor, normed=True)


def swiglu_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Draw gates and ups; the last two numbers of a shape are hidden features and their group."""
    *tokens, features, group = shape
    gate_up = normal((*tokens, 2 * features), 0, device, dtype)
    return Inputs([gate_up], (group,), [normal((*tokens, features), 1, device, dtype)])


# --- the kernels -----------------------------------------------------------------------------

LARGE_ROWS = {"wide": (1037, 2048), "long": (40_003, 576), "widest": (5, 16_384)}
HEADS = {
    "even": (2, 4, 4, 8),
    "odd": (3, 5, 7, 6),
    "one head": (2, 7, 1, 66),
    "pair": (1, 3, 2, 2),
}
ROTATED = {name: (*shape, shape[0]) for name, shape in HEADS.items()}
ROTATED |= {f"{name}, angles for all rows": (*shape, 1) for name, shape in HEADS.items()}


def long_sums(unit: float, most: float) -> float:
    """Return the error of two roundings, or of sums over many rows in fp32."""
    return max(2 * unit, 8 * FP32_UNIT) * most


def of_products(unit: float, most: float) -> float:
    """Return the error of two roundings: a difference of products may be nearly zero."""
    return 2 * unit * most


RMS_NORM = Kernel(
    "rms_norm",
    rms_norm.rms_norm,
    rms_norm.reference,
    exact_norm,
    norm_inputs,
    {"even": (4, 64), "odd": (3, 5, 33), "few features": (7, 3), "one row": (1, 130)},
    LARGE_ROWS,
    long_sums,
)
RMS_NORM_ADD = Kernel(
    "rms_norm_add",
    rms_norm.rms_norm_add,
    rms_norm.reference_add,
    exact_norm_add,
    norm_add_inputs,
    {"odd": (3, 5, 33), "few features": (7, 3)},
    LARGE_ROWS,
    long_sums,
)
ROPE = Kernel(
    "rope",
    rope.rope,
    rope.reference,
    exact_rope,
    rope_inputs,
    ROTATED,
    {
        "many heads": (3, 1025, 33, 128, 1),
        "small heads": (2, 777, 7, 24, 2),
    },
    of_products,
    view=lambda fused: fused[:, :, :, 1],
    more=(False,),
)
ROPE_NORM = Kernel(
    "rope_norm",
    rope.rope_norm,
    rope.reference_norm,
    exact_rope_norm,
    rope_norm_inputs,
    {name: (*shape, shape[0] if name != "even" else 1) for name, shape in HEADS.items()},
    ROPE.large,
    long_sums,
    view=ROPE.view,
)
SWIGLU = Kernel(
    "swiglu",
    swiglu.swiglu,
    swiglu.reference,
    exact_swiglu,
    swiglu_inputs,
    {"even": (3, 5, 16, 8), "odd": (7, 33, 11), "wide": (2, 2, 1100, 1100)},
    {"wide": (1037, 5632, 704), "many tokens": (40_003, 66, 11)},
    lambda unit, most: 2 * unit,
)
KERNELS = [RMS_NORM, RMS_NORM_ADD, ROPE, ROPE_NORM, SWIGLU]
