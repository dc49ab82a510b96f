"""Find evaluation sets by name: those in a folder of the user's, and in Hugging Face's cache.

Each file or folder in `~/.cache/headrace/benchmarks` is a set, named as it is without its suffix. A
dataset that was downloaded before is a set as `OWNER/NAME`, and as `OWNER/NAME:CONFIG` where it has
several; all of its splits are read, from their Parquet files. Nothing is downloaded.
"""

import os
from glob import escape, has_magic
from pathlib import Path

from headrace.core.errors import ConfigError, alike
from headrace.data.listing import READABLE, Asked, kind_of

FOLDER, HUB = "~/.cache/headrace/benchmarks", "~/.cache/huggingface/hub"
SHOWN = 20
"""Names that an error lists."""


def evaluation_source(asked: Asked) -> str:
    """Return where an evaluation set lies: what is asked for itself, if it is no installed name.

    Raises:
        ConfigError: a word that is no path names no set, either; lists those that there are.
    """
    name = asked.source
    is_path = name.startswith("hf:") or has_magic(name) or Path(name).expanduser().exists()
    if is_path or not name or kind_of(Path(name))[0] in READABLE:
        return name
    sets = installed_sets()
    if name in sets:
        return sets[name]
    if os.sep in name:
        return name  # a path that is not there, which reading it says
    shown = ", ".join(sorted(sets)[:SHOWN]) + (
        f" and {len(sets) - SHOWN} more" * (len(sets) > SHOWN)
    )
    there = f"those of {FOLDER} and of Hugging Face's cache are {shown}"
    none = f"neither {FOLDER} nor Hugging Face's cache has one"
    raise ConfigError(
        f"{asked} is no file and no folder, and no evaluation set of this name is installed: "
        f"{there if sets else none}",
        asked.to(alike(name, sets) or "PATH"),
    )


def installed_sets() -> dict[str, str]:
    """Return the source of every evaluation set that is installed, by name."""
    sets = _cached()
    for one in sorted(Path(FOLDER).expanduser().glob("[!.]*")):
        if one.is_dir() or kind_of(one)[0] in READABLE:
            sets[one.name.partition(".")[0]] = str(one)
    return sets


def _cached() -> dict[str, str]:
    """Return the datasets that Hugging Face's cache holds as Parquet files."""
    sets: dict[str, str] = {}
    for folder in sorted(Path(HUB).expanduser().glob("datasets--*")):
        revision = folder / "refs" / "main"
        snapshots = folder / "snapshots"
        whole = snapshots / revision.read_text().strip() if revision.is_file() else snapshots
        name = folder.name.removeprefix("datasets--").replace("--", "/", 1)
        files = sorted(whole.rglob("*.parquet"))
        if files:
            sets[name] = f"{escape(str(whole))}/**/*.parquet"
        for config in sorted({file.parent for file in files} - {whole}):
            sets[f"{name}:{config.name}"] = str(config)
    return sets
