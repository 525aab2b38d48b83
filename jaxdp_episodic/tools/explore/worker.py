"""Questions answered one after the other, those given up ended if they take long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable

# -P: nothing is imported from the folder that somebody happens to be in.
_PROGRAM = (sys.executable, "-P", "-m", "jaxdp_episodic.tools.explore")
_MAX_ANSWER_BYTES = 2**26  # a line of JSON
_TIMEOUT_S = 60.0  # of an answer that somebody waits for
_GRACE_S = 1.0  # that a question given up may still take before its process is killed
_POLL_S = 0.1  # between two looks whether somebody still waits
_TOO_LONG = (
    f"not answered within {_TIMEOUT_S:.0f} seconds; `calibrate` and `curve` on the "
    "command line take the time that it takes"
)


class Worker:
    """A process of its own: one that is in the middle of a long sum can be killed."""

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
        """Returns the answer to a question, or None if it was given up.

        Args:
          question: one line.
          is_given_up: says whether nobody waits for the answer any more.
        """
        async with self._lock:
            if await is_given_up():  # for a newer one, while it waited for the lock
                return None
            process = await self.start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(question)
            answer = asyncio.ensure_future(process.stdout.readline())
            begun = time.monotonic()
            left = None  # when somebody was seen to wait no more
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
