"""The built site is read, and opened in a browser: links, search, width, light and dark."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Tab, browser
from remedies import sites
from snippets import ROOT
from test_site import DOORS, kinds_of_errors

from headrace.cli.catalogue import catalogue

pytestmark = pytest.mark.slow  # `make check` builds the site, and tests/docs/test_site.py reads it
SITE_MIB = 40
"""Size of the built site at most."""


class Links(HTMLParser):
    """Collect what a page refers to: links to follow, and files that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.links.add(str(given["href"]))
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.add(str(given["src"]))
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.add(str(given["href"]))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    return folder


def _read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


def _pages(page: Path, built: Path) -> set[str]:
    """Return the pages that a page links to, by their path in the site."""
    inside = {link.partition("#")[0] for link in _read(page).links if "://" not in link}
    paths = {(page.parent / link).resolve() for link in inside if link.endswith(".html")}
    return {path.relative_to(built).as_posix() for path in paths}


def test_two_clicks_lead_to_every_readers_page(built: Path) -> None:
    first = _pages(built / "index.html", built)
    for door, behind in DOORS.items():
        page = door.replace(".md", ".html")
        assert page in first
        second = _pages(built / page, built)
        assert second >= {link.replace(".md", ".html") for link in behind}
    assert {"which.html", "troubleshooting.html", "peers.html"} <= first


def test_every_link_leads_to_a_file_without_a_server(built: Path) -> None:
    for page in built.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in _pages(page, built):
            assert (built / link).is_file(), f"{page}: {link}"


def test_nothing_is_loaded_from_outside(built: Path) -> None:
    for page in built.rglob("*.html"):
        outside = [load for load in _read(page).loads if re.match(r"(https?:)?//", load)]
        assert not outside, f"{page}: {outside}"
    for style in built.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", style.read_text())
    assert sum(f.stat().st_size for f in built.rglob("*") if f.is_file()) < SITE_MIB * 2**20


def test_every_kind_and_place_of_an_error_is_in_troubleshooting(built: Path) -> None:
    page = (built / "troubleshooting.html").read_text()
    for kind in kinds_of_errors():
        assert f"<code>{kind}</code>" in page
    told = int(re.findall(r"([\d,]+) messages, made from", page)[0].replace(",", ""))
    assert told > 0.9 * len(sites())


def test_every_technique_shows_its_receipt_or_says_that_there_is_none(built: Path) -> None:
    pictures = 0
    for name, technique in catalogue().techniques.items():
        page = (built / "reference" / technique.room / f"{name}.html").read_text()
        _, _, measured = page.partition('id="measured"')
        pictures += "<svg" in measured
        assert re.search(r"<svg|No row measures|All rows|cannot stand", measured), name
    assert pictures > 60


@pytest.fixture(scope="module")
def tab(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """Open a browser that reaches no network."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    away = "--host-resolver-rules=MAP * ~NOTFOUND"
    with browser(tmp_path_factory.mktemp("profile"), away) as tab:
        yield tab


@pytest.mark.parametrize(
    ("typed", "page"),
    [
        ("chunked_cross_entropy", "chunked_cross_entropy.html"),
        ("cross entropy", "cross_entropy.html"),
        ("is not a multiple of heads", "troubleshooting.html"),
        ("mesh.replicate", "many-gpus.html"),
    ],
)
def test_search_finds_a_page_from_a_file(built: Path, tab: Tab, typed: str, page: str) -> None:
    tab.open(built / "index.html")
    tab.wait("!!window.Worker && !!document.querySelector('input.md-search__input')")
    tab.value("document.querySelector('input.md-search__input').focus()")
    tab.type(typed)
    shown = "[...document.querySelectorAll('a.md-search-result__link')].map(a => a.href)"
    tab.wait(f"{shown}.some(link => link.includes({page!r}))")
    assert all(link.startswith("file://") for link in tab.value(shown))


def test_a_command_can_be_copied(built: Path, tab: Tab) -> None:
    tab.open(built / "start/laptop.html")
    assert tab.wait("document.querySelectorAll('button.md-clipboard, .md-code__button').length") > 3


@pytest.mark.parametrize("page", ["index.html", "which.html", "start/gpu.html", "peers.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_window(built: Path, tab: Tab, page: str, width: int) -> None:
    tab.ask(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    tab.open(built / page)
    assert tab.value("document.documentElement.scrollWidth") <= width


def test_dark_is_dark_and_pictures_follow(built: Path, tab: Tab) -> None:
    colour = "getComputedStyle(document.querySelector('.drawn .f-ink')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    looks = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.ask("Emulation.setEmulatedMedia", features=features)
        tab.open(built / "index.html")
        tab.open(built / "which.html")
        looks[scheme] = tab.value(colour), tab.value(ground)
    assert looks["light"][0] != looks["dark"][0] and looks["light"][1] != looks["dark"][1]
