"""Find the classes that the modules of a package define, by importing all of it."""

import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_DEFINED: dict[tuple[str, type], tuple[object, tuple[type[Any], ...]]] = {}
"""Module and class -> what the module was loaded from, which a reload replaces, and subclasses."""


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    """Import and yield every module and room of a package.

    Every verb and every plan in Python asks for them, and pkgutil takes five times as long.
    """
    for folder in package.__path__:
        for entry in sorted(os.listdir(folder)):
            name = f"{package.__name__}.{entry.removesuffix('.py')}"
            if entry.endswith(".py") and entry != "__init__.py":
                yield sys.modules.get(name) or importlib.import_module(name)
            elif "." not in entry and os.path.isfile(f"{folder}/{entry}/__init__.py"):
                room = sys.modules.get(name) or importlib.import_module(name)
                yield room
                yield from modules_of(room)


def defined_in(module: ModuleType, base: type[Any]) -> tuple[type[Any], ...]:
    """Return the subclasses of a class that a module itself defines."""
    loaded, classes = _DEFINED.get((module.__name__, base), (None, ()))
    if loaded is None or loaded is not module.__spec__:
        classes = tuple(
            item
            for item in vars(module).values()
            if isinstance(item, type)
            and item.__module__ == module.__name__
            and issubclass(item, base)
        )
        _DEFINED[module.__name__, base] = module.__spec__, classes
    return classes
