"""Families as data: each module's FAMILIES are defaults for `model.*` under a name."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any


def families() -> dict[str, Mapping[str, Any]]:
    """Every family's defaults by name, found by importing the modules of this package."""
    found: dict[str, Mapping[str, Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        found |= getattr(importlib.import_module(f"{__name__}.{info.name}"), "FAMILIES", {})
    return dict(sorted(found.items()))
