"""Validation: the same held-out rows every time, in nats per token and bits per byte of text.

Bits per byte divides the total by the UTF-8 bytes that the targets stand for, so runs with
different tokenizers compare. The document token stands for no byte and counts as loss, not as text.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from headrace.data.loader import validation_batches
from headrace.model.head import IGNORED, cross_entropy
from headrace.sockets import Build, Work


@dataclass(frozen=True)
class Validation:
    """One evaluation."""

    loss_nats: float
    bits_per_byte: float
    tokens: int
    bytes: int


@torch.no_grad()
def evaluate(build: Build) -> Validation:
    """The model's loss on the plan's validation rows, summed in fp64 over all ranks."""
    plan, world = build.plan, build.world
    token_bytes = build.prepared.tokenizer.token_bytes
    one = torch.ones((), device=build.device)
    # Apple GPUs have no fp64.
    wide = torch.float32 if build.device.type == "mps" else torch.float64
    nats, tokens, text_bytes = torch.zeros((), dtype=wide, device=build.device), 0, 0
    work: list[Work] = []
    together = 1 if world.size("pipeline") == 1 else 4 * world.size("pipeline")  # stages overlap
    with ExitStack() as stack:
        for averaged in build.weights_for_eval:
            stack.enter_context(averaged(build))
        for micro in validation_batches(
            build.prepared.validation,
            plan.data.sequence_length,
            tokens=plan.eval.tokens,
            micro_rows=plan.micro_rows,
            rank=world.place("data"),
            ranks=world.size("data"),
            segments=build.mask.document,
        ):
            real = micro.targets_BT.numpy()
            real = real[real != IGNORED]
            tokens += real.size
            text_bytes += int(token_bytes[real].sum(dtype=np.int64))
            work.append(build.place(build, micro))
            if len(work) == together:
                nats += build.engine(build, work, cross_entropy, one)
                work = []
        if work:
            nats += build.engine(build, work, cross_entropy, one)
    # Replicas read other rows; parts of a row and stages add to the same loss.
    for axis in ("shard", "pipeline"):
        world.sum_(nats, axis)
    counts = torch.tensor([float(tokens), float(text_bytes)], dtype=torch.float64)
    total_tokens, total_bytes = world.sum_(counts, "data").tolist()
    return Validation(
        loss_nats=float(nats) / total_tokens,
        bits_per_byte=float(nats) / math.log(2) / total_bytes,
        tokens=int(total_tokens),
        bytes=int(total_bytes),
    )
