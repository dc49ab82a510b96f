"""Every page escapes what it shows, holds nothing that runs, and fetches nothing.

A page is made of `report.page.tag`, which escapes; what is already HTML is a `Safe`. So two things
are held: only the modules that draw may call a text safe, and pages of runs whose every text is
hostile have none of it as markup.
"""

import ast
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile import hostile
from security.readers import _run_folder
from trees import tree_of

import headrace
from headrace.report.compare import compare_reports
from headrace.report.single import write_report

PACKAGE = Path(headrace.__file__).parent
EVIL = "</style></title><script>alert('x')</script>\"'><img src=x onerror=y>&#60;b>"
DRAW = {"report/page.py", "report/chart.py"}
"""Modules that may say of a text that was made that it is HTML; others of a literal alone."""
FORBIDDEN = {"script", "img", "link", "iframe", "object", "embed", "form", "input", "base", "b"}


class Seen(HTMLParser):
    """Hold the elements and attributes of a page, as a browser would find them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def check(page: str) -> None:
    """Hold that a page runs nothing, fetches nothing, and shows hostile text as text."""
    seen = Seen()
    seen.feed(page)
    assert not seen.names & FORBIDDEN
    assert not [a for a in seen.attributes if a[0].startswith("on") or a[0] in ("src", "action")]
    for name, value in seen.attributes:
        if name in ("href", "xlink:href"):
            assert value.startswith("#"), value
    assert "default-src 'none'" in page
    assert not re.search(r"@import|url\((?!['\"]?(?:#|data:))", page)


@pytest.fixture
def evil_run(tmp_path: Path) -> Path:
    """A run each text of whose files is hostile, but for those that must be one of a list."""
    run = tmp_path / "evil"
    shutil.copytree(_run_folder(), run, symlinks=True)
    kept = ("status", "format", "method", "kind", "verdict", "measured", "error")
    for name in ("report.json", "environment.json", "findings.json", "data.json"):
        if (run / name).is_file():
            values = json.loads((run / name).read_text())
            changed = hostile(values, EVIL)
            if isinstance(values, dict):
                changed |= {key: values[key] for key in kept if key in values}
            (run / name).write_text(json.dumps(changed))
    plan = (run / ".plan.toml").read_text()
    (run / ".plan.toml").write_text(f"# {EVIL}\n{plan}")
    return run


def test_a_page_of_hostile_texts_is_text(evil_run: Path) -> None:
    page = write_report(evil_run).read_text()
    check(page)
    assert page.count("&lt;script&gt;alert") > 10


def test_a_comparison_of_hostile_runs_is_text(evil_run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(_run_folder(), other, symlinks=True)
    page = compare_reports([evil_run, other], tmp_path / "both.html").read_text()
    check(page)
    assert "&lt;script&gt;alert" in page


def test_only_what_draws_calls_a_text_safe() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name in DRAW or "Safe(" not in file.read_text():
            continue
        for node in ast.walk(tree_of(file)):
            called = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Safe")
            if called and not isinstance(node.args[0], ast.Constant):
                wrong.append(f"{name}:{node.lineno}")
    assert wrong == []
