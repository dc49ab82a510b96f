"""Ask an engine for the state of a launch and for its log, and end it."""

import re
from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.remedy import mend
from headrace.launch import local
from headrace.launch.engine import Launcher, call
from headrace.launch.engines import class_of
from headrace.launch.job import Job
from headrace.launch.record import RECORD, Launch, read_record


def engine_for(record: Launch) -> Launcher:
    """Return the engine of a launch with the settings that it was launched with."""
    launcher = class_of(record.engine)
    return launcher(launcher.settings_table.model_validate(record.settings))


def state(record: Launch) -> str:
    """Return the state of a launch, in the engine's own words.

    Raises:
        UnsupportedError: the engine's command is not here.
        RunError: the engine does not know the job any more.
    """
    if record.engine == "local":
        return local.state_of(record.identity)
    return call(engine_for(record).status(record.identity), record.engine).strip() or "UNKNOWN"


def check_free(engine: Launcher, job: Job) -> None:
    """Refuse a launch while a job of its run goes on, and one that would replace another job.

    Args:
        engine: what the job is launched on.
        job: what is to be launched.

    Raises:
        ConfigError: there is such a job.
        UnsupportedError: the engine's command is not here.
        RunError: the engine refuses, or the record of the run's last launch is damaged.
    """
    if identity := engine.replaced(job):
        answer = call(engine.probe(identity), engine.name, dry=True)
        if answer.strip() and not job.resume:
            raise ConfigError(
                f"{engine.name} has a job {identity} already, which this launch would replace",
                mend(f"name={job.name}-2") | "--resume, which continues its run",
            )
        _check_ended(engine, identity, answer, job)
    if job.resume and (job.folder / RECORD).is_file():
        record = read_record(job.folder)
        try:
            answer = _probed(record)
        except HeadraceError:  # as where the engine does not know the job any more
            return
        _check_ended(engine_for(record), record.identity, answer, job)


def _probed(record: Launch) -> str:
    """Return what the engine of a launch prints of whether it has ended."""
    if record.engine == "local":
        return local.state_of(record.identity)
    return call(engine_for(record).probe(record.identity), record.engine)


def _check_ended(engine: Launcher, identity: str, answer: str, job: Job) -> None:
    """Refuse to resume a run whose last job has not ended, which would lose or disturb it.

    Raises:
        ConfigError: it has not ended.
    """
    if re.search(engine.active, answer.strip()):
        raise ConfigError(
            f"{job.run} has not ended: {engine.name} answers {answer.strip()!r} of {identity}",
            f"headrace stop {job.argument}; then the same command, once it has ended",
        )


def printed(record: Launch, folder: Path) -> str:
    """Return what a launch has printed so far.

    Args:
        record: of the launch.
        folder: of the launch.

    Raises:
        UnsupportedError: the engine's command is not here, or nothing was kept.
        RunError: there is no log yet.
    """
    return call(engine_for(record).logs(record.identity, folder), record.engine)


def end(record: Launch) -> str:
    """End a launch, and return a sentence that says what was asked of whom.

    Raises:
        UnsupportedError: the engine's command is not here.
        RunError: the engine refuses.
    """
    if record.engine == "local":
        there = local.end(record.identity)
        return f"{record.name} {'was asked to end' if there else 'had ended already'}"
    call(engine_for(record).stop(record.identity), record.engine)
    return f"{record.engine} was asked to end {record.name} ({record.identity})"
