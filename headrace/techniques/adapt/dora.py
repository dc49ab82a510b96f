"""Train where each row of a frozen weight points and how long it is, apart from each other.

LoRA's correction changes both at once. DoRA (model/lora) learns a correction of low rank for the
direction and one number for the length of every row, which starts at the row's own, so the first
step starts at the model that was given. Lengths are found without making the corrected weight, in
fp32, once a forward pass; no gradient goes through them (arXiv 2402.09353, section 4.3). Memory is
LoRA's and one kept result for each adapted linear. `dropout` acts on the correction alone, where
PEFT's acts on the frozen product too. Left out: a base in few bits. Source: arXiv 2402.09353.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.sockets import Build
from headrace.plan.technique import Card

LENGTHS = ".lora_m"
"""How the names of learned lengths end."""


class Dora(AdapterTechnique):
    """Train where each row of a frozen weight points and how long it is, apart from each other."""

    claims: ClassVar[tuple[str, ...]] = ("source",)
    magnitudes: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        buys=(
            "all that lora buys",
            "+3.7 points on commonsense reasoning over LoRA of the same rank, Llama 7B "
            "(arXiv 2402.09353, table 1)",
        ),
        costs=(
            "reading every adapted weight once more a forward pass, for its rows' lengths",
            "one kept result of each adapted linear (derived)",
        ),
        helps="small ranks, where lora does not reach what training all weights reaches",
        hurts="when lora reaches it: it is faster",
        source="arXiv 2402.09353",
    )

    def multiplies_fp32(self) -> bool:
        """Return True: the lengths of the rows of weight and correction."""
        return True

    def apply(self, build: Build) -> None:
        """Replace the chosen linears; lengths start at those of the weights' rows."""
        rows: dict[str, torch.Size] = {}
        for name in self.adapt(build):
            linear = build.model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            rows[name] = linear.weight.shape
        given = build.source

        def source(name: str, shape: torch.Size) -> Tensor:
            if not name.endswith(LENGTHS) or build.adapters is not None:
                return given(name, shape)
            linear = name.removesuffix(LENGTHS)
            return torch.linalg.vector_norm(given(f"{linear}.weight", rows[linear]), dim=1)

        build.source = source
