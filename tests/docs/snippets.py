"""Read the fenced blocks of README and docs."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:<!-- file: (\S+) -->\n|<!-- (output) -->\n)?^```(\w+)\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md"))),
)


class Block(NamedTuple):
    """One fenced block of a page: the file it belongs to, its language and its text."""

    file: str
    """Where the page says that it stands; empty when it does not."""
    output: str
    """Not empty where it is what the command above it printed."""
    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [Block(*match.groups(default="")) for match in BLOCK.finditer((ROOT / page).read_text())]
