"""The reference says everything, and mkdocs builds it without a warning."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from headrace.catalogue.matrix import MARKS, read_matrix
from headrace.catalogue.pages import card_path, reference
from headrace.cli.catalogue import catalogue
from headrace.core.strict import meanings
from headrace.plan.plan import Plan
from headrace.recipes import recipes

ROOT = Path(__file__).parents[2]
KNOWN = catalogue()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference(KNOWN, recipes())


def _keys(table: type[BaseModel], prefix: str) -> Iterator[tuple[str, str | None]]:
    for name, info in table.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, meanings(table)[name]


def test_every_technique_has_a_page_and_a_line(pages: dict[str, str]) -> None:
    for name, technique in KNOWN.techniques.items():
        page = pages[card_path(technique)]
        for said in technique.card.whole().values():
            assert said in page
        assert f"[`{name}`]({technique.room}/{name}.md)" in pages["reference/techniques.md"]
        for knob in technique.model_fields:
            assert f"| `techniques.{name}.{knob}` |" in page


def test_the_page_of_pairs_is_the_matrix(pages: dict[str, str]) -> None:
    page, pairs = pages["reference/pairs.md"], read_matrix()["pairs"]
    tables = [block for block in page.split("\n\n") if block.startswith("| ")]
    signs, needs, reasons = ([r.split(" | ") for r in t.splitlines()[2:]] for t in tables)
    heads = re.findall(r"`(\w+)`", tables[0].splitlines()[0])
    assert {"fsdp", "tensor_parallel", "ulysses"} < {*heads} and len(signs) == len(KNOWN.techniques)
    for cells in signs:
        (name,) = re.findall(r"`(\w+)`", cells[0])
        for head, sign in zip(heads, cells[1:], strict=True):
            entry = pairs.get(" ".join(sorted((name, head))))
            assert sign.strip(" |") == (MARKS[entry["outcome"]] if entry else ""), (name, head)
    assert any("compile_cache" in row[0] and "torch_compile" in row[1] for row in needs)
    refused = [pair for pair, entry in pairs.items() if entry["outcome"] == "refuses"]
    assert len(reasons) == len(refused)


def test_the_readmes_table_is_the_catalogue() -> None:
    table = (ROOT / "README.md").read_text().split("## Techniques", 1)[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[2:]]
    named = [(name, row[1].split(", ")) for row in rows for name in re.findall(r"`(\w+)`", row[3])]
    assert sorted(name for name, _ in named) == sorted(KNOWN.techniques)
    assert not [name for name, rooms in named if KNOWN.techniques[name].room not in rooms]


def test_every_plan_key_has_a_row_and_a_meaning(pages: dict[str, str]) -> None:
    keys = dict(_keys(Plan, ""))
    assert not [key for key in keys if f"| `{key}` |" not in pages["reference/plan.md"]]
    silent = [key for key, meaning in keys.items() if not meaning]
    assert not silent, f"keys without a docstring: {', '.join(silent)}"


def test_every_knob_has_a_meaning() -> None:
    knobs = [(n, k, says) for n, t in KNOWN.techniques.items() for k, says in meanings(t).items()]
    assert len(knobs) > 50 and not [f"techniques.{n}.{k}" for n, k, says in knobs if not says]


def test_every_family_and_recipe_is_there(pages: dict[str, str]) -> None:
    for name in KNOWN.families:
        assert f"| `{name}` |" in pages["reference/families.md"]
    for name, path in recipes().items():
        assert f"## {name}\n" in pages["reference/recipes.md"]
        assert path.read_text().rstrip() in pages["reference/recipes.md"]


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("seed", "whole number, >= 0, < 9223372036854775808", "`0`"),
        ("device", "`auto` or `cpu` or `cuda` or `mps`", '`"auto"`'),
        ("goal.bits_per_byte", "number, > 0, <= 64", "not set"),
        ("data.sources", "text or list of text", '`"stdlib"`'),
        ("data.validation", "number, > 0, < 1 or text", "`0.05`"),
        ("data.weights", "list of number, > 0, <= 1000000000000.0", "not set"),
        ("data.mixture", "table", "not set"),
        ("data.mixture.stages", "list of table", "`[]`"),
        ("data.mixture.stages.until", "number, > 0, <= 1000000000000000000", "not set"),
        ("optimizer.betas", "list of number, >= 0, < 1", "`[0.9, 0.95]`"),
        ("track.to", "list of `tensorboard` or `wandb` or `mlflow`", "`[]`"),
        ("techniques", "tables", "empty"),
    ],
)
def test_types_are_in_a_readers_words(
    pages: dict[str, str], key: str, kind: str, default: str
) -> None:
    assert f"| `{key}` | {kind} | {default} |" in pages["reference/plan.md"]


def test_rows_of_a_table_have_as_many_cells_as_its_head(pages: dict[str, str]) -> None:
    for path, page in pages.items():
        for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(counts) == 1, f"{path}: {table}"


@pytest.mark.slow
def test_mkdocs_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    made = tmp_path / "reference" / "loss" / "chunked_cross_entropy.html"
    assert "techniques.chunked_cross_entropy.chunk_tokens" in made.read_text()
    assert not list(tmp_path.rglob("*.py"))
