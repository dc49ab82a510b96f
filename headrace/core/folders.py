"""Folders of models and tokenizers that are not what was meant, and what comes nearest."""

import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from headrace.core.errors import ALIKE, ConfigError
from headrace.core.files import python
from headrace.core.remedy import Remedy, mend

POINT_RECORD = "quantization.json"
"""The file in the folder of a quantized model that says how it was quantized."""
_HUB_PART = re.compile(r"[A-Za-z0-9][\w.-]*")
"""A part of a model's name on the Hugging Face Hub: OWNER/NAME, or NAME alone for the oldest."""
_PARTS_OF_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt")
"""Files that transformers makes a tokenizer.json from."""


def _from_home(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


Folder = Annotated[str, AfterValidator(_from_home)]
"""A folder that a plan names; a shell leaves the ~ of `key=~/name` as it is."""


def is_point(folder: Path) -> bool:
    """Return whether a folder holds a quantized model that `headrace compress` wrote."""
    return (folder / POINT_RECORD).is_file()


def point_of(name: Path) -> Path | None:
    """Return the folder of such a model by its path or as `runs/NAME`; None where it is none."""
    return next((one for one in (name, Path("runs") / name) if is_point(one)), None)


def refuse_absent(path: Path, key: str, *, folder: bool = True) -> None:
    """Refuse a path that is not there, and name the nearest that is, or how to download it.

    Args:
        path: what the plan names.
        key: the plan's key that names it.
        folder: whether it must be a folder.

    Raises:
        ConfigError: it is not there.
    """
    if _exists(path):
        return
    near = _nearest_path(path, folder=folder)
    parts = path.parts
    first_is_here = len(parts) > 1 and _exists(Path(parts[0]))
    is_file = not folder and path.suffix == ".json"
    on_hub = (
        not is_file
        and len(parts) < 3
        and all(map(_HUB_PART.fullmatch, parts))
        and not first_is_here
    )
    message = f"{key} = {str(path)!r} does not exist"
    if near is not None:
        message += f"; the nearest path is {near}"
    remedy = mend(f"{key}={near}") if near is not None else Remedy(text=f"{key}=PATH")
    if on_hub:
        message += (
            f", and Headrace downloads nothing: {path} may be the name of a model on the Hugging "
            "Face Hub"
        )
        download = f"hf download {path} --local-dir {path.name}, then {key}={path.name}"
        remedy = Remedy(remedy.changes, download if near is None else f"{remedy}; or {download}")
    elif near is None:
        missing = next(one for one in (*reversed(path.parents), path) if not _exists(one))
        message += f": {missing.parent.resolve()} has no {missing.name}"
    raise ConfigError(message, remedy)


def refuse_no_model(path: Path, key: str) -> None:
    """Refuse a path that is no folder of a model, and name the folder that was probably meant.

    Args:
        path: what the plan names; it exists.
        key: the plan's key that names it.

    Raises:
        ConfigError: it is a file, a run, adapters, or a folder that has no config.json.
    """
    if (path / "config.json").is_file():
        return
    message, meant = f"{key} = {str(path)!r} has no config.json", None
    if path.is_file():
        message = (
            f"{key} = {str(path)!r} is a file, and a model is a folder of config.json and weights"
        )
        meant = path.parent if (path.parent / "config.json").is_file() else None
    elif (path / "plan.toml").is_file() and not is_point(path):
        message += ": it is a run, and its export is a folder of a model"
        if not (path / "hf" / "config.json").is_file():
            run = shlex.quote(str(path))
            raise ConfigError(message, f"headrace export {run} --to hf, then {key}={run}/hf")
        meant = path / "hf"
    elif key == "model.pretrained" and (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"{message}: it holds adapters, which stand beside the weights of another folder",
            f"{key}=FOLDER of these weights model.adapter={path}",
        )
    elif is_point(path):
        raise ConfigError(
            f"{message}: it is a quantized model, whose matrices no run trains",
            f"{key}=FOLDER of the weights that it was made of",
        )
    else:
        inside = [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]
        meant = max(inside, key=lambda file: file.stat().st_mtime).parent if inside else None
    if meant is not None:
        remedy = mend(f"{key}={meant}")
    else:
        like = "config.json and *.safetensors, as save_pretrained writes it"
        remedy = Remedy(text=f"{key}=FOLDER with {like}")
    raise ConfigError(message + (f"; {meant} has one" if meant is not None else ""), remedy)


def refuse_no_tokenizer(folder: Path, key: str) -> None:
    """Refuse a folder that has no tokenizer.json, and say where to get one.

    Raises:
        ConfigError: it has none.
    """
    if (folder / "tokenizer.json").is_file():
        return
    has = [name for name in _PARTS_OF_TOKENIZERS if (folder / name).is_file()]
    where = repr(str(folder))
    message = f"{key} = {where} has no tokenizer.json"
    if has:
        script = f"AutoTokenizer.from_pretrained({where}).save_pretrained({where})"
        script = python(f"from transformers import AutoTokenizer; {script}")
        raise ConfigError(f"{message}; transformers makes one of its {has[0]}", script)
    raise ConfigError(
        message,
        mend(
            "data.tokenizer=bpe",
            text="data.tokenizer=bpe, a path of a tokenizer.json, or tiktoken:NAME",
        )
        if key == "data.tokenizer"
        else "data.tokenizer=PATH of the tokenizer.json that its weights were trained with",
    )


def refetch_command(folder: Path) -> str:
    """Return the command that writes a folder of a model anew: of a run's export, or of the Hub.

    Args:
        folder: whose files are damaged, or do not belong together.
    """
    run, there = folder.parent, shlex.quote(str(folder))
    if (run / "plan.toml").is_file():
        export = f"headrace export {shlex.quote(str(run))} --to hf --output {there}"
        return f"rm -r {there} && {export}"
    return (
        f"hf download OWNER/NAME --local-dir {there}, with the name that the weights were "
        "published under"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder that must not be read
        return False


def _nearest_path(path: Path, *, folder: bool) -> Path | None:
    """Return the path that is there whose parts are most like those of `path`, or None."""
    here = Path(path.anchor)
    parts = path.parts[bool(path.anchor) :]
    for number, part in enumerate(parts, start=1):
        if not _exists(here / part):
            inner = folder or number < len(parts)
            try:
                names = [one.name for one in here.iterdir() if one.is_dir() or not inner]
            except OSError:
                return None
            close = get_close_matches(part, names, n=1, cutoff=ALIKE)
            if not close:
                return None
            part = close[0]
        here /= part
    return here
