"""A worker process that may hang, crash or babble, and is then ended and started anew.

The library it runs can do all of that (and write past its buffers), so nothing of it is run in the process that trains.
Requests and replies are lines of JSON, one reply to a request, told apart from noise by its number.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any

WORKER = [sys.executable, "-P", "-m", f"{__package__}.worker"]
KILL_SECONDS = 30.0
"""A process whose device is stuck may take this long to go; one that stays is left behind and none is started again."""

_End = None  # what stands in the queue of replies when there will be no more


class Died(Exception):
    """The child is gone; why, in words."""


class Child:
    """Ask it; it runs from the first question on. A context manager: leaving it ends the process."""

    def __init__(self, command: list[str]):
        self.command = command
        self.has_answered = False
        self._lost = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            Died: no reply came within `seconds`, or the child ended. The next request starts a fresh one.
        """
        if self._lost:
            raise Died(self._lost)
        self._number += 1
        try:
            if self._process is None:
                self._start()
            self._process.stdin.write(
                json.dumps({"number": self._number, "seconds": seconds, **request}).encode() + b"\n"
            )
            self._process.stdin.flush()
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._stop()
            raise Died(f"no answer within {seconds:g} s") from None
        except OSError as error:
            raise Died(self._obituary() or f"it cannot be run: {error}") from None
        if reply is _End:
            raise Died(self._obituary())
        self.has_answered = True
        return reply

    def _start(self) -> None:
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in a terminal then reaches this process alone, which ends the child
        )
        # Reading in threads is what gives a wait a time limit on every system.
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._said: deque[bytes] = deque(maxlen=20)
        self._readers = [
            threading.Thread(target=_read, args=(self._process.stdout, self._number, self._replies), daemon=True),
            threading.Thread(target=_listen, args=(self._process.stderr, self._said), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _obituary(self) -> str:
        """How a child that is no longer there came to its end."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(5)
            how = f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        except (subprocess.TimeoutExpired, ValueError):
            how = "it hung up"
        self._stop()
        said = b"".join(self._said).decode(errors="replace").strip().splitlines()
        return f"{how}: {said[-1][:300]}" if said else how

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(KILL_SECONDS)
            for reader in self._readers:
                reader.join(1)
        except subprocess.TimeoutExpired:
            self._lost = f"the worker did not go away in {KILL_SECONDS:g} s after it was killed: the device seems stuck"
        finally:
            with contextlib.suppress(OSError):  # a request that was never read
                process.stdin.close()


def _read(stream: IO[bytes], first: int, replies: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """Pass on the replies, in order, and drop everything else: libraries print, and a broken one prints garbage."""
    number = first
    with stream:
        while line := stream.readline(1 << 16):  # a limit, for garbage without line ends
            try:
                reply = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(reply, dict) and reply.get("number") == number and isinstance(reply.get("ok"), bool):
                number += 1
                replies.put(reply)
    replies.put(_End)


def _listen(stream: IO[bytes], said: deque[bytes]) -> None:
    """Keep the last that a child says on stderr, such as the error it dies of."""
    with stream:
        while line := stream.readline(1 << 12):
            said.append(line)
