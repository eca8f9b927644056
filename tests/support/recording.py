"""Doubles that only write down what they are asked to do: the actors of a run, and the verbs of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from slime.cluster.engine_tracker import WEIGHT_VERSION


class RecordingEngines:
    """`cluster.engine_tracker.Engines` of which none is ever lost, unless `lose` says how many weight syncs lose
    one.
    """

    def __init__(self, log: list[str], num_engines: int) -> None:
        self.log, self.lose, self.can_answer = log, 0, False
        self._engines = tuple(SimpleNamespace(index=i, url=f"http://{i}") for i in range(num_engines))
        self.waiting: tuple[Any, ...] = ()
        self.asked: list[Any] = []
        """For whom each weight sync was begun."""
        self._admitted = False
        self.served: list[int] = []
        """The version of each weight sync that ended well."""
        self.on_settle: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._engines)

    @property
    def take_weights(self) -> bool:
        return bool(self._engines)

    def begin_sync(self, engines: Any = None) -> tuple[Any, ...]:
        self.asked.append(engines)
        return self._engines if engines is None else tuple(engines)

    def end_sync(self, engines: Any, version: int) -> None:
        self.served.append(version)
        if not self._admitted:
            self.log.append(f"rollout admit {[engine.url for engine in engines]}")
        self._admitted = self.can_answer = True
        self.waiting = ()

    def failed_sync(self, engines: Any, error: Exception) -> bool:
        self.lose -= 1
        return self.lose >= 0

    def gone(self, engines: Any) -> list[Any]:
        return list(engines)[: self.lose]

    def infos(self, engines: Any) -> list[Any]:
        return [engine.index for engine in engines]

    def joiners(self) -> tuple[Any, ...]:
        return self.waiting

    def settle(self) -> None:
        self.on_settle()

    @contextmanager
    def frozen_aside(self) -> Iterator[None]:
        yield

    def tended(self) -> str:
        return "none"


class RecordingActors:
    """`cluster.actors.Actors` without processes: `log` holds every call in order."""

    def __init__(self, *, num_engines: int = 1, num_trainers: int = 1) -> None:
        self.log: list[str] = []
        self.engines = RecordingEngines(self.log, num_engines)
        self._num_trainers = num_trainers

    def on_trainers(self, method: str, *arguments: Any, on_poll: Any = None, **limits: Any) -> list[dict[str, float]]:
        self._note("trainers", method, ())
        return [{"perf/x": 1.0, WEIGHT_VERSION: 3.0}] * self._num_trainers

    def give_up(self, engine: Any) -> None:
        self._note("sender", "gives up", (engine,))

    def on_lenders(self, method: str, *arguments: Any) -> None:
        self._note("engines", method, arguments)

    def on_rollout(
        self, method: str, *arguments: Any, for_what: str, limit_s: float, on_poll: Any = None, flag: str = ""
    ) -> None:
        assert for_what and limit_s > 0, f"{method} waits without a name or a limit"
        self._note("rollout", method, arguments)

    def _note(self, whom: str, method: str, arguments: tuple[Any, ...]) -> None:
        self.log.append(" ".join([whom, method, *map(str, arguments)]))


class RecordingRun:
    """The verbs of `cluster.training_run.Run`: `log` holds every verb in order; `save_every` and so on say what is
    due.
    """

    def __init__(self, *, num_rollout: int, save_every: int, sync_every: int, eval_every: int) -> None:
        self.log: list[str] = []
        self._last = num_rollout - 1
        self.saves_after = self._due(save_every)
        self.syncs_after = self._due(sync_every)
        self.evaluates_after = self._due(eval_every)

    def _due(self, interval: int) -> Callable[[int], bool]:
        return lambda rollout_id: rollout_id == self._last or (rollout_id + 1) % interval == 0

    def start_generation(self, rollout_id: int) -> int:
        self.log.append(f"start {rollout_id}")
        return rollout_id

    def finish_generation(self, generation: int) -> str:
        self.log.append(f"finish {generation}")
        return f"batch {generation}"

    def generate(self, rollout_id: int) -> str:
        return self.finish_generation(self.start_generation(rollout_id))

    def wait_for_generation(self, generation: int) -> None:
        self.log.append(f"wait {generation}")

    def train(self, rollout_id: int, batch: str) -> None:
        assert batch == f"batch {rollout_id}", f"step {rollout_id} trains {batch}"
        self.log.append(f"train {rollout_id}")

    def save(self, rollout_id: int) -> None:
        self.log.append(f"save {rollout_id}")

    def sync_weights(self, *, for_save: bool = False) -> None:
        self.log.append("sync for save" if for_save else "sync")

    def check_log_probs(self) -> None:
        self.log.append("check")

    def evaluate(self, rollout_id: int) -> None:
        self.log.append(f"eval {rollout_id}")

    def end_step(self, rollout_id: int) -> None:
        self.log.append(f"end {rollout_id}")
