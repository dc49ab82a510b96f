"""Steer a headless Chromium: its own protocol is spoken over a WebSocket of tornado."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.ioloop import IOLoop
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WAITS_S = 60.0
"""Seconds for which a page may take to show what is waited for, on a busy machine."""


class Tab:
    """Hold one page of a browser."""

    def __init__(self, loop: IOLoop, socket: WebSocketClientConnection) -> None:
        self._loop, self._socket, self._count = loop, socket, 0

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Return the browser's answer to one command of its protocol."""
        self._count += 1
        asked = self._count

        async def answered() -> dict[str, Any]:
            await self._socket.write_message(
                json.dumps({"id": asked, "method": method, "params": given})
            )
            while True:
                told = json.loads(await self._socket.read_message() or "{}")
                if told.get("id") == asked:
                    return told

        told = self._loop.run_sync(answered, timeout=WAITS_S)
        assert "error" not in told, told
        return told["result"]

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page."""
        told = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + WAITS_S
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression} was not true in {WAITS_S} s"
            time.sleep(0.05)
        return value

    def open(self, page: Path) -> None:
        """Open a file and wait until it is loaded."""
        self.ask("Page.navigate", url=page.as_uri())
        self.wait(f"document.readyState == 'complete' && location.href == {page.as_uri()!r}")

    def type(self, text: str) -> None:
        """Type a text into what has the focus, key by key."""
        for letter in text:
            self.ask("Input.dispatchKeyEvent", type="keyDown", text=letter, key=letter)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=letter)


@contextmanager
def browser(profile: Path, *options: str) -> Iterator[Tab]:
    """Start a Chromium of its own, and end it.

    Args:
        profile: an empty folder.
        options: more words of its command line.
    """
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", *options]
    command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    command += ["--remote-allow-origins=*"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        loop = IOLoop(make_current=False)
        try:
            assert process.stderr is not None
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, "Chromium ended before it listened"
                found = re.search(r"ws://([\d.:]+)/", line)
            pages = _pages(found[1])
            socket = loop.run_sync(lambda: websocket_connect(pages[0]["webSocketDebuggerUrl"]))
            tab = Tab(loop, socket)
            tab.ask("Page.enable")
            yield tab
        finally:
            process.terminate()
            process.wait(30)
            loop.close(all_fds=True)


def _pages(place: str) -> list[dict[str, Any]]:
    from urllib.request import urlopen

    with urlopen(f"http://{place}/json/list") as answer:
        return [page for page in json.load(answer) if page["type"] == "page"]
