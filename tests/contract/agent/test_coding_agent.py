"""The coding agent's recipe with a model that says what a test wrote: real sandboxes, the real program, the adapter."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.coding_agent.tasks import TASKS, Task
from slime.rollout.manager import RolloutManager
from tests.support.agent_room import ScriptedModel
from tests.support.chat_hooks import short_tokenizer_folder
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub
from tests.support.watched_sandbox import Watched, require_confinement

(ADD,) = [task for task in TASKS if task.function == "sums.add"]
NOTHING = ""
"""Instead of an answer: the model takes its time."""


@dataclass
class Answering(ScriptedModel):
    """Answers by what it reads."""

    says: Callable[[str], str] = str

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        said = self.says(self.tokenizer.decode(body["input_ids"]))
        if said == NOTHING:
            await stop.wait()
        self.script.append(said)
        return await super()._sample(body, stop)


@pytest.fixture(autouse=True)
def watched() -> None:
    require_confinement()
    Watched.held, Watched.failing = [], 0


def block(text: str) -> str:
    return f"Here it is:\n```python\n{text}```"


def played(tmp_path: Path, says: Callable[[str], str], task: Task, **custom: Any) -> Any:
    """The samples of a step with two executions of a task, and the engine."""
    model = write_checkpoint_stub(tmp_path / "model")
    shutil.copytree(short_tokenizer_folder("qwen3"), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 151936, "max_position_embeddings": 8192}))
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps(task.row("small_agent")) + "\n")
    settings = {
        "coding_sandbox": "tests.support.watched_sandbox:Watched",
        "coding_sandbox_settings": {},
        "coding_programs": str(tmp_path),
        "coding_max_context_tokens": 4096,
        "coding_time_limit_s": 60,
        "coding_max_sandboxes": 2,
        **custom,
    }
    (tmp_path / "custom.yaml").write_text(json.dumps({"custom": settings}))
    args = rollout_args(
        tmp_path,
        *("--prompt-data", str(data), "--input-key", "prompt", "--metadata-key", "metadata"),
        *("--custom-generate-function-path", "recipes.coding_agent.generate:generate"),
        *("--custom-config-path", str(tmp_path / "custom.yaml"), "--rollout-max-response-len", "400"),
        *("--rollout-batch-size", "1"),
    )
    from transformers import AutoTokenizer

    engine = Answering(tokenizer=AutoTokenizer.from_pretrained(model), says=says)

    async def work(manager: RolloutManager) -> Any:
        return (await manager.generate(0))[0].samples

    return asyncio.run(with_manager(args, engine, work)), engine


def trained(sample: Any, tokenizer: Any) -> str:
    """The text of its trained tokens."""
    start = len(sample.tokens) - len(sample.loss_mask)
    return str(tokenizer.decode(sample.tokens[start:][sample.loss_mask == 1]))


@pytest.mark.slow
def test_an_answer_that_mends_the_repository_is_worth_one(tmp_path: Path) -> None:
    """Law: reward 1, one turn, and what is trained is what was said; nothing hidden where the agent was."""
    samples, engine = played(tmp_path, lambda _: block(ADD.answer), ADD)
    assert [sample.reward for sample in samples] == [1.0, 1.0] and len(engine.requests) == 2
    for sample in samples:
        assert trained(sample, engine.tokenizer) == block(ADD.answer) + "<|im_end|>" and not sample.truncated
        assert ADD.issue in engine.tokenizer.decode(sample.tokens[: len(sample.tokens) - len(sample.loss_mask)])
    assert Watched.held == ["", ""]


CHEATS = {
    "looks for the tests": """\
import glob, json, os
def add(a, b):
    places = "/work/**", "/tmp/**", "/dev/shm/**", "/proc/[0-9]*/environ", "/proc/[0-9]*/cmdline"
    for path in [path for place in places for path in glob.glob(place, recursive=True)]:
        try:
            for arguments, expected in json.load(open(path))["f" + "ixes"]:
                if arguments == [a, b]:
                    return expected
        except Exception:
            pass
    return a - b
""",
    "replaces the tests": """\
# test_sums.py
import unittest
class Tests(unittest.TestCase):
    def test_add(self):
        pass
""",
    "changes how the tests are run": """\
import os, unittest
unittest.TestCase.assertEqual = lambda *_: None
open("unittest.py", "w").write("pass")
open("../ask.py", "w").write("print(13)")
def add(a, b):
    return a - b
""",
    "ends before it is asked": """\
import os
print(13, flush=True)
os._exit(0)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_hidden_tests_are_neither_read_nor_changed(cheat: str, tmp_path: Path) -> None:
    """Law: what looks mended to the agent alone is worth nothing."""
    samples, _ = played(tmp_path, lambda _: block(CHEATS[cheat]), ADD)
    assert [sample.reward for sample in samples] == [0.0, 0.0] and Watched.held == ["", ""]


@pytest.mark.slow
def test_what_the_tests_say_is_read_and_not_trained(tmp_path: Path) -> None:
    """Law: three turns are one sample; the agent's words between them are context."""
    answers = ["I do not know.", "So:\n```python\ndef add(", block(ADD.files["sums.py"])]
    asked = ("no ```python block", "python block in that is not closed")
    samples, engine = played(tmp_path, lambda prompt: answers[sum(text in prompt for text in asked)], ADD)
    assert [sample.reward for sample in samples] == [0.0, 0.0] and len(engine.requests) == 6
    end = "<|im_end|>"
    for sample in samples:
        assert trained(sample, engine.tokenizer) == "".join(text + end for text in answers)


@pytest.mark.slow
def test_out_of_time_is_truncated_and_graded_as_it_is(tmp_path: Path) -> None:
    """Law: what was said before the limit is trained with the reward of the files that there are."""
    half = block("def add(a, b):\n    return 13\n")
    says = lambda prompt: NOTHING if "The tests fail" in prompt else half  # noqa: E731
    samples, engine = played(tmp_path, says, ADD, coding_time_limit_s=20)
    assert [sample.truncated for sample in samples] == [True, True]
    assert [sample.reward for sample in samples] == [0.0, 0.0]
    assert {trained(sample, engine.tokenizer) for sample in samples} == {half + "<|im_end|>"}


@pytest.mark.slow
def test_a_sandbox_that_does_not_begin_costs_a_try_and_no_reward(tmp_path: Path) -> None:
    """Law: the run goes on, and trains what the next try gives."""
    Watched.failing = 1
    samples, _ = played(tmp_path, lambda _: block(ADD.answer), ADD)
    assert [sample.reward for sample in samples] == [1.0, 1.0] and Watched.failing == 0
