"""Calls from a trainer to an engine's agent through a shared folder, their only channel.

    agents/<engine>/agent.json      information about the agent, and its current task
    agents/<engine>/call.json       the latest call: id, method, arguments, sender and deadline
    agents/<engine>/answer.json     the answer: id of the call, and a result or an error

There is at most one call per engine at a time. Both sides poll for files, and the caller has a timeout.

Invariants
1. A call replaces the previous one. An agent runs the latest call unless it has already answered it. If an agent is
   killed during a call, its successor runs the call again, so every method must be idempotent.
2. An answer contains the call's random id.
3. A caller that stops waiting deletes its call. A call also contains a deadline, so an agent that starts much later
   ignores a call whose caller was killed.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import DeadlineExceeded, EngineError
from slime.core.files import write_json
from slime.core.processes import this_sender
from slime.weights.delta.folder import read_json

AGENTS = "agents"
POLL_S = 0.01
SILENT_S = 30.0
"""How long a call waits for a missing agent."""


def name_of(address: str) -> str:
    """Returns an engine's folder name. `address`: host:port, with or without http://."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", address.split("://")[-1].rstrip("/"))


def mailbox(folder: Path, address: str) -> Path:
    """Returns the folder for calls to the engine at `address`."""
    return folder / AGENTS / name_of(address)


def call(
    box: Path, method: str, arguments: Mapping[str, Any], *, limit_s: float, is_lost: Callable[[], bool] = lambda: False
) -> Any:
    """Calls a mailbox's agent and returns the result.

    Raises `EngineError` if the call fails, the agent is missing or `is_lost()` is true, and `DeadlineExceeded` after
    `limit_s`.
    """
    box.mkdir(parents=True, exist_ok=True)
    own, began = secrets.token_hex(8), time.monotonic()
    asked = {"id": own, "method": method, "arguments": dict(arguments), "until": time.time() + limit_s}
    asked["sender"] = this_sender()
    write_json(box / "call.json", asked, durable=False)
    try:
        while True:
            answer = read_json(box / "answer.json")
            if answer is not None and answer.get("id") == own:
                if "error" in answer:
                    raise EngineError(f"the weights agent of engine {box.name} failed to {method}: {answer['error']}")
                return answer.get("result")
            waited_s = time.monotonic() - began
            if is_lost():
                raise EngineError(f"engine {box.name} was lost before its weights agent could {method}")
            if waited_s > min(SILENT_S, limit_s) and not (box / "agent.json").exists():
                raise EngineError(
                    f"no weights agent appeared in {box} within {waited_s:.0f} s; start `slime weights-agent` on "
                    "the engine's host, with the path of this folder on that host"
                )
            if waited_s > limit_s:
                raise DeadlineExceeded.waiting(
                    owner="weight sync",
                    for_what=f"the weights agent in {box} to {method}",
                    limit_s=limit_s,
                    last_progress=str((read_json(box / "agent.json") or {}).get("doing", "none")),
                )
            time.sleep(POLL_S)
    finally:
        current = read_json(box / "call.json")
        if current is not None and current.get("id") == own:
            with contextlib.suppress(OSError):
                (box / "call.json").unlink()


class AgentMailbox:
    """The agent's side of a mailbox."""

    def __init__(self, box: Path, about: Mapping[str, Any]) -> None:
        """`about`: information about this agent for the trainer."""
        self._box, self._about = box, dict(about)
        box.mkdir(parents=True, exist_ok=True)
        self.note("waiting")

    def note(self, doing: str) -> None:
        """Writes the agent's current task, for the caller's error message."""
        write_json(self._box / "agent.json", {**self._about, "doing": doing}, durable=False)

    def pending(self) -> tuple[str, str, dict[str, Any], str] | None:
        """Returns (id, method, arguments, sender) of the call, or None if it is missing, answered or expired."""
        found = read_json(self._box / "call.json")
        if found is None:
            return None
        own, method, arguments, until = (found.get(key) for key in ("id", "method", "arguments", "until"))
        if not (isinstance(own, str) and isinstance(method, str) and isinstance(arguments, dict)):
            return None
        if not isinstance(until, float) or time.time() > until:
            return None
        answered = read_json(self._box / "answer.json") or {}
        return None if answered.get("id") == own else (own, method, arguments, str(found.get("sender", "")))

    def answer(self, own: str, **said: Any) -> None:
        """Answers call `own` with `result=...` or `error=...`."""
        write_json(self._box / "answer.json", {"id": own, **said}, durable=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            (self._box / "agent.json").unlink()
