"""Gather slices of weights in fp8, where the matmuls that read them would cast them anyway.

A linear of torchao's float8 casts its weight to e4m3 by one scale for the whole tensor. Where FSDP2
cuts weights into slices, each rank can cast its slice before the gather, if all know that scale: a
byte a number is sent in the place of two or four, and the numbers that are multiplied are the same.
One all-reduce of the largest magnitudes of all weights, once for all forward and backward passes
between two updates, gives every rank the scales. They are powers of two, made from fp32 numbers, as
`float8_linear` makes them; since a largest magnitude times its scale is at most the largest number
of e4m3, no cast overflows.

Gloo has no numbers of 8 bits, so they are sent as bytes.

FSDP2 asks the tensor that holds a slice whether it gathers itself, by two methods. torchao's own
slices are a tensor subclass, which optimizers, checkpoints and clipping then meet. Here the methods
are attributes of the plain slice, so that only FSDP2 sees them. Sources: torchao.float8
(fsdp_utils.py); torch.distributed.fsdp (all-gather extensions).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.costs.adapters import LENT
from headrace.kernels.float8_cast import cast_to_float8
from headrace.parallel.tensor import Peers, all_reduce

APART = 4
"""Numbers from one scale to the next: compiled code copies what is not aligned to 16 bytes."""


class GatheredInFloat8(NamedTuple):
    """Hold what all gathers of fp8 weights of a rank have sent so far."""

    weights: int
    """matrices whose gathered numbers are fp8, in the buffers that FSDP2 gathers into"""
    others: int
    """matrices that fp8 linears have and that were gathered in another way, or never"""
    bytes: int
    """gathered at a time of all of them together"""


class Float8Gather:
    """Let FSDP2 gather the weights of fp8 linears as fp8.

    Args:
        peers: the ranks among which a weight is sliced; None where there is one.
    """

    def __init__(self, peers: Peers | None) -> None:
        self._peers = peers
        self._weights: list[Any] = []  # torch's FSDPParam
        self._scales: tuple[Tensor, ...] = ()
        self._fresh = False

    def take(self, module: nn.Module) -> None:
        """Take over the fp8 linears of a module that FSDP2 has just sliced, but for routers."""
        from torchao.float8.float8_linear import Float8Linear

        linears = {
            linear
            for name, linear in module.named_modules()
            if isinstance(linear, Float8Linear) and not f".{name}".endswith(LENT)
        }
        for weight in _slices_of(module):
            linear = weight._module_info.module
            if linear in linears and weight._module_info.param_name == "weight":
                self._attach(weight, linear, len(self._weights))
                self._weights.append(weight)

    def _attach(self, weight: Any, linear: Any, place: int) -> None:
        """Give the slice of one weight the two methods that FSDP2 asks for."""
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        matmuls = linear.linear_mm_config

        def pre(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
            """Return this rank's rows in fp8, padded as FSDP2 keeps them, and their scale."""
            scale = self._scales[place]
            rows = weight._sharded_param_data.view(weight.padded_sharded_param_size)
            return (cast_to_float8(rows, scale).view(torch.uint8),), (scale,)

        def post(outputs: Any, scales: Any, param_dtype: Any, *, out: Tensor | None = None) -> Any:
            """Return the weight of all ranks' rows; FSDP2 cuts off padding."""
            (data,), (scale,) = outputs, scales
            if out is not None:
                out._scale = scale  # type: ignore[attr-defined]
                return None
            role = GemmInputRole.WEIGHT
            numbers = data.view(torch.float8_e4m3fn)
            return Float8TrainingTensor(numbers, scale, param_dtype, matmuls, role), (data,)

        weight._sharded_local_tensor.fsdp_pre_all_gather = pre
        weight._sharded_local_tensor.fsdp_post_all_gather = post
        weight._init_extensions()

    def refresh(self, *given: Any) -> None:
        """Make the scales of the weights as they are now; a collective.

        Weights that are only read, as in an evaluation, may be others for a while, so their scales
        count for one pass.
        """
        learns = torch.is_grad_enabled()
        if self._weights and not (self._fresh and learns):
            with torch.no_grad():
                self._scales = self._new_scales()
            self._fresh = learns

    def _new_scales(self) -> tuple[Tensor, ...]:
        from torchao.float8.float8_utils import amax_to_scale

        slices = [weight._sharded_param_data for weight in self._weights]
        norms = torch._foreach_norm(slices, float("inf"))  # type: ignore[attr-defined]
        largest = torch.stack(norms).float()
        if self._peers is not None:
            largest = all_reduce(largest, "max", self._peers)
        scales = amax_to_scale(largest, torch.float8_e4m3fn, round_scales_to_power_of_2=True)
        return scales.repeat_interleave(APART)[::APART].unbind()

    def outdate(self, *given: Any) -> None:
        """Let the next pass make scales anew, since weights have changed."""
        self._fresh = False

    def sent(self) -> GatheredInFloat8:
        """Return what was gathered, by the buffers that FSDP2 gathered it into."""
        buffers = [buffer for weight in self._weights for buffer in weight.all_gather_outputs]
        as_fp8 = [buffer for buffer in buffers if buffer.dtype is torch.uint8]
        return GatheredInFloat8(
            len(as_fp8), len(self._weights) - len(as_fp8), sum(b.nbytes for b in as_fp8)
        )


def _slices_of(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's own records of the parameters that it slices with a module."""
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    if group is not None:
        yield from group.fsdp_params
