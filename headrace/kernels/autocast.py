"""What autocast would compute in, for operations that it does not know.

Autocast casts the inputs of torch's own products. A custom operation, a grouped product or a loss
in chunks sees them as they came, and asks here.
"""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x` here: autocast's where it is on, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
