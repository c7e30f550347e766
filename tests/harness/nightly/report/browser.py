"""A real Chromium without a window, which reads pages, clicks links and says what it fetched; driven through its debugging pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe", "--no-first-run")
PATIENCE = 120.0  # seconds for an answer on a busy machine
PLACE_OF_LINK = """(text => {
    const link = [...document.querySelectorAll('a')].find(one => one.textContent.trim() === text);
    link.scrollIntoView({block: 'center'});
    const box = link.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    return link.contains(document.elementFromPoint(x, y)) ? {x, y} : null;
})"""
CONTRASTS = """(() => {
    const parts = color => color.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [[r, .2126], [g, .7152], [b, .0722]].reduce((sum, [part, weight]) =>
        sum + weight * (part / 255 <= .04045 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4), 0);
    const ground = one => { for (; one; one = one.parentElement) {
        const color = parts(getComputedStyle(one).backgroundColor);
        if (color.length < 4 || color[3] > 0) return color;
    } return [255, 255, 255]; };
    return [...document.querySelectorAll('body *:not(svg *)')]
        .filter(one => one.checkVisibility() && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()))
        .map(one => { const [a, b] = [parts(getComputedStyle(one).color), ground(one)].map(light);
            return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), one.textContent.trim().slice(0, 40)]; });
})()"""


class Browser:
    """One page of it; what it fetched stands in `fetched`."""

    def __init__(self, profile: Path) -> None:
        """Start it with a profile of its own, in a folder that is made."""
        to_it, self._to = os.pipe()
        self._from, from_it = os.pipe()
        line = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
        command = ["bash", "-c", line, str(PROGRAM), *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(command, pass_fds=(to_it, from_it), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_it)
        os.close(from_it)
        self._session, self._number, self._left, self._events = "", 0, b"", list[dict[str, Any]]()
        self.fetched: list[str] = []
        page = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Self:
        """Give the browser; the end of the block ends it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        for pipe in (self._to, self._from):
            os.close(pipe)

    def open(self, address: str) -> None:
        """Go to a page, and wait until it is there."""
        self._ask("Page.navigate", url=address)
        self._wait("Page.loadEventFired")

    def click(self, text: str) -> None:
        """Press the mouse on the link with this text, which nothing may cover, and wait for the page that it leads to."""
        place = self.value(f"{PLACE_OF_LINK}({json.dumps(text)})")
        assert place is not None, f"{text}: something covers the link"
        for kind in ("mousePressed", "mouseReleased"):
            self._ask("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        self._wait("Page.loadEventFired")

    def set_scheme(self, name: str) -> None:
        """As a system that prefers `light` or `dark`."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def set_width(self, pixels: int) -> None:
        """As a screen of this width."""
        self._ask("Emulation.setDeviceMetricsOverride", width=pixels, height=800, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """What a line of JavaScript gives."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _ask(self, method: str, **given: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": given, **({"sessionId": self._session} if self._session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return dict(told["result"])
            self._events.append(told)

    def _wait(self, event: str) -> None:
        while not any(one.get("method") == event for one in self._events):
            self._events.append(self._read())
        self._events.clear()

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            assert select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0], "the browser does not answer"
            data = os.read(self._from, 1 << 16)
            assert data, f"the browser ended with {self._process.poll()}"
            self._left += data
        told, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(told)
        if found.get("method") == "Network.requestWillBeSent":
            self.fetched.append(found["params"]["request"]["url"])
        return found
