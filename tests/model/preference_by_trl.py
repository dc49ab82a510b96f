"""Twenty random pairs, and what `trl` says of them: `python tests/model/preference_by_trl.py`.

The losses are those of trl's trainers (1.16), whose models are replaced by log-probabilities that
are given. `preference_by_trl.json` beside this file holds what it printed; the slow test of
`test_preference_loss.py` computes it again.
"""

import json
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_suffix(".json")
BETA, GAMMA, SMOOTHING = 0.3, 0.7, 0.15


def pairs() -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each pair the log-probabilities of both answers' tokens, and the reference's."""
    random = torch.Generator().manual_seed(7)
    made = []
    for _ in range(20):
        sides = []
        for _ in range(2):
            count = int(torch.randint(1, 9, (1,), generator=random))
            own = -4 * torch.rand(count, generator=random) ** 2
            sides.append((own, own + 0.8 * torch.randn(count, generator=random)))
        made.append(sides)
    return made


def by_trl() -> dict[str, list[float]]:
    """Return each loss of each pair, in nats."""
    cpo: Any = import_module("trl.experimental.cpo").CPOTrainer
    orpo: Any = import_module("trl.experimental.orpo").ORPOTrainer
    losses: dict[str, list[float]] = defaultdict(list)
    here = SimpleNamespace(device=torch.device("cpu"))
    for chosen, rejected in pairs():
        losses["dpo"].append(_by_dpo("sigmoid", chosen, rejected))
        losses["ipo"].append(_by_dpo("ipo", chosen, rejected))
        plain = {"alpha": 0.0, "beta": BETA, "accelerator": here, "label_smoothing": SMOOTHING}
        ratios = [(own - reference).sum()[None] for own, reference in (chosen, rejected)]
        cdpo = SimpleNamespace(**plain, loss_type="sigmoid")
        losses["cdpo"] += cpo.cpo_loss(cdpo, *ratios)[0].tolist()
        means = [own.mean()[None] for own, _ in (chosen, rejected)]
        for name, smoothing in (("simpo", 0.0), ("csimpo", SMOOTHING)):
            asked = {**plain, "label_smoothing": smoothing}
            simpo = SimpleNamespace(**asked, loss_type="simpo", simpo_gamma=GAMMA)
            losses[name] += cpo.cpo_loss(simpo, *means)[0].tolist()
        ratio = orpo.odds_ratio_loss(SimpleNamespace(**plain), *means)[0]
        losses["orpo"] += (-means[0] - ratio).tolist()
    return dict(losses)


class _Given(nn.Module):
    """A model whose log-probabilities are given, [2, T]."""

    def __init__(self, logs: Tensor) -> None:
        super().__init__()
        self.logs = logs

    def forward(self, **_: Any) -> SimpleNamespace:
        """Return what trl reads of a model's output."""
        nothing = torch.zeros_like(self.logs)
        numbers = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool()}
        return SimpleNamespace(log_probs=self.logs, **numbers)


def _by_dpo(name: str, chosen: tuple[Tensor, Tensor], rejected: tuple[Tensor, Tensor]) -> float:
    """Return the loss of one pair by trl's DPOTrainer, whose models are given log-probabilities."""
    width = max(len(chosen[0]), len(rejected[0])) + 2
    mask = torch.zeros(2, width, dtype=torch.long)
    logs = torch.zeros(2, 2, width - 1)
    for row, side in enumerate((chosen, rejected)):
        mask[row, 2 : 2 + len(side[0])] = 1  # after a prompt of two tokens
        for model, values in enumerate(side):
            logs[model, row, 1 : 1 + len(values)] = values
    models = [_Given(own) for own in logs]
    trainer: Any = SimpleNamespace(
        model=models[0],
        ref_model=models[1],
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=BETA,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(2, width, dtype=torch.long),
        "attention_mask": torch.ones(2, width, dtype=torch.long),
        "completion_mask": mask,
    }
    module: Any = import_module("trl.trainer.dpo_trainer")
    quiet, module.disable_gradient_checkpointing = (
        module.disable_gradient_checkpointing,
        lambda *_: torch.no_grad(),
    )
    try:
        return float(module.DPOTrainer._compute_loss(trainer, models[0], inputs, False))
    finally:
        module.disable_gradient_checkpointing = quiet


if __name__ == "__main__":
    FILE.write_text(json.dumps(by_trl(), indent=1) + "\n")
