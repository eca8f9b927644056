"""Hands GPU memory over between trainer and engines in colocated training.

    to the trainer       before a training step   engines release all memory, then the trainer allocates its own
    room for weights     before a weight sync     the trainer keeps only its weights, then engines allocate theirs
    room for the rest    after a weight sync      the trainer releases its weights, then engines allocate the KV cache

One side always releases memory before the other allocates, because an engine does not fit on the GPU together with the
trainer's gradients, optimizer states and caches. During startup, engines measure the free memory, which would be wrong
while the trainer is being built. They therefore wait until the trainer has been built and has lent its memory
(`slime.compat.sglang_memory_gate`).

The driver's thread calls the actors and waits for them, with a timeout. Without `--offload-rollout` and
`--offload-train`, no memory is moved.
"""

from __future__ import annotations

from slime.cluster.engine_tracker import MEMORY_LIMIT_S, Actors
from slime.observability.spans import span
from slime.observability.tracker import Tracker
from slime.settings import Args
from slime.settings.conditions import lends_at_start


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
