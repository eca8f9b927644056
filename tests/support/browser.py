"""A real browser without a window: opens a file, and says what its console said. Chromium over its debugging protocol.

One page, one caller. Every wait has a limit; leaving the block ends the browser that was started here and no other.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_LIMIT_S, ANSWER_LIMIT_S = 90.0, 60.0
COMPLAINTS = ("error", "warning", "assert")
"""Levels of the console that a good page does not use."""


def find_browser() -> str | None:
    """The program: CHROMIUM, or the first of the usual names on PATH; None where there is none."""
    given = os.environ.get("CHROMIUM")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """`async with Browser(program) as browser: await browser.open(path)`."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.complaints: list[str] = []
        """Errors and warnings of the page: its console, its exceptions, what the browser refused to load or run."""
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._num_sent = 0

    async def __aenter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(prefix="slime-browser-", ignore_cleanup_errors=True)
        log = Path(self._folder.name) / "stderr"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [
            "--remote-debugging-port=0",
            f"--user-data-dir={self._folder.name}/profile",
            "--window-size=1400,1000",
        ]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [self._program, *flags, "about:blank"], stdout=stderr, stderr=stderr, start_new_session=True
            )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await self._connect(await self._address(log))
        except BaseException:
            self._end()
            raise
        return self

    async def _address(self, log: Path) -> str:
        while (found := re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace"))) is None:
            assert self._process.poll() is None, f"the browser ended at once: {log.read_text(errors='replace')[-2000:]}"
            await asyncio.sleep(0.05)
        return found[1]

    async def _connect(self, address: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(address, max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        target = await self._send("Target.createTarget", {"url": "about:blank"}, None)
        attached = await self._send("Target.attachToTarget", {**target, "flatten": True}, None)
        self._page: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._waiting.pop(event["id"]).set_result(event)
                continue
            facts = event["params"]
            if event["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(facts["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and facts["type"] in COMPLAINTS:
                self.complaints.append(str(facts["args"]))
            elif event["method"] == "Log.entryAdded" and facts["entry"]["level"] in COMPLAINTS:
                self.complaints.append(str(facts["entry"]))

    async def _send(self, method: str, params: dict[str, Any], session: str | None) -> Any:
        self._num_sent += 1
        answer = self._waiting[self._num_sent] = asyncio.get_running_loop().create_future()
        request = {"id": self._num_sent, "method": method, "params": params}
        await self._socket.send_json(request if session is None else {**request, "sessionId": session})
        async with asyncio.timeout(ANSWER_LIMIT_S):
            got = await answer
        assert "error" not in got, f"{method}: {got}"
        return got["result"]

    async def send(self, method: str, **params: Any) -> Any:
        """Asks the page by the debugging protocol."""
        return await self._send(method, params, self._page)

    async def open(self, path: Path) -> None:
        """Loads a file; back when it is loaded. Complaints are of this page from here on."""
        self.complaints.clear()
        self._loaded.clear()
        address = path.resolve().as_uri()
        await self.send("Page.navigate", url=address)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await self._loaded.wait()
            while await self.ask("document.readyState + ' ' + document.URL") != f"complete {address}":
                await asyncio.sleep(0.02)  # the event was one of the page before

    async def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await self._session.close()
        self._end()

    def _end(self) -> None:
        """The session that was started here, and its folder."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()
