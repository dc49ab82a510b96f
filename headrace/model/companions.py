"""Keep the small files beside a model's weights: chat template, generation settings, tokens.

Training changes none of them. A run that starts from a folder keeps its own copy of them, because
the folder may be gone when the trained model is exported. No weights and no code are copied.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.core.files import publish
from headrace.core.units import format_bytes

KEPT_IN = "pretrained"
"""The folder inside of a run's folder that holds the copies."""
FILE_BYTES = 8 << 20
"""Size of a file above which it is not copied. The largest that is known, Gemma 3's
tokenizer_config.json, has 1.2 MB."""
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"
NAMES = (
    CONFIG,
    GENERATION,
    TOKENIZER,
    SPECIAL,
    "added_tokens.json",
    "chat_template.json",
    TEMPLATE,
    "additional_chat_templates/*.jinja",
)
"""What `save_pretrained` of transformers writes beside weights and tokenizer.json."""
LOST = (
    "chat template",
    GENERATION,
    "eos, bos and pad ids",
    "max_position_embeddings",
    "other fields of config.json",
)
"""What an export lacks when the companions of the first weights are gone."""


@dataclass(frozen=True)
class Companions:
    """Hold the small files of one folder, read.

    Args:
        tables: the object in each JSON file, by the file's name.
        texts: the content of each template, by the file's name.
    """

    tables: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def with_template(self, template: str) -> "Companions":
        """Return them with the chat template that a run was trained with, and no other."""
        others = {name for name in NAMES if "chat_template" in name} - {TEMPLATE}
        tables = {name: dict(table) for name, table in self.tables.items() if name not in others}
        tables.get(TOKENIZER, {}).pop("chat_template", None)
        texts = {name: text for name, text in self.texts.items() if "chat_template" not in name}
        return Companions(tables, {**texts, TEMPLATE: template})


def keep_companions(folder: Path, run: Path, report: Callable[[str], None]) -> None:
    """Copy the small files of a folder of weights into a run's folder, in the place of older ones.

    Args:
        folder: the weights that the run starts from.
        run: the run's folder.
        report: takes a line about each file that is left out.
    """
    aside, target = run / f".{KEPT_IN}", run / KEPT_IN
    for old in (aside, target):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir()
    for file in _files(folder):
        fault = _fault(file)
        if fault:
            report(f"{file} {fault}: an export of this run will be without it")
            continue
        copy = aside / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    publish(aside, target)


def read_companions(run: Path, folder: str, report: Callable[[str], None]) -> Companions | None:
    """Return the small files of the weights that a run started from, or None if they are gone.

    Args:
        run: the run's folder; its own copies are preferred.
        folder: `model.pretrained` of the run; empty where it started from random weights.
        report: takes a line where the run has no copies.
    """
    if not folder:
        return Companions()
    for place in (run / KEPT_IN, Path(folder)):
        files = [file for file in _files(place) if not _fault(file)]
        if not files:
            continue
        if place != run / KEPT_IN:
            report(
                f"{run} kept no copies of the small files of {folder}: they are taken as they are"
            )
        names = {file.relative_to(place).as_posix(): file for file in files}
        texts = {name: file.read_text(encoding="utf-8") for name, file in names.items()}
        tables = {name: json.loads(text) for name, text in texts.items() if name.endswith(".json")}
        return Companions(tables, {n: text for n, text in texts.items() if n not in tables})
    report(
        f"{run} kept no copies of the small files of {folder}, and they are not there any more; "
        f"not kept are {', '.join(LOST)}"
    )
    return None


def _files(folder: Path) -> list[Path]:
    return [file for name in NAMES for file in sorted(folder.glob(name)) if file.is_file()]


def _fault(file: Path) -> str:
    """Return why a file is not taken over, or nothing."""
    size = file.stat().st_size
    if size > FILE_BYTES:
        return f"has {format_bytes(size)}, more than {format_bytes(FILE_BYTES)}"
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json" and not isinstance(json.loads(text), dict):
            return "holds no JSON object"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError):
        return "is not JSON"
    return ""
