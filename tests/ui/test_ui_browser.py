"""A headless Chromium meets the pages: axe-core, widths, schemes, the keyboard, live parts."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from chromium import chromium
from synthetic_run import PLAN, TOKEN, add_rows, metric_rows, write_run
from tiny import PLAN as TINY

from headrace.core.statistics import Interval
from headrace.launch.local import _started
from headrace.launch.record import Launch
from headrace.tuner.trial_row import TrialRow
from headrace.ui.server import listen, make_app, serve

pytestmark = pytest.mark.slow
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PATHS = (
    *("/", "/runs/won", "/runs/going", "/runs/broken", "/tunings/won-tune", "/none"),
    *("/compare?run=won&run=lost", "/compare?run=won", "/runs/won/forecast"),
    *("/runs/waiting", "/runs/waiting/doctor"),
)
FINDING = {
    "sentence": "The loader takes a third of the step.",
    "remedies": [
        {
            "change": ["+loader_workers"],
            "what": "reads ahead",
            "gain": {"low": 0.1, "value": 0.2, "high": 0.3},
            "memory_bytes": 0,
            "costs": "memory",
            "equality": "exact",
        }
    ],
}
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a run of each kind."""
    root = tmp_path_factory.mktemp("served") / "runs"
    won = write_run(root / "won")
    (won / "findings.json").write_text(json.dumps([FINDING]))
    write_run(root / "lost", status="failed", message="the loss is not finite")
    (write_run(root / "broken") / "report.json").write_text("{")
    going = root / "going"
    going.mkdir()
    (going / "plan.toml").write_text(PLAN)
    add_rows(going, metric_rows()[:60])
    waiting = root / "waiting"
    waiting.mkdir()
    (waiting / "plan.toml").write_text(TINY.format(corpus=root.parent, prepared=root.parent))
    add_rows(waiting, [row | {"input_s": 0.2} for row in metric_rows()[:40]])
    tuning = root / "won-tune"
    tuning.mkdir()
    row = TrialRow(1, ("+muon",), "kept", "faster", "accept", ratio=Interval(1.1, 1.2, 1.3, 9))
    path = {"name": "won", "aim": "time", "path": [asdict(row)], "left": ["+lion"]}
    (tuning / "path.json").write_text(json.dumps(path))
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> str:
    """Serve the folder; return its address."""
    opened = listen(0)
    threading.Thread(target=serve, args=(make_app(runs, TOKEN), opened), daemon=True).start()
    return f"http://127.0.0.1:{opened.getsockname()[1]}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start one browser for all pages."""
    with chromium() as made:
        yield made


@pytest.fixture
def show(browser: Any, address: str) -> Iterator[Open]:
    """Return what opens a page: `show("/", width=390, scheme="dark")`. Nothing may be logged."""
    contexts, logged = list[Any](), list[str]()

    def open_page(path: str, *, width: int = 1280, scheme: str = "light", **more: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **more
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: logged.append(said.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("request", lambda asked: logged.append(asked.url) if foreign(asked.url) else None)
        page.goto(address + path)
        return page

    def foreign(url: str) -> bool:
        return not url.startswith((address, "data:,"))

    yield open_page
    for context in contexts:
        context.close()
    assert [line for line in logged if "status of 4" not in line] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_passes_axe_and_keeps_its_width(show: Open, width: int, scheme: str) -> None:
    page = show("/", width=width, scheme=scheme)
    root = page.url.rstrip("/")
    for path in PATHS:
        page.goto(root + path)
        if path in ("/runs/won", "/runs/going"):
            page.wait_for_selector("#forecast .muted")
        if path == "/runs/waiting":
            page.wait_for_selector("#doctor pre.command")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide == width, f"{path} is {wide} pixels wide"
        report = axe.Axe().run(page, options={"runOnly": WCAG})
        assert report.violations_count == 0, f"{path}: {report.generate_report()}"


def test_all_is_reached_by_the_keyboard(show: Open) -> None:
    page = show("/", width=390)
    focused = (
        "document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"
    )

    def tab_to(words: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if words in page.evaluate(focused):
                return
        raise AssertionError(f"no Tab leads to {words}")

    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    for name in ("lost", "won"):
        tab_to(f"Compare {name}")
        page.keyboard.press("Space")
    tab_to("Compare the marked runs")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus is seen"
    page.keyboard.press("Enter")
    page.wait_for_selector("text=2 runs side by side")
    tab_to("Headrace")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Compare the marked runs")
    tab_to("going")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=So far")
    tab_to("Pause updates")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Go on updating")


def test_a_command_is_copied(show: Open) -> None:
    page = show("/runs/won", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("Copy: headrace train", exact=False).first.click()
    page.wait_for_selector("text=Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("headrace train ") and copied.endswith("--with loader_workers")


def test_a_remedy_of_a_run_that_goes_on_is_copied_by_keyboard(show: Open, runs: Path) -> None:
    page = show("/runs/waiting", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label(f"Copy: headrace train {runs}", exact=False).first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Copied.")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"headrace train {runs}/waiting/plan.toml ")


def test_a_page_follows_its_run(show: Open, runs: Path) -> None:
    page = show("/runs/going")
    assert "Running at step 60" in page.inner_text("#run")
    page.get_by_label("Time by phase", exact=True).focus()
    add_rows(runs / "going", metric_rows()[60:80])
    page.wait_for_selector("text=Running at step 80")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Time by phase"
    ended = runs / "going" / "report.json"
    ended.write_text((runs / "won" / "report.json").read_text())
    page.wait_for_selector("text=Show its report")
    page.click("text=Show its report")
    page.wait_for_selector("text=Repeat this run")
    ended.unlink()


def test_the_list_follows_its_runs_and_keeps_what_is_marked(show: Open, runs: Path) -> None:
    page = show("/")
    page.get_by_label("Compare won").check()
    write_run(runs / "late")
    page.wait_for_selector("text=late", timeout=30_000)
    assert page.get_by_label("Compare won").is_checked()
    assert not page.get_by_label("Compare late").is_checked()
    shutil.rmtree(runs / "late")


def test_who_has_the_token_stops_a_launched_run(show: Open, runs: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    known: dict[str, Any] = {"settings": {}, "cwd": "", "command": [], "nodes": 1, "processes": 1}
    identity = f"{child.pid}@{_started(child.pid)}"
    (runs / "going.launch").mkdir()
    Launch(name="going", engine="local", identity=identity, **known).write(runs / "going.launch")
    try:
        assert not show("/runs/going").locator(".stop").is_visible()
        page = show(f"/runs/going#token={TOKEN}")
        assert page.url.endswith("/runs/going"), "the token stays in no address"
        page.on("dialog", lambda asked: asked.accept())
        page.click("text=Stop going")
        page.wait_for_selector("text=was asked to end")
        assert child.wait(10) < 0
    finally:
        child.kill()
        shutil.rmtree(runs / "going.launch")


def test_pages_are_whole_without_scripts(show: Open) -> None:
    page = show("/runs/won", java_script_enabled=False)
    page.click("text=What was predicted of its plan")
    page.wait_for_selector("text=Nothing is predicted")
    page.click("text=Headrace")
    assert "Reached 2.2 bits per byte" in page.inner_text("main")


def test_the_verb_serves_until_ctrl_c(runs: Path) -> None:
    command = [sys.executable, "-m", "headrace", "ui", str(runs), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        said = "".join(iter(served.stdout.readline, "}\n")) + "}"
        where = json.loads(said)["address"]
        with urlopen(where) as answer:
            assert b"/runs/won" in answer.read()
        served.send_signal(signal.SIGINT)
        assert served.wait(20) == 0
