"""Let a model that trains compute with what its quantized matrices will stand for.

Each matmul rounds its weight, and what it reads where the spec says so, by the very functions that
quantize a finished model (compress/codes), so that what was trained is what is stored. Gradients go
through the rounding as if it were not there: the straight-through estimator (arXiv 1308.3432, as in
arXiv 1712.05877). A linear keeps its input and its weight for the backward pass, as a plain one
does, and rounds both again there: no rounded copy is kept.

An adapted linear rounds the weight that its adapter is merged into, since that is what is stored
(LR-QAT, arXiv 2406.06385). An embedding rounds the rows that are looked up: scales lie along rows.

Shapes: B rows, T tokens, D features, N = B x T, V vocabulary, R rows of a matrix, C columns.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.compress.codes import (
    activation_codes,
    fake_activations,
    grid_of,
    nearest_codes,
)
from headrace.compress.spec import NumberFormat
from headrace.kernels.autocast import compute_dtype
from headrace.model.lora import LoraLinear

OUTPUT = "head"
"""The name of the module that owns the output matrix where embeddings are not tied."""


class Rounding(NamedTuple):
    """Hold how a matmul rounds what it multiplies."""

    kind: NumberFormat
    """How the matrix is stored: an integer format that rounds to the nearest code."""
    activations: str = "none"
    """What the matmul reads, by `QuantizationSpec.activations`."""


IsOn = Callable[[], bool]
"""() -> whether the step that runs rounds anything."""


def fake_weight(weight_RC: Tensor, kind: NumberFormat) -> Tensor:
    """Return the fp32 numbers that the codes of a matrix stand for, equal to `Codes.dequantize`.

    Args:
        weight_RC: the matrix, or rows of it.
        kind: an integer format, whose groups divide the columns.
    """
    weight_RGK = weight_RC.float().unflatten(-1, (kind.groups_of(weight_RC.size(-1)), -1))
    scales_RG, zeros_RG = grid_of(weight_RGK, kind)
    codes_RGK = nearest_codes(weight_RGK, scales_RG, zeros_RG, kind.dtype)
    return ((codes_RGK - zeros_RG.unsqueeze(-1)) * scales_RG.unsqueeze(-1)).flatten(-2)


def fake_input(x: Tensor, activations: str) -> Tensor:
    """Return what the codes of a matmul's input stand for, fp32; the input itself without any.

    Args:
        x: what the matmul reads, [..., C].
        activations: as `QuantizationSpec.activations` names it.
    """
    if activations == "int8_asymmetric":
        return fake_activations(x.float())
    if activations == "int8_symmetric":
        codes, scales = activation_codes(x.float())
        return codes * scales
    return x


def multiply(
    x: Tensor, weight_RC: Tensor, bias: Tensor | None, rounding: Rounding, dtype: torch.dtype
) -> Tensor:
    """Return the matmul [..., R] of a rounded input and a rounded weight, in `dtype`.

    In fp32 it is what `quantized_model.FakeMatrix` computes, bit for bit. Matmuls of codes of 8
    bits are whole numbers there, which fp64 sums exactly.
    """
    if rounding.activations == "int8_symmetric" and dtype is torch.float32:
        scales_R1, zeros_R1 = grid_of(weight_RC.float().unsqueeze(1), rounding.kind)
        weight_R1C = weight_RC.float().unsqueeze(1)
        weight_codes = nearest_codes(weight_R1C, scales_R1, zeros_R1, rounding.kind.dtype)
        codes, scales = activation_codes(x.float())
        y = (codes.double() @ weight_codes.squeeze(1).double().t()).float()
        y = y * scales * scales_R1.flatten()
        return y if bias is None else y + bias
    x, weight_RC = fake_input(x, rounding.activations), fake_weight(weight_RC, rounding.kind)
    return F.linear(x.to(dtype), weight_RC.to(dtype), None if bias is None else bias.to(dtype))


class FakeMatmul(torch.autograd.Function):
    """It multiplies what is rounded, keeps what is not, and rounds it again for the gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight_RC: Tensor,
        bias: Tensor | None,
        rounding: Rounding,
        dtype: torch.dtype,
    ) -> Tensor:
        """Multiply, and keep the input and the weight as they are."""
        ctx.save_for_backward(x, weight_RC)
        ctx.rounding, ctx.dtype = rounding, dtype
        return multiply(x, weight_RC, bias, rounding, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        """Round both again, and return the gradients that go through."""
        x, weight_RC = ctx.saved_tensors
        rounding, dtype = ctx.rounding, ctx.dtype
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = (grad @ fake_weight(weight_RC, rounding.kind).to(dtype)).to(x.dtype)
        if needs_weight:
            read = fake_input(x, rounding.activations).to(dtype).flatten(0, -2)
            grad_weight = (grad.flatten(0, -2).t() @ read).to(weight_RC.dtype)
        if needs_bias:
            grad_bias = grad.flatten(0, -2).sum(0).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None


class _Through(torch.autograd.Function):
    """It rounds, and gives the gradient on as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Rounding, is_weight: bool) -> Tensor:  # type: ignore[override]
        if is_weight:
            return fake_weight(x, rounding.kind).to(x.dtype)
        return fake_input(x, rounding.activations).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None, None


def _linear_forward(module: Any, input: Tensor) -> Tensor:
    """Compute a linear with its rounded weight; one that is adapted, with its adapter merged."""
    if not module.fake_is_on() or getattr(module, "is_off", False):
        return type(module).forward(module, input)
    weight = module.effective() if isinstance(module, LoraLinear) else module.weight
    dtype = compute_dtype(input)
    return FakeMatmul.apply(input.to(dtype), weight, module.bias, module.fake_rounding, dtype)


def _embedding_forward(module: Any, input: Tensor) -> Tensor:
    """Look rows up and round them."""
    rows = type(module).forward(module, input)
    return _Through.apply(rows, module.fake_rounding, True) if module.fake_is_on() else rows


def _head_inputs(model: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the head multiplies: rounded states, and the rounded output matrix."""
    if not model.fake_is_on():
        return hidden, model.unembedding
    rounding = model.fake_rounding
    hidden = hidden.to(compute_dtype(hidden))
    weight = _Through.apply(model.unembedding, rounding, True)
    if rounding.activations != "none":
        hidden = _Through.apply(hidden, rounding, False)
    return hidden, weight


def install(model: Any, roundings: Mapping[str, Rounding], is_on: IsOn) -> None:
    """Let every matmul with one of these matrices round it; names of parameters stay.

    Args:
        model: a decoder whose linears are what they will be.
        roundings: by the full names of the parameters.
        is_on: whether the step that runs rounds.
    """
    output = "embed.weight" if model.head.weight is None else f"{OUTPUT}.weight"
    for name, rounding in roundings.items():
        if name == output:
            _put(model, rounding, is_on)
            model.head_inputs = MethodType(_head_inputs, model)
        if name == f"{OUTPUT}.weight":
            continue
        module = model.get_submodule(name.removesuffix(".weight"))
        _put(module, rounding, is_on)
        linear = isinstance(module, nn.Linear)
        module.forward = MethodType(_linear_forward if linear else _embedding_forward, module)


def _put(module: Any, rounding: Rounding, is_on: IsOn) -> None:
    module.fake_rounding, module.fake_is_on = rounding, is_on
