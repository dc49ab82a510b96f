"""Make what a file says hostile, as somebody else's run may be."""

from typing import Any


def hostile(value: Any, evil: str) -> Any:
    """Return a tree whose every text says something hostile behind what it said."""
    if isinstance(value, dict):
        return {key: hostile(item, evil) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, evil) for item in value]
    return f"{value}{evil}" if isinstance(value, str) else value
