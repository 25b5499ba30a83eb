"""A headless Chromium for tests of pages, driven over two pipes by its DevTools protocol.

The browser is $TEST_BROWSER, one on the PATH, or @sparticuz/chromium of npm, which brings its libraries and fonts. That
is installed once into the user's cache. Without one of them a test is skipped.
"""

import base64
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
PACKAGE = "@sparticuz/chromium@153.0.0"
UNPACK = 'import("@sparticuz/chromium").then((module) => module.default.executablePath())'
OPTIONS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--no-zygote", "--single-process", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
)
PIPES = 'exec "$@" 3<&0 4>&1 </dev/null >&2'
"""Chromium reads commands from file 3 and writes answers to file 4, each ended by a zero byte."""
LONGEST_SECONDS = 60


def find_browser() -> Path:
    """Return a browser's program, or skip the test with what to install."""
    if path := os.environ.get("TEST_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None):
        return Path(path)
    if sys.platform != "linux" or platform.machine() != "x86_64" or not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no browser: install Chromium or Chrome, or set TEST_BROWSER to its program")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torchtitan-tests", PACKAGE)
    if not (folder / "chromium").exists():
        try:
            install(folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no browser, and {PACKAGE} cannot be installed ({error}): install Chromium or Chrome")
    return folder / "chromium"


def install(folder: Path) -> None:
    """Install PACKAGE and unpack it into `folder`, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        options = ["--prefix", work, "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"]
        run = {"cwd": work, "check": True, "capture_output": True, "timeout": 120}
        subprocess.run(["npm", "install", *options, PACKAGE], **run)
        files = Path(work, "files")
        files.mkdir()
        unpacked = {"TMPDIR": str(files), "AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x"}  # the latter: with libraries
        subprocess.run(["node", "--eval", UNPACK], env=os.environ | unpacked, **run)
        if not folder.exists():  # another worker may have been faster
            files.rename(folder)


class Page:
    """One page of a browser. `problems`: errors and warnings of its console. `requests`: addresses that it fetched."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.number, self.session = process, 0, ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Events until then are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": arguments}
        message |= {"sessionId": self.session} if self.session else {}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while (answer := self.receive()).get("id") != self.number:
            self.note(answer)
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        message = bytearray()
        assert self.process.stdout is not None
        while not message.endswith(b"\0"):
            piece = self.process.stdout.peek()
            assert piece, f"the browser has ended, or took longer than {LONGEST_SECONDS} s"
            message += self.process.stdout.read(piece.find(b"\0") + 1 or len(piece))
        return dict(json.loads(message[:-1]))

    def note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        self.loaded = self.loaded or method == "Page.loadEventFired"
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(details["args"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(details["entry"]["text"])

    def open(self, file: Path) -> None:
        self.call("Page.navigate", url=file.as_uri())
        while not self.loaded:
            self.note(self.receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript, which may be a promise."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def drag(self, *points: tuple[float, float]) -> None:
        """Move the pointer to the first point and press it, to the others, and release it; a click with one point."""
        for index, (x, y) in enumerate(points):
            self.move(x, y, pressed=index > 0)
            if index == 0:
                self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        self.mouse("mouseReleased", *points[-1], button="left", clickCount=1)

    def move(self, x: float, y: float, pressed: bool = False) -> None:
        self.mouse("mouseMoved", x, y, buttons=int(pressed))

    def mouse(self, kind: str, x: float, y: float, **details: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **details)

    def picture(self, file: Path) -> None:
        """Write the whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))


@contextmanager
def open_page(file: Path, folder: Path, width: int = 1400, height: int = 1000) -> Iterator[Page]:
    """Open an HTML file in a browser with its profile in `folder`."""
    program = find_browser()
    arguments = [*OPTIONS, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"]
    libraries, fonts = program.parent / "al2023/lib", program.parent / "fonts"
    environment = dict(os.environ)
    if libraries.exists():
        # The package's own fonts.conf names folders of the machines that it was made for.
        configuration = f"<fontconfig><dir>{fonts}</dir><cachedir>{folder / 'fonts-cache'}</cachedir></fontconfig>"
        (folder / "fonts.conf").write_text(configuration, "utf-8")
        environment |= {"LD_LIBRARY_PATH": str(libraries), "FONTCONFIG_FILE": str(folder / "fonts.conf")}
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", PIPES, "sh", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        watch = threading.Timer(LONGEST_SECONDS, process.kill)
        watch.start()
        try:
            page = Page(process)
            page.open(file)
            yield page
        finally:
            watch.cancel()
            process.kill()
            process.communicate()
