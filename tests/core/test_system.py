"""A system without what runs rest on is refused with a message that says where it works."""

import sys

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.core.errors import UnsupportedError
from headrace.core.system import check_system


def test_windows_is_refused_with_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    check_system()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UnsupportedError) as told:
        check_system()
    assert "WSL 2" in told.value.message and "wsl --install" in told.value.remedy.text
    ended = CliRunner().invoke(app, ["list"], prog_name="headrace")
    assert ended.exit_code == 3 and "WSL 2" in ended.stderr
    for argv in (["--help"], ["--version"]):
        assert CliRunner().invoke(app, argv, prog_name="headrace").exit_code == 0
