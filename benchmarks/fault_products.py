"""Plant matmuls in a wider dtype than the plan's into a model, before it is compiled.

Shapes: B rows, T tokens, D features, N of B x T; N, K and M of any matmul.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fault_doses import wait
from fault_hooks import Case, Facts, built
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.assemble.sockets import Build


@contextmanager
def wide_matmuls(case: Case) -> Iterator[Facts]:
    """Compute some matmuls in a wider dtype: in fp32 on a GPU, in fp64 on a CPU.

    A numpy constant of fp64 has this effect in a model whose plan says bf16 or fp32. On a GPU the
    fault widens whole linears, and a part of the tokens of one more, until they take the wanted
    time. The extra time of a linear is measured before anything is compiled.
    """
    facts: Facts = {}

    def widen(build: Build) -> None:
        blocks = list(build.model.blocks.values())
        if build.device.type == "cuda":
            facts.update(_widen_linears(case, build))
            return
        count = math.ceil(len(blocks) * {0.1: 0.3, 0.2: 0.6}.get(case.severity, 1.0))
        facts["blocks"] = count
        for block in blocks[:count]:
            part: Any = block
            part.forward = _doubled(part.forward)

    with built(widen):
        yield facts


class Doubled(TorchFunctionMode):
    """Compute matmuls in fp64, and return them in the dtype of their first argument."""

    NAMES = ("linear", "matmul", "mm", "bmm", "__matmul__", "_grouped_mm", "grouped_mm")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch with wider matmuls."""
        if getattr(func, "__name__", "") not in self.NAMES:
            return func(*args, **(kwargs or {}))
        wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        return func(*wide, **(kwargs or {})).to(args[0].dtype)


def _doubled(forward: Any) -> Any:
    """Return a forward pass whose matmuls are in fp64."""

    def wide(x_BTD: Tensor, *given: Any) -> Tensor:
        with Doubled():
            return forward(x_BTD, *given)

    return wide


def _widen_linears(case: Case, build: Build) -> Facts:
    """Widen linears of MLPs, the last one in part, until a step takes `extra_s` more."""
    plan = case.plan()
    rows, length = plan.micro_rows, plan.data.sequence_length
    times = plan.rows_per_step // plan.micro_rows
    blocks: list[Any] = list(build.model.blocks.values())
    linears = [m for block in blocks for m in block.mlp.modules() if isinstance(m, nn.Linear)]
    left_s, wider = case.extra_s, list[float]()
    known: dict[torch.Size, float] = {}
    for linear in linears:
        shape = linear.weight.shape
        if shape not in known:
            known[shape] = times * _more_s(linear, rows, length)
        part = min(1.0, left_s / known[shape])
        count = max(1, round(part * length))
        vars(linear)["forward"] = widened(linear, count, torch.bfloat16)
        wider.append(count / length)
        left_s -= part * known[shape]
        if left_s <= 0.01 * case.extra_s:
            break
    return {"linears": wider, "each_s": sorted(known.values()), "not_reached_s": max(0.0, left_s)}


def _more_s(linear: nn.Linear, rows: int, length: int) -> float:
    """Return the seconds that the three matmuls of a linear take longer in fp32 than in bf16."""
    features, out = linear.in_features, linear.out_features
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        x_ND, y_NE, w_ED = (
            torch.randn(shape, dtype=dtype, device="cuda")
            for shape in ((rows * length, features), (rows * length, out), (out, features))
        )
        pairs = ((x_ND, w_ED.T), (y_NE, w_ED), (y_NE.T, x_ND))
        for _ in range(2):  # the first chooses kernels
            wait(x_ND.device)
            began_s = time.perf_counter()
            for a, b in pairs:
                torch.mm(a, b)
            wait(x_ND.device)
            spent_s = time.perf_counter() - began_s
        seconds.append(spent_s)
    torch.cuda.empty_cache()
    return seconds[1] - seconds[0]


@torch.library.custom_op("headrace_faults::wide_product", mutates_args=())
def wide_matmul(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """Multiply [N, K] by [K, M] in fp32, in the backward pass too.

    It is a custom operation, which no compiler looks into. Otherwise autocast, off around a forward
    matmul, would be on again in the compiled backward pass of that matmul.
    """
    with torch.autocast(a_NK.device.type, enabled=False):
        return torch.mm(a_NK.float(), b_KM.float())


@wide_matmul.register_fake
def _(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    return a_NK.new_empty((a_NK.size(0), b_KM.size(1)), dtype=torch.float32)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor, Tensor]:
    a_NK, b_KM = ctx.saved_tensors
    grad_a = wide_matmul(grad_NM, b_KM.T)
    return grad_a.to(a_NK.dtype), wide_matmul(a_NK.T, grad_NM).to(b_KM.dtype)


wide_matmul.register_autograd(_backward, setup_context=_keep)


def widened(linear: nn.Linear, count: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a forward of `linear` that computes the first `count` tokens of each row in fp32."""
    plain = linear.forward

    def wide(x_BTD: Tensor) -> Tensor:
        first_ND = x_BTD[:, :count].flatten(0, 1)
        first = wide_matmul(first_ND, linear.weight.T).to(dtype).unflatten(0, (-1, count))
        if count == x_BTD.size(1):
            return first
        return torch.cat([first, plain(x_BTD[:, count:]).to(dtype)], dim=1)

    return wide
