"""This module holds the verb `plan`, which predicts a run, and `probe`, which measures rates."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace.cli.arguments import DeviceName, Json, Overrides, PlanName, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.errors import UnsupportedError
from headrace.core.limits import SweepAim
from headrace.core.loading import loading


def plan(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    device_name: DeviceName = "",
    sweep_: Annotated[bool, typer.Option("--sweep", help="Rank what the plan could be.")] = False,
    aim: Annotated[SweepAim, typer.Option("--for", help="What a sweep ranks by.")] = "time",
    after_: Annotated[
        Path | None, typer.Option("--after", help="A run here whose steps correct the prediction.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict a run: whether it fits, where its step goes, how long and how much."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan, place
            from headrace.inference.load import read_recorded_plan, resolve_run, run_of
            from headrace.plan.doubts import doubts_of
            from headrace.predict import page, sweep
            from headrace.predict.ending import Curve
            from headrace.predict.prediction import after, predict
            from headrace.train.run_folder import RunFolder
            from headrace.tuner.effects import learns_otherwise, runs_otherwise
        wanted = named_plan(plan, overrides, with_, without, verb="plan")
        context, machine = place(wanted, device_name)
        measured = curve = None
        if after_ is not None:
            run = resolve_run(after_)
            ran = read_recorded_plan(run, catalogue())
            try:
                measured = after(run, catalogue(), context, machine)
            except UnsupportedError:  # its clock serves where no step time is predicted
                if sweep_ or predict(wanted, context, machine).time.step_s is not None:
                    raise
            if wanted.goal.bits_per_byte is not None or measured is None:
                curve = Curve.of(run, learns_otherwise(ran, wanted), runs_otherwise(ran, wanted))
        if not sweep_:
            prediction = predict(wanted, context, machine, measured, curve)
            parent = RunFolder(run).parent if (run := run_of(plan)) else None
            doubts = doubts_of(wanted)
            if json:
                more = {"parent": parent, "doubts": [doubt.to_dict() for doubt in doubts]}
                show_json({**prediction.to_dict(), **more})
            else:
                notes = [f"note: {doubt.line}" for doubt in doubts]
                print(page.format_prediction(wanted, prediction), *notes, sep="\n")
                if parent:
                    print(f"it begins at step {parent['step']} of {parent['run']}")
            return
        ranked = sweep.sweep(wanted, context, machine, catalogue(), aim, calibration=measured)
        if json:
            show_json(sweep.plain(ranked))
        else:
            show_table(sweep.HEAD, sweep.table(ranked), f"{wanted.name} on {machine.name}")
            print(sweep.format_summary(ranked))
            if more := sweep.command(ranked, plan, overrides or (), with_ or (), without or ()):
                print(f"next: {more}{f'  # on {device_name}' if device_name else ''}")


def probe(
    *,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="auto, cuda or cpu.")
    ] = "auto",
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="No probe begins after so long.")
    ] = 180.0,
    json: Json = False,
) -> None:
    """Measure what this machine reaches, and keep it for predictions."""
    with exit_codes(json, together=True):
        with loading():
            from headrace import probes
            from headrace.assemble.context import find_device
            from headrace.probes.table import table
            from headrace.probes.together import measure_together
        where = find_device(device, "--device auto")
        machine = measure_together(where, budget_s=seconds, progress=make_progress(json))
        if machine is None:  # the first rank prints the result
            return
        if json:
            show_json({"machine": machine.to_dict(), "file": str(probes.path(where))})
            return
        show_table(["what", "reached"], table(machine), machine.name)
        print(f"kept in {probes.path(where)}")
