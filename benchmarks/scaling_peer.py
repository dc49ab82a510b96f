"""Time torchtitan's Llama 3 over several GPUs, sharded and compiled as torchtitan does it.

The model is that of peers.py. Its blocks keep every second matmul and attention where the shape
asks for it (torchtitan's selective checkpointing), are compiled one by one and sharded by FSDP2
in the groups of torchtitan 0.2.2 (models/llama3/infra/parallelize.py): embedding, blocks, norm with
head. Weights are fp32 slices, gathered in bf16, and gradients are summed in fp32. fp8 is
torchtitan's tensor-wise recipe with gathers in fp8 and scales that are computed for all weights at
once. Over tensor ranks rows are split as torchtitan splits them, and the loss over the vocabulary;
FSDP2 is there for its precision alone. Everything here runs in the ranks that scaling_ranks.py
starts.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from headrace.kernels.launches import COUNTS
from headrace.parallel.micro_pipeline import GATHERS, SCATTERS, compiling, share_memory
from headrace.parallel.world import World, open_world
from headrace.plan.plan import Plan
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


def split(model: Any, mesh: DeviceMesh) -> None:
    """Split a model's matrices over the ranks of a mesh, and its rows where they are not needed."""
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    others = (None,) * 3
    inside = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others)
        ),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    inside |= {name: ColwiseParallel() for name in columns}
    rows = ("attention.wo", "feed_forward.w2")
    inside |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in rows}
    for block in model.layers.children():
        parallelize_module(getattr(block, "_orig_mod", block), mesh, inside)


def shard(model: Any, mesh: DeviceMesh, *, checkpointed: bool) -> None:
    """Make a model ready for several GPUs: checkpoint, compile and shard its blocks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if mesh.size() == 1:  # for its precision alone
        how["reshard_after_forward"] = False
    fully_shard(model.tok_embeddings, **how)
    for name, compiled in list(model.layers.named_children()):
        block = getattr(compiled, "_orig_mod", compiled)
        block = selective(block) if checkpointed else block
        whole: Any = torch.compile(block, fullgraph=True)
        model.layers.register_module(name, whole)
        fully_shard(whole, **how)
    fully_shard([model.norm, model.output], **{**how, "reshard_after_forward": False})
    fully_shard(model, **how)


def read_titan(
    plan: Plan,
    shape: dict[str, Any],
    *,
    checkpointed: bool,
    warm: int,
    timed: int,
    blocks: int,
) -> Reading:
    """Time blocks of steps by their medians on the slowest rank; all ranks call this together.

    Args:
        plan: whose mesh, rows, fp8 and way of tensor parallelism the peer takes over.
        shape: what `peers.shape_of` returns, with the length of rows.
        checkpointed: whether blocks recompute what torchtitan's selective checkpointing drops.
        warm: steps that are not timed.
        timed: steps of a block.
        blocks: how many blocks.
    """
    from scaling_ranks import own_device

    device = own_device(torch.device("cuda"))
    reading = Reading()
    with open_world(plan.mesh, device) as world:
        torch.manual_seed(0)
        step = step_of(plan, shape, world, device, checkpointed=checkpointed)
        before = sent_beside()
        for _ in range(warm):
            step()
        if is_asynchronous(plan) and sent_beside() == before:
            reading.refused = "the compiler made no matmul of torchtitan's send beside itself"
            return reading
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


def is_asynchronous(plan: Plan) -> bool:
    """Return whether the peer sends beside its matmuls of tensor parallelism."""
    return getattr(plan.techniques.get("tensor_parallel"), "asynchronous", False)


def sent_beside() -> int:
    """Return how many matmuls have sent or taken something beside themselves until now."""
    return COUNTS[GATHERS] + COUNTS[SCATTERS]


def step_of(
    plan: Plan, shape: dict[str, Any], world: World, device: torch.device, *, checkpointed: bool
) -> Callable[[], None]:
    """Return the step of torchtitan's model as a plan lays it out."""
    import peers

    assert world.mesh is not None
    float8, tensor = "float8_linear" in plan.techniques, world.size("tensor") > 1
    model, _ = peers.torchtitan(shape, float8=float8, gathered=float8, device=device)
    if tensor:
        split(model, world.mesh["tensor"])
    if is_asynchronous(plan):
        share_memory(world.mesh["tensor"].get_group())
    shard(model, world.mesh["slices"], checkpointed=checkpointed)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_fn = torch.compile(lambda p, y: F.cross_entropy(p.flatten(0, 1).float(), y.flatten(0, 1)))
    torch.manual_seed(world.place("shard"))
    size = (plan.micro_rows, shape["length"])
    draw = partial(torch.randint, 0, shape["vocab"], size, device=device)

    def step() -> None:
        with (
            loss_parallel() if tensor else nullcontext(),
            compiling() if is_asynchronous(plan) else nullcontext(),
        ):
            x = draw()
            loss_fn(model(x), x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if float8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    return step
