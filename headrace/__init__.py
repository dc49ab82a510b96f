"""Headrace trains language models and finds the bottleneck of your run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.watch import watch as watch

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return `headrace.watch`, which imports torch, when it is first used."""
    if name == "watch":
        from importlib import import_module

        return import_module("headrace.watch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
