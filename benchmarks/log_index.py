"""Write the index of LOG.md from its headings, and check what each entry looks like.

    python benchmarks/log_index.py            # write the index between its markers
    python benchmarks/log_index.py --check    # exit 1 when it is behind, or an entry is malformed

A heading is `### VERDICT: what was tried (YYYY-MM, on what)`, and an entry has five lines at most.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

LOG = Path(__file__).resolve().parent.parent / "LOG.md"
BEGIN, END = "<!-- index:begin -->", "<!-- index:end -->"
VERDICTS = {
    "kept": "what was tried is in Headrace, or what was measured met what was wanted",
    "lost": "it is not in Headrace, or missed what was wanted",
    "open": "nothing is decided, or no receipt stands behind it",
}
"""Maps the verdict of an experiment to its meaning."""
HEADING = re.compile(r"### (kept|lost|open): (.+) \((\d{4}-\d\d)(?:, [^()]+)?\)")
LINES = 5
"""Most lines of an entry."""


def entries(text: str) -> list[tuple[str, list[str]]]:
    """Return the heading and the lines of each entry of a log."""
    parts = text.partition(END)[2].split("\n### ")[1:]
    return [(f"### {head}", body.strip().split("\n")) for head, _, body in map(_cut, parts)]


def _cut(part: str) -> tuple[str, str, str]:
    """Split an entry behind its heading."""
    return part.partition("\n")


def problems(text: str) -> list[str]:
    """Return what is wrong with the entries of a log, one line each."""
    wrong = []
    for heading, body in entries(text):
        if not HEADING.fullmatch(heading):
            wrong.append(f"{heading}: write ### kept|lost|open: what was tried (YYYY-MM, on what)")
        if len(body) > LINES:
            wrong.append(f"{heading}: {len(body)} lines, {LINES} at most")
    return wrong


def anchor(heading: str) -> str:
    """Return the name by which GitHub links to a heading."""
    words = re.sub(r"[^\w\- ]", "", heading.removeprefix("### ").lower())
    return words.replace(" ", "-")


def index(text: str) -> str:
    """Return the index of a log in Markdown: its entries by verdict, newest first."""
    headings = [(heading, HEADING.fullmatch(heading)) for heading, _ in entries(text)]
    lines = []
    for verdict, meaning in VERDICTS.items():
        own = [(h, m[2], m[3]) for h, m in headings if m and m[1] == verdict]
        lines += [f"**{verdict}** ({len(own)}): {meaning}.", ""]
        lines += [f"- {month}: [{what}](#{anchor(heading)})" for heading, what, month in own]
        lines.append("")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Write the index, or with --check only check the log; end with 1 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(words)
    text = LOG.read_text()
    if wrong := problems(text):
        sys.exit("\n".join(wrong))
    fresh = f"{text.partition(BEGIN)[0]}{BEGIN}\n{index(text)}{END}{text.partition(END)[2]}"
    if not args.check:
        LOG.write_text(fresh)
    elif text != fresh:
        sys.exit("the index of LOG.md is behind: python benchmarks/log_index.py")


if __name__ == "__main__":
    main()
