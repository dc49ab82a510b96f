"""What eager torch moves: bytes that the operations of a loss read and write, per logit."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.model.head import Objective, Vocabulary, capped

TOKENS, VOCAB = 8, 1024
FEW = ("gather", "nll_loss_forward")
"""Operations that read one number of each row."""


class Traffic(TorchDispatchMode):
    """Adds up the bytes of whole tensors of logits, not of views or of what is expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        whole = 4 * TOKENS * VOCAB
        if not (func.is_view or any(name in str(func) for name in FEW)):
            each = [x.untyped_storage().nbytes() for x in [*read, *made]]
            self.bytes += sum(size for size in each if size >= whole)
        return out


def of_loss(objective: Objective, cap: float = 0.0) -> dict[str, float]:
    """Return the bytes per fp32 logit that the loss moves in its forward and backward pass."""
    torch.manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,))
    forward, backward = Traffic(), Traffic()
    with forward:
        loss = objective(capped(logits, cap), targets, None, Vocabulary())
    with backward:
        torch.autograd.grad(loss, logits)
    found = {"forward": forward, "backward": backward}
    return {part: mode.bytes / (TOKENS * VOCAB) for part, mode in found.items()}
