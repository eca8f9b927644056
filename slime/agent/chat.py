"""Conversations without HTTP: `current().chat` and `current().models[...].chat(...)`.

    chat, messages = current().chat, list(sample.prompt)            # in a generate function
    while (reply := await chat.ask(messages, tools=[search])).calls:
        messages += [reply.message, *await chat.run(reply, [search])]
    return chat.samples(sample)

The conversation, the tokens and the parsing are the adapter's (`Turn`, `Session`), so the samples are the same as those
of an agent that sends the same messages over HTTP.

Invariants
1. An execution has one chat, which `RolloutContext` opens at its first use. It ends with the execution.
2. A turn whose sampling parameters are not the run's is context, and is not trained on.
3. An interrupted turn raises `TakenBack`, and the chat then has only ABORTED samples.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime.agent.adapters.adapter import Answer, Engine, Request, Turn, last_event, with_sampling
from slime.agent.adapters.fields import BadRequest
from slime.agent.adapters.openai_chat import call_of, message_of
from slime.agent.execution import conversation_template, or_failed
from slime.agent.messages import Message
from slime.agent.parsers import FORMATS, ToolFormat, format_of
from slime.agent.session import Session, name_of_tools
from slime.agent.template import ConversationTemplate
from slime.agent.template_probe import tools_problem
from slime.core.errors import ConfigError, DataError, HookError, SlimeError, TakenBack
from slime.core.sample import TURN_COUNTS, Sample
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import current, on_rollout_loop
from slime.rollout.generate import LIMITS, Limits
from slime.rollout.types import FunctionCall, Messages, Reply, Tools

JUDGE = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 2048}
"""Sampling parameters of `EngineClient.chat` unless the caller sets others: a score should be repeatable."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How one model reads conversations and writes turns."""

    template: ConversationTemplate
    format: ToolFormat
    no_tools: str
    """Why the model cannot call tools; empty if it can."""

    def turn(
        self, session: Session, request: Request, params: dict[str, Any], limits: Limits, *, trained: bool
    ) -> Turn:
        """Raises `ConfigError` if the request has tools that the model cannot call."""
        if request.tools and self.no_tools:
            raise ConfigError(self.no_tools)
        return Turn(
            session=session,
            session_id=f"{id(session):x}",
            request=request,
            params=params,
            trained=trained,
            limits=limits,
            decode=self.template.chat.decode,
            format=self.format,
            end_ids=self.template.end_ids,
        )


class ModelChats:
    """Conversations with one model (`slime.rollout.types.Chats`). Reads the chat template at the first use."""

    def __init__(self, checkpoint: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self._checkpoint, self._tokenizer, self._kwargs = checkpoint, tokenizer, template_kwargs

    @cached_property
    def _form(self) -> _Form:
        tool_format = current().args.agent_tool_format
        template = conversation_template(self._checkpoint, self._tokenizer, self._kwargs, tool_format)
        name = tool_format or format_of(template.chat.template) or "text"
        return _Form(template, FORMATS.build(name, None), tools_problem(template, tool_format))

    def open(self, client: EngineClient, params: Mapping[str, Any]) -> ExecutionChat:
        return ExecutionChat(client, self._form, params, Session(self._form.template))

    async def ask(self, client: EngineClient, messages: Messages, tools: Tools, sampling: Mapping[str, Any]) -> Reply:
        request = Request(_messages(messages), _tools(tools))
        params = {**JUDGE, **sampling}
        turn = self._form.turn(Session(self._form.template), request, params, Limits(), trained=False)
        return _reply(await last_event(turn.events(client)))


class ExecutionChat:
    """The chat of one execution; see `slime.rollout.types.Chat`."""

    def __init__(self, client: Engine, form: _Form, params: Mapping[str, Any], session: Session) -> None:
        self._client, self._form, self._params, self._session = client, form, dict(params), session
        self._num_turns = 0
        self._known_tools: dict[str, tuple[Any, ...]] = {}
        self._tools_run: Counter[str] = Counter()

    @on_rollout_loop
    async def ask(self, messages: Messages, *, tools: Tools | None = None, **sampling: Any) -> Reply:
        """See `slime.rollout.types.Chat.ask`."""
        if isinstance(messages, str) and current().args.apply_chat_template:
            raise ConfigError(
                "current().chat renders messages itself, but --apply-chat-template has already rendered the prompts; "
                "drop that flag, and pass sample.prompt, which is then a list of messages"
            )
        if self._session.aborted:
            raise TakenBack("the run no longer accepts requests from this execution")
        most, stop = sampling.pop("max_new_tokens", None), sampling.pop("stop", None) or ()
        given = _messages(messages)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        request = Request(given, self._tools_for(given, tools), max_tokens=most, stop=stop)
        limits = LIMITS.get() or Limits()
        params, trained = with_sampling(self._params, sampling)
        if self._is_full(limits):
            self._session.hit_limit = True
            params["max_new_tokens"] = 0
        turn = self._form.turn(self._session, request, params, limits, trained=trained)
        return _reply(await last_event(turn.events(self._client)))

    def _tools_for(self, messages: Sequence[Message], tools: Tools | None) -> tuple[Any, ...]:
        """Returns the tools; those of the conversation that the messages continue if `tools` is None."""
        if tools is None:
            return self._known_tools.get(self._session.tools_of(messages), ())
        made = _tools(tools)
        self._known_tools[name_of_tools(made)] = made
        return made

    def _is_full(self, limits: Limits) -> bool:
        """Counts a turn. Returns whether it is one more than `--agent-max-turns`."""
        most, self._num_turns = current().args.agent_max_turns, self._num_turns + 1
        if self._num_turns <= most:
            return False
        limits.spent["agent_max_turns"] += 1
        return True

    async def run(self, reply: Reply, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """See `slime.rollout.types.Chat.run`."""
        known = {function.__name__: function for function in functions}
        return [call.result(await self._result(call, known)) for call in reply.calls]

    async def _result(self, call: FunctionCall, known: Mapping[str, Callable[..., Any]]) -> str:
        self._tools_run["tool_calls"] += 1
        try:
            if call.name not in known:
                raise LookupError(f"there is no tool {call.name}; the tools are {', '.join(known)}")
            function = known[call.name]
            if inspect.iscoroutinefunction(function):
                return str(await function(**call.arguments))
            result = await asyncio.to_thread(function, **call.arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except SlimeError:  # of the run, such as an interruption
            raise
        except Exception as error:
            self._tools_run["tool_errors"] += 1
            return f"error: {error}" if str(error) else f"error: {type(error).__name__}"

    def reward_turn(self, value: float) -> None:
        """See `slime.rollout.types.Chat.reward_turn`."""
        self._session.reward_turn(value)

    def fork(self) -> ExecutionChat:
        """See `slime.rollout.types.Chat.fork`."""
        other = ExecutionChat(self._client, self._form, self._params, self._session.fork())
        other._known_tools |= self._known_tools
        return other

    def samples(
        self, base: Sample, reward: float | Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """See `slime.rollout.types.Chat.samples`."""
        if self._tools_run:
            counts = base.metadata.setdefault(TURN_COUNTS, {})
            counts |= {name: counts.get(name, 0) + self._tools_run[name] for name in ("tool_calls", "tool_errors")}
            self._tools_run.clear()  # counted
        made = self._session.samples(base, decode=self._form.template.chat.decode, reward=reward)
        for sample in made:
            sample.metadata |= dict(metadata or {})
        return or_failed(base, made)


def _messages(given: Messages) -> tuple[Message, ...]:
    """Raises `DataError` for messages in another form."""
    if isinstance(given, str):
        return (Message("user", given),)
    try:
        return tuple(message_of(message, f"messages[{i}]") for i, message in enumerate(given))
    except BadRequest as error:
        raise DataError(str(error)) from error


def _tools(given: Tools) -> tuple[Any, ...]:
    return tuple(_schema(tool) if callable(tool) else tool for tool in given)


@functools.cache
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a function as a tool. Raises `HookError` if its type hints or docstring are incomplete."""
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        made = get_json_schema(function)["function"]
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise HookError(f"the function {function.__name__} cannot be a tool: {error}") from error
    return {"type": "function", "function": {name: made[name] for name in ("name", "description", "parameters")}}


def _reply(answer: Answer) -> Reply:
    said = answer.message
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [call_of(call) for call in said.calls]
    return Reply(
        text=said.text,
        thinking=said.reasoning or "",
        calls=tuple(FunctionCall(call.id, call.name, call.decoded) for call in said.calls),
        finish_reason=answer.finish,
        message=message,
        num_prompt_tokens=answer.prompt_tokens,
        num_tokens=answer.sampled_tokens,
        ill_formed=answer.ill_formed,
    )
