"""Let a folder of the package be called like a function, as in `headrace.train(plan)`.

The name `headrace.train` is the package that holds a run's life, and importing any module of it
binds that name again. So the package itself is made callable: both uses hold, in any order.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_FUNCTIONS: dict[str, str] = {}
"""Package -> the name of its function in `headrace.api.calls`."""
_WITH_RUN: set[str] = set()
"""Packages whose function is their attribute `run` too."""


class CallableRoom(ModuleType):
    """A package that is called like one function of `headrace.api`, which is imported then."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function."""
        return self._function()(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name == "run" and self.__name__ in _WITH_RUN:
            return self._function()
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _function(self) -> Any:
        return getattr(import_module("headrace.api.calls"), _FUNCTIONS[self.__name__])


def make_callable(room: str, function: str, *, run: bool = False) -> None:
    """Make a package callable.

    Args:
        room: the full name of the package, which is being imported.
        function: the name of a function of `headrace.api.calls`.
        run: whether `package.run` is that function too.
    """
    _FUNCTIONS[room] = function
    if run:
        _WITH_RUN.add(room)
    sys.modules[room].__class__ = CallableRoom
