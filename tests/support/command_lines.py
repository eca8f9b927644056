"""The real command lines of agents, from npm, installed once into `assets/agents`, which git ignores."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.coding_agent.prepare import install
from slime.agent.harness import Harness
from slime.core.errors import ConfigError

AGENTS = Path(__file__).parents[2] / "assets" / "agents"


def folder_with(harness: Harness) -> Path:
    """The folder of the harness's program. Skips the test where npm cannot fetch it."""
    try:
        return install(harness.name, AGENTS) / "node_modules" / ".bin"
    except ConfigError as problem:
        pytest.skip(str(problem))


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    timed_out: bool


@dataclass(frozen=True)
class PlainShell:
    """Runs commands on this host: the agents of these tests do what a script says."""

    path: str

    async def exec(self, command: str, *, env: Mapping[str, str] | None = None, timeout_s: float | None = None) -> Any:
        process = await asyncio.create_subprocess_shell(
            command,
            env={"PATH": f"{self.path}:{os.environ['PATH']}", **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
            return Done(-1, "", "", timed_out=True)
        assert process.returncode is not None, "it has ended"
        return Done(process.returncode, out.decode(), err.decode(), timed_out=False)

    async def write_file(self, path: str, content: str | bytes) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
