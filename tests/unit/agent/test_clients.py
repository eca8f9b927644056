"""Clients that write a history in their own way: what they send back is the same conversation, and one sample.

Random conversations go through the wire formats as JSON. Between requests, a client drops thinking, writes numbers and
arguments as JavaScript does, splits and trims text, and now and then shortens its history. `Player.check` is the oracle
of what is trained; the number of shortened histories is the oracle of forks.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.agent.adapters.adapter import Answer, Wire
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses
from slime.agent.messages import Message, ToolCall, canonical_arguments
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.core.sample import Sample
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from tests.support.agent_histories import LONGEST_TURN, TOOLS, Player
from tests.support.agent_room import turns_with_calls
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer, with_template
from tests.support.marks import quick
from tests.unit.agent.test_endings import BEFORE

FAMILIES = ("qwen3", "glm4.6", "gpt-oss", "kimi-k2", "deepseek-v3.2", "minimax-m2", "llama3.1", "mistral")
ONE_CALL = ("gpt-oss", "llama3.1")
"""Their templates know one call in a turn."""
REQUESTS = 6
NUMBERS: tuple[Any, ...] = (0, 1.0, -0.0, 1e3, 2.5, 1e21, 12345678901234567890, 9007199254740993, -7, 1e-7, True)
WORDS = ("red", "a\u0301", "\U0001f600", "x = [1, 2]", "Gr\u00f6\u00dfe", "\u4f60\u597d", '"quoted"', "a\\b", "</b>")


def as_javascript(value: Any) -> Any:
    """What `JSON.parse` and `JSON.stringify` make of a value: doubles are its only numbers."""
    if isinstance(value, dict):
        return {name: as_javascript(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_javascript(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 1e21 else number
    return value


@dataclass
class Client(Player):
    """An agent behind one wire format that means no change, but writes as it likes."""

    family: str = ""
    compacted: int = 0
    wire: Wire = field(default_factory=ChatCompletions)
    turns: list[list[dict[str, Any]]] = field(default_factory=list)
    """The history as the client keeps it: for each message, what it sends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wire = self.random.choice((ChatCompletions, Responses, Messages))()

    def words(self) -> str:
        rng = self.random
        return rng.choice((" ", "\n", "  ")).join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))

    def answer(self) -> tuple[Message, Generation, bool]:
        """Any ids, with the end token that the template expects, and a message that an adapter might read in them."""
        rng = self.random
        num_calls = rng.choice((0, 1, 1, 2)) if self.template.writes_tools else 0
        calls = []
        for number in range(min(num_calls, 1) if self.family in ONE_CALL else num_calls):
            given = {name: rng.choice((*NUMBERS, *WORDS, [1.0, {"b": 1e3}], None)) for name in ("q", "a", "\u00e4")}
            calls.append(ToolCall(f"functions.search:{len(self.asked)}{number}", "search", canonical_arguments(given)))
        end = BEFORE[self.family]["tool" if calls else "user"]
        end = "<|return|>" if end == "<|end|>" else end
        ids = [rng.randrange(self.num_ids) for _ in range(rng.randrange(LONGEST_TURN))]
        ids = [i for i in ids if i not in self.template.end_ids] + ids_of(self.tokenizer, [end])
        text = rng.choice(("", "", " \n")) if calls else ""
        text = text or rng.choice(("", "\n\n")) + self.words() + rng.choice(("", "\n", " "))
        message = Message("assistant", text, rng.choice((None, "I think.\nSo \u00e4.\n")), tuple(calls))
        return message, Generation(tuple(ids), (-0.5,) * len(ids), "stop", self.version, ""), False

    # ---- how a client writes -----------------------------------------------------------------------------------------

    def numbers(self, value: Any) -> Any:
        return as_javascript(value) if self.random.random() < 0.5 else value

    def arguments(self, text: str) -> str:
        value = self.numbers(json.loads(text))
        if self.random.random() < 0.5:
            value = dict(reversed(value.items()))
        form = self.random.choice(({"indent": 2}, {"ensure_ascii": False}, {"separators": (",", ":")}, {}))
        return json.dumps(value, **form)

    def spaced(self, text: str) -> str:
        return self.random.choice((text, text.strip(), text + "\n", text.rstrip()))

    def parts(self, text: str, kind: str) -> Any:
        cut = self.random.randrange(len(text) + 1)
        one, two = ({"type": kind, "text": part} for part in (text[:cut], text[cut:]))
        return self.random.choice((text, [{"type": kind, "text": text}], [one, two]))

    def sent_back(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer in a response body, as the client sends it in its history."""
        match self.wire:
            case ChatCompletions():
                return [self.chat(body["choices"][0]["message"])]
            case Responses():
                items = [self.item(item) for item in body["output"]]
                return [item for item in items if item is not None]
            case _:
                blocks = [self.block(block) for block in body["content"]]
                return [{"role": "assistant", "content": [block for block in blocks if block is not None]}]

    def chat(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.random.random() < 0.5:
            message.pop("reasoning_content", None)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = self.arguments(call["function"]["arguments"])
        text = self.spaced(message.pop("content") or "")
        message["content"] = self.parts(text, "text") if text.strip() else self.random.choice((None, "", [], text))
        return message

    def item(self, item: dict[str, Any]) -> dict[str, Any] | None:
        if item["type"] == "reasoning" and self.random.random() < 0.5:
            return None if self.random.random() < 0.5 else {**item, "content": None, "encrypted_content": "x"}
        if item["type"] == "function_call":
            return {**item, "arguments": self.arguments(item["arguments"])}
        if item["type"] == "message":
            return {**item, "content": self.parts(self.spaced(item["content"][0]["text"]), "output_text")}
        return item

    def block(self, block: dict[str, Any]) -> dict[str, Any] | None:
        if block["type"] == "thinking" and self.random.random() < 0.5:
            return None if self.random.random() < 0.5 else {"type": "redacted_thinking", "data": "x"}
        if block["type"] == "tool_use":
            return {**block, "input": self.numbers(block["input"])}
        if block["type"] == "text":
            text = self.spaced(block["text"])
            return {"type": "text", "text": text} if text.strip() else None
        return block

    def user(self, text: str) -> dict[str, Any]:
        content = self.parts(text, "text")
        if isinstance(self.wire, Messages):  # which joins blocks by line breaks
            content = self.random.choice((text, [{"type": "text", "text": text}]))
        return {"role": "user", "content": content}

    def results(self, answer: Message) -> list[dict[str, Any]]:
        texts = [(call.id, self.words()) for call in answer.calls]
        match self.wire:
            case ChatCompletions():
                return [{"role": "tool", "tool_call_id": id, "content": self.parts(t, "text")} for id, t in texts]
            case Responses():
                return [{"type": "function_call_output", "call_id": id, "output": t} for id, t in texts]
            case _:
                blocks = [{"type": "tool_result", "tool_use_id": id, "content": t} for id, t in texts]
                return [{"role": "user", "content": blocks}] if blocks else []

    # ---- a conversation ----------------------------------------------------------------------------------------------

    def body(self, history: list[dict[str, Any]]) -> dict[str, Any]:
        tools: list[Any] = TOOLS if self.template.writes_tools else []
        functions = [tool["function"] for tool in tools]
        match self.wire:
            case ChatCompletions():
                return {"messages": [{"role": "system", "content": "Be brief."}, *history], "tools": tools}
            case Responses():
                flat = [{"type": "function", **function} for function in functions]
                return {"instructions": "Be brief.", "input": history, "tools": flat}
            case _:
                named = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
                return {"system": "Be brief.", "messages": history, "tools": named}

    def play(self, num_requests: int) -> None:
        history, shortened = [self.user(self.words())], False
        for number in range(num_requests):
            if number and self.session.branches and self.random.random() < 0.1:
                history, shortened = [self.user(f"summary {self.seed} {number}: {self.words()}")], True
            request = self.wire.request(json.loads(json.dumps(self.body(history))))
            answer = self.ask(list(request.messages), request.tools)
            assert not self.refused, self.seed
            if answer is None:  # lost on the way: the client asks again
                continue
            self.compacted, shortened = self.compacted + shortened, False
            finish = "calls" if answer.calls else "stop"
            response = self.wire.response(Answer("id", answer, finish, 1, 1, 0, False), request)
            history += self.sent_back(json.loads(json.dumps(response)))
            history += self.results(answer) or [self.user(self.words())]


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3", "glm4.6"))
@pytest.mark.parametrize("num", [60, pytest.param(1250, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_client_that_changes_nothing_forks_nothing(family: str, num: int) -> None:
    """Law: what was sampled is trained, once; only a shortened history, and an end that the template rejects, forks."""
    tokenizer = published_tokenizer(family)
    template = ConversationTemplate(published_chat(family), ids_of(tokenizer, PUBLISHED[family].ends))
    num_ids, seen = len(tokenizer), Counter[str]()
    for seed in range(num):
        client = Client(template, tokenizer, num_ids, seed, family=family)
        client.play(REQUESTS)
        forks = +client.check()
        if family == "gpt-oss":  # it ends a turn before a user message with a token that no model samples
            forks.pop("ending", None)
        assert forks == +Counter(compaction=client.compacted), (family, seed, forks, client.compacted)
        seen += Counter(turns=len(client.asked), compacted=client.compacted)
        made = client.session.samples(Sample(index=0, group_index=0))
        seen["thinking_dropped"] += sum(sample.metadata["agent"]["thinking_dropped"] for sample in made)
    assert seen["turns"] == num * REQUESTS and seen["compacted"] > num / 5 and seen["thinking_dropped"] > num / 5, seen
    print(family, dict(seen))


SAID = Message("assistant", "Let me look.", "I think.", (ToolCall("c", "search", '{"a":1.0,"q":"red  x"}'),))
ASKED, REPLY = Message("user", "Go."), Message("tool", "seen", call_id="c")
EDITS = {
    "another text": {"text": "Let me look!"},
    "another thought": {"reasoning": "I do not think."},
    "a number": {"arguments": '{"a":1.5,"q":"red  x"}'},
    "a string for a number": {"arguments": '{"a":"1","q":"red  x"}'},
    "true for a number": {"arguments": '{"a":true,"q":"red  x"}'},
    "spaces in an argument": {"arguments": '{"a":1.0,"q":"red x"}'},
    "a key": {"arguments": '{"b":1.0,"q":"red  x"}'},
    "another function": {"name": "read"},
    "no call": {"calls": ()},
}


@pytest.mark.parametrize("what", EDITS)
def test_a_real_edit_still_forks(what: str) -> None:
    tokenizer = published_tokenizer("qwen3")
    template = ConversationTemplate(published_chat("qwen3"), ids_of(tokenizer, PUBLISHED["qwen3"].ends))
    session = Session(template)
    opened = session.open_turn([ASKED], TOOLS)
    session.end_turn(opened, SAID, Generation((5, 6, 7), (-0.5,) * 3, "stop", 1, ""))
    same = Message("assistant", " Let me look.\n", None, (ToolCall("d", "search", '{"a":1,"q":"red  x"}'),))
    opened = session.open_turn([ASKED, same, REPLY], TOOLS)
    session.end_turn(opened, Message("assistant", "Done."), Generation((8, 9), (-0.5,) * 2, "stop", 1, ""))
    assert not +session.forks and session.branches[0].unthought == {1}
    edit: dict[str, Any] = dict(EDITS[what])
    call = ToolCall("c", edit.pop("name", "search"), edit.pop("arguments", SAID.calls[0].arguments))
    given = {"text": SAID.text, "reasoning": SAID.reasoning, "calls": (call,), **edit}
    session.open_turn([ASKED, Message("assistant", **given), REPLY], TOOLS)
    assert +session.forks == Counter(["edited" if what == "another thought" else "foreign"])


def test_a_result_that_the_template_writes_as_a_json_string_is_appended() -> None:
    """As Llama 3.1's and gpt-oss' templates write it: with line breaks and quotes spelled out."""
    tokenizer = with_template("qwen3", turns_with_calls("").replace("m.content", "(m.content | tojson)"))
    template = ConversationTemplate(ChatRenderer(tokenizer), ids_of(tokenizer, ["<|im_end|>"]))
    session = Session(template)
    opened = session.open_turn([ASKED], TOOLS)
    session.end_turn(opened, SAID, Generation((5, 6), (-0.5,) * 2, "stop", 1, ""))
    result = Message("tool", 'one\n"two"\t\u00e4\\', call_id="c")
    opened = session.open_turn([ASKED, SAID, result], TOOLS)
    assert not +session.forks
    assert json.dumps(result.text, ensure_ascii=False) in tokenizer.decode(list(opened.branch.tokens))


def test_javascript_is_imitated_as_it_is() -> None:
    """By the forms that ECMA-262 gives: Number::toString without exponents below 1e21."""
    assert json.dumps(as_javascript([1.0, 1e3, 1e20, 1e21, 0.5, 9007199254740993, -0.0, True])) == (
        "[1, 1000, 100000000000000000000, 1e+21, 0.5, 9007199254740992, 0, true]"
    )
