"""`GenerateState`: what functions of the public slime ask for the tokenizer, the parameters and the end of a step."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, ClassVar, Self

from slime.rollout.client.client import REQUEST_SCOPE
from slime.rollout.context import current
from slime.rollout.generate import rollout_sampling_params
from slime.rollout.transcript import TRANSCRIPT
from slime.settings import Args


class GenerateState:
    """One for each event loop on which executions run, whoever asks; made of the rollout that runs.

    Raises `HookError` outside a rollout.
    """

    args: Args
    tokenizer: Any
    """That of the policy."""
    processor: None = None
    """Of images; text alone is trained."""
    semaphore: asyncio.Semaphore
    """As many places as the engines have: for functions that ask by clients of their own."""
    sampling_params: dict[str, Any]
    """Those of training; a function gets a copy of its own."""

    _of_loops: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GenerateState]] = (
        weakref.WeakKeyDictionary()
    )

    def __new__(cls, args: Args) -> Self:
        context = current()
        known = cls._of_loops.get(context.loop)
        if isinstance(known, cls) and known.args is args:
            return known
        made = super().__new__(cls)
        made.args, made.tokenizer = args, context.tokenizer
        made.sampling_params = rollout_sampling_params(args)
        num_engines = len(context.client.engines()) if context.client is not None else 0
        made.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * max(1, num_engines))
        cls._of_loops[context.loop] = made
        return made

    @property
    def aborted(self) -> bool:
        """Whether the run ends what the calling execution has under way, which is not finished then."""
        scope, transcript = REQUEST_SCOPE.get(), TRANSCRIPT.get()
        ended = scope is not None and scope.aborted
        if ended and transcript is not None:
            transcript.taken_back = True
        return ended
