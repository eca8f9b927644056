"""An answer of 131,072 tokens passes through every schedule, interruptions, a checkpoint and a resume, token for token.

The engine is scripted: it samples 2,048 tokens of the long answer in a tick, and of each token its place says what it
is and how probable. Weight syncs are what the client sees of them.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.core.batch import TrainBatch, TrainSample
from slime.rollout.factories import tokenizer_of
from slime.rollout.manager import RolloutManager
from tests.support.episode_workers import with_workers
from tests.support.fake_engine import FakeEngine
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager, write_checkpoint_stub

LENGTH, AT_ONCE = 128 * 1024, 2048
SAVE_AT, MOST_STEPS = 3, 120


@dataclass
class LongWinded(FakeEngine):
    """Answers one prompt at length, and every other one with 8 tokens."""

    prompt: tuple[int, ...] = ()
    """The one."""
    per_version: int = LENGTH
    """Tokens of it that one version of the weights samples at most."""

    def token(self, body: dict[str, Any], i: int) -> int:
        return int(made_of(len(body["input_ids"]) + i)[0])

    def log_prob(self, body: dict[str, Any], i: int) -> float:
        return float(made_of(len(body["input_ids"]) + i)[1])

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        if tuple(body["input_ids"][: len(self.prompt)]) != self.prompt:
            body["sampling_params"]["max_new_tokens"] = 8
            return await super()._sample(body, stop)
        limit, ids = body["sampling_params"]["max_new_tokens"], self._sampled[body["rid"]]
        most = int(self.weight_version) * self.per_version + len(self.prompt) - len(body["input_ids"])
        while len(ids) < limit and not stop.is_set():
            ids.extend(self.token(body, i) for i in range(len(ids), min(limit, most, len(ids) + AT_ONCE)))
            await asyncio.sleep(0.005)
        reason = {"type": "length", "length": limit} if len(ids) >= limit else {"type": "abort", "message": "Aborted"}
        pairs = [[self.log_prob(body, i), token, None] for i, token in enumerate(ids)]
        meta = {**self._meta(body, ids), "finish_reason": reason, "output_token_logprobs": pairs}
        return {"text": "x" * len(ids), "output_ids": list(ids), "meta_info": meta}


def made_of(place: int | np.ndarray) -> tuple[Any, Any]:
    """Id and log-prob of the token at this place of a sequence."""
    return 10 + np.asarray(place) % 97, -((np.asarray(place) % 1009) / 1024 + 0.5)


def settings(tmp_path: Path, *flags: str, synchronous: bool) -> Any:
    model = tmp_path / "model"
    if not model.exists():
        config = write_checkpoint_stub(model) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2 * LENGTH}))
    given = ("--rollout-max-response-len", str(LENGTH), "--rm-type", "exact_match", "--n-samples-per-prompt", "1")
    bound = ("--max-weight-staleness", str(MOST_STEPS), "--disable-rewards-normalization")
    return rollout_args(tmp_path, *given, *bound, *flags, num_rows=600, synchronous=synchronous)


def require_exact(sample: TrainSample, engine: LongWinded) -> None:
    """Each token is the one of its place, and each has a version."""
    places = np.arange(len(engine.prompt), sample.num_tokens)
    ids, log_probs = made_of(places)
    assert sample.response_length == LENGTH and sample.rollout_log_probs is not None
    assert np.array_equal(sample.tokens[-LENGTH:], ids) and sample.loss_mask.all()
    assert np.array_equal(sample.rollout_log_probs, log_probs.astype(np.float32))
    assert (np.diff(sample.token_versions) >= 0).all() and sample.token_versions[0] == 1


async def until_long(manager: RolloutManager, engine: LongWinded, first: int, last: int) -> TrainSample | None:
    """Steps and weight syncs until the long answer is trained."""
    for step in range(first, last):
        batch: TrainBatch = (await manager.generate(step))[0]
        manager.commit(step)
        if found := [s for s in batch.samples if s.response_length > AT_ONCE]:
            return found[0]
        await manager.pause()
        engine.weight_version = str(step + 2)
        manager.resume()
    return None


WAYS = {
    "sync": ((), True),
    "partial": (("--partial-rollout", "--over-sampling-batch-size", "8"), True),
    "async": (("--fully-async",), False),
}
"""Name -> flags, and whether the loop is the synchronous one."""


@pytest.mark.parametrize("num_workers", quick([0, 1], 1))
@pytest.mark.parametrize("way", quick(WAYS, "async"))
def test_it_is_trained_as_it_was_sampled(tmp_path: Path, way: str, num_workers: int) -> None:
    """Law: who interrupts it, saves it or goes on with it later, nothing of it is lost or sampled twice."""
    flags, synchronous = WAYS[way]
    args = settings(tmp_path, *flags, synchronous=synchronous)
    prompt = tuple(tokenizer_of(str(tmp_path / "model")).encode("0+0=", add_special_tokens=False))
    engine = LongWinded(prompt=prompt, tick_s=0.001, per_version=LENGTH // 8 if flags else LENGTH)

    async def first(manager: RolloutManager, *_: Any) -> Any:
        found = await until_long(manager, engine, 0, SAVE_AT)
        if found is None:
            await manager.pause(hand_back=True)
            await manager.save(tmp_path)
        return found

    async def second(manager: RolloutManager, *_: Any) -> Any:
        manager.load(tmp_path)
        return await until_long(manager, engine, SAVE_AT, MOST_STEPS)

    def life(work: Any) -> Any:
        if num_workers:
            return asyncio.run(with_workers(args, engine, num_workers, work))
        return asyncio.run(with_manager(args, engine, work))

    found = life(first)
    if flags:
        assert found is None, "it was not under way when the state was saved"
        found = life(second)
        assert len(set(found.token_versions.tolist())) > 1, "no weight sync interrupted it"
    require_exact(found, engine)
    num_sampled = sum(len(request["input_ids"]) > len(prompt) for request in engine.requests)
    assert num_sampled > 0 or not flags, "it was never continued"
