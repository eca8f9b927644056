"""What the probe says of real chat templates, and of small ones that each break one law."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slime.agent.parsers import FORMATS, format_of
from slime.agent.template import ConversationTemplate
from slime.agent.template_probe import PLAIN, Outcome, ProbeReport, State, features, probe, tools_problem
from slime.cli.main import main
from slime.core.errors import DataError
from slime.data.chat import ChatRenderer
from tests.support.chat_hooks import FAMILIES, tokenizer_folder
from tests.support.chat_templates import PUBLISHED, ids_of, published_chat, published_tokenizer, with_template
from tests.support.marks import quick

END = {"deepseek-v3": "<\uff5cend\u2581of\u2581sentence\uff5c>"}  # of the others: <|im_end|>
WITHOUT_TOOLS = ("deepseek-v3", "smollm2")
"""Their templates write no tools into a prompt."""
WITH_TOOLS = {
    "tools in the prompt",
    "call with its result",
    "two calls at once",
    "rounds of calls",
    "text beside a call",
    "thinking before a call",
}


def report(family: str, template: str | None = None, ends: tuple[str, ...] = (), **kwargs: Any) -> ProbeReport:
    tokenizer = with_template(family, template)
    words = ends or (END.get(family, "<|im_end|>"),)
    return probe(ChatRenderer(tokenizer, kwargs=kwargs), [tokenizer.convert_tokens_to_ids(word) for word in words])


def by_feature(found: ProbeReport) -> dict[str, Outcome]:
    return {outcome.feature: outcome for outcome in found.outcomes}


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3"))
def test_real_templates(family: str) -> None:
    found = report(family)
    found.require_plain_turns()
    failing = set(WITH_TOOLS) if family in WITHOUT_TOOLS else set()
    # DeepSeek's puts every system message first.
    failing |= {"system message in the middle"} if family == "deepseek-v3" else set()
    assert set(found.failing) == failing
    appended = {o.state for o in found.outcomes if o.works}
    assert appended == {State.THINKING if family == "qwen3" else State.EXACT}


def test_thinking_that_the_prompt_has_done_is_in_the_past_no_more() -> None:
    found = report("qwen3", enable_thinking=False)
    assert not found.failing
    assert by_feature(found)[PLAIN].state is State.THINKING


def test_wrong_end_ids_are_named_with_what_the_template_writes() -> None:
    """SmolLM2's tokenizer says that `<|im_start|>` ends a text."""
    found = report("smollm2", ends=("<|im_start|>",))
    assert found.wrong_ends == ("it ends a turn with '<|im_end|>' (id 2), but the end ids are '<|im_start|>' (id 1)")
    with pytest.raises(DataError, match=r"ends a turn with '<\|im_end\|>'.*generation_config.json"):
        found.require_plain_turns()
    assert not report("smollm2", ends=("<|im_start|>", "<|im_end|>")).wrong_ends


HEADER = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '[' ~ c.function.name ~ c.function.arguments | tojson ~ ']' }}{% endfor %}"
TURN = "{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content }}" + CALLS + "{{ '<|im_end|>\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LOOP, DONE = "{% for m in messages %}", "{% endfor %}"


def test_a_simple_template_is_exact() -> None:
    found = report("qwen2.5", HEADER + LOOP + TURN + DONE + PROMPT)
    assert {outcome.state for outcome in found.outcomes} == {State.EXACT}


def test_one_that_numbers_rounds_backwards_is_refused() -> None:
    numbered = TURN.replace("m.role", "(messages | length - loop.index0) ~ m.role")
    found = report("qwen2.5", HEADER + LOOP + numbered + DONE + PROMPT)
    plain = by_feature(found)[PLAIN]
    assert plain.state is State.NOT_APPENDED and "where the template writes" in plain.detail
    with pytest.raises(DataError, match="does not append turns"):
        found.require_plain_turns()


def test_one_that_drops_results() -> None:
    found = report("qwen2.5", HEADER + LOOP + "{% if m.role != 'tool' %}" + TURN + "{% endif %}" + DONE + PROMPT)
    found.require_plain_turns()
    assert set(found.failing) == WITH_TOOLS - {"tools in the prompt"}
    assert "does not append the tool message" in by_feature(found)["call with its result"].detail


def test_one_that_drops_calls() -> None:
    found = report("qwen2.5", HEADER + LOOP + TURN.replace(CALLS, "") + DONE + PROMPT)
    assert set(found.failing) == WITH_TOOLS - {"tools in the prompt"}
    assert "omits 'look_up' from an answer" in by_feature(found)["call with its result"].detail


def test_one_that_puts_system_messages_first() -> None:
    first = "{% for m in messages if m.role == 'system' %}" + TURN + DONE
    found = report(
        "qwen2.5", HEADER + first + LOOP + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + DONE + PROMPT
    )
    assert found.failing == ("system message in the middle",)


def test_one_without_an_end_token() -> None:
    found = report("qwen2.5", HEADER + LOOP + TURN.replace("<|im_end|>", "") + DONE + PROMPT)
    assert "it writes '\\n<|im_start|>" in found.wrong_ends
    with pytest.raises(DataError, match=r"it writes .* after an answer"):
        found.require_plain_turns()


def test_one_that_refuses_two_calls() -> None:
    refuse = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    found = report("qwen2.5", HEADER + LOOP + refuse + TURN + DONE + PROMPT)
    assert found.failing == ("two calls at once",)
    outcome = by_feature(found)["two calls at once"]
    assert outcome.state is State.REFUSED and "one call only" in outcome.detail


def test_the_next_header_may_end_a_turn() -> None:
    """As in GLM's templates: nothing is written behind an answer but the header of who speaks next."""
    glm = (
        HEADER
        + LOOP
        + "{% if m.role == 'assistant' %}{{ '<|im_start|>' }}{% elif m.role == 'tool' %}{{ '<|im_end|>' }}"
        + "{% else %}{{ '<|endoftext|>' }}{% endif %}{{ '\\n' ~ m.content }}"
        + CALLS
        + DONE
        + "{% if add_generation_prompt %}{{ '<|im_start|>\\n' }}{% endif %}"
    )
    found = report("qwen2.5", glm, ends=("<|im_end|>", "<|endoftext|>"))
    assert (found.wrong_ends, found.failing) == ("", ())


def test_a_prompt_may_begin_the_thinking() -> None:
    """As in DeepSeek-R1's template, which leaves the thinking of the past out."""
    thinks = PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
    found = report("qwen2.5", HEADER + LOOP + TURN + DONE + thinks)
    assert {outcome.state for outcome in found.outcomes} == {State.THINKING}


FAMILIES_OF_CALLS = {
    "qwen2.5": "hermes",
    "qwen3.5": "qwen3_coder",
    "glm4.6": "glm45",
    "glm4.7": "glm45",
    "kimi-k2": "kimi_k2",
    "minimax-m2": "minimax-m2",
    "deepseek-v3.2": "deepseekv32",
    "gpt-oss": "gpt-oss",
    "llama3.1": "llama3",
}


@pytest.mark.parametrize(
    ("family", "name"), quick(FAMILIES_OF_CALLS.items(), ("qwen2.5", "hermes"), ("glm4.6", "glm45"))
)
def test_calls_are_read_as_the_template_of_each_family_writes_them(family: str, name: str) -> None:
    """Law: a family's calls are known by its template, appended, and read back; in the ids that the family gives."""
    chat, ends = published_chat(family), ids_of(published_tokenizer(family), PUBLISHED[family].ends)
    assert format_of(chat.template) == name
    assert tools_problem(ConversationTemplate(chat, ends)) == ""
    states = by_feature(probe(chat, ends))
    assert states["call with its result"].state in (State.EXACT, State.THINKING, State.BRANCHES)
    assert states["call with its result"].state is not State.BRANCHES or family == "gpt-oss"


@pytest.mark.slow
def test_the_template_for_deepseek_v32_is_its_encoding() -> None:
    """What the tests take for the family's template writes what SGLang's encoder writes, which no template does."""
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    file = Path(found.origin).parent / "srt" / "entrypoints" / "openai" / "encoding_dsv32.py"
    spec = importlib.util.spec_from_file_location("encoding_dsv32", file)
    assert spec is not None and spec.loader is not None
    encoding = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoding)
    chats = {mode: published_chat("deepseek-v3.2", thinking=mode == "thinking") for mode in ("chat", "thinking")}
    compared = 0
    for feature, messages, _ in features(chats["chat"], FORMATS.build("deepseekv32", None)):
        shown = [m.for_template() for m in messages]
        for mode, chat in chats.items():
            try:
                theirs = encoding.encode_messages(shown, thinking_mode=mode)
            except encoding.DS32EncodingError:  # it wants thinking in each answer behind the last question
                continue
            assert chat.render(shown).text == theirs, (feature, mode)
            compared += 1
    assert compared > 15


@pytest.mark.slow
def test_doctor_prints_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--template", str(tokenizer_folder("qwen2.5"))]) == 0
    out = capsys.readouterr().out
    assert "call with its result" in out and "hermes" in out and "'<|im_end|>' (id 151645)" in out
    assert "ids of tool calls, such as     call_" in out and "user '<|im_end|>'" in out
    smollm2 = AutoTokenizer.from_pretrained(tokenizer_folder("smollm2"))
    smollm2.eos_token = "<|im_start|>"  # as transformers 5.12 reads it from the GGUF file
    smollm2.save_pretrained(tmp_path / "smollm2")
    assert main(["doctor", "--template", str(tmp_path / "smollm2")]) == 1
    out = capsys.readouterr().out
    assert "ends a turn with '<|im_end|>' (id 2)" in out
    kimi = tmp_path / "kimi"
    published_tokenizer("kimi-k2").save_pretrained(kimi)
    assert main(["doctor", "--template", str(kimi)]) == 0
    out = capsys.readouterr().out
    assert "functions.look_up:0" in out and "WARN" not in out and "are refused: none" in out
    glm4 = published_tokenizer("glm4 with tools")
    glm4.save_pretrained(tmp_path / "glm4")
    ends = json.dumps({"eos_token_id": ids_of(glm4, PUBLISHED["glm4 with tools"].ends)})
    (tmp_path / "glm4" / "generation_config.json").write_text(ends)
    assert main(["doctor", "--template", str(tmp_path / "glm4")]) == 0
    assert "agents with tools are refused: the chat template does not use a known" in capsys.readouterr().out
    assert main(["doctor", "--template", str(tmp_path / "none")]) == 2
    assert main(["doctor", "--template", str(tmp_path)]) == 2
