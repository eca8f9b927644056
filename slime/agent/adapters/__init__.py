"""The servers that agents connect to: a common core (`adapter.py`), and one file per wire format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from aiohttp import web

from slime.agent.adapters.adapter import Adapter, ended
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses
from slime.agent.parsers import FORMATS
from slime.agent.template import ConversationTemplate, template_of
from slime.core.errors import HookError
from slime.core.sample import Sample
from slime.public.http import ROLLOUT_LOOP, client_of
from slime.rollout.context import current
from slime.rollout.generate import rollout_sampling_params

__all__ = ["Adapter", "AgentAdapter", "AnthropicAdapter", "OpenAIAdapter", "RunAdapter"]

logger = logging.getLogger(__name__)


class RunAdapter(Adapter):
    """An adapter that can also be built as in the public slime: from a tokenizer, in front of the run's engines.

    adapter = AnthropicAdapter(tokenizer=state.tokenizer, sglang_url=router, max_turns_per_sid=20)   # in generate
    served = run_app_in_thread(adapter.app, "127.0.0.1", 0)
    adapter.open_session(sid, sampling_params, max_context_tokens=8192)
    ...                                                # an agent talks to served.url with the API key `sid`
    samples = adapter.finish_session(sid, sample, reward=1.0)
    """

    def __init__(
        self,
        engine: Any = None,
        template: ConversationTemplate | None = None,
        *,
        tokenizer: Any = None,
        sglang_url: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Any = None,
        **own: Any,
    ) -> None:
        """`engine`, `template`, `own`: as in `Adapter`. The other arguments build an adapter for the run.

        `sglang_url`: address of one of the run's routers; None: the policy's. `tool_parser`: a tool format; by default,
        and for unknown names, the chat template decides. `reasoning_parser`, `fork_threshold_tokens` and
        `debug_callback` have no effect, which a warning says: the tool format splits off thinking, and every
        conversation that differs from what was sampled becomes a separate sample. Raises `HookError` outside a rollout.
        """
        if template is not None:
            super().__init__(engine, template, **own)
            return
        if tokenizer is None:
            raise TypeError(f"{type(self).__name__} requires an engine and a template, or a tokenizer")
        unread = {
            "reasoning_parser": (reasoning_parser, "the tool format splits off thinking"),
            "fork_threshold_tokens": (fork_threshold_tokens, "a conversation that differs becomes a separate sample"),
            "debug_callback": (debug_callback, "the log of the run has the turns"),
        }
        for name, (value, why) in unread.items():
            if value is not None:
                logger.warning("%s has no effect on %s: %s", name, type(self).__name__, why)
        context = current()
        client = context.engine() if sglang_url is None else client_of(f"{sglang_url.removesuffix('/')}/generate")
        if client is None:
            raise HookError(f"no router of this run has the address {sglang_url}; use args.sglang_router_ip and _port")
        args = context.args
        template = template_of(args, args.hf_checkpoint, tokenizer, args.apply_chat_template_kwargs)
        known = tool_parser is not None and tool_parser in FORMATS
        if tool_parser is not None and not known:
            logger.warning("there is no tool format %s; the chat template decides how calls are read", tool_parser)
        super().__init__(
            client,
            template,
            decode=template.chat.decode,
            tool_format=tool_parser if known else context.args.agent_tool_format,
            sampling=rollout_sampling_params(context.args),
            max_turns=max_turns_per_sid,
            agent_sampling=context.args.agent_sampling,
        )
        self._loop = context.loop
        client.at_close(self.close)

    @cached_property
    def app(self) -> web.Application:
        app = super().app
        if loop := self.__dict__.get("_loop"):
            app[ROLLOUT_LOOP] = loop
        return app

    def open_session(
        self,
        session_id: str | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        max_context_tokens: int | None = None,
        **own: Any,
    ) -> str:
        """Like `Adapter.open_session`. `sampling_defaults`: the public slime's name for `sampling`."""
        own.setdefault("sampling", sampling_defaults)
        return super().open_session(session_id, max_context_tokens=max_context_tokens, **own)

    def finish_session(
        self,
        key: str,
        base_sample: Sample,
        reward: float | Mapping[str, Any] | None = None,
        extra_metadata: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        return super().finish_session(key, base_sample, reward, extra_metadata)

    async def shutdown_session(self, key: str) -> None:
        """Rejects further requests of a session, and waits until its running ones have ended."""
        found = self._sessions[key]
        found.refuse("the session is shut down")
        await ended([found], found.refuses, 400)


class OpenAIAdapter(RunAdapter):
    """Serves OpenAI's Chat Completions and Responses APIs."""

    wires = (ChatCompletions, Responses)


class AnthropicAdapter(RunAdapter):
    """Serves Anthropic's Messages API."""

    wires = (Messages,)


class AgentAdapter(Adapter):
    """Serves all supported APIs."""

    wires = (ChatCompletions, Responses, Messages)
