"""The top of the repository holds what it is known for: no folder of a run, and no scratch file."""

from fnmatch import fnmatch
from pathlib import Path

KNOWN = {
    ".ci",
    ".dockerignore",
    ".git",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Containerfile",
    "LICENSE",
    "LOG.md",
    "MANIFEST.in",
    "Makefile",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "constraints.txt",
    "docs",
    "examples",
    "headrace",
    "mkdocs.yml",
    "pyproject.toml",
    "requirements.txt",
    "results",
    "setup.cfg",
    "tests",
}
"""Every name that is committed, git's own, and what an sdist has beside them."""


def test_nothing_else_lies_at_the_top(root: Path) -> None:
    """A test that writes into the folder that it was started in leaves a name behind."""
    ignored = [line.strip("/") for line in (root / ".gitignore").read_text().split()]
    names = {path.name for path in root.iterdir()}
    assert sorted(n for n in names - KNOWN if not any(fnmatch(n, one) for one in ignored)) == []
