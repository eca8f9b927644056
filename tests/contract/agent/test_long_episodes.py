"""A conversation that lives through weight syncs: which version each token has, how old it counts, where it is booked.

The engine is scripted; weight syncs are what the client sees of them: requests end, and go on under another version.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime.core.sample import NOT_SAMPLED
from slime.rollout.manager import RolloutManager
from tests.support.agent_room import ScriptedModel
from tests.support.chat_hooks import short_tokenizer_folder
from tests.support.long_episode import PACE
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub

NUM_VERSIONS = 4
NUM_EXECUTIONS = 2
MOST_STEPS = 60


@dataclass
class Speaker(ScriptedModel):
    """Says the same each time, slowly, and writes down what it sampled, behind what, under which version."""

    log: list[tuple[list[int], list[int], int]] = field(default_factory=list)

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        self.script = deque(["and then " * 40])
        said = await super()._sample(body, stop)
        self.log.append((body["input_ids"], said["output_ids"], int(said["meta_info"]["weight_version"])))
        return said

    def versions_of(self, tokens: list[int]) -> list[int]:
        """Of each token of a conversation, as they were sampled."""
        out = [NOT_SAMPLED] * len(tokens)
        for before, said, version in self.log:
            end = len(before) + len(said)
            if tokens[:end] == before + said:
                out[len(before) : end] = [version] * len(said)
        return out


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.02)


@dataclass
class Outcome:
    """What a run with one long episode leaves."""

    engine: Speaker
    batches: list[Any] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    books: list[dict[str, float]] = field(default_factory=list)

    def of_the_episode(self) -> list[tuple[int, Any]]:
        """(step, sample) of prompt 0."""
        return [(step, s) for step, batch in enumerate(self.batches) for s in batch.samples if s.group_index == 0]


def lived_through(tmp_path: Path, max_staleness: int) -> Outcome:
    """A run in which the turns of the episode begin under versions 1, 1, 2, 3 and end under 1, 2, 3, 4.

    It goes on until the episode is in a batch.
    """
    model = write_checkpoint_stub(tmp_path / "chat")
    shutil.copytree(short_tokenizer_folder("qwen3"), model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 200_000}))
    hook = ("--custom-generate-function-path", "tests.support.long_episode.generate")
    flags = ("--fully-async", "--max-weight-staleness", str(max_staleness), "--max-groups-in-flight", "3")
    sizes = ("--rollout-batch-size", "1", "--rollout-max-response-len", "200")
    args = rollout_args(tmp_path, "--hf-checkpoint", str(model), *hook, *flags, *sizes, synchronous=False)
    out = Outcome(Speaker(tick_s=0.005))
    PACE.num_turns, PACE.allowed = NUM_VERSIONS, 1
    PACE.tries.clear()

    def num_speaking(turns: int) -> int:
        """Executions of the episode whose answer after so many turns is being sampled."""
        ends = [out.engine.tokenizer.decode(body["input_ids"]).count("Go on.") for body in out.engine.requests]
        rids = [body["rid"] for body, num in zip(out.engine.requests, ends, strict=True) if num == turns]
        return sum(len(out.engine._sampled.get(rid, ())) > 2 for rid in rids)

    async def work(manager: RolloutManager) -> None:
        out.engine.tokenizer = manager._tokenizer
        for step in range(MOST_STEPS):
            if step + 1 == NUM_VERSIONS or max(PACE.tries[index] for index in range(NUM_EXECUTIONS)) > 1:
                # No version passes while the episode is sampled again, however slow the machine is.
                await until(lambda: any(group.group_index == 0 for group in manager._source._finished))
            batch, metrics = await manager.generate(step)
            out.batches.append(batch)
            out.metrics.append(metrics)
            if step + 2 <= NUM_VERSIONS:
                PACE.allowed = step + 2
                await until(lambda turns=step + 1: num_speaking(turns) == NUM_EXECUTIONS)  # type: ignore[misc]
            out.books.append(manager.commit(step))
            manager._source.ledger().check()
            await manager.pause(hand_back=False)
            out.engine.weight_version = str(step + 2)
            manager.resume()
            if out.of_the_episode():
                return

    asyncio.run(with_manager(args, out.engine, work))
    return out


@pytest.mark.timeout(300)
def test_tokens_of_an_episode_have_the_versions_that_sampled_them_and_it_is_as_old_as_the_oldest(
    tmp_path: Path,
) -> None:
    """Law: a conversation over four versions is one sample each; it is trained while its first turn may be."""
    out = lived_through(tmp_path, NUM_VERSIONS - 1)
    found = out.of_the_episode()
    assert [step for step, _ in found] == [NUM_VERSIONS - 1] * NUM_EXECUTIONS, "the first batch that it can be in"
    for _, sample in found:
        tokens, num = sample.tokens.tolist(), len(sample.token_versions)
        versions = sample.token_versions.tolist()
        assert versions == out.engine.versions_of(tokens)[-num:]
        assert sorted(set(versions) - {NOT_SAMPLED}) == [1, 2, 3, 4]
        assert ((sample.token_versions != NOT_SAMPLED) == (sample.loss_mask > 0)).all()
    assert out.metrics[-1]["rollout/staleness/max"] == NUM_VERSIONS - 1, "as old as its oldest token"
    assert not out.books[-1].get("data/returned/stale")
    assert set(PACE.tries.values()) == {1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_episode_that_is_older_than_the_bound_starts_over_and_is_booked(tmp_path: Path) -> None:
    """Law: what it sampled is not trained, its prompt is; the ledger says once that it was stale."""
    out = lived_through(tmp_path, NUM_VERSIONS - 2)
    assert {PACE.tries[index] for index in range(NUM_EXECUTIONS)} == {2}, "it did not start over once"
    found = out.of_the_episode()
    assert len(found) == NUM_EXECUTIONS
    for step, sample in found:
        versions = [v for v in sample.token_versions.tolist() if v != NOT_SAMPLED]
        assert min(versions) >= NUM_VERSIONS and step + 1 - min(versions) <= 2
        assert (
            sample.token_versions.tolist()
            == out.engine.versions_of(sample.tokens.tolist())[-len(sample.token_versions) :]
        )
    assert out.books[-1]["data/returned/stale"] == 1
    assert all(metrics["rollout/staleness/max"] <= 2 for metrics in out.metrics)
