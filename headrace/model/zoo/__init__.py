"""Families as data: each module's FAMILIES are defaults for `model.*` under a name."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any


def families() -> dict[str, Mapping[str, Any]]:
    """Return the defaults of every family by name, from the modules of this package."""
    families_by_name: dict[str, Mapping[str, Any]] = {}
    for info in pkgutil.iter_modules(__path__):
        families_by_name |= getattr(
            importlib.import_module(f"{__name__}.{info.name}"), "FAMILIES", {}
        )
    return dict(sorted(families_by_name.items()))
