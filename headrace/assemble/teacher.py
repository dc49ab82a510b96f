"""A teacher: a frozen decoder that says how likely each token is, in the loop or beforehand.

In the loop it reads each micro-batch before the step and hands on its final hidden states. Or it
reads the whole training text once, before the first step, and its K likeliest tokens of each place
are kept (data/teacher_shards): then no run that reads them holds a teacher. The first rank writes
for all, one micro-batch of rows at a time and the logits of a chunk of these, with the run's own
mask, attention and arithmetic; what is written depends on no layout of ranks.

A teacher of images is a frozen network that says how likely it finds each class. It sees each
micro-batch before the step, with its running statistics, and its logits lie beside the images.

Shapes: B images, N tokens, D features of the teacher, V vocabulary entries or classes,
K tokens kept of each place.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build, MicroBatch, place
from headrace.core.errors import ConfigError
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.data.ingest import disk_error
from headrace.data.loader import collate
from headrace.data.teacher_shards import TeacherShards, Unit, row_hash
from headrace.model.adapter import weights_digest
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.head import capped
from headrace.model.init import Source
from headrace.model.mask import Rows
from headrace.model.vision import IMAGE, ImageClassifier, load_images_state
from headrace.model.vision_folder import read_images_folder
from headrace.parallel.first import by_first

LOGITS_AT_ONCE = 1 << 24
"""Most logits of the teacher that exist at once while it writes: 64 MiB in fp32."""


class Teacher(Decoder):
    """A teacher is a frozen decoder without a head: it maps token ids to final hidden states."""

    def forward(self, ids_BT: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        """Return normalised hidden states [B, T, D]."""
        return self.hidden(ids_BT, rows)


class Teaching:
    """The teacher, its output matrix, and what was learned from it in the newest step.

    Args:
        device: of the run.
        teacher: None where what it says is kept on disk.
        head_VD: its output matrix, in the run's arithmetic.
    """

    def __init__(
        self,
        device: torch.device,
        teacher: Teacher | None = None,
        head_VD: Tensor | None = None,
    ) -> None:
        self.teacher, self.head_VD = teacher, head_VD
        self.cap = teacher.config.logit_cap if teacher else 0.0
        self.sums = torch.zeros(2, device=device)
        """divergence in nats, and tokens"""
        self.step = -1.0

    @torch.no_grad()
    def enrich(self, build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the teacher's hidden states, where it is at hand."""
        if build.now["step"] != self.step:
            self.step = build.now["step"]
            self.sums.zero_()
        if self.teacher is None:
            return [*works]
        build.phases.mark("forward")
        return [
            work._replace(extras={**(work.extras or {}), "teacher": self.hidden(build, work)})
            for work in works
        ]

    @torch.no_grad()
    def hidden(self, build: Build, work: MicroBatch) -> Tensor:
        """Return the teacher's final hidden states [N, D] in the type of its output matrix."""
        assert self.teacher is not None and self.head_VD is not None
        with build.autocast():
            hidden_ND = self.teacher(work.ids_BT, work.rows).flatten(0, 1)
        return hidden_ND.to(self.head_VD.dtype)

    def logits(self, hidden_ND: Tensor, head_DV: Tensor) -> Tensor:
        """Return the teacher's logits in fp32, for the columns that the matrix has."""
        return capped((hidden_ND @ head_DV).float(), self.cap)


def make_teaching(
    build: Build, config: ModelConfig, source: Source, *, alone: bool = False
) -> Teaching:
    """Return the frozen teacher on the run's device, in evaluation mode.

    Args:
        build: the run.
        config: of the teacher.
        source: its weights.
        alone: whether one rank has all of it and reads whole rows; else it is sharded as the run's
            model is, and its attention is the run's.
    """
    own, parts = config is build.config, baseline_parts(config)
    if own:
        parts = build.parts
    elif not (alone and build.world.size("context") > 1):  # where rows go round a ring of ranks
        parts = replace(parts, attend=build.parts.attend)
    shards = [] if alone else build.shard
    with torch.device("meta"):
        teacher = Teacher(config, replace(parts, head=lambda _: nn.Identity()), build.mask)
    teacher.residual_dtype = build.model.residual_dtype
    dtype = build.dtype
    prefixes = {module: name for name, module in teacher.named_modules()}
    for module in [*teacher.blocks.values(), teacher]:
        _fill(module, prefixes[module], source, build.device, dtype)
        for shard in shards:
            shard(module)
    teacher.requires_grad_(False).eval()
    name = "embed.weight" if config.tied_embeddings else "head.weight"
    if config.tied_embeddings and not shards:
        head_VD = teacher.embed.weight.detach()
    else:
        head_VD = source(name, torch.Size((config.vocab, config.dim))).to(build.device, dtype)
    return Teaching(build.device, teacher, head_VD)


def _fill(
    root: nn.Module, prefix: str, source: Source, device: torch.device, dtype: torch.dtype
) -> None:
    """Give meta parameters under `root` their values; vectors become fp32 buffers.

    A sharded group of parameters has one dtype, and vectors are not worth sharding.
    """
    for path, module in root.named_modules(prefix=prefix):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            value = source(f"{path}.{key}" if path else key, parameter.shape)
            if value.ndim > 1:
                setattr(module, key, nn.Parameter(value.to(device, dtype), requires_grad=False))
            else:
                delattr(module, key)
                module.register_buffer(key, value.to(device), persistent=False)


# --- what a teacher says, kept ----------------------------------------------------------------


def keep_likeliest(
    build: Build, folder: Path, given: tuple[ModelConfig, Source], top_k: int, temperature: float
) -> TeacherShards:
    """Return what the teacher says of the training text, which is written where it is not there.

    Args:
        build: the run, whose loader is made.
        folder: the teacher's weights.
        given: its config and weights.
        top_k: tokens kept of each place.
        temperature: by which the teacher's logits are divided.

    Raises:
        UnsupportedError: the disk has no room.
        ConfigError: what was written is damaged.
    """
    config, source = given
    packer, prepared = build.loader.packer, build.prepared
    ends = [
        [row_hash(packer.row(number, unit)) for unit in (0, units - 1)]
        for number, units in enumerate(packer.units)
    ]
    shards = TeacherShards(
        prepared.directory,
        {
            "weights": weights_digest(folder),
            "text": [part.fingerprint for part in prepared.train],
            "ends": ends,
            "mask": repr(build.mask),
            "precision": build.context.precision,
            "temperature": temperature,
        },
        packer.units,
        length=packer.sequence_length,
        top_k=top_k,
        vocab=config.vocab,
    )

    def written() -> None:
        if shards.is_written():
            build.note_line(f"{shards.line}, as they were written before")
            return
        shards.check_room()
        build.note_line(f"{shards.line}: the teacher reads the text once")
        teaching, tenths = make_teaching(build, config, source, alone=True), 0

        def progress(done: int, rows: int) -> None:
            nonlocal tenths
            if (now := 10 * done // rows) > tenths:
                tenths = now
                build.note_line(f"the teacher has read {10 * tenths}% of {rows:,} rows")

        try:
            shards.write(
                lambda units: _records(build, shards, teaching, units, temperature), progress
            )
        except OSError as error:
            raise disk_error(error, prepared.directory) from None

    by_first(build.world, written)
    return shards


@torch.no_grad()
def _records(
    build: Build,
    shards: TeacherShards,
    teaching: Teaching,
    units: Sequence[Unit],
    temperature: float,
) -> np.ndarray:
    """Return the records of rows of training, in micro-batches of the plan's."""
    records, at_once = shards.empty(len(units)), build.plan.micro_rows
    assert teaching.head_VD is not None
    head_DV = teaching.head_VD.t()
    tokens = max(1, LOGITS_AT_ONCE // shards.vocab)
    for begin in range(0, len(units), at_once):
        mine = units[begin : begin + at_once]
        rows = [build.loader.packer.row(*unit) for unit in mine]
        work = place(build, collate(rows, segments=build.mask.document))
        parts = [
            likeliest(teaching.logits(part_nD, head_DV) / temperature, shards.top_k)
            for part_nD in teaching.hidden(build, work).split(tokens)
        ]
        ids_NK, logs_NK, rest_N = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        here, shape = slice(begin, begin + len(mine)), (len(mine), shards.length)
        records["row"][here] = [row_hash(row) for row in rows]
        records["ids"][here] = ids_NK.view(*shape, -1).numpy()
        records["logs"][here] = logs_NK.view(*shape, -1).numpy()
        records["rest"][here] = rest_N.view(*shape).numpy()
    return records


def likeliest(logits_NV: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and log-probabilities [N, K] of the likeliest, and what the others have, [N]."""
    norm_N1 = logits_NV.logsumexp(-1, keepdim=True)
    values_NK, ids_NK = logits_NV.topk(top_k, dim=-1)
    others_N = logits_NV.scatter(-1, ids_NK, -torch.inf).logsumexp(-1)
    return ids_NK, values_NK - norm_N1, others_N - norm_N1.squeeze(-1)


# --- a teacher of images ----------------------------------------------------------------------


class ImagesTeaching(Teaching):
    """The teacher of a run of images, and what was learned from it in the newest step.

    Its logits are made before the step: the matrix that would make them is the identity.
    """

    def __init__(self, build: Build, network: ImageClassifier) -> None:
        super().__init__(build.device)
        self.network = network
        self.head_VD = torch.eye(network.vision.classes, device=build.device)

    @torch.no_grad()
    def enrich(self, build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the teacher's logits."""
        works = super().enrich(build, works)
        build.phases.mark("forward")
        return [
            work._replace(extras={**(work.extras or {}), "teacher": self._logits(build, work)})
            for work in works
        ]

    def _logits(self, build: Build, work: MicroBatch) -> Tensor:
        """Return the teacher's logits [B, V], fp32."""
        assert work.extras is not None
        with build.autocast():
            return self.network.logits_of(work.extras[IMAGE])


def make_images_teaching(build: Build, folder: Path, key: str) -> ImagesTeaching:
    """Return the frozen teacher on the run's device.

    Args:
        build: the run.
        folder: of the teacher.
        key: the plan's key that names it.

    Raises:
        ConfigError: the folder is none, or the teacher tells other classes, or images of another
            size, apart.
    """
    vision = build.plan.vision
    assert vision is not None
    config, state = read_images_folder(folder, key)
    for name in ("classes", "size"):
        there, here = getattr(config, name), getattr(vision, name)
        if there != here:
            raise ConfigError(
                f"the teacher {folder} has {name} = {there}, and vision.{name} = {here}",
                mend(f"vision.{name}={there}"),
            )
    network = ImageClassifier(config)
    load_images_state(network, state)
    frozen: nn.Module = network.requires_grad_(False).eval().to(build.device)
    assert isinstance(frozen, ImageClassifier)
    return ImagesTeaching(build, frozen)
