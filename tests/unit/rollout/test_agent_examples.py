"""The examples of agents on an engine that says what a test wrote: what is trained was sampled, rewards are as told."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from examples import agent_python_tool, agent_search, chat_judge, chat_search, chat_tools, multi_agent
from slime.algorithms.advantages.grpo import iter_groups
from slime.core.sample import Sample
from slime.rollout.manager import RolloutManager
from tests.support.agent_room import END, ScriptedModel
from tests.support.chat_hooks import short_tokenizer_folder
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub


@dataclass
class Speaker(ScriptedModel):
    """Says what a function of the conversation before tells."""

    speaks: Callable[[str], str] = str
    said: list[str] = field(default_factory=list)

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        self.said.append(self.speaks(self.tokenizer.decode(body["input_ids"])))
        self.script = deque(self.said[-1:])
        return await super()._sample(body, stop)


def rolled_out(tmp_path: Path, example: Any, row: dict[str, Any], speaks: Callable[[str], str]) -> tuple[Any, Any, Any]:
    """Batch, metrics and speaker of one group of two executions of an example."""
    model = write_checkpoint_stub(tmp_path / "chat")
    shutil.copytree(short_tokenizer_folder("qwen3"), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 200_000}))
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    flags = ("--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt")
    sizes = ("--rollout-batch-size", "1", "--rollout-max-response-len", "500")
    args = rollout_args(tmp_path, *flags, *sizes, *example.FLAGS.split())
    engine = Speaker(speaks=speaks)

    async def work(manager: RolloutManager) -> Any:
        engine.tokenizer = manager._tokenizer
        return await manager.generate(0)

    batch, metrics = asyncio.run(with_manager(args, engine, work))
    return batch, metrics, engine


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sampled_ids(engine: Speaker, texts: list[str]) -> list[int]:
    return [i for text in texts for i in engine.tokenizer.encode(text + END, add_special_tokens=False)]


def test_a_search_is_found_and_its_answer_graded(tmp_path: Path) -> None:
    """Law: what the index found is context; the turns are trained, under one reward."""
    row = agent_search.rows()[0]
    name, town, _ = agent_search.people()[0]
    turns = [call("search", query=name), call("search", quarry=name), f"It is {town}."]
    batch, metrics, engine = rolled_out(tmp_path, agent_search, row, lambda text: turns[text.count("<tool_response>")])
    passage = agent_search.index(None).search(name)[0]
    assert passage.startswith(name) and town in passage
    assert len(batch.samples) == 2, "each execution is one line of tokens"
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled_ids(engine, turns)
        assert ((sample.token_versions == 1) == (sample.loss_mask > 0)).all()
        assert passage in engine.tokenizer.decode(response[sample.loss_mask == 0])
        assert sample.reward == pytest.approx(2 / (3 + 1)), "F1 of a word among three"
    assert metrics["rollout/tool_calls/mean"] == 2 and metrics["rollout/tool_error_ratio"] == 0.5


def test_a_function_is_a_tool_of_three_turns(tmp_path: Path) -> None:
    """Law: sampled ids are trained, results are context, and an error of the function is a result that counts."""
    turns = [call("add", a=2, b=3), call("add", c=1), "It is 5.0"]
    row = {"prompt": "What is 2 + 3?", "label": "5"}
    batch, metrics, engine = rolled_out(tmp_path, chat_tools, row, lambda text: turns[text.count("<tool_response>")])
    assert len(batch.samples) == 2
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled_ids(engine, turns)
        context = engine.tokenizer.decode(response[sample.loss_mask == 0])
        assert (
            "<tool_response>\n5" in context and "error: TypeError: add() got an unexpected keyword argument" in context
        )
        assert sample.reward == 1.0
    assert metrics["rollout/tool_calls/mean"] == 2 and metrics["rollout/tool_error_ratio"] == 0.5


def test_a_judge_scores_and_is_not_trained(tmp_path: Path) -> None:
    turns = {"Say yes or no": "Yes."}
    row = {"prompt": "What is 2 + 3?", "label": "5"}

    def speaks(asked: str) -> str:
        return next((said for part, said in turns.items() if part in asked), "It is 5")

    batch, _, engine = rolled_out(tmp_path, chat_judge, row, speaks)
    assert len(batch.samples) == 2 and [sample.reward for sample in batch.samples] == [1.0, 1.0]
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response.tolist() == sampled_ids(engine, ["It is 5"]) and sample.loss_mask.all()
    judged = [body["sampling_params"] for body in engine.requests if body["sampling_params"]["max_new_tokens"] == 4]
    assert len(judged) == 2 and {one["temperature"] for one in judged} == {0.0}


def test_a_search_function_in_a_chat(tmp_path: Path) -> None:
    row, (name, town, _) = agent_search.rows()[0], agent_search.people()[0]
    turns = [call("search", query=name), f"In {town}."]
    batch, _, engine = rolled_out(tmp_path, chat_search, row, lambda text: turns[text.count("<tool_response>")])
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled_ids(engine, turns)
        assert sample.reward == pytest.approx(2 / 3), "F1 of a word among two"


def test_the_index_ranks_by_rare_words() -> None:
    index = agent_search.Index(["the cat sat on the mat", "the dog sat", "a cat and a zebra"])
    assert index.search("zebra cat")[0] == "a cat and a zebra"
    assert index.search("unheard of") == [] and len(index.search("sat cat zebra")) == agent_search.NUM_FOUND


def test_your_own_corpus(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "Snow is white."}\n')
    assert agent_search.index(str(file)).search("snow") == ["Snow is white."]


@pytest.mark.slow
def test_python_keeps_its_files_and_a_failed_call_costs(tmp_path: Path) -> None:
    """Law: a sandbox for each execution, its files there at the next call; the reward counts what failed."""
    row = {"prompt": [{"role": "user", "content": "What is 6*7?"}], "label": "42"}
    first = call("python", code="open('x').read() if __import__('os').path.exists('x') else open('x', 'w').write('42')")
    turns = [first, call("python", code="print(open('x').read())"), call("python", code="1/0"), "It is 42"]
    batch, metrics, engine = rolled_out(
        tmp_path, agent_python_tool, row, lambda text: turns[text.count("<tool_response>")]
    )
    assert len(batch.samples) == 2
    for sample in batch.samples:
        response = sample.tokens[-sample.response_length :]
        assert response[sample.loss_mask > 0].tolist() == sampled_ids(engine, turns)
        context = engine.tokenizer.decode(response[sample.loss_mask == 0])
        assert "<tool_response>\n42" in context and "ZeroDivisionError" in context
        assert sample.reward == pytest.approx(1 - agent_python_tool.FAILED_CALL)
    assert metrics["rollout/tool_calls/mean"] == 3


def role_and_right(asked: str, said: str) -> tuple[str, bool]:
    """Of a session of `multi_agent` about 2 + 3: its role, and whether it did well."""
    if "Say its number" in asked:
        return "selector", f"Answer {said}: It is 5" in asked
    if "Say yes or no" in asked:
        return "critic", (said == "yes") == ("It is 5" in asked)
    return "solver", said == "It is 5"


@pytest.mark.slow
def test_roles_train_together_and_count_once(tmp_path: Path) -> None:
    """Law: all sessions are siblings of one execution, which statistics count once; each has its role's reward."""
    tried: list[str] = []

    def speaks(asked: str) -> str:
        if "Say its number" in asked:
            return "1"
        if "Say yes or no" in asked:
            return "yes"
        tried.append("It is 6" if tried else "It is 5")
        return tried[-1]

    row = {"prompt": "What is 2 + 3?", "label": "5"}
    batch, metrics, engine = rolled_out(tmp_path, multi_agent, row, speaks)
    texts = [engine.tokenizer.decode(s.tokens).removesuffix(END) for s in batch.samples]
    roles, rights = zip(*(role_and_right(text, text.rpartition("assistant\n")[2]) for text in texts), strict=True)
    indices = [sample.index for sample in batch.samples]
    played = [sorted(r for r, i in zip(roles, indices, strict=True) if i == index) for index in set(indices)]
    assert played == [["critic", "critic", "selector", "solver", "solver"]] * 2
    for sample in batch.samples:
        assert sample.loss_mask.all() and (sample.token_versions == 1).all()
    said = sorted(sample.tokens[-sample.response_length :].tolist() for sample in batch.samples)
    assert said == sorted(sampled_ids(engine, [text]) for text in engine.said)
    assert roles.count("solver") == 4 and sum(r for r, role in zip(rights, roles, strict=True) if role == "solver") == 1
    means = {role: fmean(r for r, other in zip(rights, roles, strict=True) if other == role) for role in roles}
    wanted = [right - means[role] for right, role in zip(rights, roles, strict=True)]
    assert [sample.reward for sample in batch.samples] == pytest.approx(wanted)
    ((_, _, own),) = iter_groups(np.array(rights, float), [s.group_index for s in batch.samples], indices)
    assert len(own) == 2 and metrics["rollout/raw_reward"] == pytest.approx(own.mean())


def test_a_role_is_compared_with_its_own_kind() -> None:
    """Law: a role that is easy for all trains nothing, however hard the others are."""

    class Settings:
        reward_key = None

    def said(group: int, role: str, reward: float) -> Sample:
        return Sample(group_index=group, reward=reward, metadata={"role": role})

    samples = [
        said(0, "solver", 0),
        said(0, "solver", 1),
        said(0, "critic", 1),
        said(0, "critic", 1),
        said(1, "critic", 0),
    ]
    assert multi_agent.by_role(Settings(), samples) == ([0, 1, 1, 1, 0], [-0.5, 0.5, 0, 0, 0])
