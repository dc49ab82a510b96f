"""Learn from a teacher's whole distribution beside the one token that came.

A text says of every place which token came; a teacher says how likely each token was. The loss
gets a term, the Kullback-Leibler divergence of the model's distribution from the teacher's, both
softened by a temperature. The teacher is a frozen decoder: a folder in Hugging Face format, or the
weights that this run starts from, which holds a fine-tuned model near where it began.

It runs once per micro-batch, before the step, and hands on its final hidden states, not its logits:
a thousandth of the bytes. Its logits are made inside of the objective, for the chunk of tokens and
the columns of the vocabulary that the head is at, so chunked heads and sharded vocabularies need
nothing more, and the term reduces over the vocabulary as every objective does. Matrices are held in
the run's arithmetic, vectors in fp32; where blocks are sharded the teacher's are too. Its attention
is the run's own, so that parts of rows see each other. It is no part of the model: no name of a
parameter changes, and no checkpoint holds it. Under tensor parallelism every rank holds it whole.

Cost: the teacher's forward pass and weights. Left out: logits stored beforehand, and losses between
layers. Source: arXiv 1503.02531; for language models DistilBERT (arXiv 1910.01108).

Shapes: N tokens, D features of the teacher, V vocabulary columns that are here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError
from headrace.core.folders import Folder
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.count import FP32, linear_parameters, total_parameters
from headrace.costs.ledger import Ledger, Line
from headrace.data.pretrained import check_tokenizer, unchecked_tokenizer
from headrace.model.adapter import files_left_out, load_pretrained, read_config
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.head import IGNORED, Objective, Vocabulary, capped
from headrace.model.init import Source
from headrace.model.mask import Rows
from headrace.plan.technique import Card, Context, Doubt, Evidence, Stage, Supported, Technique

LOGITS = 8
"""Tensors of logits in fp32 that are held at the term's peak: the model's, the teacher's, both
distributions, what cross-entropy keeps, and gradients (measured)."""


class Teacher(Decoder):
    """A teacher is a frozen decoder without a head: it maps token ids to final hidden states."""

    def forward(self, ids_BT: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        """Return normalised hidden states [B, T, D]."""
        return self.hidden(ids_BT, rows)


class Teaching:
    """The teacher, its output matrix, and what was learned from it in the newest step."""

    def __init__(self, teacher: Teacher, head_VD: Tensor, device: torch.device) -> None:
        self.teacher, self.head_VD = teacher, head_VD
        self.cap = teacher.config.logit_cap
        self.sums = torch.zeros(2, device=device)
        """divergence in nats, and tokens"""
        self.step = -1.0

    @torch.no_grad()
    def enrich(self, build: Build, works: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with the teacher's hidden states."""
        if build.now["step"] != self.step:
            self.step = build.now["step"]
            self.sums.zero_()
        build.phases.mark("forward")
        enriched = []
        for work in works:
            with build.autocast():
                hidden_ND = self.teacher(work.ids_BT, work.rows).flatten(0, 1)
            extras = {**(work.extras or {}), "teacher": hidden_ND.to(self.head_VD.dtype)}
            enriched.append(work._replace(extras=extras))
        return enriched


def divergence(
    logits_NV: Tensor, taught_NV: Tensor, temperature: float, vocabulary: Vocabulary
) -> Tensor:
    """Return KL(teacher || model) in nats per token at a temperature, [N]; logits are fp32.

    What depends on the model's logits is reduced before it meets anything else: right on a shard.
    """
    with torch.no_grad():
        taught_NV = taught_NV / temperature
        norm_N = vocabulary.logsumexp(taught_NV)
        share_NV = (taught_NV - norm_N[:, None]).exp()
    logits_NV = logits_NV / temperature
    apart_N = vocabulary.sum(share_NV * (taught_NV - logits_NV))
    return apart_N - norm_N + vocabulary.logsumexp(logits_NV)


class Distillation(Technique[Build]):
    """Learn from a teacher's whole distribution beside the one token that came."""

    teacher: Folder = ""
    """A folder in Hugging Face format; without it the weights that this run starts from."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Weight of the divergence, beside cross-entropy at 1; tuner range 0.1 to 10."""
    temperature: float = Field(default=1.0, gt=0, le=20)
    """Both distributions are softened by it, and the term is multiplied by its square, so that
    gradients keep their size: rounding in fp32 is multiplied too, so it ends at the paper's
    highest; tuner range 1 to 4."""

    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.STEP
    composes: ClassVar[tuple[str, ...]] = ("enrich", "terms")
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "more to learn from each token",
            "a fine-tuned model that forgets less",
        ),
        costs="the teacher's forward pass, a third of its training step, and its weights (derived)",
        helps="small models with a good teacher of the same tokenizer; pruned and quantized models",
        hurts="a teacher that is no better than the model, and plentiful data",
        source="arXiv 1503.02531; arXiv 1910.01108",
    )

    def reads(self) -> Mapping[str, str]:
        """Return the teacher's folder; without one the teacher is what the run starts from."""
        return {"teacher": self.teacher}

    def supports(self, context: Context) -> Supported:
        """Run everywhere."""
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Refuse the run's own random weights as the teacher: they know nothing."""
        if self.teacher or plan.model.pretrained:
            return None
        return Doubt(
            f"{self.name()} has no teacher, and without one it learns from the weights that the "
            "run starts from, which are random here: there is nothing to learn from them",
            Remedy(
                text=f"techniques.{self.name()}.teacher=FOLDER of a trained model in Hugging Face "
                "format (of a run: headrace export RUN --to hf),"
            )
            | mend(f"-{self.name()}"),
            meaningless=True,
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Add the teacher's forward pass, weights and hidden states, and its logits at the head."""
        sizes, logits = ledger.sizes, ledger.memory.get("logits")
        if logits is None:  # a stage of a pipeline that computes no loss
            return ledger
        size = sizes["activation_bytes"]
        work, weights = ledger.flops["forward"], ledger.memory["parameters"].bytes / 4
        hidden = sizes["residual"]
        if self.teacher:
            config = read_config(Path(self.teacher), f"techniques.{self.name()}.teacher")
            attention = 4 * config.layers * config.heads * config.resolved_head_dim
            work = 2.0 * linear_parameters(config) + attention * sizes["length"]
            weights = total_parameters(config)
            hidden = size * config.dim * sizes["tokens"]
        ledger = ledger.with_line("teacher", Line(size * weights, ("always",)))
        ledger = ledger.with_line("teacher_hidden", Line(hidden, ("loss", "turn", "backward")))
        # Over parts of a vocabulary the trunk's loss holds one tensor less, and this one does not.
        own = FP32 * sizes["vocab"] / sizes.get("tensor_ranks", 1)
        leaf = sizes.get("logits_leaf", 0.0)
        bytes_per_token = sizes["logits_per_token"] + leaf  # without it
        # A chunk's logits that are fp32 and not capped are those that the term reads.
        other = leaf if sizes["capped"] or leaf < own else 0.0
        made = (((LOGITS + sizes["capped"]) * own + other) / bytes_per_token - 1) * logits.bytes
        ledger = ledger.with_line("teacher_logits", Line(made, ("loss",)))
        ledger = replace(ledger, sizes={**sizes, "logits_kept": 1.0})
        return ledger.with_flops("teacher", work)

    def apply(self, build: Build) -> None:
        """Make the teacher, let it read each micro-batch, and add the term."""
        if build.model.head is None:  # a stage of a pipeline that computes no loss
            return
        teaching = build.notes[self.name()] = make_teaching(build, *self._source(build))
        build.enrich.append(teaching.enrich)
        build.terms.append(self._term(teaching))

    def _source(self, build: Build) -> tuple[ModelConfig, Source]:
        """Return the teacher's config and weights.

        Raises:
            ConfigError: not a folder of weights, or another vocabulary.
        """
        if not self.teacher:
            return build.config, build.source
        path, key = Path(self.teacher), f"techniques.{self.name()}.teacher"
        config, source = load_pretrained(path, key)
        # What a run starts from decides its tokenizer; else the teacher may.
        base = build.plan.model.pretrained
        other = f"a teacher with the tokenizer of {base} (or --without {self.name()})" * bool(base)
        if config.vocab != build.config.vocab:
            raise ConfigError(
                f"the teacher {self.teacher} has {config.vocab} vocabulary entries and the model "
                f"{build.config.vocab}: their distributions are over different tokens",
                other or mend(f"data.tokenizer={path}", f"model.vocab={config.vocab}"),
            )
        if not build.prepared.has_begun:
            check_tokenizer(build.prepared.tokenizer, self.teacher, key, config.vocab, other)
        for line in (
            files_left_out(path),
            unchecked_tokenizer(build.plan.data.tokenizer, self.teacher, key),
        ):
            if line:
                build.note_line(line)
        return config, source

    def _term(self, teaching: Teaching) -> Objective:
        head_VD, sums, temperature = teaching.head_VD, teaching.sums, self.temperature
        weight, cap = self.weight * temperature**2, teaching.cap

        def term(
            logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
        ) -> Tensor:
            """Return the weighted sum of the divergence over the tokens whose target counts."""
            with torch.no_grad():
                taught_NV = (extras["teacher"] @ vocabulary.part(head_VD.t())).float()
                taught_NV = capped(taught_NV, cap)
            ignored_N = targets_N == IGNORED
            apart_N = divergence(logits_NV, taught_NV, temperature, vocabulary)
            apart = apart_N.masked_fill(ignored_N, 0.0).sum()
            with torch.no_grad():
                sums.add_(torch.stack([apart.detach(), (~ignored_N).sum()]))
            return weight * apart

        return term

    def active(self, build: Build) -> Evidence:
        """Report the divergence that the newest step measured."""
        if build.model.head is None:
            return Evidence(None, "this stage computes no loss")
        teaching = build.notes[self.name()]
        nats, tokens = teaching.sums.tolist()
        apart = nats / max(1.0, tokens)
        return Evidence(
            active=tokens > 0,
            detail=f"{apart:.4g} nats per token from the teacher over {tokens:.0f} tokens",
            numbers={"divergence_nats": apart, "tokens": tokens},
        )


def make_teaching(build: Build, config: ModelConfig, source: Source) -> Teaching:
    """Return the frozen teacher on the run's device, sharded as the run's model is."""
    own = config is build.config
    parts = build.parts if own else replace(baseline_parts(config), attend=build.parts.attend)
    with torch.device("meta"):
        teacher = Teacher(config, replace(parts, head=lambda _: nn.Identity()), build.mask)
    teacher.residual_dtype = build.model.residual_dtype
    dtype = build.dtype
    prefixes = {module: name for name, module in teacher.named_modules()}
    for module in [*teacher.blocks.values(), teacher]:
        _fill(module, prefixes[module], source, build.device, dtype)
        for shard in build.shard:
            shard(module)
    teacher.requires_grad_(False)
    name = "embed.weight" if config.tied_embeddings else "head.weight"
    if config.tied_embeddings and not build.shard:
        head_VD = teacher.embed.weight.detach()
    else:
        head_VD = source(name, torch.Size((config.vocab, config.dim))).to(build.device, dtype)
    return Teaching(teacher, head_VD, build.device)


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
