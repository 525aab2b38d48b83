"""Serves the page and its answers to this machine, at a secret address."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any

from jaxdp_episodic.files.json_file import parse_json
from jaxdp_episodic.tools.explore.questions import PARTS

_ADDRESS = "127.0.0.1"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
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
_PROGRAM = (sys.executable, "-P", "-m", "jaxdp_episodic.tools.explore.questions")
_TIMEOUT_S = 60.0  # for an answer
_GRACE_S = 1.0  # for a question that the page gave up, before its process is killed
_POLL_S = 0.1  # between checks whether the page still waits
_TOO_LONG = (
    f"not answered within {_TIMEOUT_S:.0f} seconds; `calibrate` and `curve` on the "
    "command line have no limit"
)


class Server(socketserver.ThreadingTCPServer):
    """Answers each connection in a thread of its own."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


def serve(start: dict[str, Any], *, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves the page to this machine until the process is interrupted."""
    secret, workers = secrets.token_urlsafe(16), (Worker(), Worker())
    with Server((_ADDRESS, port), handler(start, secret, *workers)) as server:
        try:
            for worker in workers:
                worker.start()
            on_ready(f"http://{_ADDRESS}:{server.server_address[1]}/{secret}/")
            server.serve_forever()
        finally:
            for worker in workers:
                worker.end()


def handler(
    start: dict[str, Any], secret: str, number: Any, pictures: Any
) -> type[BaseHTTPRequestHandler]:
    """Returns the handler of requests; all of its addresses begin with ``/secret/``."""
    folder = resources.files("jaxdp_episodic.tools.explore") / "page"
    pages = {}
    for file in folder.iterdir():
        if kind := _TYPES.get(file.name.partition(".")[2]):  # no file of an editor
            pages[f"/{secret}/{file.name}"] = file.read_bytes(), kind
    pages[f"/{secret}/"] = pages.pop(f"/{secret}/index.html")
    pages[f"/{secret}/start"] = json.dumps(start).encode(), "application/json"

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            end = self.connection.shutdown
            self.arrival = threading.Timer(_ARRIVAL_SECONDS, end, [socket.SHUT_RDWR])
            self.arrival.daemon = True
            self.arrival.start()
            with contextlib.suppress(OSError):  # the page has left
                super().handle()
            self.arrival.cancel()

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            # An attacker may point another host name here (DNS rebinding).
            host = self.headers.get("host", "").partition(":")[0]
            if host in (_ADDRESS, "localhost"):
                return True
            self.reply(400, b"no such host")
            return False

        def do_GET(self) -> None:
            found = pages.get(self.path)
            self.reply(200, *found) if found else self.reply(404, b"no such page")

        def do_POST(self) -> None:
            part = self.path.removeprefix(f"/{secret}/answer/")
            if part not in PARTS:
                self.reply(404, b"no such part")
                return
            try:
                asked = json.dumps([part, self.question()], allow_nan=False)
            except ValueError as error:
                self.reply(400, str(error).encode())
                return
            # Numbers have a worker of their own, so they never wait for pictures.
            worker = number if part in ("epsilon", "toml") else pictures
            found = worker.ask(asked.encode() + b"\n", self.has_left)
            if found is not None:
                self.reply(200, found, "application/json")

        def question(self) -> Any:
            length = self.headers.get("content-length", "")
            if not length.isdecimal() or int(length) > _MAX_QUESTION_BYTES:
                raise ValueError(
                    f"a question must have at most {_MAX_QUESTION_BYTES} bytes"
                )
            body = self.rfile.read(int(length))
            self.arrival.cancel()
            # Pages of other sites may not send this content type (CORS).
            if self.headers.get("content-type") != "application/json":
                raise ValueError("a question must be application/json")
            return parse_json(body, allow_infinity=False)

        def has_left(self) -> bool:
            self.connection.settimeout(0)
            try:
                return not self.connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # nothing is sent, nor is the connection closed
                return False
            except OSError:
                return True
            finally:
                self.connection.settimeout(None)

        def reply(self, status: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response_only(status)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *message: Any) -> None:
            """Prints nothing: the address is secret."""

    return Handler


class Worker:
    """A process that answers questions in turn, and is killed if one takes too long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the process, started if there is none."""
        if self._process is None or self._process.poll() is not None:
            self.end()
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(_PROGRAM, stdin=pipe, stdout=pipe)
        return self._process

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError), self._process:  # closes its pipes
                self._process = None

    def ask(self, question: bytes, is_given_up: Callable[[], bool]) -> bytes | None:
        """Returns the answer to a question, or None if it was given up."""
        with self._lock:
            if is_given_up():  # for a newer question, during the wait for the lock
                return None
            process, lines = self.start(), []
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):  # it died; then there is no answer
                process.stdin.write(question)
                process.stdin.flush()
            read = process.stdout.readline
            reading = threading.Thread(target=lambda: lines.append(read()), daemon=True)
            reading.start()
            has_left, end = False, time.monotonic() + _TIMEOUT_S
            while reading.is_alive():
                if not has_left and is_given_up():
                    has_left, end = True, time.monotonic() + _GRACE_S
                if time.monotonic() > end:
                    self.end()
                    return None if has_left else _error(_TOO_LONG)
                reading.join(_POLL_S)
            if not lines[0]:
                self.end()
                return _error("the computation died, perhaps for lack of memory")
            return None if has_left else lines[0]


def _error(message: str) -> bytes:
    return json.dumps({"error": {"place": "", "message": message}}).encode()
