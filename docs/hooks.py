"""Adds what the package and the rows say, while mkdocs builds: reference, receipts, answers."""

import sys
from pathlib import Path, PurePath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from headrace.catalogue.pages import reference
from headrace.cli.catalogue import catalogue
from headrace.recipes import recipes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))
from sitepages.decisions import decisions_page  # noqa: E402
from sitepages.errors import errors_page  # noqa: E402
from sitepages.figures import COLOURS_FILE, colours, with_pictures  # noqa: E402
from sitepages.peers_tables import with_tables  # noqa: E402
from sitepages.receipts_pages import NOTHING, receipts  # noqa: E402

OTHERS = {
    "Plan keys": "reference/plan.md",
    "Model families": "reference/families.md",
    "Recipes": "reference/recipes.md",
}
ALL_TECHNIQUES, PAIRS = "reference/techniques.md", "reference/pairs.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of the reference into the navigation, a room's techniques together."""
    made = set(reference(catalogue(), recipes()))
    rooms: dict[str, list[str]] = {}
    for path in sorted(made - {ALL_TECHNIQUES, PAIRS, *OTHERS.values()}):
        rooms.setdefault(PurePath(path).parent.name, []).append(path)
    others: list[Any] = [{title: path} for title, path in OTHERS.items()]
    techniques = [
        {"All": ALL_TECHNIQUES},
        {"What stands beside what": PAIRS},
        *({room: paths} for room, paths in rooms.items()),
    ]
    nav = list(config.nav or [])
    section = {"Reference": [*others, {"Techniques": techniques}]}
    config.nav = [*nav[:-1], section, *nav[-1:]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made; a technique's has its receipt below its card."""
    measured = receipts(RESULTS)
    for path, text in reference(catalogue(), recipes()).items():
        name = PurePath(path).stem
        if name in catalogue().techniques:
            text += f"\n## Measured\n\n{measured.get(name) or NOTHING}\n"
        files.append(File.generated(config, path, content=text))
    made = {
        "which.md": decisions_page(catalogue(), RESULTS),
        "troubleshooting.md": errors_page(ROOT / "headrace"),
        COLOURS_FILE: colours(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables of rows where a page names them."""
    return with_tables(markdown, RESULTS)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draw the pictures of a page in the page, in the colours of its scheme."""
    return with_pictures(html, ROOT / "docs" / "pictures")
