"""The actors of a run as the driver calls them: every call waits for all of them, with a name and a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.cluster.waiting import wait_for
from slime.core.topology import EngineLayout

if TYPE_CHECKING:
    from slime.cluster.engines import Engines

WEIGHT_VERSION = "perf/weight_version"
"""Metric of a weight sync: the version that engines serve after it."""
TRAINERS_LIMIT_S = 24 * 3600.0
"""Limit of one call to the training ranks, a training step or what takes as long: far above any sane one. What they
wait for in it, each other or an engine, has a limit of its own (--distributed-timeout-minutes,
--weight-sync-timeout-s)."""
MEMORY_LIMIT_S = 3600.0
"""Limit of one that moves memory of a GPU."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the weight sync needs to know of an engine."""

    index: int
    url: str
    layout: EngineLayout
    """How its ranks divide the model."""
    slots: tuple[int, ...]
    """Placement slots of its ranks, stage by stage; a training rank on the same slot can share memory with it."""
    control_key: str | None = field(default=None, repr=False)
    """What its control routes ask for."""
    incarnation: int = 0
    """How often its processes have been replaced: another one may answer at the same address."""


@dataclass(frozen=True, slots=True)
class Actors:
    """Handles of every actor. Those of Ray are not typed."""

    trainers: tuple[Any, ...]
    """By rank (`TrainActor`); none with --debug-rollout-only."""
    engines: Engines
    """All of them, whatever becomes of each; none with --debug-train-only."""
    rollout: Any
    """The one `RolloutActor`."""

    def on_trainers(
        self,
        method: str,
        *arguments: Any,
        limit_s: float = TRAINERS_LIMIT_S,
        flag: str = "",
        on_poll: Callable[[], str] | None = None,
    ) -> list[Any]:
        """Calls a method of every training rank; their answers in rank order. `flag`: raises the limit."""
        refs = [getattr(trainer, method).remote(*arguments) for trainer in self.trainers]
        what = f"{method} on {len(refs)} training ranks"
        return wait_for(refs, for_what=what, limit_s=limit_s, on_poll=on_poll, flag=flag)

    def give_up(self, engine: EngineInfo) -> None:
        """Tells the training ranks, of which several send, that an engine is lost. No answer is waited for."""
        for trainer in self.trainers:
            trainer.give_up.remote(engine.url, engine.incarnation)

    def on_lenders(self, method: str, *arguments: Any) -> None:
        """Calls a method of every engine that answers and lends its memory to trainers."""
        self.engines.call_lenders(method, *arguments)

    def on_rollout(
        self,
        method: str,
        *arguments: Any,
        for_what: str,
        limit_s: float,
        flag: str = "",
        on_poll: Callable[[], str] | None = None,
    ) -> Any:
        """Calls a method of the rollout side; its answer. `flag`: raises the limit."""
        answers = [getattr(self.rollout, method).remote(*arguments)]
        return wait_for(answers, for_what=for_what, limit_s=limit_s, on_poll=on_poll, flag=flag)[0]
