"""A headless Chromium, driven through its DevTools protocol: as much of it as tests of a page need.

with open_browser() as page:
    page.load(path)
    page.evaluate("document.title")
"""

import asyncio
import base64
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

_SECONDS = 60
_QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-port=0"
)


def chromium() -> str | None:
    """The path of the browser, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A tab.

    Attributes:
        problems: errors and warnings of its console, exceptions, and requests that it made for anything but itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse):
        self._loop, self._socket, self._numbers = loop, socket, itertools.count(1)
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Calls a method of the protocol, and collects the events that come before its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), _SECONDS))

    async def _call(self, method: str, parameters: dict[str, Any]) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != number:
            self._note(message["method"], message["params"])
        assert "error" not in message, message
        return message["result"]

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown" or (event == "Runtime.consoleAPICalled" and about["type"] != "log"):
            self.problems.append(str(about))
        elif event == "Log.entryAdded":
            self.problems.append(str(about["entry"]))
        elif event == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {about['message']}")
        elif event == "Network.requestWillBeSent" and not about["request"]["url"].startswith("file:"):
            self.problems.append(f"a request: {about['request']['url']}")

    def load(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Shows a file in a window of this size, and waits until it is loaded."""
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=path.as_uri())
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))"
        )

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key, such as Enter, where the focus is."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Enter": 13, "Tab": 9, "End": 35, "Home": 36}[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def open_browser() -> Iterator[Page]:
    """Starts a browser with a profile of its own, and ends it."""
    binary = chromium()
    assert binary is not None, "no Chromium is installed: make browser-test needs one (apt-get install chromium)"
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [binary, *_QUIET.split(), f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            address = (
                next(line for line in process.stderr if "DevTools listening on" in line).split("on ", 1)[1].strip()
            )
            port = address.split("/")[2]
            session = loop.run_until_complete(_session(port))
            yield Page(loop, session[1])
            loop.run_until_complete(session[0].close())
        finally:
            process.terminate()
            process.wait()
            loop.close()


async def _session(port: str) -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
    client = aiohttp.ClientSession()
    async with client.get(f"http://{port}/json/list") as answer:
        tab = next(each for each in await answer.json() if each["type"] == "page")
    return client, await client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
