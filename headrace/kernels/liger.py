"""Liger's Triton kernels of RMS norm and gated activation are operations without parts here.

Liger wraps its kernels in autograd functions that a compiler traces into, that write gradients over
what they saved, and that choose by environment. Here the functions beneath them are called with
every choice given: no write over an input, arithmetic in fp32 ("gemma"), and for the activation the
kernel that reads gate and up side by side where the fused matmul left them. A compiler sees four
operations. Liger is imported when the first of them runs.
Source: arXiv 2410.10989; liger-kernel 0.8.5, ops/rms_norm.py and ops/swiglu.py.

Shapes: N rows, D features of the model, F hidden features in groups of `group`.
"""

from typing import Any

import torch
from torch import Tensor

from headrace.kernels import rms_norm as norm
from headrace.kernels import swiglu
from headrace.kernels.launches import COUNTS

CASTING = "gemma"
"""Liger's mode that norms in fp32 and rounds at the end; its others round before the weight."""


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute `kernels.rms_norm.rms_norm` by Liger's kernel, [..., D] to [..., D]."""
    return norm_forward(x.contiguous(), weight_D, eps)[0]


def silu_mul(gate_up: Tensor, group: int) -> Tensor:
    """Return silu(gate) x up of a fused, grouped matmul's result, [..., 2 F] to [..., F].

    Liger rounds silu(gate) to the input's dtype before it multiplies by up, as torch does.
    """
    return silu_mul_forward(gate_up.contiguous(), group)


@torch.library.custom_op("headrace::liger_rms_norm", mutates_args=())
def norm_forward(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the result [..., D], and one over the root of each row's mean square, fp32 [N]."""
    from liger_kernel.ops.rms_norm import rms_norm_forward  # pyright: ignore

    COUNTS["liger_rms_norm"] += 1
    out, _, rstd_N, *_ = rms_norm_forward(x, weight_D, eps, 0.0, CASTING, None)
    return out, rstd_N


@torch.library.custom_op("headrace::liger_rms_norm_backward", mutates_args=())
def norm_backward(
    grad: Tensor, x: Tensor, weight_D: Tensor, rstd_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `x` and of the weight."""
    from liger_kernel.ops.rms_norm import _str_to_casting_mode, rms_norm_backward  # pyright: ignore
    from liger_kernel.ops.utils import calculate_settings  # pyright: ignore

    COUNTS["liger_rms_norm_backward"] += 1
    rows_ND, mode = x.view(-1, x.size(-1)), _str_to_casting_mode[CASTING]
    how = calculate_settings(x.size(-1))
    return rms_norm_backward(grad, rows_ND, weight_D, rstd_N, 0.0, mode, *how, False, None)


@torch.library.custom_op("headrace::liger_silu_mul", mutates_args=())
def silu_mul_forward(gate_up: Tensor, group: int) -> Tensor:
    """Return silu(gate) x up, [..., 2 F] to [..., F]."""
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward  # pyright: ignore

    COUNTS["liger_silu_mul"] += 1
    return swiglu_fused_gate_up_forward(gate_up.view(-1, 2 * group))[1].view(
        *gate_up.shape[:-1], gate_up.size(-1) // 2
    )


@torch.library.custom_op("headrace::liger_silu_mul_backward", mutates_args=())
def silu_mul_backward(grad: Tensor, gate_up: Tensor, group: int) -> Tensor:
    """Return the gradient of `gate_up`, [..., 2 F]."""
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward  # pyright: ignore

    COUNTS["liger_silu_mul_backward"] += 1
    pairs = gate_up.view(-1, 2 * group)
    return swiglu_fused_gate_up_backward(pairs, grad.view(-1, group)).view(gate_up.shape)


# --- shapes for a compiler, and gradients: as our own kernels of the same functions -----------


@norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight_D: Tensor, rstd_N: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight_D)


@silu_mul_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, group: int) -> Tensor:
    return torch.empty_like(gate_up)


def _norm_backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    return *norm_backward(grad.contiguous(), *ctx.saved_tensors), None


def _silu_mul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return silu_mul_backward(grad.contiguous(), *ctx.saved_tensors, ctx.group), None


norm_forward.register_fake(norm.results_like)
silu_mul_forward.register_fake(swiglu.result_like)
norm_forward.register_autograd(_norm_backward, setup_context=norm.keep)
silu_mul_forward.register_autograd(_silu_mul_backward, setup_context=swiglu.keep)
