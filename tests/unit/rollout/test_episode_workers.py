"""Laws of groups that other processes work on: the same batches, and none is lost, whatever becomes of a process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.core.batch import trains_any
from slime.core.errors import ActorDied, HookError, WorkerStalled
from slime.core.topology import DEFAULT_NAME, PAIRED, Worker
from slime.rollout.manager import RolloutManager
from slime.rollout.schedules.group_loop import MAX_TRIES
from slime.rollout.traces import Sums
from slime.rollout.user_functions import load
from slime.rollout.workers import worker_fleet as fleet_module
from slime.rollout.workers.episode_worker import EpisodeWorker
from slime.rollout.workers.worker_fleet import MAX_DEATHS, STALL_COUNTS, SUSPECT, WorkerFleet
from tests.support.episode_workers import Workers, with_workers
from tests.support.fake_engine import FakeEngine, serve
from tests.support.marks import quick
from tests.support.rollout import rollout_args, with_manager, write_prompts

pytestmark = pytest.mark.usefixtures("graders_here")

GRADED = ("--rm-type", "exact_match")


def facts(batch: Any) -> list[Any]:
    """What the trainer gets of each sample."""
    return [
        (
            *(s.group_index, s.index, s.tokens.tolist(), s.loss_mask.tolist(), s.reward, s.rollout_log_probs.tolist()),
            *(None if s.token_rewards is None else s.token_rewards.tolist(), s.metadata),
        )
        for s in batch.samples
    ]


async def three_steps(manager: RolloutManager) -> list[Any]:
    batches = []
    for step in range(3):
        batch, _ = await manager.generate(step)
        manager.commit(step)
        batches.append(facts(batch))
    return batches


def test_batches_are_those_of_one_process(tmp_path: Path) -> None:
    """Law: who works on a group shows nowhere in the batch, nor in the step of its hooks, nor in the engine's load."""
    own = tmp_path / "own.py"
    own.write_text(
        "def stamp(args, sample, rollout_id, evaluation):\n"
        "    sample.reward = 10 * rollout_id + sample.index\n"
        "    sample.add_turn_reward(sample.index / 3)\n"
        "    sample.train_metadata = {'turns': [sample.index]}\n"
    )
    flags = ("--rollout-sample-hook-path", f"{own}:stamp", "--sglang-server-concurrency", "4")
    args = rollout_args(tmp_path, *GRADED, *flags)
    expected = asyncio.run(with_manager(args, FakeEngine(), three_steps))

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        found = await three_steps(manager)
        return found, [one.num_groups for one in workers.started]

    engine = FakeEngine(tick_s=0.001)
    found, groups = asyncio.run(with_workers(args, engine, 2, work))
    assert found == expected and engine.most_running == 4, "two at a time for each worker"
    assert [sample[4] - sample[1] for batch in found for sample in batch] == [0] * 8 + [10] * 8 + [20] * 8
    for sample in (sample for batch in found for sample in batch):
        assert sample[6] == [0.0] * (len(sample[3]) - 1) + [sample[1] / 3] and sample[7] == {"turns": [sample[1]]}
    assert groups == [6, 6], "each group went to the worker with the fewest"


@pytest.mark.parametrize("seed", quick(range(4), 0))
def test_a_killed_worker_loses_no_group(tmp_path: Path, seed: int) -> None:
    """Law: whenever workers are killed, each batch is whole, each group is trained once, and the ledger balances."""
    args, chance = rollout_args(tmp_path, *GRADED, num_rows=400), random.Random(seed)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        trained = []
        killing = asyncio.create_task(workers.kill_now_and_then(chance, 0.05))
        for step in range(5):
            batch, _ = await manager.generate(step)
            ledger = manager.commit(step)
            trained += [s.group_index for s in batch.samples]
        killing.cancel()
        return trained, ledger, len(workers.started)

    trained, ledger, num_started = asyncio.run(with_workers(args, FakeEngine(tick_s=0.005), 2, work))
    assert num_started > 2, "nobody was killed"
    assert len(trained) == 5 * 4 * 2 and all(trained.count(index) == 2 for index in trained)
    assert ledger["data/trained"] == 20 and ledger["data/in_flight"] == 0


def test_a_worker_that_only_dies_ends_the_run(tmp_path: Path) -> None:
    """Law: another start is for accidents; code that ends its process each time is told to its author."""
    args = rollout_args(tmp_path, *GRADED)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        async def killer() -> None:
            while True:
                for one in workers.started:
                    one.kill()
                await asyncio.sleep(0)

        killing = asyncio.create_task(killer())
        with pytest.raises(ActorDied, match=f"{MAX_DEATHS} times in a row"):
            await manager.generate(0)
        killing.cancel()
        return manager._source.ledger()

    ledger = asyncio.run(with_workers(args, FakeEngine(tick_s=0.01), 1, work))
    assert ledger.in_flight == 0 and not ledger.failed, "its groups are back in the buffer"


class KeepingEngine(FakeEngine):
    """Answers to the first prompts when it has begun with the later ones, and keeps those until they are ended."""

    later: frozenset[int] = frozenset()
    """Tokens that only their prompts have."""

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        is_first = self.later.isdisjoint(body["input_ids"])
        while is_first and sum(map(bool, self._sampled.values())) < 2 * len(self.later):
            await asyncio.sleep(0.001)
        self.stops.clear()
        self.stops.extend([3] * is_first)
        return await super()._sample(body, stop)


def test_what_is_surplus_comes_back_with_its_tokens(tmp_path: Path) -> None:
    """Law: the end of a step ends requests in every process; with --partial-rollout their tokens stay."""
    flags = ("--over-sampling-batch-size", "8", "--partial-rollout", "--rollout-max-response-len", "900")
    args = rollout_args(tmp_path, *GRADED, *flags)
    engine = KeepingEngine(tick_s=0.01)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        engine.later = frozenset(manager._tokenizer.convert_tokens_to_ids(list("4567")))
        _, metrics = await manager.generate(0)
        manager.commit(0)
        waiting = manager._source.get_groups(4)
        return metrics, [s.response_length for group in waiting for s in group.samples], len(engine.running)

    metrics, lengths, running = asyncio.run(with_workers(args, engine, 2, work))
    assert metrics["rollout/num_aborted_groups"] == 4 and min(lengths) > 0 and running == 0


def test_filters_and_hooks_see_the_groups(tmp_path: Path) -> None:
    """Law: what the filter drops is counted and shown to the hook of all samples."""
    own = tmp_path / "own.py"
    own.write_text(
        "seen = []\n"
        "def keep(args, samples): return samples[0].group_index % 2 == 0\n"
        "def look(args, groups, source): seen.append([g[0].group_index for g in groups])\n"
    )
    hooks = ("--dynamic-sampling-filter-path", f"{own}:keep", "--rollout-all-samples-process-path", f"{own}:look")
    args = rollout_args(tmp_path, *GRADED, *hooks)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        batch, metrics = await manager.generate(0)
        return sorted({s.group_index for s in batch.samples}), metrics

    indices, metrics = asyncio.run(with_workers(args, FakeEngine(), 2, work))
    assert indices == [0, 2, 4, 6] and metrics["rollout/num_filtered_groups"] >= 3


@pytest.mark.slow
def test_evaluations_are_those_of_one_process(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", 6)
    flags = ("--eval-interval", "1", "--eval-prompt-data", "held", str(held), "--n-samples-per-eval-prompt", "2")
    args = rollout_args(tmp_path, *GRADED, *flags)

    async def here(manager: RolloutManager) -> Any:
        return await manager.evaluate(0)

    async def there(manager: RolloutManager, workers: Workers) -> Any:
        return await manager.evaluate(0), [one.num_groups for one in workers.started]

    expected = asyncio.run(with_manager(args, FakeEngine(), here))
    found, groups = asyncio.run(with_workers(args, FakeEngine(), 2, there))
    timed = "perf/eval_time"
    assert {**found, timed: 0} == {**expected, timed: 0} and groups == [6, 6]


@pytest.mark.parametrize("num_workers", quick([0, 1], 1))
def test_a_dataset_of_an_evaluation_has_limits_of_its_own(tmp_path: Path, num_workers: int) -> None:
    """Law: what an execution may sample, and how long its conversation may get, is its dataset's, whoever works."""
    held = write_prompts(tmp_path / "held.jsonl", 12)  # prompts of four tokens, and two of six
    entries = {
        "plain": {},
        "total": {"max_total_response_len": 2},
        "context": {"max_context_len": 9},
        "short": {"max_context_len": 6},
        "free": {"max_context_len": None, "max_total_response_len": None},
    }
    datasets = {name: {"path": str(held), **own} for name, own in entries.items()}
    file, engine = tmp_path / "eval.yaml", FakeEngine()
    file.write_text(json.dumps({"eval": {"datasets": datasets}}))
    flags = ("--eval-interval", "1", "--eval-config", str(file), "--eval-max-total-response-len", "7")
    args = rollout_args(tmp_path, *GRADED, *flags, "--rollout-max-total-response-len", "3")

    async def work(manager: RolloutManager, *_: Workers) -> Any:
        return await manager.evaluate(0)

    run = with_workers(args, engine, num_workers, work) if num_workers else with_manager(args, engine, work)
    metrics = asyncio.run(run)
    spread = {name: [metrics[f"eval/{name}/response_len/{end}"] for end in ("max", "min")] for name in entries}
    assert spread == {"plain": [7, 7], "total": [2, 2], "context": [5, 3], "short": [2, 2], "free": [8, 8]}
    assert [metrics[f"eval/{name}-num_prompts"] for name in entries] == [12, 12, 12, 10, 12]


@pytest.mark.parametrize("num_workers", quick([0, 1], 1))
def test_a_greedy_answer_without_a_score_is_not_sampled_again(tmp_path: Path, num_workers: int) -> None:
    """Law: what no grader could score, and would be the same answer, is not asked for a second time."""
    own = tmp_path / "own.py"
    own.write_text("def rm(args, sample): return None if sample.group_index == -1 else 1.0\n")
    held, engine = write_prompts(tmp_path / "held.jsonl", 6), FakeEngine()
    flags = ("--eval-interval", "1", "--eval-prompt-data", "held", str(held), "--eval-temperature", "0")
    args = rollout_args(tmp_path, "--custom-rm-path", f"{own}:rm", *flags)

    async def work(manager: RolloutManager, *_: Workers) -> Any:
        return await manager.evaluate(0)

    run = with_workers(args, engine, num_workers, work) if num_workers else with_manager(args, engine, work)
    metrics = asyncio.run(run)
    assert metrics["eval/held-num_unscored"] == 1 and len(engine.requests) == 6


def test_a_mistake_in_a_hook_ends_the_run_as_itself(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("async def wrong(args, sample, sampling_params): return 7\n")
    args = rollout_args(tmp_path, *GRADED, "--custom-generate-function-path", f"{own}:wrong")

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        with pytest.raises(HookError, match="returned int"):
            await manager.generate(0)
        return manager._source.ledger().in_flight

    assert asyncio.run(with_workers(args, FakeEngine(), 2, work)) == 0


def test_groups_that_are_refused_to_the_last_attempt_come_from_workers_too(tmp_path: Path) -> None:
    untrue = ("--custom-generate-function-path", "tests.unit.rollout.truth_hooks.always_untrue")

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        return await manager.generate(0)

    batch, metrics = asyncio.run(with_workers(rollout_args(tmp_path, *GRADED, *untrue), FakeEngine(), 2, work))
    assert len(batch.samples) == 8 == metrics["rollout/num_unscored_samples"] and not trains_any(batch.samples)
    assert metrics["rollout/num_refused_samples"] == 24.0 and metrics["rollout/num_failed_groups"] == 0.0


def test_a_pause_reaches_every_worker_and_hands_tokens_back(tmp_path: Path) -> None:
    """Law: after a pause no engine has a request; the tokens so far are part of what is asked for after it."""
    flags = ("--fully-async", "--rollout-max-response-len", "32")
    args = rollout_args(tmp_path, *GRADED, *flags, synchronous=False)
    engine = FakeEngine(tick_s=0.005)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        first, _ = await manager.generate(0)
        while not engine.running:
            await asyncio.sleep(0.005)
        await manager.pause(hand_back=True)
        quiet, num_before = len(engine.running), len(engine.requests)
        manager.resume()
        manager.commit(0)
        second, _ = await manager.generate(1)
        manager.commit(1)
        return quiet, num_before, first, second

    quiet, num_before, first, second = asyncio.run(with_workers(args, engine, 2, work))
    longest = max(len(request["input_ids"]) for request in engine.requests[:num_before])
    assert quiet == 0 and any(len(request["input_ids"]) > longest for request in engine.requests[num_before:])
    assert not {s.group_index for s in first.samples} & {s.group_index for s in second.samples}


class Noting(EpisodeWorker):
    """Notes whether it would have sent a request to an engine when it got to know one."""

    would_send = False

    def admit(self, model: str, urls: Sequence[str], worker: Worker) -> None:
        assert self._client is not None
        self.would_send = self._client._pool.is_open
        super().admit(model, urls, worker)


def test_a_new_process_knows_the_engines_and_the_pause(tmp_path: Path) -> None:
    """Law: at no moment a process that starts during a pause could send a request."""
    args = rollout_args(tmp_path, *GRADED)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        await workers.fleet.ready()
        await workers.fleet.pause(None)
        workers.started[0].kill()
        generating = asyncio.create_task(manager.generate(0))
        while len(workers.started) < 2 or not workers.started[1].worker._client.engines():
            await asyncio.sleep(0.001)
        would_send = [one.worker.would_send for one in workers.started]
        workers.fleet.resume()
        batch, _ = await generating
        return would_send, len(batch.samples)

    assert asyncio.run(with_workers(args, FakeEngine(), 1, work, Noting)) == ([True, False], 8)


@pytest.mark.parametrize(("death", "tries"), [(ActorDied, SUSPECT), (WorkerStalled, SUSPECT // STALL_COUNTS)])
def test_the_group_that_ends_its_process_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: type[ActorDied], tries: int
) -> None:
    """Law: a group that ends whoever works on it has failed; those that were beside it each time have not."""
    monkeypatch.setattr("tests.support.episode_workers.ActorDied", death)
    args = rollout_args(tmp_path, *GRADED)
    engine = FakeEngine(tick_s=0.001)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        async def killer() -> None:
            while True:
                for one in workers.started:
                    if any(group.group_index == 1 for group in one.groups):
                        one.kill()
                await asyncio.sleep(0)

        killing = asyncio.create_task(killer())
        batch, metrics = await manager.generate(0)
        killing.cancel()
        told = sum(any(group.group_index == 1 for group in one.groups) for one in workers.started)
        return sorted({s.group_index for s in batch.samples}), metrics, manager._source.ledger(), told

    indices, metrics, ledger, told = asyncio.run(with_workers(args, engine, 2, work))
    assert indices == [0, 2, 3, 4] and told == tries + MAX_TRIES, "each try after those is alone"
    assert metrics["rollout/num_failed_groups"] == 1 and ledger.failed == {"failed_its_worker_died_alone": 1}


def test_threads_of_users_hold_no_result_up(tmp_path: Path) -> None:
    """Law: whatever user code does with asyncio's threads, what has ended is recorded, and handed on."""
    own = tmp_path / "own.py"
    own.write_text(
        "import asyncio, threading\n"
        "from slime.rollout.generate import generate as default\n"
        "OVER = threading.Event()\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.group_index == 0:\n"
        "        threads = [asyncio.to_thread(OVER.wait) for _ in range(80)]\n"
        "        await asyncio.gather(*threads)\n"
        "    return await default(args, sample, sampling_params)\n"
    )
    how = ("--custom-generate-function-path", f"{own}:generate", "--execution-timeout-s", "1")
    args = rollout_args(tmp_path, *GRADED, *how)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        try:
            batch, _ = await manager.generate(0)
            return sorted({s.group_index for s in batch.samples})
        finally:
            module = load(f"{own}:generate", "generate").__globals__
            module["OVER"].set()

    assert asyncio.run(with_workers(args, FakeEngine(), 1, work)) == [1, 2, 3, 4]


def test_workers_follow_the_engines_that_come_and_go(tmp_path: Path) -> None:
    """Law: what the rollout side hears of an engine each worker hears, and which half of a request it does."""
    pairs = ("--rollout-num-gpus", "2", "--prefill-num-servers", "1")
    args = rollout_args(tmp_path, *GRADED, *pairs)
    urls = ("http://127.0.0.1:9", "http://127.0.0.1:10")

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        await workers.fleet.ready()
        for url, worker in zip(urls, PAIRED, strict=True):
            manager.admit(DEFAULT_NAME, [url], worker)
        clients = [manager._client, *(one.worker._client for one in workers.started)]
        while not all(len(client.engines()) == 3 for client in clients):
            await asyncio.sleep(0)
        readers = [[one.url for one in client._pool._readers.upstreams] for client in clients]
        manager.dismiss(DEFAULT_NAME, [urls[0]])
        while any(urls[0] in client.engines() for client in clients):
            await asyncio.sleep(0)
        return readers, [client.engines() for client in clients]

    engine = FakeEngine()
    readers, left = asyncio.run(with_workers(args, engine, 2, work))
    assert readers == [[urls[0]]] * 3 and left == [[engine.url, urls[1]]] * 3


def test_a_pause_reaches_requests_of_the_conductor(tmp_path: Path) -> None:
    """Law: what evaluates with the client of the rollout's own process pauses with the workers."""
    args = rollout_args(tmp_path, *GRADED)

    async def work(manager: RolloutManager, workers: Workers) -> Any:
        client = manager._client
        assert client is not None
        await workers.fleet.pause(None)
        asking = asyncio.create_task(client.generate([3, 4], {"max_new_tokens": 2}))
        await asyncio.sleep(0.05)
        held = not asking.done()
        workers.fleet.resume()
        return held, len((await asking).tokens)

    held, num = asyncio.run(with_workers(args, FakeEngine(), 1, work))
    assert held and num > 0


def test_a_worker_that_does_not_start_is_ended_and_named(tmp_path: Path) -> None:
    """Law: the start of a process has a limit, and so have the groups that wait for it."""
    args = rollout_args(tmp_path, *GRADED)

    class Stuck:
        """Never answers, until it is killed."""

        def __init__(self) -> None:
            self.is_over = asyncio.Event()

        async def call(self, method: str, *arguments: Any) -> Any:
            await self.is_over.wait()
            raise ActorDied("killed")

        def kill(self) -> None:
            self.is_over.set()

    async def main() -> None:
        fleet = WorkerFleet(lambda _: Stuck(), 1, start_limit_s=0.02)
        engine = FakeEngine()
        async with serve(engine):
            manager = RolloutManager(args, engines=[engine.url], workers=fleet)
            with pytest.raises(ActorDied, match=r"did not start within 0 s|killed"):
                await manager.generate(0)
            await manager.close()

    asyncio.run(main())


def test_what_a_worker_tells_late_is_counted_once_with_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a worker tells its sums once, so an answer that nobody waited for any more is kept, not dropped."""
    monkeypatch.setattr(fleet_module, "QUERY_LIMIT_S", 0.0)
    answers = [asyncio.Event() for _ in range(4)]
    asked = iter(range(4))

    class Busy:
        """A worker whose event loop turns when the test says so."""

        async def call(self, method: str, *arguments: Any) -> Any:
            if method != "traffic":
                return None
            number = next(asked)
            await answers[number].wait()
            return Sums(period_s=1.0, num=1, tokens=10**number)

        def kill(self) -> None:
            pass

    async def main() -> list[list[int]]:
        fleet = WorkerFleet(lambda _: Busy(), 1)
        await fleet.ready()
        told = [await fleet.traffic(), await fleet.traffic()]
        for number in (0, 1):
            answers[number].set()
        while len(fleet._members[0].orders) > 0:
            await asyncio.sleep(0)
        told.append(await fleet.traffic())
        answers[2].set()
        while len(fleet._members[0].orders) > 0:
            await asyncio.sleep(0)
        told += [await fleet.traffic()]
        await fleet.close()
        return [[sums.tokens for sums in some] for some in told]

    assert asyncio.run(main()) == [[], [], [11], [100]]
