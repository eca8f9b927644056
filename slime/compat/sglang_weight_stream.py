"""Lets a sender announce many buckets in one call, and receives each bucket while the previous one is loaded.

SGLang takes one control call per bucket: it receives a broadcast, loads the tensors with the model's own loader, and
answers. The loader spends 0.05 to 0.15 ms in Python per tensor, so an engine receives a 4B model at an eighth of the
speed of a broadcast. With these hooks, a call can list the tensors of many buckets (`load_format`: `stream_format`).
The engine starts the broadcast of the next bucket, then loads the current one. It records which bytes of a bucket the
model's loader copies to which parameters, and from the second weight sync on repeats these copies without the loader.
Copies at equal distances, such as those of a layer's experts, are repeated as one (`joined`).

The list of tensors is sent once: with some thousand names, a call takes longer than a bucket, so later calls announce
the same buckets by a key. An engine with these hooks answers `STREAM` when it joins a group. Other engines still get
one call per bucket.

Invariants
1. Copies are repeated only if loading the same bucket consisted of nothing else: any other operation that is not a view
   (a cast, a derived weight, a value read by the host) makes the engine use the loader every time. A constant that
   fills memory outside of the copies, such as the padding of a vocabulary, stays there and is not written again.
2. Copies are repeated only while all parameters are where they were when the copies were recorded.
3. If a bucket cannot be loaded, the engine still receives the remaining ones, because other engines are in the same
   broadcasts. The call then fails.

Digests of all tensors are compared after each weight sync, whichever way the engine loaded them.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from slime.compat import Hook
from slime.core.engine_interface import BEFORE_SESSIONS, STREAM, WITH_SESSIONS
from slime.core.errors import EngineError
from slime.weights.send_plan import Bucket, Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

_RECORDS = "_slime_loads"
"""Model attribute that holds the records of earlier weight syncs."""


def buckets_of(
    names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Sequence[int]], numbers: str
) -> Iterator[tuple[Spec, ...]]:
    """Yields the tensors of each bucket, in the order of `Bucket.of`. `numbers`: how many each has, such as "3,1".

    Raises `EngineError` if some are not listed.
    """
    import torch

    tensors = zip(names, dtypes, shapes, strict=True)
    for number in numbers.split(","):
        specs = tuple(
            Spec(name, tuple(shape), dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype))
            for name, dtype, shape in itertools.islice(tensors, int(number))
        )
        if len(specs) < int(number):
            raise EngineError(f"a bucket announces {number} tensors, but lists {len(specs)}")
        yield specs


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy from a bucket to a parameter."""

    into: Tensor
    dtype: torch.dtype
    start: int
    """Offset of the first element in the bucket, in elements of `dtype`."""
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it copies consecutive bytes to consecutive bytes."""
        if self.into.dtype != self.dtype or not self.into.numel() or not self.into.is_contiguous():
            return False
        sizes = [(size, stride) for size, stride in zip(self.size, self.stride, strict=True) if size != 1]
        lengths = itertools.accumulate((size for size, _ in reversed(sizes)), operator.mul, initial=1)
        return all(stride == length for (_, stride), length in zip(reversed(sizes), lengths, strict=False))

    def source(self, flat: Tensor) -> Tensor:
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.size, self.stride, self.start)


@dataclass(slots=True)
class _Record:
    copied: list[_Copy] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    """The operations that are neither copies from the bucket nor views."""


def recorded(flat: Tensor, load: Callable[[], object]) -> _Record:
    """Runs `load` and records its copies from `flat` [bytes] uint8."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    copy, fill = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar
    record, begin = _Record(), flat.untyped_storage().data_ptr()
    filled: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            if operation is copy and given[1].untyped_storage().data_ptr() == begin:
                into, source = given[:2]
                place = source.dtype, source.storage_offset(), tuple(source.size()), tuple(source.stride())
                record.copied.append(_Copy(into.detach(), *place))
            elif operation is fill:
                filled.append(given[0].detach())
            elif not operation.is_view:
                record.others.add(str(operation))
            return operation(*given, **(named or {}))

    with Watch():
        load()
    copied = [_span(one.into) for one in record.copied]
    if any(start < end and first < stop for first, end in map(_span, filled) for start, stop in copied):
        record.others.add(str(fill))
    record.copied = joined(record.copied)
    return record


def joined(loaded: Sequence[_Copy]) -> list[_Copy]:
    """Returns as few copies as possible that do the same, because each takes about 0.02 ms in Python.

    Contiguous copies that continue each other become one, and those of equal size at equal distances become one of two
    dimensions. If two copies write to the same place, all stay as they are.
    """
    plain = [one for one in loaded if one.is_plain]
    spans = sorted(_span(one.into) for one in loaded if one.into.numel())
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        return list(loaded)
    runs: list[_Run] = []
    for run in sorted(map(_Run.of, plain), key=lambda run: (run.storage.data_ptr(), run.into)):
        if not (runs and runs[-1].grow(run)):
            runs.append(run)
    grids: list[list[_Run]] = []
    for run in runs:
        if grids and run.continues(grids[-1]):
            grids[-1].append(run)
        else:
            grids.append([run])
    chosen = {id(one) for one in plain}
    return [one for one in loaded if id(one) not in chosen] + [_as_one(grid) for grid in grids]


@dataclass(slots=True)
class _Run:
    """A contiguous copy, in bytes."""

    storage: Any
    device: torch.device
    into: int
    """Offset in `storage`."""
    start: int
    """Offset in the bucket."""
    size: int

    @classmethod
    def of(cls, copy: _Copy) -> _Run:
        each = copy.dtype.itemsize
        place = int(copy.into.storage_offset()) * each, copy.start * each, copy.into.nbytes
        return cls(copy.into.untyped_storage(), copy.into.device, *place)

    def step_to(self, other: _Run) -> tuple[int, int]:
        return other.into - self.into, other.start - self.start

    def grow(self, other: _Run) -> bool:
        """Takes `other` in if it continues this copy on both sides."""
        one = self.storage.data_ptr() == other.storage.data_ptr() and self.step_to(other) == (self.size, self.size)
        self.size += other.size if one else 0
        return one

    def continues(self, grid: Sequence[_Run]) -> bool:
        """Returns whether this copy is as large as those of `grid` and as far from the last one as they are apart."""
        last = grid[-1]
        return (
            (self.size, self.storage.data_ptr()) == (last.size, last.storage.data_ptr())
            and self.start > last.start
            and (len(grid) == 1 or last.step_to(self) == grid[0].step_to(grid[1]))
        )


def _as_one(grid: Sequence[_Run]) -> _Copy:
    import torch

    first = grid[0]
    step = first.step_to(grid[1]) if len(grid) > 1 else (first.size, first.size)
    numbers = first.into, first.start, first.size, *step
    each = math.gcd(8, *numbers)
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[each]
    into, start, size, *distances = (number // each for number in numbers)
    shape = (len(grid), size) if len(grid) > 1 else (size,)
    strides = [(distance, 1)[-len(shape) :] for distance in distances]
    place = torch.empty(0, dtype=dtype, device=first.device).set_(first.storage, into, shape, strides[0])
    return _Copy(place, dtype, start, shape, strides[1])


def _span(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor and the one after its last byte."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


Sized: TypeAlias = tuple[tuple[Spec, ...], int]
"""The tensors of a bucket, and their bytes. Adding them up takes a millisecond for some thousand tensors."""


class Loads:
    """Loads buckets into one model and records how they were loaded."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places: int | None = None
        self._records: dict[tuple[Spec, ...], _Record] = {}
        self.lists: dict[tuple[str, str], tuple[Sized, ...]] = {}
        """(group, key of `stream_format`) -> the buckets."""

    @property
    def others(self) -> frozenset[str]:
        """The operations that force some buckets to go through the loader every time."""
        return frozenset(name for record in self._records.values() for name in record.others)

    def begin(self) -> None:
        """Starts a weight sync. Forgets the records if a parameter has moved."""
        places = hash(tuple(parameter.data_ptr() for parameter in self._model.parameters()))
        if places != self._places:
            self._records.clear()
        self._places = places

    def load(self, specs: tuple[Spec, ...], flat: Tensor) -> None:
        """Loads one bucket from `flat` [bytes] uint8."""
        import torch

        known = self._records.get(specs)
        if known is None:
            tensors = list(Bucket.of(specs, flat).tensors)
            self._records[specs] = recorded(flat, lambda: self._model.load_weights(tensors))
        elif known.others:
            self._model.load_weights(list(Bucket.of(specs, flat).tensors))
        elif known.copied:
            with torch.no_grad():
                torch._foreach_copy_([c.into for c in known.copied], [c.source(flat) for c in known.copied])


@dataclass(frozen=True, slots=True)
class Stream:
    """The buckets that a sender has announced. SGLang's receive step passes it to the load step in place of tensors."""

    buckets: tuple[Sized, ...]
    group: Any
    device: str

    def receive(self, load: Callable[[tuple[Spec, ...], Tensor], None]) -> None:
        """Receives all buckets and loads each while the next one arrives. Raises the first error of `load`."""
        import torch
        import torch.distributed as dist

        sizes = [num_bytes for _, num_bytes in self.buckets]
        memory = [torch.empty(max(sizes[n::2], default=0), dtype=torch.uint8, device=self.device) for n in (0, 1)]
        failure: Exception | None = None

        def begin(number: int) -> tuple[Any, Tensor]:
            flat = memory[number % 2][: sizes[number]]
            return dist.broadcast(flat, src=0, group=self.group, async_op=True), flat

        coming = begin(0)
        for number, (specs, _) in enumerate(self.buckets):
            (work, flat), coming = coming, begin(number + 1) if number + 1 < len(sizes) else (None, memory[0])
            work.wait()
            try:
                if failure is None:
                    load(specs, flat)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


def _is_stream(load_format: str | None) -> bool:
    return load_format is not None and load_format.startswith(f"{STREAM}:")


def _announced(
    updater: Any, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Any], group_name: str, load_format: str
) -> Stream:
    """Raises `EngineError` if this engine is not in the group, or has not got the list of these buckets."""
    groups, lists = updater._model_update_group, _loads_of(updater.get_model()).lists
    group, (_, key, *numbers) = groups.get(group_name), load_format.split(":")
    if group is None:
        raise EngineError(f"this engine is not in the group {group_name}")
    if numbers:
        for left in [one for one in lists if one[0] not in groups]:
            del lists[left]
        found = buckets_of(names, dtypes, shapes, numbers[0])
        lists[group_name, key] = tuple((specs, sum(spec.num_bytes for spec in specs)) for specs in found)
    if (group_name, key) not in lists:
        raise EngineError(f"this engine has not got the list {key} of tensors")
    return Stream(lists[group_name, key], group, updater.device)


def _loads_of(model: Any) -> Loads:
    loads = getattr(model, _RECORDS, None)
    if loads is None:
        loads = Loads(model)
        setattr(model, _RECORDS, loads)
    return loads


def _load(updater: Any, announced: Callable[[], Stream]) -> tuple[bool, str]:
    try:
        stream, loads = announced(), _loads_of(updater.get_model())
        loads.begin()
        stream.receive(loads.load)
    except Exception as error:
        return False, f"could not load the weights ({type(error).__name__}: {error}); sync all weights again"
    logger.info("loaded %d buckets; operations that cannot be repeated: %s", len(stream.buckets), sorted(loads.others))
    return True, "loaded the announced buckets"


def _join(join: Callable[..., tuple[bool, str]], *args: Any, **named: Any) -> tuple[bool, str]:
    joined, message = join(*args, **named)
    return joined, f"{message} {STREAM}" if joined else message


def _update(
    update: Callable[..., Any],
    updater: Any,
    names: Any,
    dtypes: Any,
    shapes: Any,
    group_name: str,
    load_format: str | None = None,
) -> Any:
    """SGLang 0.5.16 receives and loads in one method."""
    if load_format is None or not _is_stream(load_format):
        return update(updater, names, dtypes, shapes, group_name, load_format)
    return _load(updater, lambda: _announced(updater, names, dtypes, shapes, group_name, load_format))


def _receive(receive: Callable[..., Any], updater: Any, *, load_format: str | None = None, **named: Any) -> Any:
    if load_format is None or not _is_stream(load_format):
        return receive(updater, load_format=load_format, **named)
    return _announced(updater, load_format=load_format, **named)


def _load_received(load: Callable[..., Any], updater: Any, weights: Any) -> Any:
    return _load(updater, lambda: weights) if isinstance(weights, Stream) else load(updater, weights)


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
HOOKS = (
    Hook("AROUND", f"{_UPDATER}.init_weights_update_group", _join),
    Hook("AROUND", f"{_UPDATER}.update_weights_from_distributed", _update, BEFORE_SESSIONS),
    Hook("AROUND", f"{_UPDATER}.receive_weights_from_distributed", _receive, WITH_SESSIONS),
    Hook("AROUND", f"{_UPDATER}.load_weights_from_distributed", _load_received, WITH_SESSIONS),
)
