"""A local sandbox that looks, before it ends, at what is in it, and that fails to begin as often as a test wants."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from slime.agent.sandbox.local import LocalSandbox
from slime.core.errors import Unconfined

HIDDEN = ("-3, -4", "4, 9", "fixes")
"""What a sandbox holds that holds the hidden tests of the task `sums.add`."""


class Watched(LocalSandbox):
    """Named by its path, as a user's own sandbox is."""

    held: ClassVar[list[str]] = []
    """Of each sandbox that reached something, so an agent's: the lines in it that hold something hidden."""
    failing: ClassVar[int] = 0
    """How many of the next ones do not begin."""

    async def __aenter__(self) -> Watched:
        if Watched.failing:
            Watched.failing -= 1
            raise Unconfined("got no namespaces, as this test wants it")
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.reach is not None:
            words = " ".join(f"-e '{word}'" for word in HIDDEN)
            look = f"grep -rF {words} /work /tmp /dev/shm; cat /proc/[0-9]*/environ | grep -aF {words}"
            found = await self.exec(look)
            self.held.append(found.stdout)
        await super().__aexit__(*error)


def require_confinement() -> None:
    """Skips the test, with the sandbox's own reason, on a machine that cannot confine commands."""

    async def look() -> None:
        async with LocalSandbox():
            pass

    try:
        asyncio.run(look())
    except Unconfined as refusal:
        pytest.skip(str(refusal))
