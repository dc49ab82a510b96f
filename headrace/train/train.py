"""Train with run(plan) and step(build), which can be read from top to bottom without hooks.

`run` prepares, builds, restores, and then repeats one visible step until the goal ends it. Where
the first step is compared with the plain trainer's (`guard`), it is taken and compared before the
loop. Values that vary in time are pure functions of the step, called on one line. The host never
waits for the device inside a step; its numbers are read one step later.

Stack at the gradient: cli.train -> train.run -> train.step -> engine -> backward.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.autotune import choose_attention
from headrace.assemble.build import check_weights, make_build
from headrace.assemble.context import check_supported, choose_device, make_context
from headrace.assemble.sockets import Build, RunNotes
from headrace.core.errors import RunError
from headrace.core.progress import Progress
from headrace.core.system import check_system
from headrace.data.chat.encode import template_line
from headrace.data.ingest import is_current, prepare, reopen
from headrace.data.loader import Micro
from headrace.data.prepared import Prepared
from headrace.model.head import IGNORED
from headrace.parallel.first import by_first
from headrace.parallel.layout import local_of
from headrace.parallel.world import World, open_world
from headrace.plan.doubts import check_meant, doubts_of
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.train.checkpoint import Saved, steps_in
from headrace.train.evaluate import count_targets, doubts
from headrace.train.general import prepare_general
from headrace.train.guard import Inspect, guard
from headrace.train.identity import (
    changed_knobs,
    check_frozen,
    check_same_run,
    format_changes,
    frozen_digests,
    note_frozen,
    without_base,
)
from headrace.train.interrupts import Interrupts, PatientInterrupts
from headrace.train.others import heartbeats
from headrace.train.repeats import doubt_of_repeats
from headrace.train.replicas import compare_copies
from headrace.train.result import Result
from headrace.train.run_folder import RunFolder, telling_of_lost_ranks
from headrace.train.session import Session
from headrace.train.start import Start, process_age_s
from headrace.train.summary import mix_of


def run(
    plan: Plan,
    *,
    progress: Progress | None = None,
    resume: bool = False,
    folder: Path | None = None,
    checkpoint: str | None = None,
    branch: bool = False,
    catalogue: Catalogue | None = None,
    command: bool = False,
) -> Result:
    """Train until the goal of the plan, and return what the run left behind.

    Args:
        plan: the run.
        progress: shows the progress; nothing is shown without it.
        resume: continue the newest run of this name.
        folder: continue the run in this folder instead.
        checkpoint: the checkpoint to continue from, as in "step-100"; the newest without it.
        branch: begin a new run at that checkpoint of `folder`, with `resume`; see inference/branch.
        catalogue: the techniques to choose from, where the plan asks for a choice.
        command: whether this process serves only this run, so its age counts as part of the start,
            and a signal that comes while it compiles may end it.

    Raises:
        ConfigError, UnsupportedError: the plan cannot run; nothing has been trained.
        RunError, MemoryFull: the run failed; the last good checkpoint is intact.
        Stopped: a signal ended the run; a checkpoint is saved.
    """
    check_system()
    start = Start(process_age_s() if command else None)
    plan, progress = _with_keys(plan), progress or Progress()
    device = choose_device(plan)
    with ExitStack() as stack:
        stop = stack.enter_context(Interrupts() if command else PatientInterrupts())
        run_before = RunFolder.find(plan, folder) if resume else None  # before any work
        first = plan
        plan = _as_restored(plan, run_before, checkpoint) if run_before else plan
        world = stack.enter_context(open_world(plan.mesh, device))
        stack.enter_context(telling_of_lost_ranks())
        device = _own_device(device, world)
        checked = _check_plan(plan, device, progress, first=first, begins=not resume)
        prepared = prepare_together(plan, world, progress, run_before)
        prepared = prepare_general(plan, prepared, world, progress)
        start.mark("prepare")
        plan, timed = choose_attention(plan, catalogue, prepared, world, device, progress)
        start.mark("choose")
        build = make_build(plan, prepared, world, device, note_line=progress.note, checked=checked)
        start.mark("build")
        build.run_notes = _first_notes(build, first, progress, timed, start)
        for flags in build.runtime:
            stack.enter_context(flags())
        files, checkpoint = _open_folder(build, resume, folder, checkpoint, branch)
        session = stack.enter_context(Session(build, files, progress, start))
        stack.enter_context(heartbeats_of(session, stop))
        if resume:
            session.restore(checkpoint)
        _begin(session)
        session.evaluate_before()
        inspect = guard(build, step) if session.counters.step == 0 else None
        start.mark("guard")
        if inspect is not None and not session.ended(stop):
            batch = session.next_batch()
            session.after_step(batch, step(build, batch.micros, 0, inspect))
        while not session.ended(stop):
            batch = session.next_batch()
            with session.watched():
                numbers = step(build, batch.micros, session.counters.step)
            session.after_step(batch, numbers)
        return Result(session.finish(stop), catalogue, first=world.rank == 0)


def step(
    build: Build, micros: Sequence[Micro], index: int, inspect: Inspect | None = None
) -> Tensor:
    """Take one optimizer step, and return [loss, norm, good, targets] on the device.

    The same line of events serves plain training, accumulation, second-order passes and loss
    scaling: values -> before-step -> micro-batches -> for each pass {enrich, count, zero, engine,
    reduce, clip, judge, absorb if good} -> after-update. `inspect` reads the gradients of the first
    pass. A step is good where all is finite and no judge refuses it; `good` is 1.0 or 0.0.
    """
    build.now = {name: value(index) for name, value in build.values.items()}
    for optimizer in build.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * group["lr_factor"] * build.now["lr"]
            if "weight_decay" in build.now:
                group["weight_decay"] = group["initial_weight_decay"] * build.now["weight_decay"]
    for begin in build.before_step:
        begin(build)
    build.phases.mark("copy")
    work = []
    for micro in micros:
        for recut in build.recut:
            micro = recut(build, micro)
        work.append(build.place(build, micro))
    build.phases.mark("prepare")
    numbers: list[Tensor] = []
    good = torch.ones((), device=build.device)
    for sweep in build.passes(build, index):
        taken = sweep.micros(work)
        for enrich in build.enrich:
            taken = enrich(build, taken)
        targets = torch.stack([(m.targets_BT != IGNORED).sum() for m in taken]).sum()
        targets = build.world.sum_(targets, "shard").float()
        tokens = sum(m.targets_BT.numel() for m in taken) * build.world.size("shard")
        build.targets_per_token = targets.clamp(min=1) / tokens
        factor = build.loss_scale(build)
        scale = 1.0 / targets.clamp(min=1)
        for parameter in build.model.parameters():
            parameter.grad = None
        scaled = scale if factor is None else scale * factor
        loss = build.engine(build, taken, sweep.objective, scaled)
        if build.world.ranks > 1:
            build.phases.mark("communication_exposed")
            for axis in ("shard", "pipeline"):
                build.world.sum_(loss, axis)
        build.reduce(build)
        build.phases.mark("optimizer")
        if factor is not None:
            loss = loss / factor
            divide_gradients(build, factor)
        norm = build.clip(build, sweep.max_norm)
        good = good * torch.isfinite(norm + loss)
        if not numbers:
            numbers = [loss, norm, targets]
            for judge in build.judges:
                good = good * judge(build, loss, norm)
            if inspect is not None and not inspect(build, loss, norm):
                break
        sweep.absorb(build, good)
    for update in build.after_update:
        update(build, good)
    more = [measure(build) for measure in build.measured.values()]
    return torch.stack([n.detach().float() for n in (*numbers[:2], good, numbers[2], *more)])


def divide_gradients(build: Build, factor: Tensor) -> None:
    """Divide every gradient by the loss scale, on the device."""
    for parameter in build.model.parameters():
        if parameter.grad is not None:
            local_of(parameter.grad).div_(factor)


def _begin(session: Session) -> None:
    """Begin what techniques read for long, and the comparison of what several ranks hold."""
    build = session.build
    build.now = build.values_after(session.counters.step)
    for begin in build.begins:
        begin(build)
    compare_copies(build, session.checkpoints)


def heartbeats_of(session: Session, stop: Interrupts) -> AbstractContextManager[Any]:
    """Return a context in which a rank that holds up the others of a run is found and named."""

    def last_words(error: RunError) -> None:
        session.report_alone("failed", str(error), type(error).__name__)

    build, run = session.build, session.folder.path
    patience_s = build.plan.mesh.patience_s
    return heartbeats(build.world, patience_s, run, lambda: session.counters.step, stop, last_words)


def prepare_together(
    plan: Plan, world: World, progress: Progress, run_before: RunFolder | None = None
) -> Prepared:
    """Return the data of a run, which the first rank prepares and shows, and all ranks open.

    Args:
        plan: the run.
        world: the ranks.
        progress: shows the progress.
        run_before: the run that is resumed, which keeps its recorded data; None for a new run.
    """

    def opened(task: Callable[[str, float, float | None], None] | None = None) -> Prepared:
        if run_before is None:
            return prepare(plan, progress=task)
        return reopen(plan, run_before.read_data(), run_before.path, progress=task)

    by_the_first: list[Prepared] = []
    by_first(world, lambda: by_the_first.append(opened(progress.task)))
    prepared = by_the_first[0] if by_the_first else opened()
    if world.rank == 0:
        _note_data(plan, prepared, progress, run_before)
    return prepared


def _note_data(
    plan: Plan, prepared: Prepared, progress: Progress, run_before: RunFolder | None
) -> None:
    """Show which text is not trained on, and whether a resumed run's recorded data is older."""
    recorded = run_before is not None and run_before.read_data() is not None
    if recorded and not is_current(plan, prepared):
        where = prepared.directory
        progress.note(f"text or tokenizer changed since: going on with shards in {where}")
    if plan.vision is None:
        progress.note(prepared.sides(plan.data.validation).line)
    else:
        shown = plan.vision
        progress.note(
            f"images: {shown.images:,} to train on and {shown.validation_images:,} held out, of "
            f"{shown.classes} classes in {shown.size} x {shown.size} pixels"
        )
    for one in prepared.left_out:
        progress.note(one.line())
    for line in prepared.chat.lines() if prepared.chat else ():
        progress.note(line)
    if prepared.chat and (line := template_line(prepared.chat, plan.data.tokenizer)):
        progress.note(line)
    for step in prepared.cleaning.steps if prepared.cleaning else ():
        progress.note(step.line())
    if prepared.loses:
        progress.note(f"the tokenizer loses text: {prepared.loses}")
    if prepared.tokenizer.note:
        progress.note(prepared.tokenizer.note)


def _look_at_validation(build: Build, progress: Progress) -> int:
    """Show the reasons to doubt the run's validation loss, and return the targets that it counts.

    Raises:
        ConfigError: there are no such targets.
    """
    tokens = build.plan.eval.tokens
    targets, _ = count_targets(build, tokens)
    if build.world.rank == 0:
        for doubt in doubts(build, tokens, targets):
            progress.note(doubt.line)
        if (repeats := doubt_of_repeats(build)) is not None:
            progress.note(f"note: {repeats.line}")
    return targets


def _check_plan(
    plan: Plan, device: torch.device, progress: Progress, *, first: Plan, begins: bool
) -> Context:
    """Return the context of a plan that can run; refuse others, and show what may be a mistake.

    A new run is also refused where its plan makes no sense. The check comes before the data is
    prepared. `make_build` takes the context, and checks again only where the plan has changed.

    Args:
        plan: the run.
        device: the device that it runs on.
        progress: shows the doubts.
        first: the plan with the folders of weights that the run first began from.
        begins: whether this is a new run and not a resumed one.
    """
    context = check_supported(list(plan.techniques.values()), make_context(plan, device))
    check_weights(plan)
    model = plan.model.model_copy(update={"pretrained": first.model.pretrained})
    suspicions = doubts_of(plan.model_copy(update={"model": model}))
    if begins:
        check_meant(suspicions)
    for doubt in suspicions:
        progress.note(f"note: {doubt.line}")
    return context


def _with_keys(plan: Plan) -> Plan:
    """Return a plan that was made in Python as `Plan.read` would have read it."""
    return plan.with_keys(plan.model_dump(exclude_unset=True, exclude={"techniques"}))


def _own_device(device: torch.device, world: World) -> torch.device:
    if device.type != "cuda":
        return device
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def _as_restored(plan: Plan, run: RunFolder, checkpoint: str | None) -> Plan:
    """Return the plan so that the run's checkpoint can make its model, where it has one."""
    checkpoints = run.checkpoints
    newest = [f"step-{step}" for step in steps_in(checkpoints)[-1:]]
    for name in [checkpoint] if checkpoint else newest:
        if (checkpoints / name).is_dir():
            return without_base(plan, Saved(checkpoints / name, verify=False))
    return plan


def _first_notes(
    build: Build, first: Plan, progress: Progress, timed: dict[str, Any] | None, start: Start
) -> RunNotes:
    """Return the notes of a run before its first step; the plan names its first folders again.

    Args:
        build: the run. Its plan lacks the folders where a checkpoint makes the model.
        first: the plan with the folders that the run first began from.
        progress: shows what makes the validation loss doubtful.
        timed: the measured times of attention backends; None where they were not measured.
        start: the parts of the time before the first step; it measures later parts too.
    """
    targets = _look_at_validation(build, progress)
    of_text = build.plan.vision is None
    if build.world.rank == 0 and of_text and (mix := mix_of(build)) is not None:
        for line in mix.lines():
            progress.note(line)
    folders = {"pretrained": first.model.pretrained, "adapter": first.model.adapter}
    own = {**dict(build.plan.model), **folders}
    build.plan = build.plan.replaced(model=own, vision=first.vision)
    return RunNotes(
        timed_attention=timed,
        start_s=start.spent_s,
        validation_targets=targets,
        frozen=frozen_digests(build.plan),
    )


def _open_folder(
    build: Build, resume: bool, folder: Path | None, checkpoint: str | None, branch: bool
) -> tuple[RunFolder, str | None]:
    """Return the run's folder and the checkpoint to continue from, the same on every rank."""

    def opened() -> tuple[str, str | None]:
        if not resume:
            return str(RunFolder.create(build.plan).path), None
        earlier_run = RunFolder.find(build.plan, folder)
        if checkpoint and (earlier_run.checkpoints / checkpoint).is_dir():
            path = earlier_run.checkpoints / checkpoint
            forked, step = _fork(build, earlier_run, path, branch=branch)
            return str(forked.path), step
        return str(earlier_run.path), checkpoint

    path, which = by_first(build.world, opened)
    return RunFolder(Path(path)), which


def _fork(
    build: Build, run: RunFolder, path: Path, *, branch: bool = False
) -> tuple[RunFolder, str]:
    """Return a new run that begins at a checkpoint, where resuming the old run would lose some.

    The old run would lose its later checkpoints, or the plan that made its present ones. Where it
    would lose neither, and no branch is asked for, it is returned itself. The second value is the
    checkpoint to restore.
    """
    saved = Saved(path)
    step = saved.values["step"]
    check_same_run(saved, build, fork=True, branch=branch)
    check_frozen(saved, build.plan, note_frozen(build))
    changes = changed_knobs(saved, build.plan)
    if not branch and step == max(steps_in(run.checkpoints)) and not changes:
        return run, f"step-{step}"
    forked = run.fork(build.plan, path)
    changed = f"; {format_changes(changes)}" if changes else ""
    build.note_line(
        f"{forked.path} is a new run from step {step} of {run.path}, which stays{changed}"
    )
    return forked, f"step-{step}"
