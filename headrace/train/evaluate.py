"""Measure the validation loss, always on the same held-out sequences.

It is in nats per token and in bits per byte of text. Bits per byte are the total loss divided by
the UTF-8 bytes that the targets stand for, so runs with different tokenizers can be compared. The
document token stands for no byte: it counts as loss, not as text.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build, MicroBatch
from headrace.assemble.vision import ACCURACY, images_of_validation
from headrace.core.errors import ConfigError, Diverged
from headrace.core.remedy import mend
from headrace.core.units import part_of_text
from headrace.data.loader import ValidationRows, validation_batches
from headrace.model.head import IGNORED, Vocabulary, cross_entropy
from headrace.plan.doubts import BYTE_BITS
from headrace.plan.technique import Doubt

INSIDE, BEYOND = 4, 16
"""Number of bins of places in the trained length, and the most after it."""


@dataclass(frozen=True)
class Validation:
    """Hold the result of one evaluation."""

    loss_nats: float
    bits_per_byte: float
    tokens: int
    bytes: int
    share: float = 1.0
    """Share of the validation text's targets that were evaluated, from 0 to 1."""
    more: Mapping[str, float] = field(default_factory=dict)
    """What techniques measured of the text beside its loss."""

    @property
    def numbers(self) -> dict[str, float]:
        """Return the loss in both units, and what was measured beside it."""
        return {"loss_nats": self.loss_nats, "bits_per_byte": self.bits_per_byte, **self.more}

    @property
    def line(self) -> str:
        """Return it as a line for a reader."""
        part = f", {part_of_text(self.share)}" * (self.share < 1)
        if ACCURACY in self.more:
            loss = f"accuracy {self.more[ACCURACY]:.2%}, loss {self.loss_nats:.3f}"
            return f"validation {loss}{f' over {self.share:.0%} of the images' * (self.share < 1)}"
        more = "".join(f", {name} {value:.4g}" for name, value in self.more.items())
        loss = f"bits per byte, loss {self.loss_nats:.3f}"
        return f"validation {self.bits_per_byte:.3f} {loss}{more}{part}"


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
    for work in evaluation_batches(build, tokens):
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
    if build.plan.vision is not None:
        return []
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


class LossByPlace:
    """Sum the loss of an evaluation by the places of its targets.

    A target's place is what its token knows as its position: in its document where documents are
    masked, else in its row. So the loss at a place is that with as many tokens before it.

    Args:
        ends: the ends of the bins, rising; the first bin begins at place 0.
        device: where the model is.
    """

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.ends = [*ends]
        self._ends = torch.tensor(self.ends, device=device)
        self.nats = torch.zeros(len(self.ends), dtype=wide, device=device)
        self.targets = torch.zeros(len(self.ends), dtype=torch.int64, device=device)

    def with_bins(self, work: MicroBatch) -> MicroBatch:
        """Return the micro-batch with the bin of each token, for the objective."""
        places_BT = work.rows.positions_BT.expand(work.targets_BT.shape).contiguous()
        bins_BT = torch.bucketize(places_BT, self._ends, right=True)
        return work._replace(extras={**(work.extras or {}), "bin": bins_BT.reshape(-1)})

    def objective(
        self, logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
    ) -> Tensor:
        """Return the summed negative log likelihood, and add each token's to its bin."""
        counted_N = targets_N != IGNORED
        picked_N = vocabulary.pick(logits_NV, targets_N.where(counted_N, 0))
        nats_N = (vocabulary.logsumexp(logits_NV) - picked_N).where(counted_N, 0.0)
        self.nats.index_add_(0, extras["bin"], nats_N.to(self.nats.dtype))
        self.targets.index_add_(0, extras["bin"], counted_N.long())
        return nats_N.sum()

    def rows(self, trained: int) -> list[dict[str, Any]]:
        """Return the places, targets and loss of each bin, and whether they were trained.

        Args:
            trained: tokens of a sequence of training.
        """
        begins = [0, *self.ends[:-1]]
        sums = zip(begins, self.ends, self.nats.tolist(), self.targets.tolist(), strict=True)
        return [
            {
                "begin": begin,
                "end": end,
                "targets": targets,
                "loss_nats": nats / targets,
                "trained": end <= trained,
            }
            for begin, end, nats, targets in sums
            if targets
        ]


def bins_of(trained: int, length: int) -> list[int]:
    """Return the ends of bins of places: `INSIDE` in the trained length, at most `BEYOND` after it.

    Args:
        trained: tokens of a sequence of training.
        length: tokens of a sequence of the evaluation.
    """
    inside = min(trained, length)
    ends = {-(-inside * part // INSIDE) for part in range(1, INSIDE + 1)}
    width = max(1, trained // INSIDE, -(-(length - inside) // BEYOND))
    return sorted({*ends, *range(inside + width, length, width), length})


def check_stride(stride: int, length: int) -> None:
    """Refuse rows that begin further apart than they are long: targets between would be lost.

    Raises:
        ConfigError: with both.
    """
    if stride > length:
        raise ConfigError(
            f"--stride {stride} is longer than the rows of {length} tokens, and would leave out "
            "the targets between them",
            f"--stride {max(1, length // 2)}",
        )


def check_length(build: Build, length: int) -> None:
    """Refuse sequences that are longer than the learned positions, or than the validation text.

    Raises:
        ConfigError: the model has no positions for them, or the text has no such sequence.
    """
    config, whole = build.config, build.prepared.validation.tokens - 1
    reaches, what = whole, "tokens of the validation text"
    if config.position == "learned" and config.context < whole:
        reaches, what = config.context, "positions that the model has learned"
    if length > reaches:
        raise ConfigError(
            f"data.sequence_length = {length} is longer than the {reaches} {what}",
            mend(f"data.sequence_length={reaches}"),
        )


@torch.no_grad()
def evaluate(
    build: Build,
    tokens: int | None = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    places: LossByPlace | None = None,
) -> Validation:
    """Return the model's loss on validation sequences, summed in fp64 over all ranks.

    Args:
        build: the run.
        tokens: the most tokens, in sequences spread evenly over the text; None for all of it.
        length: tokens of a sequence; those of training without it.
        stride: tokens between the beginnings of overlapping sequences; a target counts once, in the
            first that has it. Without it they follow each other.
        places: takes the loss of each token by its place.

    Raises:
        ConfigError: no target of these sequences counts, or none stands for text.
    """
    world = build.world
    bytes_V = torch.from_numpy(build.prepared.tokenizer.token_bytes).to(build.device, torch.int64)
    one = torch.ones((), device=build.device)
    # Apple GPUs have no fp64.
    wide = torch.float32 if build.device.type == "mps" else torch.float64
    more: dict[str, float] = {}
    nats = torch.zeros((), dtype=wide, device=build.device)
    counts = torch.zeros(2, dtype=torch.int64, device=build.device)
    work: list[MicroBatch] = []
    together = 1 if world.size("pipeline") == 1 else 4 * world.size("pipeline")  # stages overlap
    with ExitStack() as stack:
        for averaged in build.weights_for_eval:
            stack.enter_context(averaged(build))
        objective = cross_entropy if places is None else places.objective
        for placed in evaluation_batches(build, tokens, length, stride):
            work.append(placed if places is None else places.with_bins(placed))
            counts += _counts(work[-1].targets_BT, bytes_V)
            if len(work) == together:
                nats += build.engine(build, work, objective, one)
                work = []
        if work:
            nats += build.engine(build, work, objective, one)
        if length is None and stride is None:
            for measure in build.evaluates:
                more |= measure(build, tokens)
    # Replicas evaluate other sequences; parts of a sequence and stages add to the same loss.
    for axis in ("shard", "pipeline"):
        world.sum_(nats, axis)
    counted, text_bytes = _summed(build, counts, tokens)
    return Validation(
        loss_nats=float(nats) / counted,
        bits_per_byte=float(nats) / math.log(2) / text_bytes,
        tokens=counted,
        bytes=text_bytes,
        share=_share(build, tokens, length, stride),
        more=more,
    )


def evaluation_batches(
    build: Build, tokens: int | None, length: int | None = None, stride: int | None = None
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of an evaluation, on the device.

    They have as many tokens as those of training, or one longer sequence.
    """
    plan, world = build.plan, build.world
    trained = plan.data.sequence_length
    length = length or trained
    for micro in validation_batches(
        build.prepared.validation,
        length,
        tokens=tokens,
        micro_rows=max(1, plan.micro_rows * trained // length),
        rank=world.place("data"),
        ranks=world.size("data"),
        segments=build.mask.document,
        stride=stride,
        beside=images_of_validation(build),
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


def _share(
    build: Build, tokens: int | None, length: int | None = None, stride: int | None = None
) -> float:
    """Return the share of the validation text's targets that `tokens` tokens cover."""
    length = length or build.plan.data.sequence_length
    rows = ValidationRows.of(build.prepared.validation, length, tokens, stride)
    return rows.counted / rows.targets


def _counts(targets_BT: Tensor, bytes_V: Tensor) -> Tensor:
    """Return the targets that count and the bytes of text that they stand for, int64 [2]."""
    counted_BT = targets_BT != IGNORED
    bytes_BT = bytes_V[targets_BT.where(counted_BT, 0)].where(counted_BT, 0)
    return torch.stack((counted_BT.sum(), bytes_BT.sum()))
