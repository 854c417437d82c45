"""The server of pages: this machine's browsers only, or whoever knows the token in the address.

GET changes nothing; a POST must come from a page of this server. Pages ask nothing of another host, and run
no script but `live.js`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from qie.errors import QieError, UsageError
from qie.html_report.markup import Html, tag
from qie.watch.live_page import LivePage

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_PORT = 8765
PORTS = 20
"""So many are tried from the default one on."""
MOST_BODY_BYTES = 1 << 16
STYLES = (("qie.html_report", "page.css"), ("qie.watch", "live.css"), ("qie.watch", "precompute.css"))

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def require_server() -> None:
    """Raises UsageError when the libraries of the server are not installed."""
    try:
        import starlette
        import uvicorn  # noqa: F401

        del starlette
    except ImportError as error:
        raise UsageError(
            "the page needs a library that is not installed", found=str(error), hint="pip install 'qie[watch]'"
        ) from error


def make_app(pages: Sequence[LivePage], token: str | None = None) -> ASGIApp:
    """The server of some pages, under /TOKEN/ if there is a token, else for names of this machine alone."""
    from starlette.applications import Starlette
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import RedirectResponse, Response
    from starlette.routing import Mount, Route

    style = b"\n".join(files(room).joinpath(name).read_bytes() for room, name in STYLES)
    script = files("qie.watch").joinpath("live.js").read_bytes()

    def static(content: bytes, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(content, media_type=kind)

    routes: list[Any] = [
        Route("/", lambda request: RedirectResponse(f"{pages[0].name}/")),
        Route("/live.css", static(style, "text/css")),
        Route("/live.js", static(script, "text/javascript")),
    ]
    routes += [Mount(f"/{page.name}", routes=_routes(page, pages)) for page in pages]
    inner: Starlette = Starlette(routes=[Mount(f"/{token}" if token else "", routes=routes)])
    return _Guard(GZipMiddleware(inner, minimum_size=2000), token)


def _routes(page: LivePage, pages: Sequence[LivePage]) -> list[Any]:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    def whole(_: Request) -> Response:
        return HTMLResponse(_document(page, pages))

    def parts(request: Request) -> Response:
        facts = page.facts()
        return _unless_known(request, JSONResponse({"title": page.title(facts), "parts": dict(page.render(facts))}))

    def facts(_: Request) -> Response:
        return JSONResponse(page.facts())

    def picture(request: Request) -> Response:
        found = page.picture(request.path_params["name"])
        # A browser asks each time whether it has changed: another run may be shown under this address tomorrow.
        kept = {"Cache-Control": "private, no-cache"}
        if found is None:
            return Response("no such picture", 404)
        return _unless_known(request, Response(found.content, media_type=found.kind, headers=kept))

    async def do(request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
            action, values = asked["action"], asked.get("values") or {}
            if not isinstance(action, str) or not isinstance(values, dict):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": "not a request of this page"}, 400)
        try:
            return JSONResponse({"said": await run_in_threadpool(page.do, action, values)})
        except QieError as error:
            return JSONResponse({"error": str(error)}, 409)
        except OSError as error:
            return JSONResponse({"error": f"the system refused: {error.strerror or error}"}, 409)

    return [
        Route("/", whole),
        Route("/parts.json", parts),
        Route("/facts.json", facts),
        Route("/picture/{name:path}", picture),
        Route("/do", do, methods=["POST"]),
    ]


def _unless_known(request: Request, answer: Response) -> Response:
    """An answer; without its content where the browser has that already."""
    from starlette.responses import Response

    mark = f'"{hashlib.blake2b(bytes(answer.body), digest_size=12).hexdigest()}"'
    answer.headers["ETag"] = mark
    if request.headers.get("if-none-match") != mark:
        return answer
    kept = {"Cache-Control": answer.headers["Cache-Control"]} if "Cache-Control" in answer.headers else {}
    return Response(status_code=304, headers=kept | {"ETag": mark})


def _document(page: LivePage, pages: Sequence[LivePage]) -> str:
    """A page with the facts of now: it says everything without a script, too, until it is loaded again."""
    found = page.facts()
    links = [
        tag("a", one.heading, href=f"../{one.name}/", aria_current="page" if one is page else None) for one in pages
    ]
    parts = [tag("div", part, data_part=name) for name, part in page.render(found).items()]
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", page.title(found)),
        tag("link", rel="icon", href="data:,"),
        tag("link", rel="stylesheet", href="../live.css"),
        tag("script", src="../live.js", defer=""),
    )
    body = (
        tag("nav", *links, class_="pages") if len(pages) > 1 else Html(""),
        tag("main", *parts, id="parts"),
        tag("footer", tag("p", "", id="link", role="status")),
        tag("div", "", id="said", role="status", aria_live="polite"),
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


class _Guard:
    """Refuses what does not come from a page of this server; adds the headers that keep its pages to themselves."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope["method"], scope["path"], headers)
        if refused is None:
            await self._app(scope, receive, _with_headers(send))
            return
        from starlette.responses import PlainTextResponse

        status, words = refused
        await PlainTextResponse(words, status)(scope, receive, _with_headers(send))

    def _refusal(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._token is not None:
            given = f"{path}/".split("/")[1]
            if not secrets.compare_digest(given.encode(), self._token.encode()):
                return 403, "The address lacks its token: take the whole address that qie watch has printed.\n"
        elif not is_loopback(_name(host)):
            # Another page's name that was made to lead here (DNS rebinding) is not this machine's.
            return 403, f"Not for the name {host[:100]}: use 127.0.0.1, or run qie watch with --token.\n"
        if method in ("GET", "HEAD"):
            return None
        if int(headers.get("content-length", "0") or 0) > MOST_BODY_BYTES or "transfer-encoding" in headers:
            return 413, "too large\n"
        origin = headers.get("origin", "").partition("://")[2]
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if not host or origin != host or kind != "application/json":
            return 403, "Only this server's own pages may ask for that.\n"
        return None


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = message.get("headers", [])
            names = {name.lower() for name, _ in own}
            message["headers"] = [*own, *(header for header in added if header[0] not in names)]
        await send(message)

    return sending


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def is_loopback(name: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower().rstrip(".") == "localhost"


def listening(host: str, port: int | None) -> socket.socket:
    """A socket that listens on a port; without one, on the first free one from `DEFAULT_PORT` on.

    Raises:
        UsageError: the port is in use, or the address is not this machine's.
    """
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS) if port is None else (port,)
    refused: OSError | None = None
    for number in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            found = socket.socket(family, kind, protocol)
        except OSError as error:
            raise UsageError("no such address", where=f"--host {host}", found=error.strerror) from error
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(64)
        except OSError as error:
            found.close()
            refused = error
            continue
        return found
    assert refused is not None
    raise UsageError(
        "the page cannot be served there",
        where=f"{host}, port {port if port is not None else f'{ports[0]} to {ports[-1]}'}",
        found=refused.strerror,
        hint="another --port, or --port 0 for any free one",
    )


def address_of(at: socket.socket, host: str, token: str | None) -> str:
    """What one opens in a browser."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{name}:{at.getsockname()[1]}/" + (f"{token}/" if token else "")


def serve(app: ASGIApp, at: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    settings = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(settings).run(sockets=[at])
