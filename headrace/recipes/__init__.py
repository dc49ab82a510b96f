"""Plans as TOML, named for model, hardware and goal."""

from pathlib import Path

from headrace.core.command import again
from headrace.core.errors import ConfigError, nearest
from headrace.core.files import mend_plan, read_plan_text


def recipes() -> dict[str, Path]:
    """Every recipe's file by its name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}


def read_recipe(name: str, verb: str = "train") -> str:
    """The text of a recipe by name, or of a TOML file by path.

    Raises:
        ConfigError: neither exists; names the nearest recipe, for that verb, or the plan of a run
            or folder. Or it is no text.
    """
    known = recipes()
    if not (path := known.get(name, Path(name))).is_file():
        if (own := path / "plan.toml").is_file():
            run = (path / "environment.json").is_file()
            command = again((name, own), verb=verb)
            if run and verb == "train" and "--resume" not in command:
                command += " --resume"
            raise ConfigError(
                f"{path} is a {'run' if run else 'folder'}, and its plan is {own}",
                command,
            )
        if path.name == "plan.toml" and (command := mend_plan(path.parent)):
            raise ConfigError(f"{path} is gone; the run keeps a copy", command)
        near = nearest(name, known)
        raise ConfigError(
            f"{name!r} is neither a recipe nor a plan file; the nearest recipe is {near}",
            again((name, near.split(", ")[0]), verb=verb),
        )
    return read_plan_text(path)
