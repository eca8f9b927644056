"""The tensor transport, for one host. Engines map the trainer's memory: shared memory on a CPU, CUDA IPC on a GPU.

Each engine rank gets its own payload, because receivers keep reference counts. A payload lists the tensors that the
rank needs for its shards. On GPUs, an engine rank's payload comes from the training rank on the same GPU: each bucket
is copied to all training ranks, every rank creates handles to its copy (a few hundred bytes), and the conductor gathers
the handles. On a CPU, the sender of a bucket creates the payloads for all engine ranks.

Invariant: a bucket's memory is reused by the second bucket after it, not by the next one. By then every engine has
acknowledged the bucket, and the conductor has passed the next collective. On a GPU, an engine acknowledges as soon as
its copies are queued. They finish long before the memory is reused; otherwise the digests would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.engine_interface import EngineControl
from slime.core.errors import WeightSyncError
from slime.core.topology import EngineLayout, EngineRank
from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.weights.expert_runs import LOADER, named_runs, places_of
from slime.weights.holding import hf_names_held
from slime.weights.receivers import Receiver, on_all
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime.settings import Args
    from slime.weights.send_plan import Bucket

LOAD_FORMAT = "flattened_bucket"
"""SGLang's name for one buffer per bucket instead of one per tensor. It needs fewer handles and only one mapping."""


@TRANSPORTS.register("tensor")
@dataclass(frozen=True, kw_only=True)
class TensorTransport(Transport):
    """Shared memory. The default on a CPU and with --colocate."""

    def check(self, args: Args) -> str | None:
        alone = args.debug_train_only or args.debug_rollout_only
        if alone or args.device != "cuda" or not policy_has_own_gpus(args):
            return None
        if args.colocate:
            others = "mixed" if policy_shares_gpus(args) else "distributed"
            return (
                "--update-weight-transport tensor cannot serve policy engines on GPUs without a training rank, because "
                f"these engines cannot map the trainer's memory; use {others} or disk"
            )
        return (
            "--update-weight-transport tensor requires --colocate on cuda: CUDA memory can be shared only within one "
            "GPU, and no engine is on a training GPU; use distributed or disk"
        )

    def open(self, context: TransportContext) -> TensorChannel:
        return TensorChannel(context)


class TensorChannel(Channel):
    def __init__(self, context: TransportContext) -> None:
        self._serialize, self._peers, self._gpu_id = context.serialize, context.peers, context.gpu_id
        self._shareable, self._table = context.shareable, context.table
        self._names_held: dict[EngineLayout, dict[EngineRank, frozenset[str] | None]] = {}
        self._places = places_of(context.table, on_cpu=context.device == "cpu")
        self.everywhere = self._gpu_id is not None

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._shareable(num_bytes, device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        for receiver in receivers:
            if self._gpu_id is not None and len(receiver.gpu_ids) != receiver.control.layout.num_ranks:
                raise WeightSyncError(
                    f"engine {receiver.control.url} has {len(receiver.gpu_ids)} GPU ids for "
                    f"{receiver.control.layout.num_ranks} ranks; the tensor transport pairs ranks by GPU, so pass one "
                    "id per rank, or use --update-weight-transport distributed"
                )

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        mine: Any
        owner: object = None
        runs = None
        try:
            runs = self._runs(bucket, receivers)
            mine, owner = self._payloads(bucket, receivers, runs)
        except Exception as error:  # raised by the conductor, so that all ranks still join the gather
            mine = error
        gathered = self._peers.gather((self._gpu_id, mine)) if self._gpu_id is not None else [(None, mine)]
        return LOADER if runs else LOAD_FORMAT, gathered, owner

    def _runs(self, bucket: Bucket, receivers: Sequence[Receiver]) -> list[tuple[str, int]] | None:
        """Groups the bucket into runs of experts. Returns None if it has no experts or an engine has several ranks or a
        draft.

        In an engine with a draft, both models load every tensor, but a run names a tensor of only one of them.
        """
        if not any(name in self._places for name, _ in bucket.tensors):
            return None
        layouts = [receiver.control.layout for receiver in receivers]
        if any(layout.num_ranks > 1 or layout.draft for layout in layouts):
            return None
        return named_runs(bucket.tensors, self._places)

    def _payloads(
        self, bucket: Bucket, receivers: Sequence[Receiver], runs: Sequence[tuple[str, int]] | None
    ) -> tuple[dict[tuple[str, int], str], object]:
        """Returns the payloads of the engine ranks that this training rank serves, by (engine URL, rank index), and the
        owner of the memory."""
        served: dict[frozenset[str] | None, list[tuple[str, int]]] = {}
        for receiver in receivers:
            layout = receiver.control.layout
            for number, rank in enumerate(layout.ranks()):
                if self._gpu_id is None or receiver.gpu_ids[number] == self._gpu_id:
                    only = self._held_by(layout)[rank] if layout.num_ranks > 1 else None
                    served.setdefault(only, []).append((receiver.control.url, number))
        payloads: dict[tuple[str, int], str] = {}
        owners = []
        for only, ranks in served.items():
            made, owner = self._serialize(bucket.tensors, len(ranks), runs=runs, only=only)
            payloads.update(zip(ranks, made, strict=True))
            owners.append(owner)
        return payloads, owners

    def _held_by(self, layout: EngineLayout) -> dict[EngineRank, frozenset[str] | None]:
        """Maps each rank to the names of the tensors that it needs for its shards; None means all. Equal sets share
        one object, which makes comparisons fast."""
        if layout not in self._names_held:
            known: dict[frozenset[str], frozenset[str] | None] = {frozenset(self._table.hf_names): None}
            held = hf_names_held(self._table, layout)
            self._names_held[layout] = {rank: known.setdefault(names, names) for rank, names in held.items()}
        return self._names_held[layout]

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        load_format, gathered, _ = prepared
        payloads: dict[tuple[str, int], str] = {}
        for gpu_id, mine in gathered:
            if isinstance(mine, Exception):
                rank = "a training rank" if gpu_id is None else f"the training rank on GPU {gpu_id}"
                raise WeightSyncError(f"{rank} cannot share its weights: {mine!r}") from mine
            payloads.update(mine)
        for receiver in receivers:
            num_ranks = receiver.control.layout.num_ranks
            absent = [n for n in range(num_ranks) if (receiver.control.url, n) not in payloads]
            if absent:
                raise WeightSyncError(
                    f"engine {receiver.control.url} is on GPUs {list(receiver.gpu_ids)}, but no training rank is on "
                    f"{[receiver.gpu_ids[n] for n in absent]}; CUDA memory can be shared only within one GPU, so "
                    "colocate them or use --update-weight-transport distributed"
                )

        def update(control: EngineControl) -> None:
            own = [payloads[control.url, number] for number in range(control.layout.num_ranks)]
            control.update_weights_from_tensor(own, load_format=load_format, flush_cache=False, weight_version=version)

        on_all(receivers, update, "take a bucket from shared memory")
