"""The page's server: this machine's own browser, under a secret address, and no files.

Four texts of the package are served, and answers to questions; nothing is read from
the disk once it has started.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from importlib import resources
from typing import Any

from jaxdp_episodic.explore.questions import (
    PARTS,
    answer,
    hear_warnings,
    request_toml,
)
from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.files.optional import require

_ADDRESS = "127.0.0.1"
_PAGES = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "form.js": ("form.js", "text/javascript"),
    "chart.js": ("chart.js", "text/javascript"),
}
_HEADERS = {
    # Nothing from elsewhere, neither shown nor asked.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src "
    "'self'; connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action "
    "'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_LONGEST_QUESTION = 2**22  # bytes


def serve(
    start: dict[str, Any], *, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serves the page to this machine until the process is interrupted.

    Args:
      start: what the page begins with, see `questions.start`.
      port: 0: a free one.
      on_ready: called with the page's address once it can be opened.

    Raises:
      ImportError: Starlette or uvicorn, of the extra ``[explore]``, is not installed.
      OSError: the port is taken.
      OverflowError: there is no such port.
    """
    uvicorn = _need("uvicorn")
    secret = secrets.token_urlsafe(16)
    app = application(start, secret)
    hear_warnings()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen()
        on_ready(f"http://{_ADDRESS}:{listener.getsockname()[1]}/{secret}/")
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])


def application(start: dict[str, Any], secret: str) -> Any:
    """Returns the ASGI application whose addresses all begin with ``/secret/``."""
    routing = _need("starlette.routing")
    responses = _need("starlette.responses")
    middleware = _need("starlette.middleware")
    trustedhost = _need("starlette.middleware.trustedhost")
    applications = _need("starlette.applications")

    def send(content: str | bytes, media_type: str, status: int = 200) -> Any:
        return responses.Response(content, status, _HEADERS, media_type)

    def send_json(value: Any) -> Any:
        return send(json.dumps(value, allow_nan=False), "application/json")

    def page(name: str, media_type: str) -> Callable[[Any], Any]:
        folder = resources.files("jaxdp_episodic.explore") / "page"
        text = (folder / name).read_text(encoding="utf-8")

        async def sent(request: Any) -> Any:
            return send(text, media_type)

        return sent

    async def starting(request: Any) -> Any:
        return send_json(start)

    # A number never waits for a picture: the first part has a lane of its own.
    lanes = {part: asyncio.Semaphore(1) for part in ("epsilon", "others")}

    async def answered(request: Any) -> Any:
        part = request.path_params["part"]
        try:
            question = await _body(request)
        except ValueError as error:
            return send(str(error), "text/plain", 400)
        if part == "toml":
            return send_json(request_toml(question))
        if part not in PARTS:
            return send("no such part", "text/plain", 404)
        async with lanes.get(part, lanes["others"]):
            if await request.is_disconnected():  # a newer question has replaced it
                return send("", "text/plain", 204)
            return send_json(await asyncio.to_thread(answer, part, question))

    routes = [routing.Route(f"/{n}", page(*where)) for n, where in _PAGES.items()]
    routes.append(routing.Route("/start", starting))
    routes.append(routing.Route("/answer/{part}", answered, methods=["POST"]))
    # Another site's name that was made to lead here is not ours.
    hosts = middleware.Middleware(
        trustedhost.TrustedHostMiddleware, allowed_hosts=[_ADDRESS, "localhost"]
    )
    return applications.Starlette(
        routes=[routing.Mount(f"/{secret}", routes=routes)], middleware=[hosts]
    )


def _need(module: str) -> Any:
    return require(module, purpose="explore", extra="explore")


async def _body(request: Any) -> Any:
    """The question, which no other site's page can ask: JSON needs its permission.

    Raises:
      ValueError: not JSON, or too long.
    """
    if request.headers.get("content-type") != "application/json":
        raise ValueError("a question must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LONGEST_QUESTION:
            raise ValueError(f"a question must have at most {_LONGEST_QUESTION} bytes")
    return parse_json(bytes(body), allow_infinity=False)
