"""Time torchtitan's Llama 3 over several GPUs, sharded and compiled as torchtitan does it.

The model is that of peers.py. Its blocks keep every second matmul and attention where the shape
asks for it (torchtitan's selective checkpointing), are compiled one by one and sharded by FSDP2
in the groups of torchtitan 0.2.2 (models/llama3/infra/parallelize.py): embedding, blocks, norm with
head. Weights are fp32 slices, gathered in bf16, and gradients are summed in fp32. Everything here
runs in the ranks that scaling_ranks.py starts.
"""

from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from headrace.parallel.world import World, open_world
from headrace.plan.mesh_config import MeshConfig
from headrace.tuner.readings import Reading, StepClock

KEPT = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,
)
"""Operations whose results a block keeps, beside every second matmul."""


def selective(block: nn.Module) -> nn.Module:
    """Return the block with torchtitan's selective checkpointing of operations."""

    def contexts() -> Any:
        matmuls = {True: 0, False: 0}

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            once_more = context.is_recompute
            matmuls[once_more] += operation == torch.ops.aten.mm.default
            second = operation == torch.ops.aten.mm.default and matmuls[once_more] % 2 == 0
            keeps = operation in (*KEPT, torch.ops.aten.mm.default) and not second
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(block, context_fn=contexts, preserve_rng_state=False)


def shard(model: Any, world: World, *, checkpointed: bool) -> None:
    """Make a model ready for several GPUs: checkpoint, compile and shard its blocks."""
    assert world.mesh is not None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": world.mesh["slices"], "mp_policy": policy}
    fully_shard(model.tok_embeddings, **how)
    for name, compiled in list(model.layers.named_children()):
        block = getattr(compiled, "_orig_mod", compiled)
        block = selective(block) if checkpointed else block
        whole: Any = torch.compile(block, fullgraph=True)
        model.layers.register_module(name, whole)
        fully_shard(whole, **how)
    fully_shard([model.norm, model.output], **how, reshard_after_forward=False)
    fully_shard(model, **how)


def read_titan(
    shape: dict[str, Any],
    *,
    ranks: int,
    rows: int,
    checkpointed: bool,
    warm: int,
    timed: int,
    blocks: int,
) -> Reading:
    """Time blocks of steps by their medians on the slowest rank; all ranks call this together.

    Args:
        shape: what `peers.shape_of` returns, with the length of rows.
        ranks: GPUs.
        rows: rows of each GPU.
        checkpointed: whether blocks recompute what torchtitan's selective checkpointing drops.
        warm: steps that are not timed.
        timed: steps of a block.
        blocks: how many blocks.
    """
    import peers
    from scaling_ranks import own_device

    device = own_device(torch.device("cuda"))
    reading = Reading()
    with open_world(MeshConfig(data=ranks), device) as world:
        torch.manual_seed(0)
        model, _ = peers.torchtitan(shape)
        shard(model, world, checkpointed=checkpointed)
        torch.cuda.empty_cache()
        loss_fn = torch.compile(
            lambda p, y: F.cross_entropy(p.flatten(0, 1).float(), y.flatten(0, 1))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = partial(_step, model, loss_fn, optimizer, shape, rows)
        torch.manual_seed(world.rank)
        for _ in range(warm):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(blocks):
            world.any(False)
            clock = StepClock(device)
            clock.mark()
            for _ in range(timed):
                step()
                clock.mark()
            reading.seconds.append(max(world.gather(median(clock.seconds()))))
        reading.norms = world.gather(float(torch.cuda.max_memory_allocated()))
        reading.peak_bytes = max(reading.norms)
        reading.steps = warm + timed * blocks
    return reading


def _step(model: Any, loss_fn: Any, optimizer: Any, shape: dict[str, Any], rows: int) -> None:
    x = torch.randint(0, shape["vocab"], (rows, shape["length"]), device="cuda")
    loss_fn(model(x), x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
