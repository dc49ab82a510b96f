"""Where no time of a step is predicted, what is said beside the reason leads to one."""

import json
import shlex

import pytest
from remedies import recording
from remedy_predictions import PREDICTIONS
from shell import after
from typer.testing import CliRunner

from headrace.cli.app import app


@pytest.mark.parametrize("site", PREDICTIONS)
def test_what_is_said_leads_to_a_time(site: str) -> None:
    argv = ["plan", "demo", "--device-name", "H200", "batch.tokens=16384"]
    argv += shlex.split(PREDICTIONS[site])

    def predicted(words: list[str]) -> tuple[str, list[str]]:
        with recording() as made:
            ended = CliRunner().invoke(app, [*words, "--json"], prog_name="headrace")
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.stdout)["unknown"], [name for name, _ in made]

    unknown, made = predicted(argv)
    assert site in made
    remedy = unknown.partition("; try: ")[2]
    assert remedy, unknown
    unknown, _ = predicted(after(argv, shlex.split(remedy)))
    assert not unknown
