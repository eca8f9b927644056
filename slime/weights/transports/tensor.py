"""Same host: the engine maps the memory of the trainer (shared memory on a CPU, CUDA IPC on a GPU); no bytes over HTTP.

Each engine rank gets a payload of its own, since receivers count references to the memory. On GPUs the payload for an
engine rank comes from the training rank on the same GPU: every rank serialises its own copy of the bucket and the
sender gathers the payloads (handles of a few hundred bytes). On a CPU the sender serves all.

Invariant: a bucket's memory lives until the sender has passed the next collective, by which time every engine has
answered for it. On a CPU it is kept, at most one bucket, and filled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import WeightSyncError
from slime.core.ports import EngineControl
from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.weights.expert_runs import LOADER, named_runs, places_of
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.settings import Args
    from slime.weights.buckets import Bucket

LOAD_FORMAT = "flattened_bucket"
"""One buffer per bucket instead of one per tensor: fewer handles and one mapping. Experts go to engines of one rank as
runs (`weights.expert_runs`)."""


@TRANSPORTS.register("tensor")
@dataclass(frozen=True, kw_only=True)
class TensorTransport(Transport):
    """Shared memory: the default on a CPU and with --colocate."""

    def check(self, args: Args) -> str | None:
        """CUDA IPC hands a tensor over on the GPU that holds it."""
        alone = args.debug_train_only or args.debug_rollout_only
        if alone or args.device != "cuda" or not policy_has_own_gpus(args):
            return None
        if args.colocate:
            others = "mixed" if policy_shares_gpus(args) else "distributed"
            return (
                "got --update-weight-transport tensor with engines of the policy on other GPUs than those that train, "
                f"which cannot see the trainer's memory; use {others} or disk"
            )
        return (
            "got --update-weight-transport tensor on cuda without --colocate: a tensor is handed over on its own GPU, "
            "where no engine is; use distributed or disk"
        )

    def open(self, context: TransportContext) -> TensorChannel:
        return TensorChannel(context)


class TensorChannel(Channel):
    """Shares the bucket's memory with engines on this host."""

    def __init__(self, context: TransportContext) -> None:
        self._serialize, self._peers, self._gpu_id = context.serialize, context.peers, context.gpu_id
        self._places = places_of(context.table, on_cpu=context.device == "cpu")
        self._held: object = None

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        for receiver in receivers:
            if self._gpu_id is not None and len(receiver.gpu_ids) != receiver.control.layout.num_ranks:
                raise WeightSyncError(
                    f"got {len(receiver.gpu_ids)} GPU ids for engine {receiver.control.url} of "
                    f"{receiver.control.layout.num_ranks} ranks; the tensor transport pairs ranks by GPU; give one per "
                    "rank, or use --update-weight-transport distributed"
                )

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        mine: Any
        held: object = None
        # Alone, this rank knows that the bucket before has been read; on a GPU another rank may still be delivering it.
        reuse = self._held if self._gpu_id is None else None
        runs = None
        try:
            runs = self._runs(bucket, receivers)
            num = self._num_payloads(receivers)
            mine, held = self._serialize(bucket.tensors, num, reuse, runs) if num else ([], None)
        except Exception as error:  # it must reach the sender through the gather that the other ranks are in
            mine = error
        gathered = self._peers.gather((self._gpu_id, mine)) if self._gpu_id is not None else [(None, mine)]
        self._held = held  # only now may the bucket before this one go
        return LOADER if runs else LOAD_FORMAT, gathered

    def _runs(self, bucket: Bucket, receivers: Sequence[Receiver]) -> list[tuple[str, int]] | None:
        """What the bucket travels as, if it has experts and every engine is of one rank and without a draft: both of
        its models are given all tensors, and a run names a tensor of one.
        """
        if not any(name in self._places for name, _ in bucket.tensors):
            return None
        layouts = [receiver.control.layout for receiver in receivers]
        if any(layout.num_ranks > 1 or layout.draft for layout in layouts):
            return None
        return named_runs(bucket.tensors, self._places)

    def _num_payloads(self, receivers: Sequence[Receiver]) -> int:
        """Engine ranks that this training rank serves."""
        if self._gpu_id is not None:
            return sum(receiver.gpu_ids.count(self._gpu_id) for receiver in receivers)
        return sum(receiver.control.layout.num_ranks for receiver in receivers) if self._peers.is_sender else 0

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        load_format, gathered = prepared
        payloads: dict[str | None, list[str]] = {}
        for gpu_id, mine in gathered:
            if isinstance(mine, Exception):
                raise WeightSyncError(f"the training rank on GPU {gpu_id} cannot share its weights: {mine!r}") from mine
            payloads.setdefault(gpu_id, []).extend(mine)
        per_engine: dict[str, list[str]] = {}
        for receiver in receivers:
            gpu_ids: Sequence[str | None] = (
                receiver.gpu_ids if self._gpu_id is not None else [None] * receiver.control.layout.num_ranks
            )
            absent = [g for g in gpu_ids if not payloads.get(g)]
            if absent:
                raise WeightSyncError(
                    f"got engine {receiver.control.url} on GPUs {list(gpu_ids)}, but no training rank on {absent}; "
                    "CUDA memory is shared within one GPU; colocate them or use --update-weight-transport distributed"
                )
            per_engine[receiver.control.url] = [payloads[g].pop() for g in gpu_ids]

        def update(control: EngineControl) -> None:
            control.update_weights_from_tensor(
                per_engine[control.url], load_format=load_format, flush_cache=False, weight_version=version
            )

        on_all(receivers, update, "take a bucket from shared memory")

    def abandon(self) -> None:
        self._held = None

    def settle(self) -> None:
        if self._gpu_id is not None:
            self._held = None

    def close(self) -> None:
        self._held = None
