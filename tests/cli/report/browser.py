"""A page in headless Chromium, controlled over its debugging pipe: errors, requests, and values."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
IS_THERE = CHROMIUM is not None and sys.platform == "linux"  # the pipe is handed over as files 3 and 4
_PATIENCE = 100.0  # seconds; a process that has not ended by then is killed, which ends every wait


class Browser:
    """One tab.

    Args:
        send: the end of the pipe to write to.
        receive: the end to read from.
    """

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, file: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Load a page, as on a screen of this size in CSS pixels."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def value(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Errors on the console, violations of the page's policy among them."""
        found = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        messages = [entry["text"] for entry in found if entry["level"] in ("error", "warning")]
        return messages + [str(e["params"]) for e in self.events if e["method"] == "Runtime.exceptionThrown"]

    @property
    def requests(self) -> list[str]:
        """The addresses of everything that was loaded."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def _next(self) -> dict[str, Any]:
        written = bytearray()
        while not written.endswith(b"\0"):
            byte = self._receive.read(1)
            if not byte:
                raise EOFError("the browser is gone")
            written += byte
        message: dict[str, Any] = json.loads(written[:-1])
        if "method" in message:
            self.events.append(message)
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start a browser without other profiles, with its files in ``profile``."""
    assert CHROMIUM is not None
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
             f"--user-data-dir={profile}"]  # fmt: skip
    line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    process = subprocess.Popen(
        ["bash", "-c", line, CHROMIUM, *flags],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    guard = threading.Timer(_PATIENCE, process.kill)
    guard.start()
    try:
        with open(ours_out, "wb") as send, open(ours_in, "rb") as receive:
            yield Browser(send, receive)
    finally:
        guard.cancel()
        process.kill()
        process.wait(30)
