"""Make what stands around every page of `headrace ui`, and the parts that only its pages have."""

import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from headrace.core.errors import HeadraceError
from headrace.core.units import format_seconds
from headrace.report.page import Safe, document, muted, section, tag
from headrace.ui.listed import ListedRun

HEAD = (
    Safe('<link rel="stylesheet" href="/style.css">'),
    Safe('<script src="/page.js" defer></script>'),
    Safe('<link rel="icon" href="data:,">'),
)
"""What every page loads: from this server alone, and no icon."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",  # charts and bars take their colours and widths by it
        "img-src data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
LIVE_S, SLOW_S = 2, 10
"""Seconds between two looks of a page at a run that goes on, and at the list of runs."""


def framed(title: str, *body: str, root: Path) -> str:
    """Return a whole page of the server.

    Args:
        title: what it is called.
        body: what it shows.
        root: the folder of runs.
    """
    top = tag(
        "nav",
        tag("a", "Headrace", href="/", class_="home"),
        tag("span", str(root), class_="folder"),
        tag("span", "", class_="tools", id="tools"),
        aria_label="Runs",
    )
    skip = tag("a", "Skip to the content", href="#content", class_="skip")
    return document(
        f"{title} - Headrace",
        skip,
        top,
        tag("main", *body, id="content", tabindex="-1"),
        tag("footer", "Made by Headrace from the files of the runs, on this machine."),
        tag("p", "", id="said", role="status", class_="said"),
        head=HEAD,
    )


def heading(eyebrow: str, title: str, *below: str) -> Safe:
    """Return the head of a page."""
    return tag("header", tag("p", eyebrow, class_="eyebrow"), tag("h1", title), *below)


def live(url: str, *content: str, every_s: int, name: str, now: bool = False) -> Safe:
    """Return a part of the page that the page asks the server for again and again.

    Args:
        url: where its content is.
        content: the content by now, or what a browser without scripts is shown.
        every_s: seconds between two questions; 0 asks once.
        name: unique on the page.
        now: ask for the first time as soon as the page is shown.
    """
    first = {"data_now": ""} if now else {}
    return tag("div", *content, id=name, data_live=url, data_every=str(every_s), **first)


def badge(tone: str, words: str) -> Safe:
    """Return the badge of a state."""
    return tag("span", words, class_=f"badge {tone}")


def command_box(command: str) -> Safe:
    """Return a command to copy."""
    return tag("pre", command, class_="command", tabindex="0")


def error_page(error: HeadraceError, *, root: Path) -> str:
    """Return the page that says what is wrong, and what mends it."""
    return framed("Cannot be shown", *error_parts(error.message, error.remedy.text), root=root)


def error_parts(message: str, remedy: str) -> Iterable[Safe]:
    """Yield the parts of a page that say what is wrong."""
    yield heading("Headrace", "Cannot be shown", badge("bad", "Error"))
    yield tag(
        "section",
        tag("h2", "What is wrong"),
        tag("p", message),
        *((muted("Try:"), command_box(remedy)) if remedy else ()),
        tag("p", tag("a", "All runs", href="/")),
        class_="narrow",
    )


def runs_list(runs: Iterable[ListedRun], now_s: float) -> Safe:
    """Render a line for each run, with a box before those that can be compared."""
    return tag("ul", *(_line(run, now_s) for run in runs), class_="runs")


def _line(run: ListedRun, now_s: float) -> Safe:
    where = "tunings" if run.state == "tuning" else "runs"
    link, box = tag("a", run.name, href=address(where, run.name)), Safe("")
    if run.state == "ended":
        label = f"Compare {run.name}"
        box = tag("input", type="checkbox", name="run", value=run.name, aria_label=label)
    facts = (
        f"{run.loss} bits per byte" if run.loss else "",
        f"{run.steps} steps" if run.steps else "",
        run.took,
        _ago(now_s - run.changed_s) if run.changed_s else "",
    )
    return tag(
        "li",
        tag("div", box, link, badge(run.tone, run.badge), class_="pick"),
        tag("p", run.sentence, class_="muted"),
        tag("p", *(tag("span", fact) for fact in facts if fact), class_="facts"),
    )


def _ago(seconds: float) -> str:
    return f"{format_seconds(seconds)} ago" if seconds >= 2 else "just now"


def address(where: str, name: str, *more: str) -> str:
    """Return the address of a page about a run."""
    return "/".join(("", where, quote(name, safe=""), *more))


def list_parts(runs: list[ListedRun], root: Path) -> list[Safe]:
    """Return the list of runs, or what to do where there is none."""
    if not runs:
        text = f"{root} holds no run yet. A first one takes three minutes:"
        return [section("Runs", tag("p", text), command_box("headrace train demo"))]
    return [runs_list(runs, time.time())]
