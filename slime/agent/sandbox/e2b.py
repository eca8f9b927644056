"""A sandbox at E2B, or at a service with the same API, using the `e2b` package (`pip install 'slime[e2b]'`).

The package reads its own environment variables (E2B_API_KEY, E2B_DOMAIN, ...); slime's variables set the defaults of
the fields below. Requests can be lost in transit, so idempotent ones are retried.

The wait for a response is at most the command's limit plus `REQUEST_S`. Retries use exponential backoff with jitter.

Invariants
1. A command that is not `idempotent` is sent only once.
2. The service ends the sandbox after `lifetime_s`, even if this process dies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from slime.agent.sandbox import SANDBOXES, Command, ExecResult, Sandbox
from slime.core.errors import ConfigError
from slime.core.liveness import backoff_s

T = TypeVar("T")
logger = logging.getLogger(__name__)

USER = "user"
REQUEST_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
LIFETIME, RETRIES = "SLIME_AGENT_SANDBOX_LIFETIME_SEC", "SLIME_AGENT_SANDBOX_RPC_RETRIES"
IMAGE_KEY, SIZE = "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SLIME_AGENT_E2B_SANDBOX_SIZE"


def package() -> Any:
    """Imports the `e2b` package. Raises `ConfigError` if it is not installed."""
    try:
        import e2b
    except ImportError as error:
        raise ConfigError("the E2B sandbox requires the e2b package: pip install 'slime[e2b]'") from error
    return e2b


def is_transient(problem: BaseException) -> bool:
    e2b = package()
    if isinstance(problem, e2b.SandboxNotRunningException | e2b.NotFoundException):
        return False
    if isinstance(problem, e2b.TimeoutException | e2b.RateLimitException | e2b.ServiceBusyException | OSError):
        return True
    if isinstance(problem, e2b.SandboxException):
        return (problem.status_code or 0) >= 500
    return type(problem).__module__.partition(".")[0] in ("httpx", "httpcore", "pyqwest", "connectrpc")


@SANDBOXES.register("e2b")
@dataclass(kw_only=True)
class E2BSandbox(Sandbox):
    """A remote sandbox at E2B."""

    folder = f"/home/{USER}"
    image: str | None = None
    """An E2B template; an image if SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY is set. None: E2B's default."""
    reach: tuple[str, int] | None = None
    """The only public (host, port) that commands can reach, by its usual host name. None: no network."""
    size: str | None = field(default_factory=lambda: os.environ.get(SIZE))
    """Value of the metadata key `size`, for services that read it."""
    lifetime_s: float = field(default_factory=lambda: float(os.environ.get(LIFETIME, "3600")))
    """The service ends the sandbox after this time."""
    retries: int = field(default_factory=lambda: int(os.environ.get(RETRIES, "3")))
    """Retries after a transient failure."""
    user: str = USER
    sandbox_id: str = field(default="", init=False)

    async def __aenter__(self) -> Self:
        key, metadata = os.environ.get(IMAGE_KEY), dict[str, str]()
        if key and self.image:
            metadata[key] = self.image
        if self.size:
            metadata["size"] = self.size
        e2b = package()
        network = {"deny_out": [e2b.ALL_TRAFFIC], "allow_out": [self.reach[0]]} if self.reach else None
        self._remote: Any = await self._tried(
            "begin",
            lambda: e2b.AsyncSandbox.create(
                template=None if key else self.image,
                timeout=math.ceil(self.lifetime_s),
                metadata=metadata,
                allow_internet_access=self.reach is not None,
                network=network,
            ),
        )
        self.sandbox_id = str(self._remote.sandbox_id)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._tried("end", lambda: self._remote.kill())
        except Exception as problem:  # the service ends it later, and the result is still valid
            logger.warning(
                "cannot end sandbox %s; it may live for %.0f s: %s",
                self.sandbox_id,
                self.lifetime_s,
                problem,
            )

    async def _exec(self, command: Command) -> ExecResult:
        e2b, began = package(), asyncio.get_running_loop().time()
        given: dict[str, Any] = {"envs": dict(command.env), "user": command.user or self.user, "cwd": self.folder}
        try:
            ended = await self._tried(
                "run a command",
                lambda: self._remote.commands.run(command.bounded, timeout=command.timeout_s + REQUEST_S, **given),
                tries=self.retries + 1 if command.idempotent else 1,
            )
        except e2b.CommandExitException as exit_:
            ended = exit_
        late = ended.exit_code == 137 and asyncio.get_running_loop().time() - began >= command.timeout_s
        return ExecResult(ended.exit_code, ended.stdout, ended.stderr, late)

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Writes a file. Relative paths are resolved against the user's home. Raises `OSError`."""
        await self._file(f"write {path}", lambda: self._remote.files.write(path, content, user=self.user))

    async def read_file(self, path: str) -> bytes:
        """Reads a file. Relative paths are resolved against the user's home. Raises `OSError`."""
        return bytes(
            await self._file(f"read {path}", lambda: self._remote.files.read(path, format="bytes", user=self.user))
        )

    async def _file(self, what: str, request: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._tried(what, request)
        except package().SandboxException as problem:
            raise OSError(f"could not {what}: {problem}") from problem

    async def _tried(self, what: str, request: Callable[[], Awaitable[T]], *, tries: int | None = None) -> T:
        """Sends a request, with at most `tries` attempts. Raises the error of the last attempt."""
        failures = 0
        while True:
            failures += 1
            try:
                return await request()
            except Exception as problem:
                is_last = failures == (tries or self.retries + 1)
                if is_last or isinstance(problem, package().CommandExitException) or not is_transient(problem):
                    raise
                logger.warning("sandbox %s: could not %s, retrying: %s", self.sandbox_id, what, problem)
            pause_s = backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
