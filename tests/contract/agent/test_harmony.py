"""gpt-oss against OpenAI's own package for its format: what is read in answers, and what stands behind a turn."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.agent.messages import Message, ToolCall
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate
from slime.data.chat import ChatRenderer
from slime.rollout.client.call import Generation
from tests.contract.agent.test_parsers_against_sglang import ours
from tests.support.agent_histories import TOOLS
from tests.support.answers_with_calls import CUT, DAMAGED, corpus
from tests.support.chat_hooks import tokenizer_folder
from tests.support.chat_templates import PUBLISHED, ids_of, published_tokenizer

pytestmark = pytest.mark.slow
FAMILY = "gpt-oss of its package"


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """OpenAI's encoding. Its vocabulary is that of the tokenizer, as the file whose digest the package asks for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    known = json.loads(Path(tokenizer_folder("gpt-oss"), "tokenizer.json").read_text())["model"]["vocab"]
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    lines = [
        f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}\n"
        for token, rank in sorted(known.items(), key=lambda item: item[1])
    ]
    folder = tmp_path_factory.mktemp("harmony")
    Path(folder, "o200k_base.tiktoken").write_text("".join(lines))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    try:
        import openai_harmony

        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        del os.environ["TIKTOKEN_ENCODINGS_BASE"]


def test_answers_are_read_as_by_openai(harmony: Any) -> None:
    from openai_harmony import Role

    read = [one for one in corpus(6, 20) if one.format == "gpt-oss" and one.kind not in (CUT, DAMAGED)]
    assert len(read) > 100
    for one in read:
        ids = harmony.encode(one.text, allowed_special="all")
        thinking, text, calls = "", "", []
        for message in harmony.parse_messages_from_completion_tokens(ids, Role.ASSISTANT):
            (said,) = (part.text for part in message.content)
            if message.recipient:
                calls.append([message.recipient.removeprefix("functions."), json.loads(said)])
            elif message.channel == "analysis":
                thinking += said
            else:
                text += said
        assert ours(one.format, one.text) == [thinking, text, calls], one.text


def test_behind_a_turn_stands_what_openai_writes_there(harmony: Any) -> None:
    """Law: `<|return|>` is `<|end|>` in the history, `<|call|>` stays."""
    from openai_harmony import Author, Conversation, Role
    from openai_harmony import Message as Theirs

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder("gpt-oss"))  # whole, since ids are compared
    tokenizer.chat_template = published_tokenizer(FAMILY).chat_template
    ends = ids_of(tokenizer, PUBLISHED[FAMILY].ends)
    chat = ChatRenderer(tokenizer, end_ids=ends)
    asked, on = Message("user", "What is red?"), Message("user", "And blue?")
    call = ToolCall("call_1", "search", '{"q":"red"}')
    result = Message("tool", "of red", call_id="call_1", name="search")
    theirs = {
        "asked": Theirs.from_role_and_content(Role.USER, asked.text),
        "said": Theirs.from_role_and_content(Role.ASSISTANT, "A colour.").with_channel("final"),
        "on": Theirs.from_role_and_content(Role.USER, on.text),
        "called": Theirs.from_role_and_content(Role.ASSISTANT, '{"q":"red"}')
        .with_channel("commentary")
        .with_recipient("functions.search")
        .with_content_type("<|constrain|>json"),
        "result": Theirs.from_author_and_content(Author.new(Role.TOOL, "functions.search"), '"of red"')
        .with_channel("commentary")
        .with_recipient("assistant"),
    }
    for said, answer, new, names in [
        ("<|channel|>final<|message|>A colour.", Message("assistant", "A colour."), [on], ("asked", "said", "on")),
        (None, Message("assistant", "", None, (call,)), [result], ("asked", "called", "result")),
    ]:
        want = harmony.render_conversation_for_completion(
            Conversation.from_messages([theirs[name] for name in names]), Role.ASSISTANT
        )
        text = harmony.decode(want)
        said = said or text[text.index(" to=functions") : text.index("<|call|>")]
        for end in ends:
            session = Session(ConversationTemplate(chat, ends))
            opened = session.open_turn([asked], TOOLS)
            ids = [*tokenizer(said, add_special_tokens=False)["input_ids"], end]
            session.end_turn(opened, answer, Generation(tuple(ids), (0.0,) * len(ids), "stop", 1, ""))
            got = session.open_turn([asked, answer, *new], TOOLS).branch.tokens
            assert got[-len(want) :] == want, (tokenizer.decode(got)[-400:], text)
