"""Train, predict, judge and tune from Python, as the verbs of the command line do."""

from pathlib import Path

from headrace.api.answers import Diagnosis, PlanForecast
from headrace.api.notebook import shown
from headrace.api.opened import OpenedRun
from headrace.api.plans import AnyPlan, plan_of
from headrace.cli.catalogue import catalogue
from headrace.cli.doctor import advice_on
from headrace.cli.plans import laid_out, place
from headrace.core.limits import TUNE_MINUTES, TUNE_SEEDS, TuneAim
from headrace.core.progress import Progress
from headrace.doctor.advice import advise_plan
from headrace.inference.load import plan_to_resume, run_of
from headrace.plan.plan import Plan
from headrace.predict import prediction
from headrace.train import train as trainer
from headrace.train.result import Result
from headrace.tuner.command import tune_command
from headrace.tuner.path import Tuned


def train(
    plan: AnyPlan,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    progress: Progress | bool = True,
) -> Result:
    """Train a plan to its goal, as `headrace train` does.

    A notebook shows the progress in the cell, and the report of the run where the result is the
    cell's last expression.

    Args:
        plan: a plan, the name of a recipe, or the path of a TOML file.
        resume: go on with the newest run of the plan's name, or with the run whose plan.toml this
            is.
        checkpoint: which checkpoint to go on from, as "step-100"; the newest without it.
        progress: True shows it in a notebook, as bars in a terminal, and as lines in a log; False
            shows nothing. Or an object that shows it.

    Returns:
        What the run left: its folder, report, findings, a sample, and the page.

    Raises:
        ConfigError: the plan is wrong; nothing has been trained.
        UnsupportedError: the plan cannot run here; nothing has been trained.
        RunError: the run failed; the last good checkpoint is intact.
        Stopped: a signal ended the run; a checkpoint is saved.
    """
    wanted = plan_of(plan)
    folder = None if isinstance(plan, Plan) else run_of(str(plan))
    with shown(progress) as bar:
        if resume:
            wanted = plan_to_resume(
                wanted, folder, catalogue(), note=bar.note, checkpoint=checkpoint
            )
        return trainer.run(
            laid_out(wanted, bar.note),
            progress=bar,
            resume=resume,
            folder=folder,
            checkpoint=checkpoint,
            catalogue=catalogue(),
        )


def predict(
    plan: AnyPlan, *, device_name: str = "", after: OpenedRun | str | Path | None = None
) -> PlanForecast:
    """Predict what a plan needs and takes, as `headrace plan` does. Nothing is trained.

    Args:
        plan: a plan, the name of a recipe, or the path of a TOML file.
        device_name: a GPU that is not here, as "NVIDIA H200", whose rates are assumed; "" for the
            plan's device here.
        after: a run on this machine whose measured steps correct the prediction.

    Raises:
        ConfigError: the plan is wrong, or a technique of it clashes with another.
        UnsupportedError: the plan cannot run there, or nothing is known of that device.
    """
    wanted = plan_of(plan)
    where = place(wanted, device_name)
    measured = None
    if after is not None:
        measured = prediction.after(_folder(after), catalogue(), *where)
    return PlanForecast(wanted, prediction.predict(wanted, *where, measured))


def doctor(
    what: Plan | Result | OpenedRun | str | Path, *more: str | Path, device_name: str = ""
) -> Diagnosis:
    """Name what holds a run up, the gravest first, as `headrace doctor` does.

    Args:
        what: a run, by itself, its folder or its name; a plan that was not run, by itself or by
            name; what `headrace.watch` saved; or a trace of `torch.profiler`.
        *more: behind the name of a plan words `key=value`; behind a trace those of other ranks.
        device_name: a GPU that is not here, where a plan is judged; "" for this machine's device.

    Raises:
        ConfigError: it is none of these, or the run has not ended.
        RunError: a file of it is damaged.
    """
    if isinstance(what, Plan):
        return Diagnosis(advise_plan(what, *place(what, device_name), catalogue()))
    paths = [_folder(what), *map(Path, more)]
    return Diagnosis(advice_on(paths, device_name=device_name)[0])


def tune(
    plan: AnyPlan,
    *,
    minutes: float = TUNE_MINUTES,
    aim: TuneAim | None = None,
    seeds: int = TUNE_SEEDS,
    architecture: bool = False,
    progress: Progress | bool = True,
) -> Tuned:
    """Measure what is predicted to help a plan, and keep what won, as `headrace tune` does.

    Candidates run in processes of their own. A script that calls this stands behind
    `if __name__ == "__main__":`, since these processes import it.

    Args:
        plan: a plan, the name of a recipe, or the path of a TOML file.
        minutes: on the clock, at most.
        aim: what is to become less: "time" of a step, "money", "memory", or "quality", which is
            the time to the plan's target. Without it the plan and the minutes decide.
        seeds: most seeds with which a change of learning is tried; at least 2.
        architecture: try other blocks, attention and shapes of the model too.
        progress: as `train` takes it.

    Returns:
        The first plan and the tuned one, with every plan that was tried and its verdict.

    Raises:
        ConfigError: the plan cannot be tuned, or another process tunes it.
        UnsupportedError: the plan cannot run here.
        Stopped: a signal ended it; the best so far is written.
    """
    wanted = plan_of(plan)
    context, machine = place(wanted)
    with shown(progress) as bar:
        return tune_command(
            wanted,
            aim=aim,
            minutes=minutes,
            catalogue=catalogue(),
            context=context,
            machine=machine,
            seeds=seeds,
            architecture=architecture,
            note=bar.note,
            progress=bar,
        )


def _folder(what: Result | OpenedRun | str | Path) -> Path:
    """Return the path of a run that is given by itself, its folder or its name."""
    return what.folder if isinstance(what, Result | OpenedRun) else Path(what)
