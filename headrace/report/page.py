"""Build a page: tags that escape by default, cards, tables, bars, and the document around them.

Everything a user can name (runs, techniques, sources, generated text) reaches the page through
`tag`, which escapes every string that is not already `Safe`. There is no other way in.
"""

from collections.abc import Iterable, Sequence
from errno import EACCES, EPERM
from html import escape
from pathlib import Path

from headrace.core.command import rerun
from headrace.core.errors import ConfigError, RunError, is_full_disk
from headrace.core.files import shell, write_whole
from headrace.report.style import STYLE
from headrace.report.words import NOT_MEASURED

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


VOID = ("input", "link", "meta")
"""Elements that have no content, and so no end."""


class Safe(str):
    """Hold HTML that is already escaped."""


def tag(name: str, /, *children: str, **attributes: str) -> Safe:
    """Return one element. `class_` writes `class`, `aria_label` writes `aria-label`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    return Safe(f"<{name}{written}>{join(children)}" + f"</{name}>" * (name not in VOID))


def join(parts: Iterable[str]) -> Safe:
    """Join parts one after another, those that are not Safe escaped."""
    return Safe("".join(p if isinstance(p, Safe) else escape(p) for p in parts))


def section(title: str, *body: str) -> Safe:
    """Return a titled part of the page."""
    return tag("section", tag("h2", title), *body)


def muted(*text: str) -> Safe:
    """Return a quiet line of explanation."""
    return tag("p", *text, class_="muted")


def cards(figures: Iterable[tuple[str, str, str]]) -> Safe:
    """Render key figures as (name, value, note)."""

    def figure_of(value: str) -> Safe:
        return tag("dd", value, **({"class_": "absent"} if value == NOT_MEASURED else {}))

    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), figure_of(value), tag("dd", note, class_="note"))
            for name, value, note in figures
        ),
        class_="cards",
    )


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> Safe:
    """Render a table that scrolls in its own box.

    Args:
        title: what a screen reader calls it.
        head: column names.
        rows: cells; the first of each row is its heading.
        text: how many of the first columns hold text; the others hold numbers, set to the right.
    """

    def cell(name: str, column: int, value: str, **more: str) -> Safe:
        kind = {} if column < text else {"class_": "number"}
        return tag(name, value, **kind, **more)

    def named(column: int, name: str) -> Safe:
        """Return the head of a column; one without a name is no heading."""
        return cell("th", column, name, scope="col") if name else cell("td", column, "")

    top = tag("tr", *(named(column, name) for column, name in enumerate(head)))
    body = (
        tag(
            "tr",
            cell("th", 0, row[0], scope="row"),
            *(cell("td", i, value) for i, value in enumerate(row[1:], start=1)),
        )
        for row in rows
    )
    # Columns of prose would be crushed on a phone: such a table keeps its width and scrolls.
    wide = {"class_": "wide"} if text > 2 else {}
    inner = tag("table", tag("thead", top), tag("tbody", *body), **wide)
    return tag("div", inner, class_="scroll", role="region", aria_label=title, tabindex="0")


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Safe:
    """Render names and values as a two-column table of text."""
    return table(title, ("Name", "Value"), list(pairs), text=2)


def swatch(colour: str, kind: str = "") -> Safe:
    """Return a small mark in a series' colour; `kind` is "", "line", "dash" or "dot"."""
    return tag("i", class_=f"swatch {kind}".strip(), style=f"--at:var(--{colour})")


def legend(entries: Iterable[tuple[Safe, str]]) -> Safe:
    """Render what the colours of a chart mean."""
    items = (tag("li", mark, name) for mark, name in entries)
    return tag("ul", *items, class_="legend")


def stack(label: str, shares: Iterable[tuple[str, float]], *, width: float = 1.0) -> Safe:
    """Render a stacked bar of (colour, share of the whole), `width` of the line long."""
    parts = (
        tag("span", style=f"width:{share:.3%};background:var(--{colour})")
        for colour, share in shares
        if share > 0
    )
    return tag(
        "div", *parts, class_="stack", role="img", aria_label=label, style=f"width:{width:.2%}"
    )


def bar(share: float, colour: str) -> Safe:
    """Render a single bar, `share` of its cell long; decoration beside a number."""
    fill = tag("span", style=f"width:{min(share, 1.0):.2%};background:var(--{colour})")
    return tag("div", fill, class_="bar", aria_hidden="true")


def figure(title: str, chart: str) -> Safe:
    """Render a chart under its title."""
    return tag("figure", tag("figcaption", tag("strong", title)), chart)


def page(title: str, *body: str, source: str = "the files of the run") -> str:
    """Return the whole document; `source` is what it was written from."""
    head = (
        Safe(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Safe(f"<style>{STYLE}</style>"),
    )
    foot = tag("footer", f"Written by Headrace from {source}. Works offline.")
    return document(title, tag("main", *body), foot, head=head)


def document(title: str, *body: str, head: Iterable[Safe] = ()) -> str:
    """Return a document with its title.

    Args:
        title: what the window is called.
        body: what the page shows.
        head: what stands in its head beside the title: the style sheet, and what else it needs.
    """
    known = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
    )
    top = tag("head", *known, *head, tag("title", title))
    return f'<!doctype html>\n<html lang="en">{top}\n<body>{join(body)}</body></html>\n'


def write_page(path: Path, text: str) -> Path:
    """Write the page, or say why it cannot be written.

    Raises:
        ConfigError: nothing can be written at that path.
        RunError: the disk is full.
    """
    try:
        # Text that a young model wrote may hold half a character.
        write_whole(path, text.encode(errors="replace"))
    except OSError as error:
        if path.is_dir():
            inside = shell(path / "comparison.html")
            raise ConfigError(
                f"{path} is a folder, and a page is a file", f"--output {inside}"
            ) from None
        problem = f"{path} cannot be written: {error}"
        if is_full_disk(error):
            remedy = f"free some space in {shell(path.parent)}, then {rerun(verb='report RUN')}"
            raise RunError(problem, remedy) from None
        if not path.parent.exists():
            remedy = f"mkdir -p {shell(path.parent)}"
        elif error.errno in (EACCES, EPERM):
            remedy = f"chmod u+w {shell(path.parent)}"
        else:
            remedy = "--output FILE in a folder that can be written"
        raise ConfigError(problem, remedy) from None
    return path
