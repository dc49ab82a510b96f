"""Put pictures into pages, in the colours of the page's own scheme."""

import re
from pathlib import Path

from scoring.picture import SCHEMES

STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)
IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<source>[^":]*pictures/[\w-]+\.svg)" ?/?>')
COLOURS_FILE = "assets/pictures.css"
PAINTS = {"f": "fill", "s": "stroke"}
"""First letter of a class of a picture -> what the class paints."""


def figure(svg: str, words: str = "") -> str:
    """Return a picture as HTML that follows the light or dark of the page around it.

    Args:
        svg: what `Picture.svg` returns.
        words: what stands below it.
    """
    drawn = STYLE.sub("", svg).strip().replace("\n\n", "\n")
    caption = f"<figcaption>{words}</figcaption>\n" if words else ""
    return f'<figure class="drawn" data-search-exclude>\n{drawn}\n{caption}</figure>'


def colours() -> str:
    """Return the style sheet with the pictures' colours, light and dark."""
    parts: list[str] = []
    for scheme, palette in zip(("", '[data-md-color-scheme="slate"] '), SCHEMES, strict=True):
        for name, colour in sorted(palette.items()):
            for letter, paint in PAINTS.items():
                parts.append(f"{scheme}.drawn .{letter}-{name}{{{paint}:{colour}}}")
    return "\n".join(parts) + "\n"


def with_pictures(html: str, folder: Path) -> str:
    """Return a page whose images of `pictures/` are drawn in the page itself.

    Args:
        html: the page.
        folder: the folder that holds the pictures.
    """

    def drawn(image: re.Match[str]) -> str:
        return figure((folder / Path(image["source"]).name).read_text(), image["alt"])

    return IMAGE.sub(drawn, html)
