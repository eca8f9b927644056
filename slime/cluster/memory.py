"""Colocated: GPU memory goes to and fro between trainer and engines, in the only order that fits both.

    to the trainer       before a training step   engines give back all they have, then the trainer takes its own
    room for weights     before a weight sync     the trainer keeps its weights alone, then engines take room for theirs
    room for the rest    after a weight sync      the trainer gives those away, then engines take room for the cache

Whoever has to give gives first: nowhere is there room for the gradients, optimizer states and caches of the trainer
beside an engine.

At the start of a run an engine measures how much memory there is, and the trainer is built. So it lends all it has as
soon as it is built, and only then engines take theirs (`slime.compat.sglang_memory_gate`).

Consumes nothing, produces free memory, and the peaks that were seen. The driver calls and waits for every actor
concerned, with a limit; nobody wakes it. Without `--offload-rollout` and `--offload-train` nothing happens.
"""

from __future__ import annotations

from slime.cluster.engines import MEMORY_LIMIT_S, Actors
from slime.observability.spans import span
from slime.observability.tracker import Tracker
from slime.settings import Args
from slime.settings.conditions import lends_at_start


class MemoryHandOver:
    """Who has the memory of the GPUs that trainer and engines share. In the beginning engines have theirs, and so has a
    trainer that did not lend its own at the start.
    """

    def __init__(self, args: Args, actors: Actors, tracker: Tracker) -> None:
        self._engines_lend, self._trainer_lends = args.offload_rollout, args.offload_train
        self._actors, self._tracker = actors, tracker
        self._engines_lent = False
        self._trainer_lent = lends_at_start(args)

    def to_trainer(self) -> None:
        """The trainer can train; engines are idle. Nothing if that is so already."""
        self._settle()
        self._engines_give()
        if self._trainer_lends:
            self._on_trainers("wake", "wake_up")

    @property
    def lends(self) -> bool:
        """Whether memory goes to and fro."""
        return self._trainer_lends

    @property
    def is_lent(self) -> bool:
        """Whether engines may take what is free now."""
        return self._trainer_lent or not self._trainer_lends

    def room_for_weights(self) -> None:
        """Engines can take weights; the trainer holds its own and nothing else."""
        if self._trainer_lent:  # at the start, and when one joins: beside all that engines took there may be no room
            self._settle()
            self._engines_give()
        if self._trainer_lends:
            self._on_trainers("keep_weights", "keep_weights")
        if self._engines_lent:
            self._actors.on_lenders("resume_memory", ["weights"])

    def room_for_the_rest(self) -> None:
        """Engines can generate; the trainer sleeps."""
        if self._trainer_lends:
            self._on_trainers("sleep", "sleep")
            self._trainer_lent = True
        if self._engines_lent:
            self._actors.on_lenders("resume_memory", ["kv_cache", "cuda_graph"])
            self._engines_lent = False

    def _settle(self) -> None:
        """No engine takes memory from now on; one that was taking some has it, and gives it with the others."""
        if self._trainer_lends:
            self._trainer_lent = False
            self._actors.engines.settle()

    def _engines_give(self) -> None:
        """All that engines have, unless they gave it already."""
        if self._engines_lend and not self._engines_lent:
            with span("offload_rollout"):
                self._actors.on_lenders("release_memory")
            self._engines_lent = True

    def _on_trainers(self, method: str, what: str) -> None:
        """Calls all training ranks, timed as `what`; tells the most that any of them saw."""
        with span(what):
            answers = self._actors.on_trainers(method, limit_s=MEMORY_LIMIT_S)
        names = {name for answer in answers for name in answer}
        self._tracker.add({name: max(answer.get(name, 0.0) for answer in answers) for name in sorted(names)})
