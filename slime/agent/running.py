"""The adapter of a run: one server per rollout process, in front of the run's own engines, for all its executions.

    async def generate(args, sample, sampling_params):                 # --custom-generate-function-path
        async with execution(sampling_params) as agent:
            ...                                                        # talk to agent.url with agent.key
            return agent.samples(sample)

Consumes: the context of the rollout. Produces: an adapter that listens on loopback, once. Waits for nothing. Is ended
with the process that has it.

Invariant: an execution that ends without `samples`, by whatever, leaves no session and no request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from slime.agent.adapters import AgentAdapter
from slime.agent.parsers import format_of
from slime.agent.template import ConversationTemplate
from slime.core.errors import ConfigError
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client import EngineClient
from slime.rollout.clients import end_of_text
from slime.rollout.context import current

_ADAPTERS: WeakKeyDictionary[EngineClient, tuple[AgentAdapter, str]] = WeakKeyDictionary()
"""Of each client its adapter, and where it listens."""


@dataclass(slots=True)
class Execution:
    """One run of an agent."""

    url: str
    """Where the agent finds its model; without a path. OpenAI's SDK wants `/v1` behind it."""
    key: str
    """Its API key."""
    adapter: AgentAdapter = field(repr=False)
    finished: bool = False

    def samples(
        self,
        base: Sample,
        reward: float | Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """Ends the execution: its samples. `reward`: of all of it; None leaves that to a grader."""
        self.finished = True
        return self.adapter.finish_session(self.key, base, reward, metadata)


@asynccontextmanager
async def execution(
    sampling_params: Mapping[str, Any], *, max_context_tokens: int | None = None
) -> AsyncIterator[Execution]:
    """A session of the run's adapter, for the block. `sampling_params`: those that the generate function was given."""
    args = current().args
    adapter, url = await _adapter()
    most = max_context_tokens or args.rollout_max_context_len
    found = Execution(url, adapter.open_session(sampling=sampling_params, max_context_tokens=most), adapter)
    try:
        yield found
    finally:
        if not found.finished:
            adapter.drop_session(found.key)


async def _adapter() -> tuple[AgentAdapter, str]:
    """Started with the first execution."""
    context = current()
    client, tokenizer = context.engine(), context.tokenizer
    if client in _ADAPTERS:
        return _ADAPTERS[client]
    if tokenizer is None:
        raise ConfigError("got an agent without a tokenizer, which its conversations need; give --hf-checkpoint")
    chat = ChatRenderer(tokenizer, kwargs=context.args.apply_chat_template_kwargs)
    ends = end_of_text(context.args.hf_checkpoint, tokenizer).token_ids
    adapter = AgentAdapter(
        client,
        ConversationTemplate(chat, sorted(ends)),
        decode=chat.decode,
        tool_format=format_of(str(tokenizer.chat_template)) or "none",
        sampling={},
    )
    _ADAPTERS[client] = found = (adapter, await adapter.start())
    return found
