"""This module holds the verbs that describe techniques and plans: list and explain."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import Json, Overrides, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.errors import ConfigError
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.plan.plan import Plan


def list_techniques(
    *,
    families_: Annotated[bool, typer.Option("--families", help="Model families.")] = False,
    recipes_: Annotated[bool, typer.Option("--recipes", help="Recipes.")] = False,
    json: Json = False,
) -> None:
    """Print a table of all techniques, of model families, or of recipes."""
    with exit_codes(json):
        with loading():
            from headrace.catalogue.table import catalogue_rows
            from headrace.model.zoo import families
            from headrace.recipes import recipes
        if families_ and recipes_:
            raise ConfigError(
                "list prints one table, and --families and --recipes ask for two",
                "headrace list --families; headrace list --recipes",
            )
        if families_:
            rows = [
                {"family": name, "defaults": " ".join(f"{k}={v}" for k, v in values.items())}
                for name, values in families().items()
            ]
        elif recipes_:
            rows = [{"recipe": name, "file": str(path)} for name, path in recipes().items()]
        else:
            rows = catalogue_rows(catalogue())
        if json:
            show_json(rows)
        else:
            show_table(list(rows[0]) if rows else [], [[str(v) for v in r.values()] for r in rows])


def explain(
    what: Annotated[str, typer.Argument(help="A plan, a recipe or a technique.")] = "",
    overrides: Overrides = None,
    *,
    with_: With = None,
    without: Without = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Which pairs stand together.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="What a plan compiles, and why.")] = False,
    json: Json = False,
) -> None:
    """Print a technique's card; or a plan's sockets, what fills each, and what the plan costs."""
    with exit_codes(json):
        with loading():
            from headrace.assemble.context import choose_device, make_context
            from headrace.catalogue.explain import (
                check_explained,
                explain_plan,
                explain_technique,
                nothing_to_explain,
            )
            from headrace.catalogue.matrix import explain_matrix, read_matrix
            from headrace.cli.plans import named_plan
            from headrace.recipes import recipes
        known = catalogue()
        changes = bool(overrides or with_ or without)
        check_explained(what, known, matrix=matrix, graph=graph, changes=changes)
        if matrix:
            value = read_matrix()
            text = explain_matrix(value)
        elif not what:
            raise ConfigError(
                "explain takes a technique, a recipe or a plan file (with --graph a recipe or a "
                "plan file); only --matrix goes without",
                "headrace explain demo; headrace list has the techniques by room, "
                "headrace list --recipes the recipes",
            )
        elif what in known.techniques:
            value, text = explain_technique(known.techniques[what])
        elif what not in recipes() and not (
            Path(what).is_file() or Path(what, "plan.toml").is_file()
        ):
            raise nothing_to_explain(what, known, recipes())
        else:
            plan = named_plan(what, overrides, with_, without, verb="explain")
            value, text = (
                _graphs(plan, json)
                if graph
                else explain_plan(plan, make_context(plan, choose_device(plan)))
            )
        if json:
            show_json(value)
        else:
            print(text)


def _graphs(plan: "Plan", json: bool) -> tuple[dict[str, Any], str]:
    """Return what a plan compiles, as JSON values and as text."""
    from headrace.catalogue.graphs import explain_graphs

    progress = make_progress(json)
    try:
        return explain_graphs(plan, progress)
    finally:
        progress.close()
