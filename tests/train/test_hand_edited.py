"""What a person changed in a run's files is seen: used as it was recorded, or refused.

Every command that a refusal prints is run as it stands.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import INGEST, begins, tells
from tiny import PLAN
from typer.testing import CliRunner

from headrace.cli.app import app

SHORT = ("goal.steps=2", "checkpoint.every_steps=2", "eval.every_steps=2", "guard=false")
SHAPED = ("name=shaped", "--with", "gqa", "techniques.sliding_window={window = 5}")
Say = Callable[..., Any]


def say_in(*argv: str, code: int = 0) -> Any:
    """`headrace ARGV --json`: checks the exit code, returns the one JSON value."""
    ended = CliRunner().invoke(app, [*argv, "--json"])
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder with text, tiny.toml, its shards, two runs, and one exported."""
    folder = tmp_path_factory.mktemp("edited")
    shutil.copytree(corpus, folder / "text")
    (folder / "tiny.toml").write_text(PLAN.format(corpus="text", prepared="shards"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        say_in("train", "tiny.toml", *SHORT)
        say_in("train", "tiny.toml", *SHORT, *SHAPED)
        say_in("export", "tiny", "--to", "hf", "--output", "weights")
    for file in folder.glob("runs/*/data.json"):  # a copy shall find its own
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "absolute": "gone"}))
    return folder


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where the test is."""
    shutil.copytree(trained, tmp_path / "home", symlinks=True)
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def obey(remedy: str) -> None:
    """Run the first command of a remedy as a shell would."""
    for part in re.split(r" for a new run| \(or ", remedy)[0].split(" && "):
        words = shlex.split(part)
        if words[0] == "headrace":
            say_in(*words[1:])
        else:
            subprocess.run(words, check=True)


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, text
    file.write_text(text.replace(before, after))


EDITS = {
    "norm_eps": ("tiny", "norm_eps = 1e-05", "norm_eps = 0.5", "model.norm_eps 1e-05 -> 0.5"),
    "heads": ("tiny", "heads = 2\nkv_heads = 0", "heads = 4\nkv_heads = 0", "model.heads 2 -> 4"),
    "rope": ("tiny", "rope_theta = 10000.0", "rope_theta = 7.0", "model.rope_theta 10000.0 -> 7.0"),
    "length": ("tiny", "sequence_length = 16", "sequence_length = 8", "sequence_length 16 -> 8"),
    "learned": ("tiny", '"rope"', '"learned"', "model.position rope -> learned"),
    "window": ("shaped", "window = 5", "window = 9", "techniques.sliding_window.window 5 -> 9"),
    "gqa": ("shaped", "kv_heads = 1", "kv_heads = 2", "gqa makes it 1"),
    "cap": ("tiny", "[mesh]", "[techniques.logit_soft_cap]\n\n[mesh]", "+logit_soft_cap"),
    "broken": ("tiny", "[mesh]", "[mesh", "not valid TOML"),
}
OLDER = ("norm_eps", "window", "cap")
CASES = [(name, True) for name in EDITS] + [(name, False) for name in OLDER]


@pytest.mark.parametrize(("name", "kept"), CASES)
def test_another_shape_in_the_plan_is_refused(home: Path, name: str, kept: bool) -> None:
    run, before, after, message = EDITS[name]
    folder = home / "runs" / run
    edit(folder / "plan.toml", before, after)
    if not kept:  # as in a run of before
        (folder / ".plan.toml").unlink()
    verbs = [["eval", run], ["sample", run], ["export", run, "--to", "hf", "--output", "x"]]
    for verb in verbs if name == "norm_eps" else verbs[:1]:
        refused = say_in(*verb, code=2)
        assert message in refused["error"] and "plan.toml" in refused["error"], refused
    obey(refused["remedy"])
    for verb in verbs if name == "norm_eps" else verbs[:1]:
        say_in(*verb)


@pytest.mark.parametrize("content", ["{", None])
def test_a_tokenizer_that_is_another_is_brought_back(home: Path, content: str | None) -> None:
    file = home / "runs" / "tiny" / "tokenizer.json"
    other = json.loads(file.read_text())
    first, second = (e for e in other["model"]["vocab"] if other["model"]["vocab"][e] in (70, 71))
    vocab = other["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    before = say_in("sample", "tiny")
    file.write_text(json.dumps(other) if content is None else content)
    refused = say_in("sample", "tiny", code=2)
    assert str(file.relative_to(home)) in refused["error"]
    obey(refused["remedy"])
    assert say_in("sample", "tiny") == before


def test_a_report_is_of_the_plan_that_ran(home: Path) -> None:
    folder = home / "runs" / "tiny"
    page = folder / "report.html"
    say_in("report", "tiny")
    before = page.read_text()
    edit(folder / "plan.toml", "norm_eps = 1e-05", "norm_eps = 0.5")
    findings = say_in("doctor", "tiny")
    say_in("report", "tiny")
    assert "plan.toml was edited since" in page.read_text()
    assert "norm_eps = 1e-05" in page.read_text() and "norm_eps = 0.5" not in page.read_text()
    obey(say_in("eval", "tiny", code=2)["remedy"])
    say_in("report", "tiny")
    assert page.read_text() == before and say_in("doctor", "tiny") == findings


def damage(home: Path, how: str) -> Path:
    """Change the manifest of the runs' shards by hand; return the folder with all of them."""
    (folder,) = (p for p in (home / "shards").iterdir() if p.is_dir())
    manifest = folder / "train-00" / "manifest.json"
    values = json.loads(manifest.read_text())
    if how == "older":
        values.pop("counted_bytes")
        manifest.write_text(json.dumps({**values, "format": 2}))
    else:
        manifest.write_text(json.dumps({**values, "tokens": values["tokens"] + 1}))
    return folder


@pytest.mark.parametrize("how", ["older", "damaged"])
@pytest.mark.parametrize("verb", [["eval", "tiny"], ["train", "tiny.toml", *SHORT, "--resume"]])
def test_damaged_shards_of_a_run_are_made_again(home: Path, how: str, verb: list[str]) -> None:
    whole = say_in("eval", "tiny")
    folder = damage(home, how)
    refused = say_in(*verb, code=2)
    told = ("format 2", 3) if how == "older" else ("damaged",)
    assert tells(refused["error"], *told)
    assert begins(refused["remedy"], "rm", "-r", folder.relative_to(home), "&&", *INGEST)
    obey(refused["remedy"])
    say_in(*verb)
    assert say_in("eval", "tiny") == whole


def test_damaged_shards_of_a_text_that_changed_are_not_to_be_removed(home: Path) -> None:
    damage(home, "damaged")
    (home / "text" / "00.txt").write_text("other words\n" * 50)
    refused = say_in("eval", "tiny", code=2)
    assert "rm -r" not in refused["remedy"]
    obey(refused["remedy"])
    assert (home / "runs" / "NEW" / "report.json").is_file()


def test_damaged_shards_of_a_text_that_is_gone_ask_for_another(home: Path) -> None:
    damage(home, "damaged")
    shutil.move(home / "text", home / "elsewhere")
    refused = say_in("eval", "tiny", code=2)
    assert "rm -r" not in refused["remedy"]
    obey(refused["remedy"].replace("PATH", "elsewhere"))
    assert (home / "runs" / "NEW" / "report.json").is_file()


def test_weights_decide_against_the_plans_file_and_say_so(home: Path) -> None:
    (home / "on.toml").write_text((home / "tiny.toml").read_text().replace("dim = 16", "dim = 32"))
    words = ["train", "on.toml", *SHORT, "name=on", "model.pretrained=weights"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    told = "the weights of weights decide, not the plan's file: model.dim 32 -> 16"
    assert ended.stderr.count(told) == 1
    for key, message in {
        "model.dim=32": "model.dim = 32 (it: 16)",
        "data.vocab=310": "data.vocab = 310 is of a tokenizer that is trained here",
        "model.rope_theta=7": "model.rope_theta = 7.0 (it: 10000.0)",
    }.items():
        refused = say_in(*words, key, code=2)
        assert message in refused["error"]
        (mended, *_) = refused["remedy"].split(" (or ")
        assert say_in("plan", *words[1:], mended)["fits"] == "yes"
