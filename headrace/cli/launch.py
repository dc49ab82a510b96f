"""This module holds the verbs that start a plan on an engine and follow it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.arguments import Json, Overrides, PlanName, With, Without
from headrace.cli.terminal import exit_codes, note, show_json, started_as
from headrace.launch.engine import LauncherName

if TYPE_CHECKING:
    from headrace.launch.engine import Launcher
    from headrace.launch.job import Job
    from headrace.launch.record import Launch
    from headrace.plan.plan import Plan

MOST_NODES, MOST_GPUS = 100_000, 1_024
"""Most machines, and most processes of one, that a launch may ask for: more is a slip."""
Launched = Annotated[str, typer.Argument(help="What was launched: the name of its run.")]
DryRun = Annotated[bool, typer.Option(help="Print what would be submitted, and submit nothing.")]


def launch(
    plan: PlanName,
    overrides: Overrides = None,
    *,
    on: Annotated[LauncherName, typer.Option(help="What starts the processes.")] = "local",
    nodes: Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Machines.")] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_GPUS, help="GPUs, and so processes, of each; else by the mesh."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the engine, as partition=gpu or image=NAME."),
    ] = None,
    with_: With = None,
    without: Without = None,
    resume: Annotated[bool, typer.Option(help="Continue the run of this name.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write what an engine expects of a plan, and submit it; `status`, `logs`, `stop` follow it."""
    with exit_codes(json):
        from headrace.assemble.context import check_anywhere
        from headrace.cli.plans import named_plan
        from headrace.launch.engines import engine_of
        from headrace.launch.follow import check_free

        engine = engine_of(on, set_ or ())
        wanted = named_plan(plan, overrides, with_, without, verb="launch")
        words = [*(overrides or ())]
        for option, names in (("--with", with_), ("--without", without)):
            words += [word for name in names or () for word in (option, name)]
        job = _job(engine, wanted, plan, words, nodes, gpus, resume=resume)
        if not resume:  # a run that goes on has its own plan, whatever the file says now
            check_anywhere(wanted)
        files, command = engine.files(job), engine.submit(job)
        if dry_run:
            _show(job, files, command, as_json=json)
            return
        check_free(engine, job)
        if on == "local":
            from headrace.launch.local import become

            _write(job, files)
            _record(engine, job, command, "")
            become([*command, "--json"] if json else command)
        record = _submitted(engine, job, files, command)
        if json:
            show_json(record.model_dump())
            return
        print(f"{on} has {job.argument} as {record.identity}; its files are in {job.folder}")
        note(f"next:   {started_as()} status {job.argument}")


def _job(
    engine: "Launcher",
    plan: "Plan",
    name: str,
    words: list[str],
    nodes: int,
    gpus: int | None,
    *,
    resume: bool,
) -> "Job":
    """Return the job of a plan under a name that no run has, or has where it goes on.

    Raises:
        ConfigError: the processes do not fit the plan's mesh, the engine has one machine alone, or
            there is no run to go on with.
    """
    from datetime import UTC, datetime

    from headrace.core.command import rerun_with
    from headrace.core.errors import ConfigError
    from headrace.core.files import read_plan_text
    from headrace.launch.job import Job, check_resumable, processes_of, unused_name
    from headrace.recipes import recipes

    here = None
    if engine.name == "local":
        import torch

        here = torch.cuda.device_count()
        if nodes > 1:
            raise ConfigError(
                f"--on local starts processes on this machine alone, not on {nodes} nodes",
                rerun_with("--nodes", "1", verb="launch PLAN"),
            )
    own = [word for word in words if word.partition("=")[0].strip() != "name"]
    job = Job(
        name=plan.name if resume else unused_name(plan.directory, plan.name),
        directory=plan.directory,
        data=plan.data.directory,
        plan=name,
        text=None if name in recipes() else read_plan_text(Path(name)),
        words=tuple(own),
        nodes=nodes,
        processes=processes_of(plan.mesh, nodes, gpus, here),
        gpus=plan.device != "cpu",
        cwd=Path.cwd(),
        resume=resume,
        at=f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}",
    )
    if engine.sees_runs:
        check_resumable(job)
    return job


def _show(job: "Job", files: dict[str, str], command: list[str], *, as_json: bool) -> None:
    """Print the files and the command that would submit them."""
    from headrace.launch.job import PLAN_FILE

    if as_json:
        show_json({"name": job.name, "files": files, "command": command})
        return
    for name, text in files.items():
        if name != PLAN_FILE:
            note(f"# {job.folder / name}")
            print(text, end="" if text.endswith("\n") else "\n")
    note(f"# it would be started by: {shlex.join(command)}")


def _write(job: "Job", files: dict[str, str]) -> None:
    """Write the files of a launch into its folder."""
    from headrace.core.files import write_whole

    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(job.folder / name, text)


def _submitted(
    engine: "Launcher", job: "Job", files: dict[str, str], command: list[str]
) -> "Launch":
    """Return the record of a job that is submitted; what an engine refuses leaves no folder.

    Raises:
        UnsupportedError: the engine's command is not here.
        RunError: the engine refuses.
    """
    import shutil

    from headrace.core.errors import HeadraceError
    from headrace.launch.engine import call

    new = not job.folder.exists()
    _write(job, files)
    try:
        output = call(command, engine.name, dry=True)
    except HeadraceError:
        if new:  # else the same command, once that is mended, would take another name
            shutil.rmtree(job.folder)
        raise
    return _record(engine, job, command, output)


def _record(engine: "Launcher", job: "Job", command: list[str], output: str) -> "Launch":
    """Write the record of a launch beside its files, and return it."""
    from headrace.launch.record import Launch

    record = Launch.model_validate(
        {
            "name": job.name,
            "engine": engine.name,
            "identity": engine.job_id(job, output),
            "nodes": job.nodes,
            "processes": job.processes,
            "command": command,
            "settings": engine.settings.model_dump(exclude_none=True),
            "cwd": str(job.cwd),
        }
    )
    record.write(job.folder)
    return record


def status(name: Launched, *, json: Json = False) -> None:
    """Print the state of what was launched, in the engine's words, and how far its run is."""
    with exit_codes(json):
        from headrace.launch.follow import state
        from headrace.launch.record import progress_of, read_launch

        record, folder = read_launch(name)
        answer, progress = state(record), progress_of(folder)
        if json:
            show_json({**record.model_dump(), "state": answer, "progress": progress or None})
            return
        print(f"{record.name} on {record.engine} ({record.identity}): {answer}")
        if progress:
            print(f"step {progress['step']}, loss {progress['loss']:.4f}")


def logs(name: Launched, *, json: Json = False) -> None:
    """Print what was printed by what was launched."""
    with exit_codes(json):
        from headrace.launch.follow import printed
        from headrace.launch.record import read_launch

        text = printed(*read_launch(name))
        if json:
            show_json({"name": name, "log": text})
            return
        print(text, end="")


def stop(name: Launched, *, json: Json = False) -> None:
    """End what was launched; the run saves a checkpoint, and can be resumed."""
    with exit_codes(json):
        from headrace.launch.follow import end
        from headrace.launch.record import read_launch

        record, _ = read_launch(name)
        answer = end(record)
        if json:
            show_json({**record.model_dump(), "stopped": answer})
            return
        print(answer)
