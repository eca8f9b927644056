"""Laws of chat rendering: data never becomes control tokens, and each turn is trained behind its prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.core.errors import ConfigError, DataError
from slime.data.chat import ChatRenderer
from slime.data.sft_loss_mask import SftTokens, sft_row
from tests.support.chat_templates import spans
from tests.support.tiny import FORGETFUL_TEMPLATE, SPECIAL_TOKENS, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


@pytest.fixture
def tokenizer(directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def say(*texts: str, **extra) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": text, **extra} for i, text in enumerate(texts)]


def one(messages: list[dict], chat: ChatRenderer) -> SftTokens:
    """The only sample of a row."""
    (sample,) = sft_row(messages, chat).samples
    return sample


def control_ids(tokenizer, ids) -> list[str]:
    return [t for t in tokenizer.convert_ids_to_tokens(ids) if t in SPECIAL_TOKENS]


def test_plain_text_is_encoded_as_the_tokenizer_does(tokenizer) -> None:
    chat, messages = ChatRenderer(tokenizer), say("What is 1+1?")
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat.encode(chat.render(messages)) == expected


text_with_control = st.lists(st.sampled_from([*SPECIAL_TOKENS, "a", " ", "<", "eos>", "standin", "x0x"]), max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(text_with_control.map("".join), min_size=1, max_size=4))
def test_no_text_makes_a_control_token(tokenizer, texts: list[str]) -> None:
    chat = ChatRenderer(tokenizer)
    # The assistant's own text may hold tokens that build no turns.
    texts = [t if i % 2 == 0 else t.replace("<pad>", "").replace("<unk>", "") for i, t in enumerate(texts)]
    rendered = chat.render(say(*texts))
    clean = chat.encode(chat.render(say(*["a"] * len(texts))))
    ids = chat.encode(rendered)
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, clean)
    assert chat.decode(ids) == rendered.text
    assert rendered.text == tokenizer.apply_chat_template(say(*texts), add_generation_prompt=True, tokenize=False)


def test_trusted_data_may_hold_control_tokens(tokenizer) -> None:
    chat = ChatRenderer(tokenizer, allow_control_tokens=True)
    assert control_ids(tokenizer, chat.encode(chat.render(say("a<eos>")))).count("<eos>") == 2


def test_tools_and_kwargs_reach_the_template(tokenizer) -> None:
    tokenizer.chat_template = "{{ flag }}{% for t in tools %}{{ t['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    rendered = ChatRenderer(tokenizer, kwargs={"flag": "on"}).render(say("q"), tools=[{"name": "f<eos>"}])
    assert rendered.text == "onf<eos>q"
    assert tokenizer.eos_token_id not in ChatRenderer(tokenizer, kwargs={"flag": "on"}).encode(rendered)


def test_no_template_and_a_refusing_template_are_errors(tokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('only tools here') }}"
    with pytest.raises(DataError, match="only tools here"):
        ChatRenderer(tokenizer).render(say("a"))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        ChatRenderer(tokenizer)


def test_what_the_model_says_is_trained_with_its_end_token(tokenizer) -> None:
    chat = ChatRenderer(tokenizer)
    out = one(say("q1", "a1", "q2", "a2"), chat)
    response = out.tokens[-out.response_length :]
    trained = tokenizer.decode([t for t, m in zip(response, out.loss_mask, strict=True) if m])
    assert trained == "a1<eos>a2<eos>"
    assert tokenizer.decode(out.tokens) == "<bos><|user|>q1<eos><|assistant|>a1<eos><|user|>q2<eos><|assistant|>a2<eos>"
    assert out.loss_mask[0] == out.loss_mask[-1] == 1


def test_a_trained_turn_follows_exactly_the_ids_of_generation(tokenizer) -> None:
    chat, messages = ChatRenderer(tokenizer), say("q1", "a1", "q2", "a2")
    out = one(messages, chat)
    for i in (1, 3):
        prompt = chat.encode(chat.render(messages[:i]))
        assert list(out.tokens[: len(prompt)]) == prompt
        assert out.loss_mask[len(prompt) - (len(out.tokens) - out.response_length)] == 1


def test_step_loss_mask_leaves_a_turn_out(tokenizer) -> None:
    messages = say("q1", "a1", "q2", "a2", "q3")
    messages[1]["step_loss_mask"] = 0
    out = one(messages, ChatRenderer(tokenizer))
    assert tokenizer.decode(out.tokens[-out.response_length :]) == "a2<eos>" and set(out.loss_mask) == {1}


def test_behind_a_rewritten_history_a_turn_is_a_sample_of_its_own(tokenizer) -> None:
    tokenizer.chat_template = FORGETFUL_TEMPLATE
    row = sft_row(say("q1", "long1", "q2", "long2"), ChatRenderer(tokenizer))
    assert [tokenizer.decode(one.tokens) for one in row.samples] == [
        "<bos><|user|>q1<eos><|assistant|>long1<eos>",
        "<bos><|user|>q1<eos><|assistant|>1<eos><|user|>q2<eos><|assistant|>long2<eos>",
    ]
    assert spans(tokenizer, row) == ["long1<eos>", "long2<eos>"]


def test_control_strings_in_a_turn_are_not_its_end(tokenizer) -> None:
    out = one(say("q<eos>", "a<eos>b"), ChatRenderer(tokenizer))
    response = out.tokens[-out.response_length :]
    assert tokenizer.decode(response) == "a<eos>b<eos>" and response.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("messages", [say("q"), [{"role": "assistant", "content": "a"}], []])
def test_nothing_to_learn_is_refused(tokenizer, messages) -> None:
    with pytest.raises(DataError):
        sft_row(messages, ChatRenderer(tokenizer))
