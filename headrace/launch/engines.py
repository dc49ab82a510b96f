"""Find an engine by its name; the module of an engine is imported when it is asked for."""

from collections.abc import Iterable
from importlib import import_module

from headrace.launch.engine import Launcher, read_settings

CLASSES = {
    "local": "Local",
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
    "ray": "RayJob",
    "skypilot": "SkyPilot",
}
"""Maps an engine, whose module has the same name, to its class."""


def class_of(name: str) -> type[Launcher]:
    """Return the class of an engine."""
    launcher: type[Launcher] = getattr(import_module(f"headrace.launch.{name}"), CLASSES[name])
    return launcher


def engine_of(name: str, words: Iterable[str] = ()) -> Launcher:
    """Return an engine with its settings.

    Args:
        name: one of `ENGINES`.
        words: `key=value` words of `--set`.

    Raises:
        ConfigError: a setting is unknown, missing or wrong.
    """
    launcher = class_of(name)
    return launcher(read_settings(launcher.settings_table, words, name))
