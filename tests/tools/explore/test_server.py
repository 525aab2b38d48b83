"""The server: which requests it answers, which files it serves, what it refuses."""

import asyncio
import json
import re
import stat
import sys
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from jaxdp_episodic.tools import cli
from jaxdp_episodic.tools.explore import questions

pytest.importorskip("starlette", reason="the extra [explore] is not installed")
pytest.importorskip("uvicorn", reason="the extra [explore] is not installed")

from jaxdp_episodic.tools.explore import server

START = questions.start(None)
JSON = {"content-type": "application/json"}
QUESTION = {"request": {**START["request"], "method": "rdp"}, "epsilon": 2}


class Here:
    """A worker that runs in the test's process."""

    async def ask(self, question, is_given_up):
        return json.dumps(questions.reply(question), allow_nan=False).encode()


def call(
    path, *, body=None, headers=None, host="127.0.0.1:8000", gone=False, new_worker=Here
):
    """Calls the application as a WSGI server does; returns (status, headers, body)."""
    sent, chunks = [], [b"" if body is None else body]

    async def receive():
        if chunks:
            return {"type": "http.request", "body": chunks.pop(), "more_body": False}
        if not gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    named = {"host": host, **(headers or {})}
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in named.items()],
    }
    asyncio.run(server.application(START, "secret", new_worker)(scope, receive, send))
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent)


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


def test_every_file_of_the_page_is_in_its_list():
    folder = resources.files("jaxdp_episodic.tools.explore") / "page"
    served = {name for name, _ in server._PAGES.values()}
    assert {file.name for file in folder.iterdir()} == served


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
        (b"{", JSON),
        (b'{"request": NaN}', JSON),
        (b"[" * 100_000, JSON),
        (b" " * (2**22 + 1), JSON),
    ],
)
def test_invalid_questions_are_refused(body, headers):
    assert post("epsilon", body, headers=headers)[0] == 400


# --- Connections ---


def test_slow_connections_are_closed(monkeypatch):
    """Half-sent headers and bodies time out; other requests are answered meanwhile."""
    uvicorn = pytest.importorskip("uvicorn")
    monkeypatch.setattr(server, "_ARRIVAL_SECONDS", 0.5)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    async def sent(port, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def go():
        config = uvicorn.Config(
            app, http=server._protocol(), lifespan="off", log_config=None, port=0
        )
        one = uvicorn.Server(config)
        task = asyncio.create_task(one.serve())
        while not one.started:
            await asyncio.sleep(0.01)
        port = one.servers[0].sockets[0].getsockname()[1]
        texts = (b"", head, head + b"\r\nx", head + b"Connection: close\r\n\r\nxy")
        answers = await asyncio.gather(*(sent(port, text) for text in texts))
        one.should_exit = True
        await task
        return answers

    *late, whole = asyncio.run(go())
    assert late == [b"", b"", b""]
    assert whole.startswith(b"HTTP/1.1 204")


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

    def asked(*seconds, waits=lambda place: True, is_over=lambda: False):
        async def go():
            one = server.Worker(is_over)
            answers = []
            for place, line in enumerate(seconds):

                async def gone(place=place):
                    return not waits(place)

                answers.append(await one.ask(f"{line}\n".encode(), gone))
            await one.end()
            return answers

        return asyncio.run(go())

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
    over = iter([False, False, True])  # the server ends
    assert ask(3600, is_over=lambda: next(over)) == [None]
    died, next_one = ask(-1, 0)
    assert "died" in json.loads(died)["error"]["message"] and next_one == b"0\n"
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.1)
    late, next_one = ask(3600, 0)
    assert "not answered within 60 seconds" in json.loads(late)["error"]["message"]
    assert next_one == b"0\n"


def test_the_workers_program_answers():
    line = json.dumps(["epsilon", QUESTION]).encode() + b"\n"

    async def go():
        one = server.Worker(lambda: False)
        try:
            return await one.ask(line, lambda: asyncio.sleep(0, False))
        finally:
            await one.end()

    assert json.loads(asyncio.run(go())) == json.loads(
        asyncio.run(Here().ask(line, None))
    )


def test_a_cancelled_question_is_answered_204():
    class GivenUp:
        async def ask(self, question, is_given_up):
            return b"1" if not await is_given_up() else None

    assert post("epsilon", QUESTION, gone=True, new_worker=GivenUp)[0] == 204
    assert post("epsilon", QUESTION, new_worker=GivenUp)[0] == 200


def test_a_port_that_cannot_be_is_refused(capsys):
    assert cli.run(["explore", "--no-browser", "--port", "99999"]) == 2
    assert "--port must be in 0-65535, got 99999" in capsys.readouterr().err


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
