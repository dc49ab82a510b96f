"""Build the wheel and the sdist into dist/, ready for an index of packages.

    python .ci/dist.py                                              # as `make dist` does
    python .ci/dist.py --repository https://HOST/OWNER/headrace --ref v0.1.0

An index shows README.md far from its repository, so what it shows needs absolute links: pictures to
the file itself, other links to the page about it, both at the released commit. The address of the
repository is known where a release is made and nowhere else: a workflow passes it. Without one the
links stay as they are, and the metadata name no address.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
"""A relative link of a page in Markdown: its path, and its anchor."""
PICTURES = (".png", ".svg", ".jpg", ".gif")
URLS = {
    "Homepage": "",
    "Documentation": "/tree/{ref}/docs",
    "Source": "/tree/{ref}",
    "Changelog": "/blob/{ref}/CHANGELOG.md",
    "Issues": "/issues",
}
"""Name of a link in the metadata -> its place in the repository."""


def absolute(page: str, repository: str, ref: str) -> str:
    """Return a page in Markdown with absolute links."""

    def link(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        kind = "raw" if path.endswith(PICTURES) else "blob"
        return f"]({repository}/{kind}/{ref}/{path}{anchor})"

    return RELATIVE.sub(link, page)


def with_urls(pyproject: str, repository: str, ref: str) -> str:
    """Return pyproject.toml with a table of addresses."""
    lines = [f'{name} = "{repository}{path.format(ref=ref)}"' for name, path in URLS.items()]
    table = "\n".join(["[project.urls]", *lines])
    before, mark, after = pyproject.partition("[project.scripts]")
    if not mark:
        raise SystemExit("pyproject.toml has no [project.scripts], before which the addresses go")
    return f"{before}{table}\n\n{mark}{after}"


def notes(changelog: str, version: str) -> str:
    """Return what the changelog says of a version.

    Raises:
        SystemExit: it says nothing of it.
    """
    parts = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if not sections.get(version, "").strip():
        raise SystemExit(f"CHANGELOG.md has no section [{version}]")
    return sections[version].strip() + "\n"


def tracked(root: Path) -> list[str]:
    """Return the files of the repository; of an sdist all that are there."""
    if (root / ".git").exists():
        listed = subprocess.run(
            [
                "git",
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]


def prepare(root: Path, to: Path, repository: str, ref: str) -> None:
    """Copy the repository, with the addresses of a release where its own is known."""
    for name in tracked(root):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name)
    if repository:
        for name, change in (("README.md", absolute), ("pyproject.toml", with_urls)):
            text = (to / name).read_text(encoding="utf-8")
            (to / name).write_text(change(text, repository, ref), encoding="utf-8")


def main() -> None:
    """Build, or print the notes of a version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", default="", help="its address, without a slash at the end")
    parser.add_argument("--ref", default="main", help="the tag or commit that links lead to")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--notes", metavar="VERSION", help="print what the changelog says of it")
    args = parser.parse_args()
    if args.notes:
        print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), args.notes), end="")
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(ROOT, Path(folder), args.repository.rstrip("/"), args.ref)
        build = [sys.executable, "-m", "build", "--outdir", str(args.out), folder]
        sys.exit(subprocess.run(build, check=False).returncode)


if __name__ == "__main__":
    main()
