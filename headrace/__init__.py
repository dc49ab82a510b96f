"""Headrace trains language models and finds the bottleneck of your run.

    import headrace
    result = headrace.train("demo")          # a recipe, a TOML file, or a headrace.Plan
    print(headrace.doctor(result))

`docs/guide/python.md` shows all of it; `__init__.pyi` has the types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_PLACES = {
    "HeadraceError": "headrace.core.errors",
    "Plan": "headrace.plan.plan",
    "open_run": "headrace.api.opened",
    "read_plan": "headrace.api.plans",
    "run_command": "headrace.api.commands",
    "tune": "headrace.api.calls",
}
"""Public name -> the module that defines it."""
_ROOMS = ("doctor", "predict", "train", "watch")
"""Packages that are called like functions."""
__all__ = ["__version__", *sorted((*_PLACES, *_ROOMS))]  # pyright: ignore


def __getattr__(name: str) -> Any:
    """Import what a public name stands for, torch with it, when the name is first used."""
    if name in _ROOMS:
        return import_module(f"headrace.{name}")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, which a notebook completes."""
    return [*__all__]
