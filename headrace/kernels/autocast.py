"""This module says what autocast would compute in, for operations that it does not know.

Autocast casts the inputs of torch's own matmuls. A custom operation, a grouped matmul or a loss in
chunks sees them as they came, and asks here.
"""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matmuls with `x` here: autocast's where it is on, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
