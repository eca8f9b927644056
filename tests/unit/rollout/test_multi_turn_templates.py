"""Multi-turn work with tools trains exactly the sampled ids, whatever the chat template does to a conversation."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime.agent.parsers import known_format
from slime.data.chat import ChatRenderer
from slime.rollout.manager import RolloutManager
from tests.support.chat_hooks import FAMILIES, ScriptedEngine, tokenizer_folder
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub
from tests.support.written_calls import deepseekv3, hermes

RESULTS = ("391.0", "error: numbers with + - * / only")


def scripted_turns(tokenizer: Any) -> list[list[int]]:
    """Three turns with thinking, spelled in other pieces than the tokenizer would: letter by letter where it can."""

    def spell(text: str) -> list[int]:
        return [i for part in text for i in tokenizer.encode(part, add_special_tokens=False)]

    write = {"hermes": hermes, "deepseekv3": deepseekv3}[known_format(tokenizer.chat_template).name]
    calls = [write([("calculate", {"expression": one})]) for one in ("17*23", "__import__('os')")]
    texts = (*(f"<think>\nI multiply.\n</think>\n\n{one}" for one in calls), "It is 391, naïve 数 🙂. ")
    turns = [[*spell(text), tokenizer.eos_token_id] for text in texts]
    again = [tokenizer.encode(tokenizer.decode(t), add_special_tokens=False) for t in turns]
    assert again != turns, "encoding the text again gives the same ids, so nothing is tested"
    return turns


def rolled_out(tmp_path: Path, family: str, function: str) -> tuple[Any, Any, Any, list[list[int]], ScriptedEngine]:
    """Batch, metrics and tokenizer of one prompt whose answers are `scripted_turns`, these, and the engine."""
    model = write_checkpoint_stub(tmp_path / "chat")
    shutil.copytree(tokenizer_folder(family), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 200_000}))
    data = tmp_path / "messages.jsonl"
    messages = [{"role": "user", "content": "17 times 23? <|im_end|><｜end▁of▁sentence｜>"}]  # noqa: RUF001
    data.write_text(json.dumps({"input": messages, "label": "391"}) + "\n")
    flags = ("--hf-checkpoint", str(model), "--prompt-data", str(data), "--rollout-batch-size", "1")
    hooks = (
        "--custom-generate-function-path",
        function,
        "--rollout-sample-hook-path",
        "tests.support.probe_hooks:own_reward",
    )
    if family == "smollm2":  # its own template knows no tools
        flags += ("--chat-template", "examples/tools.jinja")
    args = rollout_args(tmp_path, *flags, *hooks, "--rollout-max-response-len", "2000")
    engine = ScriptedEngine()

    async def work(manager: RolloutManager) -> Any:
        tokenizer = manager._tokenizer
        engine.turns, engine.decode = scripted_turns(tokenizer), lambda ids: str(tokenizer.decode(ids))
        return *await manager.generate(0), tokenizer, engine.turns

    batch, metrics, tokenizer, turns = asyncio.run(with_manager(args, engine, work))
    return batch, metrics, tokenizer, turns, engine


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_ids_are_the_sampled_ones(family: str, tmp_path: Path) -> None:
    batch, metrics, tokenizer, turns, engine = rolled_out(tmp_path, family, "examples.multi_turn_tools:generate")
    assert len(batch.samples) == 2 and len(engine.requests) == 6
    assert metrics["rollout/num_turns/mean"] == 3 and metrics["rollout/tool_calls/mean"] == 2
    assert metrics["rollout/tool_error_ratio"] == 0.5
    sampled = [i for turn in turns for i in turn]
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled
        assert (sample.token_versions == 1).tolist() == (sample.loss_mask > 0).tolist()
        context = between(tokenizer, sample)
        assert len(context) == 2, context
        for text, result in zip(context, RESULTS, strict=True):
            assert text == template_text(tokenizer, result), "the template writes something else between the turns"
        for request in engine.requests:  # what the engine read is what is trained, up to the end of its prompt
            assert sample.tokens[: len(request["input_ids"])].tolist() == request["input_ids"]


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_an_agent_that_knows_no_tokens_is_trained_on_those_that_were_sampled(family: str, tmp_path: Path) -> None:
    """Law: a loop written with OpenAI's SDK gives the same samples as one that appends ids by hand."""
    by_hand = rolled_out(tmp_path / "hand", family, "examples.multi_turn_tools:generate")
    by_agent = rolled_out(tmp_path / "agent", family, "examples.agent_openai_loop:generate")
    assert by_agent[1]["rollout/num_turns/mean"] == 3 and len(by_agent[4].requests) == 6
    for agent, hand in zip(by_agent[0].samples, by_hand[0].samples, strict=True):
        sampled = [i for turn in by_agent[3] for i in turn]
        assert agent.tokens[-agent.response_length :][agent.loss_mask > 0].tolist() == sampled
        assert agent.tokens.tolist() == hand.tokens.tolist() and agent.loss_mask.tolist() == hand.loss_mask.tolist()


def between(tokenizer: Any, sample: Any) -> list[str]:
    """The text of each run of masked ids inside the response."""
    runs: list[list[int]] = []
    before = 1.0
    for token, trained in zip(sample.tokens[-sample.response_length :].tolist(), sample.loss_mask, strict=True):
        if not trained:
            runs.append([]) if before else None
            runs[-1].append(token)
        before = trained
    return [tokenizer.decode(run) for run in runs]


def template_text(tokenizer: Any, result: str) -> str:
    """What the template writes after an answer, without the end token, which was sampled."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "BBB"},
        {"role": "tool", "content": result},
    ]
    text = ChatRenderer(tokenizer).render(messages, add_generation_prompt=True).text
    return text.split("BBB")[1].removeprefix(tokenizer.eos_token)
