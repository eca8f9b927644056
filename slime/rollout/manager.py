"""`RolloutManager`: the rollout side of a run, with Data Buffer, engine clients, graders, schedule and evaluation.

For each step, the driver calls `generate` for a batch, trains on it, calls `commit`, and may then call `save`.
`generate` and `evaluate` may overlap. The schedule (`slime.rollout.schedules`) waits for engines and graders. All
methods run on one event loop; synchronous user functions and file writes run in threads.

Invariants
1. The groups of a batch stay in flight in the buffer until `commit` (`BatchAccount`).
2. `close` leaves no request, connection or grader process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import EngineError, HookError
from slime.core.sample import Sample
from slime.core.text import NO_KEYS, EngineKeys, evaluation_name, step_name
from slime.core.topology import Worker
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.context import Models, RolloutContext, use
from slime.rollout.evaluate import evaluate, evaluate_by_function
from slime.rollout.factories import (
    grader_pool,
    load_data_source,
    load_eval_datasets,
    load_tokenizer,
    model_clients,
    teacher_client,
    tell_shared_rows,
)
from slime.rollout.generate import rollout_sampling_params
from slime.rollout.guard import beside, end_tasks, supervised
from slime.rollout.loopback_router import LoopbackRouter
from slime.rollout.recordings import Recorder
from slime.rollout.sample_metrics import Showcase, speed, staleness
from slime.rollout.schedules import SCHEDULES
from slime.rollout.sft import HeldOut, check_datasets, held_out_batches
from slime.rollout.traces import load_metrics, traffic_metrics
from slime.rollout.train_batch import BatchAccount, to_train_batch
from slime.rollout.types import OpenChats, Progress, RolloutFnTrainOutput
from slime.rollout.user_functions import in_time, is_logged_by_user
from slime.rollout.workers.episodes import LocalEpisodes
from slime.rollout.workers.worker_fleet import WorkerFleet
from slime.settings import Args, for_hook
from slime.settings.groups.evaluation import measures_loss
from slime.settings.groups.hooks import SFT_ROLLOUT
from slime.settings.groups.rollout import RolloutSettings
from slime.settings.topology_yaml import topology_of

NUM_PROMPTS, NUM_TOKENS = 16, 64
"""Maximum number of prompts in a probe, and of tokens in each response."""


class MismatchProbe:
    """Samples responses to prompts of the last batch, so that the trainer can compare its log-probs with the engines'.

    Used by schedules whose batches are older than the trainer's weights. The responses stay outside the Data Buffer and
    are neither graded nor trained on.
    """

    def __init__(self) -> None:
        self._prompts: list[list[int]] = []

    def remember(self, groups: Sequence[Sequence[Sample]]) -> None:
        """Stores the first prompts of a batch."""
        firsts = [group[0] for group in groups[:NUM_PROMPTS]]
        prompts = [(column, one.prompt_length) for one in firsts if (column := one.column("tokens")) is not None]
        self._prompts = [column[:length].tolist() for column, length in prompts]

    async def ask(self, client: EngineClient | None, args: RolloutSettings) -> TrainBatch:
        """Samples short responses with the current weights. Raises `HookError` before the first generation."""
        if client is None or not self._prompts:
            raise HookError(
                "the mismatch probe has no prompts, because no batch has been generated yet; generate one first"
            )
        params = {k: v for k, v in rollout_sampling_params(args).items() if not k.startswith("stop")}
        params["max_new_tokens"] = min(NUM_TOKENS, args.rollout_max_response_len)
        asked = (_answer(client, index, prompt, params) for index, prompt in enumerate(self._prompts))
        return TrainBatch(rollout_id=-1, samples=tuple(await asyncio.gather(*asked)))


async def _answer(client: EngineClient, index: int, prompt: list[int], params: dict[str, Any]) -> TrainSample:
    made = await client.generate(prompt, dict(params))
    sample = Sample(group_index=index, index=index, tokens=list(prompt))
    sample.append_response_tokens(
        made.tokens,
        log_probs=made.log_probs,
        weight_version=made.weight_version,
        routed_experts=made.routed_experts,
    )
    return TrainSample.from_sample(sample, reward=0.0)


logger = logging.getLogger(__name__)

BUFFER_FILE = "data_buffer.json"
CLOSE_LIMIT_S = 60.0
"""Time limit for closing each component; waits inside a component have shorter limits."""


class RolloutManager:
    def __init__(
        self,
        args: Args,
        *,
        engines: Sequence[str] | None,
        keys: EngineKeys = NO_KEYS,
        workers: WorkerFleet | None = None,
        open_chats: OpenChats | None = None,
    ) -> None:
        """Loads the tokenizer and the data.

        `engines`: addresses of the policy's initial engines; None if no model has engines. `keys`: API keys. `workers`:
        processes that run the groups; None: they run in this process. `open_chats`: makes `current().chat` work.

        Raises `DataError`, `HookError`, `ConfigError`.
        """
        self._args = args
        self._tokenizer = load_tokenizer(args)
        self._source: DataBuffer = load_data_source(args, self._tokenizer)
        datasets = load_eval_datasets(args, self._tokenizer)
        self._eval_datasets = tuple(one for one in datasets if not measures_loss(args, one.config))
        self._loss_datasets = tuple(one for one in datasets if measures_loss(args, one.config))
        tell_shared_rows(self._source, datasets)
        if args.rollout_function_path == SFT_ROLLOUT and not args.load_debug_rollout_data:
            check_datasets(args, self._tokenizer, self._source, self._loss_datasets)
        if args.dump_details and self._tokenizer is not None:
            self._tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
        self._clients = (
            Models() if engines is None else model_clients(args, self._tokenizer, keys=keys, open_chats=open_chats)
        )
        policy = topology_of(args).main
        self._policy = policy.name if policy is not None and self._clients else None
        self._models, self._eval_models = self._clients.split(self._policy or "")
        self._loopback = LoopbackRouter(args, self._models, keys)
        self._client = self._models[self._policy] if self._policy is not None else None
        self._numbers: dict[str, int] = {}
        """The policy's engines -> their numbers in metrics. A new engine gets the first free one."""
        self._workers = workers
        if workers is not None:
            workers.include(LocalEpisodes(self._client))
        if policy is not None and self._client is not None and engines:
            self.admit(policy.name, engines)
        self._teacher = teacher_client(args)
        self._graders = grader_pool(args, self._loopback.address_for_rewards)
        self._source.max_staleness = args.max_weight_staleness
        self._source.weight_version = int(not args.debug_rollout_only)
        self._schedule = SCHEDULES.build(args.rollout_schedule, args)
        self._account = BatchAccount(self._source, trains=not args.debug_rollout_only)
        self._recorder = Recorder(args)
        self._probe = MismatchProbe()
        self.showcase = Showcase(args, self._tokenizer)
        """Samples to show for each step and evaluation; removed once the metrics are logged."""
        self._progress: list[Progress] = []
        self._evaluation: asyncio.Task[dict[str, float]] | None = None

    @property
    def num_prompts(self) -> int:
        return len(self._source)

    def progress(self) -> str:
        """Describes the running work in one line; empty when idle."""
        return "; ".join(filter(None, map(str, self._progress)))

    async def generate(self, rollout_id: int) -> tuple[TrainBatch, dict[str, float]]:
        """Generates or replays the batch of one step. Its groups stay in flight until `commit`."""
        started = time.monotonic()
        output = self._recorder.replay(rollout_id) if self._recorder.replays else await self._rollout(rollout_id)
        await self._recorder.save_rollout(rollout_id, output.samples)
        limit_s = self._args.execution_timeout_s
        batch: TrainBatch = await in_time(limit_s, to_train_batch, self._args, rollout_id, output.samples)
        await self._recorder.save_batch(rollout_id, batch)
        self._probe.remember(output.samples)
        self.showcase.add_rollout(rollout_id, output.samples)
        seconds = time.monotonic() - started
        metrics = output.metrics | speed(output.samples, seconds, num_gpus=self._args.rollout_num_gpus)
        metrics |= await self._traffic()
        samples = [sample for group in output.samples for sample in group]
        path = self._args.custom_rollout_log_function_path
        logged = await is_logged_by_user(
            limit_s, path, "rollout_log", rollout_id, for_hook(self._args), samples, metrics, seconds
        )
        return batch, {} if logged else metrics

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Evaluates on the engines that generate, or on those of `--eval-fleet`. Raises `EngineError` after
        `abandon_evaluation`.
        """
        task = self._evaluation = asyncio.create_task(self._evaluate(rollout_id), name="evaluation")
        try:
            await asyncio.wait([task])
        finally:
            await end_tasks([task])
        if task.cancelled():
            raise EngineError(
                f"the evaluation {evaluation_name(rollout_id)} was cancelled, because its engines are lost"
            )
        return task.result()

    async def abandon_evaluation(self) -> None:
        """Cancels the running evaluation, if any."""
        if self._evaluation is not None:
            await end_tasks([self._evaluation])

    async def _evaluate(self, rollout_id: int) -> dict[str, float]:
        started = time.monotonic()
        with self._context(rollout_id, evaluates=True) as context:
            if self._args.eval_function_path is None:
                work = evaluate(context, rollout_id)
            else:
                work = evaluate_by_function(context, rollout_id, self._source)
            output = await supervised(work, what=f"the evaluation {evaluation_name(rollout_id)}", limit_s=None)
        taken = "perf/eval_fleet_time" if context.on_eval_fleet else "perf/eval_time"
        metrics = {**output.metrics, taken: time.monotonic() - started}
        await self._recorder.save_evaluation(rollout_id, output)
        self.showcase.add_evaluation(rollout_id, output.data)
        path = self._args.custom_eval_rollout_log_function_path
        limit_s = self._args.execution_timeout_s
        given = (rollout_id, for_hook(self._args), output.data, metrics)
        logged = await is_logged_by_user(limit_s, path, "eval_log", *given)
        return {} if logged else metrics

    async def held_out(self) -> tuple[HeldOut, ...]:
        """Returns the datasets on which the trainer measures the held-out loss."""
        made: tuple[HeldOut, ...] = await beside(held_out_batches, self._args, self._tokenizer, self._loss_datasets)
        return made

    async def probe(self) -> TrainBatch:
        return await self._probe.ask(self._client, self._args)

    def admit(self, model: str, urls: Sequence[str], worker: Worker = Worker.REGULAR) -> None:
        """Adds engines to a model. `worker`: whether they do prefill, decode or both."""
        self._clients[model].admit(urls, prefill=worker is Worker.PREFILL)
        if model == self._policy:
            taken = set(self._numbers.values())
            free = (number for number in itertools.count() if number not in taken)
            self._numbers |= {url: next(free) for url in dict.fromkeys(urls) if url not in self._numbers}
        if self._workers is not None:
            self._workers.admit(model, urls, worker)

    def dismiss(self, model: str, urls: Sequence[str], died: bool = False) -> None:
        """Removes engines of a model; their requests move to others. `died`: whether the engines have died or hung."""
        self._clients[model].dismiss(urls, died=died)
        for url in urls if model == self._policy else ():
            self._numbers.pop(url, None)
        if self._workers is not None:
            self._workers.dismiss(model, urls, died)

    async def stalled(self, within_s: float) -> list[str]:
        """Returns the engines, of any model, that were found stalled in the last `within_s` seconds.

        A stalled engine sends no token within `--request-timeout-s`.
        """
        workers = await self._workers.stalled(within_s) if self._workers is not None else []
        return [url for client in self._clients.values() for url in client.stalled(within_s)] + workers

    async def progressing(self, within_s: float) -> list[str]:
        """Returns the engines, of any model, that sent a token in the last `within_s` seconds."""
        workers = await self._workers.progressing(within_s) if self._workers is not None else []
        return [url for client in self._clients.values() for url in client.progressing(within_s)] + workers

    async def pause(self, *, hand_back: bool = True) -> None:
        """Ends the requests of a continuous schedule until `resume`.

        `hand_back`: return the tokens to the Data Buffer for a save; otherwise the requests continue at `resume`.
        """
        await self._schedule.pause(hand_back=hand_back)

    def resume(self) -> None:
        """Lets requests continue after `pause`."""
        self._schedule.resume()

    def commit(self, rollout_id: int) -> dict[str, float]:
        """Marks the groups of a step as trained. Returns the ledger. Raises `LedgerError` if it does not balance."""
        if self._recorder.replays:
            return {}
        self._account.commit(rollout_id)
        return self._source.metrics()

    async def save(self, directory: Path) -> None:
        """Writes the current state of the Data Buffer into `directory`, in a thread."""
        step = self._account.last_step
        await beside(self._source.begin_save(directory / BUFFER_FILE, rollout_id=step))

    def load(self, directory: Path) -> None:
        """Restores the Data Buffer from `directory`. Raises `CheckpointError`."""
        self._source.load(directory / BUFFER_FILE)
        self._account.clear()

    async def close(self) -> None:
        """Closes schedule, graders and connections. Warns about and cancels components that exceed `CLOSE_LIMIT_S`."""
        await self.abandon_evaluation()
        others = (self._workers, self._loopback, *self._clients.values(), self._teacher)
        for part in (self._schedule, self._graders, *(one for one in others if one is not None)):
            closing = asyncio.create_task(part.close(), name=f"closing {type(part).__name__}")
            await asyncio.wait([closing], timeout=CLOSE_LIMIT_S)
            if closing.done():
                closing.result()
            else:
                logger.warning("%s took longer than %g s and was cancelled", closing.get_name(), CLOSE_LIMIT_S)
                await end_tasks([closing])

    async def _traffic(self) -> dict[str, float]:
        """Returns metrics of the requests to the policy since the last batch, from this process and the workers."""
        here = self._client.take_traffic() if self._client is not None else None
        there = await self._workers.traffic() if self._workers is not None else []
        loads = [self._client.take_loads()] if self._client is not None else []
        if self._workers is not None and self._args.rollout_concurrency == "adaptive":
            loads += await self._workers.loads()
        return traffic_metrics([here, *there]) | load_metrics(loads, self._numbers)

    async def _rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Generates the batch of a step and records its groups."""
        before = self._account.in_flight()
        with self._context(rollout_id) as context:
            step = self._schedule.step(context, rollout_id, self._source)
            output = await supervised(
                step, what=f"the rollout of {step_name(rollout_id)}", limit_s=None
            )  # its components have their own limits
        kept = self._schedule.keeps_groups
        self._account.hand_out(rollout_id, output.samples, before=None if kept else before)
        now, limit = self._source.weight_version, self._args.max_weight_staleness
        output.metrics |= await beside(staleness, output.samples, now=now, limit=limit)
        return output

    @contextlib.contextmanager
    def _context(self, rollout_id: int, *, evaluates: bool = False) -> Iterator[RolloutContext]:
        """Makes a new context current within the block, and lists it for `progress`."""
        models = self._eval_models if evaluates else self._models
        client = models[self._policy] if self._policy is not None else None
        context = RolloutContext(
            args=self._args,
            client=client,
            models=models,
            tokenizer=self._tokenizer,
            graders=self._graders,
            progress=Progress(arrived=lambda: client.num_tokens if client is not None else 0),
            loop=asyncio.get_running_loop(),
            rollout_id=rollout_id,
            teacher=self._teacher,
            eval_datasets=self._eval_datasets,
            workers=self._workers,
            loopback=self._loopback,
            on_eval_fleet=client is not self._client,
        )
        self._progress.append(context.progress)
        try:
            with use(context):
                yield context
        finally:
            self._progress.remove(context.progress)
