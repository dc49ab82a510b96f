"""The verbs of the closed loop: predict, measure, judge and change."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace import probes
from headrace.assemble.context import find_device
from headrace.cli.arguments import (
    DeviceName,
    Json,
    Overrides,
    PlanName,
    With,
    Without,
    catalogue,
    named_plan,
    place,
    rates_here,
)
from headrace.cli.terminal import console, exit_codes, make_progress, show_json, show_table
from headrace.core.command import again
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import shell
from headrace.core.limits import MOST, TUNE_MINUTES, TUNE_SEEDS, SweepAim, TuneAim
from headrace.doctor import advice
from headrace.doctor.run import TRACES
from headrace.doctor.trace.facts import HEAD as KERNEL_HEAD
from headrace.doctor.trace.facts import kernel_lines
from headrace.doctor.words.answer import findings_json, render_advice
from headrace.inference.load import read_recorded_plan, resolve_run, run_of
from headrace.plan.doubts import doubts_of
from headrace.predict import sweep
from headrace.predict.ending import Curve
from headrace.predict.foresight import after, foresee, told
from headrace.probes.table import table as probe_table
from headrace.probes.together import measure_together
from headrace.recipes import recipes
from headrace.train.run_folder import RunFolder
from headrace.tuner.ablate import ablate_command
from headrace.tuner.command import folder_of, tune_command
from headrace.tuner.command import told as tuned_told
from headrace.tuner.kinds import learns_otherwise, runs_otherwise


def plan(
    plan: PlanName, overrides: Overrides = None, *,
    with_: With = None, without: Without = None, device_name: DeviceName = "",
    sweep_: Annotated[bool, typer.Option("--sweep", help="Rank what the plan could be.")] = False,
    aim: Annotated[SweepAim, typer.Option("--for", help="What a sweep ranks by.")] = "time",
    after_: Annotated[
        Path | None, typer.Option("--after", help="A run here whose steps correct the prediction.")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Predict a run: whether it fits, where its step goes, how long and how much."""
    with exit_codes(json):
        wanted = named_plan(plan, overrides, with_, without, verb="plan")
        context, machine = place(wanted, device_name)
        measured = curve = None
        if after_ is not None:
            run = resolve_run(after_)
            ran = read_recorded_plan(run, catalogue())
            try:
                measured = after(run, catalogue(), context, machine)
            except UnsupportedError:  # the run's clock tells, where no time of a step is foreseen
                if sweep_ or foresee(wanted, context, machine).step_s is not None:
                    raise
            if wanted.goal.bits_per_byte is not None or measured is None:
                curve = Curve.of(run, learns_otherwise(ran, wanted), runs_otherwise(ran, wanted))
        if not sweep_:
            found = foresee(wanted, context, machine, measured, curve)
            parent = RunFolder(run).parent if (run := run_of(plan)) else None
            doubts = doubts_of(wanted)
            if json:
                more = {"parent": parent, "doubts": [doubt.to_dict() for doubt in doubts]}
                show_json({**found.plain(), **more})
            else:
                print("\n".join([told(wanted, found), *(f"note: {d.line}" for d in doubts)]))
                if parent:
                    print(f"it begins at step {parent['step']} of {parent['run']}")
            return
        ranked = sweep.sweep(wanted, context, machine, catalogue(), aim, calibration=measured)
        if json:
            show_json(sweep.plain(ranked))
        else:
            show_table(sweep.HEAD, sweep.table(ranked), f"{wanted.name} on {machine.name}")
            print(sweep.told(ranked))
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
        where = find_device(device, "--device auto")
        machine = measure_together(where, budget_s=seconds, progress=make_progress(json))
        if machine is None:  # the first rank tells
            return
        if json:
            show_json({"machine": asdict(machine), "file": str(probes.path(where))})
            return
        show_table(["what", "reached"], probe_table(machine), machine.name)
        print(f"kept in {probes.path(where)}")


def doctor(
    what: Annotated[
        list[Path],
        typer.Argument(
            help="A run: runs/NAME, or its NAME; a plan that was not run; what headrace.watch "
            "saved; or torch.profiler traces, one of each rank. After a plan key=value, as in "
            "batch.tokens=16384.",
            metavar="RUN|PLAN|WATCHED|TRACE...",
        ),
    ], *,
    with_: With = None, without: Without = None,
    device_name: DeviceName = "", json: Json = False,
) -> None:  # fmt: skip
    """What holds a run up, the gravest first, and what each remedy would gain."""
    with exit_codes(json):
        first, kernels = what[0], []
        if _is_plan(first):
            words = [str(word) for word in what[1:]]
            wanted = named_plan(str(first), words, with_, without, verb="doctor")
            found = advice.advise_plan(wanted, *place(wanted, device_name), catalogue())
        elif with_ or without:
            raise ConfigError(
                f"--with and --without change a plan, and {first} is none",
                again((first, _plan_of(first)), verb="doctor"),
            )
        elif len(what) > 1 or (first.name.endswith(TRACES) and not first.is_dir()):
            found = advice.advise_loop(what, catalogue())
        else:
            folder = _judged_run(first)
            found = advice.advise(folder, catalogue(), rates_here)
            kernels = kernel_lines(folder)
        if json:
            show_json(findings_json(found))
            return
        print(render_advice(found))
        if kernels:
            show_table(KERNEL_HEAD, kernels)


def _judged_run(what: Path) -> Path:
    """The run's folder; a file or a folder that is no run may have been meant as traces.

    Raises:
        ConfigError: there is no such run.
    """
    try:
        return resolve_run(what)
    except ConfigError as error:
        ending = next((e for e in TRACES if any(what.glob(f"*{e}"))), "")
        if what.is_file() and not what.stat().st_size:
            raise ConfigError(f"{what} is empty", error.remedy) from None
        if what.is_file() and (what.parent / "plan.toml").is_file():
            message = f"{what} is a file of a run, and a run is judged by its folder"
            raise ConfigError(message, again((what, what.parent), verb="doctor")) from None
        if what.is_file():  # gzip is seen by what is in it
            named = f"{what}{TRACES[0]}"
            command = again((what, named), verb="doctor")
            remedy = f"mv {shell(what)} {shell(named)}, if it is one; {command}"
        elif ending:
            remedy = f"headrace doctor {shell(what)}/*{ending}"
        else:
            raise
        message = f"{error.message}; the name of a trace ends with {' or '.join(TRACES)}"
        raise ConfigError(message, remedy) from None


def _plan_of(what: Path) -> Path:
    """The plan of a run, or one that is always there."""
    found = (folder / "plan.toml" for folder in (what, Path("runs") / what))
    return next((file for file in found if file.is_file()), Path("demo"))


def _is_plan(what: Path) -> bool:
    """A TOML file, or a recipe of which there is no run."""
    if any((folder / "plan.toml").is_file() for folder in (what, Path("runs") / what)):
        return False
    return what.suffix == ".toml" or str(what) in recipes()


def tune(
    plan: PlanName, overrides: Overrides = None, *,
    with_: With = None, without: Without = None,
    aim: Annotated[
        TuneAim | None,
        typer.Option("--for", help="What is to become less: of a plan with a target the time to it "
                     "(quality) where runs fit into the minutes, else of a step (time)."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="On the clock, at most.")] = TUNE_MINUTES,
    seeds: Annotated[
        int, typer.Option(min=2, max=100, help="Of a change of learning, at most.")] = TUNE_SEEDS,
    architecture: Annotated[bool, typer.Option(
        "--architecture", help="Try other blocks, attention and shapes of the model too.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Try what is foreseen to help, measure it beside the best so far, keep what won."""
    with exit_codes(json):
        wanted = named_plan(plan, overrides, with_, without, verb="tune")
        context, machine = place(wanted)
        progress = make_progress(json)
        try:
            tuned = tune_command(
                wanted, aim=aim, minutes=minutes, catalogue=catalogue(), context=context,
                machine=machine, seeds=seeds, architecture=architecture, tell=progress.note,
                progress=progress,
            )  # fmt: skip
        finally:
            progress.close()
        if json:
            show_json(tuned.plain())
        else:
            print(tuned_told(tuned, folder_of(wanted)))


def ablate(
    plan: PlanName, overrides: Overrides = None, *,
    with_: With = None, without: Without = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Two at a time, too.")] = False,
    minutes: Annotated[float, typer.Option(help="On the clock, at most.")] = math.inf,
    loss_steps: Annotated[int, typer.Option(
        min=0, max=MOST, help="Also compare losses after so many.")] = 0,
    output: Annotated[Path | None, typer.Option("--out", help="Where the rows go.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Measure what each technique of a plan is worth: left out, alone, and in pairs."""
    with exit_codes(json):
        wanted = named_plan(plan, overrides, with_, without, verb="ablate")
        changes = [f"+{n}" for n in with_ or ()] + [f"-{n}" for n in without or ()]
        progress = make_progress(json)
        try:
            found = ablate_command(
                wanted, catalogue=catalogue(), pairs=pairs, minutes=minutes,
                loss_steps=loss_steps, folder=output, progress=progress,
                changes=[*changes, *(overrides or ())],
            )  # fmt: skip
        finally:
            progress.close()
        if json:
            show_json(found.plain(), found.exit_code)
        else:
            for title, head, rows in found.tables():
                show_table(head, rows, title)
            print("\n".join(found.lines()))
        if found.interrupted:
            console.print("interrupted; the same command goes on", markup=False)
    if found.interrupted:
        raise typer.Exit(found.exit_code)


VERBS = (plan, probe, doctor, tune, ablate)
