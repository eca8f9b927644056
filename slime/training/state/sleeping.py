"""What of a training rank is on its GPU: all of it, the policy's weights alone, or nothing.

    wake            all of it               to train, to load, to save
    keep_weights    the policy's weights    beside an engine that takes its own back: a weight sync, an export
    sleep           nothing                 while engines generate

Consumes: calls of the backend, in any order, on one thread. Produces: free GPU memory, and peaks as metrics. Waits for:
the copies, and once for the host arena to be pinned.

Invariants
1. After `wake` every bit is as it was, but gradients, which are zeros.
2. What both weights and optimizer hold (float32 training) stays as long as the weights do.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import DeadlineExceeded
from slime.models.common.table import FamilyTable
from slime.settings import Args
from slime.training.step.held_adam import HeldAdamW
from slime.training.step.optimizer import Trainable
from slime.weights.quantised.formats import QuantisedFormat, format_of_folder

# One range of host memory per training rank, pinned in the background, from which everything put away gets its room.
#
# Pinning storage by storage costs seconds of the first sleep; this is done once, beside the start of the engines, and
# reused. Pages are touched before they are pinned: touching takes turns with other threads, pinning holds them up. The
# driver pins whole pages and keeps no list of sizes, so nothing is rounded up to a power of two.
#
# Consumes: a size. Produces: ranges [n] uint8, front to back. Waits for: the thread that pins, in `take` and `close`,
# with a limit. Is woken by: that thread.
#
# Invariants
# 1. Ranges that are taken do not overlap, and each begins at a multiple of `ALIGNMENT`.
# 2. A plan that was too small costs one more room and a warning, never a wrong bit.

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes. Enough for any dtype and for whole bursts of a copy engine."""
PIN_LIMIT_S, SLOWEST_PIN = 600.0, 100e6
"""Limit of the wait for the memory, and what is added: one second for so many bytes. Pinning takes about a second per
4 GB, and a busy host may have to write to its disk what lies there."""

Undo = Callable[[], None]
Pin = Callable[[Tensor], tuple[Tensor, Undo]]
"""Makes host memory reachable for the device: that memory or other in its place, and what undoes it."""


def pin_for(device: torch.device) -> Pin:
    """For a GPU; nothing is to be done for a CPU, which reads host memory as it is."""
    return (lambda memory: _page_lock(memory, device)) if device.type == "cuda" else (lambda memory: (memory, _nothing))


def _nothing() -> None:
    pass


def _page_lock(memory: Tensor, device: torch.device) -> tuple[Tensor, Undo]:
    torch.cuda.set_device(device)  # of this thread
    cudart, address, num_bytes = torch.cuda.cudart(), memory.data_ptr(), memory.numel()
    if num_bytes == 0:
        return memory, _nothing
    result = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if result == 0:
        return memory, lambda: cudart.cudaHostUnregister(address)
    logger.warning(
        "got error %d of cudaHostRegister for %d bytes, because this host does not lock pages that are there; torch "
        "allocates them instead, up to twice as many",
        result,
        num_bytes,
    )
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), _nothing


def room_of(num_bytes: int) -> int:
    """How much of an arena a range of `num_bytes` takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class HostArena:
    """Rooms of host memory and a mark of how much of them is taken. One thread takes and rewinds."""

    def __init__(self, num_bytes: int, pin: Pin, *, limit_s: float | None = None) -> None:
        """Starts to make a room of `num_bytes` and returns at once."""
        self._pin, self._limit_s = pin, PIN_LIMIT_S + num_bytes / SLOWEST_PIN if limit_s is None else limit_s
        self._rooms: list[Future[Tensor]] = []
        self._room, self._used = 0, 0
        self._undo: list[Undo] = []
        self._num_bytes = 0
        self._end = weakref.finalize(self, _give_back, self._rooms, self._undo)  # before the pages are unmapped
        self._end.atexit = False
        self._add_room(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all rooms."""
        return self._num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """The next free range, [num_bytes] uint8. Raises `DeadlineExceeded`, or what kept the memory from being there.

        Waits for the thread that pins, if it is not done.
        """
        while self._room < len(self._rooms):
            self._wait(self._rooms[self._room])
            room = self._rooms[self._room].result()
            if self._used + num_bytes <= room.numel():
                taken = room[self._used : self._used + num_bytes]
                self._used += room_of(num_bytes)
                return taken
            self._room, self._used = self._room + 1, 0
        logger.warning(
            "the host arena of %d bytes was planned too small; %d more are pinned", self.num_bytes, num_bytes
        )
        self._add_room(num_bytes)
        return self.take(num_bytes)

    def mark(self) -> tuple[int, int]:
        """How much is taken now, for `rewind`."""
        return self._room, self._used

    def rewind(self, mark: tuple[int, int]) -> None:
        """Ranges that were taken since `mark` are free again; what they hold may be written over."""
        self._room, self._used = mark

    def close(self) -> None:
        """Gives the memory back. Ranges must not be used any more."""
        for room in self._rooms:
            self._wait(room)
        self._end()

    def _add_room(self, num_bytes: int) -> None:
        room: Future[Tensor] = Future()
        self._rooms.append(room)
        self._num_bytes += room_of(num_bytes)
        threading.Thread(target=self._make, args=(room_of(num_bytes), room), name="host-arena", daemon=True).start()

    def _make(self, num_bytes: int, room: Future[Tensor]) -> None:
        began_s = time.monotonic()
        try:
            memory, undo = self._pin(_pages(num_bytes))
        except BaseException as error:
            room.set_exception(error)
            return
        self._undo.append(undo)
        room.set_result(memory)
        logger.info("pinned %.1f GB of host memory in %.1f s", num_bytes / 1e9, time.monotonic() - began_s)

    def _wait(self, room: Future[Tensor]) -> None:
        if not wait([room], timeout=self._limit_s).done:
            raise DeadlineExceeded.waiting(
                owner="training rank",
                for_what=f"{self.num_bytes} bytes of host memory to be pinned",
                limit_s=self._limit_s,
            )


def _give_back(rooms: list[Future[Tensor]], undo: list[Undo]) -> None:
    for each in undo:
        each()
    undo.clear()
    rooms.clear()


def _pages(num_bytes: int) -> Tensor:
    """Fresh memory [num_bytes] uint8 with all of its pages there; children that are forked do not get it."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a wish, which not every kernel knows
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(0)


# Sleeping: a colocated trainer lends its GPU memory to the engines by moving its storages to the host.
#
# Works on storages, not tensors, so every view (a parameter into Megatron's contiguous buffer, a master weight into a
# parameter) stays valid: the storage is emptied under it and filled again.

_Away = tuple[torch.UntypedStorage, int, Tensor | None]
"""A storage that was emptied, its bytes, and their contents on the host; None: dropped."""


class HostStash:
    """Holds the contents of the storages of one device while the trainer sleeps, in one host arena.

    What was put away last comes back first.
    """

    def __init__(self, arena: HostArena, device: torch.device) -> None:
        self._arena, self._device = arena, device
        self._kept: list[tuple[tuple[int, int], list[_Away]]] = []
        """What each call put away, and how much of the arena was taken before it."""

    @property
    def empty(self) -> bool:
        """Whether everything is on the device."""
        return not self._kept

    def put_away(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Moves the storages of `keep` to the host and frees those of `drop` (gradients: zeros after waking).

        Adds to what is there already. Returns the bytes freed. Tensors of other devices are left alone.
        """
        mark = self._arena.mark()
        away: list[_Away] = [(s, s.nbytes(), self._copied(s)) for s in storages_of(keep, self._device)]
        away += [(s, s.nbytes(), None) for s in storages_of(drop, self._device)]
        self._settle()
        for storage, _, _ in away:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._kept.append((mark, away))
        return sum(num_bytes for _, num_bytes, _ in away)

    def take_back(self) -> None:
        """Restores every storage, bit for bit; dropped ones come back as zeros."""
        while self._kept:
            self.take_back_last()

    def take_back_last(self) -> None:
        """Restores what the last call of `put_away` took."""
        mark, away = self._kept.pop()
        for storage, num_bytes, host in away:
            storage.resize_(num_bytes)
            view = _as_bytes(storage)
            if host is None:
                view.zero_()
            else:
                view.copy_(host, non_blocking=True)
        self._settle()
        self._arena.rewind(mark)

    def _copied(self, storage: torch.UntypedStorage) -> Tensor:
        return self._arena.take(storage.nbytes()).copy_(_as_bytes(storage), non_blocking=True)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """The storages on `device` that hold anything, each once, in order."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def num_bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Of their storages on `device`, each counted once."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view: Tensor = empty.set_(storage, 0, (storage.nbytes(),))
    return view


# The peak of GPU memory in each phase of a colocated step, from sizes that are known when everything is built.
#
#   train        the trainer alone: weights, gradients, optimizer, and the activations of the largest micro-batch, which
#                a rehearsal measures (`slime.training.rehearsal`)
#   sync         the trainer's weights and two buckets, beside the weights of the engine
#   generate     the engine alone: its pool, which holds weights and cache
#
# Pure. Bytes throughout, of one rank and the GPU that it shares.


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one training rank keeps on its GPU between two calls."""

    weights: int
    """Of the policy; adapters and what is frozen among them."""
    gradients: int
    """Of the policy and of a critic."""
    others: int
    """Optimizer states (master weights, moments) and all of a critic but its gradients; moments that Adam makes in its
    first step are counted from the beginning."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """What one engine rank keeps on the same GPU."""

    weights: int
    pool: int | None
    """Weights and cache together, `mem_fraction_static` of the GPU; None where SGLang chooses the fraction."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one phase."""

    trainer: int
    engine: int | None
    """None: not known before the engine has chosen."""

    def __str__(self) -> str:
        engine = "as SGLang chooses" if self.engine is None else f"{self.engine / 1e9:.1f} GB"
        parts = [f"trainer {self.trainer / 1e9:.1f} GB"] if self.trainer else []
        return " + ".join(parts + ([f"engine {engine}"] if self.engine != 0 else []))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one training rank."""

    gpu_bytes: int
    """Of the whole GPU."""
    peaks: Mapping[str, Peak]
    """By phase."""

    def with_training(self, num_bytes: int) -> MemoryPlan:
        """The same plan with what training takes, activations included."""
        return MemoryPlan(self.gpu_bytes, {**self.peaks, "train": Peak(num_bytes, 0)})

    def too_large(self) -> list[str]:
        """Phases that do not fit."""
        return [phase for phase, peak in self.peaks.items() if peak.trainer + (peak.engine or 0) > self.gpu_bytes]

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {"gpu_bytes": self.gpu_bytes} | {phase: dataclasses.asdict(peak) for phase, peak in self.peaks.items()}

    def __str__(self) -> str:
        return "; ".join(f"{phase}: {peak}" for phase, peak in self.peaks.items())


def predicted_peaks(rank: RankBytes, engine: EngineBytes, *, bucket_bytes: int) -> dict[str, Peak]:
    """Phase -> its peak; of training without activations, until they are known.

    Two buckets of a weight sync are alive, no larger than all; what ranks gather for them is counted in.
    """
    return {
        "train": Peak(rank.weights + rank.gradients + rank.others, 0),
        "sync": Peak(rank.weights + 2 * min(bucket_bytes, engine.weights), engine.weights),
        "generate": Peak(0, engine.pool),
    }


def engine_bytes(
    table: FamilyTable,
    *,
    itemsize: int,
    tp_size: int,
    gpu_bytes: int,
    fraction: float | None,
    quantised: QuantisedFormat | None = None,
) -> EngineBytes:
    """An engine rank's share of a model whose tensors are `itemsize` bytes wide (float32 where they are wide), or
    `quantised`.

    Padding, and what an engine does not split, are left out: the share is a little low.
    """
    total = 0
    for entry in table.entries:
        row = entry.row
        if quantised is not None and quantised.is_quantised(entry.hf):
            parts = zip(quantised.rows(row), quantised.dtypes, strict=True)
            total += sum(dtype.itemsize * sum(map(math.prod, part.shapes)) for part, dtype in parts)
        else:
            total += (4 if row.wide else itemsize) * sum(map(math.prod, row.shapes))
    return EngineBytes(-(-total // tp_size), None if fraction is None else int(gpu_bytes * fraction))


class Held(enum.Enum):
    """What is on the GPU."""

    ALL = enum.auto()
    WEIGHTS = enum.auto()
    NOTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one rank, by when they have to be on the GPU."""

    weights: Sequence[Tensor]
    """The policy's, which engines are sent."""
    others: Sequence[Tensor]
    """Optimizer states, which may view weights, and a critic's weights."""
    gradients: Sequence[Tensor]
    num_later_bytes: int = 0
    """Of states that the first optimizer step makes."""
    num_later: int = 0
    """How many tensors these are."""

    @classmethod
    def of(cls, policy: Trainable, critic: Trainable | None) -> Parts:
        """As they are now."""
        others: list[Tensor] = []
        gradients: list[Tensor] = []
        later_bytes, num_later = 0, 0
        for trainable in (policy, critic):
            if trainable is None:
                continue
            if trainable is critic:
                others += [parameter.data for parameter in trainable.model.parameters]
            for optimizer in (inner.optimizer for inner in trainable.inner if inner.optimizer is not None):
                masters = [p for group in optimizer.param_groups for p in group["params"]]
                others += [p.data for p in masters]
                others += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
                missing = [p for p in masters if "exp_avg" not in optimizer.state.get(p, {})]
                later_bytes += (
                    optimizer.first_step_bytes()
                    if isinstance(optimizer, HeldAdamW)
                    else sum(2 * p.numel() * p.element_size() for p in missing)
                )
                num_later += len(missing)
            buffers = [b for ddp in trainable.ddps for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
            gradients += [buffer.grad_data for buffer in buffers]
        weights = [parameter.data for parameter in policy.model.parameters]
        return cls(weights, others, gradients, later_bytes, 3 * num_later)  # two moments and a count

    def apart(self) -> list[Tensor]:
        """Of `others`, those that view no weight."""
        held = {w.untyped_storage().data_ptr() for w in self.weights}
        return [t for t in self.others if t.untyped_storage().data_ptr() not in held]

    def num_bytes(self, device: torch.device) -> RankBytes:
        """What they take on the device, with what comes later."""
        return RankBytes(
            weights=num_bytes_of(self.weights, device),
            gradients=num_bytes_of(self.gradients, device),
            others=num_bytes_of(self.apart(), device) + self.num_later_bytes,
        )

    def arena_bytes(self, device: torch.device) -> int:
        """Room for all of them but the gradients on the host."""
        now = sum(room_of(s.nbytes()) for s in storages_of([*self.weights, *self.apart()], device))
        return now + room_of(self.num_later_bytes) + ALIGNMENT * self.num_later


class Sleeper:
    """Moves the parts of one rank. `active`: else (on a CPU) nothing moves, and everything is always there."""

    def __init__(self, parts: Callable[[], Parts], device: torch.device, *, active: bool, prepares: bool) -> None:
        """`parts`: asked each time, for an optimizer makes its states when it first steps.

        `prepares`: the host arena is made in the background from now on; else when it is first needed.
        """
        self._parts, self._device, self._active = parts, device, active
        self.plan: MemoryPlan | None = None
        """What the phases take; peaks that are seen are reported beside it."""
        self._held = Held.ALL
        self._arena: HostArena | None = None
        self._stash: HostStash | None = None
        if active and prepares:
            self._prepare()

    @property
    def held(self) -> Held:
        return self._held

    def keep_weights(self) -> dict[str, float]:
        """Drops gradients and puts away all but the policy's weights, or brings these alone back.

        Returns the peak of the phase that ends; {} if it was so.
        """
        if not self._active or self._held is Held.WEIGHTS:
            return {}
        if self._held is Held.ALL:
            seen, parts = self._seen("train"), self._parts()
            self._prepare().put_away(parts.apart(), parts.gradients)
        else:
            seen = self._seen("generate")
            self._prepare().take_back_last()  # `sleep` puts them away last, by themselves
        self._held = Held.WEIGHTS
        self._reset_peak()
        return seen

    def sleep(self) -> dict[str, float]:
        """Puts everything away. The peaks of the phases that end; {} if it sleeps already."""
        if not self._active or self._held is Held.NOTHING:
            return {}
        seen = self._seen("sync") if self._held is Held.WEIGHTS else self.keep_weights()
        self._prepare().put_away(self._parts().weights)
        self._held = Held.NOTHING
        self._reset_peak()
        return seen

    def wake(self) -> dict[str, float]:
        """Brings everything back; the most that was on the GPU meanwhile. {} if it is awake."""
        if self._held is Held.ALL:
            return {}
        slept = self._seen("generate") if self._held is Held.NOTHING else {}
        self._prepare().take_back()
        self._held = Held.ALL
        self._reset_peak()
        return slept

    def expect_in_training(self, num_bytes: int) -> None:
        """What training was found to take, activations included, enters the plan."""
        if self.plan is not None:
            self.plan = self.plan.with_training(num_bytes)

    def close(self) -> None:
        """Gives the host memory back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stash = None

    def _prepare(self) -> HostStash:
        if self._stash is None:
            self._arena = HostArena(self._parts().arena_bytes(self._device), pin_for(self._device))
            self._stash = HostStash(self._arena, self._device)
        return self._stash

    def _seen(self, phase: str) -> dict[str, float]:
        """The peak of the phase that ends, and beside it what was predicted."""
        on_gpu = self._device.type == "cuda"
        peaks = {"bytes": float(torch.cuda.max_memory_allocated(self._device))} if on_gpu else {}
        if self.plan is not None:
            peaks["predicted_bytes"] = float(self.plan.peaks[phase].trainer)
        return {f"perf/memory_{phase}_{name}": value for name, value in peaks.items()}

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def build_sleeper(args: Args, table: FamilyTable, parts: Callable[[], Parts], device: torch.device) -> Sleeper:
    """Of a rank that is built. Where its GPU is lent, host memory is pinned from now on, and the phases are planned."""
    active = device.type == "cuda"
    sleeper = Sleeper(parts, device, active=active, prepares=args.offload_train)
    if active and args.offload_train:
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        engine = engine_bytes(
            table,
            itemsize=getattr(torch, args.sglang["dtype"]).itemsize,
            tp_size=args.rollout_num_gpus_per_engine,
            gpu_bytes=gpu_bytes,
            fraction=args.sglang.get("mem_fraction_static"),
            quantised=format_of_folder(args.hf_checkpoint),
        )
        bucket_bytes = args.update_weight_buffer_size
        peaks = predicted_peaks(parts().num_bytes(device), engine, bucket_bytes=bucket_bytes)
        sleeper.plan = MemoryPlan(gpu_bytes, peaks)
    return sleeper
