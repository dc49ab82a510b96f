"""A causal convolution along rows, one filter for each feature.

It is torch's convolution operator on [B, D, 1, S], features last in memory: the layout in which
activations lie, so that nothing is transposed. There is a second reason. torch gives a depthwise
convolution to cuDNN in that layout in every dtype; with features first (as `conv1d` lays out its
input) it does so in fp16 alone, and otherwise takes a kernel of its own, of which there is one
(ConvParams::use_cudnn_depthwise, aten/src/ATen/native/Convolution.cpp).

No convolution operator knows of documents. Where they are masked each tap is a product of the row,
shifted, and what it would read of another document is dropped: not multiplied by zero but not
taken, so that a document's numbers do not move with its neighbours'.

Shapes: B rows, T tokens, S = K - 1 + T tokens with those before them, D features, K taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CUDNN = "Cudnn"
"""torch's name of the library that can choose among algorithms."""


class CausalConvolution(nn.Conv1d):
    """y_t = sum over j of w_j x_(t - K + 1 + j), by feature; weight [D, 1, K], no bias."""

    def __init__(self, features: int, taps: int) -> None:
        super().__init__(features, features, taps, groups=features, bias=False)
        self.taps = taps
        self.launched: tuple[int, ...] = ()
        """the shape that the operator took last, [B, D, 1, S]; empty before it is launched"""
        self.read: torch.dtype | None = None
        """and the dtype"""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Every tap, whatever document it reads; returns [B, T, D].

        Sizes are the tensors': a rank may hold a part of the features.
        """
        x_BD1S = x_BSD.transpose(1, 2).unsqueeze(2)
        self.launched, self.read = tuple(x_BD1S.shape), x_BD1S.dtype
        y_BD1T = F.conv2d(x_BD1S, self.weight.unsqueeze(2), groups=self.weight.size(0))
        return y_BD1T.squeeze(2).transpose(1, 2)

    def inside_documents(self, x_BSD: Tensor, positions_BT: Tensor) -> Tensor:
        """Only taps that read the token's own document, which its position tells; [B, T, D].

        Products read views of one tensor, which is all that is kept for the backward pass.
        """
        last, T = self.taps - 1, positions_BT.size(1)
        taps_KD = self.weight.squeeze(1).t().to(x_BSD.dtype)
        y_BTD = x_BSD[:, last:] * taps_KD[last]
        for back in range(1, self.taps):
            tap_BTD = x_BSD[:, last - back : last - back + T] * taps_KD[last - back]
            y_BTD = y_BTD + torch.where((positions_BT >= back)[..., None], tap_BTD, 0.0)
        return y_BTD

    def library(self) -> str:
        """Which of torch's backends takes what was launched last; empty before that."""
        if not self.launched:
            return ""
        B, D, one, S = self.launched
        device = self.weight.device
        like = torch.empty(B, one, S, D, dtype=self.read, device=device).movedim(3, 1)
        weight = torch.empty(D, 1, 1, self.taps, dtype=self.read, device=device)
        found = torch._C._select_conv_backend(
            like, weight, bias=None, stride=[1, 1], padding=[0, 0], dilation=[1, 1],
            transposed=False, output_padding=[0, 0], groups=D, bias_sizes=None,
        )  # fmt: skip
        return str(found).rpartition(".")[2]
