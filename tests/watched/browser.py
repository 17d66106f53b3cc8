"""Headless Chromium, driven over WebDriver (https://www.w3.org/TR/webdriver2/), which is JSON over HTTP."""

import base64
import json
import os
import signal
import urllib.request
from typing import Any, Self

from cdc_outbox.embedded import ServerProcess, accepts_connections, free_port
from tests.watched.servers import program


class Browser(ServerProcess):
    """chromedriver and one window. Everything Chromium writes goes to a folder that is removed."""

    name = "chromedriver"

    def __init__(self) -> None:
        self._program = program("chromedriver", "chromium-driver")
        self._chromium = program("chromium", "chromium")
        super().__init__(None, None, die_with_parent=True)
        self.port = free_port()

    def start(self) -> Self:
        home = {**os.environ, "HOME": str(self.directory), "XDG_CONFIG_HOME": str(self.directory)}
        self._spawn([self._program, f"--port={self.port}"], home, signal.SIGKILL)
        self._wait_ready(lambda: accepts_connections(self.port), 20)
        options = {
            "binary": self._chromium,
            # Chromium's own sandbox does not start as root; /dev/shm is small in a container.
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={self.directory / 'profile'}",
            ],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"
        return self

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """The body of a function; what it returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def complaints(self) -> list[str]:
        """What the console holds since it was last asked."""
        found = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found]

    def look(self, width: int, *, dark: bool = False) -> None:
        """As on a screen of that width (CSS pixels), in this colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": 600, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, height: int) -> bytes:
        """The top of the page, as PNG."""
        width = self.run("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self._devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    def _devtools(self, command: str, **parameters: object) -> Any:
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]
