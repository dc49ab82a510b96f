"""Plans as TOML, named for model, hardware and goal."""

from pathlib import Path


def recipes() -> dict[str, Path]:
    """Every recipe's file by its name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
