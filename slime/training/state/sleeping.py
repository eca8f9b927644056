"""Controls what a training rank keeps on its GPU: everything, only the policy's weights, or nothing.

    wake            everything              for training, loading and saving
    keep_weights    the policy's weights    for weight syncs and exports, while engines hold only weights
    sleep           nothing                 while engines generate

To free GPU memory for the engines, a colocated trainer moves its storages to one range of host memory. The range is
pinned in the background while the engines start, because pinning storage by storage would add seconds to the first
sleep. Moving storages rather than tensors keeps every view valid (a parameter in Megatron's contiguous buffer, a master
weight that aliases a parameter): its storage is emptied and later refilled.

The backend calls this module from one thread. The arena's `take` and `close` wait, with a timeout, for the pinning
thread, which wakes them.

Invariants
1. `wake` restores every tensor bitwise, except gradients, which become zero.
2. Memory that weights and optimizer share (float32 training) stays on the GPU as long as the weights do.
3. Ranges taken from the arena do not overlap, and each starts at a multiple of `ALIGNMENT`.
4. If the arena is too small, it allocates another block and logs a warning; results do not change.
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
from slime.training.step.adamw import HeldAdamW
from slime.training.step.optimizer import MOMENTUM, Trainable
from slime.weights.quantised.formats import QuantisedFormat, format_of_folder

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""In bytes. Sufficient for any dtype and for full bursts of a copy engine."""
PIN_LIMIT_S, SLOWEST_PIN = 600.0, 100e6
"""The timeout for pinning is `PIN_LIMIT_S` plus one second per `SLOWEST_PIN` bytes. Pinning takes about one second per
4 GB, and longer on a busy host that must swap out other memory."""

Undo = Callable[[], None]
Pin = Callable[[Tensor], tuple[Tensor, Undo]]
"""Pins host memory for the device. Returns the pinned memory (the same or a replacement) and a function to unpin it."""


def pin_for(device: torch.device) -> Pin:
    """Returns a function that page-locks memory for a GPU, or one that does nothing for a CPU."""
    return (lambda memory: _page_lock(memory, device)) if device.type == "cuda" else (lambda memory: (memory, _nothing))


def _nothing() -> None:
    pass


def _page_lock(memory: Tensor, device: torch.device) -> tuple[Tensor, Undo]:
    torch.cuda.set_device(device)  # each thread has its own current device
    cudart, address, num_bytes = torch.cuda.cudart(), memory.data_ptr(), memory.numel()
    if num_bytes == 0:
        return memory, _nothing
    result = int(cudart.cudaHostRegister(address, num_bytes, 0))
    if result == 0:
        return memory, lambda: cudart.cudaHostUnregister(address)
    logger.warning(
        "cudaHostRegister failed with error %d for %d bytes: this host cannot lock existing pages, so torch allocates "
        "new ones, which can take up to twice the memory",
        result,
        num_bytes,
    )
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), _nothing


def room_of(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class HostArena:
    """Pinned host memory, allocated in blocks and used in ranges. Only one thread may call `take` and `rewind`."""

    def __init__(self, num_bytes: int, pin: Pin, *, limit_s: float | None = None) -> None:
        """Starts allocating a block of `num_bytes` in the background and does not wait for it."""
        self._pin, self._limit_s = pin, PIN_LIMIT_S + num_bytes / SLOWEST_PIN if limit_s is None else limit_s
        self._rooms: list[Future[Tensor]] = []
        self._room, self._used = 0, 0
        self._undo: list[Undo] = []
        self._num_bytes = 0
        self._end = weakref.finalize(self, _give_back, self._rooms, self._undo)  # runs before the pages are unmapped
        self._end.atexit = False
        self._add_room(num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Returns the next free range, [num_bytes] uint8. Waits for the pinning thread.

        Raises `DeadlineExceeded` if that takes too long, or the thread's error if it fails.
        """
        while self._room < len(self._rooms):
            self._wait(self._rooms[self._room])
            room = self._rooms[self._room].result()
            if self._used + num_bytes <= room.numel():
                taken = room[self._used : self._used + num_bytes]
                self._used += room_of(num_bytes)
                return taken
            self._room, self._used = self._room + 1, 0
        logger.warning("the host arena of %d bytes is too small; pinning %d more bytes", self.num_bytes, num_bytes)
        self._add_room(num_bytes)
        return self.take(num_bytes)

    def mark(self) -> tuple[int, int]:
        """Returns the current position, for `rewind`."""
        return self._room, self._used

    def rewind(self, mark: tuple[int, int]) -> None:
        self._room, self._used = mark

    def close(self) -> None:
        """Frees the memory. Ranges must not be used afterwards."""
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
    """Allocates [num_bytes] uint8 with all pages resident. Forked children do not inherit the memory.

    Other threads can run while pages are touched but not while they are pinned, so touching pages before pinning them
    shortens how long other threads are blocked.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # not supported by every kernel
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(0)


_Away = tuple[torch.UntypedStorage, int, Tensor | None]
"""An emptied storage, its size in bytes, and its content on the host (None if the content was dropped)."""


class HostStash:
    """Keeps the contents of GPU storages in a host arena while the trainer sleeps. Works like a stack."""

    def __init__(self, arena: HostArena, device: torch.device) -> None:
        self._arena, self._device = arena, device
        self._kept: list[tuple[tuple[int, int], list[_Away]]] = []
        """For each `put_away` call: the arena's mark before the call, and the storages."""

    @property
    def empty(self) -> bool:
        return not self._kept

    def put_away(self, keep: Iterable[Tensor], drop: Iterable[Tensor] = ()) -> int:
        """Moves the storages of `keep` to the host, and frees those of `drop` (gradients, which are zero after waking).

        Can be called again before `take_back`. Returns the number of bytes freed. Ignores tensors on other devices.
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
        """Restores every storage bitwise. Dropped storages become zero."""
        while self._kept:
            self.take_back_last()

    def take_back_last(self) -> None:
        """Restores the storages of the last `put_away` call."""
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
    """Yields the non-empty storages on `device`, each once, in order."""
    seen: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def num_bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Returns the total size of the tensors' storages on `device`. Shared storages count once."""
    return sum(storage.nbytes() for storage in storages_of(tensors, device))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    empty: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    view: Tensor = empty.set_(storage, 0, (storage.nbytes(),))
    return view


# Predicts peak GPU memory in each phase of a colocated step, from sizes that are known once the models are built. All
# sizes are in bytes, for one training rank and its GPU.
#
#   train        the trainer alone: weights, gradients, optimizer, and the activations of the largest micro-batch, which
#                a rehearsal measures (`slime.training.rehearsal`)
#   sync         the trainer's weights and two buckets, plus the engine's weights
#   generate     the engine alone: its pool of weights and cache
#
# Every phase also needs the memory outside of PyTorch's allocator, which no process can release: CUDA contexts and NCCL
# communicators. It is measured, because it depends on the number of process groups (two H200s with 21 groups: 4 GB).


@dataclass(frozen=True, slots=True)
class RankBytes:
    """GPU memory of one training rank between calls, in bytes."""

    weights: int
    """The policy's weights, including adapters and frozen weights."""
    gradients: int
    others: int
    """Optimizer states (including moments, which Adam creates only in its first step), and a critic's weights."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """GPU memory of one engine rank on the same GPU, in bytes."""

    weights: int
    pool: int | None
    """Weights and cache together: `mem_fraction_static` of the GPU. None if SGLang chooses the fraction."""


@dataclass(frozen=True, slots=True)
class Peak:
    trainer: int
    engine: int | None
    """The engine's memory; None if it chooses its pool size later."""

    def __str__(self) -> str:
        engine = "as SGLang chooses" if self.engine is None else f"{self.engine / 1e9:.1f} GB"
        parts = [f"trainer {self.trainer / 1e9:.1f} GB"] if self.trainer else []
        return " + ".join(parts + ([f"engine {engine}"] if self.engine != 0 else []))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    gpu_bytes: int
    peaks: Mapping[str, Peak]
    outside_bytes: int = 0
    """Memory of the GPU outside of this rank's PyTorch allocator, in every phase."""

    def with_measured(self, training_bytes: int, outside_bytes: int) -> MemoryPlan:
        """Returns the plan with the measured training peak, which includes activations, and the memory outside of
        PyTorch's allocator."""
        return MemoryPlan(self.gpu_bytes, {**self.peaks, "train": Peak(training_bytes, 0)}, outside_bytes)

    def too_large(self) -> list[str]:
        room = self.gpu_bytes - self.outside_bytes
        return [phase for phase, peak in self.peaks.items() if peak.trainer + (peak.engine or 0) > room]

    def facts(self) -> dict[str, Any]:
        sizes = {"gpu_bytes": self.gpu_bytes, "outside_bytes": self.outside_bytes}
        return sizes | {phase: dataclasses.asdict(peak) for phase, peak in self.peaks.items()}

    def __str__(self) -> str:
        outside = f"contexts and NCCL {self.outside_bytes / 1e9:.1f} GB"
        return "; ".join([*(f"{phase}: {peak}" for phase, peak in self.peaks.items()), f"always: {outside}"])


def predicted_peaks(rank: RankBytes, engine: EngineBytes, *, bucket_bytes: int) -> dict[str, Peak]:
    """Returns the peak of each phase. For training, activations are not included; they are measured later.

    A weight sync needs two buckets. Including memory for gathering, neither is larger than the engine's weights.
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
    """Returns an engine rank's memory for a model with `itemsize` bytes per element (4 in rows that stay float32).

    `quantised` determines the size of quantised weights. The result is a slight underestimate: it ignores padding and
    tensors that engines do not split.
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
    ALL = enum.auto()
    WEIGHTS = enum.auto()
    NOTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's tensors, grouped by the phases that need them on the GPU."""

    weights: Sequence[Tensor]
    """The policy's weights, which are sent to engines."""
    others: Sequence[Tensor]
    """Optimizer states, some of which are views of weights, and a critic's weights."""
    gradients: Sequence[Tensor]
    num_later_bytes: int = 0
    """Size of the states that the first optimizer step creates."""
    num_later: int = 0

    @classmethod
    def of(cls, policy: Trainable, critic: Trainable | None) -> Parts:
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
                missing = [p for p in masters if not {"exp_avg", MOMENTUM} & optimizer.state.get(p, {}).keys()]
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
        """Returns the tensors of `others` that are not views of weights."""
        held = {w.untyped_storage().data_ptr() for w in self.weights}
        return [t for t in self.others if t.untyped_storage().data_ptr() not in held]

    def num_bytes(self, device: torch.device) -> RankBytes:
        """Returns the device memory of these tensors, including states that are created later."""
        return RankBytes(
            weights=num_bytes_of(self.weights, device),
            gradients=num_bytes_of(self.gradients, device),
            others=num_bytes_of(self.apart(), device) + self.num_later_bytes,
        )

    def arena_bytes(self, device: torch.device) -> int:
        """Returns how much host memory is needed to offload everything but gradients."""
        now = sum(room_of(s.nbytes()) for s in storages_of([*self.weights, *self.apart()], device))
        return now + room_of(self.num_later_bytes) + ALIGNMENT * self.num_later


class Sleeper:
    """Moves one rank's tensors between GPU and host. Moves nothing if not `active` (on a CPU)."""

    def __init__(self, parts: Callable[[], Parts], device: torch.device, *, active: bool, prepares: bool) -> None:
        """`parts` is called again every time, because an optimizer creates its states in its first step.

        With `prepares`, a background thread allocates the host arena right away instead of on first use.
        """
        self._parts, self._device, self._active = parts, device, active
        self.plan: MemoryPlan | None = None
        """Predicted peaks, reported next to the measured ones."""
        self._held = Held.ALL
        self._arena: HostArena | None = None
        self._stash: HostStash | None = None
        if active and prepares:
            self._prepare()

    @property
    def held(self) -> Held:
        return self._held

    def keep_weights(self) -> dict[str, float]:
        """Keeps only the policy's weights on the GPU: offloads everything else, or restores the weights after `sleep`.

        Returns the peak memory of the phase before this call, or {} if nothing changes.
        """
        if not self._active or self._held is Held.WEIGHTS:
            return {}
        if self._held is Held.ALL:
            seen, parts = self._seen("train"), self._parts()
            self._prepare().put_away(parts.apart(), parts.gradients)
        else:
            seen = self._seen("generate")
            self._prepare().take_back_last()  # `sleep` moves the weights last, in a separate call
        self._held = Held.WEIGHTS
        self._reset_peak()
        return seen

    def sleep(self) -> dict[str, float]:
        """Offloads everything. Returns the peak memory of the phases before this call, or {} if already asleep."""
        if not self._active or self._held is Held.NOTHING:
            return {}
        seen = self._seen("sync") if self._held is Held.WEIGHTS else self.keep_weights()
        self._prepare().put_away(self._parts().weights)
        self._held = Held.NOTHING
        self._reset_peak()
        return seen

    def wake(self) -> dict[str, float]:
        """Restores everything to the GPU. Returns the peak memory since `sleep`, or {} if already awake."""
        if self._held is Held.ALL:
            return {}
        slept = self._seen("generate") if self._held is Held.NOTHING else {}
        self._prepare().take_back()
        self._held = Held.ALL
        self._reset_peak()
        return slept

    def expect_in_training(self, num_bytes: int) -> None:
        """Adds the measured training peak, which includes activations, to the plan.

        Called on a GPU after the rehearsal, in which the trainer's communicators are created.
        """
        if self.plan is not None:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            outside_bytes = all_bytes - free_bytes - torch.cuda.memory_reserved(self._device)
            self.plan = self.plan.with_measured(num_bytes, outside_bytes)

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self._stash = None

    def _prepare(self) -> HostStash:
        if self._stash is None:
            self._arena = HostArena(self._parts().arena_bytes(self._device), pin_for(self._device))
            self._stash = HostStash(self._arena, self._device)
        return self._stash

    def _seen(self, phase: str) -> dict[str, float]:
        on_gpu = self._device.type == "cuda"
        peaks = {"bytes": float(torch.cuda.max_memory_allocated(self._device))} if on_gpu else {}
        if self.plan is not None:
            peaks["predicted_bytes"] = float(self.plan.peaks[phase].trainer)
        return {f"perf/memory_{phase}_{name}": value for name, value in peaks.items()}

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def build_sleeper(args: Args, table: FamilyTable, parts: Callable[[], Parts], device: torch.device) -> Sleeper:
    """Builds a rank's sleeper. If engines share the GPU, it pins host memory and predicts each phase's peak."""
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
