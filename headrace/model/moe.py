"""A mixture of experts in the place of the MLP: each token goes through `top_k` of `experts`.

Token choice without capacity: the rows of a micro-batch are copied once per choice, sorted by
expert and multiplied in groups (kernels/grouped_linear), so no token is dropped or padded and every
gradient is exact. The router works in fp32 even under autocast: rounding flips choices. The experts
are fused into parameters of three dimensions, `gate_up` and `down` (or `up` and `down` without a
gate), with gate and up rows interleaved as in mlp.py, so that a split over the hidden features is a
contiguous slice. Experts have no biases.

Balance is sequence-wise (arXiv 2412.19437, eq. 17 to 20): for each row of the micro-batch
`T x sum_e f_e P_e`, where f_e = E / (k T) x choices of expert e in the row, and P_e is the row's
mean probability of e. The sum over rows is additive, so accumulation, data parallelism and
pipelines add it up; divided by the global count of routed tokens, it is the mean over rows of
`balance x sum_e f_e P_e`, which is `balance` when all is even. Ignored and padded targets are
tokens too: they are routed, so they count, above and below. The module keeps the sum during a
forward pass and hands it out once (`take_balance`); a block's recomputation keeps nothing.

Ranks that share every row each have t = T / R tokens of it. Each adds up its own probabilities, and
f_e is the whole row's: the ranks sum the choices that they counted, E numbers of a row, which have
no gradient. `balance x sum_e f_e x (sum of its own p_e)` is then a rank's part of the row's balance
loss, and the parts add up to it, as gradients do.

Source: arXiv 2101.03961, 2211.15841, 2412.19437. Shapes: B rows, T tokens, N = B x T, D features,
F hidden features, E experts, k choices of a token.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig
from headrace.kernels.autocast import compute_dtype
from headrace.kernels.grouped_linear import grouped_linear
from headrace.model.mlp import ACTIVATIONS, gate_groups
from headrace.parallel.tensor import Peers, all_reduce


class ExpertLayer(nn.Module):
    """Apply to each token `top_k` of `experts` gated or plain MLPs.

    Args:
        config: the decoder's shape.
        layer: number of the block.
        experts: MLPs of the block.
        top_k: MLPs that a token goes through.
        ffn: hidden features of one.
        balance: weight of the balance loss in nats.
        norm_topk: whether the weights of a token's choices add up to 1.
        sharers: the ranks that each have a part of every row; None where rows are whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        experts: int,
        top_k: int,
        ffn: int,
        balance: float,
        norm_topk: bool,
        sharers: Peers | None = None,
    ) -> None:
        super().__init__()
        self.sharers = sharers
        self.experts, self.top_k, self.balance, self.norm_topk = experts, top_k, balance, norm_topk
        gated = config.gated
        self.gate = F.silu if config.activation == "swiglu" else ACTIVATIONS["gelu_tanh"]
        self.units = gate_groups(config.model_copy(update={"ffn": ffn})) if gated else ffn
        self.group = ffn // self.units
        self.activate: Callable[[Tensor], Tensor] = (
            self._gated if gated else ACTIVATIONS[config.activation]
        )
        self.first = "gate_up" if gated else "up"
        self.column_parameters: Mapping[str, int] = {self.first: 1}
        self.row_parameters: Mapping[str, int] = {"down": 2}
        width = 2 * ffn if gated else ffn
        self.router = nn.Linear(config.dim, experts, bias=False)
        self.register_parameter(self.first, nn.Parameter(torch.empty(experts, width, config.dim)))
        self.down = nn.Parameter(torch.empty(experts, config.dim, ffn))
        self.through: Callable[[Tensor, Tensor], Tensor] = self.multiply_all
        """What takes rows sorted by expert to their experts, and how many rows each has."""
        self.kept_balance: Tensor | None = None
        self.routed_E: Tensor | None = None
        """Choices of each expert in the last forward pass, of whole rows."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        B, T, D = x_BTD.shape
        with torch.autocast(x_BTD.device.type, enabled=False):
            logits_BTE = F.linear(x_BTD.float(), self.router.weight.float())
            probability_BTE = logits_BTE.softmax(-1)
        weight_BTk, expert_BTk = probability_BTE.topk(self.top_k)
        if self.norm_topk:
            weight_BTk = weight_BTk / weight_BTk.sum(-1, keepdim=True)
        choices_BE = self._count(probability_BTE, expert_BTk)
        order = expert_BTk.flatten().argsort(stable=True)  # the choices, sorted by expert
        rows = x_BTD.to(compute_dtype(x_BTD)).flatten(0, 1)[order // self.top_k]
        made = self.through(rows, choices_BE.sum(0))
        done = made[order.argsort()].view(B, T, self.top_k, D)
        mixed = (done * weight_BTk[..., None].to(done.dtype)).sum(2)
        return mixed.to(done.dtype)  # autocast sums in fp32 on a GPU

    def multiply_all(self, rows: Tensor, rows_E: Tensor) -> Tensor:
        """Return what each expert makes of its rows, which are sorted by expert.

        Args:
            rows: of all experts that are here, [any number, D].
            rows_E: how many of them each expert has.
        """
        ends_E = rows_E.cumsum(0).int()
        hidden = self.activate(self._multiply(rows, self.get_parameter(self.first), ends_E))
        return self._multiply(hidden, self.down, ends_E)

    def take_balance(self) -> Tensor | None:
        """Return the last forward pass's balance loss, summed over rows; None if taken before.

        Where ranks share rows, it is this rank's part of the sum.
        """
        kept, self.kept_balance = self.kept_balance, None
        return kept

    def _count(self, probability_BTE: Tensor, expert_BTk: Tensor) -> Tensor:
        """Count each expert's choices in each row [B, E]; keep what the balance loss needs."""
        B, T, E = probability_BTE.shape
        chosen = expert_BTk.flatten(1)
        choices_BE = torch.zeros(B, E, dtype=torch.long, device=chosen.device).scatter_add_(
            1, chosen, torch.ones_like(chosen)
        )
        if not torch.is_grad_enabled():
            return choices_BE
        routed_BE, length = choices_BE, T
        if self.sharers is not None:
            routed_BE = all_reduce(choices_BE, "sum", self.sharers)
            length = T * self.sharers.ranks
        share_BE = routed_BE.float() * (E / (self.top_k * length))
        balance = self.balance * T * (share_BE * probability_BTE.mean(1)).sum()
        if not _is_recomputation():
            self.kept_balance, self.routed_E = balance, routed_BE.sum(0)
        return choices_BE

    def _multiply(self, rows: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
        return grouped_linear(rows, weight.to(rows.dtype), ends_E)

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unflatten(-1, (-1, 2, self.group)).unbind(-2)
        return (self.gate(gate) * up).flatten(-2)


def _is_recomputation() -> bool:
    """Return whether this runs inside of a backward pass: what it kept would hold a second graph.

    The balance is computed there too, since checkpointing wants the same saved tensors again;
    torch's own asks for the running backward pass the same way. A compiled block keeps nothing
    there: see `skip_fwd_side_effects_in_bwd_under_checkpoint`.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
