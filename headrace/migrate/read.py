"""Read the files in which other trainers keep a config. Nothing of them runs.

TOML is read by Python's tomllib, YAML by PyYAML's safe loader without aliases, which can make a
small file a huge one, and a Python config by its syntax tree: names to which a literal is assigned.
A shell script is looked through for the one command that starts the trainer.
"""

import ast
import re
import shlex
import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import in_one_line, parse_object, printable, shell, toml_values

MOST_BYTES = 1 << 20
"""Largest config that is read; those of the four trainers have a few KiB."""
YAML_BYTES = 1 << 18
"""Largest YAML, which PyYAML reads at some 100 KiB a second."""


def config_text(file: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a config.

    Raises:
        ConfigError: it is missing, too large, or no text.
    """
    name = printable(file)
    try:
        with file.open("rb") as opened:
            raw = opened.read(most + 1)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror or error}",
            "the path of a config: headrace import torchtitan PATH.toml",
        ) from None
    if len(raw) > most:
        raise _no_config(file, f"it holds more than {most:,} bytes")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _no_config(file, f"its byte {error.start} is not UTF-8") from None


def read_toml(file: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: see `config_text`; or it is no TOML.
    """
    try:
        return toml_values(config_text(file), printable(file))
    except tomllib.TOMLDecodeError as error:
        raise _no_config(file, f"it is not valid TOML: {error}") from None


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file, read by the safe loader.

    Raises:
        ConfigError: see `config_text`; or it is no YAML, no mapping, or has aliases.
    """
    import yaml  # which only this verb needs

    class PlainLoader(yaml.SafeLoader):
        """Load plain values, and no alias: few of them can make a file as large as memory."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias (*name); write out what stands behind it")
            return super().compose_node(parent, index)

    text = config_text(file, YAML_BYTES)
    try:
        loader = PlainLoader(text)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise _no_config(file, f"it is no YAML: {in_one_line(str(error))}") from None
    if not isinstance(values, dict):
        raise _no_config(file, f"it holds a {type(values).__name__}, not keys with values")
    return values


def read_command(file: Path, program: str) -> tuple[dict[str, Any], int]:
    """Return the options of a command that starts a trainer, and its processes on one machine.

    Args:
        file: a script or a line with the command; a Python file that assigns values to names; or
            the JSON beside a checkpoint, whose `user_config` has the options.
        program: the module that is started, as "base_train".

    Raises:
        ConfigError: see `config_text`; or it has no such command.
    """
    text = config_text(file)
    if file.suffix == ".py":
        return _assigned(text, file), 1
    if file.suffix == ".json":
        try:
            values = parse_object(text)
        except ValueError as error:
            raise _no_config(file, f"it {error}") from None
        options = values.get("user_config", values)
        return (dict(options) if isinstance(options, dict) else {}), 1
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if program in line and not line.lstrip().startswith("#"):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                raise _no_config(file, f"its command is not whole: {error}") from None
            if any(program in word for word in words):
                return _options(words, program)
    raise _no_config(file, f"no line of it starts {program}")


def _assigned(text: str, file: Path) -> dict[str, Any]:
    """Return name -> literal of each assignment at the top of a Python file, which is not run."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of a file that is not run
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _no_config(file, f"it is no Python: {in_one_line(str(error))}") from None
    assigned: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                value = ast.unparse(node.value)
            assigned[node.targets[0].id] = list(value) if isinstance(value, set | tuple) else value
    return assigned


def _options(words: list[str], program: str) -> tuple[dict[str, Any], int]:
    """Return option -> value of the words of a command, and how many processes it starts."""
    start = next(n for n, word in enumerate(words) if program in word)
    ranks = 1
    for word in words[:start]:
        if match := re.fullmatch(r"--nproc[-_]per[-_]node=(\d{1,6})", word):
            ranks = max(1, int(match[1]))
    given: dict[str, Any] = {}
    name = ""
    for word in words[start + 1 :]:
        if word in ("&", "|", ";", "&&", "||") or word.startswith((">", "2>")):
            break
        if word.startswith("--") and word != "--":
            name, equals, value = word[2:].partition("=")
            given[name] = value if equals else True
        elif name and given[name] is True and word != "--":
            given[name] = word
    return given, ranks


def by_underscores(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under names with underscores, as argparse keeps them."""
    return {name.replace("-", "_"): value for name, value in values.items()}


def _no_config(file: Path, what: str) -> ConfigError:
    """Return the error of a file that is no config of the trainer."""
    return ConfigError(
        f"{printable(file)} is no config that can be read: {what}",
        f"headrace import TRAINER FILE, with the file that the trainer was started with in place "
        f"of {shell(file)}",
    )
