"""Serve the pages of `headrace ui` on a loopback address: routes, headers, and who may do what."""

import hashlib
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, HeadraceError, interpreting
from headrace.core.files import shell
from headrace.report.page import join
from headrace.report.style import STYLE
from headrace.ui.frame import POLICY, error_page
from headrace.ui.pages import Pages, RunEnded
from headrace.ui.runs_folder import OutsideFolder, RunsFolder

HOSTS = ("127.0.0.1", "localhost")
"""Names by which a browser on this machine may call the server."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""What every answer says of itself."""
READ_ONLY = "this server only reads: it was started without --token"
WRONG_TOKEN = "this needs the token that was printed when the server started"


class SafeAnswers:
    """Put the headers on every answer, and refuse what another site asks for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *known]
            await send(message)

        asked = {name: value for name, value in scope.get("headers", ())}
        site, mode = asked.get(b"sec-fetch-site", b""), asked.get(b"sec-fetch-mode", b"")
        if site in (b"cross-site", b"same-site") and mode != b"navigate":
            answer = Response("another site asked for this\n", 403, media_type="text/plain")
            await answer(scope, receive, sending)
            return
        await self.app(scope, receive, sending)


def make_app(folder: Path, token: str = "") -> Starlette:
    """Return the application that shows a folder of runs.

    Args:
        folder: the folder of runs.
        token: what a request must bear to stop a run; "" lets none.
    """
    pages = Pages(RunsFolder(folder), can_stop=bool(token))
    routes = Routes(pages, token)
    return Starlette(
        routes=[
            Route("/", routes.page(lambda request: pages.runs())),
            Route("/live/runs", routes.part(lambda request: pages.runs_part())),
            Route("/compare", routes.page(_compared(pages))),
            Route("/runs/{name}", routes.page(lambda r: pages.run(r.path_params["name"]))),
            Route("/runs/{name}/live", routes.part(lambda r: pages.run_part(_name(r)))),
            Route("/runs/{name}/forecast", routes.either(pages.forecast, pages.forecast_page)),
            Route("/runs/{name}/doctor", routes.either(pages.verdict, pages.verdict_page)),
            Route("/runs/{name}/stop", routes.stop, methods=["POST"]),
            Route("/tunings/{name}", routes.page(lambda r: pages.tuning(_name(r)))),
            Route("/style.css", _file("text/css", STYLE + _text("page.css"))),
            Route("/page.js", _file("text/javascript", _text("page.js"))),
        ],
        middleware=[
            Middleware(SafeAnswers),
            Middleware(TrustedHostMiddleware, allowed_hosts=[*HOSTS], www_redirect=False),
        ],
        exception_handlers={HTTPException: routes.no_page},
    )


class Routes:
    """Answer requests by pages, and errors by pages that say what is wrong."""

    def __init__(self, pages: Pages, token: str) -> None:
        self.pages, self.token = pages, token

    def page(self, make: Callable[[Request], str]) -> Callable[[Request], Response]:
        """Return what answers a request by a whole page."""

        def answer(request: Request) -> Response:
            try:
                with self._reading():
                    return _html(make(request))
            except HeadraceError as error:
                return _html(error_page(error, root=self.pages.folder.root), _status(error))

        return answer

    def part(self, make: Callable[[Request], list[Any]]) -> Callable[[Request], Response]:
        """Return what answers a request by a part of a page, or that it did not change."""

        def answer(request: Request) -> Response:
            try:
                with self._reading():
                    return _unless_known(request, join(make(request)))
            except HeadraceError as error:
                return _html(error.message, _status(error))

        return answer

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what the files of runs can make go wrong into one message."""
        root = self.pages.folder.root
        try:
            with interpreting(f"a file of a run in {root}", f"headrace report {shell(root)}/RUN"):
                yield
        except OSError as error:
            raise ConfigError(f"{root} cannot be read: {error}", f"ls -l {shell(root)}") from None

    def either(
        self, part: Callable[[str], str], page: Callable[[str], str]
    ) -> Callable[[Request], Response]:
        """Return what answers a request about a run: by a part for the page's script, or a page."""

        def answer(request: Request) -> Response:
            if request.headers.get("x-part"):
                return self.part(lambda r: [part(_name(r))])(request)
            return self.page(lambda r: page(_name(r)))(request)

        return answer

    def stop(self, request: Request) -> Response:
        """End a run that was launched, as `headrace stop` does, for who bears the token."""
        if not self.token:
            return JSONResponse({"error": READ_ONLY}, 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self.token.encode()):
            return JSONResponse({"error": WRONG_TOKEN}, 403)
        try:
            return JSONResponse({"said": self.pages.stop(_name(request))})
        except HeadraceError as error:
            problem = {"error": error.message, "remedy": error.remedy.text}
            return JSONResponse(problem, _status(error))

    def no_page(self, request: Request, raised: Exception) -> Response:
        """Answer a request for what no page is at."""
        code = raised.status_code if isinstance(raised, HTTPException) else 500
        words = "no page is here" if code == 404 else "this is not how the page is asked for"
        error = ConfigError(f"{request.url.path}: {words}", f"{request.base_url} lists the runs")
        return _html(error_page(error, root=self.pages.folder.root), code)


def _compared(pages: Pages) -> Callable[[Request], str]:
    return lambda request: pages.comparison(request.query_params.getlist("run"))


def _name(request: Request) -> str:
    return request.path_params["name"]


def _html(text: str, code: int = 200) -> Response:
    """Return HTML; text that a young model wrote may hold half a character."""
    return HTMLResponse(text.encode(errors="replace"), code)


def _unless_known(request: Request, part: str) -> Response:
    """Return a part of a page, or nothing where the browser has it already."""
    content = part.encode(errors="replace")
    known = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == known:
        return Response(status_code=304, headers={"etag": known})
    return HTMLResponse(content, headers={"etag": known})


def _status(error: HeadraceError) -> int:
    """Return the status of an answer that is an error."""
    if isinstance(error, RunEnded):
        return 410
    return 404 if isinstance(error, OutsideFolder) else 422


def _text(name: str) -> str:
    return resources.files("headrace.ui").joinpath(name).read_text(encoding="utf-8")


def _file(kind: str, text: str) -> Callable[[Request], Response]:
    return lambda request: Response(text, media_type=kind)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this machine's loopback address.

    Args:
        port: its port; 0 takes any that is free.

    Raises:
        ConfigError: another process has the port, or it is not ours to take.
    """
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((HOSTS[0], port))
        opened.listen()
    except OSError as error:
        opened.close()
        raise ConfigError(
            f"port {port} of {HOSTS[0]} cannot be taken: {error.strerror}",
            rerun_with("--port", "0", verb="ui"),
        ) from None
    return opened


def serve(app: Starlette, opened: socket.socket) -> None:
    """Serve until a signal ends the process."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[opened])
