"""Make a Build from a plan in one visible loop over the stages.

At each stage the baseline does its part, then the techniques of that stage act, in name order. The
sockets are compared before and after a technique, and so its claims need not be trusted. A
technique that touches a socket which it did not declare has a bug.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.assemble.adapted import begin_with_adapters, given_adapters
from headrace.assemble.clipping import clip
from headrace.assemble.context import check_supported, make_context
from headrace.assemble.filled import fillers, record
from headrace.assemble.materialize import freeze, materialize
from headrace.assemble.mesh_sizes import ranks_of
from headrace.assemble.ordered import order_rows
from headrace.assemble.sockets import Build, Pass, Route, auxiliary_loss, place
from headrace.assemble.vision import add_images, images_source, predict_images
from headrace.compress.fake import install
from headrace.compress.vision import install_images
from headrace.core.errors import ConfigError, Diverged
from headrace.core.files import python
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.count import baseline_ledger
from headrace.costs.decoder_work import baseline_work, shared_work
from headrace.costs.ledger import SAVES, Ledger
from headrace.costs.mask_work import with_own_mask
from headrace.data.loader import Loader
from headrace.data.prepared import Prepared
from headrace.data.pretrained import check_tokenizer, unchecked_tokenizer
from headrace.data.rows import Cut, Packer
from headrace.data.tokenizer import entries, open_tokenizer
from headrace.model.adapter import files_left_out, load_pretrained, read_config
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.head import with_terms
from headrace.model.init import adding, random_source
from headrace.model.mask import mask_of
from headrace.model.rms_conversion import as_asked, as_rms_norm, is_converted
from headrace.model.vision import ImageClassifier
from headrace.optim.adamw import make_adamw
from headrace.optim.roles import group_by_role
from headrace.optim.schedule import learning_rate
from headrace.parallel.layout import Layout, local_of
from headrace.parallel.world import World
from headrace.plan.plan import ATTENDS, Plan
from headrace.plan.technique import Context, Stage, Technique


def make_ledger(plan: Plan, context: Context) -> Ledger:
    """Return the baseline's ledger with every technique's edits, in stage order. Pure.

    For a pipeline it is the ledger of the rank that needs most memory after all edits. A technique
    that routes parameters to an optimizer edits once all trained parameters are known. One that
    takes the rest of the parameters edits after the other routes.

    Raises:
        ConfigError: the plan names a tokenizer that does not exist.
    """
    return max(make_ledgers(plan, context), key=lambda ledger: ledger.peak()[1])


def make_ledgers(plan: Plan, context: Context) -> list[Ledger]:
    """Return such a ledger for each rank of a pipeline; the slowest may not need most memory."""
    return [_predict_on(plan, context, rank) for rank in range(plan.mesh.pipeline)]


def _predict_on(plan: Plan, context: Context, pipeline_rank: int) -> Ledger:
    if plan.vision is not None:
        return _edited(predict_images(plan, context), plan)
    model = plan.model
    if not model.vocab:  # not resolved yet by a run
        vocab_decided = model.pretrained and plan.data.tokenizer != "bpe"  # by the weights
        model = _model_config(plan, 0 if vocab_decided else entries(plan.data))
    ledger = baseline_ledger(
        model,
        rows=plan.micro_rows,
        length=plan.data.sequence_length,
        precision=context.precision,
        device=context.device,
        accumulates=plan.micro_rows * plan.mesh.data < plan.rows_per_step,
    )
    ranks = ranks_of(plan.mesh)
    ranks["pipeline_rank"] = float(pipeline_rank)
    ranks["micro_batches"] = plan.rows_per_step / plan.mesh.data / plan.micro_rows
    on = plan.techniques.values()
    ranks["other_loss"] = float(any("terms" in t.composes for t in on))
    ranks["stored_halves"] = float(any("storage" in t.composes and t.halves for t in on))
    others = any("objective" in t.composes for t in on)
    ranks["other_objective"] = float(others or bool(model.logit_cap))
    work = baseline_work(
        model,
        rows=plan.micro_rows,
        length=plan.data.sequence_length,
        precision=context.precision,
        micro_batches=ranks["micro_batches"],
    )
    work |= shared_work(model, ranks)
    ledger = replace(ledger, sizes={**ledger.sizes, **ranks}, work=work)
    return _edited(with_own_mask(ledger, model), plan)


def _edited(ledger: Ledger, plan: Plan) -> Ledger:
    """Return a ledger with the edits of a plan's techniques."""
    ledger = replace(ledger, sizes={**ledger.sizes, SAVES: float(plan.checkpoint.every_steps)})
    for technique in sorted(plan.techniques.values(), key=_when_predicted):
        ledger = technique.predict(ledger)
    return ledger


def _when_predicted(technique: Technique[Any]) -> tuple[int, bool, int, str]:
    routes = "routes" in technique.composes
    when = max(technique.stage, Stage.OPTIMIZER) if routes else technique.stage
    return when, technique.rest, technique.stage, technique.name()


def make_build(
    plan: Plan,
    prepared: Prepared,
    world: World,
    device: torch.device,
    *,
    until: Stage = Stage.STEP,
    note_line: Callable[[str], None] | None = None,
    given: Mapping[str, Tensor] | None = None,
    checked: Context | None = None,
) -> Build:
    """Fill every socket, stage by stage, and make the model, optimizers and loader.

    Args:
        plan: the run.
        prepared: its tokenizer and shards.
        world: this process's rank among all.
        device: where the weights live.
        until: the last stage; a model alone ends at MATERIALIZE.
        note_line: takes a line that is worth reading, now and while the run goes.
        given: values of parameters by name, copied in the place of drawing or reading them.
        checked: what `check_supported` returned here; without it, or of another plan, it is asked.

    Raises:
        UnsupportedError, ConfigError: see `check_supported` and each stage.
    """
    techniques = [*plan.techniques.values()]
    techniques.sort(key=lambda t: (t.stage, ATTENDS in t.composes, t.name()))
    if checked is None or checked.plan != plan:
        checked = check_supported(techniques, make_context(plan, device))
    build = _baseline_build(plan, prepared, world, device, checked, techniques)
    build.note_line, build.given = note_line or build.note_line, given or {}
    for stage in Stage:
        BEGIN.get(stage, _nothing)(build)
        for technique in techniques:
            if technique.stage == stage:
                before = fillers(build)
                technique.apply(build)
                record(build, technique, before)
        FINISH.get(stage, _nothing)(build)
        if stage == until:
            break
    return build


def _model_config(plan: Plan, vocab: int) -> ModelConfig:
    """Return `model.*` with the keys filled in that data and weights decide.

    Raises:
        ConfigError: a key contradicts the tokenizer, the sequence length or the weights.
    """
    model = plan.model
    if plan.vision is not None:
        return model
    if model.pretrained:
        model = _as_pretrained(model)
    if model.pretrained and model.vocab < vocab:
        folder = model.pretrained
        load = (
            "from transformers import AutoModelForCausalLM as M; "
            f"m = M.from_pretrained({folder!r}); m.resize_token_embeddings({vocab}); "
            f"m.save_pretrained({folder!r})"
        )
        raise ConfigError(
            f"the tokenizer has {vocab} entries and the weights of model.pretrained = {folder!r} "
            f"have {model.vocab}",
            python(load),
        )
    if model.vocab and model.vocab < vocab:
        fit = -(-vocab // model.vocab_multiple) * model.vocab_multiple
        raise ConfigError(
            f"model.vocab = {model.vocab} is smaller than the tokenizer's {vocab} entries",
            mend(f"model.vocab={fit}").otherwise("leave it out"),
        )
    sizes: dict[str, Any] = {}
    if not model.vocab:
        sizes["vocab"] = -(-vocab // model.vocab_multiple) * model.vocab_multiple
    if model.position == "learned":
        sizes["context"] = context = model.context or plan.data.sequence_length
        if context < plan.data.sequence_length:
            raise ConfigError(
                f"data.sequence_length = {plan.data.sequence_length} is longer than the "
                f"{context} positions of model.context",
                mend(f"data.sequence_length={context}"),
            )
    return model.model_copy(update=sizes)


def check_weights(plan: Plan) -> None:
    """Refuse a plan whose keys contradict the weights which it starts from.

    Raises:
        ConfigError, UnsupportedError: keys contradict the weights, or the folder is not usable.
    """
    if folder := plan.model.pretrained:
        entries_there = _as_pretrained(plan.model).vocab
        if plan.data.tokenizer not in ("bpe", folder):  # a new one is compared once it is trained
            used = open_tokenizer(plan.data.tokenizer)
            check_tokenizer(used, folder, "model.pretrained", entries_there)
        if plan.model.adapter:
            given_adapters(plan.model)


NOT_OF_WEIGHTS = {
    "family",
    "pretrained",
    "adapter",
    "precision",
    "init_std",
    "output_init",
    "matrix_init",
    "head_init",
    "vocab_multiple",
}
"""Keys of a model that do not describe pretrained weights: names, precision, and how weights are
drawn where there are none."""


def _as_pretrained(model: ModelConfig) -> ModelConfig:
    """Return the config of the pretrained weights; the plan's keys must agree with it."""
    pretrained_config = as_asked(model, load_pretrained(Path(model.pretrained))[0])
    pairs = {
        key: (getattr(model, key), getattr(pretrained_config, key))
        for key in sorted(model.model_fields_set - NOT_OF_WEIGHTS)
    }
    other = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if other:
        each = [f"model.{key} = {asked!r} (it: {have!r})" for key, (asked, have) in other.items()]
        raise ConfigError(
            f"the plan says otherwise than the weights of {model.pretrained}: {', '.join(each)}",
            mend(
                *(
                    f"model.{key}={have if isinstance(have, str) else json.dumps(have)}"
                    for key, (_, have) in other.items()
                )
            ),
        )
    kept = {k: getattr(model, k) for k in ("family", "pretrained", "adapter", "precision")}
    return pretrained_config.model_copy(update=kept)


def _baseline_build(
    plan: Plan,
    prepared: Prepared,
    world: World,
    device: torch.device,
    context: Context,
    techniques: list[Technique[Any]],
) -> Build:
    """Return a Build whose every owned socket holds the baseline's filler."""
    if (folder := plan.model.pretrained) and not prepared.has_begun:
        entries_there = read_config(Path(folder)).vocab
        check_tokenizer(prepared.tokenizer, folder, "model.pretrained", entries_there)
    config = _model_config(plan, prepared.tokenizer.vocab)
    assert plan.with_keys({}) == plan, "a technique's keys were not written into the plan"
    build = Build(
        plan=plan.replaced(model=config),
        context=context,
        world=world,
        device=device,
        techniques=techniques,
        prepared=prepared,
        config=config,
        mask=mask_of(config),
        parts=baseline_parts(config),
        source=random_source(config, plan.seed),
        engine=local_engine,
        sync=lambda build, last: None,
        reduce=_sum_gradients,
        loss_scale=lambda build: None,
        clip=clip,
        passes=_one_pass,
        pack=lambda build, shards: Cut(shards, build.plan.data.sequence_length),
        order=order_rows,
        transport=_threads,
        place=place,
        recover=_stop,
        predicted=lambda plan: make_ledger(plan, context),
    )
    build.values["step"] = float
    build.values["lr"] = learning_rate(plan.schedule, plan.horizon_steps)
    return build


# --- what the baseline does at each stage ----------------------------------------------------


def _nothing(build: Build) -> None:
    """Do nothing, at a stage where only techniques act."""


def _parts(build: Build) -> None:
    """Make the parts and the initial values from the config, which is final now."""
    build.parts = baseline_parts(build.config)
    build.source = random_source(build.config, build.plan.seed)
    if (vision := build.plan.vision) is not None:
        build.source = images_source(build, vision)
    if build.config.pretrained:
        own, stored = load_pretrained(Path(build.config.pretrained))
        if is_converted(build.config, own):
            stored = as_rms_norm(own, stored)
        build.source = adding(stored, build.source)
        if build.config.adapter:
            begin_with_adapters(build)
        folder, spec = build.config.pretrained, build.plan.data.tokenizer
        for line in (
            files_left_out(Path(folder)),
            unchecked_tokenizer(spec, folder, "model.pretrained"),
        ):
            if line:
                build.note_line(line)


def _meta_model(build: Build) -> None:
    """Make the model without storage.

    Techniques that split or wrap it see names and shapes before any memory is allocated.
    """
    with torch.device("meta"):
        if build.plan.vision is not None:
            build.model = ImageClassifier(build.plan.vision)  # type: ignore[assignment]
        else:
            build.model = Decoder(build.config, build.parts, build.mask)
    if build.context.precision == "bf16":
        build.model.residual_dtype = torch.bfloat16
    _note_layouts(build)


def _note_layouts(build: Build) -> None:
    """Note for each new parameter that every rank has it whole; techniques may change that."""
    for name, parameter in build.model.named_parameters():
        build.layouts.setdefault(name, Layout(parameter.shape))


def _linears(build: Build) -> None:
    for name, (_, make) in build.linear.items():
        parent, _, child = name.rpartition(".")
        linear = build.model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(build.model.get_submodule(parent), child, make(linear))
    put = install if build.plan.vision is None else install_images
    put(build.model, build.fake_quantized, lambda: build.rounds_now)
    _note_layouts(build)


def _optimizers(build: Build) -> None:
    """Make the optimizers: each route takes its parameters, and AdamW takes the rest."""
    rest = {n: p for n, p in build.model.named_parameters() if p.requires_grad}
    baseline = Route(
        "adamw", lambda n, p: True, lambda named: make_adamw(build.plan.optimizer, named)
    )
    for route in [*sorted(build.routes, key=lambda route: route.rest), baseline]:
        taken = {n: p for n, p in rest.items() if route.takes(n, p)}
        rest = {n: p for n, p in rest.items() if n not in taken}
        if taken:
            build.optimizers[route.name] = optimizer = route.make(taken)
            build.routed[route.name] = taken
            group_by_role(
                optimizer.param_groups,
                taken,
                build.plan.optimizer,
                lambda name: prod(rate(name) for rate in build.rates),
            )


def _data(build: Build) -> None:
    build.loader = build.transport(build, build.pack(build, build.prepared.train))
    if build.plan.vision is not None:
        add_images(build)


def _objective(build: Build) -> None:
    """Combine the objective and its terms into one function for the whole run.

    A new closure every step would be compiled every step.
    """
    build.objective = with_terms(build.objective, build.terms)


BEGIN: Mapping[Stage, Callable[[Build], None]] = {
    Stage.PARTS: _parts,
    Stage.MODEL: _meta_model,
}
"""Stage -> what the baseline does before the techniques of that stage act."""

FINISH: Mapping[Stage, Callable[[Build], None]] = {
    Stage.LINEAR: _linears,
    Stage.FREEZE: freeze,
    Stage.MATERIALIZE: materialize,
    Stage.OPTIMIZER: _optimizers,
    Stage.DATA: _data,
    Stage.STEP: _objective,
}
"""Stage -> what the baseline does with the sockets after that stage's techniques filled them."""


# --- the baseline's fillers ------------------------------------------------------------------


def local_engine(build: Build, micros: Any, objective: Any, scale: Tensor) -> Tensor:
    """Run forward and backward of each micro-batch; return the scaled loss sum, detached."""
    total = torch.zeros((), device=build.device)
    for index, micro in enumerate(micros):
        build.sync(build, index == len(micros) - 1)
        build.phases.mark("forward")
        with build.autocast():
            loss = build.model(
                micro.ids_BT,
                micro.targets_BT,
                micro.rows,
                objective=objective,
                scale=scale,
                extras=micro.extras,
            )
        if torch.is_grad_enabled():
            auxiliary = auxiliary_loss(build)
            loss = loss if auxiliary is None else loss + auxiliary * scale
            build.phases.mark("backward")
            loss.backward()
        total += loss.detach()
    return total


def _sum_gradients(build: Build) -> None:
    """Sum the gradients that are partial on each rank, axis by axis."""
    named = build.model.named_parameters() if build.world.ranks > 1 else ()
    parameter_layouts = [(build.layouts[n], p) for n, p in named if p.grad is not None]
    for axis in ("shard", "expert_copies", "tensor", "ends"):
        partial = [local_of(p.grad) for layout, p in parameter_layouts if axis in layout.partial]  # type: ignore[arg-type]
        build.world.sum_gradients_(partial, axis)


def _one_pass(build: Build, step: int) -> list[Pass]:
    """Return the pass of plain training: all micro-batches once, then every optimizer updates."""
    limit = build.plan.optimizer.clip_norm
    return [Pass("update", build.objective, lambda works: works, absorb, max_norm=limit)]


def absorb(build: Build, finite: Tensor) -> None:
    """Apply every optimizer's update, masked on the device where a gradient was not finite.

    What is still being copied for a checkpoint is awaited first.
    """
    while build.before_change:
        build.before_change.pop()()
    for optimizer in build.optimizers.values():
        optimizer.found_inf = 1.0 - finite  # type: ignore[attr-defined]
        optimizer.step()


def _threads(build: Build, packer: Packer) -> Loader:
    """Return the baseline's transport: reader threads, and pinned memory for a GPU."""
    plan = build.plan
    return Loader(
        packer,
        rows_per_step=plan.batches.each(lambda tokens: tokens // plan.data.sequence_length),
        micro_rows=plan.micro_rows,
        rank=build.world.place("data"),
        ranks=build.world.size("data"),
        workers=plan.data.workers,
        prefetch=plan.data.prefetch,
        order=build.order(build, packer),
        segments=build.mask.document,
        pin=build.device.type == "cuda",
    )


def _stop(build: Build, step: int, metrics: Mapping[str, float]) -> None:
    """End the run when a gradient is not finite; this is the baseline's filler of `recover`.

    The weights are untouched, because the update was masked.
    """
    raise Diverged(
        f"the gradient of step {step} is not finite (loss {metrics['loss']}, "
        f"norm {metrics['grad_norm']}); its update was not applied"
    )
