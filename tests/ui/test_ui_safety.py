"""The server answers this machine alone, reads the folder alone, runs nothing, and escapes all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import typer.testing
from hostile import hostile
from starlette.testclient import TestClient
from synthetic_run import TOKEN

from headrace.cli import ui as verb
from headrace.cli.app import app
from headrace.launch.local import _started
from headrace.launch.record import Launch
from headrace.ui import server
from headrace.ui.runs_folder import OutsideFolder, RunsFolder
from headrace.ui.server import HEADERS, make_app

Ask = Callable[..., Any]
MakeRun = Callable[..., Path]
EVIL = "</title><script>alert(1)</script>\"'><img src=x onerror=y><a href='javascript:z'>&#60;"


class Parsed(HTMLParser):
    """Hold the elements of a page and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def check(text: str, evil: bool = True) -> None:
    """Hold that a page loads from its server alone, and shows hostile text as text."""
    for name, attributes in Parsed(text).elements:
        assert name not in ("img", "iframe", "object", "embed", "base", "style")
        assert not [key for key in attributes if key.startswith("on")]
        if name == "script":
            assert attributes["src"] == "/page.js"
        for key in ("href", "src", "action", "data-live", "data-post"):
            if key in attributes:
                assert (attributes[key] or "").startswith(("/", "#", "data:,"))
    assert "<script>alert" not in text
    assert not evil or "&lt;script&gt;alert(1)" in text


def test_all_that_files_say_is_escaped(ask: Ask, make_run: MakeRun, runs: Path) -> None:
    name = EVIL.replace("/", "|")
    run, other = make_run(name, environment={"device": EVIL}, plan=f"# {EVIL}"), make_run("other")
    report = json.loads((run / "report.json").read_text())
    kept = {key: report[key] for key in ("status", "format")}
    (run / "report.json").write_text(json.dumps(hostile(report, EVIL) | kept))
    check(ask("/").text)
    at = quote(name, safe="")
    for path in (f"/runs/{at}", f"/compare?run=other&run={at}", f"/runs/{at}/forecast"):
        check(ask(path).text)
    (run / "report.json").unlink()
    check(ask(f"/runs/{at}").text)
    (other / "report.json").write_text(EVIL)
    check(ask("/").text)
    check(ask("/runs/other", 422).text, evil=False)
    check(ask("/runs/none%3Cscript%3Ealert(1)", 404).text)
    tuning = runs / "evil-tune"
    tuning.mkdir()
    (tuning / "tuned.toml").write_text(f"# {EVIL}\n")
    row = {"number": 1, "changes": [EVIL], "verdict": "kept", "reason": EVIL, "bought": EVIL}
    path = {"name": EVIL, "aim": EVIL, "path": [row], "left": [EVIL]}
    (tuning / "path.json").write_text(json.dumps(path))
    check(ask("/tunings/evil-tune").text)


def test_every_answer_has_the_headers(ask: Ask, make_run: MakeRun) -> None:
    make_run()
    for path, status in (("/", 200), ("/runs/demo", 200), ("/runs/no", 404), ("/nothing", 404)):
        headers = ask(path, status).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "unsafe-eval" not in policy and "style-src 'self';" in policy
    assert ask("/page.js").headers["content-type"].startswith("text/javascript")
    assert ask("/style.css").headers["content-type"].startswith("text/css")
    assert "http" not in ask("/page.js").text + ask("/style.css").text


def test_only_this_machine_is_answered(ask: Ask, runs: Path) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8642", ""):
        assert "Invalid host" in ask("/", 400, host=host).text
    for host in ("127.0.0.1:8642", "localhost:1"):
        ask("/", host=host)
    for site in ("cross-site", "same-site"):
        ask("/", 403, sec_fetch_site=site, sec_fetch_mode="no-cors")
    ask("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")  # a link from elsewhere
    ask("/", sec_fetch_site="same-origin", sec_fetch_mode="cors")


@pytest.mark.parametrize("name", ["%2e%2e", "%2e%2e%2fsecret", "..%5csecret", ".", "%00"])
def test_no_name_leads_out_of_the_folder(ask: Ask, make_run: MakeRun, name: str) -> None:
    secret = make_run().parents[1] / "secret"
    secret.mkdir()
    (secret / "plan.toml").write_text("hidden = 1")
    for where in (f"/runs/{name}", f"/runs/{name}/live", f"/tunings/{name}"):
        answer = ask(where, 404)
        assert "hidden" not in answer.text
    both = ask(f"/compare?run=demo&run={name}", 404).text
    assert "hidden" not in both and "does not lie in" in both


def test_a_name_is_one_part_of_a_path(make_run: MakeRun, runs: Path) -> None:
    run, folder = make_run(), RunsFolder(runs)
    assert folder.find("demo") == run and folder.names() == ["demo"]
    for name in ("", ".", "..", "../runs/demo", "demo/../demo", str(run), "demo\0", "demo/"):
        with pytest.raises(OutsideFolder):
            folder.find(name)


def test_no_link_leads_out_of_the_folder(ask: Ask, make_run: MakeRun, runs: Path) -> None:
    outside = runs.parent / "outside"
    outside.mkdir()
    (outside / "plan.toml").write_text("hidden = 1")
    (outside / "rows").write_text("hidden rows\n")
    (runs / "linked").symlink_to(outside)
    ask("/runs/linked", 404)
    run = make_run()
    for name in ("metrics.jsonl", "report.json", "findings.json", "environment.json"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "rows")
        page = ask("/runs/demo", 404).text
        assert "is a link out of" in page and "hidden" not in page
        assert "is a link out of" in ask("/").text
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    assert "linked" not in ask("/").text
    os.mkfifo(run / "findings.json")
    assert "is no regular file" in ask("/runs/demo", 422).text


def test_relatives_outside_of_the_folder_are_not_read(
    ask: Ask, make_run: MakeRun, runs: Path
) -> None:
    parent = make_run("parent")
    outside = runs.parent / "elsewhere"
    parent.rename(outside)
    make_run("child", environment={"parent": {"run": str(outside), "step": 10}})
    assert "Family" not in ask("/runs/child").text
    outside.rename(runs / "parent")
    make_run("son", environment={"parent": {"run": str(runs / "parent"), "step": 10}})
    assert "Family" in ask("/runs/son").text


def test_a_file_too_large_to_read_is_refused(
    ask: Ask, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    monkeypatch.setattr("headrace.ui.runs_folder.LARGEST_BYTES", 10)
    assert "a page reads up to 10" in ask("/runs/demo", 422).text


def test_a_run_is_stopped_only_with_the_token(make_run: MakeRun, runs: Path) -> None:
    make_run()
    reads = TestClient(make_app(runs), base_url="http://127.0.0.1")
    answer = reads.post("/runs/demo/stop", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 403 and "started without --token" in answer.json()["error"]
    assert reads.get("/runs/demo/stop").status_code == 405
    acts = TestClient(make_app(runs, TOKEN), base_url="http://127.0.0.1")
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN + "x"}):
        assert acts.post("/runs/demo/stop", headers=given).status_code == 403
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert acts.post("/runs/..%2fx/stop", headers=right).status_code == 404
    answer = acts.post("/runs/demo/stop", headers=right)
    assert answer.status_code == 422 and "headrace launch" in answer.json()["error"]
    (runs / "demo.launch").mkdir()
    (runs / "demo.launch" / "launch.json").write_text("{")
    assert "damaged" in acts.post("/runs/demo/stop", headers=right).json()["error"]


def test_a_launched_run_is_asked_to_end(make_run: MakeRun, runs: Path) -> None:
    (make_run() / "report.json").unlink()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = f"{child.pid}@{_started(child.pid)}"
    known: dict[str, Any] = {"settings": {}, "cwd": "", "command": [], "nodes": 1, "processes": 1}
    record = Launch(name="demo", engine="local", identity=identity, **known)
    (runs / "demo.launch").mkdir()
    record.write(runs / "demo.launch")
    acts = TestClient(make_app(runs, TOKEN), base_url="http://127.0.0.1")
    page = acts.get("/runs/demo").text
    assert 'data-post="/runs/demo/stop"' in page and TOKEN not in page
    right = {"Authorization": f"Bearer {TOKEN}"}
    try:
        assert "was asked to end" in acts.post("/runs/demo/stop", headers=right).json()["said"]
        assert child.wait(10) < 0
        assert "had ended already" in acts.post("/runs/demo/stop", headers=right).json()["said"]
    finally:
        child.kill()
    wild = record.model_copy(update={"identity": "none@1"})
    wild.write(runs / "demo.launch")
    answer = acts.post("/runs/demo/stop", headers=right)
    assert answer.status_code == 422 and "launch.json" in answer.json()["error"]
    assert (
        "data-post"
        not in TestClient(make_app(runs), base_url="http://127.0.0.1").get("/runs/demo").text
    )


def call(*argv: str, code: int) -> Any:
    """Return the JSON document of the verb."""
    ended = typer.testing.CliRunner().invoke(app, ["ui", *argv, "--json"], prog_name="headrace")
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


def test_the_verb_says_where_it_listens(
    make_run: MakeRun, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run()
    served: list[tuple[Any, str]] = []

    def serve(made: Any, opened: Any) -> None:
        client = TestClient(made, base_url="http://127.0.0.1")
        served.append((opened.getsockname(), client.get("/").text))
        taken = call(str(runs), "--port", str(opened.getsockname()[1]), code=2)
        assert "cannot be taken" in taken["error"] and "--port 0" in taken["remedy"]
        opened.close()

    monkeypatch.setattr(server, "serve", serve)
    said = call(str(runs), "--port", "0", "--token", code=0)
    (address, page), token = served[0], said["token"]
    assert address[0] == "127.0.0.1" and "/runs/demo" in page and token not in page
    assert said["address"] == f"http://127.0.0.1:{address[1]}/#token={token}"
    assert len(token) >= 32
    assert call(str(runs), "--port", "0", code=0)["token"] is None


def test_the_verb_refuses_what_others_could_reach(
    runs: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        said = call(str(runs), "--host", host, code=2)
        assert "on this machine alone" in said["error"] and "ssh -L" in said["error"]
        assert said["remedy"].endswith("--host 127.0.0.1")
    assert "does not exist" in call(str(runs / "none"), code=2)["error"]
    plan = make_run() / "plan.toml"
    said = call(str(plan), code=2)
    assert "is a file" in said["error"] and said["remedy"] == f"headrace ui {plan.parent}"
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    said = call(str(runs), code=3)
    assert "starlette and uvicorn" in said["error"]
    assert said["remedy"] == "pip install 'headrace[ui]'"
