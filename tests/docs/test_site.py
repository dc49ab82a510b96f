"""The site's sources have four doors, all is two clicks away, and pages say what they should."""

import re
from pathlib import Path

import pytest
from sitepages.decisions import DIVISIONS, MEANINGS, WITHOUT, remedies_of
from sitepages.errors import AREAS, HELPS
from sitepages.peers_tables import MARKER, TABLES, with_tables
from snippets import ROOT

from headrace.cli.catalogue import catalogue
from headrace.plan.symptoms import BOTTLENECKS

DOCS = ROOT / "docs"
DOORS = {
    "start/laptop.md": ("guide/first-run.md", "guide/your-data.md"),
    "start/gpu.md": ("guide/faster.md", "which.md"),
    "start/cluster.md": ("guide/cluster.md", "guide/many-gpus.md"),
    "start/finetune.md": ("guide/finetune.md", "guide/adapters.md"),
}
"""A door -> the pages behind it, which are two clicks from the first page."""
MADE = ("which.md", "troubleshooting.md", "reference/")
"""Pages that are made while the site is built, and folders of such pages."""


def _links(page: Path) -> set[str]:
    """Return the pages that a page links to, by their path in the documentation."""
    found = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", page.read_text())
    return {(page.parent / link).resolve().relative_to(DOCS).as_posix() for link in found}


def kinds_of_errors() -> set[str]:
    """Return the names of all classes of the package that are errors for a user."""
    texts = [file.read_text() for file in (ROOT / "headrace").rglob("*.py")]
    pairs = [pair for text in texts for pair in re.findall(r"^class (\w+)\((\w+)\)", text, re.M)]
    kinds, before = {"HeadraceError"}, set[str]()
    while kinds != before:
        before = kinds
        kinds = kinds | {name for name, base in pairs if base in kinds}
    return kinds


def test_the_first_page_opens_with_four_doors() -> None:
    first, _, rest = (DOCS / "index.md").read_text().partition("</div>")
    doors = re.findall(r"\*\*\[[^]]+\]\((\S+)\)\*\*", first)
    assert doors == [*DOORS] and rest


@pytest.mark.parametrize("door", DOORS)
def test_a_door_leads_on_to_its_pages(door: str) -> None:
    links = _links(DOCS / door)
    assert links >= {*DOORS[door], "troubleshooting.md"}
    for link in links:
        assert link.startswith(MADE) or (DOCS / link).is_file(), f"{door}: {link}"


def test_every_command_of_a_door_has_what_it_printed_or_a_page() -> None:
    for door in DOORS:
        assert "<!-- output -->\n```text\n" in (DOCS / door).read_text()


def test_every_kind_of_error_has_what_mends_it() -> None:
    assert HELPS.keys() == kinds_of_errors() | {"Unsupported", "Wrong"}


def test_every_folder_that_makes_errors_has_a_title() -> None:
    makes = re.compile(rf"\b(?:{'|'.join(HELPS)})\(")
    package = ROOT / "headrace"
    folders = {
        folder.name
        for folder in package.iterdir()
        if folder.is_dir() and any(makes.search(f.read_text()) for f in folder.rglob("*.py"))
    }
    assert not folders - AREAS.keys()


def test_the_tree_has_every_bottleneck_once() -> None:
    named = [bottleneck for some in DIVISIONS.values() for bottleneck in some]
    assert sorted(named) == sorted(BOTTLENECKS) == sorted(MEANINGS)
    without = {b for b in BOTTLENECKS if not remedies_of(b, catalogue())}
    assert without == WITHOUT.keys()


def test_tables_of_peers_have_rows_of_each_that_was_measured() -> None:
    page = (DOCS / "peers.md").read_text()
    assert {*MARKER.findall(page)} == TABLES.keys()
    made = with_tables(page, ROOT / "results")
    assert not MARKER.search(made)
    for peer in ("torchtitan", "litgpt", "PEFT and Liger"):
        assert f"\n| {peer} | " in made


def test_what_others_do_better_comes_first() -> None:
    page = (DOCS / "peers.md").read_text()
    theirs, ours = page.split("## What Headrace does better")
    for peer in ("torchtitan", "nanochat", "litgpt", "Axolotl", "Unsloth", "Megatron-LM", "TRL"):
        assert f"| [{peer}](" in theirs
    assert "## What this does not show" in ours
