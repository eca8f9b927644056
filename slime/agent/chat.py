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
import contextlib
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slime.agent.adapters.adapter import Answer, Engine, Request, Turn, last_event, with_sampling
from slime.agent.adapters.fields import IMAGE_PARTS, BadRequest, ImageParts, at_least_one, stops
from slime.agent.adapters.openai_chat import call_of, message_of, tools_in
from slime.agent.execution import conversation_template, or_failed
from slime.agent.messages import Message
from slime.agent.parsers import ToolFormat, format_or_text
from slime.agent.session import Session, name_of_tools
from slime.agent.template import ConversationTemplate
from slime.agent.template_probe import tools_problem
from slime.core.errors import ConfigError, DataError, HookError, SlimeError, TakenBack
from slime.core.sample import TURN_COUNTS, Sample
from slime.data.images import ConversationImages, StoredImage
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import EXECUTION, current, on_rollout_loop
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

    async def messages(self, given: Messages) -> tuple[Message, ...]:
        """Parses messages, in a thread if they can have images. Raises `BadRequest` or `DataError`."""
        images = self.template.images
        parts = LocalImages(images, self.template.why_no_images)
        return _messages(given, parts) if images is None else await images.in_thread(_messages, given, parts)

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
            images=self.template.images,
        )


class ModelChats:
    """Conversations with one model (`slime.rollout.types.Chats`). Reads the chat template at the first use."""

    def __init__(self, checkpoint: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        self._checkpoint, self._tokenizer, self._kwargs = checkpoint, tokenizer, template_kwargs

    @cached_property
    def _form(self) -> _Form:
        tool_format = current().args.agent_tool_format
        template = conversation_template(current().args, self._checkpoint, self._tokenizer, self._kwargs)
        calls = format_or_text(template.chat.template, tool_format)
        return _Form(template, calls, tools_problem(template, tool_format))

    def open(self, client: EngineClient, params: Mapping[str, Any]) -> ExecutionChat:
        return ExecutionChat(client, self._form, params, Session(self._form.template))

    async def ask(self, client: EngineClient, messages: Messages, tools: Tools, sampling: Mapping[str, Any]) -> Reply:
        params = {**JUDGE, **sampling}
        with _refused():
            at_least_one(params, "max_new_tokens")
            request = Request(await self._form.messages(messages), _tools(tools))
        turn = self._form.turn(Session(self._form.template), request, params, Limits(), trained=False)
        return _reply(await last_event(turn.events(client)))


class ExecutionChat:
    """The chat of one execution; see `slime.rollout.types.Chat`."""

    def __init__(self, client: Engine, form: _Form, params: Mapping[str, Any], session: Session) -> None:
        self._client, self._form, self._params, self._session = client, form, dict(params), session
        self._num_turns = 0
        self._is_fork = self._ended = False
        self._others: set[str] = set()
        """Sampling parameters of turns that are not trained on."""
        self._known_tools: dict[str, tuple[Any, ...]] = {}
        self._tools_run: Counter[str] = Counter()

    @on_rollout_loop
    async def ask(self, messages: Messages, *, tools: Tools | None = None, **sampling: Any) -> Reply:
        """See `slime.rollout.types.Chat.ask`."""
        self._require_open("ask")
        if self._session.aborted:
            raise TakenBack("the run no longer accepts requests from this execution")
        with _refused():
            most, stop = at_least_one(sampling, "max_new_tokens"), stops(sampling, "stop")
            given = await self._form.messages(messages)
            _require_unrendered(given)
            request = Request(given, self._tools_for(given, tools), max_tokens=most, stop=stop)
        sampling = {name: value for name, value in sampling.items() if name not in ("max_new_tokens", "stop")}
        limits = LIMITS.get() or Limits()
        params, trained = with_sampling(self._params, sampling)
        self._num_turns += 1
        if limits.ends_before_turn(self._num_turns - 1, current().args.agent_max_turns):
            self._session.hit_limit = True
            params["max_new_tokens"] = 0
        turn = self._form.turn(self._session, request, params, limits, trained=trained)
        if not trained:
            self._others |= {f"{name}={value}" for name, value in sampling.items() if value != self._params.get(name)}
        return _reply(await last_event(turn.events(self._client)))

    def _require_open(self, what: str) -> None:
        """Raises `HookError` after `samples`."""
        if self._ended:
            raise HookError(
                f"{what} was called after samples(), which ends a chat; call samples() once, when the chat is over"
            )

    def _tools_for(self, messages: Sequence[Message], tools: Tools | None) -> tuple[Any, ...]:
        """Returns the tools; those of the conversation that the messages continue if `tools` is None."""
        if tools is None:
            return self._known_tools.get(self._session.tools_of(messages), ())
        made = _tools(tools)
        self._known_tools[name_of_tools(made)] = made
        return made

    async def run(self, reply: Reply, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """See `slime.rollout.types.Chat.run`."""
        known = {_function(one).__name__: one for one in _listed(functions, "functions")}
        return [call.result(await self._result(call, known)) for call in reply.calls]

    async def _result(self, call: FunctionCall, known: Mapping[str, Callable[..., Any]]) -> str | list[dict[str, Any]]:
        self._tools_run["tool_calls"] += 1
        try:
            if call.name not in known:
                self._tools_run["tool_errors"] += 1
                return f"error: there is no tool {call.name}; the tools are {', '.join(known) or 'none'}"
            function = known[call.name]
            if inspect.iscoroutinefunction(function):
                result = await function(**call.arguments)
            else:
                result = await asyncio.to_thread(function, **call.arguments)
                result = await result if inspect.isawaitable(result) else result
            if not _shows_images(result):
                return str(result)
            return await _parts_of_result(call.name, result, self._form.template)
        except SlimeError:  # of the run, such as an interruption
            raise
        except Exception as error:
            self._tools_run["tool_errors"] += 1
            return f"error: {type(error).__name__}: {error}"

    def reward_turn(self, value: float) -> None:
        """See `slime.rollout.types.Chat.reward_turn`."""
        self._require_open("reward_turn")
        self._session.reward_turn(value)

    def fork(self) -> ExecutionChat:
        """See `slime.rollout.types.Chat.fork`."""
        other = ExecutionChat(self._client, self._form, self._params, self._session.fork())
        other._known_tools |= self._known_tools
        other._is_fork = True
        return other

    def samples(
        self, base: Sample, reward: float | Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """See `slime.rollout.types.Chat.samples`."""
        self._require_open("samples")
        if not isinstance(base, Sample):
            raise DataError(f"samples() needs the sample that the generate function got, not {type(base).__name__}")
        if num := sum(branch.busy for branch in self._session.branches):
            raise HookError(f"samples() was called while {num} calls of ask are running; await them first")
        if metadata is not None and "agent" in metadata:
            raise DataError('the metadata of samples() has the key "agent", which slime sets; use another key')
        self._ended = True
        if self._tools_run:
            counts = base.metadata.setdefault(TURN_COUNTS, {})
            counts |= {name: counts.get(name, 0) + self._tools_run[name] for name in ("tool_calls", "tool_errors")}
            self._tools_run.clear()  # counted
        made = self._session.samples(base, decode=self._form.template.chat.decode, reward=reward)
        for sample in made:
            sample.metadata |= dict(metadata or {})
        return made if self._is_fork else or_failed(base, made, self._why_untrained())

    def _why_untrained(self) -> str:
        """Returns why there is no sample to train."""
        if not self._num_turns:
            return "the generate function never called ask"
        if self._others:
            shown = ", ".join(sorted(self._others))
            return (
                f"all turns were sampled with other parameters than the run's ({shown}), so they cannot be trained on"
            )
        return "no turn has a token, because a limit left no room for one"


class LocalImages(ImageParts):
    """Also reads what Python code has: parts of type `image` with a PIL image, bytes, a path or a data URI as `image`,
    or with the `digest` of an image of the run.
    """

    def of_part(self, part: Mapping[str, Any], where: str) -> StoredImage | None:
        if self.images is None or part["type"] != "image":
            return ImageParts.of_part(self, part, where)
        image, digest = part.get("image"), part.get("digest")
        if isinstance(digest, str):
            return self.checked(lambda images: images.of_digest(digest), f"{where}digest")
        return self.checked(lambda images: _image_of(image, images), f"{where}image")


def _image_of(given: Any, images: ConversationImages) -> StoredImage:
    """Raises `DataError` if `given` is not an image, or cannot be read."""
    if _is_pil(given):
        return images.of_pil(given)
    if isinstance(given, bytes):
        return images.of_bytes(given)
    if isinstance(given, str) and (given.startswith("data:") or "://" in given):
        return images.of_uri(given)
    if not isinstance(given, str | Path):
        raise DataError(f"an image must be a PIL image, bytes, a path or a data URI, but is {type(given).__name__}")
    try:
        return images.of_bytes(Path(given).read_bytes())
    except OSError as error:
        raise DataError(f"the file {str(given)[:80]} cannot be read: {error}") from error


def _is_pil(given: Any) -> bool:
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(given, pil.Image)


def _shows_images(result: Any) -> bool:
    """Returns whether a tool's result is an image, or a list with images."""
    parts = result if isinstance(result, list | tuple) else [result]
    return any(_is_pil(part) or (isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS) for part in parts)


async def _parts_of_result(name: str, result: Any, template: ConversationTemplate) -> list[dict[str, Any]]:
    """Returns a tool's result as content parts. Stores its images. Raises `DataError` if the model reads none."""
    images, parts = template.images, list(result) if isinstance(result, list | tuple) else [result]
    if images is None:
        raise DataError(f"the tool {name} returned an image, which is not supported, because {template.why_no_images}")
    return await images.in_thread(_stored_parts, name, parts, LocalImages(images))


def _stored_parts(name: str, result: Sequence[Any], reader: LocalImages) -> list[dict[str, Any]]:
    parts = list[dict[str, Any]]()
    for number, one in enumerate(result):
        part = {"type": "image", "image": one} if _is_pil(one) else one
        if not isinstance(part, Mapping):
            parts.append({"type": "text", "text": str(part)})
            continue
        with _refused():
            image = reader.of_part(part, f"result {number} of the tool {name}, ") if "type" in part else None
        parts.append(dict(part) if image is None else {"type": "image", "digest": image.digest})
    return parts


def _messages(given: Messages, images: ImageParts) -> tuple[Message, ...]:
    """Raises `BadRequest` or `DataError` for messages in another form."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    listed = enumerate(_listed(given, "messages"))
    return tuple(message_of(message, f"messages[{i}]", images) for i, message in listed)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Raises `DataError` in place of `BadRequest`, which is for answers over HTTP."""
    try:
        yield
    except BadRequest as error:
        raise DataError(str(error)) from error


def _listed(given: Any, what: str) -> Sequence[Any]:
    """Raises `DataError` if `given` is not a list."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise DataError(f"{what} must be a list, but it is of type {type(given).__name__}")
    return list(given)


def _require_unrendered(messages: Sequence[Message]) -> None:
    """Raises `ConfigError` if the dataset has already rendered the prompt, which would be rendered twice."""
    running = EXECUTION.get()
    prompt = None if running is None else running.prompt
    if current().args.apply_chat_template and any(message.text == prompt for message in messages):
        raise ConfigError(
            "current().chat renders messages itself, but --apply-chat-template has already rendered the prompts; drop "
            "that flag, and pass sample.prompt, which is then what the dataset has"
        )


def _tools(given: Tools) -> tuple[Any, ...]:
    """Raises `BadRequest`, `DataError` or `HookError` for what cannot be a tool."""
    return tools_in({"tools": [_schema(tool) if callable(tool) else tool for tool in _listed(given, "tools")]})


def _function(given: Any) -> Any:
    """Raises `HookError` if `given` is not a function."""
    if not inspect.isroutine(given):
        raise HookError(f"{given!r} cannot be a tool that runs; pass a function")
    return given


@functools.cache
def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns a function as a tool. Raises `HookError` if it is none, or its type hints or docstring are incomplete."""
    _function(function)
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
