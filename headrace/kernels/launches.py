"""How often each hand-written kernel was launched in this process, and on which device.

A kernel behind a custom operation is launched by Python, in eager and in compiled code alike, so a
count beside the launch says what really ran, where neither a module's type nor a traced graph does.
Techniques read it as evidence: the count now less the count when they were applied.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

COUNTS: Counter[str] = Counter()
"""Launches so far by the kernel's name."""


def since(before: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Launches of kernels whose names begin with `prefix`, less those in `before`."""
    found = {name: count for name, count in COUNTS.items() if name.startswith(prefix)}
    return {name: count - before.get(name, 0) for name, count in sorted(found.items())}


def on_device_of(like: Tensor) -> torch.cuda.device:
    """Triton launches on the current device; on the host (its interpreter) there is none."""
    return torch.cuda.device(like.device if like.is_cuda else -1)
