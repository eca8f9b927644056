"""`RolloutManager`: the rollout side of a run: Data Buffer, engine client, graders, loop and evaluation in one object.

Who produces, who consumes: the driver calls `generate` and `evaluate` (they may overlap) and gets a `TrainBatch`;
after the optimizer step it calls `commit`, then perhaps `save`. All methods run on one event loop; beside it threads
run synchronous user functions and write files.

Invariants
1. The groups of a batch stay in flight in the buffer until `commit`; a save before it issues them again on resume.
2. After each `generate` and `commit` the ledger balances, or `LedgerError`.
3. `close` leaves no request, connection or grader process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.buffer.groups import flatten
from slime.core.batch import TrainBatch, TrainSample
from slime.core.errors import HookError, LedgerError
from slime.core.sample import NOT_SAMPLED, Sample
from slime.rewards.pool import GraderPool
from slime.rollout import debug_data
from slime.rollout.client import EngineClient
from slime.rollout.context import RolloutContext, use
from slime.rollout.convert import to_train_batch
from slime.rollout.evaluate import evaluate
from slime.rollout.fully_async import RolloutWorker
from slime.rollout.hooks import in_thread, load
from slime.rollout.loop import generate_rollout, generate_step
from slime.rollout.metrics import sample_metrics
from slime.rollout.sampling import rollout_sampling_params
from slime.rollout.sources import load_data_source, load_eval_datasets, load_tokenizer
from slime.rollout.types import Progress, RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.workflows.teacher import TeacherClient
from slime.settings.hooks import is_async

logger = logging.getLogger(__name__)

BUFFER_FILE = "data_buffer.json"
PROBE_PROMPTS, PROBE_TOKENS = 16, 64
"""Most prompts, and most tokens of each answer, of one probe."""
DEFAULT_ROLLOUT = f"{generate_rollout.__module__}.{generate_rollout.__name__}"


class RolloutManager:
    """Built once per run, before or after its event loop starts."""

    def __init__(self, args: Any, *, router_url: str | None, num_engines: int, api_key: str | None = None) -> None:
        """Loads tokenizer and data. `api_key`: the token that the engines ask for.

        Raises `DataError`, `HookError`, `ConfigError`.
        """
        self._args = args
        self._tokenizer = load_tokenizer(args)
        self._source: Any = load_data_source(args, self._tokenizer)
        self._eval_datasets = load_eval_datasets(args, self._tokenizer)
        if args.dump_details and self._tokenizer is not None:
            self._tokenizer.save_pretrained(Path(args.dump_details) / "tokenizer")
        self._client, self._teacher = None, None
        if args.opd_teacher_url is not None:
            self._teacher = TeacherClient(
                args.opd_teacher_url,
                request_timeout_s=args.request_timeout_s,
                max_concurrency=args.sglang_server_concurrency,
                vocab_size=_vocab_size(args.hf_checkpoint),
                api_key=args.opd_teacher_api_key,
            )
        if router_url is not None:
            self._client = EngineClient(
                router_url,
                request_timeout_s=args.request_timeout_s,
                max_concurrency=args.sglang_server_concurrency * max(num_engines, 1),
                vocab_size=_vocab_size(args.hf_checkpoint),
                api_key=api_key,
                token_versions=args.pause_generation_mode != "abort",
            )
        self._graders = GraderPool(
            num_workers=args.reward_num_workers,
            timeout_s=args.reward_timeout_s,
            memory_limit_bytes=args.reward_memory_limit_mb * 2**20 if args.reward_memory_limit_mb else None,
            rm_type=args.rm_type,
            rm_url=args.rm_url,
            custom_rm_path=args.custom_rm_path,
            args=args,
        )
        self._source.max_staleness = args.max_weight_staleness
        self._source.weight_version = int(not args.debug_rollout_only)
        self._worker: RolloutWorker | None = None
        self._handed_out: dict[int, list[int]] = {}
        self._progress: list[Progress] = []
        self._last_step: int | None = None
        self._probe_prompts: list[list[int]] = []

    @property
    def num_prompts(self) -> int:
        """Usable rows of the training data."""
        return len(self._source)

    def progress(self) -> str:
        """What runs now, in one line; empty if nothing does."""
        return "; ".join(str(p) for p in self._progress)

    async def generate(self, rollout_id: int) -> tuple[TrainBatch, dict[str, float]]:
        """Generates, or replays, the batch of one step; its groups are in flight until `commit`."""
        started = time.monotonic()
        if self._args.load_debug_rollout_data is not None:
            output = self._replay(rollout_id)
        else:
            before = self._in_flight()
            output = await self._rollout(rollout_id)
            self._account(rollout_id, output.samples, before)
            output.metrics |= await in_thread(self._staleness, output.samples)
        if self._args.save_debug_rollout_data is not None:
            path = debug_data.path_of(self._args.save_debug_rollout_data, rollout_id)
            await asyncio.to_thread(debug_data.save_rollout, path, rollout_id, output.samples)
        batch: TrainBatch = await in_thread(to_train_batch, self._args, rollout_id, output.samples)
        if self._args.save_debug_train_data is not None:
            path = debug_data.path_of(self._args.save_debug_train_data, rollout_id)
            await asyncio.to_thread(debug_data.save_train_batch, path, batch)
        self._probe_prompts = [group[0].tokens[: group[0].prompt_length] for group in output.samples][:PROBE_PROMPTS]
        metrics = self._with_speed(output, time.monotonic() - started)
        log = load(self._args.custom_rollout_log_function_path, "rollout_log")
        if log is None:
            return batch, metrics
        samples, seconds = flatten(output.samples), metrics["perf/rollout_time"]
        logged = await in_thread(log, rollout_id, self._args, samples, metrics, seconds)
        return batch, {} if logged else metrics

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Scores the held-out data with the weights that the engines hold now."""
        started = time.monotonic()
        path = self._args.eval_function_path
        with self._context(rollout_id) as context:
            output = await (
                evaluate(context, rollout_id) if path is None else self._call(path, "eval", rollout_id, evaluation=True)
            )
        if not isinstance(output, RolloutFnEvalOutput):
            raise HookError(
                f"got {type(output).__name__} from {path}; an evaluation function returns a RolloutFnEvalOutput"
            )
        metrics = {**output.metrics, "perf/eval_time": time.monotonic() - started}
        for name, data in output.data.items() if self._args.save_debug_rollout_data else ():
            file = debug_data.path_of(self._args.save_debug_rollout_data, f"eval_{rollout_id}_{name}")
            await asyncio.to_thread(debug_data.save_rollout, file, rollout_id, [[s] for s in data.get("samples", ())])
        log = load(self._args.custom_eval_rollout_log_function_path, "eval_log")
        if log is not None and await in_thread(log, rollout_id, self._args, output.data, metrics):
            return {}
        return metrics

    async def probe(self) -> TrainBatch:
        """Short fresh answers of the weights that the engines hold now, to prompts of the last batch.

        Outside the Data Buffer, ungraded, never trained: the trainer compares its log-probs with the engines'.
        """
        if self._client is None or not self._probe_prompts:
            raise HookError("got a probe before any generation by an engine; there is no prompt to probe with")
        client = self._client
        params = rollout_sampling_params(self._args)
        params = {k: v for k, v in params.items() if not k.startswith("stop")}
        params["max_new_tokens"] = min(PROBE_TOKENS, self._args.rollout_max_response_len)

        async def answer(index: int, prompt: list[int]) -> TrainSample:
            made = await client.generate(prompt, dict(params))
            sample = Sample(group_index=index, index=index, tokens=list(prompt))
            sample.append_response_tokens(made.tokens, log_probs=made.log_probs, weight_version=made.weight_version)
            return TrainSample.from_sample(sample, reward=0.0)

        answers = await asyncio.gather(*(answer(i, prompt) for i, prompt in enumerate(self._probe_prompts)))
        return TrainBatch(rollout_id=-1, samples=tuple(answers))

    async def hold(self) -> None:
        """Ends the requests of `--fully-async`; it sends no more until `release`."""
        if self._client is not None and self._worker is not None:
            await self._client.hold(self._worker.scope)

    def release(self) -> None:
        """Requests go again."""
        if self._client is not None:
            self._client.release()

    def commit(self, rollout_id: int) -> dict[str, float]:
        """The step is trained: settles its groups. Returns the ledger. Raises `LedgerError` if it does not balance."""
        if self._args.load_debug_rollout_data is not None:
            return {}
        if rollout_id not in self._handed_out:
            raise LedgerError(f"got a commit of step {rollout_id}, which was not generated or is committed already")
        self._source.mark_trained(self._handed_out.pop(rollout_id))
        self._last_step = rollout_id
        self._source.weight_version += not self._args.debug_rollout_only
        self._source.ledger().check()
        metrics: dict[str, float] = self._source.metrics()
        return metrics

    async def save(self, directory: Path) -> None:
        """Writes the Data Buffer of this moment into `directory`; the event loop goes on meanwhile."""
        await asyncio.to_thread(self._source.begin_save(directory / BUFFER_FILE, rollout_id=self._last_step))

    def load(self, directory: Path) -> None:
        """Restores what `save` wrote. Raises `CheckpointError`."""
        self._source.load(directory / BUFFER_FILE)
        self._handed_out.clear()

    async def close(self) -> None:
        """Ends the worker, graders and connections."""
        if self._worker is not None:
            await self._worker.close()
        await self._graders.close()
        for client in (self._client, self._teacher):
            if client is not None:
                await client.close()

    # ---- parts ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _context(self, rollout_id: int) -> Iterator[RolloutContext]:
        """What functions called in the block see; its progress shows in the manager's."""
        context = RolloutContext(
            args=self._args,
            client=self._client,
            tokenizer=self._tokenizer,
            graders=self._graders,
            progress=Progress(),
            loop=asyncio.get_running_loop(),
            rollout_id=rollout_id,
            teacher=self._teacher,
            eval_datasets=self._eval_datasets,
        )
        self._progress.append(context.progress)
        try:
            with use(context):
                yield context
        finally:
            self._progress.remove(context.progress)

    async def _rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        path = self._args.rollout_function_path
        with self._context(rollout_id) as context:
            if self._args.fully_async:
                self._worker = self._worker or RolloutWorker(context, self._source)
                return await self._worker.step(context, rollout_id)
            if path == DEFAULT_ROLLOUT:
                return await generate_step(context, rollout_id, self._source)
            output = await self._call(path, "rollout", rollout_id, evaluation=False)
        if isinstance(output, list):
            output = RolloutFnTrainOutput(output)
        if not hasattr(output, "samples"):
            raise HookError(
                f"got {type(output).__name__} from {path}; a rollout function returns a RolloutFnTrainOutput"
            )
        groups = [flatten(group) for group in output.samples]
        return RolloutFnTrainOutput(groups, {**sample_metrics(self._args, groups), **(output.metrics or {})})

    async def _call(self, path: str, kind: str, rollout_id: int, *, evaluation: bool) -> Any:
        """A user's rollout or evaluation function: awaited if async, otherwise in a thread."""
        function = load(path, kind)
        assert function is not None, f"no function behind {path}"
        if is_async(function):
            return await function(self._args, rollout_id, self._source, evaluation=evaluation)
        return await in_thread(function, self._args, rollout_id, self._source, evaluation=evaluation)

    def _in_flight(self) -> set[int]:
        return set(self._source.in_flight)

    def _account(self, rollout_id: int, groups: list[list[Sample]], before: set[int]) -> None:
        """Remembers the groups of the batch; what a user's function took and did not give back is filtered."""
        indices = sorted({s.group_index for group in groups for s in group if s.group_index is not None})
        dropped = sorted(self._in_flight() - before - set(indices))
        if dropped and self._worker is None:
            logger.info("%d groups were issued to the rollout function and not returned by it", len(dropped))
            self._source.mark_filtered(dropped, "not_returned")
        self._handed_out[rollout_id] = indices
        self._source.ledger().check()

    def _staleness(self, groups: list[list[Sample]]) -> dict[str, float]:
        """How many versions older than the trainer each sampled token is. Raises `LedgerError` beyond the bound."""
        now, limit = self._source.weight_version, self._args.max_weight_staleness
        ages = [now - v for group in groups for s in group for v in s.token_versions or () if v != NOT_SAMPLED]
        if not ages:
            return {}
        if limit is not None and max(ages) > limit:
            raise LedgerError(
                f"got a token {max(ages)} versions older than the weights to be trained, because the rollout function "
                f"returned it; do: leave out what is older than --max-weight-staleness {limit}, or raise it"
            )
        return {"rollout/staleness/mean": statistics.fmean(ages), "rollout/staleness/max": float(max(ages))}

    def _replay(self, rollout_id: int) -> RolloutFnTrainOutput:
        path = debug_data.path_of(self._args.load_debug_rollout_data, rollout_id)
        _, groups = debug_data.load_rollout(path)
        groups = debug_data.head_and_tail(groups, self._args.load_debug_rollout_data_subsample)
        return RolloutFnTrainOutput(groups, sample_metrics(self._args, groups))

    def _with_speed(self, output: RolloutFnTrainOutput, seconds: float) -> dict[str, float]:
        tokens = sum(s.effective_response_length for group in output.samples for s in group)
        gpus = max(int(self._args.rollout_num_gpus or 0), 1)
        speed = {"perf/rollout_time": seconds, "perf/tokens_per_gpu_per_sec": tokens / max(seconds, 1e-9) / gpus}
        return {**output.metrics, **speed}


def _vocab_size(hf_checkpoint: str) -> int | None:
    """Number of token ids that the model knows, from its config; None if it does not say."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return int(size) if size is not None else None
