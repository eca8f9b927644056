"""Rewrites conversations into the message format ("spelling") that a chat template expects.

Datasets represent the same content in different ways: a thought in `reasoning_content`, in `thinking` or inside the
content; tool call arguments as an object or as JSON text; empty content next to a call as null, "" or absent. Given a
format that it does not expect, a template raises an error or silently omits content. Some templates write only one call
per turn, and some omit thoughts or tools. `Spelling.of` probes each template once by rendering two-message
conversations.

Invariants
1. Rewriting loses nothing that the template can write. Content that it omits is listed in `Spelled.left_out`, and is
   never a call or an answer.
2. The calls of a message are split over several messages only if the template writes fewer calls per turn. Each new
   message follows the results of the calls before it, as if the model had made the calls sequentially.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.core.errors import DataError

Message = Mapping[str, Any]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Message fields that datasets use for reasoning. A template reads at most one of them."""
_JSON_LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"separators": (",", ":")},
    {"indent": 4},
    {"indent": 2},
    {"sort_keys": True},
)


def unsaid(message: Message, turn: str) -> list[str]:
    """Returns the parts of a message that are missing from its rendered turn: reasoning, content, calls or arguments.

    Training on such a turn would teach the model to omit them. Each part is searched for after the previous one,
    so that a function name in the content is not mistaken for a call.
    """
    missing: list[str] = []
    at = 0
    for what, texts in (("reasoning", _reasoning(message)), ("content", _content(message))):
        for text in texts:
            found = turn.find(text.strip(), at)
            if found < 0:
                missing.append(what)
            else:
                at = found + len(text.strip())
    for call in functions(message.get("tool_calls")):
        name = str(call.get("name", ""))
        found = turn.find(name, at)
        if found < 0:
            missing.append(f"tool call {name}")
            continue
        behind = found + len(name)
        end = _end_of_arguments(call.get("arguments"), turn, behind)
        if end is None:
            missing.append(f"arguments of tool call {name}")
        at = behind if end is None else end
    return missing


def functions(entries: Any) -> list[Mapping[str, Any]]:
    """Unwraps the `function` level of tools or calls."""
    return [e.get("function", e) for e in entries or () if isinstance(e, Mapping)]


def _reasoning(message: Message) -> list[str]:
    texts: list[str] = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    for text in _texts(message.get("content")):
        thought, closed, _ = text.rpartition("</think>")
        texts += [thought.rpartition("<think>")[2]] if closed else []
    return list(dict.fromkeys(text.strip() for text in texts))


def thought_of(message: Message) -> str:
    """Returns the thought of a message, from a reasoning field or `<think>` tags; empty if there is none."""
    return next(iter(_reasoning(message)), "")


def _content(message: Message) -> list[str]:
    return [text.rpartition("</think>")[2] for text in _texts(message.get("content"))]


def _texts(content: Any) -> list[str]:
    """Returns the texts in a message's content, which is a string or a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        return []
    found = [part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | Mapping)]
    return [text for text in found if isinstance(text, str)]


def _end_of_arguments(arguments: Any, turn: str, start: int) -> int | None:
    """Searches `turn` from `start` for the arguments. Returns their end position; None if any are missing."""
    spellings = [arguments] if isinstance(arguments, str) else list(_spellings(arguments or {}))
    ends = [turn.find(text, start) + len(text) for text in spellings if text in turn[start:]]
    if ends:
        return min(ends)
    if not isinstance(arguments, Mapping):
        return None if arguments else start
    if arguments and str(dict(arguments)) in turn[start:]:  # written as a Python repr instead of JSON
        return None
    end = start
    for key, value in arguments.items():
        at = turn.find(str(key), start)
        leaf_ends = [_end_of_leaf(leaf, turn, at + len(str(key))) for leaf in _leaves(value)] if at >= 0 else [None]
        for found in leaf_ends:
            if found is None:
                return None
            end = max(end, found)
    return end


def _end_of_leaf(leaf: Any, turn: str, start: int) -> int | None:
    texts = [str(leaf), *(json.dumps(leaf, ensure_ascii=ascii_only) for ascii_only in (False, True))]
    # Do not match a number inside a longer one.
    edge = "" if isinstance(leaf, str) else r"\b"
    found = [re.compile(edge + re.escape(text) + edge).search(turn, start) for text in texts]
    return min((match.end() for match in found if match), default=None)


def _leaves(value: Any) -> Iterator[Any]:
    """Yields all keys and values of a nested value, because templates lay out objects differently."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _spellings(value: Any) -> Iterator[str]:
    for layout in _JSON_LAYOUTS:
        for ascii_only in (False, True):
            yield json.dumps(value, ensure_ascii=ascii_only, **layout)


def decoded(arguments: Any) -> Any:
    """Returns call arguments as an object, for templates that serialize them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except ValueError:  # the model wrote invalid JSON
        return arguments
    return value if isinstance(value, dict) else arguments


def encoded(arguments: Any) -> Any:
    """Returns call arguments as JSON text, for templates that paste them verbatim."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str | None]
"""(messages, tools, whether to add a generation prompt) -> text; None if unknown. Raises `DataError` on rejection."""

MASK_KEYS = ("step_loss_mask", "weight")
"""An assistant message with a value of 0 is context and not trained on. OpenAI's fine-tuning files use `weight`."""
REASONING, WORDS, TOOLS = "reasoning", "words beside a call", "tools"
"""Kinds of content that a template may omit."""
THOUGHT_BEGINS, THOUGHT_ENDS = re.compile(r"<think>\s*\Z"), re.compile(r"</think>\s*\Z")
"""Match the end of a generation prompt that opens, or closes, a thought."""

QUESTION: Message = {"role": "user", "content": "probe of a question"}
_ANSWER, _THOUGHT, _INSTRUCTION = "probe of an answer", "probe of a thought", "probe of an instruction"
_PLACES = ("a first place", "a second place", "a third place")
_NAME = "probe_of_a_call"
_FUNCTION = {
    "name": _NAME,
    "description": "A probe.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "A probe."}}},
}
_TOOL = {"type": "function", "function": _FUNCTION}


@dataclass(frozen=True, slots=True)
class Calls:
    """The format in which a template expects messages with calls."""

    empty: Mapping[str, Any] = field(default_factory=lambda: {"content": ""})
    """The content field of a message that has calls but no text."""
    as_text: bool = False
    """Whether arguments must be JSON text."""
    by_id: bool = False
    """Whether the template writes a call's id instead of its name, so that the id must contain the name (Kimi-K2:
    `functions.NAME:NUMBER`).
    """
    most: int | None = None
    """Maximum number of calls per message; None for no limit."""
    with_text: bool = True
    """Whether a message can have both text and a call."""
    with_text_and_thought: bool = True
    """Whether a message can have text, a thought and a call."""


@dataclass(frozen=True, slots=True)
class Spelled:
    messages: list[dict[str, Any]]
    rows: list[int]
    """For each message, the index of the original message."""
    left_out: list[frozenset[str]]
    """For each message, the kinds of content that the template omits."""
    tools: list[Any] | None


@dataclass(frozen=True, slots=True)
class Spelling:
    """The message format that a template expects."""

    thought_key: str | None = None
    """The field from which the template reads thoughts."""
    thought_end: str = ""
    """The text that the template writes between a thought and the answer."""
    splits_thoughts: bool = False
    """Whether the template strips thoughts from the content of earlier turns, so thoughts belong in the content."""
    pastes_thoughts: bool = False
    """Whether the template also writes thoughts that are part of the content, although it has a field for them."""
    begins_thoughts: bool = False
    """Whether the generation prompt ends with `<think>`."""
    ends_thoughts: bool = False
    """Whether the generation prompt ends with `</think>`, which requests an answer without a thought."""
    calls: Calls | None = None
    """The format of calls; None if the template does not write calls."""
    reads_developer: bool = False
    reads_bare_tools: bool = False
    """Whether the template accepts tools without the `function` level."""

    @classmethod
    def of(cls, render: Render) -> Spelling | None:
        """Probes a template by rendering two-message conversations. Returns None if `render` returns None."""
        try:
            return _probed(_Probe(render))
        except _NotKnownError:
            return None

    def spell(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Spelled:
        """Rewrites a conversation. Raises `DataError` if calls must be split but their results are missing."""
        plain = [self._message(m) for m in messages]
        apart = list(_apart([m for m, _ in plain], self.calls or Calls()))
        spelled = [m for m, _ in apart]
        if self.calls is not None and self.calls.by_id:
            spelled = _with_named_ids(spelled)
        wrapped = [self._tool(tool) for tool in tools] if tools else None
        return Spelled(spelled, [row for _, row in apart], [plain[row][1] for _, row in apart], wrapped)

    def _tool(self, tool: Any) -> Any:
        bare = isinstance(tool, Mapping) and "function" not in tool and "name" in tool
        return {"type": "function", "function": tool} if bare and not self.reads_bare_tools else tool

    @property
    def _roles(self) -> Mapping[str, str]:
        """OpenAI role that the template ignores -> replacement."""
        return {"function": "tool"} | ({} if self.reads_developer else {"developer": "system"})

    def _message(self, message: Message) -> tuple[dict[str, Any], frozenset[str]]:
        kept = {k: v for k, v in message.items() if v is not None and k not in MASK_KEYS}
        kept["content"] = joined(message.get("content"))
        if kept["role"] != "assistant":
            kept["role"] = self._roles.get(kept["role"], kept["role"])
            return kept, frozenset()
        if isinstance(called := kept.pop("function_call", None), Mapping):  # OpenAI's legacy format
            kept.setdefault("tool_calls", [called])
        calls = kept.pop("tool_calls", None)
        left_out = self._thought(kept)
        if isinstance(calls, list | tuple) and calls:
            return self._calling(kept, calls, left_out)
        return kept, frozenset(left_out)

    def _thought(self, message: dict[str, Any]) -> set[str]:
        """Moves the thought to the field that the template reads. Returns the kinds of content that are omitted."""
        thoughts = {message[k] for k in REASONING_KEYS if isinstance(message.get(k), str) and message[k].strip()}
        if len(thoughts) > 1:  # ambiguous
            return set()
        for key in REASONING_KEYS:
            message.pop(key, None)
        content = message["content"]
        if self.ends_thoughts:
            if isinstance(content, str) and "</think>" in content:
                thought, _, message["content"] = content.rpartition("</think>")
                message["content"] = message["content"].lstrip("\n")
                thoughts |= {thought.rpartition("<think>")[2].strip()} - {""}
            return {REASONING} if thoughts else set()
        if self.pastes_thoughts and not thoughts and isinstance(content, str):
            thought, ended, answer = content.partition("</think>")
            if ended and thought.lstrip().startswith("<think>"):
                thoughts = {thought.lstrip().removeprefix("<think>").strip()}
                message["content"] = answer.lstrip("\n")
        if thoughts and (self.thought_key is not None or self.begins_thoughts):
            message[self.thought_key or REASONING_KEYS[0]] = thoughts.pop()
        elif thoughts and self.splits_thoughts and isinstance(content, str):
            message["content"] = f"<think>\n{thoughts.pop().strip()}\n</think>\n\n{content}"
        return {REASONING} if thoughts else set()

    def _calling(
        self, message: dict[str, Any], calls: Sequence[Any], left_out: set[str]
    ) -> tuple[dict[str, Any], frozenset[str]]:
        form = self.calls or Calls()
        spelled = [_call(call, form.as_text) for call in calls]
        if not message["content"]:
            del message["content"]
            message |= form.empty
        elif not (form.with_text if self._is_thoughtless(message) else form.with_text_and_thought):
            message |= {"content": ""}
            message |= form.empty
            left_out = left_out | {WORDS}
        return {**message, "tool_calls": spelled}, frozenset(left_out)

    def _is_thoughtless(self, message: Message) -> bool:
        return self.thought_key is None or self.thought_key not in message


def is_trained(message: Message) -> bool:
    """Returns whether the message is trained on. Raises `DataError` for a weight other than 0 or 1."""
    for key in MASK_KEYS:
        if (value := message.get(key)) is not None and value not in (0, 1):
            raise DataError(f'"{key}" of a message must be 1 (trained) or 0 (not trained), got {value!r}')
    return message.get("role") == "assistant" and all(message.get(key) != 0 for key in MASK_KEYS)


def joined(content: Any) -> Any:
    """Joins text parts into a string, because some templates ignore parts and some write their Python repr."""
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        texts = [part if isinstance(part, str) else _text(part) for part in content]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else content
    return content


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if not isinstance(call.get("function"), Mapping):
        own = {k: call[k] for k in ("name", "arguments") if k in call}
        call = {**{k: v for k, v in call.items() if k not in own}, "function": own}
    arguments = (encoded if as_text else decoded)(call["function"].get("arguments") or {})
    return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}


def _apart(messages: Sequence[dict[str, Any]], form: Calls) -> Iterator[tuple[dict[str, Any], int]]:
    """Splits messages that have more than `form.most` calls. Yields (message, index of the original), results last."""
    most, at = form.most, 0
    while at < len(messages):
        message, row = messages[at], at
        at += 1
        calls = message.get("tool_calls") or ()
        if most is None or len(calls) <= most:
            yield message, row
            continue
        results = list(itertools.takewhile(lambda i: messages[i].get("role") == "tool", range(at, len(messages))))
        at += len(results)
        for first in range(0, len(calls), most):
            some = calls[first : first + most]
            yield {**(message if first == 0 else {"role": message["role"], **form.empty}), "tool_calls": some}, row
            own = _results_of(some, results, messages)
            is_last = first + most >= len(calls)
            if len(own) < len(some) and not is_last:
                raise DataError(
                    f"message {row} has {len(calls)} calls, but this chat template writes only {most} per turn. The "
                    f"message can be split only if {len(some)} of them have a result before the next call, but only "
                    f"{len(own)} have; add a tool message for each call, or remove this row"
                )
            for i in [*results] if is_last else own:
                results.remove(i)
                yield messages[i], i


def _results_of(calls: Sequence[Any], results: Sequence[int], messages: Sequence[Message]) -> list[int]:
    """Returns the indices of the tool messages for these calls, matched by id if possible, else by order."""
    ids = {call.get("id") for call in calls if isinstance(call, Mapping)} - {None}
    by_id = [i for i in results if messages[i].get("tool_call_id") in ids]
    return by_id if len(by_id) == len(calls) else list(results[: len(calls)])


def _with_named_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replaces call ids with the function name and a sequence number, and updates the ids of the results."""
    number = itertools.count()
    waiting: dict[Any, list[str]] = {}
    """Old id -> new ids whose results have not been seen yet."""
    out = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                name = f"functions.{call['function'].get('name')}:{next(number)}"
                own = str(call.get("id", ""))
                new = own if own.rpartition(":")[0] == name.rpartition(":")[0] else name
                waiting.setdefault(call.get("id"), []).append(new)
                calls.append({**call, "id": new})
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and any(waiting.values()):
            given = message.get("tool_call_id")
            queue = waiting.get(given) or next(ids for ids in waiting.values() if ids)
            message = {**message, "tool_call_id": queue.pop(0)}
        out.append(message)
    return out


class _NotKnownError(Exception):
    """The output of the template is unknown."""


class _Probe:
    """Renders two-message conversations."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def text(self, messages: Sequence[Message], tools: Any = None, *, add_prompt: bool = False) -> str | None:
        """Renders the messages. Returns None if the template rejects them."""
        try:
            text = self._render(messages, tools, add_prompt)
        except DataError:
            return None
        if text is None:
            raise _NotKnownError
        return text

    def turn(self, message: Message, tools: Any = None) -> str:
        """Renders an assistant message after a question. Returns "" if the template rejects it."""
        prompt, whole = self.text([QUESTION], tools), self.text([QUESTION, message], tools)
        if prompt is None or whole is None:
            return ""
        same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        return whole[same:]

    def says(self, spelling: Spelling, message: Message) -> bool:
        """Returns whether the template writes the complete message in this spelling, with or without tools."""
        (spelled,) = spelling.spell([message]).messages
        turns = [self.turn(spelled, tools) for tools in ([_TOOL], None)]
        return any(turn and not unsaid(message, turn) and _is_even(turn) for turn in turns)


def _probed(probe: _Probe) -> Spelling:
    prompt = probe.text([QUESTION], add_prompt=True) or ""
    begins, ends = bool(THOUGHT_BEGINS.search(prompt)), bool(THOUGHT_ENDS.search(prompt))
    thoughtful = f"<think>{_THOUGHT}</think>{_ANSWER}"
    within = probe.turn(_answer(content=thoughtful))
    developer = {"role": "developer", "content": _INSTRUCTION}
    spelling = Spelling(
        splits_thoughts=_ANSWER in within and _THOUGHT not in within,
        begins_thoughts=begins,
        ends_thoughts=ends,
        reads_developer=_INSTRUCTION in (probe.text([developer, QUESTION], add_prompt=True) or ""),
        reads_bare_tools=_NAME in (probe.text([QUESTION], [_FUNCTION], add_prompt=True) or ""),
    )
    calls = _probed_calls(probe, spelling)
    spelling = replace(spelling, calls=calls)
    for key in () if ends else REASONING_KEYS:
        turns = [probe.turn(_answer(**{key: _THOUGHT}))]
        turns += [probe.turn(spelling.spell([_calling(1)]).messages[0] | {key: _THOUGHT})] if calls else []
        if any(_THOUGHT in turn for turn in turns):
            between = re.search(f"{_THOUGHT}(.*?){_ANSWER}", turns[0], re.DOTALL)
            spelling = replace(spelling, thought_key=key, thought_end=between[1] if between else "")
            break
    if spelling.thought_key is not None and thoughtful in within:
        spelling = replace(spelling, pastes_thoughts=True)
    if calls is None:
        return spelling
    words = {"content": _ANSWER}
    calls = replace(calls, with_text=probe.says(spelling, _calling(1, **words)))
    spelling = replace(spelling, calls=calls)
    both = calls.with_text
    if both and spelling.thought_key is not None:
        both = probe.says(spelling, _calling(1, **words, **{spelling.thought_key: _THOUGHT}))
    return replace(spelling, calls=replace(calls, with_text_and_thought=both))


def _probed_calls(probe: _Probe, spelling: Spelling) -> Calls | None:
    """Returns the first format in which the template writes a call. Tries arguments as objects before JSON text,
    because some templates would encode the text again.
    """
    empties: tuple[dict[str, Any], ...] = ({"content": ""}, {"content": None}, {})
    for by_id, empty, as_text in itertools.product((False, True), empties, (False, True)):
        form = Calls(empty=empty, as_text=as_text, by_id=by_id)
        says = functools.partial(probe.says, replace(spelling, calls=form))
        if says(_calling(1)):
            most = next((num for num in (1, 2) if not says(_calling(num + 1))), None)
            return replace(form, most=most)
    return None


def _is_even(turn: str) -> bool:
    """Returns whether the text between calls is always the same. DeepSeek-V3 ends a turn of three calls twice."""
    places = [(turn.find(place), turn.find(place) + len(place)) for place in _PLACES if place in turn]
    between = {re.sub(r"\d", "", turn[end:start]) for (_, end), (start, _) in itertools.pairwise(places)}
    return len(between) < 2


def _answer(**fields: Any) -> Message:
    return {"role": "assistant", "content": _ANSWER} | fields


def _calling(num: int, **fields: Any) -> Message:
    calls = [
        {"id": f"probe{i}", "type": "function", "function": {"name": _NAME, "arguments": {"place": place}}}
        for i, place in enumerate(_PLACES[:num])
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def writes_tools(tools: Sequence[Any] | None, prompt: str) -> bool:
    """Returns whether the prompt contains the names of all tools."""
    return all(str(function.get("name", "")) in prompt for function in functions(tools))


def omitted_message(messages: Sequence[Message], prompt: str) -> int | None:
    """Returns the index of the first message whose text is not in the rendered prompt, or None. Ignores assistant
    messages, because templates legitimately shorten earlier answers.
    """
    for number, message in enumerate(messages):
        texts = [text.strip() for text in _texts(message.get("content"))]
        if message["role"] != "assistant" and not all(any(s in prompt for s in spellings(text)) for text in texts):
            return number
    return None


def spellings(text: str) -> tuple[str, ...]:
    """Returns the text as it is and as a JSON string, because some templates write tool results as JSON."""
    return (text, *(json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)))
