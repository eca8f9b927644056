"""Colocated: GPU memory goes to and fro between trainer and engines, in the only order that fits both.

    to the trainer       before a training step   engines give back all they have, then the trainer takes its own
    room for weights     before a weight sync     engines take memory for weights, beside the trainer's
    room for the rest    after a weight sync      the trainer gives its own away, then engines take memory for the cache

Consumes nothing, produces free memory. The driver calls and waits for every actor concerned, with a limit; nobody
wakes it. Without `--offload-rollout` and `--offload-train` nothing happens.
"""

from __future__ import annotations

from slime.cluster.actors import Actors
from slime.observability.spans import span
from slime.settings import Args


class MemoryHandOver:
    """Who has the memory of the GPUs that trainer and engines share. In the beginning both have theirs."""

    def __init__(self, args: Args, actors: Actors) -> None:
        self._engines_lend, self._trainer_lends = args.offload_rollout, args.offload_train
        self._actors = actors
        self._engines_lent = False

    def to_trainer(self) -> None:
        """The trainer can train; engines are idle. Nothing if that is so already."""
        if self._engines_lend and not self._engines_lent:
            with span("offload_rollout"):
                self._actors.on_engines("release_memory")
            self._engines_lent = True
        if self._trainer_lends:
            with span("wake_up"):
                self._actors.on_trainers("wake")

    def room_for_weights(self) -> None:
        """Engines can take weights that the trainer still holds."""
        if self._engines_lent:
            self._actors.on_engines("resume_memory", ["weights"])

    def room_for_the_rest(self) -> None:
        """Engines can generate; the trainer sleeps."""
        if self._trainer_lends:
            with span("sleep"):
                self._actors.on_trainers("sleep")
        if self._engines_lent:
            self._actors.on_engines("resume_memory", ["kv_cache", "cuda_graph"])
            self._engines_lent = False
