"""Weight sync on one training rank: sets up the transport, the peers and the receivers.

The driver calls all ranks at the same time, and all ranks see the same outcome. Ranks exchange values through a store
on rank 0 (`RankValues`), and senders wait for each other through it. Every wait has a timeout.

The module is in this package because only `cluster` may import trainer, weights and engine control together.
"""

from __future__ import annotations

import hmac
import logging
import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from slime.cluster.engine_tracker import EngineInfo
from slime.core.engine_interface import EngineControl
from slime.core.errors import DeadlineExceeded, SlimeError, WeightSyncError
from slime.serving.control import FolderEngineControl, HttpEngineControl
from slime.serving.payloads import digest, serialize_bucket, shareable
from slime.settings import Args, for_hook
from slime.settings.hook_contracts import load_hook
from slime.training.backend import MegatronBackend
from slime.weights.delivery import SenderMessages
from slime.weights.quantised.formats import format_of_folder
from slime.weights.quantised.sending import quantised_outgoing
from slime.weights.receivers import Peers, Receiver
from slime.weights.recorded_fills import RecordedFills
from slime.weights.rendezvous import join_store, listen_on, open_store
from slime.weights.send_plan import Buffers
from slime.weights.sync import sync_weights
from slime.weights.transports import TRANSPORTS, Channel, TransportContext

logger = logging.getLogger(__name__)

CONDUCTOR = 0
"""The training rank that pauses engines, verifies their weights and resumes them."""
LEAST_LIMIT_S, LIMITS_OF_A_SYNC = 1800.0, 100
"""A rank may have to wait for other ranks for the duration of a weight sync. The timeout is therefore
`LIMITS_OF_A_SYNC` times that of an engine call, but at least `LEAST_LIMIT_S`."""


@dataclass(slots=True)
class _Fleet:
    """The engines that a weight sync goes to: those that generate, or those of `--eval-fleet`."""

    channel: Channel
    known: dict[tuple[str, int], Receiver] = field(default_factory=dict)
    """(address, number of restarts) -> receiver from the last weight sync. A restarted engine needs a new receiver,
    because it has not joined a process group yet."""


class RankWeightSync:
    """Sends the weights of `backend` to engines. Methods are collective unless noted otherwise.

    The evaluation fleet has a channel of its own, so that its engines neither wait for nor delay those that generate.
    Both channels fill the same buckets, because their weight syncs never overlap.
    """

    def __init__(
        self,
        args: Args,
        backend: MegatronBackend,
        *,
        rank: int,
        slots: Sequence[int],
        address: str,
    ) -> None:
        """`slots`: placement slot of every training rank. `address`: address at which engines reach this host."""
        self._args, self._backend = args, backend
        self._rank = rank
        limit_s = max(LEAST_LIMIT_S, LIMITS_OF_A_SYNC * args.weight_sync_timeout_s)
        store, key = self._meet(address, args.weight_sync_timeout_s)
        self._messages = SenderMessages(store, limit_s=args.weight_sync_timeout_s)
        self._values = RankValues(store, key, rank=rank, size=dist.get_world_size(), limit_s=limit_s)
        self._peers = Peers(
            rank=rank,
            broadcast=self._values.broadcast,
            gather=self._values.gather,
            share=self._share,
            tell=self._messages.tell,
            hear=self._messages.hear,
        )
        dtype = getattr(torch, args.sglang["dtype"])
        weights = backend.outgoing(dtype)
        self._carried = backend.sight.digests(dtype, digest) if rank == CONDUCTOR else {}
        self._outgoing = quantised_outgoing(weights, format_of_folder(args.hf_checkpoint))
        gpu_of_slot = self._gpu_of_slot = self._gpus(slots[rank])
        self._given_up: set[tuple[str, int]] = set()
        """(address, number of restarts) of lost engines. Filled by another thread."""
        transport = TRANSPORTS.build(args.update_weight_transport, args)
        context = TransportContext(
            peers=self._peers,
            device=args.device,
            gpu_id=gpu_of_slot.get(slots[rank]) if gpu_of_slot else None,
            training_gpus=frozenset(gpu_of_slot.values()),
            address=address,
            timeout_s=args.weight_sync_timeout_s,
            table=self._outgoing.table,
            hf_checkpoint=Path(args.hf_checkpoint),
            serialize=serialize_bucket,
            shareable=shareable,
            post_write=_post_write(args),
        )
        self._generating = _Fleet(transport.open(context))
        self._evaluating = _Fleet(transport.open(context)) if args.eval_fleet is not None else None
        self._buffers = Buffers(lambda num_bytes: self._generating.channel.allocate(num_bytes, backend.device))
        self._fills = RecordedFills(on=backend.device.type == "cuda" and not self._args.offload_train)

    def sync_weights(
        self, engines: Sequence[EngineInfo], pause_mode: str, *, to_eval_fleet: bool = False
    ) -> dict[str, float]:
        """Sends the weights to `engines`, verifies them and resumes the engines. Returns `perf/update_weights_*`.

        `pause_mode`: what happens to running requests (`abort`, `retract` or `in_place`). If a delta sync fails,
        retries once with the full weights. Raises `WeightSyncError` on all ranks.
        """
        fleet = self._evaluating if to_eval_fleet else self._generating
        assert fleet is not None, "the run has no --eval-fleet"
        known, keys = fleet.known, [(info.url, info.incarnation) for info in engines]
        fleet.known = {key: known.get(key) or self._receiver(info) for key, info in zip(keys, engines, strict=True)}
        self._backend.require_weights()
        try:
            metrics = self._send(fleet, pause_mode)
        except SlimeError as error:
            if isinstance(error, DeadlineExceeded):  # either all ranks raise this, or the process group is broken
                raise
            if not self._peers.broadcast(fleet.channel.heals):  # only the conductor knows whether a retry helps
                raise
            logger.warning("%s; retrying with the full weights", error)
            metrics = self._send(fleet, pause_mode)
        finally:
            if self._backend.device.type == "cuda" and self._args.offload_train:  # engines need the memory
                self.free()
        if fleet is self._generating:
            self._backend.note_synced()
        return {f"perf/{name}": value for name, value in (metrics | dict(fleet.channel.costs())).items()}

    def _send(self, fleet: _Fleet, pause_mode: str) -> dict[str, float]:
        self._messages.begin()
        return sync_weights(
            self._outgoing,
            receivers=list(fleet.known.values()),
            channel=fleet.channel,
            digest=digest,
            version=self._backend.weight_version,
            buffer_bytes=self._args.update_weight_buffer_size,
            peers=self._peers,
            pause_mode=pause_mode,
            buffers=self._buffers,
            fills=self._fills if fleet is self._generating else None,
            carried=self._carried,
        )

    def give_up(self, url: str, incarnation: int) -> None:
        """Stops waiting for a lost engine. Not collective; can be called from any thread."""
        self._given_up.add((url, incarnation))

    def _receiver(self, info: EngineInfo) -> Receiver:
        limit_s = self._args.weight_sync_timeout_s
        control: EngineControl
        if self._args.update_weight_folder_only:
            folder = Path(self._args.components["update_weight_disk_dir"])
            control = FolderEngineControl(folder, info.url, info.layout, limit_s)
        else:
            control = HttpEngineControl(info.url, info.layout, limit_s, info.control_key)
        gpus = tuple(self._gpu_of_slot.get(slot, f"slot {slot}") for slot in info.slots) if self._gpu_of_slot else ()
        return Receiver(control, gpus, lambda: (info.url, info.incarnation) in self._given_up)

    def free(self) -> None:
        """Frees the buckets; the next weight sync allocates them again."""
        self._fills.forget()
        self._buffers.free()

    def close(self) -> None:
        for fleet in (self._generating, self._evaluating):
            if fleet is not None:
                fleet.channel.close()
        self.free()

    def _gpus(self, slot: int) -> dict[int, str]:
        """Returns slot -> UUID of the training rank's GPU. Empty on CPU. Collective."""
        if self._args.device != "cuda":
            return {}
        mine = (slot, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        return dict(self._values.broadcast(self._values.gather(mine)))

    def _meet(self, address: str, limit_s: float) -> tuple[Store, bytes]:
        """Creates the store on the conductor and connects to it from other ranks. Collective. Returns the store and the
        key of `RankValues`."""
        limit, size, listener = timedelta(seconds=limit_s), dist.get_world_size(), None
        if size == 1:
            return HashStore(), b""
        if self._rank == CONDUCTOR:
            listener = listen_on(address)
        box: list[Any] = [listener and (listener.getsockname()[:2], secrets.token_bytes(32))]
        with _named("the address of training rank 0"):
            dist.broadcast_object_list(box, src=CONDUCTOR)
        where, key = box[0]
        if listener is not None:
            return open_store(listener, world_size=size, timeout=limit, wait=False), key
        return join_store(*where, world_size=size, timeout=limit), key

    def _share(self, memory: Tensor, source: int) -> None:
        if dist.get_world_size() > 1:
            dist.broadcast(memory, src=source)


SIGNATURE_BYTES = 32


class RankValues:
    """Exchanges picklable values between training ranks through the store on the conductor.

    Each rank has one connection, where a gloo group would connect every rank with every other one. All ranks call the
    methods in the same order. Raises `DeadlineExceeded` if a rank does not take part.

    The store has no key, so anyone who reaches its port can write to it. Values are pickles, which can run code.
    Therefore they are signed (HMAC), and one with another signature raises `WeightSyncError` unread.
    """

    def __init__(self, store: Any, key: bytes, *, rank: int, size: int, limit_s: float) -> None:
        """`store`: this rank's own client of a `torch.distributed.Store`, because a wait blocks it. `key`: the same
        secret on all ranks. `size`: number of ranks."""
        self._store, self._secret, self._rank, self._size, self._limit_s = store, key, rank, size, limit_s
        self._number = 0
        self._told: list[str] = []
        """Keys of the conductor's values since the last `gather`, at which all ranks have read them."""

    def broadcast(self, value: Any) -> Any:
        """Returns the conductor's value on every rank."""
        key = self._key()
        if self._size == 1:
            return value
        if self._rank != CONDUCTOR:
            return self._take([key], "a value from training rank 0")[0]
        self._put(key, value)
        self._told.append(key)
        return value

    def gather(self, value: Any) -> list[Any] | None:
        """Returns the values of all ranks in order on the conductor, and None on other ranks."""
        key = self._key()
        if self._rank != CONDUCTOR:
            self._put(f"{key}/{self._rank}", value)
            return None
        keys = [f"{key}/{rank}" for rank in range(self._size) if rank != CONDUCTOR]
        values = [value, *self._take(keys, "a value from every training rank")]
        for read in (*keys, *self._told):
            self._store.delete_key(read)
        self._told.clear()
        return values

    def _key(self) -> str:
        self._number += 1
        return f"value {self._number}"

    def _take(self, keys: list[str], for_what: str) -> list[Any]:
        if not keys:
            return []
        with _named(for_what):
            self._store.wait(keys, timedelta(seconds=self._limit_s))
            found = self._store.multi_get(keys)
        return [self._read(key, signed) for key, signed in zip(keys, found, strict=True)]

    def _put(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        self._store.set(key, self._signature(key, data) + data)

    def _read(self, key: str, signed: bytes) -> Any:
        signature, data = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise WeightSyncError(
                f"{key!r} in the store of the training ranks was not written by a rank of this run: another program "
                "reaches the store's port; keep untrusted programs off the hosts' network"
            )
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")


@contextmanager
def _named(for_what: str) -> Iterator[None]:
    """Converts the error of a failed wait for other ranks to `DeadlineExceeded`, which says what was awaited."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        waited = f"weight sync waited {time.monotonic() - began:.0f} s for {for_what}"
        raise DeadlineExceeded(f"{waited}; a training rank is slow or gone: {error}") from error


def _post_write(args: Args) -> Callable[[Path, Sequence[str]], object] | None:
    path = args.custom_update_weight_post_write_path
    if path is None:
        return None
    hook = load_hook(path, "post_write")
    return lambda folder, engines: hook(for_hook(args), str(folder), list(engines))
