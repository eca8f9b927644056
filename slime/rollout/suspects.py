"""`Suspects`: requests whose engines died under them, and which of them kill engines.

Consumes: what `Job` hears of dead engines. Produces: the turn of a request, or `DeadlyRequest`. A suspect waits for the
one before it; it is woken when that has ended, or is cleared.

Invariants
1. An engine that dies takes healthy requests with it, so a death proves nothing. A request whose engines died
   `MAX_DEATHS - 1` times is on trial: no other suspect of the client is sent meanwhile. It is cleared by its answer, or
   by `TRIAL_TOKENS` more tokens.
2. One whose engine dies during its trial ends with `DeadlyRequest`. So does every other request for the same ids,
   without being sent: of a group, or by code that asks again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slime.core.errors import DeadlyRequest
from slime.rollout.call import Call

MAX_DEATHS = 3
"""Engines that one request may have seen die."""
TRIAL_TOKENS = 128
"""What kills an engine is the prompt, or what comes soon behind the tokens that there are."""


@dataclass(slots=True)
class Deaths:
    """What one request has seen."""

    number: int = 0
    on_trial_from: int | None = None
    """Tokens that it had then."""


class Suspects:
    """Of one client."""

    def __init__(self) -> None:
        self._trial = asyncio.Lock()
        self._deadly: dict[int, str] = {}
        """Prompt -> how the last engine ended."""

    async def turn(self, call: Call, deaths: Deaths) -> None:
        """Waits until a request may be sent. Raises `DeadlyRequest`."""
        if deaths.number >= MAX_DEATHS - 1 and deaths.on_trial_from is None:
            await self._trial.acquire()
            deaths.on_trial_from = len(call.tokens)
        if self._deadly and (said := self._deadly.get(_prompt_of(call))) is not None:
            raise _deadly(call, said)

    def died(self, call: Call, deaths: Deaths, said: str) -> None:
        """Its engine did. Raises `DeadlyRequest`."""
        deaths.number += 1
        if deaths.on_trial_from is not None:
            self._deadly[_prompt_of(call)] = said
            raise _deadly(call, said)

    def has_come_on(self, call: Call, deaths: Deaths) -> None:
        """It has got tokens."""
        if deaths.on_trial_from is not None and len(call.tokens) >= deaths.on_trial_from + TRIAL_TOKENS:
            self.end(deaths)
            deaths.number = 0

    def end(self, deaths: Deaths) -> None:
        """It is cleared, or over: the next one has its turn."""
        if deaths.on_trial_from is not None:
            deaths.on_trial_from = None
            self._trial.release()


def _prompt_of(call: Call) -> int:
    return hash((tuple(call.input_ids), call.picture_uris))


def _deadly(call: Call, said: str) -> DeadlyRequest:
    return DeadlyRequest(
        f"engines died under it: {MAX_DEATHS} under a request of {len(call.input_ids)} ids, which is not sent again; "
        f"the last one: {said}"
    )
