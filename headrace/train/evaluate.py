"""Measure the validation loss, always on the same held-out sequences.

It is in nats per token and in bits per byte of text. Bits per byte are the total loss divided by
the UTF-8 bytes that the targets stand for, so runs with different tokenizers can be compared. The
document token stands for no byte: it counts as loss, not as text.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError, Diverged
from headrace.core.remedy import mend
from headrace.data.loader import validation_batches, validation_rows
from headrace.model.head import IGNORED, cross_entropy
from headrace.plan.doubts import BYTE_BITS
from headrace.plan.technique import Doubt


@dataclass(frozen=True)
class Validation:
    """Hold the result of one evaluation."""

    loss_nats: float
    bits_per_byte: float
    tokens: int
    bytes: int
    share: float = 1.0
    """Share of the validation text's targets that were evaluated, from 0 to 1."""


def finite(validation: Validation) -> Validation:
    """Return an evaluation unchanged where its loss is finite.

    Raises:
        Diverged: the loss is NaN or infinite.
    """
    if not math.isfinite(validation.loss_nats):
        raise Diverged(
            f"the validation loss is {validation.loss_nats}",
            "the weights of an earlier checkpoint in the model",
        )
    return validation


def count_targets(build: Build, tokens: int | None = None) -> tuple[int, int]:
    """Return the targets that an evaluation counts over all ranks, and their bytes of text.

    Args:
        build: the run.
        tokens: as `evaluate` takes it.

    Raises:
        ConfigError: no target of these sequences counts, or none stands for text.
    """
    bytes_V = torch.from_numpy(build.prepared.tokenizer.token_bytes).to(build.device, torch.int64)
    counts = torch.zeros(2, dtype=torch.int64, device=build.device)
    for work in _placed(build, tokens):
        counts += _counts(work.targets_BT, bytes_V)
    return _summed(build, counts, tokens)


def doubts(
    build: Build,
    tokens: int | None,
    targets: int | None,
    *,
    limit: str = "eval.tokens",
    bits_per_byte: float | None = None,
) -> list[Doubt]:
    """Return the reasons to doubt a validation loss.

    Args:
        build: the run.
        tokens: as `evaluate` takes it.
        targets: the number of targets that count; without it, all targets of the text.
        limit: the key or option that `tokens` comes from.
        bits_per_byte: the loss, where it was measured.
    """
    text_doubts = build.prepared.sides(build.plan.data.validation).doubts(
        build.plan.data.sequence_length,
        targets=targets,
        share=_share(build, tokens),
        limit=limit,
        bits_per_byte=bits_per_byte,
    )
    return [*text_doubts, *_guessed(build)]


def _guessed(build: Build) -> Iterator[Doubt]:
    """Yield a doubt where a uniform guess already reaches the goal in bits per byte."""
    validation, target = build.prepared.validation, build.plan.goal.bits_per_byte
    entries = build.prepared.tokenizer.vocab
    if target is None or not validation.text_bytes:
        return
    guess = math.log2(entries) * (validation.tokens - 1) / validation.text_bytes
    if guess <= target <= BYTE_BITS:  # a larger target is doubted for any text
        yield Doubt(
            f"goal.bits_per_byte = {target:g} is reached before anything is learned: a uniform "
            f"guess of the tokenizer's {entries:,} entries has {guess:.3g} on this text",
            mend(f"goal.bits_per_byte={guess / 2:.2g}"),
            kind="guess",
            numbers={"bits_per_byte": guess, "target": target},
        )


@torch.no_grad()
def evaluate(build: Build, tokens: int | None = None) -> Validation:
    """Return the model's loss on validation sequences, summed in fp64 over all ranks.

    Args:
        build: the run.
        tokens: the most tokens, in sequences spread evenly over the text; None for all of it.

    Raises:
        ConfigError: no target of these sequences counts, or none stands for text.
    """
    world = build.world
    bytes_V = torch.from_numpy(build.prepared.tokenizer.token_bytes).to(build.device, torch.int64)
    one = torch.ones((), device=build.device)
    # Apple GPUs have no fp64.
    wide = torch.float32 if build.device.type == "mps" else torch.float64
    nats = torch.zeros((), dtype=wide, device=build.device)
    counts = torch.zeros(2, dtype=torch.int64, device=build.device)
    work: list[MicroBatch] = []
    together = 1 if world.size("pipeline") == 1 else 4 * world.size("pipeline")  # stages overlap
    with ExitStack() as stack:
        for averaged in build.weights_for_eval:
            stack.enter_context(averaged(build))
        for placed in _placed(build, tokens):
            work.append(placed)
            counts += _counts(work[-1].targets_BT, bytes_V)
            if len(work) == together:
                nats += build.engine(build, work, cross_entropy, one)
                work = []
        if work:
            nats += build.engine(build, work, cross_entropy, one)
    # Replicas evaluate other sequences; parts of a sequence and stages add to the same loss.
    for axis in ("shard", "pipeline"):
        world.sum_(nats, axis)
    counted, text_bytes = _summed(build, counts, tokens)
    return Validation(
        loss_nats=float(nats) / counted,
        bits_per_byte=float(nats) / math.log(2) / text_bytes,
        tokens=counted,
        bytes=text_bytes,
        share=_share(build, tokens),
    )


def _placed(build: Build, tokens: int | None) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of an evaluation, on the device."""
    plan, world = build.plan, build.world
    for micro in validation_batches(
        build.prepared.validation,
        plan.data.sequence_length,
        tokens=tokens,
        micro_rows=plan.micro_rows,
        rank=world.place("data"),
        ranks=world.size("data"),
        segments=build.mask.document,
    ):
        yield build.place(build, micro)


def _summed(build: Build, counts: Tensor, tokens: int | None) -> tuple[int, int]:
    """Return the targets and the bytes of text over all ranks; refuse where there are none."""
    counted, text_bytes = build.world.sum_(counts, "shard").tolist()
    text_bytes = round(text_bytes * build.prepared.validation.raw_share)
    if counted and text_bytes:
        return counted, text_bytes
    rows = "all rows" if tokens is None else f"the rows of eval.tokens = {tokens}"
    raise ConfigError(
        f"{rows} of the validation text, which has {build.prepared.validation.tokens - 1:,} "
        f"targets, have {counted:,} that count, and these stand for {text_bytes:,} bytes of text: "
        "there is no loss to measure",
        _more_targets(build, tokens),
    )


def _more_targets(build: Build, tokens: int | None) -> str:
    """Return the remedy of an evaluation that has no targets."""
    plan, whole = build.plan, build.prepared.validation.tokens - 1
    more = "data.validation=PATH of more text"
    if _share(build, tokens) < 1:
        shorter = "a smaller techniques.prefix_lm.tokens, " if build.mask.prefix else ""
        return f"eval.tokens={whole + plan.data.sequence_length}, {shorter}or {more}"
    if not build.mask.prefix:
        return more
    if 2 <= whole < plan.data.sequence_length and not build.mask.document:
        return f"techniques.prefix_lm.tokens={whole}, or {more}"
    return f"--without prefix_lm, or {more}"


def _share(build: Build, tokens: int | None) -> float:
    """Return the share of the validation text's targets that `tokens` tokens cover."""
    shards, length = build.prepared.validation, build.plan.data.sequence_length
    rows = validation_rows(shards, length, tokens)
    whole = shards.tokens - 1
    cut = max(0, (rows[-1] + 1) * length - whole)  # the last sequence of the text may be short
    return (len(rows) * length - cut) / whole


def _counts(targets_BT: Tensor, bytes_V: Tensor) -> Tensor:
    """Return the targets that count and the bytes of text that they stand for, int64 [2]."""
    counted_BT = targets_BT != IGNORED
    bytes_BT = bytes_V[targets_BT.where(counted_BT, 0)].where(counted_BT, 0)
    return torch.stack((counted_BT.sum(), bytes_BT.sum()))
