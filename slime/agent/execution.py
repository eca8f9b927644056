"""The adapter of a run: one server per rollout process, shared by all executions, in front of the run's engines.

    async def generate(args, sample, sampling_params):                 # --custom-generate-function-path
        async with execution(sampling_params) as agent:
            ...                                                        # talk to agent.url with agent.key
            return agent.samples(sample)

The adapter is configured by the rollout context and the `--agent-*` settings. It listens from the first execution until
the engine client closes.

Invariants
1. An execution that ends without `samples`, for any reason, leaves no session and no request behind.
2. A chat template that is not append-only is rejected before the first request.
3. If no parser can read the model's tool calls, the first agent request that passes tools ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.agent.adapters import AgentAdapter
from slime.agent.template import ConversationTemplate, template_of
from slime.agent.template_probe import probe
from slime.core.errors import ConfigError, DataError, SlimeError
from slime.core.sample import Sample, Status
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import current
from slime.settings import Args

logger = logging.getLogger(__name__)

_ADAPTERS: dict[EngineClient, asyncio.Task[tuple[AgentAdapter, str]]] = {}
"""Open client -> the task that starts its adapter and returns (adapter, URL for agents)."""


@dataclass(slots=True)
class Execution:
    url: str
    """Base URL for the agent, without a path; OpenAI's SDK needs `/v1` appended."""
    key: str
    """API key for the agent."""
    adapter: AgentAdapter = field(repr=False)
    finished: bool = False

    def reward_turn(self, value: float) -> None:
        """Adds a reward for the latest response of the model, at its last token.

        Raises `DataError` if it is not finite, if there is no response yet, or if `samples` was called before.
        """
        if self.finished:
            raise DataError("the execution has ended; call reward_turn before samples")
        self.adapter.session(self.key).reward_turn(value)

    def samples(
        self,
        base: Sample,
        reward: float | Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """Ends the execution and returns its samples. `reward`: reward of every sample; None: a grader sets it.

        If no response can be trained on, returns a copy of `base` with status FAILED.
        """
        self.finished = True
        return or_failed(base, self.adapter.finish_session(self.key, base, reward, metadata))


def or_failed(base: Sample, made: list[Sample], why: str = "") -> list[Sample]:
    """Returns the samples of an execution, or a FAILED copy of `base` if there are none."""
    if made:
        return made
    failed = base.copy()
    failed.status = Status.FAILED
    failed.failure = "the agent ended without a response that can be trained on" + (f": {why}" if why else "")
    return [failed]


@asynccontextmanager
async def execution(
    sampling_params: Mapping[str, Any],
    *,
    max_context_tokens: int | None = None,
    max_turns: int | None = None,
    time_limit_s: float | None = None,
) -> AsyncIterator[Execution]:
    """Opens a session in the run's adapter for the block's duration. `sampling_params`: from the generate function.

    The arguments override the run's limits for this execution: `max_context_tokens` overrides
    `--rollout-max-context-len`, `max_turns` overrides `--agent-max-turns`, and `time_limit_s` overrides
    `--agent-time-limit-s`. `--rollout-max-total-response-len` still limits the total number of sampled tokens.

    Raises `ConfigError`, which ends the run, if the checkpoint has no tokenizer or its chat template is not
    append-only. At the end of the block, raises `ConfigError` in place of any other error if an agent passed tools to a
    model whose calls no parser can read.
    """
    args = current().args
    adapter, url = await _adapter()
    key = adapter.open_session(
        sampling=sampling_params,
        max_context_tokens=max_context_tokens,
        max_turns=max_turns or args.agent_max_turns,
        time_limit_s=time_limit_s or args.agent_time_limit_s,
    )
    found = Execution(url, key, adapter)
    try:
        yield found
    except Exception as error:
        if adapter.no_tools:
            raise ConfigError(adapter.no_tools) from error
        raise
    finally:
        if not found.finished:
            adapter.drop_session(found.key)
    if adapter.no_tools:
        raise ConfigError(adapter.no_tools)


async def _adapter() -> tuple[AgentAdapter, str]:
    """Returns the adapter and its URL. The first execution starts the adapter; others wait for it."""
    client = current().engine()
    if client not in _ADAPTERS:
        _ADAPTERS[client] = asyncio.create_task(_started(client))
    try:
        return await asyncio.shield(_ADAPTERS[client])
    except SlimeError:  # the next execution can try again
        _ADAPTERS.pop(client, None)
        raise


async def _started(client: EngineClient) -> tuple[AgentAdapter, str]:
    context = current()
    args, tokenizer = context.args, context.tokenizer
    if tokenizer is None:
        raise ConfigError("agent conversations require a tokenizer; set --hf-checkpoint")
    template = conversation_template(args, args.hf_checkpoint, tokenizer, args.apply_chat_template_kwargs)
    adapter = AgentAdapter(
        client,
        template,
        decode=template.chat.decode,
        tool_format=args.agent_tool_format,
        sampling={},
        agent_sampling=args.agent_sampling,
    )
    try:
        listens = await adapter.start(args.agent_host, args.agent_port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --agent-host {args.agent_host} --agent-port {args.agent_port} ({error})"
        ) from error
    client.at_close(lambda: _ended(client, adapter))
    return adapter, args.agent_url or listens


async def _ended(client: EngineClient, adapter: AgentAdapter) -> None:
    _ADAPTERS.pop(client, None)
    await adapter.close()


def conversation_template(
    args: Args, checkpoint: str, tokenizer: Any, kwargs: Mapping[str, Any]
) -> ConversationTemplate:
    """Returns a checkpoint's chat template for conversations, in which the policy also reads images. `kwargs`: its
    arguments.

    Raises `ConfigError` if the template is not append-only. Warns about features that fork conversations.
    """
    template = template_of(args, checkpoint, tokenizer, kwargs)
    try:
        report = probe(template.chat, sorted(template.end_ids), args.agent_tool_format)
        report.require_plain_turns()
    except DataError as error:  # a retry would not help
        raise ConfigError(str(error)) from error
    if report.failing:
        logger.warning("with this chat template, these features fork conversations: %s", ", ".join(report.failing))
    return template
