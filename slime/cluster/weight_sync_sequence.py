"""The sequence of steps that the driver runs for one weight sync.

    1. memory     the trainer keeps only its weights, engines allocate theirs           `MemoryHandOver`
    2. requests   running requests are aborted, if this sync requires it                `EndRequests`
    3. weights    training ranks send, engines are verified and resume                  `RankWeightSync`
    4. requests   aborted requests are resent
    5. memory     the trainer releases its weights, engines allocate the KV cache       `MemoryHandOver`
    6. traffic    clients and routers may use the engines                               `Engines`

If an engine is lost during the sync, or if the sync fails for only some engines, step 3 is repeated without them. An
engine that restarts later gets the weights separately or with the next weight sync (`join`). All steps run on the
driver's thread, and every wait has a timeout.

Invariants
1. Clients and routers do not learn about an engine until its weights have been verified.
2. After an error, the sequence stops: aborted requests are not resent, engines stay paused, and the run fails.
"""

from __future__ import annotations

import enum
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from slime.cluster.engine_tracker import MEMORY_LIMIT_S, WEIGHT_VERSION, Actors, EngineInfo
from slime.core.engine_interface import WeightVersion
from slime.core.errors import SlimeError
from slime.fleet.supervisor import Engine
from slime.observability.spans import span
from slime.observability.tracker import Tracker
from slime.settings import Args
from slime.settings.conditions import lends_at_start, pause_modes
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.weights.sync import PAUSED
from slime.weights.transports import TRANSPORTS

logger = logging.getLogger(__name__)

REQUESTS_LIMIT_S = 60.0
"""Timeout for aborting requests and for resuming them."""
OF_SYNC, OF_JOIN, OF_EVALUATION = "update_weights_", "join_", "eval_weights_"
"""Parts of metric names that distinguish weight syncs, joins and sends to the evaluation fleet, all of which can happen
in the same step."""


# --- GPU memory of trainer and engines that share GPUs
#
#   to the trainer       before a training step   engines release all memory, then the trainer allocates its own
#   room for weights     before a weight sync     the trainer keeps only its weights, then engines allocate theirs
#   room for the rest    after a weight sync      the trainer releases its weights, then engines allocate the KV cache
#
# One side always releases memory before the other allocates, because an engine does not fit on the GPU together with
# the trainer's gradients, optimizer states and caches. During startup, engines measure the free memory, which would be
# wrong while the trainer is being built. They therefore wait until the trainer has been built and has lent its memory
# (`slime.compat.sglang_memory_gate`). Without `--offload-rollout` and `--offload-train`, no memory is moved.


class MemoryHandOver:
    """Tracks and controls which side may use the memory of shared GPUs.

    Initially, both sides have their memory, unless the trainer lends its memory during startup.
    """

    def __init__(self, args: Args, actors: Actors, tracker: Tracker) -> None:
        self._engines_lend, self._trainer_lends = args.offload_rollout, args.offload_train
        self._actors, self._tracker = actors, tracker
        self._engines_lent = False
        self._trainer_lent = lends_at_start(args)

    def to_trainer(self) -> None:
        """Hands the memory to the trainer. Engines must be idle. Idempotent."""
        self._settle()
        self._engines_give()
        if self._trainer_lends:
            self._on_trainers("wake", "wake_up")

    @property
    def lends(self) -> bool:
        """Whether trainer and engines alternate on the GPU."""
        return self._trainer_lends

    @property
    def is_lent(self) -> bool:
        """Whether engines may allocate memory now."""
        return self._trainer_lent or not self._trainer_lends

    def room_for_weights(self) -> None:
        """Makes the trainer release everything but its weights, then lets engines allocate theirs."""
        if self._trainer_lent:  # during startup or a join: engines have allocated more than their weights
            self._settle()
            self._engines_give()
        if self._trainer_lends:
            self._on_trainers("keep_weights", "keep_weights")
        if self._engines_lent:
            self._actors.on_lenders("resume_memory", ["weights"])

    def room_for_the_rest(self) -> None:
        """Makes the trainer release all its memory, then lets engines allocate the rest of theirs for generation."""
        if self._trainer_lends:
            self._on_trainers("sleep", "sleep")
            self._trainer_lent = True
        if self._engines_lent:
            self._actors.on_lenders("resume_memory", ["kv_cache", "cuda_graph"])
            self._engines_lent = False

    def _settle(self) -> None:
        """Keeps engines that are starting up from allocating more memory, and waits for any allocation in progress."""
        if self._trainer_lends:
            self._trainer_lent = False
            self._actors.engines.settle()

    def _engines_give(self) -> None:
        if self._engines_lend and not self._engines_lent:
            with span("offload_rollout"):
                self._actors.on_lenders("release_memory")
            self._engines_lent = True

    def _on_trainers(self, method: str, what: str) -> None:
        """Calls `method` on all training ranks within the span `what` and logs each metric's maximum over ranks."""
        with span(what):
            answers = self._actors.on_trainers(method, limit_s=MEMORY_LIMIT_S)
        names = {name for answer in answers for name in answer}
        self._tracker.add({name: max(answer.get(name, 0.0) for answer in answers) for name in sorted(names)})


# --- The sequence


class EndRequests(enum.Enum):
    """Weight syncs that abort running requests. Aborted requests are later resent with the tokens generated so far."""

    NEVER = enum.auto()
    """Generation and weight sync alternate, so no requests are running."""
    FOR_SAVES = enum.auto()
    """Only syncs before a save, because the checkpoint includes the tokens. During other syncs, engines keep them."""
    ALWAYS = enum.auto()
    """All syncs. The engines would abort the requests themselves, but only after a second."""

    @classmethod
    def of(cls, args: Args, mode: str) -> EndRequests:
        """Returns the policy for weight syncs that pause engines with `mode`. Only the `--fully-async` worker generates
        during a weight sync, and perhaps a thread of the user's rollout function.
        """
        if not args.fully_async and args.rollout_function_path in (DEFAULT_ROLLOUT, SFT_ROLLOUT):
            return cls.NEVER
        return cls.ALWAYS if mode == "abort" else cls.FOR_SAVES


NUM_TRIES = 3
"""Measured weight syncs of each mode before `PauseChoice` decides."""


class PauseChoice:
    """Chooses the pause mode of each weight sync (`--pause-generation-mode auto`).

    The first weight syncs take turns among the modes; the one with the lowest median cost is kept. The modes differ
    only in this cost: after `abort` and after `retract`, engines prefill the same tokens again, those of all running
    requests, and weights are sent and verified alike. So the cost is the time to pause, to flush and to resume.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        """`modes`: those that the run allows, the preferred one first. Engines are prepared for all of them."""
        self._costs: dict[str, list[float]] = {mode: [] for mode in modes}
        self.mode = modes[0]
        """Of the next weight sync."""

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a weight sync with `mode`, during which requests could run and no engine was lost."""
        if min(map(len, self._costs.values())) == NUM_TRIES or len(self._costs) == 1:
            return
        causes = ("abort", "flush", "admission")
        self._costs[self.mode].append(sum(metrics[f"perf/{PAUSED}/{cause}"] for cause in causes))
        self.mode = min(self._costs, key=lambda mode: len(self._costs[mode]))
        if len(self._costs[self.mode]) < NUM_TRIES:
            return
        medians = {mode: statistics.median(costs) for mode, costs in self._costs.items()}
        self.mode = min(medians, key=lambda mode: medians[mode])
        measured = ", ".join(f"{mode} {median:.3f}" for mode, median in medians.items())
        logger.info(
            "--pause-generation-mode auto: weight syncs use %s from now on, because pausing and resuming engines cost "
            "the least with it (median GPU-seconds of %d weight syncs: %s)",
            self.mode,
            NUM_TRIES,
            measured,
        )


def with_pauses(
    metrics: Mapping[str, float], more: Mapping[str, float], engines: Sequence[EngineInfo]
) -> dict[str, float]:
    """Adds the seconds by cause that the driver measured around a weight sync to its `perf/paused_token_seconds`."""
    whole = f"perf/{PAUSED}"
    if whole not in metrics:
        return dict(metrics)
    num_gpus = sum(info.layout.num_ranks for info in engines)
    parts = {f"{whole}/{cause}": metrics[f"{whole}/{cause}"] + seconds * num_gpus for cause, seconds in more.items()}
    return {**metrics, **parts, whole: metrics[whole] + num_gpus * sum(more.values())}


class WeightSyncSequence:
    def __init__(self, args: Args, actors: Actors, *, memory: MemoryHandOver, tracker: Tracker) -> None:
        self._actors, self._memory, self._tracker = actors, memory, tracker
        self._args, self._pauses = args, PauseChoice(pause_modes(args))
        self._saves = args.save is not None
        self._engines = actors.engines
        sends_to_all = not args.debug_rollout_only and TRANSPORTS.get(args.update_weight_transport).groups_engines
        self._joins_alone = not sends_to_all
        """Whether weights can be sent to a single engine without slowing down the next weight sync."""
        self._takers: tuple[Engine, ...] = ()
        self._version = 0

    def run(self, *, for_save: bool) -> None:
        """Sends the trainer's weights to all responding engines, verifies them, and lets the engines serve.

        `for_save`: a checkpoint follows. Without a trainer (--debug-rollout-only), engines serve their checkpoint as
        version 0. Does nothing without engines. Raises `WeightSyncError`, `EngineError` or `DeadlineExceeded`.
        """
        if not self._engines.take_weights:
            return
        self._memory.room_for_weights()
        with span("update_weights"):
            saves = for_save and self._saves
            self._send(self._ends(for_save=saves), hand_back=saves)
        self._memory.room_for_the_rest()
        self._engines.end_sync(self._takers, self._version)

    def join(self, *, fresh: bool) -> None:
        """Sends weights to restarted engines while the others serve. The trainer must be idle.

        `fresh`: the trainer still has the weights that the other engines serve. Otherwise, restarted engines wait for
        the next weight sync. They also wait if the trainer lends memory, or if all engines share a process group that
        would have to be rebuilt. But if the remaining engines cannot serve requests, all engines get the weights now.
        """
        joiners, alone = self._engines.joiners(), fresh and self._joins_alone
        if not joiners or (self._engines.can_answer and (self._memory.lends or not alone)):
            return
        with span("join"), self._engines.frozen_aside() if self._memory.lends else nullcontext():
            self._memory.room_for_weights()
            metrics = self._try(joiners if alone else None)
            self._memory.room_for_the_rest()
        for of_ranks in metrics[:1]:
            self._tracker.add({name.replace(OF_SYNC, OF_JOIN): of_ranks[name] for name in of_ranks if OF_SYNC in name})
        self._engines.end_sync(self._takers, self._version)
        if self._takers:
            logger.info("engines %s are serving again with version %d", [e.index for e in self._takers], self._version)

    def send_for_evaluation(self, *, waits: bool = False) -> WeightVersion | None:
        """Sends the trainer's weights to the evaluation fleet, verifies them, and lets its engines serve. The other
        engines go on generating. The trainer must be idle, and no evaluation may be running.

        Returns the version, or None if no engine of the fleet responds. `waits`: first waits for one that is being
        restarted. Raises like `run`.
        """
        while takers := self._engines.begin_evaluation(waits=waits):
            infos, tended = self._engines.infos(takers), self._tended(takers)
            try:
                metrics = self._actors.on_trainers("sync_weights", infos, "abort", True, on_poll=tended)[0]
            except SlimeError as error:
                if not self._engines.failed_sync(takers, error):
                    raise
                continue
            version = int(metrics[WEIGHT_VERSION])
            self._engines.serve_evaluation(takers, version)
            self._tracker.add({k.replace(OF_SYNC, OF_EVALUATION): v for k, v in metrics.items() if OF_SYNC in k})
            return version
        return None

    def _ends(self, *, for_save: bool) -> bool:
        ends = EndRequests.of(self._args, self._pauses.mode)
        return ends is EndRequests.ALWAYS or (ends is EndRequests.FOR_SAVES and for_save)

    def _send(self, ends_requests: bool, *, hand_back: bool) -> None:
        """Runs steps 2 to 4, and repeats step 3 whenever an engine is lost.

        `hand_back`: return the tokens of aborted requests to the Data Buffer.
        """
        began, served = time.monotonic(), self._version > 0
        if ends_requests:
            tended = self._engines.tended  # lost engines must be detected, because their requests never finish
            self._actors.on_rollout(
                "pause", hand_back, for_what="requests to end", limit_s=REQUESTS_LIMIT_S, on_poll=tended
            )
        ended_s, lost_s = time.monotonic() - began, 0.0
        while not (metrics := self._try(None)):
            logger.warning("an engine was lost during the weight sync; repeating the sync with the other engines")
            lost_s = time.monotonic() - began - ended_s
        resumed = time.monotonic()
        if ends_requests:
            self._actors.on_rollout("resume", for_what="requests to continue", limit_s=REQUESTS_LIMIT_S)
        if metrics[0]:
            more = {"abort": ended_s, "transfer": lost_s, "admission": time.monotonic() - resumed}
            found = with_pauses(metrics[0], more, self._engines.infos(self._takers))
            self._tracker.add(found)
            if served and not hand_back and not lost_s:
                self._pauses.note(found)

    def _try(self, engines: Sequence[Engine] | None) -> list[dict[str, float]]:
        """Attempts one weight sync to `engines`, by default all responding ones.

        Returns the metrics of each rank, or an empty list if an engine was lost.
        """
        takers = self._takers = self._engines.begin_sync(engines)
        infos = self._engines.infos(takers)
        try:
            metrics = self._actors.on_trainers("sync_weights", infos, self._pauses.mode, on_poll=self._tended(takers))
        except SlimeError as error:
            if not self._engines.failed_sync(takers, error):
                raise
            self._takers = ()
            return []
        self._version = int(metrics[0][WEIGHT_VERSION]) if metrics else 0
        return metrics or [{}]

    def _tended(self, takers: Sequence[Engine]) -> Callable[[], str]:
        """Returns a version of `Engines.tended` that also notifies the training ranks of lost engines."""
        told: set[int] = set()

        def tended() -> str:
            progress = self._engines.tended()
            for engine in self._engines.gone(takers):
                if engine.index not in told:
                    told.add(engine.index)
                    self._actors.give_up(*self._engines.infos([engine]))
            return progress

        return tended
