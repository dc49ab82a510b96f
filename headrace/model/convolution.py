"""Convolve rows causally, with one filter for each feature.

It is torch's convolution operator on [B, D, 1, S], features last in memory: the layout in which
activations lie, so that nothing is transposed. There is a second reason. torch gives a depthwise
convolution to cuDNN in that layout in every dtype; with features first (as `conv1d` lays out its
input) it does so in fp16 alone, and otherwise takes a kernel of its own, of which there is one
(ConvParams::use_cudnn_depthwise, aten/src/ATen/native/Convolution.cpp). A compiler may give the
dimension of size 1 a stride by which torch no longer knows that layout, so it sees one operation,
from rows to rows, and the layout is made inside.

No convolution operator knows of documents. Where they are masked each tap is a product of the row,
shifted, and what it would read of another document is dropped: not multiplied by zero but not
taken, so that a document's numbers do not move with its neighbours'.

Shapes: B rows, T tokens, S = K - 1 + T tokens with those before them, D features, K taps.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels.autocast import compute_dtype
from headrace.kernels.launches import COUNTS, since

LAUNCH, CUDNN = "convolution by ", "Cudnn"
"""How its launches are counted, and torch's name of the library that chooses among algorithms."""
UNIT, NO_PADDING = [1, 1], [0, 0]


def libraries(before: Mapping[str, int]) -> dict[str, int]:
    """Return launches by the name of torch's backend that got them, less those in `before`."""
    return {n.removeprefix(LAUNCH): count for n, count in since(before, LAUNCH).items() if count}


def laid_out(x_BSD: Tensor) -> Tensor:
    """Return [B, D, 1, S] of the same memory, features last."""
    return x_BSD.contiguous().unsqueeze(1).movedim(3, 1)


@torch.library.custom_op("headrace::causal_convolution", mutates_args=())
def convolution(x_BSD: Tensor, weight_D1K: Tensor) -> Tensor:
    """Return y_t = sum over j of w_j x_(t + j) by feature, [B, S - K + 1, D], in their dtype."""
    x_BD1S, weight = laid_out(x_BSD), weight_D1K.unsqueeze(2)
    groups = weight.size(0)
    backend = torch._C._select_conv_backend(
        x_BD1S,
        weight,
        bias=None,
        stride=UNIT,
        padding=NO_PADDING,
        dilation=UNIT,
        transposed=False,
        output_padding=NO_PADDING,
        groups=groups,
        bias_sizes=None,
    )
    COUNTS[LAUNCH + str(backend).rpartition(".")[2]] += 1
    y_BD1T = torch.convolution(
        x_BD1S, weight, None, UNIT, NO_PADDING, UNIT, False, NO_PADDING, groups
    )
    return y_BD1T.movedim(1, 3).squeeze(1).contiguous()


@torch.library.custom_op("headrace::causal_convolution_backward", mutates_args=())
def convolution_backward(
    grad_BTD: Tensor, x_BSD: Tensor, weight_D1K: Tensor, of_x: bool = True, of_weight: bool = True
) -> list[Tensor]:
    """Return the gradients of x and of the weight that are asked for, from that of the result."""
    weight = weight_D1K.unsqueeze(2)
    x_BD1S, weight_, _ = torch.ops.aten.convolution_backward(
        laid_out(grad_BTD),
        laid_out(x_BSD),
        weight,
        None,
        UNIT,
        NO_PADDING,
        UNIT,
        False,
        NO_PADDING,
        weight.size(0),
        [of_x, of_weight, False],
    )
    gradients = [x_BD1S.movedim(1, 3).squeeze(1).contiguous()] if of_x else []
    return gradients + ([weight_.squeeze(2).contiguous()] if of_weight else [])


@convolution.register_fake
def _(x_BSD: Tensor, weight_D1K: Tensor) -> Tensor:
    B, S, D = x_BSD.shape
    return x_BSD.new_empty(B, S - weight_D1K.size(2) + 1, D)


@convolution_backward.register_fake
def _(
    grad_BTD: Tensor, x_BSD: Tensor, weight_D1K: Tensor, of_x: bool = True, of_weight: bool = True
) -> list[Tensor]:
    both = ((x_BSD, of_x), (weight_D1K, of_weight))
    return [one.new_empty(one.shape) for one, asked in both if asked]


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
    gradients = iter(convolution_backward(grad_BTD, *ctx.saved_tensors, *ctx.needs_input_grad))
    return tuple(next(gradients) if asked else None for asked in ctx.needs_input_grad)


convolution.register_autograd(_backward, setup_context=_keep)


class CausalConvolution(nn.Conv1d):
    """Compute y_t = sum over j of w_j x_(t - K + 1 + j) by feature; weight [D, 1, K], no bias."""

    def __init__(self, features: int, taps: int) -> None:
        super().__init__(features, features, taps, groups=features, bias=False)
        self.taps = taps

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Apply every tap, whatever document it reads; return [B, T, D].

        Sizes are the tensors': a rank may hold a part of the features.
        """
        dtype = compute_dtype(x_BSD)
        return convolution(x_BSD.to(dtype), self.weight.to(dtype))

    def inside_documents(self, x_BSD: Tensor, positions_BT: Tensor) -> Tensor:
        """Apply only taps that read the token's own document; return [B, T, D].

        A token's position tells where its document begins.

        Products read views of one tensor, which is all that is kept for the backward pass.
        """
        last, T = self.taps - 1, positions_BT.size(1)
        taps_KD = self.weight.squeeze(1).t().to(x_BSD.dtype)
        y_BTD = x_BSD[:, last:] * taps_KD[last]
        for back in range(1, self.taps):
            tap_BTD = x_BSD[:, last - back : last - back + T] * taps_KD[last - back]
            y_BTD = y_BTD + torch.where((positions_BT >= back)[..., None], tap_BTD, 0.0)
        return y_BTD
