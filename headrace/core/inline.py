"""Make the HTML that a notebook shows of an object. Every text is escaped.

A notebook asks an object for `_repr_html_` and shows what it returns. What is made here has no
script, asks for nothing from a network, and takes its colours from the notebook, so that it can be
read on a light and on a dark page.
"""

import sys
from collections.abc import Iterable, Sequence
from html import escape

CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
"""Style of a cell of a table."""
FRAME_PX = 640
"""Height in pixels of a page that is shown inside of a notebook."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    running = None if ipython is None else ipython.get_ipython()
    return hasattr(running, "kernel")


def inline_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a title as HTML.

    Args:
        title: stands above the table; "" for none.
        head: the names of the columns; none for a table without a head.
        rows: the cells of each row.
    """
    lines = [f"<strong>{escape(title)}</strong>"] if title else []
    lines.append("<table>")
    if head:
        names = "".join(f'<th style="{CELL}">{escape(name)}</th>' for name in head)
        lines.append(f"<tr>{names}</tr>")
    for row in rows:
        cells = "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "".join([*lines, "</table>"])


def inline_text(title: str, text: str) -> str:
    """Return a text under a title as HTML, with its lines and its spaces kept."""
    return f"<strong>{escape(title)}</strong><pre>{escape(text)}</pre>"


def inline_page(page: str) -> str:
    """Return a whole HTML page inside of a frame.

    The frame is a sandbox: what the page holds runs no script and reaches nothing around it.

    Args:
        page: the HTML of the page.
    """
    style = f"width:100%;height:{FRAME_PX}px;border:1px solid #8888"
    return f'<iframe sandbox srcdoc="{escape(page)}" style="{style}"></iframe>'
