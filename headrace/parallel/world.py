"""The processes of a run: who am I, how many are we, and the few things that we tell each other.

Started alone, a run is a world of one and touches no process group. Started by `torchrun`, it joins
through gloo for host tensors and NCCL for GPU tensors.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.core.errors import ConfigError

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in buckets of about this size (DDP's default, arXiv 2006.15704)."""


@dataclass(frozen=True)
class World:
    """One process's place among all."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks in place; a world of one leaves it alone."""
        if self.ranks > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients_(self, tensors: list[Tensor]) -> None:
        """Sum many tensors over all ranks in place, in buckets of one dtype."""
        if self.ranks == 1:
            return
        bucket: list[Tensor] = []
        filled = 0
        for tensor in tensors:
            if bucket and (tensor.dtype != bucket[0].dtype or filled > BUCKET_BYTES):
                self._reduce_bucket(bucket)
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += tensor.nbytes
        if bucket:
            self._reduce_bucket(bucket)

    def _reduce_bucket(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([t.flatten() for t in bucket])
        dist.all_reduce(flat)
        pieces = flat.split([t.numel() for t in bucket])
        for tensor, piece in zip(bucket, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether any rank says True; every rank gets the same answer."""
        if self.ranks == 1:
            return flag
        told = torch.tensor([int(flag)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, a JSON-like object, in rank order."""
        if self.ranks == 1:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.ranks > 1:
            dist.barrier()


@contextmanager
def open_world(ranks: int, device: torch.device) -> Iterator[World]:
    """Join the other processes, or be alone; leave at the end.

    Args:
        ranks: how many the plan's mesh wants.
        device: where gradients live.

    Raises:
        ConfigError: started with another number of processes than the plan's mesh.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise ConfigError(
            f"the plan's mesh wants {ranks} processes and {started} were started",
            f"torchrun --nproc-per-node {ranks} -m headrace train ... (or mesh.data={started})",
        )
    if ranks == 1 or dist.is_initialized():
        rank = dist.get_rank() if dist.is_initialized() else 0
        yield World(rank, ranks, int(os.environ.get("LOCAL_RANK", "0")))
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    dist.init_process_group(backend)
    try:
        yield World(dist.get_rank(), ranks, local_rank)
    finally:
        dist.destroy_process_group()
