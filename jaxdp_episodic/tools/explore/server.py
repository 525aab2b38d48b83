"""Serves the page and its answers to this machine, at a secret address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.files.optional import require
from jaxdp_episodic.tools.explore.questions import PARTS

_ADDRESS = "127.0.0.1"
_PAGES = {
    "": ("index.html", "text/html"),
    "style.css": ("style.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "form.js": ("form.js", "text/javascript"),
    "chart.js": ("chart.js", "text/javascript"),
    "help.html": ("help.html", "text/html"),
}
_HEADERS = {
    # Nothing is loaded from other sites, or sent to them.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src "
    "'self'; connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action "
    "'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_MAX_QUESTION_BYTES = 2**22  # of JSON, with the sizes of a population
# Seconds in which a request must arrive; half-sent ones would use up the descriptors.
_ARRIVAL_SECONDS = 10.0
# -P: nothing is imported from the current folder.
_PROGRAM = (sys.executable, "-P", "-m", "jaxdp_episodic.tools.explore")
_MAX_ANSWER_BYTES = 2**26  # of a line of JSON
_TIMEOUT_S = 60.0  # for an answer
_GRACE_S = 1.0  # for a question that the page gave up, before its process is killed
_POLL_S = 0.1  # between checks whether the page still waits
_TOO_LONG = (
    f"not answered within {_TIMEOUT_S:.0f} seconds; `calibrate` and `curve` on the "
    "command line have no limit"
)


def serve(start: dict[str, Any], *, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves the page to this machine until the process is interrupted."""
    uvicorn = _need("uvicorn")
    secret = secrets.token_urlsafe(16)
    config = uvicorn.Config(
        lambda: application(start, secret, lambda: Worker(lambda: server.should_exit)),
        factory=True,
        http=_protocol(),
        ws="none",
        lifespan="on",
        log_config=None,  # uvicorn's logging would replace the process's own
        log_level="warning",
        server_header=False,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen()
        on_ready(f"http://{_ADDRESS}:{listener.getsockname()[1]}/{secret}/")
        server.run(sockets=[listener])


def _protocol() -> type[Any]:
    """Uvicorn's protocol, with a time limit for a request to arrive."""
    h11_impl = _need("uvicorn.protocols.http.h11_impl")
    done = _need("h11").DONE

    class Protocol(h11_impl.H11Protocol):
        arrival: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is done and self.arrival is not None:
                self.arrival.cancel()
                self.arrival = None
            elif self.conn.their_state is not done and self.arrival is None:
                self.wait()

        def wait(self) -> None:
            self.arrival = self.loop.call_later(_ARRIVAL_SECONDS, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.arrival is not None:
                self.arrival.cancel()
            super().connection_lost(exc)

    return Protocol


def application(
    start: dict[str, Any], secret: str, new_worker: Callable[[], Worker]
) -> Any:
    """Returns the ASGI application; all of its addresses begin with ``/secret/``."""
    routing = _need("starlette.routing")
    responses = _need("starlette.responses")
    middleware = _need("starlette.middleware")
    trustedhost = _need("starlette.middleware.trustedhost")
    applications = _need("starlette.applications")

    def send(content: str | bytes, media_type: str, status: int = 200) -> Any:
        return responses.Response(content, status, _HEADERS, media_type)

    def page(name: str, media_type: str) -> Callable[[Any], Any]:
        folder = resources.files("jaxdp_episodic.tools.explore") / "page"
        text = (folder / name).read_text(encoding="utf-8")

        async def sent(request: Any) -> Any:
            return send(text, media_type)

        return sent

    async def starting(request: Any) -> Any:
        return send(json.dumps(start), "application/json")

    # Two processes, so that numbers never wait for pictures.
    number, pictures = new_worker(), new_worker()

    async def answered(request: Any) -> Any:
        part = request.path_params["part"]
        if part not in PARTS:
            return send("no such part", "text/plain", 404)
        try:
            line = json.dumps([part, await _question(request)]).encode() + b"\n"
        except ValueError as error:
            return send(str(error), "text/plain", 400)
        worker = number if part in ("epsilon", "toml") else pictures
        found = await worker.ask(line, request.is_disconnected)
        return send(found or b"", "application/json", 200 if found else 204)

    @contextlib.asynccontextmanager
    async def workers_open(app: Any) -> AsyncIterator[None]:
        await asyncio.gather(number.start(), pictures.start())
        yield
        await asyncio.gather(number.end(), pictures.end())

    routes = [routing.Route(f"/{n}", page(*where)) for n, where in _PAGES.items()]
    routes.append(routing.Route("/start", starting))
    routes.append(routing.Route("/answer/{part}", answered, methods=["POST"]))
    # Refuses other host names, which an attacker may have pointed here (DNS rebinding).
    hosts = middleware.Middleware(
        trustedhost.TrustedHostMiddleware, allowed_hosts=[_ADDRESS, "localhost"]
    )
    return applications.Starlette(
        routes=[routing.Mount(f"/{secret}", routes=routes)],
        middleware=[hosts],
        lifespan=workers_open,
    )


def _need(module: str) -> Any:
    return require(module, purpose="explore", extra="explore")


async def _question(request: Any) -> Any:
    """The question. Pages of other sites may not send this content type (CORS)."""
    if request.headers.get("content-type") != "application/json":
        raise ValueError("a question must be application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_QUESTION_BYTES:
            raise ValueError(
                f"a question must have at most {_MAX_QUESTION_BYTES} bytes"
            )
    return parse_json(bytes(body), allow_infinity=False)


# --- A process answers questions in turn, and is killed if one is too slow ---


class Worker:
    """A separate process, which can be killed in the middle of a long computation."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    async def start(self) -> Process:
        """Returns the process, started if there is none."""
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *_PROGRAM, stdin=PIPE, stdout=PIPE, limit=_MAX_ANSWER_BYTES
            )
        return self._process

    async def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.communicate()
            self._process = None

    async def ask(
        self, question: bytes, is_given_up: Callable[[], Awaitable[bool]]
    ) -> bytes | None:
        """Returns the answer to a question, or None if it was given up."""
        async with self._lock:
            if (
                await is_given_up()
            ):  # for a newer question, during the wait for the lock
                return None
            process = await self.start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(question)
            answer = asyncio.ensure_future(process.stdout.readline())
            begun = time.monotonic()
            left = None  # time at which the question was found to be given up
            while not (await asyncio.wait([answer], timeout=_POLL_S))[0]:
                now = time.monotonic()
                if left is None and await is_given_up():
                    left = now
                is_late = now - begun > _TIMEOUT_S
                if self._is_over() or is_late or (left and now - left > _GRACE_S):
                    answer.cancel()
                    await self.end()
                    return _error(_TOO_LONG) if is_late else None
            if not answer.result():
                await self.end()
                return _error("the computation died, perhaps for lack of memory")
            return None if left else answer.result()


def _error(message: str) -> bytes:
    return json.dumps({"error": {"place": "", "message": message}}).encode()
