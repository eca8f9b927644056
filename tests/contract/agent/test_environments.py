"""`slime.agent.environments.generate` in front of the real adapter: scores, limits, failures and deaths.

The environment's process is real. Its game is a hand-made package under the name of TextArena.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.agent import environments
from slime.agent.environments import INFO, SPEC, TASK, generate
from slime.core.sample import Sample, Status
from slime.rollout.execute import Outcome, run_execution
from slime.serving.child_process import all_processes
from tests.support.agent_room import rollout

PARAMS = {"temperature": 1.0, "max_new_tokens": 900}
ONE_TURN = ("--custom-generate-function-path", "slime.agent.environments:generate", "--agent-max-turns", "1")
GAME = """
import os
class Game:
    def reset(self, num_players, seed):
        self.said = []
    def get_observation(self):
        return 0, "Say it." + "".join(f" You said {one}." for one in self.said)
    def step(self, action):
        if action == "die":
            os._exit(7)
        if action == "raise":
            raise ValueError("the game broke")
        self.said.append(action)
        return len(self.said) == 2, {}
    def close(self):
        return {0: float(self.said.count("yes"))}, {0: {"reason": "over"}}
def make(env_id):
    return Game()
"""


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The metadata of a row whose game counts how often the model says yes in two turns."""
    monkeypatch.setenv(environments.FOLDER_ENV, str(tmp_path / "environments"))
    folder = tmp_path / "game"
    (folder / "textarena-9.9.dist-info").mkdir(parents=True)
    (folder / "textarena.py").write_text(GAME)
    (folder / "textarena-9.9.dist-info" / "METADATA").write_text("Name: textarena\nVersion: 9.9\n")
    spec = {"kind": "textarena", "config": {"game": "yes"}, "path": [str(folder)], "python": sys.executable}
    return {SPEC: spec, TASK: {"seed": 0}}


def sample_of(row: dict[str, Any]) -> Sample:
    return Sample(group_index=0, index=0, prompt="yes", metadata=dict(row))


def processes_of(tmp_path: Path) -> list[int]:
    """Running processes with the test's folder in their environment."""
    found = []
    for pid in all_processes():
        try:
            if str(tmp_path / "game").encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


async def test_the_environments_score_is_the_reward_of_sampled_tokens(row: dict[str, Any], tmp_path: Path) -> None:
    """Law: a conversation of two turns is one sample, whose trained tokens are those that the engine sampled."""
    async with rollout(tmp_path) as (room, context, _):
        room.says("yes", "no")
        ended = await run_execution(context, [sample_of(row)], PARAMS, generate)
        assert ended.outcome is Outcome.FINISHED, ended.reason
        [sample] = ended.samples
        assert sample.reward == 1.0 and sample.metadata[INFO] == {"end": "over", "turns": 2}
        assert sample.status is Status.COMPLETED and sample.loss_mask is not None
        kept = [t for t, m in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True) if m]
        assert room.tokenizer.decode(kept) == "yes<|im_end|>no<|im_end|>"
        assert "You said yes." in room.tokenizer.decode(sample.tokens)
        assert len(processes_of(tmp_path)) == 1 and os.getpid() not in processes_of(tmp_path)
    assert processes_of(tmp_path) == []


async def test_a_failure_of_the_environment_is_no_score(row: dict[str, Any], tmp_path: Path) -> None:
    """Law: an error in the game, and the death of its process, fail the execution; the next one finds a new process."""
    async with rollout(tmp_path) as (room, context, _):
        for word, reason in (("raise", "the game broke"), ("die", "exited with code 7")):
            room.says(word)
            ended = await run_execution(context, [sample_of(row)], PARAMS, generate)
            assert ended.outcome is Outcome.FAILED and reason in ended.reason
            assert [one.reward for one in ended.samples] == [None]
        room.says("yes", "yes")
        ended = await run_execution(context, [sample_of(row)], PARAMS, generate)
        assert ended.outcome is Outcome.FINISHED and [one.reward for one in ended.samples] == [2.0]


async def test_an_episode_at_a_limit_of_the_run_is_truncated(row: dict[str, Any], tmp_path: Path) -> None:
    """Law: it counts with the score so far, here none, and is not tried again."""
    async with rollout(tmp_path, *ONE_TURN) as (room, context, _):
        room.says("yes")
        ended = await run_execution(context, [sample_of(row)], PARAMS, generate)
        assert ended.outcome is Outcome.FINISHED, ended.reason
        [sample] = ended.samples
        assert (sample.reward, sample.status, sample.metadata[INFO]["end"]) == (0.0, Status.TRUNCATED, "limit")


async def test_what_the_run_ends_is_aborted(row: dict[str, Any], tmp_path: Path) -> None:
    """Law: the run's own abort is no failure of the environment."""
    async with rollout(tmp_path) as (room, context, scope):
        room.model.tick_s = 0.01
        room.says("word " * 1000)
        running = asyncio.create_task(run_execution(context, [sample_of(row)], PARAMS, generate))
        async with asyncio.timeout(120):
            while not room.model.running:
                await asyncio.sleep(0.01)
            await room.client.abort_scope(scope)
            ended = await running
        assert (ended.outcome, ended.reason) == (Outcome.ABORTED, "interrupted")
