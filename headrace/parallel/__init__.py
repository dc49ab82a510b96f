"""Hold the mechanisms on torch.distributed: axes, layouts, rings, pipelines."""
