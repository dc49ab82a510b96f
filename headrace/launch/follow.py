"""Ask an engine for the state of a launch and for its log, and end it."""

from pathlib import Path

from headrace.launch import local
from headrace.launch.engine import Launcher, call
from headrace.launch.engines import class_of
from headrace.launch.record import Launch


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
