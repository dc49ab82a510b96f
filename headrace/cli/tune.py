"""This module holds the verbs that measure changes of a plan: tune, lr-find and ablate."""

import math
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.arguments import Json, Overrides, PlanName, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import (
    console,
    exit_codes,
    is_first,
    make_progress,
    show_json,
    show_table,
)
from headrace.core.limits import (
    FEWEST_LR_STEPS,
    LR_STEPS,
    MOST,
    TUNE_MINUTES,
    TUNE_SEEDS,
    TuneAim,
)
from headrace.core.loading import loading


def tune(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    aim: Annotated[
        TuneAim | None,
        typer.Option(
            "--for",
            help="What is to become less: of a plan with a target the time to it "
            "(quality) where runs fit into the minutes, else of a step (time).",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="On the clock, at most.")] = TUNE_MINUTES,
    seeds: Annotated[
        int, typer.Option(min=2, max=100, help="Of a change of learning, at most.")
    ] = TUNE_SEEDS,
    architecture: Annotated[
        bool,
        typer.Option(
            "--architecture", help="Try other blocks, attention and shapes of the model too."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Try what is predicted to help, measure it beside the best so far, keep what won."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan, place
            from headrace.tuner.command import folder_of, format_end, tune_command
        wanted = named_plan(plan, overrides, with_, without, verb="tune")
        context, machine = place(wanted)
        progress = make_progress(json)
        try:
            tuned = tune_command(
                wanted,
                aim=aim,
                minutes=minutes,
                catalogue=catalogue(),
                context=context,
                machine=machine,
                seeds=seeds,
                architecture=architecture,
                note=progress.note,
                progress=progress,
            )
        finally:
            progress.close()
        if json:
            show_json(tuned.to_dict())
        else:
            print(format_end(tuned, folder_of(wanted)))


def lr_find(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    steps: Annotated[
        int, typer.Option(min=FEWEST_LR_STEPS, max=100_000, help="Steps of the test, at most.")
    ] = LR_STEPS,
    low: Annotated[
        float, typer.Option(min=1e-12, max=1e12, help="AdamW's rate at its first step.")
    ] = 1e-5,
    high: Annotated[
        float, typer.Option(min=1e-12, max=1e12, help="AdamW's rate at its last step.")
    ] = 1.0,
    output: Annotated[
        Path | None, typer.Option("--out", help="Folder of the curve, as a page and as JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Let the learning rate grow in a short scratch run, and suggest one."""
    with exit_codes(json, together=True):
        with loading():
            from headrace.cli.plans import laid_out, named_plan
            from headrace.tuner.lr_find import find_rate, format_test, write_curve
        wanted = named_plan(plan, overrides, with_, without, verb="lr-find")
        progress = make_progress(json)
        try:
            wanted = laid_out(wanted, progress.note)
            test = find_rate(wanted, steps=steps, low=low, high=high, progress=progress)
        finally:
            progress.close()
        if not is_first():  # the first rank prints the result
            return
        page = None if output is None else write_curve(test, output)
        if json:
            show_json({**test.to_dict(), "page": None if page is None else str(page)})
            return
        print(format_test(test))
        if page is not None:
            print(f"curve: {page}")


def ablate(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Two at a time, too.")] = False,
    minutes: Annotated[float, typer.Option(help="On the clock, at most.")] = math.inf,
    loss_steps: Annotated[
        int, typer.Option(min=0, max=MOST, help="Also compare losses after so many.")
    ] = 0,
    output: Annotated[Path | None, typer.Option("--out", help="Where the rows go.")] = None,
    json: Json = False,
) -> None:
    """Measure what each technique of a plan is worth: left out, alone, and in pairs."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.tuner.ablate import ablate_command
        wanted = named_plan(plan, overrides, with_, without, verb="ablate")
        changes = [f"+{n}" for n in with_ or ()] + [f"-{n}" for n in without or ()]
        progress = make_progress(json)
        try:
            ablation = ablate_command(
                wanted,
                catalogue=catalogue(),
                pairs=pairs,
                minutes=minutes,
                loss_steps=loss_steps,
                folder=output,
                progress=progress,
                changes=[*changes, *(overrides or ())],
            )
        finally:
            progress.close()
        if json:
            show_json(ablation.to_dict(), ablation.exit_code)
        else:
            for title, head, rows in ablation.tables():
                show_table(head, rows, title)
            print("\n".join(ablation.lines()))
        if ablation.interrupted:
            console.print("interrupted; the same command goes on", markup=False)
    if ablation.interrupted:
        raise typer.Exit(ablation.exit_code)
