"""Make the reference of the documentation from cards, families, recipes, plan keys and verbs.

Nothing here is written twice: a page says what the code's own fields and docstrings say, so a new
technique has its page when its file is there. Pages are made when the documentation is built and
are not kept.
"""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from headrace.catalogue.matrix import MARKS, count_outcomes, needs_of, read_matrix
from headrace.core.strict import meanings
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Technique

TYPE_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def reference(catalogue: Catalogue, recipes: Mapping[str, Path]) -> dict[str, str]:
    """Return the Markdown of every page by its path under the documentation's folder.

    Args:
        catalogue: techniques and families.
        recipes: each recipe's file by its name.
    """
    pages = {
        "reference/techniques.md": _techniques(catalogue),
        "reference/plan.md": _plan(),
        "reference/families.md": _families(catalogue),
        "reference/recipes.md": _recipes(recipes),
        "reference/pairs.md": _pairs(catalogue),
    }
    cards = {card_path(t): _card(t) for t in catalogue.techniques.values()}
    return pages | cards


def card_path(technique: type[Technique[Any]]) -> str:
    """Return where a technique's page is."""
    return f"reference/{technique.room}/{technique.name()}.md"


def _techniques(catalogue: Catalogue) -> str:
    lines = [
        "# Techniques",
        "",
        "On with `--with NAME` or a table `[techniques.NAME]` in the plan, off with "
        "`--without NAME`.",
        "",
        "| technique | room | what it does | buys | costs |",
        "|---|---|---|---|---|",
    ]
    for name, technique in catalogue.techniques.items():
        link, card = f"[`{name}`]({technique.room}/{name}.md)", technique.card
        row = (link, technique.room, technique.line(), card.shown("buys"), card.shown("costs"))
        lines.append(_row(row))
    return _page(lines)


def _card(technique: type[Technique[Any]]) -> str:
    """Render a technique's page: its essay, its card, its sockets, its knobs."""
    name, card = technique.name(), technique.card
    essay = inspect.getdoc(inspect.getmodule(technique)) or technique.line()
    facts = {
        **card.whole(),
        "stage": technique.stage.name.lower(),
        "owns": _codes(technique.claims),
        "composes": _codes(technique.composes),
        "excludes": "; ".join(f"`{other}`: {why}" for other, why in technique.excludes.items()),
        "gradients": technique.equality,
        "remedy for": ", ".join(technique.symptoms),
    }
    lines = [f"# {name}", "", essay, "", "| | |", "|---|---|"]
    lines += [_row((key, value)) for key, value in facts.items() if value]
    lines += ["", "## Knobs", ""]
    lines += list(_keys(technique, f"techniques.{name}")) or ["It has none."]
    return _page(lines)


def _pairs(catalogue: Catalogue) -> str:
    """Render which pairs stand together: signs beside what splits the model, then the reasons."""
    matrix, techniques = read_matrix(), catalogue.techniques
    pairs = matrix["pairs"]
    links = {n: f"[`{n}`]({t.room}/{n}.md)" for n, t in techniques.items()}
    columns = [name for name, technique in techniques.items() if _splits(technique)]
    lines = [
        "# What stands beside what",
        "",
        f"Every pair of techniques, as tests found it: {count_outcomes(matrix)}.",
        "",
        "- `=` tested: on 4 ranks, or in one process, the two compute what one process computes "
        "without them",
        "- `n` the same once there is beside the two what one of them "
        "[needs](#what-a-technique-needs-beside-it)",
        "- `g` the plan is accepted on a GPU, and no test here runs it",
        "- `x` refused before the run starts; the [reason](#what-is-refused-and-why) is below",
        "",
        "`headrace explain --matrix` prints the signs of all pairs, and `--json` gives them to a "
        "program.",
        "",
        "## Beside what splits the model",
        "",
        _row(("technique", *(f"`{name}`" for name in columns))),
        "|---|" + ":-:|" * len(columns),
    ]
    for name in sorted(techniques):
        outcomes = (pairs.get(" ".join(sorted((name, column))), {}) for column in columns)
        lines.append(_row((links[name], *(MARKS.get(e.get("outcome"), "") for e in outcomes))))
    lines += ["", "## What a technique needs beside it", "", "| technique | needs |", "|---|---|"]
    lines += [_row((links.get(n, n), f"`{what}`")) for n, what in needs_of(pairs).items()]
    lines += ["", "## What is refused, and why", "", "| pair | reason | try |", "|---|---|---|"]
    for pair, entry in sorted(pairs.items()):
        if entry["outcome"] == "refuses":
            why, _, remedy = entry["why"].partition("\n  try: ")
            lines.append(_row((" + ".join(links[name] for name in pair.split()), why, remedy)))
    return _page(lines)


def _splits(technique: type[Technique[Any]]) -> bool:
    """Return whether a technique divides a model or its batch among ranks."""
    return bool(technique.axes) or not {"layouts", "shard"}.isdisjoint(technique.composes)


def _plan() -> str:
    """Render every key of a plan, table by table."""
    lines = [
        "# Plan keys",
        "",
        "Every key with its type, its default and its meaning. In TOML `a.b = 1` stands in the "
        "table `[a]`; on the command line it is `a.b=1`.",
        "",
        *_keys(Plan, ""),
    ]
    for name, table in _tables(Plan, ""):
        about = (inspect.getdoc(table) or "").strip()
        lines += ["", f"## {name}", "", about, "", *_keys(table, name)]
    return _page(lines)


def _tables(table: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted name and class of every table inside of one, the outer before the inner."""
    for name, info in table.model_fields.items():
        for inner in _inside(info.annotation):
            yield f"{prefix}{name}", inner
            yield from _tables(inner, f"{prefix}{name}.")


def _inside(kind: Any) -> list[type[BaseModel]]:
    """Return the tables that a type names: itself, one that may be left out, or those of a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [table for item in get_args(kind) for table in _inside(item)]


def _families(catalogue: Catalogue) -> str:
    lines = [
        "# Model families",
        "",
        "A family is defaults for `model.*`; a plan's own keys win. Choose one with "
        "`model.family=NAME`.",
    ]
    lines += ["", "| family | what it sets |", "|---|---|"]
    for name, values in catalogue.families.items():
        says = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in values.items())
        lines.append(_row((f"`{name}`", says or "the defaults of every key")))
    return _page(lines)


def _recipes(recipes: Mapping[str, Path]) -> str:
    lines = ["# Recipes", "", "Plans that come with Headrace: `headrace train NAME`."]
    for name, path in recipes.items():
        lines += ["", f"## {name}", "", "```toml", path.read_text().rstrip(), "```"]
    return _page(lines)


def _keys(table: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield a table's keys as rows; tables inside of it have sections of their own."""
    says = meanings(table)
    rows = [
        _row(
            (
                f"`{prefix}.{name}`" if prefix else f"`{name}`",
                _type(info),
                _default(info),
                says[name],
            )
        )
        for name, info in table.model_fields.items()
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel))
    ]
    if rows:
        yield from ("| key | type | default | meaning |", "|---|---|---|---|", *rows)


def _type(info: FieldInfo) -> str:
    """Render a field's type in a reader's words, with its limits."""
    return _with_limits(_words(info.annotation), info.metadata)


def _words(kind: Any) -> str:
    """Render a type as a reader writes its values."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [m for item in inner[1:] for m in getattr(item, "metadata", [item])]
        return _with_limits(_words(inner[0]), limits)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {' and '.join(dict.fromkeys(_words(k) for k in inner if k is not ...))}"
    if origin is dict:
        return "tables"
    return " or ".join(dict.fromkeys(_words(k) for k in inner if k is not NoneType))


def _with_limits(words: str, metadata: Iterable[Any]) -> str:
    limits = [
        f"{sign} {getattr(item, key)}"
        for item in metadata
        for key, sign in SIGNS.items()
        if getattr(item, key, None) is not None
    ]
    return ", ".join([words, *limits])


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "none" if info.default_factory is None else "empty"
    if isinstance(info.default, BaseModel):
        return "a table at its defaults"
    return "not set" if info.default is None else f"`{json.dumps(info.default)}`"


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _page(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
