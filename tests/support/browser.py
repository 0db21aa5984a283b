"""A page in a real browser without a window, through the DevTools protocol on pipes: what it draws, loads and logs.

https://chromedevtools.github.io/devtools-protocol
"""

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 60


def binary() -> str:
    """The browser; without one the test is skipped, or fails where the environment says that it is CI."""
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no browser: none of {', '.join(_NAMES)} is installed; `apt-get install chromium` has one"
        if os.environ.get("CI", "").lower() in ("1", "true", "yes", "on"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


class Page:
    """A tab. `events` are what the browser has told so far, in its order."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._bytes, self._id = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for `method`; its result."""
        self._id += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._id, "method": method, "params": parameters} | session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str) -> None:
        """Load a file or an address, and wait until all of it is there."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def problems(self) -> list[str]:
        """What it has written to the console, and errors."""
        told = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in told]

    def requests(self) -> list[str]:
        """The addresses that it has asked for."""
        sent = (event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [parameters["request"]["url"] for parameters in sent]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._bytes:
            if not select.select([self._from], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {_SECONDS} s")
            part = os.read(self._from, 1 << 16)
            if not part:
                raise RuntimeError("the browser has ended")
            self._bytes += part
        message, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(message)


@contextmanager
def new_page() -> Iterator[Page]:
    """A tab of a new browser, which ends with the block."""
    path = binary()
    (theirs_in, to_browser), (from_browser, theirs_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # It reads from file 3 and writes to file 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", path, *flags]
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)  # it ends when its pipe is closed
            os.close(from_browser)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
