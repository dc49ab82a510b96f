"""The built site is read, and opened in a browser: links, search, width, light and dark."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
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
def browser() -> Iterator[Any]:
    """Start a browser that reaches no network."""
    with chromium("--host-resolver-rules=MAP * ~NOTFOUND") as made:
        yield made


@pytest.fixture
def show(browser: Any, built: Path) -> Iterator[Callable[..., Any]]:
    """Return what opens a page of the site from its file."""
    contexts = list[Any]()

    def opened(page: str, *, width: int = 1280, scheme: str = "light") -> Any:
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, color_scheme=scheme))
        tab = contexts[-1].new_page()
        tab.goto((built / page).as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("typed", "page"),
    [
        ("chunked_cross_entropy", "chunked_cross_entropy.html"),
        ("cross entropy", "cross_entropy.html"),
        ("is not a multiple of heads", "troubleshooting.html"),
        ("mesh.replicate", "many-gpus.html"),
    ],
)
def test_search_finds_a_page_from_a_file(show: Callable[..., Any], typed: str, page: str) -> None:
    tab = show("index.html")
    tab.focus("input.md-search__input")
    tab.keyboard.type(typed)
    tab.wait_for_selector(f"a.md-search-result__link[href*='{page}']", state="attached")
    links = tab.eval_on_selector_all("a.md-search-result__link", "all => all.map(a => a.href)")
    assert all(link.startswith("file://") for link in links)


def test_a_command_can_be_copied(show: Callable[..., Any]) -> None:
    tab = show("start/laptop.html")
    tab.wait_for_selector("button.md-clipboard, .md-code__button", state="attached")
    assert tab.locator("button.md-clipboard, .md-code__button").count() > 3


@pytest.mark.parametrize("page", ["index.html", "which.html", "start/gpu.html", "peers.html"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_window(show: Callable[..., Any], page: str, width: int) -> None:
    tab = show(page, width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_is_dark_and_pictures_follow(show: Callable[..., Any]) -> None:
    colour = "getComputedStyle(document.querySelector('.drawn .f-ink')).fill"
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = (
        [show("which.html", scheme=scheme).evaluate(what) for what in (colour, ground)]
        for scheme in ("light", "dark")
    )
    assert light[0] != dark[0] and light[1] != dark[1]
