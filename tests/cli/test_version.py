"""`headrace --version` is the version that the package is built with."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app


@pytest.mark.parametrize("argv", [["--version"], ["--version", "list"]])
def test_version_is_the_packages_and_ends(argv: list[str]) -> None:
    told = CliRunner().invoke(app, argv, prog_name="headrace")
    assert told.exit_code == 0 and not told.stderr
    assert told.stdout == f"headrace {headrace.__version__}\n"


def test_the_package_is_built_with_it() -> None:
    tool = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]
    assert tool["setuptools"]["dynamic"]["version"] == {"attr": "headrace.__version__"}
    assert headrace.__version__ == version("headrace")
