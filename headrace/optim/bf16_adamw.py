"""Run AdamW over bf16 matrices in fp32: one kernel on a GPU, else torch's update of fp32 slices.

How a weight of 16 bits keeps what an update adds is in kernels/bf16_weight. A rank that holds a
slice of a matrix updates that. Source: arXiv 1711.05101; arXiv 2010.06192.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.kernels.adamw import Noise, Update, adamw_, biases
from headrace.kernels.bf16_weight import joined, keys_at, round_with_noise_, split_
from headrace.optim.adamw import make_adamw
from headrace.parallel.layout import local_of
from headrace.plan.plan import OptimizerConfig

SLICE_NUMBERS = 1 << 22
"""Numbers that are updated at once: 16 MiB of each fp32 temporary."""


class Bf16AdamW(torch.optim.Optimizer):
    """Run AdamW over bf16 matrices with fp32 arithmetic and moments, masked on the device.

    Args:
        config: the baseline's optimizer.
        named: bf16 matrices.
        rounding: the technique's knob.
        noise: name -> what makes a matrix's stochastic rounding its own.
        fused: whether one kernel does all of it, or torch's operations on slices.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        named: Mapping[str, nn.Parameter],
        *,
        rounding: str,
        noise: Callable[[str], Noise],
        fused: bool,
    ) -> None:
        groups = make_adamw(config, named).param_groups
        keys = ("params", "weight_decay", "lr", "betas", "eps")
        super().__init__([{k: g[k] for k in keys} for g in groups], {})
        self.found_inf: Tensor | None = None
        self.gradient_factor: Tensor | None = None
        self._keeps = rounding == "master"
        self._noise = {} if self._keeps else {p: noise(name) for name, p in named.items()}
        self._update = adamw_ if fused else in_slices_

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix; where `found_inf` is 1, weights and states stay as they are."""
        counts = []
        for group in self.param_groups:
            how = Update(
                group["lr"],
                group["betas"],
                group["eps"],
                group["weight_decay"],
                self.gradient_factor,
                self.found_inf,
            )
            moved = [p for p in group["params"] if p.grad is not None]
            states = [local_state(self.state[p] or self._start(p)) for p in moved]
            if not moved:
                continue
            if any(("rest" in state) != self._keeps for state in states):
                other = "stochastic" if self._keeps else "master"
                raise ConfigError(
                    "the checkpoint's weights were rounded otherwise than this plan rounds them",
                    mend(f"techniques.bf16_parameters.rounding={other}"),
                )
            steps = [state["step"] for state in states]
            counts += steps
            corrections = biases(steps, how.betas)
            for p, state, corrections_2 in zip(moved, states, corrections, strict=True):
                weight = local_of(p.detach())
                if not weight.numel():  # of slices that do not come out even
                    continue
                self._update(
                    weight,
                    state.get("rest"),
                    self._noise.get(p),
                    local_of(p.grad),
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    state["step"],
                    corrections_2,
                    how,
                )
        if counts:
            one = torch.ones_like(counts[0]) if self.found_inf is None else 1 - self.found_inf
            # A list: one number alone would be read by the host.
            torch._foreach_add_(counts, [one] * len(counts))  # type: ignore[attr-defined]

    def _start(self, p: nn.Parameter) -> dict[str, Tensor]:
        """Make moments of zero; the master is the weight."""
        state = self.state[p]
        state["step"] = torch.zeros((), device=p.device)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(p, dtype=torch.float32)
        if self._keeps:
            state["rest"] = torch.zeros_like(p, dtype=torch.int16)
        return state


def local_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with the part of each tensor that this rank holds."""
    return {key: local_of(value) for key, value in state.items()}


def in_slices_(
    weight: Tensor,
    rest: Tensor | None,
    noise: Noise | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    corrections_2: Tensor,
    how: Update,
) -> None:
    """Do what `adamw_` does by torch's own fused update, slice by slice; see there."""
    columns = weight.size(-1)
    weight, grad, exp_avg, exp_avg_sq = (
        t.reshape(-1, columns) for t in (weight, grad, exp_avg, exp_avg_sq)
    )
    count = max(1, SLICE_NUMBERS // columns)
    for start in range(0, weight.size(0), count):
        rows = slice(start, start + count)
        left = None if rest is None else rest.view(-1, columns)[rows]
        values, wide = joined(weight[rows], left), grad[rows].float()
        adamw(
            [values],
            [wide if how.factor is None else wide * how.factor],
            [exp_avg[rows]],
            [exp_avg_sq[rows]],
            [],
            [step.clone()],
            fused=True,
            found_inf=how.found_inf,
            amsgrad=False,
            beta1=how.betas[0],
            beta2=how.betas[1],
            lr=how.lr,
            weight_decay=how.weight_decay,
            eps=how.eps,
            maximize=False,
        )
        if left is not None:
            split_(weight[rows], left, values)
        else:  # masked values are bf16 numbers, which no noise moves
            assert noise is not None
            round_with_noise_(
                weight[rows],
                values,
                noise.rows_R[rows],
                noise.columns_C,
                keys_at(noise.keys_2, step),
            )
