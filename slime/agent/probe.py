"""Whether a model's chat template allows token in, token out: shown on conversations, one for each thing agents do.

Of each conversation the template writes prompts and answers, turn by turn; between them stand the suffixes of
`ConversationTemplate`. Joined, that has to be what the template writes for the whole conversation. A feature that fails
costs a fork at each turn which uses it; a template that fails at plain turns is refused.

Invariants
1. What is compared are token ids; the counter-example shows the texts from where they part.
2. Thinking alone may differ: a template drops that of earlier turns, the session's tokens keep it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import CLOSE, OPEN
from slime.agent.template import ConversationTemplate, NotAppended
from slime.core.errors import DataError
from slime.data.chat import ChatRenderer, Rendered

PLAIN = "plain turns"
SHOWN = 120
"""Characters of a counter-example."""
_THOUGHT = re.compile(rf"{OPEN}.*?{CLOSE}\s*", re.S)


class State(str, Enum):
    """What becomes of a feature."""

    EXACT = "exact"
    THINKING = "differs only in thinking"
    REFUSED = "refused by the template"
    NOT_APPENDED = "not appended"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one feature."""

    feature: str
    state: State
    detail: str = ""
    """Why not: the template's complaint, or where the texts part."""

    @property
    def works(self) -> bool:
        """Whether a session can use it without a fork."""
        return self.state in (State.EXACT, State.THINKING)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Of a chat template with a tokenizer's end ids."""

    outcomes: tuple[Outcome, ...]
    wrong_ends: str = ""
    """What the template writes behind an answer, if that is not one of the end ids."""

    @property
    def failing(self) -> tuple[str, ...]:
        """The features that a session would have to fork for, or that the template refuses."""
        return tuple(outcome.feature for outcome in self.outcomes if not outcome.works)

    def require_plain_turns(self) -> None:
        """Raises `DataError` with the counter-example if not even plain turns work."""
        plain = next(outcome for outcome in self.outcomes if outcome.feature == PLAIN)
        if self.wrong_ends or not plain.works:
            raise DataError(
                f"got a chat template that does not append turns, because {self.wrong_ends or plain.detail}; give "
                "another as --chat-template FILE, or the end ids in the checkpoint's generation_config.json"
            )


def probe(chat: ChatRenderer, end_ids: Sequence[int]) -> ProbeReport:
    """Plays every conversation. Raises `DataError` without an end id."""
    template = ConversationTemplate(chat, end_ids)
    wrong = _wrong_ends(chat, template)
    outcomes = tuple(_outcome(template, feature, messages, tools) for feature, messages, tools in features(chat))
    return ProbeReport(outcomes, wrong)


# ---- conversations ---------------------------------------------------------------------------------------------------

Conversation = tuple[str, list[Message], list[Any]]

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def features(chat: ChatRenderer) -> list[Conversation]:
    """(feature, conversation, tools). The last messages are never an assistant's: a suffix stands before each turn."""
    ask, answer, more = _user("What is red?"), _said("A colour."), _user("And blue?")
    rest = [_said("One too."), _user("Thanks.")]
    one, two = _called("call00001", "red"), _called("call00002", "blue")
    result, other = _result("call00001", "red: a colour"), _result("call00002", "blue: the sky")
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


def _system(text: str) -> Message:
    return Message("system", text)


def _user(text: str) -> Message:
    return Message("user", text)


def _said(text: str, reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning)


def _calls(*calls: ToolCall, text: str = "", reasoning: str | None = None) -> Message:
    return Message("assistant", text, reasoning, calls)


def _called(call_id: str, word: str) -> ToolCall:
    return ToolCall(call_id, "look_up", f'{{"word":"{word}"}}')


def _result(call_id: str, text: str) -> Message:
    return Message("tool", text, call_id=call_id, name="look_up")


# ---- what becomes of them --------------------------------------------------------------------------------------------


def _wrong_ends(chat: ChatRenderer, template: ConversationTemplate) -> str:
    """Behind a plain answer an end token has to stand at once."""
    messages = [_user("What is red?"), _said("A colour."), _user("And blue?")]
    try:
        text = chat.render([m.for_template() for m in messages]).marked
    except DataError:
        return ""  # the plain turns have the complaint
    at = text.find("A colour.")
    behind = text[at + len("A colour.") :]
    ends = {chat.decode([i]): i for i in sorted(template.end_ids)}
    if at < 0 or any(behind.startswith(end) for end in ends):
        return ""
    given = ", ".join(f"{end!r} (id {i})" for end, i in ends.items())
    does = next((c for c in sorted(chat.control, key=len, reverse=True) if behind.startswith(c)), None)
    if does is None:
        return f"behind an answer it writes {behind[:40]!r}, and of the end ids given, {given}, none stands there"
    return f"it ends a turn with {does!r} (id {chat.encode(Rendered(does))[0]}), and the end ids given are {given}"


def _outcome(
    template: ConversationTemplate, feature: str, messages: Sequence[Message], tools: Sequence[Any]
) -> Outcome:
    chat = template.chat
    try:
        want = chat.encode(chat.render([m.for_template() for m in messages], tools=list(tools) or None))
        got = _played(template, messages, tools)
    except NotAppended as error:
        return Outcome(feature, State.NOT_APPENDED, str(error))
    except DataError as error:
        return Outcome(feature, State.REFUSED, str(error))
    if got == want:
        return Outcome(feature, State.EXACT)
    ours, theirs = chat.decode(got), chat.decode(want)
    if OPEN in ours + theirs and _without_thinking(ours) == _without_thinking(theirs):
        return Outcome(feature, State.THINKING)
    return Outcome(feature, State.NOT_APPENDED, _parting(ours, theirs))


def _played(template: ConversationTemplate, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
    """The tokens of a session in which the model answers as the template writes it."""
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    ids = list(template.prompt(messages[: turns[0]], tools).ids)
    for i, until in zip(turns, [*turns[1:], len(messages)], strict=True):
        answer = _answer(template, messages[:until], i, tools)
        ids += answer
        ids += template.suffix(messages[: i + 1], messages[i + 1 : until], tools, last_id=answer[-1]).ids
    return ids


def _answer(template: ConversationTemplate, messages: Sequence[Message], turn: int, tools: Sequence[Any]) -> list[int]:
    """A turn as the template writes it, with the token that ends it.

    Raises `NotAppended` if it does not begin where its prompt ends.
    """
    chat, named = template.chat, list(tools) or None
    shown = [m.for_template() for m in messages]
    prompt = chat.render(shown[:turn], tools=named).marked
    opened = _open_thinking(prompt)
    start = prompt.removesuffix(opened)
    # Thinking stands in the last turn only; a next header that ends a turn stands in the longer text only.
    alone = chat.render(shown[: turn + 1], tools=named, add_generation_prompt=False).marked
    texts = [alone, chat.render(shown, tools=named).marked]
    begun = [text for text in texts if text.startswith(start)]
    if not begun:
        raise NotAppended(_parting(start, alone))
    found = [(text, *first) for text in begun if (first := template.first_end(text, len(start))) is not None]
    if not found:
        raise NotAppended(
            f"the chat template writes no end token behind an answer: {begun[-1][len(start) :][:SHOWN]!r}"
        )
    text, at, end = found[0]
    said = text[len(start) : at].removeprefix(opened)
    lost = [part for part in (messages[turn].text, *(c.name for c in messages[turn].calls)) if part not in said]
    if lost:
        raise NotAppended(f"the chat template leaves {lost[0]!r} of an answer out: {said[:SHOWN]!r}")
    if opened and CLOSE not in said and CLOSE not in opened:
        said = f"\n{CLOSE}\n\n{said}"
    return [*chat.encode(Rendered(said)), *chat.encode(Rendered(end))]


def _open_thinking(prompt: str) -> str:
    """The end of a prompt that begins the thinking, or does it all."""
    at = prompt.rfind(OPEN)
    thought = prompt[at:] if at >= 0 else ""
    return thought if not thought.removeprefix(OPEN).replace(CLOSE, "").strip() else ""


def _without_thinking(text: str) -> str:
    return _THOUGHT.sub("", text)


def _parting(ours: str, theirs: str) -> str:
    """Where two texts part, with a little of what is before."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, same - 20)
    a, b = ours[start : start + SHOWN], theirs[start : start + SHOWN]
    if a == b:
        return f"the same text becomes other tokens: {ours[-SHOWN:]!r}"
    return f"a session has {a!r} where the template writes {b!r}"
