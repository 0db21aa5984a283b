"""A worker process that may hang, crash or print garbage, and is then killed and started again.

cuSPARSELt can do all of that, and write past its buffers, so no candidate runs in the training process. Requests and
replies are lines of JSON, one reply per request; the request's number tells replies from other output.
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
"""A process whose device is stuck may take this long to end. One that stays is abandoned, and no other is started."""

_End = None  # in the queue of replies: there will be no more


class Died(Exception):
    """The child process ended; the message says how."""


class Child:
    """A worker process, started by the first request. A context manager: leaving it ends the process."""

    def __init__(self, command: list[str]):
        self.command = command
        self.has_answered = False
        self._lost = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr: deque[bytes] = deque(maxlen=20)
        self._readers: list[threading.Thread] = []

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
            stdin = self._start() if self._process is None else self._process.stdin
            assert stdin is not None
            stdin.write(json.dumps({"number": self._number, "seconds": seconds, **request}).encode() + b"\n")
            stdin.flush()
            reply = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._stop()
            raise Died(f"no answer within {seconds:g} s") from None
        except OSError as error:
            raise Died(self._how_it_ended() or f"it cannot be run: {error}") from None
        if reply is _End:
            raise Died(self._how_it_ended())
        self.has_answered = True
        return reply

    def last_output(self) -> str:
        """The last lines that the last process wrote to stderr."""
        return b"".join(self._stderr).decode(errors="replace")

    def _start(self) -> IO[bytes]:
        """Start the process and the threads that read its output; returns its input."""
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in a terminal then reaches this process alone, which ends the child
        )
        # Threads read, because that gives a wait a time limit on every system.
        self._replies, self._stderr = queue.SimpleQueue(), deque(maxlen=20)
        self._readers = [
            threading.Thread(target=_read, args=(self._process.stdout, self._number, self._replies), daemon=True),
            threading.Thread(target=_listen, args=(self._process.stderr, self._stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        assert self._process.stdin is not None
        return self._process.stdin

    def _how_it_ended(self) -> str:
        """How the process ended, with the last line of its stderr."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(5)
            how = f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        except (subprocess.TimeoutExpired, ValueError):
            how = "it closed its output"
        self._stop()
        lines = self.last_output().strip().splitlines()
        return f"{how}: {lines[-1][:300]}" if lines else how

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
            self._lost = f"the worker did not end within {KILL_SECONDS:g} s after it was killed: the device seems stuck"
        finally:
            with contextlib.suppress(OSError):  # a request that was never read
                if process.stdin is not None:
                    process.stdin.close()


def _read(stream: IO[bytes], first: int, replies: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    """Queue the replies in order and drop everything else: libraries print, and broken ones print garbage."""
    number = first
    with stream:
        while line := stream.readline(1 << 16):  # limited, because garbage may have no line ends
            try:
                reply = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(reply, dict) and reply.get("number") == number and isinstance(reply.get("ok"), bool):
                number += 1
                replies.put(reply)
    replies.put(_End)


def _listen(stream: IO[bytes], lines: deque[bytes]) -> None:
    """Keep the last lines of a child's stderr, such as the error that ends it."""
    with stream:
        while line := stream.readline(1 << 12):
            lines.append(line)
