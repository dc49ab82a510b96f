"""Round the linears of a model by GPTQ: what one column loses is made good in those after it.

Each row of a weight W is rounded column by column, and the columns that are left move so that
(W - Q) H (W - Q)^T, the squared error of the layer's output on text, stays small; H is the mean of
x x^T over what the layer reads. Blocks follow each other: a block is calibrated on what the
quantized blocks before it give. Source: arXiv 2210.17323, algorithm 1, with its Cholesky form and
its lazy updates of 128 columns; columns are taken in their order.

Shapes: R rows, C columns, G groups of a row, B rows of text, T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headrace.compress.codes import Codes, grid_of, nearest_codes
from headrace.compress.quantized_model import check_finite, faking, formats_of
from headrace.compress.spec import NumberFormat, QuantizationSpec
from headrace.core.progress import OnProgress
from headrace.model.decoder import Decoder
from headrace.model.mask import Rows

DAMPING = 0.01
"""Share of the mean of the diagonal of H that is added to it (the paper's section 3.3)."""
LAZY = 128
"""Columns after which the rest of the matrix is updated at once (the paper's B)."""


def gptq(weight_RC: Tensor, hessian_CC: Tensor, kind: NumberFormat) -> Codes:
    """Return the codes of a matrix by GPTQ.

    Args:
        weight_RC: the matrix, whose columns the groups divide.
        hessian_CC: the mean of x x^T over what the layer reads.
        kind: an integer format; the scales of a group are made when its first column is reached.
    """
    columns = weight_RC.size(1)
    group = kind.group or columns
    left_RC, upper_CC = weight_RC.detach().double().clone(), _inverse_factor(hessian_CC)
    codes_RC = torch.empty_like(left_RC)
    scales, zeros = [], []
    lazy = LAZY if group >= LAZY else group * (LAZY // group)
    for begin in range(0, columns, lazy):
        end = min(columns, begin + lazy)
        errors = left_RC.new_zeros(len(left_RC), end - begin)
        for at in range(begin, end):
            if at % group == 0:
                part_R1K = left_RC[:, at : at + group].float().unsqueeze(1)
                scale_R1, zero_R1 = grid_of(part_R1K, kind)
                scales.append(scale_R1)
                zeros.append(zero_R1)
            now_R = left_RC[:, at]
            grid = scales[-1], zeros[-1]
            code_R11 = nearest_codes(now_R.float()[:, None, None], *grid, kind.dtype)
            codes_RC[:, at] = code_R11.flatten()
            stands_R = ((code_R11.squeeze(-1) - zeros[-1]) * scales[-1]).flatten()
            error_R = (now_R - stands_R) / upper_CC[at, at]
            left_RC[:, at + 1 : end] -= torch.outer(error_R, upper_CC[at, at + 1 : end])
            errors[:, at - begin] = error_R
        left_RC[:, end:] -= errors @ upper_CC[begin:end, end:]
    return Codes(codes_RC.to(torch.int8), torch.cat(scales, 1), torch.cat(zeros, 1).to(torch.int8))


def _inverse_factor(hessian_CC: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped H, fp64 [C, C]."""
    damped = hessian_CC.double().clone()
    diagonal = damped.diagonal()
    diagonal += DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


@torch.no_grad()
def gptq_model(
    model: Decoder,
    spec: QuantizationSpec,
    ids_BT: Tensor,
    progress: OnProgress = lambda description, done, total: None,
) -> dict[str, Codes]:
    """Return the codes of every linear that a spec rounds by GPTQ, by its parameter's name.

    Args:
        model: with its fp32 weights, which stay as they are.
        spec: what to make of them.
        ids_BT: the text to calibrate on.
        progress: takes how far it is.

    Raises:
        ConfigError: see `formats_of` and `check_finite`.
    """
    formats = {
        name: kind
        for name, kind in formats_of(model, spec).items()
        if kind.rounding == "gptq" and isinstance(_owner(model, name), nn.Linear)
    }
    made: dict[str, Codes] = {}
    for done, block in enumerate(model.blocks):
        progress(f"calibrating {spec.name}", done, len(model.blocks))
        names = [name for name in formats if name.startswith(f"blocks.{block}.")]
        with faking(model, spec.model_copy(update={"activations": "none"}), made):
            moments = _second_moments(model, names, ids_BT)
        for name in names:
            weight = model.get_parameter(name)
            check_finite(name, weight)
            made[name] = gptq(weight, moments[name], formats[name])
    return made


def _owner(model: Decoder, name: str) -> nn.Module:
    return model.get_submodule(name.removesuffix(".weight"))


def _second_moments(model: Decoder, names: list[str], ids_BT: Tensor) -> dict[str, Tensor]:
    """Return the mean of x x^T over what each of these linears reads, fp64 [C, C]."""
    sums = {name: torch.zeros((), dtype=torch.float64) for name in names}

    def adding(name: str) -> Callable[[nn.Module, Any], None]:
        def add(_: nn.Module, given: Any) -> None:
            x_NC = given[0].flatten(0, -2).double()
            sums[name] = sums[name] + x_NC.t() @ x_NC / ids_BT.numel()

        return add

    hooks = [_owner(model, name).register_forward_pre_hook(adding(name)) for name in names]
    try:
        for ids_T in ids_BT:
            positions = torch.arange(len(ids_T), device=ids_T.device)[None]
            model.hidden(ids_T[None], Rows(positions, None, None))
    finally:
        for hook in hooks:
            hook.remove()
    return sums
