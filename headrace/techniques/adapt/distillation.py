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

With `top_k` the teacher reads the training text once, before the first step, and its K likeliest
tokens of each place are kept beside the shards with the log-probability of all others together
(data/teacher_shards). Later runs read them too, whatever their student, and hold no teacher. The
term is then the divergence over K + 1 outcomes, which is at most that over all of them, and equal
where K is the vocabulary.

Cost: the teacher's forward pass and weights, or the bytes on disk. Left out: losses between layers,
and text that the student writes itself (GKD, arXiv 2306.13649). Source: arXiv 1503.02531; for
language models DistilBERT (arXiv 1910.01108).

Shapes: N tokens, D features of the teacher, V vocabulary columns that are here, K kept tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.assemble.teacher import (
    Teaching,
    keep_likeliest,
    make_images_teaching,
    make_teaching,
)
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.folders import Folder
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.core.vision_config import VisionConfig
from headrace.costs.count import FP32, linear_parameters, total_parameters
from headrace.costs.ledger import Ledger, Line
from headrace.costs.vision import image_flops, image_parameters
from headrace.data.pretrained import check_tokenizer, unchecked_tokenizer
from headrace.data.teacher_shards import IDS, LOGS
from headrace.model.adapter import files_left_out, load_pretrained, longest_row, read_config
from headrace.model.head import IGNORED, Objective, Vocabulary
from headrace.model.init import Source
from headrace.model.vision_folder import read_images_folder
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

LOGITS = 8
"""Tensors of logits in fp32 that are held at the term's peak: the model's, the teacher's, both
distributions, what cross-entropy keeps, and gradients (measured)."""
KEPT_LOGITS = 7
"""Tensors of logits where the teacher's words are kept, and one more where a chunk's are a leaf
(measured)."""
KEPT_BYTES = 12
"""Bytes on the device of a kept token: its id as it comes and as an index, and its logarithm."""


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


def kept_divergence(
    logits_NV: Tensor,
    ids_NK: Tensor,
    logs_NJ: Tensor,
    temperature: float,
    vocabulary: Vocabulary,
    *,
    is_whole: bool,
) -> Tensor:
    """Return KL(teacher || model) in nats per token over K tokens and the others together, [N].

    Args:
        logits_NV: the model's, in fp32.
        ids_NK: the tokens that the teacher found likeliest.
        logs_NJ: the teacher's log-probabilities of these and, last, of the others: J is K + 1. They
            are of the same temperature.
        temperature: by which the model's logits are divided.
        vocabulary: that the logits are of.
        is_whole: whether K is the whole vocabulary, and there are no others.
    """
    with torch.no_grad():
        share_NJ = logs_NJ.exp()
        known_N = (share_NJ * logs_NJ.where(share_NJ > 0, 0.0)).sum(-1)
        norm_N1 = vocabulary.logsumexp(logits_NV / temperature)[:, None]
    # A shift changes nothing, and the sums of large logits would be rounded as these are.
    logits_NV = logits_NV / temperature - norm_N1
    expected_N = vocabulary.dot(logits_NV, ids_NK, share_NJ[:, :-1])
    if not is_whole:
        others_N = vocabulary.logsumexp(vocabulary.without(logits_NV, ids_NK))
        expected_N = expected_N + share_NJ[:, -1] * others_N
    return known_N - expected_N + vocabulary.logsumexp(logits_NV)


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

    top_k: int | None = Field(default=None, ge=1, le=1 << 20)
    """Tokens of each place whose probability is kept on disk, beside that of all others together;
    without it the teacher runs beside the model. Bytes a token of the text: 6 or 8 for each, and 4.
    """

    room: ClassVar[str] = "adapt"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("enrich", "terms")
    equality: ClassVar = "learning"
    settled: ClassVar[tuple[str, ...]] = ("top_k",)
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

    def supports(self, context: Context) -> Supported | Unsupported:
        """Run everywhere; kept rows of a teacher must reach the model as it read them."""
        if context.plan is None or not self.top_k:
            return Supported()
        if not self.teacher:  # the run's own start, and other runs start elsewhere
            return Unsupported(
                f"top_k = {self.top_k} keeps what another model says, and no teacher is named",
                mend("-distillation"),
            )
        for name, other in context.plan.techniques.items():
            shows_prefix = {"mask", "annotate"} <= {*other.composes}
            if shows_prefix or "recut" in other.composes:
                changes = "shows another part of them" if shows_prefix else "cuts them anew"
                return Unsupported(
                    f"the teacher has read whole rows from left to right, and {name} {changes}",
                    mend(f"-{name}"),
                    RefusalKind.COMBINATION,
                )
        if context.plan.vision is not None:
            return Unsupported(
                f"top_k = {self.top_k} keeps the likeliest of many tokens, and an image has "
                f"{context.plan.vision.classes} classes",
                mend("-distillation"),
            )
        return Supported()

    def doubt(self, plan: Any) -> Doubt | None:
        """Refuse the run's own random weights as the teacher: they know nothing."""
        if self.teacher or plan.model.pretrained or (plan.vision and plan.vision.pretrained):
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
        """Add the teacher's forward pass, weights and hidden states, and its logits at the head.

        Of a teacher whose words are kept, these and what the term makes of the logits are left.
        """
        sizes, logits = ledger.sizes, ledger.memory.get("logits")
        if logits is None:  # a stage of a pipeline that computes no loss
            return ledger
        if not sizes["layers"]:  # a network of images
            return self._predict_images(ledger)
        size = sizes["activation_bytes"]
        work, weights = ledger.flops["forward"], ledger.memory["parameters"].bytes / 4
        hidden = sizes["residual"]
        if self.teacher:
            config = read_config(Path(self.teacher), f"techniques.{self.name()}.teacher")
            attention = 4 * config.layers * config.heads * config.resolved_head_dim
            work = 2.0 * linear_parameters(config) + attention * sizes["length"]
            weights = total_parameters(config)
            hidden = size * config.dim * sizes["tokens"]
        if self.top_k:
            kept = (KEPT_BYTES * self.top_k + FP32) * sizes["tokens"] * sizes["micro_batches"]
            ledger = ledger.with_line("teacher_likeliest", Line(kept, ("always",)))
        else:
            hidden_line = Line(hidden, ("loss", "turn", "backward"))
            ledger = ledger.with_line("teacher", Line(size * weights, ("always",)))
            ledger = ledger.with_line("teacher_hidden", hidden_line)
        # Over parts of a vocabulary the trunk's loss holds one tensor less, and this one does not.
        own = FP32 * sizes["vocab"] / sizes.get("tensor_ranks", 1)
        leaf = sizes.get("logits_leaf", 0.0)
        bytes_per_token = sizes["logits_per_token"] + leaf  # without it
        # A chunk's logits that are fp32 and not capped are those that the term reads.
        other = leaf if sizes["capped"] or leaf < own else 0.0
        count = KEPT_LOGITS + (leaf > 0) if self.top_k else LOGITS
        made = (((count + sizes["capped"]) * own + other) / bytes_per_token - 1) * logits.bytes
        ledger = ledger.with_line("teacher_logits", Line(made, ("loss",)))
        ledger = replace(ledger, sizes={**sizes, "logits_kept": 1.0})
        return ledger if self.top_k else ledger.with_flops("teacher", work)

    def _predict_images(self, ledger: Ledger) -> Ledger:
        """Add a teacher's weights and its forward pass: its own network's, or the run's."""
        work, weights = ledger.flops["forward"], ledger.memory["parameters"].bytes
        if self.teacher:
            key = f"techniques.{self.name()}.teacher"
            config, _ = read_images_folder(Path(self.teacher), key)
            work, weights = image_flops(config), FP32 * image_parameters(config)
        return ledger.with_line("teacher", Line(weights, ("always",))).with_flops("teacher", work)

    def apply(self, build: Build) -> None:
        """Let the teacher read each micro-batch, or all text beforehand, and add the term."""
        if build.plan.vision is not None:
            self._learn_images(build, build.plan.vision)
            return
        has_loss = build.model.head is not None  # else it is a stage of a pipeline without
        if not (has_loss or self.top_k):
            return
        given = self._source(build)
        if self.top_k:
            shards = keep_likeliest(build, Path(self.teacher), given, self.top_k, self.temperature)
            build.loader.beside.append(shards.beside)
            teaching = Teaching(build.device)
        else:
            teaching = make_teaching(build, *given)
        if has_loss:
            build.notes[self.name()] = teaching
            build.enrich.append(teaching.enrich)
            build.terms.append(self._term(teaching, given[0].vocab))

    def _learn_images(self, build: Build, vision: VisionConfig) -> None:
        """Let a network of images say how likely it finds each class, and add the term."""
        key = f"techniques.{self.name()}.teacher" if self.teacher else "vision.pretrained"
        teaching = make_images_teaching(build, Path(self.teacher or vision.pretrained), key)
        build.notes[self.name()] = teaching
        build.enrich.append(teaching.enrich)
        build.terms.append(self._term(teaching, vision.classes))

    def _source(self, build: Build) -> tuple[ModelConfig, Source]:
        """Return the teacher's config and weights.

        Raises:
            ConfigError: not a folder of weights, another vocabulary, or a teacher of shorter rows.
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
        if self.top_k and self.top_k > config.vocab:
            raise ConfigError(
                f"top_k = {self.top_k} tokens of each place are more than the {config.vocab} "
                f"vocabulary entries of the teacher {self.teacher}",
                mend(f"techniques.{self.name()}.top_k={min(64, config.vocab)}"),
            )
        longest, length = longest_row(path), build.plan.data.sequence_length
        if longest and longest < length:
            raise ConfigError(
                f"the teacher {self.teacher} was trained on rows of {longest} tokens, and "
                f"data.sequence_length = {length}: it knows nothing of later places",
                mend(f"data.sequence_length={longest}"),
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

    def _term(self, teaching: Teaching, vocab: int) -> Objective:
        head_VD, sums, temperature = teaching.head_VD, teaching.sums, self.temperature
        weight, is_whole = self.weight * temperature**2, self.top_k == vocab

        def term(
            logits_NV: Tensor, targets_N: Tensor, extras: Any, vocabulary: Vocabulary
        ) -> Tensor:
            """Return the weighted sum of the divergence over the tokens whose target counts."""
            if head_VD is None:
                kept = extras[IDS].long(), extras[LOGS]
                apart_N = kept_divergence(
                    logits_NV, *kept, temperature, vocabulary, is_whole=is_whole
                )
            else:
                with torch.no_grad():
                    columns_DV = vocabulary.part(head_VD.t())
                    taught_NV = teaching.logits(extras["teacher"], columns_DV)
                apart_N = divergence(logits_NV, taught_NV, temperature, vocabulary)
            ignored_N = targets_N == IGNORED
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
        kept = f"'s {self.top_k} likeliest tokens and the others," if self.top_k else ""
        return Evidence(
            active=tokens > 0,
            detail=f"{apart:.4g} nats per token from the teacher{kept} over {tokens:.0f} tokens",
            numbers={"divergence_nats": apart, "tokens": tokens},
        )
