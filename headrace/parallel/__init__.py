"""Floor 1: mechanisms on torch.distributed."""
