"""This module counts the launches of hand-written kernels, and picks the device of a launch.

A kernel behind a custom operation is launched by Python, in eager and in compiled code alike. So a
count beside the launch says what really ran, where neither a module's type nor a traced graph does.
Techniques read it as evidence: the count now less the count when they were applied.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

COUNTS: Counter[str] = Counter()
"""Launches of this process so far, by the kernel's name."""


def since(before: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return launches of kernels whose names begin with `prefix`, less those in `before`."""
    names = sorted(name for name in COUNTS if name.startswith(prefix))
    return {name: COUNTS[name] - before.get(name, 0) for name in names}


def on_device_of(like: Tensor) -> torch.cuda.device:
    """Make the device of `like` the current one, on which Triton launches; the host has none."""
    return torch.cuda.device(like.device if like.is_cuda else -1)
