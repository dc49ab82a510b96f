"""Mechanisms on torch.distributed."""
