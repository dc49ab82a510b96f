"""Every fenced command of every page runs, on a plan made tiny; what does not is listed here.

A line that ends in `# exit code N` must end so. Blocks under `<!-- file: NAME -->` are written to
that file. The overrides that make a run tiny stand before the page's own, so the page's own count.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from snippets import PAGES, ROOT, blocks_of
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.plan.symptoms import BOTTLENECKS
from headrace.recipes import recipes

TINY = (
    "device=cpu",
    *("model.dim=16", "model.layers=1", "model.heads=2", "model.ffn=32"),
    *("data.vocab=300", "data.sequence_length=16", "batch.tokens=128", "batch.micro_sequences=0"),
    *("goal.steps=4", "schedule.steps=40", "schedule.warmup_steps=0"),
    *("eval.every_steps=2", "eval.tokens=512", "checkpoint.every_steps=2"),
)
TINY_IMAGES = (
    *("device=cpu", "vision.size=16", "vision.images=64", "vision.validation_images=32"),
    *("batch.tokens=16", "eval.tokens=32", "goal.steps=3", "schedule.steps=3"),
    *("schedule.warmup_steps=0", "eval.every_steps=3", "checkpoint.every_steps=3"),
)
"""What makes a run of images tiny."""
FITS = {"chunked_cross_entropy": "techniques.chunked_cross_entropy.chunk_tokens=64"}
"""Knobs with which a technique that a page adds does something on so few tokens."""
NOT_RUN = {
    "source .venv/bin/activate": "tests run in the environment that they are given",
    "headrace ui": "it serves until Ctrl-C, and tests/ui asks it",
    "headrace ui --token": "it serves until Ctrl-C, and tests/ui asks it",
    "python -m pytest -m gpu": "it needs a GPU, and is a test run of its own",
}
SLOW = (
    *("many-gpus.md", "edge.md", "compress.md"),
    *("start/laptop.md", "start/gpu.md", "start/cluster.md", "start/finetune.md"),
)
"""Pages whose commands take minutes, need what only `make test-full` installs, or are tried with
the same verbs and options by quick tests of `tests/cli`."""
SHORT = ("goal.steps=4", "eval.tokens=512")
"""What makes a fine-tuning short, where the page does not say how long it is."""
NARROW = ("data.sequence_length=64", "batch.tokens=256")
"""What makes its rows short too, where they are a text of the page."""
MEASURED = ("160m", "1b", "7b")
"""Recipes whose shapes pages predict and do not train: they stay as they are."""
TAKES_PLAN = ("train", "explain", "ingest", "mix", "plan", "tune", "ablate", "lr-find", "mup")
OUTCOMES = ("goal", "try", *(bottleneck.split()[0] for bottleneck in BOTTLENECKS))
"""How lines begin that say what came of a run: a tiny one may miss its goal, and has no verdict."""
MINUTES = "0.02"
"""What `--minutes` becomes: tuning ends in the middle of its first trial, as it may."""


def _tiny(arguments: list[str]) -> list[str]:
    """The arguments with overrides behind the plan's name; others as they are."""
    if arguments[0] == "finetune" and not any(a.startswith("goal.") for a in arguments):
        return [*arguments, *SHORT, *NARROW * (len(arguments) > 2 and arguments[2] == "notes")]
    at = next((i + 1 for i, a in enumerate(arguments) if a in TAKES_PLAN), None)
    if arguments[0] == "distill":  # a teacher, the plan of a student, a text, and keys
        return [*arguments[:4], *TINY, *arguments[4:]]
    if at is not None and arguments[at] in MEASURED:
        return arguments
    if at is None or not (arguments[at] in recipes() or arguments[at].endswith(".toml")):
        return arguments
    plan = recipes().get(arguments[at], Path(arguments[at])).read_text()
    if "[vision]" in plan:
        return [*arguments[: at + 1], *TINY_IMAGES, *arguments[at + 1 :]]
    own = ["data.sources=notes"] if 'sources = "stdlib"' in plan else []
    rest = arguments[at + 1 :]
    if "--minutes" in rest:
        rest[rest.index("--minutes") + 1] = MINUTES
    own += [key for name, key in FITS.items() if name in rest]
    given = any(word.startswith("model.pretrained=") for word in rest)  # which has a tokenizer
    tiny = [key for key in TINY if not (given and key.startswith("data.vocab="))]
    return [*arguments[: at + 1], *own, *tiny, *rest]


def _headrace(arguments: list[str]) -> tuple[int, str]:
    ended = CliRunner().invoke(app, _tiny(arguments))
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output


def _run(line: str, world: Path, zygote: Any) -> tuple[int, str]:
    """Return the exit code of a command and what it printed."""
    words = shlex.split(line)
    if words[0] == "headrace":
        return _headrace(words[1:])
    if words[0] == "torchrun":
        count, program = int(words[2]), words[3:5]
        assert program == ["-m", "headrace"]
        ended = zygote.ranks(count, world, *_tiny(words[5:]))
        return max(e.code for e in ended), "".join(e.err for e in ended)
    if words[0] == "make":  # takes minutes: the target is there, and would run what it says
        told = subprocess.run(
            ["make", "-n", "-C", str(ROOT), *words[1:]], capture_output=True, text=True, check=False
        )
        return told.returncode, told.stderr or ("" if "python" in told.stdout else "runs nothing")
    if words[0] == "python" and (world / words[1]).is_file():  # a program of the page itself
        ended = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        return ended.returncode, ended.stderr
    if line.startswith("pip install"):  # needs a network: the extra is there
        extra = re.fullmatch(r"pip install -e '\.\[(\w+)\]'", line)
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert extra and extra[1] in known["optional-dependencies"]
        return 0, ""
    pytest.fail(f"{line!r} is neither run nor listed in NOT_RUN")


def kinds_of(text: str) -> set[str]:
    """Return what kinds of lines a command printed: the first word of each that a run keeps.

    Numbers, sizes and names differ from run to run, and a line that is indented is another's rest.
    """
    lines = [line for line in text.splitlines() if line[:1].strip()]
    return {re.split(r"[^A-Za-z#]", line)[0] for line in lines} - {"", *OUTCOMES}


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * p.endswith(SLOW)) for p in PAGES],
)
def test_every_command_of_a_page(
    page: str, world: Path, zygote: Any, request: pytest.FixtureRequest
) -> None:
    printed: list[str] = []
    for block in blocks_of(page):
        if block.output:
            missing = sorted(kinds_of(block.text) - kinds_of("\n".join(printed)))
            assert not missing, f"{page}: no command above prints lines that begin {missing}"
        if block.file == "max_z_loss.py":
            request.getfixturevalue("max_z_loss")
        elif block.file:
            (world / block.file).write_text(block.text)
        if block.language != "sh":
            continue
        printed = []
        for raw in block.text.replace("\\\n", " ").splitlines():
            line, _, note = raw.partition(" # ")
            line = line.strip()
            if not line or line in NOT_RUN:
                continue
            expected = int(note.removeprefix("exit code ")) if note else 0
            code, said = _run(line, world, zygote)
            printed.append(said)
            assert code == expected, f"{page}: {line!r} ended with {code}:\n{said}"


def test_what_does_not_run_is_still_said() -> None:
    text = "\n".join(b.text for page in PAGES for b in blocks_of(page) if b.language == "sh")
    assert not [line for line in NOT_RUN if line not in text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_other_blocks_are_what_they_say(page: str) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            ast.parse(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines())
        else:
            assert block.language in ("sh", "text")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_a_sentence_name_real_verbs(page: str) -> None:
    command: Any = typer.main.get_command(app)
    data = command.load("data")
    known = {*command.commands, *(f"data {name}" for name in data.commands)}
    for said in re.findall(
        r"`headrace ([a-z][a-z-]*(?: (?:ingest|inspect))?)", (ROOT / page).read_text()
    ):
        assert said in known, f"{page} speaks of `headrace {said}`"
