"""The distributed transport, for engines on other hosts or GPUs. Sends each bucket with one broadcast.

One control call announces up to `MAX_ANNOUNCED` buckets of a sender. Each engine then receives a bucket while it loads
the previous one (`slime.compat.sglang_weight_stream`). Engines without that hook, and engines with a draft, get one
call per bucket. If a sender fails after it has announced buckets, it sends the missing ones with meaningless contents,
because the engines wait for them in broadcasts. They stay paused until the next weight sync.

Each sender creates a process group in which it is rank 0 and all engine ranks are the other members. It opens a
rendezvous store on a free port and asks the engines to join. It creates the group exactly as the engines do
(`sglang.srt.utils.common.init_custom_process_group`), so both sides use the same store prefix.

Group membership is fixed, and every member takes part in each broadcast. So a restarted engine has to wait for the next
weight sync (`Transport.groups_engines`), which creates a new group of all engines. Updating it sooner would take an
extra group, a broadcast that interrupts sampling on all engines, or sending all weights twice.

The sender waits for engines to join, to receive and to respond, each with the timeout of the weight sync. Calls to
engines run in their own threads. During a broadcast, the sender checks every `POLL_S` whether the broadcast has
finished or an engine has returned an error. NCCL itself has no such limits: the first broadcast of a group connects its
ranks and blocks until all have come, so it starts in a thread of its own, and a broadcast whose receiver has died
occupies the GPU until the group is aborted (`_detach`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from slime.core.engine_interface import EngineControl, stream_format
from slime.core.errors import DeadlineExceeded, EngineError, SlimeError
from slime.settings.conditions import policy_shares_gpus
from slime.weights.receivers import GRACE_S, Receiver, beside, on_all
from slime.weights.send_plan import Spec, in_memory_order
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.settings import Args
    from slime.weights.send_plan import Bucket, Turn

logger = logging.getLogger(__name__)

POLL_S = 0.0001
"""How often to check whether broadcasts or engine calls are done. A bucket of 512 MB takes about 1.5 ms."""
ERROR_S = GRACE_S + 1.0
"""How much longer to wait for the error of a control call than for its broadcasts."""
LOAD_FORMAT = "flattened_bucket"
"""SGLang's name for sending all tensors of a bucket, concatenated, in a single broadcast."""
MAX_ANNOUNCED = 64
"""Maximum number of buckets per call. It is limited because the whole call has the timeout of a single wait."""
COME_POLL_S = 0.01
"""How often to check whether engines have joined a group."""


@TRANSPORTS.register("distributed", "nccl")
@dataclass(frozen=True, kw_only=True)
class DistributedTransport(Transport):
    """A process group over gloo (CPU) or NCCL (CUDA): the default on cuda without --colocate."""

    groups_engines = True

    def check(self, args: Args) -> str | None:
        if args.device != "cuda" or not policy_shares_gpus(args):
            return None
        return (
            "--update-weight-transport distributed does not work with --colocate on cuda, because NCCL does not "
            "support two ranks on one GPU; use tensor or disk"
        )

    def open(self, context: TransportContext) -> DistributedChannel:
        return DistributedChannel(context)


@dataclass(eq=False)
class _Announcement:
    """What a control call says of the buckets that the engines receive in it."""

    turns: tuple[Turn, ...]
    """Empty for a bucket of its own."""
    buckets: list[list[Spec]]
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    is_known: bool = False
    """Whether all engines of the group have the list of tensors, so that its key is enough."""

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(spec.num_bytes for spec in bucket) for bucket in self.buckets]

    def words(self) -> dict[str, Any]:
        """Returns the arguments of the call."""
        specs = [] if self.is_known else [spec for bucket in self.buckets for spec in bucket]
        numbers = [] if self.is_known else [len(specs) for specs in self.buckets]
        return {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "load_format": stream_format(self.key, numbers) if self.turns else LOAD_FORMAT,
        }


@dataclass(frozen=True, slots=True)
class _Call:
    """A control call in which the engines receive buckets."""

    announcement: _Announcement
    answer: Future[Any]
    left: deque[int]
    """Bytes of each bucket that has not been sent."""

    @property
    def failed(self) -> bool:
        return self.answer.done() and self.answer.exception() is not None


class DistributedChannel(Channel):
    def __init__(self, context: TransportContext) -> None:
        self._backend = "nccl" if context.device == "cuda" else "gloo"
        self._timeout_s, self._master_address = context.timeout_s, context.address
        self._group: Any = None
        self._store: Any = None
        self._group_name = ""
        self._members: tuple[Receiver, ...] = ()
        self._num_built = 0
        self._streams = False
        """Whether all engines can receive many buckets in one call."""
        self._announced: deque[Turn] = deque()
        self._announcements: list[_Announcement] = []
        """Those that were made in this group."""
        self._call: _Call | None = None
        self._connected = False
        """Whether the ranks of the group have had a broadcast."""
        self._under_way: deque[tuple[Any, Bucket]] = deque()
        """Broadcasts that may not have finished: with NCCL, the next one is queued before one has."""

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        if self._group is not None and tuple(receivers) == self._members:
            return
        if all(member in receivers for member in self._members):
            self.close()
        else:  # a lost engine would not respond to a request to leave the group
            self.abandon()
        self._connect(tuple(receivers))

    def _connect(self, receivers: tuple[Receiver, ...]) -> None:
        """Creates a new group. Rank 0 is the sender, followed by the engines' ranks in order."""
        from slime.weights.rendezvous import keep_gloo_on, listen_on, open_store

        began, limit = time.monotonic(), timedelta(seconds=self._timeout_s)
        self._num_built += 1
        sizes = [receiver.control.layout.num_ranks for receiver in receivers]
        offsets = {r.control.url: 1 + sum(sizes[:i]) for i, r in enumerate(receivers)}
        world_size = 1 + sum(sizes)
        group_name = f"slime-weights-{secrets.token_hex(4)}"  # unique: engines keep a name until its group is gone
        keep_gloo_on(self._master_address)
        listener = listen_on(self._master_address)
        master_port = listener.getsockname()[1]
        self._store = open_store(listener, world_size=world_size, timeout=limit, wait=False)

        def invite(control: EngineControl) -> bool:
            return control.init_weights_update_group(
                master_address=self._master_address,
                master_port=master_port,
                rank_offset=offsets[control.url],
                world_size=world_size,
                group_name=group_name,
                backend=self._backend,
            )

        with ThreadPoolExecutor(1, thread_name_prefix="weights-invite") as pool:
            invited = pool.submit(on_all, receivers, invite, "join the weight update group")
            if not _have_come(self._store, group_name, world_size - 1, invited, self._timeout_s):
                self._store = None  # makes engines that wait at the store fail
                invited.result()
            try:
                self._group = join_group(self._backend, self._store, world_size, group_name, limit)
            except Exception as error:
                refusal = invited.exception()
                failure = EngineError(f"could not create the weight update group {group_name}: {refusal or error}")
                failure.engines = refusal.engines if isinstance(refusal, SlimeError) else ()
                raise failure from error
            streams = all(invited.result())
        self._streams = streams and not any(receiver.control.layout.draft for receiver in receivers)
        self._group_name, self._members = group_name, receivers
        took_s = time.monotonic() - began
        logger.info("process group %d with %d engine ranks: built in %.2f s", self._num_built, world_size - 1, took_s)

    def costs(self) -> dict[str, float]:
        return {"update_weights_groups_built": float(self._num_built)}

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Bucket:
        return bucket

    def announce(self, turns: Sequence[Turn], receivers: Sequence[Receiver], *, version: int) -> None:
        self._announced = deque(turns if self._streams else ())

    def deliver(self, prepared: Bucket, receivers: Sequence[Receiver], *, version: int) -> None:
        assert self._group is not None, "deliver before begin"
        if self._call is None:
            self._call = self._begin_call(prepared, receivers, version)
        call = self._call
        work = self._broadcast(prepared.flat, call)
        call.left.popleft()
        self._under_way.append((work, prepared))
        if self._backend == "nccl":
            work.wait()  # orders later work on this stream, and does not block
        while len(self._under_way) > (1 if call.left and self._backend == "nccl" else 0):
            if not self._wait(self._under_way[0][0], call):
                break
            self._under_way.popleft()
        if not call.left or call.failed:
            call.answer.result()
            call.announcement.is_known, self._call = bool(call.announcement.turns), None

    def _begin_call(self, first: Bucket, receivers: Sequence[Receiver], version: int) -> _Call:
        """Asks the engines to receive the announced buckets, or only `first` if none were announced."""
        turns = tuple(self._announced.popleft() for _ in range(min(MAX_ANNOUNCED, len(self._announced))))
        announcement = self._announcement(turns, first)
        words = announcement.words()

        def update(control: EngineControl) -> None:
            control.update_weights_from_distributed(
                group_name=self._group_name, flush_cache=False, weight_version=version, **words
            )

        answer = beside(lambda: on_all(receivers, update, "take buckets from the group"), "weights-call")
        return _Call(announcement, answer, deque(announcement.sizes))

    def _announcement(self, turns: tuple[Turn, ...], first: Bucket) -> _Announcement:
        if not turns:
            return _Announcement((), [[Spec(name, tuple(t.shape), t.dtype) for name, t in first.tensors]])
        known = next((one for one in self._announcements if one.turns == turns), None)
        if known is None:
            known = _Announcement(turns, [in_memory_order(turn.specs) for turn in turns])
            self._announcements.append(known)
        return known

    def _broadcast(self, flat: Any, call: _Call) -> Any:
        """Starts a broadcast, the first one of a group in a thread. Raises the error of an engine that never comes."""
        import torch
        import torch.distributed as dist

        start = partial(dist.broadcast, flat, src=0, group=self._group, async_op=True)
        if self._connected or self._backend != "nccl":
            return start()
        stream = torch.cuda.current_stream(flat.device)

        def connect() -> Any:
            with torch.cuda.stream(stream):
                return start()

        connecting = beside(connect, "weights-connect")
        if not self._comes(connecting.done, call):
            call.answer.result()
        self._connected = True
        return connecting.result()

    def _wait(self, work: Any, call: _Call) -> bool:
        """Waits for a broadcast. Returns False if an engine has returned an error: it will never join the broadcast."""
        came = self._comes(work.is_completed, call)
        if came:
            work.wait()
        return came

    def _comes(self, is_done: Callable[[], bool], call: _Call) -> bool:
        """Waits until something is done in which all engines take part. Returns False if one has returned an error.

        The control call has the same limit, and its error names the engine, so an unfinished call is waited for longer.
        """
        deadline = time.monotonic() + self._timeout_s
        while not is_done():
            if call.failed:
                return False
            if time.monotonic() > deadline + (0.0 if call.answer.done() else ERROR_S):
                raise self._late()
            time.sleep(POLL_S)
        return True

    def _late(self) -> DeadlineExceeded:
        what = f"engines to receive a bucket in {self._group_name}"
        error = DeadlineExceeded.waiting(owner="weight sync", for_what=what, limit_s=self._timeout_s)
        error.engines = tuple(one.control.url for one in self._members) if len(self._members) == 1 else ()
        return error

    def _send_nothing(self, group: Any, call: _Call) -> None:
        """Completes the broadcasts in which engines wait for buckets that will not be sent."""
        import torch
        import torch.distributed as dist

        device = "cuda" if self._backend == "nccl" else "cpu"
        filler = torch.empty(max(call.left), dtype=torch.uint8, device=device)
        for num_bytes in call.left:
            self._wait(dist.broadcast(filler[:num_bytes], src=0, group=group, async_op=True), call)
            if call.failed:
                return

    def abandon(self) -> None:
        """Leaves the group, which may have unfinished broadcasts. The next weight sync makes a new group.

        Leaving blocks until these broadcasts time out or their receivers die, so it runs in a thread.
        """
        leaving = self._detach()
        threading.Thread(target=leaving, name="weights-leave", daemon=True).start()

    def settle(self) -> None:
        import torch

        if torch.cuda.is_available() and self._group is not None:
            torch.cuda.synchronize()

    def close(self) -> None:
        self._detach()()

    def _detach(self) -> Callable[[], None]:
        """Forgets the group. Returns a function that holds the last references to the group and leaves it."""
        import torch.distributed as dist

        held = [self._group, self._store, *self._under_way]
        self._under_way.clear()
        name, members, call, connected = self._group_name, self._members, self._call, self._connected
        self._group, self._store, self._members, self._call, self._connected = None, None, (), None, False
        self._announced.clear()
        self._announcements.clear()

        def leave() -> None:
            if held[0] is None:
                return
            if call is not None and call.left and not call.answer.done() and (connected or self._backend != "nccl"):
                with contextlib.suppress(Exception):  # the engines are lost, or the GPU has no memory left
                    self._send_nothing(held[0], call)
            with ThreadPoolExecutor(1) as pool:
                left = pool.submit(on_all, members, lambda c: c.destroy_weights_update_group(group_name=name), "leave")
                if self._backend == "nccl" and not all(work.is_completed() for work, _ in held[2:]):
                    held[0].abort()  # destroying waits for broadcasts, and nothing else ends those of a dead receiver
                dist.destroy_process_group(held[0])
                held.clear()
                left.exception()  # ignores errors from lost engines

        return leave


def _have_come(store: Any, group_name: str, num_ranks: int, invited: Future[Any], limit_s: float) -> bool:
    """Waits until all engine ranks have reached the store. Returns False as soon as an engine fails or is lost.

    Without this check, rank 0 would wait in the store for a rank that never arrives. With gloo, each rank writes a key
    before it waits for the others. With NCCL, no rank waits, and the engines' responses show that all have joined.
    """
    keys, deadline = getattr(store, "list_keys", None), time.monotonic() + limit_s
    while keys is not None and not invited.done() and time.monotonic() < deadline:
        if sum(group_name in key for key in keys()) >= num_ranks:
            break
        time.sleep(COME_POLL_S)
    return not invited.done() or invited.exception() is None


def join_group(backend: str, store: Any, world_size: int, group_name: str, limit: timedelta) -> Any:
    """Creates an additional group on rank 0 over an existing store, as `init_custom_process_group` does."""
    from torch.distributed import distributed_c10d as c10d

    prefixed = c10d.PrefixStore(group_name, store)
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        prefixed,
        group_name=c10d.GroupName(group_name),
        backend_options=None,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
