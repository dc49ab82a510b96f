"""Load a trained model from the folder of its run, for `eval`, `sample` and `export`."""

import shlex
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.sockets import Build
from headrace.core.command import rerun, rerun_with, train_command
from headrace.core.errors import ConfigError, Diverged, RunError, UnsupportedError, alike, nearest
from headrace.core.files import mend_plan, read_plan_text, recorded_plan, shell
from headrace.core.folders import is_point
from headrace.data.ingest import reopen
from headrace.data.prepared import Prepared, check_same_data
from headrace.data.tokenizer import Tokenizer
from headrace.optim.schedule import learning_rate
from headrace.parallel.world import World
from headrace.plan.changes import flatten
from headrace.plan.gentler import gentler
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage, Technique
from headrace.train.checkpoint import Saved, steps_in
from headrace.train.identity import (
    LOCATION_KEYS,
    Differences,
    among,
    back,
    check_frozen,
    differences,
    format_changes,
    frozen_digests,
    trained,
    without_base,
)
from headrace.train.run_folder import RunFolder
from headrace.train.state import (
    largest,
    last_sound,
    refuse_wild,
    restore_state,
    restore_techniques,
)

T = TypeVar("T")
AVERAGED = "weights_for_eval"
"""The socket of techniques that evaluate other weights than those of the last step."""


def resolve_run(run: Path) -> Path:
    """Return the folder of a run from its path or from its name under `runs`.

    Raises:
        ConfigError: there is no such run; names the run with the nearest name. Or it is a quantized
            model.
    """
    for folder in (run, Path("runs") / run):
        if is_point(folder):
            raise _quantized(run, folder)
        if (folder / "plan.toml").is_file():
            return folder
    problem = f"{run} is not a run"
    for folder in (run, Path("runs") / run):
        if command := mend_plan(folder):
            raise ConfigError(f"{problem}: its plan.toml is gone", command)
    for folder in run.parents:
        if (folder / "plan.toml").is_file() and (folder / "environment.json").is_file():
            raise _inside(run, folder)
    if run.exists() or (Path("runs") / run).exists():
        problem += ": it has no plan.toml"
    names = [p.parent.name for p in Path("runs").glob("*/plan.toml")]
    if not names:
        raise ConfigError(
            f"{problem}; no run was made here yet", "headrace train demo, which makes one"
        )
    near = alike(run.name, names) or (names[0] if len(names) == 1 else None)
    if near is not None:
        command = rerun((run, f"runs/{near}"), verb="eval")
        raise ConfigError(f"{problem}; the nearest is {near}", command)
    newest = max(names, key=lambda name: Path("runs", name, "plan.toml").stat().st_mtime)
    raise ConfigError(
        f"{problem}; the runs are {nearest(run.name, names)}",
        f"{rerun((run, f'runs/{newest}'), verb='eval')}, which is the newest",
    )


def _quantized(name: Path, folder: Path) -> ConfigError:
    """Return the error of a quantized model where a run is needed; it may lie inside of one."""
    whole = (one for one in folder.parents if (one / "environment.json").is_file())
    run = next((one for one in whole if (one / "plan.toml").is_file()), None)
    return ConfigError(
        f"{name} is a quantized model and no run: `eval` and `sample` take it",
        f"headrace sample {shell(name)}" if run is None else rerun((name, run), verb="eval"),
    )


def _inside(path: Path, run: Path) -> ConfigError:
    """Return the error of a path inside the folder of a run, such as a checkpoint."""
    command, problem = rerun((path, run), verb="eval"), f"{path} is a part of the run {run}"
    if path.parent.name == "checkpoints" and path.is_dir():
        return ConfigError(
            f"{problem}: a checkpoint is named behind it", f"{command} --checkpoint {path.name}"
        )
    return ConfigError(problem, command)


def run_of(plan: str) -> Path | None:
    """Return the folder of the run whose resolved plan is the file `plan`; None for other files."""
    path = Path(plan)
    inside = path.name == "plan.toml" and (path.parent / "environment.json").is_file()
    return path.parent if inside else None


def read_plan(folder: Path, catalogue: Catalogue) -> Plan:
    """Return the resolved plan of a run.

    Raises:
        ConfigError: `folder` is not a run, or its plan is damaged.
    """
    file = resolve_run(folder) / "plan.toml"
    mend = mend_plan(file.parent)
    try:
        text = read_plan_text(file)
    except ConfigError as error:
        raise ConfigError(error.message, mend or error.remedy) from None
    try:
        return Plan.read(text, catalogue)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}", mend or error.remedy) from None


def read_recorded_plan(folder: Path, catalogue: Catalogue) -> Plan:
    """Return the plan that a run was started with, even if its plan.toml was edited since.

    Raises:
        ConfigError: the recorded plan is damaged.
    """
    return Plan.read(read_plan_text(recorded_plan(folder)), catalogue)


def plan_to_resume(
    named: Plan,
    run: Path | None,
    catalogue: Catalogue,
    *,
    overrides: Iterable[str] = (),
    with_: Iterable[str] = (),
    without: Iterable[str] = (),
    note: Callable[[str], None],
    checkpoint: str | None = None,
) -> Plan:
    """Return the plan of the run to resume: its own plan with the changes of the command line.

    Keys that the command line does not set keep the run's values. Where the file of the named plan
    has other values, the user is shown them. The layout of the ranks is the exception: it is that
    of the named plan, for which the processes were started, and a checkpoint loads under any.

    Args:
        named: the plan that the command line names, with its changes.
        run: the run's folder where the command line names it; else the newest of the plan's name.
        catalogue: the techniques and model families.
        overrides: the `key=value` words of the command line.
        with_: the names of techniques that the command line adds.
        without: the names of techniques that the command line removes.
        note: called with a line for the user.
        checkpoint: the checkpoint to resume from; the newest without it.

    Raises:
        ConfigError: there is no such run, or its plan with the changes is not well formed.
    """
    folder = RunFolder.find(named, run).path
    if not (folder / "plan.toml").is_file():  # the run ended before its plan was written
        return named
    settings = [word for word in overrides if word.partition("=")[0].strip() not in LOCATION_KEYS]
    before = read_plan(folder, catalogue)
    text = tomli_w.dumps(_laid_out_as(named, before))
    plan = Plan.read(text, catalogue, overrides=settings, with_=with_, without=without)
    note_rate_jump(before, plan, folder, checkpoint, note)
    kept = flatten(plan.dump())
    other = {
        key: value
        for key, value in flatten(named.model_dump(mode="json", exclude_unset=True)).items()
        if key not in LOCATION_KEYS and key in kept and kept[key] != value
    }
    if other:
        entries = [f"{key} = {kept[key]!r} (the file: {value!r})" for key, value in other.items()]
        more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
        note(f"{folder} keeps {', '.join(entries[:4])}{more}; say key=value to change it")
    return plan.replaced(**{key: getattr(named, key) for key in LOCATION_KEYS})


def _laid_out_as(named: Plan, before: Plan) -> dict[str, Any]:
    """Return the tables of `before` with the mesh and the parallel techniques of `named`."""
    tables, laid_out = before.dump(), named.dump()
    techniques = {
        name: knobs
        for plan, own in ((before, False), (named, True))
        for name, knobs in plan.dump()["techniques"].items()
        if (plan.techniques[name].room == "parallel") is own
    }
    return {**tables, "mesh": laid_out["mesh"], "techniques": techniques}


def note_rate_jump(
    before: Plan, plan: Plan, folder: Path, checkpoint: str | None, note: Callable[[str], None]
) -> None:
    """Show by how much the learning rate jumps where a goal, schedule or rate changes it."""
    root = folder / "checkpoints"
    names = [(root / checkpoint).resolve().name] if checkpoint else []
    steps = [n for n in steps_in(root) if not names or f"step-{n}" in names]
    if not steps:
        return
    was, now = before.horizon_steps, plan.horizon_steps
    old = before.optimizer.lr * learning_rate(before.schedule, was)(steps[-1] - 1)
    new = plan.optimizer.lr * learning_rate(plan.schedule, now)(steps[-1] - 1)
    if old == new:
        return
    goes = f"the rate goes from {old:.2g} to {new:.2g}, {new / max(old, 1e-15):.2g} times"
    if plan.schedule == before.schedule and was == now:
        note(f"optimizer.lr changed: at step {steps[-1]} {goes}")
    elif plan.schedule == before.schedule:
        note(
            f"the schedule's horizon was {was} steps and is {now}: {goes}; schedule.steps={was} "
            "keeps it"
        )
    else:
        note(f"the schedule changed: at step {steps[-1]} {goes}")


def open_model(
    folder: Path,
    catalogue: Catalogue,
    *,
    checkpoint: str | None = None,
    with_data: bool = False,
    images: bool = False,
) -> Build:
    """Return the run's model with its trained weights, uncompiled, on this machine's device.

    Args:
        folder: the folder of the run, `runs/NAME`.
        catalogue: the techniques and model families.
        checkpoint: "step-N", "latest" or "best"; without it the best, or else the latest.
        with_data: whether to open the validation set too (prepared again if its cache is gone).
        images: whether a network that tells images apart will do too.

    Raises:
        ConfigError: `folder` is not a run, or it has no such checkpoint.
        RunError: the checkpoint is damaged.
        UnsupportedError: it is a run of images, and a model of text is asked for.
    """
    recorded, path = read_plan(folder, catalogue), _checkpoint(folder, checkpoint)
    plan, saved = recorded, Saved(path)
    if plan.vision is not None and not images:
        raise UnsupportedError(
            f"{folder} is a run of {plan.vision.architecture}, which tells images apart: it has no "
            "text to read or to write",
            f"headrace eval {shell(folder)}, which tells how many images it tells rightly",
        )
    # An exact technique computes what the baseline computes, so a model alone needs none of them,
    # and a run that was trained on another device can be opened here. A technique that scales the
    # loss does not shape the model either, but fp16 is refused without one. One that evaluates
    # other weights than the last step's is needed for these.
    averaging = {n: t for n, t in plan.techniques.items() if AVERAGED in t.composes}
    routes = any("routes" in t.composes for t in averaging.values())
    shaping = {
        n: t
        for n, t in plan.techniques.items()
        if shapes_model(t, with_data=with_data)
        or "loss_scale" in t.claims
        or n in averaging
        or (routes and "routes" in t.composes)
    }
    _check_same_model(saved, plan, catalogue, with_data=with_data)
    plan = plan.replaced(
        device="auto",
        techniques=shaping,
        mesh=MeshConfig(),
        data={**dict(plan.data), "curriculum": None},  # no row of training is read
    )
    plan = without_base(plan, saved)
    if with_data:
        prepared = reopen(plan, RunFolder(folder).read_data(), folder)
    else:
        tokenizer = own_tokenizer(saved, folder)
        none: Any = None  # a model alone reads no validation text
        prepared = Prepared(folder, tokenizer, (), none, fingerprint={}, has_begun=True)
    until = max((t.stage for t in averaging.values()), default=Stage.MATERIALIZE)
    until = Stage.STEP if with_data else max(Stage.MATERIALIZE, until)
    build = make_build(plan, prepared, World(), choose_device(plan), until=until)
    check_frozen(saved, plan, frozen_digests(plan))
    now = {**prepared.fingerprint, "tokenizer": prepared.tokenizer.fingerprint}
    was = {thing: digest for thing, digest in saved.values["fingerprint"].items() if thing in now}
    check_same_data(was, now, f"data in {prepared.directory}", folder)
    _fill(build, saved, recorded)
    refuse_wild(saved, dict(trained(build)), partial(_instead_of_wild, folder, plan))
    return build


def _fill(build: Build, saved: Saved, plan: Plan) -> None:
    """Fill an opened model from a checkpoint of its run; `plan` is the plan of that run."""
    # A technique may have trained weights in another type; without one, another type is refused.
    converts = any("storage" in t.composes for t in plan.techniques.values())
    for name, parameter in trained(build):
        saved.fill_(f"model/{name}", parameter, converts=converts)
    build.now = build.values_after(int(saved.values["step"]))
    if averaged := [*build.weights_for_eval] or build.notes.get(AVERAGED, []):
        # Other optimizers than those of the run are made where none holds an average.
        on = plan.techniques.values()
        in_optimizer = any({AVERAGED, "routes"} <= {*t.composes} for t in on)
        (restore_state if in_optimizer else restore_techniques)(build, saved)
        # The weights of an evaluation stay in the model. Leaving a context would put others back,
        # so that none of them may be closed while the build lives.
        stack = ExitStack()
        for standing in averaged:
            stack.enter_context(standing(build))
        build.notes.setdefault("standing", []).append(stack)
        build.notes[AVERAGED] = averaged
        build.weights_for_eval.clear()


def computed(
    work: Callable[[], T],
    build: Build,
    folder: Path,
    catalogue: Catalogue,
    *,
    checkpoint: str | None,
) -> T:
    """Return what an opened model computes; refuse weights that are too large to compute with.

    Args:
        work: computes the result with the current weights of the model.
        build: the model that `open_model` returned.
        folder: the folder of the run.
        catalogue: the techniques and model families.
        checkpoint: the checkpoint that `open_model` was called with.

    Raises:
        RunError: the weights are finite, and the result is not. Its remedy is a checkpoint with
            which `work` succeeded.
    """
    try:
        return work()
    except Diverged as error:
        message = error.message
    plan, saved = read_plan(folder, catalogue), Saved(_checkpoint(folder, checkpoint))
    name, size = largest((name, parameter.detach()) for name, parameter in trained(build))

    def works(other: Saved) -> bool:
        _fill(build, other, plan)
        work()
        return True

    sound = last_sound(saved, works)
    raise RunError(
        f"{message}: the largest of the weights is {size:.3g}, in {name} of {saved.path}; "
        f"{'no earlier checkpoint' if sound is None else f'step-{sound}'} is sound",
        _instead_of_wild(folder, plan, sound),
    )


def _instead_of_wild(folder: Path, plan: Plan, sound: int | None) -> str:
    """Return the command that reads a sound checkpoint, or else repeats the run more gently."""
    if sound is not None:
        return rerun_with("--checkpoint", f"step-{sound}", verb=f"eval {shell(folder)}")
    words = [shlex.quote(word) for word in gentler(plan)]
    return train_command(folder, f"name={plan.name}-again", *words)


def own_tokenizer(saved: Saved, folder: Path) -> Tokenizer:
    """Return the run's tokenizer, and check that the checkpoint was trained with it.

    Raises:
        ConfigError: it is damaged or another one. Its remedy is the command that restores it, where
            the run's shards still have it.
    """
    file, was = folder / "tokenizer.json", saved.values["fingerprint"].get("tokenizer")
    try:
        run_tokenizer = Tokenizer.load(file)
    except (ConfigError, UnsupportedError) as error:
        raise ConfigError(error.message, _kept_tokenizer(folder, was) or error.remedy) from None
    mend = _kept_tokenizer(folder, was) if was and run_tokenizer.fingerprint != was else ""
    if mend:
        raise ConfigError(
            f"{file} is not the tokenizer that the run was trained with "
            f"(sha256 {str(was)[:12]} -> {run_tokenizer.fingerprint[:12]})",
            mend,
        )
    return run_tokenizer


def _kept_tokenizer(folder: Path, was: str | None) -> str:
    """Return the command that restores a run's tokenizer from its shards; "" where they lack it."""
    record = RunFolder(folder).read_data() or {}
    for key in ("directory", "absolute"):
        kept = Path(record.get(key, folder)) / "tokenizer.json"
        try:
            if key in record and Tokenizer.load(kept).fingerprint == was:
                return shlex.join(["cp", str(kept), str(folder / "tokenizer.json")])
        except (ConfigError, UnsupportedError):
            continue  # the tokenizer is gone or damaged there too
    return ""


def shapes_model(technique: Technique[Build] | type[Technique[Build]], *, with_data: bool) -> bool:
    """Return whether without a technique the model computes something else, or reads other data."""
    designs = technique.stage <= Stage.LINEAR and technique.equality != "exact"
    return designs or (with_data and technique.stage == Stage.DATA)


def _check_same_model(saved: Saved, plan: Plan, catalogue: Catalogue, *, with_data: bool) -> None:
    """Refuse a plan.toml that describes another model than its checkpoint holds.

    Raises:
        ConfigError: names the key and both values, with the command that restores the plan.
    """
    run = saved.path.parent.parent
    known = {**catalogue.techniques, **{n: type(t) for n, t in plan.techniques.items()}}
    shaping = [f"techniques.{n}" for n, t in known.items() if shapes_model(t, with_data=with_data)]
    tables = ["model", "data.sequence_length", *shaping]

    def changes_of_model(other: Plan) -> Differences:
        each = differences(saved, other).items()
        return {key: pair for key, pair in each if among(key, tables) and key != "model.pretrained"}

    if not (changes := changes_of_model(plan)):
        return
    mend = mend_plan(run)
    try:
        mended = mend and not changes_of_model(read_recorded_plan(run, catalogue))
    except ConfigError:
        mended = False
    words = [back(saved, key, pair) for key, pair in changes.items()]
    raise ConfigError(
        f"{run / 'plan.toml'} is not the plan that {saved.path} was trained with: "
        f"{format_changes(changes)} there",
        mend if mended else train_command(run, "--resume", *words),
    )


def checkpoint_of(run: Path, which: str | None = None) -> Path:
    """Return the checkpoint that stands for a run: the best, or else the latest.

    Args:
        run: the run's folder or name.
        which: the name of another one, as "step-N".

    Raises:
        ConfigError: `run` is not a run, or it has no such checkpoint.
    """
    return _checkpoint(resolve_run(run), which)


def _checkpoint(folder: Path, which: str | None) -> Path:
    root = folder / "checkpoints"
    for name in [which] if which else ["best", "latest"]:
        if (root / name).is_dir():
            return root / name
    steps = steps_in(root)
    has = ", ".join(f"step-{n}" for n in steps) or "none"
    raise ConfigError(
        f"{root} has no checkpoint {which or 'best or latest'}; it has {has}",
        f"--checkpoint step-{steps[-1]}"
        if steps
        else f"{train_command(folder, '--resume')}, which saves one",
    )
