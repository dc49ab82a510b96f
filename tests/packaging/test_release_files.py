"""Metadata, links, pins, hashes and workflows are what a stranger relies on."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import headrace

ROOT = Path(__file__).parents[2]
DIST: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "dist.py"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = "https://example.org/owner/headrace"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def test_pages_of_an_index_have_absolute_links() -> None:
    readme = (ROOT / "README.md").read_text()
    paths = [path for path, _ in DIST["RELATIVE"].findall(readme)]
    assert "docs/report.png" in paths and len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]
    page = DIST["absolute"](readme, REPOSITORY, "v1.2.3")
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert not [one for one in links if not one.startswith(("https://", "#"))]
    assert f"]({REPOSITORY}/raw/v1.2.3/docs/report.png)" in page
    assert f"]({REPOSITORY}/blob/v1.2.3/docs/numbers.md)" in page


def test_a_release_names_its_repository() -> None:
    text = DIST["with_urls"]((ROOT / "pyproject.toml").read_text(), REPOSITORY, "v1.2.3")
    urls = tomllib.loads(text)["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} == {*urls}
    assert all(url.startswith(REPOSITORY) for url in urls.values())
    with pytest.raises(SystemExit):
        DIST["with_urls"]("[project]", REPOSITORY, "main")


def test_notes_of_a_release_come_from_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "### Added" in DIST["notes"](text, "Unreleased")
    with pytest.raises(SystemExit, match="no section"):
        DIST["notes"](text, "9.9.9")


def test_the_copy_that_is_built_holds_what_is_tracked(tmp_path: Path) -> None:
    DIST["prepare"](ROOT, tmp_path, REPOSITORY, "v1")
    assert (tmp_path / "headrace" / "py.typed").is_file()
    assert REPOSITORY in (tmp_path / "README.md").read_text()
    assert not (tmp_path / ".git").exists()


def test_the_metadata_say_what_runs_it() -> None:
    names = PROJECT["classifiers"]
    versions = [name.rpartition(" ")[2] for name in names if re.search(r"3\.\d+$", name)]
    supported = SpecifierSet(PROJECT["requires-python"])
    assert versions == ["3.11", "3.12", "3.13", "3.14"] and all(v in supported for v in versions)
    assert "3.10" not in supported and PROJECT["authors"] and "Typing :: Typed" in names
    assert not [name for name in names if name.startswith("License")], "license says it"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == headrace.__version__
    assert citation["license"] == PROJECT["license"]


def test_every_dependency_has_a_lowest_version() -> None:
    asked = [Requirement(one) for one in PROJECT["dependencies"]]
    assert not [one.name for one in asked if not any(s.operator == ">=" for s in one.specifier)]


def test_extras_that_messages_name_are_there() -> None:
    named = {
        extra
        for file in (ROOT / "headrace").rglob("*.py")
        for group in re.findall(r"headrace\[([\w,]+)\]", file.read_text())
        for extra in group.split(",")
    }
    assert len(named) > 4 and named <= {*PROJECT["optional-dependencies"]}


def pins(file: str) -> dict[str, str]:
    """Return the version of each package that a file pins."""
    lines = (ROOT / file).read_text().splitlines()
    found = [re.match(r"([\w.-]+)==([\w.+!]+)", line) for line in lines]
    return {one[1].lower().replace("_", "-"): one[2] for one in found if one}


def test_the_lock_has_every_package_with_its_hashes() -> None:
    locked, tested = pins("requirements.txt"), pins("constraints.txt")
    names = {Requirement(one).name.lower() for one in PROJECT["dependencies"]}
    assert names <= {*locked}, "make lock"
    assert not {n: (locked[n], tested[n]) for n in locked.keys() & tested if locked[n] != tested[n]}
    entries = re.split(r"^(?=[\w])", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)
    entries = [entry for entry in entries if "==" in entry]
    assert len(entries) >= len(locked) > 20
    assert not [entry for entry in entries if "--hash=sha256:" not in entry]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_trusts_no_moving_name(file: Path) -> None:
    used = re.findall(r"uses: (.+)", file.read_text())
    assert used and not [u for u in used if not (u.startswith("./") or PINNED.fullmatch(u))]
    workflow = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "timeout-minutes" in job or "uses" in job


def test_a_release_is_tested_signed_and_published_in_that_order() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == ["ci", "check"] and "vars.PUBLISH" in jobs["publish"]["if"]
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    tested = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    matrix = tested["test"]["strategy"]["matrix"]["python"]
    assert matrix == ["3.11", "3.12", "3.13", "3.14"]
    assert {*tested["wheel"]["strategy"]["matrix"]["os"]} == {
        "ubuntu-latest",
        "macos-latest",
        "windows-latest",
    }


def test_templates_and_the_container_are_whole() -> None:
    for file in TEMPLATES:
        template = yaml.safe_load(file.read_text())
        assert template["name"] and template["description"] and template["body"]
    text = (ROOT / "Containerfile").read_text()
    assert re.findall(r"^FROM .* AS (\w+)$", text, re.MULTILINE) == ["wheel", "base", "cpu", "cuda"]
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
    assert {name for names in copied for name in names.split()} == {*sent}
    assert all((ROOT / name).exists() for name in sent)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "english", "architecture"}
