"""Hold plans as TOML files, and read them by name or by path."""

from pathlib import Path

from headrace.core.command import rerun
from headrace.core.errors import ConfigError, alike
from headrace.core.files import mend_plan, read_plan_text


def recipes() -> dict[str, Path]:
    """Return the file of every recipe by the name of the recipe."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def read_recipe(name: str, verb: str = "train") -> str:
    """Return the text of a recipe by name, or of a TOML file by path.

    Args:
        name: the name or the path.
        verb: the subcommand of headrace that remedies show.

    Raises:
        ConfigError: neither exists, or it is no text. The message names the nearest recipe, or the
            plan where `name` is a run or a folder.
    """
    known = recipes()
    if not (path := known.get(name, Path(name))).is_file():
        folders = (path, Path("runs", name))
        own = next((p for p in (f / "plan.toml" for f in folders) if p.is_file()), None)
        if own is not None:
            run = (own.parent / "environment.json").is_file()
            command = rerun((name, own), verb=verb)
            if run and verb == "train" and "--resume" not in command:
                command += " --resume"
            raise ConfigError(
                f"{name} is a {'run' if run else 'folder'}, and its plan is {own}",
                command,
            )
        kept = [f / "plan.toml" for f in folders] + ([path] if path.name == "plan.toml" else [])
        for gone in kept:
            if command := mend_plan(gone.parent):
                raise ConfigError(f"{gone} is gone; the run keeps a copy", command)
        near = alike(name, known)
        hint = f"the nearest recipe is {near}" if near else f"the recipes are {', '.join(known)}"
        raise ConfigError(
            f"{name!r} is neither a recipe nor a plan file; {hint}",
            rerun((name, near or "demo"), verb=verb),
        )
    return read_plan_text(path)
