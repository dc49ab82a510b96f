"""This module holds the verb `train`."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import Checkpoint, Json, Overrides, PlanName, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import (
    exit_codes,
    make_progress,
    note,
    print_error,
    show_json,
    started_as,
)
from headrace.core.command import rerun, rerun_without
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.loading import loading
from headrace.core.units import format_count, format_seconds, part_of_text

if TYPE_CHECKING:
    from headrace.core.progress import Progress
    from headrace.plan.plan import Plan
    from headrace.train.interrupts import Closing
    from headrace.train.result import Conclusion, Result, Verdict


def train(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    resume: Annotated[bool, typer.Option(help="Continue the newest run of this name.")] = False,
    checkpoint: Checkpoint = None,
    branch: Annotated[
        str | None,
        typer.Option(
            metavar="RUN@STEP",
            help="Begin a new run at a checkpoint of another one, whose plan it has; changes stand "
            "in PLAN's place.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a plan to its goal, and print what became of the run."""
    with exit_codes(json, together=True), ExitStack() as stack:
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.inference.branch import plan_of_branch
            from headrace.inference.load import plan_to_resume, run_of
        if branch:
            overrides = _words_of_branch(plan, overrides, resume, checkpoint)
            wanted, parent = None, None
        else:
            wanted, parent = named_plan(plan, overrides, with_, without), run_of(plan)
            resume = resume or (not checkpoint and parent is None and is_restarted(wanted))
        if checkpoint and not resume:
            raise ConfigError(
                "--checkpoint says where to resume from", f"--resume --checkpoint {checkpoint}"
            )
        progress, closing = begin_training(stack, as_json=json)
        changes: Any = {
            "overrides": overrides or (),
            "with_": with_ or (),
            "without": without or (),
        }
        with concluded(progress, closing):
            if wanted is None:
                begins = plan_of_branch(branch or "", catalogue(), **changes, note=progress.note)
                wanted, parent, checkpoint = begins.plan, begins.parent, begins.checkpoint
            elif resume:
                more = {**changes, "note": progress.note, "checkpoint": checkpoint}
                wanted = plan_to_resume(wanted, parent, catalogue(), **more)
            result = training_of(wanted, progress)(
                resume=resume or bool(branch),
                folder=parent,
                checkpoint=checkpoint,
                branch=bool(branch),
            )
        if not result.first:
            return
        conclusion = result.conclude(closing, note)
        if json:
            show_json({**conclusion.report, "told": progress.notes})
        else:
            own_text = [*wanted.source_list] != ["stdlib"]
            note(closing_words(result.folder, conclusion, own_text=own_text))


def is_restarted(plan: "Plan") -> bool:
    """Return whether torchrun starts these processes again, and their run waits to go on.

    torchrun repeats the command that it was given, which began the run without `--resume`.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    from headrace.train.run_folder import RunFolder

    try:
        report = RunFolder.find(plan).read("report")
    except ConfigError:  # it ended before its folder was made
        return False
    return not report or report.get("status") != "done"


def begin_training(stack: ExitStack, *, as_json: bool) -> tuple["Progress", "Closing"]:
    """Return what shows the progress of a training, and what guards the end of its command.

    Args:
        stack: leaves the second when the command ends.
        as_json: print no progress, and an error as JSON.
    """
    with loading():
        import headrace.train.train  # noqa: F401  (it takes seconds)
        from headrace.train.interrupts import Closing, Interrupts

    Interrupts.print_error = partial(print_error, as_json=as_json)
    return make_progress(as_json), stack.enter_context(Closing())


def training_of(plan: "Plan", progress: "Progress") -> Callable[..., "Result"]:
    """Return the training of a plan as a command does it, on a layout of the started ranks.

    Args:
        plan: what is trained; with `mesh.auto` its layout is chosen first.
        progress: shows the progress.

    Returns:
        `train.run` of that plan, which takes what else it takes by name.
    """
    from headrace.cli.plans import laid_out
    from headrace.train import train as trainer

    return partial(
        trainer.run,
        laid_out(plan, progress.note),
        progress=progress,
        catalogue=catalogue(),
        command=True,
    )


@contextmanager
def concluded(progress: "Progress", closing: "Closing") -> Iterator[None]:
    """Close the progress of a training at its end, and conclude the run that an error ends."""
    try:
        yield
    except HeadraceError as error:
        closing.begin()
        _conclude_failed(error, closing)
        raise
    finally:
        closing.begin()
        progress.close()


def _words_of_branch(
    plan: str, overrides: list[str] | None, resume: bool, checkpoint: str | None
) -> list[str]:
    """Return the changes of a branch: all words of the command line, for it names no plan.

    Raises:
        ConfigError: the first word is a plan, or a run is to be resumed too.
    """
    if resume or checkpoint:
        option = "--resume" if resume else "--checkpoint"
        raise ConfigError(
            f"--branch begins a new run at a checkpoint, and {option} goes on with an old one",
            rerun_without(option, verb="train"),
        )
    if "=" not in plan:
        raise ConfigError(
            f"--branch RUN@STEP takes the plan of that run, and {plan!r} is another one",
            rerun((plan, "goal.steps=N"), verb="train"),
        )
    return [plan, *(overrides or ())]


def _conclude_failed(error: HeadraceError, closing: "Closing") -> None:
    """Write the conclusion of the run that an error ended, if the error ended a run."""
    from headrace.train.result import Result

    if error.run is None:
        return
    try:
        Result(error.run, catalogue()).conclude(closing, note)
    except Exception as failed:  # the error that ended the run is the one to report
        note(f"no conclusion: {failed}; the run is complete without")


def closing_words(folder: Path, conclusion: "Conclusion", *, own_text: bool) -> str:
    """Return the text that ends a training: the outcome of the run, and what to type next.

    Args:
        folder: the folder of the run.
        conclusion: the report, the verdict and the sample of the run.
        own_text: whether it trained on the user's own text. If not, the text says how to do so.
    """
    report = conclusion.report
    last = report["val"][-1]
    part = f" {part_of_text(last['share'])}" if "share" in last else ""  # an older checkpoint's
    sees = "accuracy" in last
    asked = report["goal"]["asked"].get("bits_per_byte")
    target = f" (goal {asked})" if asked else ""
    speed = report["steady_tokens_per_s"]
    unit, result = "tokens", f"{last['bits_per_byte']:.3f} bits per byte{part}"
    if sees:
        unit, result = "images", f"{last['accuracy']:.2%} of the held-out images told rightly"
    rate = f"{format_count(speed)} {unit}/s in steady steps" if speed else "speed not measured"
    lines = [
        "",
        f"{_outcome(report)}: {result}{target} after "
        f"{format_count(report['tokens'])} {unit} and {format_seconds(report['wall_s'])}, {rate}",
        *(f"{doubt['sentence']}; try: {doubt['remedy']}" for doubt in report["data"]["doubts"]),
        *verdict_lines(conclusion.verdict),
    ]
    if conclusion.sample is not None:
        lines.append(f"sample: {conclusion.sample}")
    lines.append(f"report: {conclusion.page or folder / 'report.json'}")
    if sees:
        lines.append(f"next:   {started_as()} export {folder} --to onnx")
    elif report["data"].get("chat"):
        lines.append(f"next:   {started_as()} chat {folder}")
    elif own_text:
        lines.append(f"next:   {started_as()} sample {folder}")
    else:
        lines.append(f"next:   {started_as()} sample {folder} --prompt 'def main('")
        yours = "train demo data.sources=PATH_OF_YOUR_TEXT name=mine"
        lines.append(f"        {started_as()} {yours}")
    return "\n".join(lines)


def _outcome(report: dict[str, Any]) -> str:
    """Return whether the run reached its goal, what ended it, and whether it diverged."""
    goal = report["goal"]
    outcome = f"ended by {goal['ended_by']}"
    if "bits_per_byte" in goal["asked"]:
        spent = f"budget spent ({goal['ended_by']})"
        outcome = "goal reached" if goal["reached"] else spent
    if report["outcome"]["diverged"]:
        return f"{report['outcome']['sentence']}; {outcome}"
    return outcome


def verdict_lines(verdict: "Verdict | None") -> list[str]:
    """Return the lines of the verdict with its remedy; none where no finding could be made."""
    if verdict is None:
        return []
    from headrace.doctor.words.answer import NOTHING_GAINS

    lines = [f"{verdict.sentence} ({verdict.evidence})"]
    if verdict.unknown:
        lines.append(verdict.unknown)
    if verdict.healthy:
        lines.append(f"healthy: {NOTHING_GAINS}")
    if verdict.remedy:
        lines.append(f"try first: {verdict.remedy}: {verdict.gain}")
    return lines
