"""`Run`: the operations of the training loop ("verbs").

Each verb calls the actors, waits for the results with a timeout, and logs metrics. `train.py` and `train_async.py` call
the verbs in the order that the algorithm requires, on the driver's thread.

Invariants
1. Engines only serve between a `sync_weights` that verified them and the next hand-over or weight sync.
2. A step is committed to the Data Buffer after it was trained and before it is saved.
3. A committed checkpoint has the weights, optimizer, RNG, weight version and Data Buffer of the same point in time.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import ray

from slime.cluster.engine_tracker import OWN_TIME, TRAINERS_LIMIT_S, Actors
from slime.cluster.hang_doctor import HangDoctor
from slime.cluster.restarting import stop_request
from slime.cluster.rollout_actor import KEY_FILE
from slime.cluster.saving import Saver
from slime.cluster.waiting import all_there, first_death, peek, wait_for
from slime.cluster.weight_sync_sequence import MemoryHandOver, WeightSyncSequence
from slime.core.engine_interface import WeightVersion
from slime.core.errors import (
    SAVE_FLAG,
    ActorDied,
    DeadlineExceeded,
    EngineError,
    Hung,
    SlimeError,
    Unfinished,
    WeightSyncError,
)
from slime.core.processes import host_of, host_port
from slime.core.text import evaluation_name, step_name
from slime.fleet.supervisor import DRAINED, Engine, State
from slime.observability.progress import StartUp
from slime.observability.prometheus import Labels, PrometheusSink, Target
from slime.observability.spans import collect, note_span, span
from slime.observability.tracker import Tracker
from slime.rollout.types import StepNews
from slime.settings import Args
from slime.settings.groups.evaluation import loss_datasets, samples_evaluations
from slime.settings.groups.logging import traces_engines

HELD_OUT_LIMIT_S = 3600.0


class EngineMetrics:
    """Tells Prometheus about the engines and routers of a run. Used on the driver's thread."""

    def __init__(self, sink: PrometheusSink, actors: Actors) -> None:
        self._sink, self._actors = sink, actors
        for engine in actors.engines.members.engines:
            self._count_losses(engine, 0.0)
        self._routers: Mapping[str, str] = {}
        self._asked: Any = None
        self.look()
        actors.engines.members.follow(self._changed)
        actors.engines.follow_looks(self._look_at_changes)

    def look(self) -> None:
        """Reports all engines, and asks for the routers' addresses, which a restart changes. Does not block."""
        self._is_current = True
        if self._asked is not None and (found := peek(self._asked)) is not None:
            self._asked, self._routers = None, found
        if self._asked is None and self._actors.engines:
            self._asked = self._actors.rollout.router_metrics.remote()
        engines, exposed = self._actors.engines.members.engines, self._sink.exposed
        drained = [engine.state is State.DEAD and engine.reason == DRAINED for engine in engines]
        states = Counter("drained" if d else e.state.value for e, d in zip(engines, drained, strict=True))
        exposed.replace(
            "slime_engines",
            {(("state", state),): float(states[state]) for state in (*(one.value for one in State), "drained")},
            "engines by state",
        )
        labels: dict[int, Labels] = {
            engine.index: (("engine", str(engine.index)), ("model", engine.model)) for engine in engines
        }
        ready = {labels[e.index]: float(e.state is State.READY) for e in engines}
        versions = {labels[e.index]: float(e.version) for e in engines if e.version is not None}
        exposed.replace("slime_engine_ready", ready, "whether the engine serves verified weights")
        exposed.replace("slime_engine_weight_version", versions, "weight version that the engine serves")
        scraped = [
            Target(host_port(host_of(e.url), port), "engine", {"engine": str(e.index), "model": e.model})
            for e in engines
            if e.url is not None and (port := urlsplit(e.url).port) is not None
        ]
        scraped += [Target(address, "router", {"model": model}) for model, address in self._routers.items()]
        self._sink.set_scraped(scraped)

    def _changed(self, before: Engine, after: Engine) -> None:
        if before.state is not State.DEAD and after.state is State.DEAD and after.reason != DRAINED:
            self._count_losses(after, 1.0)
        self._is_current = False

    def _look_at_changes(self) -> None:
        """Reports all engines if one has changed. Not at each change: a weight sync changes every engine twice."""
        if not self._is_current:
            self.look()

    def _count_losses(self, engine: Engine, by: float) -> None:
        help = "times that an engine was lost"
        self._sink.exposed.count("slime_engine_losses_total", help, by=by, engine=str(engine.index), model=engine.model)


class HeldOutLoss:
    """Measures the held-out loss of a fine-tuning run. The rollout actor builds the batches once.

    Does nothing if no dataset is configured for held-out loss.
    """

    def __init__(self, args: Args, actors: Actors, *, memory: MemoryHandOver) -> None:
        self._actors, self._memory = actors, memory
        self._num_datasets = len(loss_datasets(args))
        self._batches: list[tuple[str, Any, dict[str, float]]] | None = None
        """(dataset name, object ref of the batch, batch metrics). None before the first measurement."""

    def measure(self) -> dict[str, float]:
        """Returns `eval/<dataset>-loss`: the mean loss of each dataset's trained tokens under the trainer's weights."""
        if not self._num_datasets:
            return {}
        if self._batches is None:
            self._batches = self._fetch()
        self._memory.to_trainer()
        metrics: dict[str, float] = {}
        for name, batch, facts in self._batches:
            found = self._actors.on_trainers("measure_loss", batch)[0]
            metrics |= {f"eval/{name}-{key}": value for key, value in {**found, **facts}.items()}
        return metrics

    def _fetch(self) -> list[tuple[str, Any, dict[str, float]]]:
        made = self._actors.on_rollout("held_out", for_what="the held-out data", limit_s=HELD_OUT_LIMIT_S)
        return [
            (
                one.name,
                ray.put(one.batch),
                {"num_prompts": float(len(one.batch.samples)), "num_unusable": float(one.num_unusable)},
            )
            for one in made
        ]


FLEET_FAILURES = (EngineError, WeightSyncError, DeadlineExceeded)
"""Errors of an evaluation in the background after which training can go on."""


@dataclass(frozen=True, slots=True)
class _Background:
    """An evaluation on the engines of `--eval-fleet`."""

    rollout_id: int
    version: WeightVersion
    news: Any
    """Object ref of the `StepNews`."""


class EvalFleet:
    """Evaluates in the background, on the engines of `--eval-fleet`. Used on the driver's thread.

    `begin` sends the trainer's weights to the fleet and starts an evaluation. `poll` logs its metrics once it has
    ended. An evaluation that fails is counted, and the run goes on, unless `--eval-fleet-must-work` is set.

    Invariants
    1. The fleet gets weights only while no evaluation is running, so all samples of an evaluation have one version.
    2. An evaluation is logged under the step whose weights it used, however far training has come since.
    3. No evaluation is left out: if the next one is due, training waits for the running one.
    """

    def __init__(
        self,
        args: Args,
        actors: Actors,
        weight_sync: WeightSyncSequence,
        *,
        watching: Callable[[str], AbstractContextManager[Callable[[], str]]],
        log: Callable[[int, StepNews, dict[str, float]], None],
    ) -> None:
        """`watching`: shows progress during a wait, and yields the function to call on each poll. `log`: logs an
        evaluation, with further metrics."""
        self._actors, self._weight_sync, self._watching, self._log = actors, weight_sync, watching, log
        self._must_work, self._limit_s = args.eval_fleet_must_work, args.rollout_global_timeout_s or NO_LIMIT_S
        self._running: _Background | None = None
        self._num_failed = 0

    def begin(self, rollout_id: int, *, is_last: bool = False) -> None:
        """Starts an evaluation of the trainer's weights. First waits for the running one, if any.

        The last one of a run also waits for an engine that is being restarted, because training does not need the time.
        """
        self.poll()
        if self._running is not None:
            before, began_s = evaluation_name(self._running.rollout_id), time.monotonic()
            self.finish()
            logger.warning(
                "training waited %.1f s for the evaluation %s, because the next one was due; add engines with "
                "--eval-fleet, or raise --eval-interval",
                time.monotonic() - began_s,
                before,
            )
        try:
            version = self._weight_sync.send_for_evaluation(waits=is_last)
            if version is None:
                raise EngineError("no engine of --eval-fleet responds")
        except FLEET_FAILURES as error:
            self._failed(rollout_id, error)
            return
        self._running = _Background(rollout_id, version, self._actors.rollout.evaluate.remote(rollout_id))

    def poll(self) -> None:
        """Logs the running evaluation if it has ended. Does not wait for it."""
        if self._running is not None:
            self._give_up_if_lost(self._running)
            if all_there([self._running.news]):
                self.finish()

    def finish(self) -> None:
        """Waits for the running evaluation, if any, and logs it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        what = f"eval, {evaluation_name(running.rollout_id)}"
        try:
            with self._watching(what) as tended:

                def on_poll() -> str:
                    self._give_up_if_lost(running)
                    return tended()

                news = wait_for([running.news], for_what=what, limit_s=self._limit_s, on_poll=on_poll)[0]
            _require_version(news, running)
        except FLEET_FAILURES as error:
            self._failed(running.rollout_id, error)
            return
        if news.span_s is not None:
            note_span("evaluation", *news.span_s, rollout_id=running.rollout_id, version=running.version)
        self._log(running.rollout_id, news, {FAILED_EVALUATIONS: float(self._num_failed)})

    def _give_up_if_lost(self, running: _Background) -> None:
        """Cancels an evaluation that no engine serves any more: a restarted engine has no weights of its version.

        Repeated at each poll, because the evaluation may not have begun yet.
        """
        if not self._actors.engines.evaluating(running.version) and not all_there([running.news]):
            self._actors.rollout.abandon_evaluation.remote()

    def _failed(self, rollout_id: int, error: SlimeError) -> None:
        """Counts a failed evaluation and logs the count. Raises the error if the fleet must work, or if it says that
        the rollout process or a training rank died or hangs."""
        if self._must_work or isinstance(error, ActorDied | Hung):
            raise error
        self._num_failed += 1
        logger.error("the evaluation %s failed, and the run goes on: %s", evaluation_name(rollout_id), error)
        self._log(rollout_id, StepNews({}, []), {FAILED_EVALUATIONS: float(self._num_failed)})


def _require_version(news: StepNews, running: _Background) -> None:
    """Raises `EngineError` if the samples of an evaluation have another version than its engines received."""
    found = news.metrics.get("eval/weight_version", running.version)
    if found != running.version:
        raise EngineError(
            f"the evaluation {evaluation_name(running.rollout_id)} was sampled by version {found:g}, but its engines "
            f"received version {running.version}"
        )


logger = logging.getLogger(__name__)

FAILED_EVALUATIONS = "eval/num_failed_evaluations"
"""Metric: failed evaluations of `--eval-fleet` so far."""
NO_LIMIT_S = 30 * 24 * 3600.0
"""Timeout of a generation if the user sets none. Requests and graders have their own timeouts."""
ROUTER_LIMIT_S = 60.0
DEATH_SHOWS_S = 5.0
"""How long it can take Ray to report that a process is gone."""
WATCH_EVERY_S = 1.0
MOST_RANKS = 64
"""Ranks whose seconds of training are metrics of their own."""

PROBED = {
    "train/train_rollout_logprob_abs_diff_max": "probe/train_rollout_logprob_abs_diff_max",
    "train/train_rollout_logprob_abs_diff_p99": "probe/train_rollout_logprob_abs_diff_p99",
    "train/train_rollout_logprob_abs_diff_current": "probe/train_rollout_logprob_abs_diff_mean",
}
"""Training metric -> corresponding probe metric."""


def times_of_ranks(times: Sequence[float]) -> dict[str, float]:
    """Returns metrics for the seconds of each rank's own passes (of at most `MOST_RANKS`), and which was slowest."""
    if not times:
        return {}
    slowest = max(range(len(times)), key=lambda rank: times[rank])
    found = {f"{OWN_TIME}/{rank}": seconds for rank, seconds in enumerate(times[:MOST_RANKS])}
    return found | {
        "perf/median_rank_train_time": statistics.median(times),
        "perf/slowest_rank_train_time": times[slowest],
        "perf/slowest_rank": float(slowest),
    }


@dataclass(frozen=True, slots=True)
class Generation:
    rollout_id: int
    batch: Any
    """Object ref of the `TrainBatch`, which goes directly from the rollout actor to the training ranks."""
    news: Any
    """Object ref of the `StepNews`, which is ready at the same time as the batch."""


class Run:
    """The operations of one run. Created by `launch`."""

    _stop: tuple[int, str | None] = (-1, None)
    """A step, and why the run stops after it. None: it goes on."""

    def __init__(self, args: Args, actors: Actors, tracker: Tracker, startup: StartUp, doctor: HangDoctor) -> None:
        self.args, self._startup = args, startup
        self._actors, self._tracker, self.doctor = actors, tracker, doctor
        self._saver = Saver(args, actors, tracker)
        self._memory = MemoryHandOver(args, actors, tracker)
        actors.engines.may_take_memory(lambda: self._memory.is_lent)
        self._weight_sync = WeightSyncSequence(args, actors, memory=self._memory, tracker=tracker)
        self._held_out = HeldOutLoss(args, actors, memory=self._memory)
        self._eval_fleet: EvalFleet | None = None
        if args.eval_fleet is not None:
            self._eval_fleet = EvalFleet(
                args, actors, self._weight_sync, watching=self._watching, log=self._log_evaluation
            )
        self._engine_metrics: EngineMetrics | None = None
        if tracker.prometheus is not None:
            self._engine_metrics = EngineMetrics(tracker.prometheus, actors)
        self._trained_since_sync = False
        self._batch = "data" if args.loss_type == "sft_loss" else "rollout"
        """What a step waits for, in messages."""
        self._rollout_limit_s = args.rollout_global_timeout_s or NO_LIMIT_S

    def tell_addresses(self) -> None:
        """Logs the addresses of engines and routers and which key they require."""
        if not self._actors.on_rollout("ray_asks_for_token", for_what="the rollout side", limit_s=ROUTER_LIMIT_S):
            logger.warning(
                "the Ray cluster at %s requires no token, so anyone who can reach it can run code as you; set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN for its daemons and for this run",
                self.args.ray_address,
            )
        if not self._actors.engines:
            return
        urls = self._actors.on_rollout("urls", for_what="the routers", limit_s=ROUTER_LIMIT_S)
        engines = [engine.url for engine in self._actors.engines.members.engines if engine.url is not None]
        key = "their own key, if they have one" if self.args.rollout_external_engine_addrs else "the key of the run"
        logger.info("engines are at %s; requests need %s", ", ".join(engines) or "no address", key)
        if urls:
            routers = ", ".join(f"{url} ({model})" for model, url in urls.items())
            logger.info("routers are at %s; requests need the key in %s", routers, self._key_file)
        else:
            logger.info("no router is running, because this run does not need one; set --router-port to start one")

    # --- generation -------------------------------------------------------------------------------------------------

    def start_generation(self, rollout_id: int) -> Generation:
        """Starts generating a step's samples and returns immediately. The first call also logs startup times.

        The first call raises `Unfinished` if the run has been asked to stop: there is nothing new to save.
        """
        if startup := self._startup.end():
            collect()  # discards timings from before the first step
            self._tracker.add(startup)
            if (reason := stop_request().heard()) is not None:
                self._stop_early(reason, f"before step {rollout_id}, the first of this launch")
        if traces_engines(self.args, rollout_id):
            folder = Path(self.args.run_dir).absolute() / "profiles"
            folder.mkdir(exist_ok=True)
            self._actors.engines.start_profile(str(folder), rollout_id)
        batch, news = self._actors.rollout.generate.options(num_returns=2).remote(rollout_id)
        return Generation(rollout_id, batch, news)

    def finish_generation(self, generation: Generation) -> Any:
        """Waits for a generation, logs its metrics, and returns the object ref of its `TrainBatch`."""
        with span("rollout_wait"), self._watching(f"{self._batch}, {step_name(generation.rollout_id)}") as on_poll:
            news = wait_for(
                [generation.news],
                for_what=f"the {self._batch} of step {generation.rollout_id}",
                limit_s=self._rollout_limit_s,
                on_poll=on_poll,
            )[0]
        if news.span_s is not None:
            note_span("generation", *news.span_s, rollout_id=generation.rollout_id)
        for warning in news.warnings:
            logger.warning("%s", warning)
        self._tracker.log("rollout", generation.rollout_id, news.metrics)
        self._tracker.log_samples("rollout", generation.rollout_id, news.samples)
        return generation.batch

    def generate(self, rollout_id: int) -> Any:
        return self.finish_generation(self.start_generation(rollout_id))

    def wait_for_generation(self, generation: Generation) -> None:
        """Waits until the generation has finished, without consuming the result (see `finish_generation`)."""
        with span("generation_wait"):
            wait_for(
                [generation.news],
                for_what=f"the {self._batch} of step {generation.rollout_id}",
                limit_s=self._rollout_limit_s,
                on_poll=self._tend_and_join,
            )

    def evaluate(self, rollout_id: int) -> None:
        """Evaluates the synced weights on the held-out data: sampled responses and the loss of conversations.

        With `--eval-fleet`, only starts to sample. `end_step` logs the result, under this `rollout_id`.
        """
        if self._eval_fleet is not None:
            with span("eval"):
                self._eval_fleet.begin(rollout_id, is_last=rollout_id + 1 == self.args.num_rollout)
                losses = self._held_out.measure()
            if losses:
                self._tracker.log("eval", rollout_id, losses)
            return
        news = StepNews({}, [])
        phase = self._startup.phase("eval", "the held-out data is evaluated")
        with phase, span("eval"), self._watching(f"eval, {evaluation_name(rollout_id)}") as on_poll:
            if samples_evaluations(self.args):
                what = f"the evaluation {evaluation_name(rollout_id)}"
                news = self._actors.on_rollout(
                    "evaluate", rollout_id, for_what=what, limit_s=self._rollout_limit_s, on_poll=on_poll
                )
            losses = self._held_out.measure()
        self._log_evaluation(rollout_id, news, losses)

    def _log_evaluation(self, rollout_id: int, news: StepNews, more: dict[str, float]) -> None:
        for warning in news.warnings:
            logger.warning("%s", warning)
        self._tracker.log("eval", rollout_id, {**news.metrics, **more})
        self._tracker.log_samples("eval", rollout_id, news.samples)

    def serve(self) -> None:
        """Serves until Ctrl-C (`--debug-rollout-only --num-rollout 0`).

        Restarts lost engines. Raises `EngineError` if a router died and could not be restarted.
        """
        urls = self._actors.on_rollout("urls", for_what="the routers", limit_s=ROUTER_LIMIT_S)
        where = (
            next(iter(urls.values())) if len(urls) == 1 else ", ".join(f"{name} at {url}" for name, url in urls.items())
        )
        logger.info(
            "serving at %s (/generate, /v1/chat/completions, ...) until Ctrl-C, with the key in %s",
            where,
            self._key_file,
        )
        while True:
            self._tend_and_join()
            self._actors.on_rollout("require_alive", for_what="a check of the router", limit_s=ROUTER_LIMIT_S)
            time.sleep(WATCH_EVERY_S)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, rollout_id: int, batch: Any) -> None:
        """Trains one step on all ranks (none with --debug-rollout-only) and commits it to the Data Buffer."""
        self._trained_since_sync = True
        with span("train"), self._tracker.progress(f"train, {step_name(rollout_id)}"):
            metrics = wait_for(
                [trainer.train.remote(batch) for trainer in self._actors.trainers],
                for_what=f"training step {rollout_id}",
                limit_s=TRAINERS_LIMIT_S,
                on_poll=self._actors.engines.tended,
            )
        ledger = self._actors.on_rollout("commit", rollout_id, for_what="the ledger", limit_s=60)
        times = [of_rank.pop(OWN_TIME) for of_rank in metrics]
        self._tracker.log("train", rollout_id, {**(metrics[0] if metrics else {}), **times_of_ranks(times), **ledger})

    def hand_over_to_training(self) -> None:
        """In colocated training, makes engines release their memory and the trainer allocate its own."""
        self._memory.to_trainer()

    def sync_weights(self, *, for_save: bool = False) -> None:
        """Sends the trainer's weights to all engines, verifies them, and lets the engines serve.

        `for_save`: a checkpoint follows, so running requests of `--fully-async` are aborted and resent regardless of
        `--pause-generation-mode`, so that the checkpoint includes their tokens. See `weight_sync_sequence`.
        """
        phase = self._startup.phase("update_weights", "the engines have the trainer's weights, verified")
        with phase if self._actors.engines and self._actors.trainers else nullcontext():
            self._weight_sync.run(for_save=for_save)
        self._trained_since_sync = False

    def check_log_probs(self) -> None:
        """Compares the log-probs of trainer and engines on new samples from the synced weights. Raises if they differ
        too much.

        Only needed in asynchronous training, where batches were sampled with older weights than the trainer's. In
        synchronous training, every training step makes this comparison.
        """
        if not self._actors.engines or not self._actors.trainers:
            return
        with span("check_log_probs"):
            batch = self._actors.on_rollout("probe", for_what="a probe", limit_s=self._rollout_limit_s)
            metrics = self._actors.on_trainers("measure_mismatch", batch)[0]
        self._tracker.add({PROBED[name]: value for name, value in metrics.items() if name in PROBED})

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Loads the `--load` checkpoint, if set, and returns the first step to run.

        With `--finetune`, only loads the weights and starts at `--start-rollout-id` or 0.
        """
        if self.args.load:
            self._memory.to_trainer()
        with self._startup.phase("load", "the checkpoint is loaded") if self.args.load else nullcontext():
            step = self._saver.restore()
        return int(self.args.start_rollout_id or 0) if step is None or self.args.finetune else step + 1

    def save(self, rollout_id: int) -> None:
        """Writes a checkpoint (see `saving`) and the Hugging Face export, if configured.

        A run that is asked to stop may have little time, so it only exports if that is due in any case.
        """
        with span("save_model"):
            if self.args.save:
                self._saver.save(rollout_id)
            hurries = self._stop[0] == rollout_id and self._stop[1] is not None
            if self.args.save_hf and not (hurries and not self._is_due(rollout_id, self.args.save_interval)):
                folder = self.args.save_hf.format(rollout_id=rollout_id)
                self._actors.on_trainers("save_hf", folder, limit_s=self.args.save_timeout_s, flag=SAVE_FLAG)
                adapter = Path(folder, "adapter")
                also = f", and the adapters alone in {adapter}" if adapter.is_dir() else ""
                logger.info("the Hugging Face export is in %s%s", folder, also)

    def finish_save(self, *, limit_s: float) -> None:
        """Waits for the background save, if any. Raises its error, or `DeadlineExceeded`."""
        self._saver.finish(limit_s)

    # --- cadence ----------------------------------------------------------------------------------------------------

    def saves_after(self, rollout_id: int) -> bool:
        """Returns whether a save is due: every `--save-interval` steps, and after the last one of the launch."""
        due = bool(self.args.save or self.args.save_hf) and self._is_due(rollout_id, self.args.save_interval)
        return due or (self.args.save is not None and self._stops_after(rollout_id) is not None)

    def syncs_after(self, rollout_id: int) -> bool:
        """Returns whether a weight sync is due: every `--update-weights-interval` steps and after the last one."""
        return self._is_due(rollout_id, self.args.update_weights_interval)

    def evaluates_after(self, rollout_id: int) -> bool:
        """Returns whether an evaluation is due: every `--eval-interval` steps and after the last one."""
        return self.args.eval_interval is not None and self._is_due(rollout_id, self.args.eval_interval)

    def only_serves(self) -> bool:
        """Returns whether the run has engines but nothing to train or evaluate."""
        return self.args.num_rollout == 0 and self.args.debug_rollout_only and not self.evaluates_before(0)

    def evaluates_before(self, start: int) -> bool:
        """Returns whether to evaluate before the first step: always with `--num-rollout 0`, never on resume."""
        if self.args.num_rollout == 0:
            return bool(self.args.eval_prompt_data or self.args.eval_config or self.args.eval_function_path)
        return self.args.eval_interval is not None and not self.args.skip_eval_before_train and start == 0

    def _is_due(self, rollout_id: int, interval: int | None) -> bool:
        return rollout_id + 1 == self.args.num_rollout or (interval is not None and (rollout_id + 1) % interval == 0)

    # --- the end of a step and of the run ---------------------------------------------------------------------------

    def end_step(self, rollout_id: int) -> None:
        """Logs the step's timings, and an evaluation of `--eval-fleet` that has ended. After the last step, also waits
        until its checkpoint is on disk and the last evaluation has ended.

        Raises `Unfinished` after another step if the run has been asked to stop (`slime.cluster.restarting`).
        """
        is_complete = rollout_id + 1 == self.args.num_rollout
        stop = None if is_complete else self._stops_after(rollout_id)
        is_last = is_complete or stop is not None
        if is_last:
            self._saver.finish()
        if self._eval_fleet is not None:
            with span("eval"):
                self._eval_fleet.finish() if is_last else self._eval_fleet.poll()
        self._saver.poll()
        if self._engine_metrics is not None:
            self._engine_metrics.look()
        self._tracker.log("perf", rollout_id, collect())
        if stop is not None:
            self._stop_early(stop, f"after step {rollout_id}")

    def _stops_after(self, rollout_id: int) -> str | None:
        """Returns why the run stops after a step, or None.

        Decided once per step: a run that is asked between a step's save and the step's end trains one more step.
        """
        if self._stop[0] != rollout_id:
            self._stop = rollout_id, stop_request().reason(self.args)
        return self._stop[1]

    def _stop_early(self, reason: str, when: str) -> NoReturn:
        logger.warning("the run stops %s because of %s", when, reason)
        raise Unfinished(stop_request().code(self.args))

    def death(self, seen_as: str) -> ActorDied | None:
        """Returns an error if a training rank or the rollout actor died, or None if all are alive. Never raises.

        `seen_as`: the error that another process reported, such as a broken connection to the dead rank.
        """
        actors = [*self._actors.trainers, self._actors.rollout]
        try:
            asked = [trainer.memory_plan.remote() for trainer in actors[:-1]] + [actors[-1].progress.remote()]
            return first_death(asked, for_what=f"the run (noticed as {seen_as})", limit_s=DEATH_SHOWS_S)
        except Exception as error:  # Ray itself is gone
            logger.debug("no actor could be reached: %s", error)
            return None

    def hang(self) -> str | None:
        """Returns who waits for whom if a hang was reported and is not over, else None."""
        return self.doctor.verdict

    def close(self, *, limit_s: float) -> None:
        """Stops all processes cleanly. Raises if one does not stop in time; Ray then kills it."""
        actors = self._actors
        stops = [actor.stop.remote() for actor in (actors.rollout, *actors.trainers)] + actors.engines.stop()
        try:
            wait_for(stops, for_what="the actors to stop", limit_s=limit_s)
        finally:
            actors.engines.close()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _tend_and_join(self) -> str:
        """Checks the engines and sends weights to restarted ones. Training ranks must be idle."""
        progress = self._actors.engines.tended()
        self._weight_sync.join(fresh=not self._trained_since_sync)
        return progress

    @property
    def _key_file(self) -> Path:
        return Path(self.args.run_dir) / KEY_FILE

    # --- progress ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, what: str) -> Iterator[Callable[[], str]]:
        """Shows rollout progress during the block. Yields the `on_poll` function for `wait_for`."""
        news = ""
        asked = self._actors.rollout.progress.remote()

        def on_poll() -> str:
            nonlocal news, asked
            self._tend_and_join()
            answer = peek(asked)
            if answer is not None:
                news, asked = str(answer), self._actors.rollout.progress.remote()
            return note(news)

        with self._tracker.progress(what) as note:
            yield on_poll
