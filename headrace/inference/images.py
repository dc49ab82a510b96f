"""Open runs of networks that tell images apart."""

from pathlib import Path

from headrace.core.folders import is_point
from headrace.inference.load import read_plan, resolve_run
from headrace.plan.technique import Catalogue


def images_run(name: Path, catalogue: Catalogue) -> Path | None:
    """Return the folder of a run of images; None of anything else, also of what is no run.

    Args:
        name: the run's path, or its name under `runs`.
        catalogue: the techniques and model families.

    Raises:
        ConfigError: the run's plan is damaged.
    """
    folders = [one for one in (name, Path("runs") / name) if (one / "plan.toml").is_file()]
    if not folders or is_point(folders[0]):
        return None
    folder = resolve_run(name)
    return folder if read_plan(folder, catalogue).vision is not None else None
