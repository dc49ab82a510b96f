"""Gather tables by themselves under FSDP2, and free what an evaluation gathered."""

from typing import Any

import torch
from torch import nn


def own_tables(model: Any) -> list[nn.Module]:
    """Return the embedding and the head, where each has a table of its own.

    As groups of their own they travel beside blocks: the head's weights while the last blocks run,
    its gradient from the beginning of the backward pass on. A table stays with what is left where
    its weight has to be there before it is called: where the output matrix is made into another one
    first, and where the call of the head is compiled, which a gather would break in two.
    """
    if model.config.tied_embeddings:
        return []
    replaced = vars(model).keys()  # methods that a technique gave it
    ends = (model.embed,) if {"head_inputs", "loss"} & replaced else (model.embed, model.head)
    return [table for table in ends if getattr(table, "weight", None) is not None]


def hand_over_gathered(head: nn.Module) -> None:
    """Let a head multiply its gathered weight, not the slice that it is called with.

    FSDP's hook is between these two. It would take a slice among the inputs for one of the states,
    and give it a gradient.
    """

    def without(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_ND, _, *others = given
        return hidden_ND, None, *others

    def gathered(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_ND, _, *others = given
        return hidden_ND, module.weight, *others

    head.register_forward_pre_hook(without, prepend=True)
    head.register_forward_pre_hook(gathered)


def free_after_evaluation(model: nn.Module, inputs: Any, output: Any) -> None:
    """Free weights after an evaluation, where no backward pass frees them."""
    from torch.distributed.fsdp import FSDPModule

    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
