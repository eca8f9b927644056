"""What follows a turn is what the chat template writes there, whichever of its end tokens the model sampled.

The oracles are transformers, which renders and encodes whole conversations, and a table written by hand: the token with
which a family's template ends a turn before a message of each role.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime.agent.messages import Message, ToolCall
from slime.agent.parsers import FORMATS, format_of
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rollout.client.call import Generation
from tests.support.agent_histories import TOOLS
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer
from tests.support.marks import quick

IM_END, EOS = "<|im_end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
GLM = {"user": "<|user|>", "tool": "<|observation|>", "system": "<|system|>"}
BEFORE: dict[str, dict[str, str]] = {
    "qwen2.5": dict.fromkeys(GLM, IM_END),
    "qwen3": dict.fromkeys(GLM, IM_END),
    "qwen3-next": dict.fromkeys(GLM, IM_END),
    "qwen3.5": {"user": IM_END, "tool": IM_END},
    "smollm2": dict.fromkeys(GLM, IM_END),
    "deepseek-v3": {"user": EOS, "tool": EOS},
    "deepseek-r1": {"user": EOS, "tool": EOS},
    "deepseek-v3.2": dict.fromkeys(GLM, EOS),
    "llama3.1": dict.fromkeys(GLM, "<|eot_id|>"),
    "mistral": dict.fromkeys(GLM, "</s>"),
    "glm4": GLM,
    "glm4 with tools": GLM,
    "glm4.6": GLM,
    "glm4.7": GLM,
    "kimi-k2": dict.fromkeys(GLM, IM_END),
    "minimax-m2": {"user": "[e~[", "tool": "[e~["},
    "gpt-oss": {"user": "<|end|>", "tool": "<|call|>"},
    "gemma3": {"user": "<end_of_turn>"},
    "phi3": {"user": "<|end|>", "system": "<|end|>"},
    "phi4": dict.fromkeys(GLM, IM_END),
}
"""Family -> role of the next message -> the token. What is missing the template refuses, or writes elsewhere."""
ASKED = Message("user", "What is red?")
SAID = Message("assistant", "A colour.")


def conversations(calls: bool, call_id: Any) -> dict[str, tuple[Message, list[Message]]]:
    """Name -> (answer, what follows it)."""
    one, two = (ToolCall(call_id("search", i), "search", f'{{"q":"{q}"}}') for i, q in enumerate(("red", "blue")))
    called, twice = (Message("assistant", "", None, c if calls else ()) for c in ((one,), (one, two)))
    first, second = (
        Message("tool", f"of {call.arguments[6:-2]}", call_id=call.id, name="search") for call in (one, two)
    )
    on = Message("user", "And blue?")
    return {
        "user": (SAID, [on]),
        "user behind a call that cannot be read": (Message("assistant", "so: call search red"), [on]),
        "system": (SAID, [Message("system", "Be brief."), on]),
        "tool": (called if calls else SAID, [first]),
        "tool, then user": (called if calls else SAID, [first, on]),
        "tools": (twice if calls else SAID, [first, second]),
    }


class Family:
    """A template with its tokenizer, and transformers beside it."""

    def __init__(self, name: str) -> None:
        self.tokenizer, self.chat = published_tokenizer(name), published_chat(name)
        self.ends = ids_of(self.tokenizer, PUBLISHED[name].ends)
        self.template = ConversationTemplate(self.chat, self.ends)
        self.tools = TOOLS if self.template.writes_tools else []
        self.calls = FORMATS.build(format_of(self.chat.template) or "text", None)

    def whole(self, messages: list[Message]) -> str:
        """As transformers renders it. Raises what the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                [m.for_template() for m in messages],
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def generation(ids: list[int]) -> Generation:
    return Generation(tuple(ids), (-0.5,) * len(ids), "stop", 1, "")


def play(family: Family, answer: Message, new: list[Message], end: str, last: int | None) -> None:
    """One turn that the model ends with `last`, and the next request. `end`: with what the template ends it."""
    history, on = [ASKED], [ASKED, answer, *new]
    prompt, whole = family.whole(history), family.whole(on)
    opened = re.search(r"(?:<think>\s*)?\Z", prompt)
    assert opened is not None and whole.startswith(prompt[: opened.start()]), (prompt, whole)
    rest = whole[opened.start() :]
    said_until = max((rest.index(c.arguments[6:-2]) for c in answer.calls), default=rest.index(answer.text))
    at = rest.index(end, said_until)
    said = rest[:at]
    if opened[0]:
        said = f"hm{said}" if said.startswith("</think>") else f"hm\n</think>\n\n{said}"

    session = Session(family.template)
    first = session.open_turn(history, family.tools)
    assert first.branch.tokens == family.ids(prompt)
    sampled = [*family.ids(said), *([] if last is None else [last])]
    session.end_turn(first, answer, generation(sampled))
    counted = session.num_prompt_tokens(on, family.tools)
    second = session.open_turn(on, family.tools)
    cut = [] if last is None or last in family.ends else [last]  # by a limit, or a stop string
    assert second.branch.tokens == [*family.ids(prompt), *family.ids(said), *cut, *family.ids(rest[at:])]
    assert counted == len(second.branch.tokens)
    if not opened[0] and not cut:
        assert second.branch.tokens == family.ids(whole), "transformers gives other tokens for the whole conversation"

    (own,) = family.ids(end)
    left = last in family.ends and last != own
    assert second.branch.why == ("ending" if left else "first")
    session.end_turn(second, SAID, generation([7]))
    trained = [
        [i for i, m in zip(s.tokens[-s.response_length :], s.loss_mask or (), strict=True) if m]
        for s in session.samples(Sample(index=0, group_index=0))
    ]
    assert trained == ([sampled, [7]] if left else [[*sampled, 7]]), "each sampled token is trained once"


QUICK = "glm4.6"
"""An end for each role; the others take seconds each to load."""


@pytest.mark.parametrize("name", quick(BEFORE, QUICK))
def test_behind_any_end_token_stands_what_the_template_writes_before_the_next_role(name: str) -> None:
    family = Family(name)
    can_call = bool(family.tools) and family.calls.name != "text"
    others = family.ids("x")[:1]
    for what, (answer, new) in conversations(can_call, family.calls.call_id).items():
        if name in ("gpt-oss", "llama3.1") and len(answer.calls) > 1:
            continue  # their templates know one call in a turn
        end = BEFORE[name].get(new[0].role)
        for last in (*family.ends, *others, None):
            if end is not None:
                play(family, answer, new, end, last)
                continue
            session = Session(family.template)
            opened = session.open_turn([ASKED], family.tools)
            session.end_turn(opened, answer, generation([*others, *([] if last is None else [last])]))
            try:
                want = family.ids(family.whole([ASKED, answer, *new]))
            except Exception:
                with pytest.raises(DataError, match="the chat template rejects the messages"):
                    session.open_turn([ASKED, answer, *new], family.tools)
            else:
                again = session.open_turn([ASKED, answer, *new], family.tools).branch
                assert (again.tokens, again.why) == (want, "template"), what
