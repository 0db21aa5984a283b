"""A worker process that may hang or crash, and is then killed and started again.

cuSPARSELt can do both, and write past its buffers, so no candidate runs in the training process. Requests and replies
are JSON messages through a pipe of their own: what libraries print disturbs nothing.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

WORKER = [sys.executable, "-P", "-m", f"{__package__}.worker"]
KILL_SECONDS = 30.0
"""A process whose device is stuck may take this long to end. One that stays is abandoned, and no other is started."""


class Died(Exception):
    """The child process ended; the message says how."""


class Child:
    """A worker process, started by the first request. A context manager: leaving it ends the process."""

    def __init__(self, command: list[str]):
        self.command = command
        self.has_answered = False
        self._lost = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._stderr: IO[bytes] | None = None

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
        try:
            pipe = self._pipe or self._start()
            pipe.send_bytes(json.dumps({"seconds": seconds, **request}).encode())
            if not pipe.poll(seconds):
                self._stop()
                raise Died(f"no answer within {seconds:g} s")
            reply = json.loads(pipe.recv_bytes())
        except (OSError, EOFError, ValueError) as error:
            raise Died(self._how_it_ended() or f"it cannot be run: {error}") from None
        self.has_answered = True
        return reply

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the process is)
        try:
            self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal then reaches this process alone, which ends the child
            )
        except BaseException:
            ours.close()
            self._stderr.close()
            raise
        finally:
            theirs.close()  # so that the pipe ends with the child
        self._pipe = ours
        return ours

    def _how_it_ended(self) -> str:
        """How the process ended, with the last line of its stderr; empty where it never started."""
        process, stderr = self._process, self._stderr
        if process is None or stderr is None:
            return ""
        try:
            code = process.wait(5)
            how = f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        except (subprocess.TimeoutExpired, ValueError):
            how = "it broke the connection"
        size = stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, size - 4096))
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        self._stop()
        return f"{how}: {lines[-1][:300]}" if lines else how

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._lost = f"the worker did not end within {KILL_SECONDS:g} s after it was killed: the device seems stuck"
        finally:
            for stream in (self._pipe, self._stderr):
                if stream is not None:
                    stream.close()
            self._pipe = self._stderr = None
