"""The server: which requests it answers, which files it serves, what it refuses."""

import contextlib
import http.client
import json
import re
import socket
import stat
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.explore import questions, server

START = questions.start(None)
JSON = {"content-type": "application/json"}
QUESTION = {"request": {**START["request"], "method": "rdp"}, "epsilon": 2}


class Here:
    """A worker that runs in the test's process."""

    def ask(self, question, is_given_up):
        return json.dumps(questions.reply(question), allow_nan=False).encode()


@contextlib.contextmanager
def listening(worker):
    """The address of a server that runs in a thread."""
    handler = server.handler(START, "secret", worker, worker)
    with server.Server(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield listener.server_address
        finally:
            listener.shutdown()
            thread.join()


def call(path, *, body=None, headers=None, host="127.0.0.1:8000"):
    """Sends a request; returns (status, headers, body)."""
    with listening(Here()) as address:
        connection = http.client.HTTPConnection(*address)
        named = {"Host": host, **(headers or {})}
        connection.request("GET" if body is None else "POST", path, body, named)
        found = connection.getresponse()
        content = found.read()
        connection.close()
    return found.status, {k.lower(): v for k, v in found.getheaders()}, content


def post(part, question, **options):
    body = question if isinstance(question, bytes) else json.dumps(question).encode()
    return call(f"/secret/answer/{part}", body=body, **{"headers": JSON, **options})


def test_the_page_loads_nothing_from_other_hosts():
    for name in ("", "style.css", "page.js", "form.js", "chart.js", "help.html"):
        status, headers, body = call(f"/secret/{name}")
        assert status == 200 and body
        assert "default-src 'none'" in headers["content-security-policy"]
        addresses = set(re.findall(rb"(?:https?:)?//[\w.]+\.\w+", body))
        assert addresses <= {b"http://www.w3.org"}  # the SVG namespace, never requested
        assert b"@import" not in body
    assert json.loads(call("/secret/start")[2]) == START


@pytest.mark.parametrize("part", ["epsilon", "run", "toml"])
def test_questions_are_answered(part):
    status, _, body = post(part, QUESTION)
    assert status == 200
    assert json.loads(body) == json.loads(json.dumps(questions.answer(part, QUESTION)))
    assert post("answer", QUESTION)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "10.0.0.1", ""])
def test_other_names_are_refused(host):
    """A foreign host name that resolves to this machine: DNS rebinding."""
    for path in ("/secret/", "/secret/start"):
        status, _, body = call(path, host=host)
        assert status == 400 and b"Explore" not in body
    assert post("epsilon", QUESTION, host=host)[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        "/wrong/start",
        "/secret/../questions.py",
        "/secret//etc/passwd",
        "/secret/..%2f..%2fpyproject.toml",
        "/secret/answer/epsilon",  # requested by GET
    ],
)
def test_other_paths_are_refused(path):
    assert call(path)[0] in (404, 405)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (QUESTION, {"content-type": "text/plain"}),  # what a page of any site may send
        *((b, JSON) for b in (b"{", b'{"request": NaN}', b'{"request": 1e999}')),
        (b"[" * 100_000, JSON),
        (b"", {**JSON, "content-length": str(2**22 + 1)}),
        (b"", {**JSON, "content-length": "-1"}),
    ],
)
def test_invalid_questions_are_refused(body, headers):
    assert post("epsilon", body, headers=headers)[0] == 400


# --- Connections ---


def test_slow_connections_are_closed(monkeypatch):
    """Half-sent headers and bodies time out; other requests are answered meanwhile."""
    monkeypatch.setattr(server, "_ARRIVAL_SECONDS", 0.5)
    body = json.dumps(QUESTION).encode()
    head = (
        "POST /secret/answer/toml HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    ).encode()
    sent = (b"", head, head + b"\r\n{", head + b"\r\n" + body)
    with listening(Here()) as address, contextlib.ExitStack() as open_ones:
        answers = []
        for text in sent:
            one = open_ones.enter_context(socket.create_connection(address, 30))
            one.sendall(text)
            answers.append(one.makefile("rb"))
        *late, whole = [answer.read() for answer in reversed(answers)][::-1]
    assert late == [b"", b"", b""]
    assert whole.startswith(b"HTTP/1.0 200 OK")


def test_a_question_is_given_up_when_its_connection_is_closed():
    asked, given_up = threading.Event(), threading.Event()

    class GivenUp:
        def ask(self, question, is_given_up):
            assert not is_given_up()
            asked.set()
            while not is_given_up():
                pass
            given_up.set()

    with listening(GivenUp()) as address:
        connection = http.client.HTTPConnection(*address)
        connection.request("POST", "/secret/answer/toml", json.dumps(QUESTION), JSON)
        assert asked.wait(30)
        connection.close()
        assert given_up.wait(30)


# --- Workers: a stand-in program, which is told how long to take ---

SLEEPER = """
import sys, time
for line in sys.stdin:
    time.sleep(float(line)) if float(line) >= 0 else sys.exit(1)
    print(line.strip(), flush=True)
"""


@pytest.fixture
def ask(monkeypatch):
    """Asks a worker several questions in turn; returns the answers."""
    monkeypatch.setattr(server, "_PROGRAM", (sys.executable, "-S", "-c", SLEEPER))
    monkeypatch.setattr(server, "_GRACE_S", 0.2)
    monkeypatch.setattr(server, "_POLL_S", 0.02)

    def asked(*seconds, waits=lambda place: True):
        one = server.Worker()
        answers = [
            one.ask(f"{line}\n".encode(), lambda place=place: not waits(place))
            for place, line in enumerate(seconds)
        ]
        one.end()
        return answers

    return asked


def test_a_worker_answers_one_question_after_the_other(ask, monkeypatch):
    assert ask(0, 0.05, 0) == [b"0\n", b"0.05\n", b"0\n"]
    # A question cancelled in the queue costs nothing; a running one is killed.
    assert ask(3600, 0, waits=lambda place: place > 0) == [None, b"0\n"]
    begun = []

    def waits(place):
        begun.append(place)
        return place > 0 or begun.count(0) == 1  # cancelled while it was computed

    assert ask(3600, 0, waits=waits) == [None, b"0\n"]
    died, next_one = ask(-1, 0)
    assert "died" in json.loads(died)["error"]["message"] and next_one == b"0\n"
    monkeypatch.setattr(server, "_TIMEOUT_S", 2.0)  # a start may take 1 s
    late, next_one = ask(3600, 0)
    assert "not answered within 60 seconds" in json.loads(late)["error"]["message"]
    assert next_one == b"0\n"


def test_the_workers_program_answers():
    line, one = json.dumps(["epsilon", QUESTION]).encode() + b"\n", server.Worker()
    answer = one.ask(line, lambda: False)
    one.end()
    assert json.loads(answer) == json.loads(Here().ask(line, None))


def test_the_secret_is_not_on_a_command_line(monkeypatch, capsys):
    """The browser opens a file that only its owner can read and that redirects."""
    secret = "http://127.0.0.1:8000/secret/"
    opened = []

    def browser(address):
        page = Path(url2pathname(urlsplit(address).path))
        assert secret not in address
        assert urlsplit(address).scheme == "file"
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
        assert stat.S_IMODE(page.parent.stat().st_mode) == 0o700
        opened.append((page, page.read_text()))

    def serve(start, *, port, on_ready):
        on_ready(secret)
        raise KeyboardInterrupt

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("jaxdp_episodic.tools.cli.pictures.serve", serve)
    monkeypatch.setattr("webbrowser.open", browser)
    assert cli.run(["explore"]) == 0
    ((page, text),) = opened
    assert f'http-equiv="refresh" content="0; url={secret}"' in text
    assert not page.parent.exists()
    assert capsys.readouterr().out == f"explore: {secret} (Ctrl-C ends it)\nended\n"
    assert cli.run(["explore", "--no-browser"]) == 0
    assert len(opened) == 1
