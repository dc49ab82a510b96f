"""Train low-rank adapters of a frozen model instead of the model.

Finetuning a whole model holds a gradient and two moments for every weight. LoRA freezes them all
and trains a correction B A of rank `rank` beside each chosen linear (model/lora), so gradients and
optimizer state shrink from all weights to rank x (in + out) a linear. Activations stay: the
adapters' gradients need the same inputs. The backward pass skips the frozen weights' gradients,
a third of its products. B starts at zero, so the first step starts at the model that was given;
`export --to hf` adds B A into the weights, and `export --to peft` writes the adapters alone. Under
tensor parallelism a rank has the rows of B of the outputs that it computes, or the columns of A of
the inputs that it has, and the other matrix whole. Source: arXiv 2106.09685.
"""

from typing import ClassVar

from headrace.assemble.adapted import AdapterTechnique
from headrace.plan.technique import Card


class Lora(AdapterTechnique):
    """Train low-rank adapters of a frozen model instead of the model."""

    card: ClassVar[Card] = Card(
        buys="the gradients and optimizer state of all frozen weights: 12 bytes each (derived)",
        costs=(
            "two thin products beside every adapted linear",
            "a correction of rank `rank` may not reach what training all weights reaches",
        ),
        helps="finetuning a pretrained model on little data or little memory",
        hurts="pretraining, and finetuning that must learn much that is new",
        source="arXiv 2106.09685; arXiv 2312.03732; arXiv 2402.12354; arXiv 2405.09673",
    )
