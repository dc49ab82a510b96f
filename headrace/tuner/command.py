"""Run `headrace tune`: a plan, minutes, and a folder that keeps what was measured."""

import shlex
from collections.abc import Callable
from math import inf
from pathlib import Path

from headrace.assemble.context import choose_device, on_one_process
from headrace.core.command import rerun, rerun_plan
from headrace.core.errors import ConfigError, RunError, Stopped
from headrace.core.files import write_whole
from headrace.core.limits import TUNE_MINUTES, TUNE_SEEDS, TuneAim
from headrace.core.progress import Progress
from headrace.costs.machine import Machine
from headrace.data.ingest import prepare
from headrace.plan.changes import parse
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context
from headrace.predict.sweep import NO_PRICE
from headrace.train.interrupts import AsCtrlC
from headrace.train.run_folder import RunFolder
from headrace.tuner.judge import Rules
from headrace.tuner.pairs import measure_with
from headrace.tuner.path import (
    LOG,
    PAGE,
    PATH,
    TRIALS,
    Tuned,
    command,
    dumps,
    write_plan,
)
from headrace.tuner.prefix import PrefixRuns
from headrace.tuner.proposals import sources
from headrace.tuner.store import Store, here
from headrace.tuner.target import train_with
from headrace.tuner.trial_row import length_of
from headrace.tuner.tune import tune
from headrace.tuner.worker import Worker

NAMED = 3
"""Most changes without a predicted gain that a line names; the page names more."""


def folder_of(plan: Plan) -> Path:
    """Return where a plan's tuning is kept, from one call to the next."""
    return Path(plan.directory) / f"{plan.name}-tune"


def tune_command(
    plan: Plan,
    *,
    aim: TuneAim | None = None,
    minutes: float = TUNE_MINUTES,
    catalogue: Catalogue,
    context: Context,
    machine: Machine,
    seeds: int = TUNE_SEEDS,
    architecture: bool = False,
    folder: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
    in_process: bool = False,
) -> Tuned:
    """Tune a plan and write tuned.toml, path.json and tune.html into its folder.

    Args:
        plan: the start.
        aim: what is to become less; None is "quality" where the plan has a target and the minutes
            allow runs to it, else "time" of a step.
        minutes: on the clock, at most.
        catalogue: techniques that may be tried.
        context: where the plan runs.
        machine: the rates of that device, for predictions.
        seeds: of a change of learning.
        architecture: changes of learning may change the model itself.
        folder: in the place of runs/NAME-tune.
        note: takes a line for each plan that was tried.
        progress: shows how the data is prepared.
        in_process: start no processes, to debug.

    Raises:
        ConfigError, UnsupportedError: the plan cannot run here, has no target where quality is
            wanted, or is tuned by another process.
        RunError: the folder cannot be written; tells what was kept.
        Stopped: Ctrl-C came, or a scheduler's signal; the files of the best so far are written.
    """
    chosen = aim is not None
    aim, why = aim_of(plan, aim)
    _check(plan, aim, minutes)
    folder = folder or folder_of(plan)
    other = f"{rerun(verb='tune PLAN')} name=NEW"
    files = locked(folder, "directory=FOLDER that can be written", other)
    note(why)
    try:
        prepare(plan, progress=(progress or Progress()).task)  # on nobody's clock
        with AsCtrlC() as signals, Worker(here=in_process, log=folder / LOG) as worker:
            tuned = tune(
                plan,
                aim,
                minutes,
                sources(aim, context, machine, catalogue, architecture),
                measure_with(worker),
                Rules(device=context.device, precision=context.precision),
                store=Store(folder / TRIALS, here(choose_device(plan))),
                seeds=seeds,
                train=train_with(worker, folder / "runs"),
                prefixes=PrefixRuns(worker, folder / "prefixes"),
                note=note,
                chosen=chosen,
            )
        write(tuned, folder)
    finally:
        files.unlock()
    if tuned.interrupted:
        raise Stopped(
            f"interrupted: {tuned.sentence()} Its files are in {folder}",
            f"{command(folder)}; the same command tunes on",
            signals.exit_code,
        )
    return tuned


def aim_of(plan: Plan, asked: TuneAim | None) -> tuple[TuneAim, str]:
    """Return what is to become less, and why, in words."""
    target = plan.goal.bits_per_byte
    if asked is not None:
        free = asked == "money" and plan.hardware.dollars_per_hour is None
        return asked, f"{plan.name}: for {asked}, as --for asks{f'; {NO_PRICE}' if free else ''}"
    if target is None:
        return "time", f"{plan.name}: for the time of a step, for the plan has no target"
    words = (
        f"{plan.name}: for the time to the plan's target, goal.bits_per_byte = {target:g}, where"
    )
    words += " two pairs of runs fit into the minutes, else for the time of a step"
    return "quality", f"{words}; --for quality and --for time ask for one of them"


def _check(plan: Plan, aim: TuneAim, minutes: float) -> None:
    """Check that there is anything to tune."""
    if aim == "quality" and not plan.goal.bits_per_byte:
        raise ConfigError(
            "quality is the time to a target, and the plan has none", "goal.bits_per_byte=TARGET"
        )
    if plan.mesh.ranks > 1:
        raise ConfigError(
            f"the tuner measures one device, and the plan has {plan.mesh.ranks} ranks",
            f"{on_one_process(plan)}, to tune what one device does",
        )
    if not 0 < minutes < inf:
        raise ConfigError(
            f"{minutes} minutes are no time to measure in", f"--minutes {TUNE_MINUTES:g}"
        )


def locked(folder: Path, remedy: str, other: str) -> RunFolder:
    """Return a folder of trials that no other process measures for.

    Args:
        folder: made where it is not there.
        remedy: what helps where that cannot be.
        other: the command that measures for another folder.

    Raises:
        ConfigError: one does, or nothing can be kept there.
    """
    files = RunFolder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.lock()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", remedy) from None
    except ConfigError:
        raise ConfigError(
            f"another process measures for {folder}",
            f"{other} (or the same command once that process has ended)",
        ) from None
    return files


def write(tuned: Tuned, folder: Path) -> None:
    """Write the plan, the path and the page.

    Raises:
        RunError: the folder cannot be written; tells what was kept.
    """
    from headrace.tuner.page import write_tune_page

    try:
        write_plan(tuned, folder)
        write_whole(folder / PATH, dumps(tuned))
        write_tune_page(tuned, folder)
    except (OSError, RunError) as error:
        words = map(shlex.quote, parse(tuned.changes).command())
        message = f"{folder} cannot be written: {error}. {tuned.sentence()}"
        raise RunError(message, rerun_plan("train", *words)) from None


def format_end(tuned: Tuned, folder: Path) -> str:
    """Render the end for a reader."""
    lines = [tuned.sentence()]
    for step in tuned.kept:
        lines.append(f"  {step.line()}")
        if bought := step.bought(length_of(tuned.first, step.after_s)):
            lines.append(f"    it buys {bought}")
    lines += [f"  {step.line()}" for step in tuned.not_shown]
    untold = []
    if tuned.up and (left := len(tuned.untried)):
        untold.append(f"{'1 change was' if left == 1 else f'{left} changes were'} not tried")
    if tuned.no_run:
        untold.append(f"no run {'has reached' if tuned.unreached else 'went to'} the target")
    if untold:
        more = f"{tuned.more}, and the same command goes on"
        lines.append(f"time was up; {' and '.join(untold)}: {more}")
    if tuned.no_gain:
        first, rest = tuned.no_gain[:NAMED], len(tuned.no_gain) - NAMED
        more = f" and {rest} more" if rest > 0 else ""
        lines.append(f"not tried: no gain predicted: {', '.join(first)}{more}")
    return "\n".join([*lines, f"page: {folder / PAGE}", f"next: {command(folder)}"])
