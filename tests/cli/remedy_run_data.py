"""What is gone, moved or damaged of the data that a run recorded: each remedy mends it."""

import json
import shutil
import tomllib
from pathlib import Path

from remedy_inputs import GOOD, MAKE
from shell import Case
from shell import run as run_command


def moved(*, text_too: bool = True, more: str = "") -> MAKE:
    """Let the shards of the run be gone; its text is in the folder `text`, or gone too."""

    def make(run: Path) -> None:
        plan = tomllib.loads((run / "plan.toml").read_text())
        corpus, record = plan["data"]["sources"], json.loads((run / "data.json").read_text())
        Path("kept.json").write_text(json.dumps({"text": corpus, "shards": record["absolute"]}))
        Path("y.jsonl").write_text(GOOD)
        for name in ("plan.toml", ".plan.toml"):
            told = (run / name).read_text().replace(corpus, "text")
            (run / name).write_text(told.replace(plan["data"]["directory"], "prepared"))
        lies_in(run, Path("prepared/gone"))
        if text_too:
            back(run)
        if more:
            Path("text", "more.txt").write_text(more)

    return make


def lies_in(run: Path, folder: Path) -> None:
    """Let a run say that its data is there."""
    record = json.loads((run / "data.json").read_text())
    record |= {"directory": str(folder), "absolute": str(folder.resolve())}
    (run / "data.json").write_text(json.dumps(record))


def back(run: Path, what: str = "text", to: str = "text") -> None:
    """Bring the text back, or the shards."""
    shutil.copytree(json.loads(Path("kept.json").read_text())[what], to)


def damaged(run: Path, *, text_too: bool = True) -> None:
    """Shards that are the run's own, one of which is cut short; the text may be gone."""
    moved()(run)
    assert run_command(["eval", "demo"]).code == 0
    (folder,) = (path for path in Path("prepared").iterdir() if path.is_dir())
    if not text_too:
        shutil.rmtree("text")
        folder = folder.rename("prepared/kept")
    lies_in(run, folder)
    (folder / "validation/tokens-00000.bin").write_bytes(b"")


ANEW = "headrace train runs/demo/plan.toml name=NEW"
RUN_DATA = {
    "data/ingest:reopen#1": Case("eval demo", damaged, whole=True),
    "data/ingest:reopen#1 anew": Case(
        "eval demo",
        lambda run: damaged(run, text_too=False),
        fills={"NEW": "anew", "PATH for a new run": "y.jsonl"},
        prose={"a copy of prepared/kept in its place": "another disk has it"},
    ),
    "data/ingest:reopen#2": Case(
        "eval demo",
        moved(text_too=False),
        fills={
            "NEW": "anew",
            "PATH for a new run, or the shards back into {here}/prepared/gone": "y.jsonl",
        },
        prose={"the text where it was": "another case"},
    ),
    "data/ingest:reopen#2 shards": Case(
        "eval demo",
        moved(text_too=False),
        fills={
            f"{ANEW} data.sources=PATH for a new run, or ": "",
            " into {here}/prepared/gone, or the text where it was": "",
        },
        does={"the shards back": lambda run: back(run, "shards", "prepared/gone")},
    ),
    "data/ingest:reopen#2 text": Case(
        "eval demo",
        moved(text_too=False),
        fills={
            f"{ANEW} data.sources=PATH for a new run, or the shards back into "
            "{here}/prepared/gone, or ": ""
        },
        does={"the text where it was": back},
    ),
    "data/prepared:check_same_data#1": Case(
        "eval demo",
        moved(more="The mill was sold."),
        fills={"NEW for a new run": "anew"},
        prose={"the data and the manifests of then in its place": "another case"},
    ),
    "data/prepared:check_same_data#1 back": Case(
        "eval demo",
        moved(more="The mill was sold."),
        fills={f"{ANEW} for a new run, or ": ""},
        does={
            "the data and the manifests of then in its place": (
                lambda run: Path("text/more.txt").unlink()
            )
        },
    ),
}
"""Data of a run that is gone, or another."""
