"""Tests whether a chat template supports token in, token out, with one conversation per feature that agents use.

Each conversation is played turn by turn: the template writes prompts and answers, and `ConversationTemplate` writes the
suffixes between them. Their concatenation must equal the template's output for the entire conversation. A feature that
fails costs a fork at every turn that uses it. A template that fails on plain turns is rejected. Tools are rejected if
the template does not write them, or writes calls that no parser can read (`tools_problem`).

Invariants
1. Token ids are compared; a counterexample shows the texts from the first difference onwards.
2. Only thinking may differ: templates drop the thinking of earlier turns, but the session's tokens keep it.
3. Call ids have the format of the model's family.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import CLOSE, OPEN, ToolFormat, format_or_text, known_format
from slime.agent.template import NO_TOOLS, ConversationTemplate, NotAppended
from slime.core.errors import ConfigError, DataError
from slime.data.chat import ChatRenderer, Rendered

PLAIN = "plain turns"
SHOWN = 120
"""Maximum length of a counterexample in messages, in characters."""


class State(str, Enum):
    EXACT = "exact"
    THINKING = "differs only in thinking"
    BRANCHES = "in a new branch: the model's end token differs from the template's"
    REFUSED = "rejected by the template"
    NOT_APPENDED = "not appended"


@dataclass(frozen=True, slots=True)
class Outcome:
    feature: str
    state: State
    detail: str = ""
    """The template's error message, or where the texts differ."""

    @property
    def works(self) -> bool:
        """Whether a session can use the feature without a fork."""
        return self.state in (State.EXACT, State.THINKING)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    outcomes: tuple[Outcome, ...]
    endings: tuple[tuple[str, str], ...] = ()
    """(role of a message, token that ends the answer before that message)."""
    wrong_ends: str = ""
    """What the template writes after an answer instead of an end token; empty if it writes one."""

    @property
    def failing(self) -> tuple[str, ...]:
        """Features that cost a fork or that the template rejects."""
        return tuple(outcome.feature for outcome in self.outcomes if not outcome.works)

    def require_plain_turns(self) -> None:
        """Raises `DataError` with a counterexample if even plain turns fail."""
        plain = next(outcome for outcome in self.outcomes if outcome.feature == PLAIN)
        if self.wrong_ends or not (plain.works or plain.state is State.BRANCHES):
            raise DataError(
                f"the chat template does not append turns: {self.wrong_ends or plain.detail}; set another "
                "template with --chat-template FILE, or set the end ids in generation_config.json"
            )


def probe(chat: ChatRenderer, end_ids: Sequence[int], tool_format: str | None = None) -> ProbeReport:
    """Tests every feature. `tool_format`: how the model writes calls; None: derived from the chat template.

    Raises `DataError` if `end_ids` is empty.
    """
    template = ConversationTemplate(chat, end_ids)
    calls = format_or_text(chat.template, tool_format)
    wrong = _wrong_ends(chat, template)
    outcomes = tuple(_outcome(template, calls, *conversation) for conversation in features(chat, calls))
    return ProbeReport(outcomes, tuple(_endings(template, calls)), wrong)


def tools_problem(template: ConversationTemplate, tool_format: str | None = None) -> str:
    """Returns why this chat template cannot train agents that use tools; empty if it can.

    `tool_format`: how the model writes calls; None: derived from the chat template.
    """
    if not template.writes_tools:
        return NO_TOOLS
    try:
        calls = known_format(template.chat.template, tool_format)
    except ConfigError as error:
        return str(error)
    one = _called(calls, 0, "red")
    conversation = [_user("What is red?"), _calls(one), _result(one, "a colour")]
    try:
        turn = _written(template, calls, conversation, 1, [LOOK_UP])
    except DataError:
        return ""  # the template rejects or moves calls
    reader = calls.reader([LOOK_UP], turn.prompt)
    got = reader.all(turn.said + (turn.end if turn.end in reader.ends else ""))
    if not calls.marks or got.calls == ((one.name, one.arguments),):
        return ""
    return (
        f"the chat template writes a call as {turn.said.strip()[:SHOWN]!r}, which the format {calls.name} cannot "
        "parse; set the right format with --agent-tool-format, or set a different template with --chat-template FILE"
    )


Conversation = tuple[str, list[Message], list[Any]]

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def features(chat: ChatRenderer, calls: ToolFormat) -> list[Conversation]:
    """Returns the conversations to play. None of them ends with an assistant message, so each
    suffix leads to another turn.
    """
    ask, answer, more = _user("What is red?"), _said("A colour."), _user("And blue?")
    rest = [_said("One too."), _user("Thanks.")]
    one, two = _called(calls, 0, "red"), _called(calls, 1, "blue")
    result, other = _result(one, "red: a colour"), _result(two, "blue: the sky")
    controls = "a " + " ".join(sorted(chat.structural)) + " b"
    tools: list[Any] = [LOOK_UP]
    return [
        (PLAIN, [ask, answer, more, *rest], []),
        ("system prompt", [_system("Be brief."), ask, answer, more, *rest], []),
        ("tools in the prompt", [ask, answer, more, *rest], tools),
        ("call with its result", [ask, _calls(one), result, answer, more], tools),
        ("two calls at once", [ask, _calls(one, two), result, other, answer, more], tools),
        ("rounds of calls", [ask, _calls(one), result, _calls(two), other, answer, more], tools),
        ("text beside a call", [ask, _calls(one, text="I look it up."), result, answer, more], tools),
        ("thinking", [ask, _said("A colour.", "They ask for red."), more, *rest], []),
        (
            "thinking before a call",
            [ask, _calls(one, reasoning="I do not know red."), result, _said("A colour.", "So that is it."), more],
            tools,
        ),
        ("empty answer", [ask, _said(""), more, *rest], []),
        ("system message in the middle", [ask, answer, _system("Be brief now."), more, *rest], []),
        ("control tokens in a text", [ask, answer, _user(controls), *rest], []),
    ]


_system, _user, _said = (partial(Message, role) for role in ("system", "user", "assistant"))


def _calls(*calls: ToolCall, text: str = "", reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning, calls)


def _called(calls: ToolFormat, number: int, word: str) -> ToolCall:
    return ToolCall(calls.call_id("look_up", number), "look_up", f'{{"word":"{word}"}}')


def _result(call: ToolCall, text: str) -> Message:
    return Message("tool", text, call_id=call.id, name=call.name)


def _wrong_ends(chat: ChatRenderer, template: ConversationTemplate) -> str:
    """Describes what follows an answer if it is not an end token; empty if it is one."""
    messages = [_user("What is red?"), _said("A colour."), _user("And blue?")]
    try:
        text = chat.render([m.for_template() for m in messages]).marked
    except DataError:
        return ""  # `require_plain_turns` reports it
    at = text.find("A colour.")
    behind = text[at + len("A colour.") :]
    ends = {chat.decode([i]): i for i in sorted(template.end_ids)}
    if at < 0 or any(behind.startswith(end) for end in ends) or _end_alone(template, messages[:2]) in ends:
        return ""
    given = ", ".join(f"{end!r} (id {i})" for end, i in ends.items())
    does = next((c for c in sorted(chat.control, key=len, reverse=True) if behind.startswith(c)), None)
    if does is None:
        return f"it writes {behind[:40]!r} after an answer, which is not one of the end ids {given}"
    return f"it ends a turn with {does!r} (id {chat.encode(Rendered(does))[0]}), but the end ids are {given}"


def _end_alone(template: ConversationTemplate, messages: Sequence[Message]) -> str:
    """Returns the end token right after the last answer of a conversation. gpt-oss uses a special token there."""
    with contextlib.suppress(DataError):
        text = template.chat.render([m.for_template() for m in messages], add_generation_prompt=False).marked
        first = template.first_end(text.rpartition(messages[-1].text)[2])
        return first[1] if first is not None and not first[0] else ""
    return ""


def _endings(template: ConversationTemplate, calls: ToolFormat) -> Iterator[tuple[str, str]]:
    """Yields the entries of `ProbeReport.endings`."""
    one = _called(calls, 0, "red")
    said, tools = [_user("What is red?"), _said("A colour.")], [LOOK_UP] if template.writes_tools else []
    for new, before in ((_user("And blue?"), said), (_system("Be brief."), said), (_result(one, "red"), None)):
        turn = [_user("What is red?"), _calls(one)] if before is None else before
        with contextlib.suppress(DataError):
            first = template.suffix(turn, [new], tools, last_id=None).ids[0]
            yield new.role, template.chat.decode([first])


def _outcome(
    template: ConversationTemplate,
    calls: ToolFormat,
    feature: str,
    messages: Sequence[Message],
    tools: Sequence[Any],
) -> Outcome:
    chat = template.chat
    try:
        want = chat.encode(chat.render([m.for_template() for m in messages], tools=list(tools) or None))
        got, branches = _played(template, calls, messages, tools)
    except NotAppended as error:
        return Outcome(feature, State.NOT_APPENDED, str(error))
    except DataError as error:
        return Outcome(feature, State.REFUSED, str(error))
    ours, theirs = chat.decode(got), chat.decode(want)
    bare = [calls.thought.sub("", text) for text in (ours, theirs)]
    if got != want and (bare == [ours, theirs] or bare[0] != bare[1]):
        return Outcome(feature, State.NOT_APPENDED, _parting(ours, theirs))
    if branches:
        return Outcome(feature, State.BRANCHES)
    return Outcome(feature, State.EXACT if got == want else State.THINKING)


def _played(
    template: ConversationTemplate, calls: ToolFormat, messages: Sequence[Message], tools: Sequence[Any]
) -> tuple[list[int], int]:
    """Plays a session in which the model writes exactly the answers that the template would.

    Returns (the session's tokens, number of branches caused by a different end token). If the prompt opens the
    thinking, the model closes it.
    """
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    ids = list(template.prompt(messages[: turns[0]], tools).ids)
    branches = 0
    for i, until in zip(turns, [*turns[1:], len(messages)], strict=True):
        turn = _written(template, calls, messages[:until], i, tools)
        said, last = template.chat.encode(Rendered(turn.said)), template.chat.encode(Rendered(turn.end))
        between = messages[: i + 1], messages[i + 1 : until], tools
        if not last:  # the next header ends the turn if it is an end token of the model
            own = template.suffix(*between, last_id=None).ids[:1]
            last = list(own) if template.end_ids.issuperset(own) else [min(template.end_ids)]
        suffix = template.suffix(*between, last_id=last[0])
        branches += suffix.other_end
        ids += [*said, *([] if suffix.other_end else last), *suffix.ids]
    return ids, branches


@dataclass(frozen=True, slots=True)
class _Turn:
    prompt: str
    said: str
    end: str
    """The token that ends the turn if it is the last one; empty if the template writes none."""


def _written(
    template: ConversationTemplate, calls: ToolFormat, messages: Sequence[Message], turn: int, tools: Sequence[Any]
) -> _Turn:
    """Renders one turn. Raises `NotAppended` if the turn does not begin where its prompt ends."""
    chat, named = template.chat, list(tools) or None
    shown = [m.for_template() for m in messages]
    prompt = chat.render(shown[:turn], tools=named).marked
    opened = _open_thinking(prompt)
    start = prompt.removesuffix(opened)
    # Templates write the thinking of the last turn only.
    alone = chat.render(shown[: turn + 1], tools=named, add_generation_prompt=False).marked
    whole = chat.render(shown, tools=named).marked
    bare = calls.thought.sub("", start), calls.thought.sub("", alone)  # this turn may drop earlier turns' thinking
    tried = [(start, alone), (start, whole), bare]
    start, text = next(((at, one) for at, one in tried if one.startswith(at)), ("", ""))
    if not text:
        raise NotAppended(_parting(tried[0][0], alone))
    first = template.first_end(text, len(start))
    if first is None and text == whole:
        raise NotAppended(f"the chat template writes no end token after an answer: {text[len(start) :][:SHOWN]!r}")
    at, end = first or (len(text), "")
    said = text[len(start) : at].removeprefix(opened)
    lost = [part for part in (messages[turn].text, *(c.name for c in messages[turn].calls)) if part not in said]
    if lost:
        raise NotAppended(f"the chat template omits {lost[0]!r} from an answer: {said[:SHOWN]!r}")
    if opened and CLOSE not in said and CLOSE not in opened:
        said = f"\n{CLOSE}\n\n{said}"
    return _Turn(prompt, said, end)


def _open_thinking(prompt: str) -> str:
    """Returns the end of a prompt that opens the thinking or contains empty thinking; else empty."""
    at = prompt.rfind(OPEN)
    thought = prompt[at:] if at >= 0 else ""
    return thought if not thought.removeprefix(OPEN).replace(CLOSE, "").strip() else ""


def _parting(ours: str, theirs: str) -> str:
    """Describes where two texts differ, with some context."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, same - 20)
    a, b = ours[start : start + SHOWN], theirs[start : start + SHOWN]
    if a == b:
        return f"the same text has different tokens: {ours[-SHOWN:]!r}"
    return f"the session has {a!r} where the template writes {b!r}"
