"""The worker of `--fully-async` on a real engine, while real weight syncs change its weights.

The laws are those of the fake clock (`tests/support/async_laws.py`), and each token says by its log-prob what sampled
it (`tests/support/labelled_engine.py`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.weight_sync_sequence import NUM_TRIES
from tests.support.async_laws import HEAVY_TAILED, Schedule
from tests.support.labelled_engine import TOLERANCE, LabelledEngine, log_prob
from tests.support.rollout import rollout_args
from tests.support.tiny import VOCAB_SIZE


def test_a_log_prob_is_of_one_version() -> None:
    for token in range(2):
        values = sorted(log_prob(token, version) for version in range(20))
        assert min(b - a for a, b in itertools.pairwise(values)) > 100 * TOLERANCE
    assert VOCAB_SIZE % 2 == 0


MODES = ("abort", "retract", "in_place", "auto")
"""What a weight sync does to requests under way."""


def run_schedules(tmp_path: Path, engine_server: Any, seeds: range, num_steps: int) -> Counter[str]:
    """Schedule by schedule, the modes in turn. Returns what happened in them."""
    flags = ("--fully-async", "--rm-type", "random", "--custom-generate-function-path", HEAVY_TAILED)
    settings = rollout_args(tmp_path, *flags, synchronous=False)
    seen: Counter[str] = Counter()
    pauses: list[float] = []

    async def work(seed: int, mode: str) -> None:
        engine = LabelledEngine(engine_server.url, Path(engine_server.model_path), mode)
        schedule = Schedule(settings, seed, num_steps=num_steps, faults=False)
        try:
            await engine.sync_weights(1)
            await schedule.run(engine)
        except BaseException as error:
            error.add_note(f"schedule {seed}, {mode}")
            raise
        finally:
            await engine.close()
        seen["evaluations"] += schedule.num_evaluations
        seen["stale tokens"] += schedule.num_stale_tokens
        seen[f"samples of several versions, {mode}"] += schedule.num_mixed
        seen["kills"] += schedule.killed_at is not None
        pauses.extend(engine.pause_s[1:-1] if mode == "abort" else ())

    for number, seed in enumerate(seeds):
        asyncio.run(work(seed, MODES[number % len(MODES)]))
    print(dict(seen), "pauses to abort:", [round(s, 2) for s in sorted(pauses)])
    return seen


@pytest.mark.slow
def test_with_auto_one_engine_is_paused_in_both_modes_then_in_one_and_labels_every_token(engine_server: Any) -> None:
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True, "max_new_tokens": 900}

    async def main() -> tuple[list[str], list[Any]]:
        engine, modes = LabelledEngine(engine_server.url, Path(engine_server.model_path), "auto"), []
        try:
            await engine.sync_weights(1)
            prompts = [[2, 40 + i] for i in range(8)]
            answers = [asyncio.create_task(engine.client.generate(prompt, params)) for prompt in prompts]
            for version in range(2, 2 * NUM_TRIES + 4):
                await asyncio.sleep(0.2)
                modes.append(engine.pauses.mode)
                await engine.sync_weights(version)
            return modes, await asyncio.gather(*answers)
        finally:
            await engine.close()

    modes, answers = asyncio.run(main())
    assert modes[: 2 * NUM_TRIES] == ["abort", "retract"] * NUM_TRIES and len(set(modes[2 * NUM_TRIES :])) == 1, modes
    for answer in answers:
        told = zip(answer.tokens, answer.log_probs, answer.weight_version, strict=True)
        assert len(answer.tokens) == 900 and len(set(answer.weight_version)) > 1
        assert all(abs(p - log_prob(token, version)) < TOLERANCE for token, p, version in told)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(3), range(6)], ids=str)
def test_the_laws_hold_on_a_real_engine(seeds: range, tmp_path: Path, engine_server: Any) -> None:
    seen = run_schedules(tmp_path, engine_server, seeds, num_steps=3)
    assert seen["kills"] and seen["evaluations"] and seen["stale tokens"], seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_laws_hold_on_a_real_engine_under_many_schedules(tmp_path: Path, engine_server: Any) -> None:
    seen = run_schedules(tmp_path, engine_server, range(100, 160), num_steps=5)
    assert len(seen) == 7 and min(seen.values()) >= 5, seen
