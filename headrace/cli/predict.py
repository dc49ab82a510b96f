"""This module holds the verb `plan`, which predicts a run, and `probe`, which measures rates."""

import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headrace.cli.arguments import Json, Overrides, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.goodput import show_goodput
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.limits import SweepAim
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.plan.plan import Plan
    from headrace.predict.prediction import Prediction

SWEEP_S = 8.0
"""Seconds after which a sweep of several ranks predicts no further plan."""
KEY = re.compile(r"[a-z_.]+=")
"""How an override begins."""


def plan(
    plan: Annotated[
        str, typer.Argument(help="A recipe's name or a TOML file; --budget goes without.")
    ] = "",
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    device_name: Annotated[
        str,
        typer.Option(
            "--device-name", "--gpu", help="A GPU that is not here, as NVIDIA H200; rates assumed."
        ),
    ] = "",
    sweep_: Annotated[bool, typer.Option("--sweep", help="Rank what the plan could be.")] = False,
    aim: Annotated[SweepAim, typer.Option("--for", help="What a sweep ranks by.")] = "time",
    after_: Annotated[
        Path | None, typer.Option("--after", help="A run here whose steps correct the prediction.")
    ] = None,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Tell what failures take, by checkpoints and restart.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="Choose the model for 100usd, 8gpu-hours or 3e19flops.")
    ] = "",
    data: Annotated[str, typer.Option(help="Different tokens that there are, as 1.5B.")] = "",
    output: Annotated[
        Path | None, typer.Option("--out", help="Where the plan of a budget goes, as TOML.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict a run: whether it fits, where its step goes, how long and how much."""
    with exit_codes(json):
        if budget and KEY.match(plan):  # a budget goes without a plan, and its place has a key
            plan, overrides = "", [plan, *(overrides or [])]
        near = sweep_ or after_ is not None or goodput
        _check(plan, budget, data=data, output=output, near=near)
        if budget:
            from headrace.cli.budget import plan_budget

            words = (overrides, with_, without)
            plan_budget(budget, plan, words, device_name, data, output, as_json=json)
            return
        with loading():
            from headrace.cli.plans import named_plan, place
            from headrace.inference.load import read_recorded_plan, resolve_run
            from headrace.predict import sweep
            from headrace.predict.ending import Curve
            from headrace.predict.prediction import after, predict
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
            if goodput:
                on_gpu = context.device == "cuda"
                show_goodput(wanted, prediction, on_gpu=on_gpu, as_json=json)
            else:
                _show(plan, wanted, prediction, as_json=json)
            return
        limit_s = SWEEP_S if wanted.mesh.ranks > 1 else math.inf
        more = {"seconds": limit_s, "calibration": measured}
        ranked = sweep.sweep(wanted, context, machine, catalogue(), aim, **more)
        if json:
            show_json(sweep.plain(ranked))
        else:
            show_table(sweep.HEAD, sweep.table(ranked), f"{wanted.name} on {machine.name}")
            print(*filter(None, (sweep.format_summary(ranked), wanted.mesh.left_open)), sep="\n")
            if more := sweep.command(ranked, plan, overrides or (), with_ or (), without or ()):
                print(f"next: {more}{f'  # on {device_name}' if device_name else ''}")


def _check(plan: str, budget: str, *, data: str, output: Path | None, near: bool) -> None:
    """Refuse words that do not go together.

    Args:
        plan: the plan's name; "" where none was typed.
        budget: what may be spent; "" where nothing was typed.
        data: the number of different tokens; "" where none was typed.
        output: where the plan of a budget goes; None where nothing was typed.
        near: whether --sweep, --after or --goodput was typed.

    Raises:
        ConfigError: there is neither a plan nor a budget, or options of one beside the other.
    """
    if not plan and not budget:
        raise ConfigError(
            "plan takes a recipe or a plan file, or --budget, which goes without",
            "headrace plan demo; headrace plan --budget 8gpu-hours",
        )
    if budget and near:
        raise ConfigError(
            "--budget chooses a plan; --sweep, --after and --goodput are about one that is there",
            f"headrace plan --budget {shlex.quote(budget)} --out plan.toml; "
            "headrace plan plan.toml --sweep",
        )
    if not budget and (data or output is not None):
        raise ConfigError(
            "--data and --out are about the plan that a budget buys",
            "--budget 8gpu-hours",
        )


def _show(name: str, wanted: "Plan", prediction: "Prediction", *, as_json: bool) -> None:
    """Print the prediction of a plan, with what may be a mistake in it and where it begins."""
    from headrace.cli.data_mix import prepared_mix
    from headrace.inference.load import run_of
    from headrace.plan.doubts import doubts_of
    from headrace.predict import page
    from headrace.train.run_folder import RunFolder

    parent = RunFolder(run).parent if (run := run_of(name)) else None
    doubts, mix = doubts_of(wanted), prepared_mix(wanted)
    if as_json:
        more = {
            "parent": parent,
            "doubts": [doubt.to_dict() for doubt in doubts],
            "mixture": None if mix is None else mix.to_dict(),
            "left_open": wanted.mesh.left_open,
        }
        show_json({**prediction.to_dict(), **more})
        return
    notes = [f"note: {doubt.line}" for doubt in doubts]
    print(page.format_prediction(wanted, prediction), *notes, sep="\n")
    if mix is not None:
        print(*mix.lines(), sep="\n")
    if parent:
        print(f"it begins at step {parent['step']} of {parent['run']}")


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
