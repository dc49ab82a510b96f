"""Adds the reference, made from the package and the receipts, while mkdocs builds."""

import sys
from pathlib import Path, PurePath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from headrace.catalogue.pages import reference
from headrace.cli.catalogue import catalogue
from headrace.recipes import recipes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from readme_table import of_techniques  # noqa: E402

OTHERS = {
    "Plan keys": "reference/plan.md",
    "Model families": "reference/families.md",
    "Recipes": "reference/recipes.md",
}
ALL_TECHNIQUES = "reference/techniques.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of the reference into the navigation."""
    made = set(reference(catalogue(), recipes()))
    cards = sorted(made - {ALL_TECHNIQUES, *OTHERS.values()}, key=lambda path: PurePath(path).stem)
    others: list[Any] = [{title: path} for title, path in OTHERS.items()]
    nav = list(config.nav or [])
    section = {"Reference": [*others, {"Techniques": [{"All": ALL_TECHNIQUES}, *cards]}]}
    config.nav = [*nav[:-1], section, *nav[-1:]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; a technique's has its receipts below its card."""
    rows = of_techniques(ROOT / "results")
    for path, text in reference(catalogue(), recipes()).items():
        if measured := rows.get(PurePath(path).stem):
            text += f"\n## Measured\n\n{measured}\n"
        files.append(File.generated(config, path, content=text))
    return files
