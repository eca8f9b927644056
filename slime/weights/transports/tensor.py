"""Same host: the engine maps the memory of the trainer (shared memory on a CPU, CUDA IPC on a GPU); no bytes over HTTP.

Each engine rank gets a payload of its own, since receivers count references to the memory. On GPUs the payload for an
engine rank comes from the trainer rank on the same GPU: every rank serialises its own copy of the bucket and the
sender gathers the payloads (handles of a few hundred bytes). On a CPU the sender serves all.

Invariant: a bucket's memory lives until the sender has passed the next collective, by which time every engine has
answered for it. On a CPU it is kept, at most one bucket, and filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from slime.core.errors import WeightSyncError
from slime.core.ports import EngineControl
from slime.weights.buckets import Bucket, Tamper
from slime.weights.targets import EngineTarget, Peers, on_all

Serialize = Callable[[Sequence[tuple[str, Tensor]], int, object], tuple[list[str], object]]
"""(named tensors, number of receivers, an owner to reuse or None) -> a payload per receiver, and the owner of the
memory, which must stay alive until all have read it."""

LOAD_FORMAT = "flattened_bucket"
"""One buffer per bucket instead of one per tensor: fewer handles and one mapping."""


class TensorTransport:
    """Shares the bucket's memory with engines on this host."""

    name = "tensor"

    def __init__(
        self, serialize: Serialize, peers: Peers, *, gpu_id: str | None = None, tamper: Tamper | None = None
    ) -> None:
        """`gpu_id`: this trainer rank's GPU, in the naming of `EngineTarget.gpu_ids`; None on a CPU."""
        self._serialize, self._peers, self._gpu_id, self._tamper = serialize, peers, gpu_id, tamper
        self._held: object = None

    def begin(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        del version
        for target in targets:
            if self._gpu_id is not None and len(target.gpu_ids) != target.control.tp_size:
                raise WeightSyncError(
                    f"got {len(target.gpu_ids)} GPU ids for engine {target.control.url} of {target.control.tp_size} "
                    "ranks; the tensor transport pairs ranks by GPU; give one per rank, or use "
                    "--update-weight-transport distributed"
                )

    def prepare(self, bucket: Bucket, targets: Sequence[EngineTarget]) -> Any:
        mine: Any
        held: object = None
        # Alone, this rank knows that the bucket before has been read; on a GPU another rank may still be delivering it.
        reuse = self._held if self._gpu_id is None else None
        try:
            num = self._num_receivers(targets)
            mine, held = self._serialize(bucket.tampered(self._tamper).tensors, num, reuse) if num else ([], None)
        except Exception as error:  # it must reach the sender through the gather that the other ranks are in
            mine = error
        gathered = self._peers.gather((self._gpu_id, mine)) if self._gpu_id is not None else [(None, mine)]
        self._held = held  # only now may the bucket before this one go
        return gathered

    def _num_receivers(self, targets: Sequence[EngineTarget]) -> int:
        if self._gpu_id is not None:
            return sum(target.gpu_ids.count(self._gpu_id) for target in targets)
        return sum(target.control.tp_size for target in targets) if self._peers.is_sender else 0

    def deliver(self, prepared: Any, targets: Sequence[EngineTarget], *, version: int) -> None:
        payloads: dict[str | None, list[str]] = {}
        for gpu_id, mine in prepared:
            if isinstance(mine, Exception):
                raise WeightSyncError(f"a trainer rank on GPU {gpu_id} could not share its weights: {mine!r}") from mine
            payloads.setdefault(gpu_id, []).extend(mine)
        per_engine: dict[str, list[str]] = {}
        for target in targets:
            gpu_ids: Sequence[str | None] = (
                target.gpu_ids if self._gpu_id is not None else [None] * target.control.tp_size
            )
            absent = [g for g in gpu_ids if not payloads.get(g)]
            if absent:
                raise WeightSyncError(
                    f"got engine {target.control.url} on GPUs {list(gpu_ids)}, but no trainer rank on {absent}; CUDA "
                    "memory is shared within one GPU; colocate them or use --update-weight-transport distributed"
                )
            per_engine[target.control.url] = [payloads[g].pop() for g in gpu_ids]

        def update(control: EngineControl) -> None:
            control.update_weights_from_tensor(
                per_engine[control.url], load_format=LOAD_FORMAT, flush_cache=False, weight_version=version
            )

        on_all(targets, update, "take a bucket from shared memory")

    def finish(self, targets: Sequence[EngineTarget], *, version: int) -> None:
        del targets, version

    def abandon(self) -> None:
        self._held = None

    def settle(self) -> None:
        if self._gpu_id is not None:
            self._held = None

    def close(self) -> None:
        self._held = None
