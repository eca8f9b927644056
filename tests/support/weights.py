"""A small model and fakes for tests of the weight sync: an engine, the wire to it, trainer ranks as threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slime.core.engine_interface import RankChecksums
from slime.core.errors import EngineError
from slime.core.topology import ONE_RANK, EngineLayout, EngineRank
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.serving.payloads import digest, serialize_bucket, shareable
from slime.weights.delivery import SenderMessages
from slime.weights.engine_layout import engine_shards
from slime.weights.holding import holdings
from slime.weights.receivers import Peers, Receiver
from slime.weights.send_plan import Bucket, Spec, TensorGroup, Turn, turns_of
from slime.weights.transports import Channel, TransportContext

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_size": 20,
    "intermediate_size": 36,
    "vocab_size": 70,
}
FIRST_RANK = EngineRank(0, 0)
State = dict[str, torch.Tensor]
Tamper = Callable[[str, torch.Tensor], torch.Tensor]
"""Gets a private copy of a tensor that is about to travel, returns what travels instead."""


def model(**changes: Any) -> tuple[FamilyTable, State]:
    """The table of a model with these settings, and weights for it."""
    table = table_for({**CONFIG, **changes})
    generator = torch.Generator().manual_seed(0)
    return table, {n: torch.randn(table.shape_of(n), generator=generator) for n in table.hf_names}


def engine_tensors(
    table: FamilyTable,
    state: Mapping[str, torch.Tensor],
    *,
    layout: EngineLayout = ONE_RANK,
    rank: EngineRank = FIRST_RANK,
    on_cpu: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All resident tensors of one rank from a whole HF state dict; experts come stacked flat."""
    for held in table.resident.values():
        for own, name, holding in holdings(table, held, layout):
            if own == rank:
                shards = [
                    shard
                    for entry in holding.entries(held)
                    for shard in engine_shards(table, entry, [state[n] for n in entry.hf], holding.share, on_cpu=on_cpu)
                ]
                yield name, torch.cat(shards)


def transport_context(**changes: Any) -> TransportContext:
    """A trainer of one rank on a CPU, beside its engines."""
    alone: dict[str, Any] = {
        "peers": Peers(),
        "device": "cpu",
        "gpu_id": None,
        "address": "127.0.0.1",
        "timeout_s": 60.0,
        "table": model()[0],
        "hf_checkpoint": Path("no checkpoint"),
        "serialize": serialize_bucket,
        "shareable": shareable,
    }
    return TransportContext(**{**alone, **changes})


def disk_settings(folder: Path | None, **changes: Any) -> SimpleNamespace:
    """Of the disk transport; with `local` deltas, by agents that have their checkpoint there."""
    usual: dict[str, Any] = {
        "update_weight_disk_dir": None if folder is None else str(folder),
        "update_weight_disk_keep_files": False,
        "update_weight_mode": "full",
        "update_weight_local_checkpoint_dir": None,
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
        "update_weight_full_interval": 20,
    }
    return SimpleNamespace(**{**usual, **changes})


def tampered(bucket: Bucket, tamper: Tamper) -> Bucket:
    """What travels instead of a bucket."""
    return Bucket(tuple((name, tamper(name, tensor.detach().clone())) for name, tensor in bucket.tensors))


class TamperingChannel(Channel):
    """Alters what travels over another channel."""

    def __init__(self, inner: Channel, tamper: Tamper) -> None:
        self._inner, self._tamper = inner, tamper
        self.everywhere = inner.everywhere

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(num_bytes, device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self._inner.begin(receivers, version=version)

    def announce(self, turns: Sequence[Turn], receivers: Sequence[Receiver], *, version: int) -> None:
        self._inner.announce(turns, receivers, version=version)

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        return self._inner.prepare(tampered(bucket, self._tamper), receivers)

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        self._inner.deliver(prepared, receivers, version=version)

    def report(self) -> Any:
        return self._inner.report()

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:
        self._inner.finish(receivers, version=version, reports=reports)

    def abandon(self) -> None:
        self._inner.abandon()

    def settle(self) -> None:
        self._inner.settle()

    def close(self) -> None:
        self._inner.close()


class NotedChannel(TamperingChannel):
    """Notes what another channel is asked, and of which version."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner, lambda name, tensor: tensor)
        self.log: list[str] = []

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        self.log.append(f"begin {version}")
        super().begin(receivers, version=version)

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        self.log.append(f"deliver {version}")
        super().deliver(prepared, receivers, version=version)

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:
        self.log.append(f"finish {version} with {len(reports)}")
        super().finish(receivers, version=version, reports=reports)

    def abandon(self) -> None:
        self.log.append("abandon")
        super().abandon()

    def settle(self) -> None:
        self.log.append("settle")
        super().settle()


class FakeEngine:
    """An engine that loads what it is given (by reference, through `FakeWire`) into its own idea of the layout."""

    def __init__(self, url: str, table: FamilyTable, wire: FakeWire, layout: EngineLayout = ONE_RANK) -> None:
        self.url, self.layout = url, layout
        self.table, self.wire = table, wire
        self.log: list[str] = []
        self.loaded: State = {}
        self.fail_at: str | None = None
        self.drop: str | None = None
        self.versions: set[int] = set()
        """That updates were told to be of."""

    def _did(self, what: str) -> None:
        if self.fail_at == what:
            raise EngineError(f"{self.url} refuses to {what}")
        self.log.append(what)

    def pause(self, mode: str = "abort") -> None:
        self._did(f"pause {mode}")

    def resume(self) -> None:
        self._did("resume")

    def flush_cache(self) -> None:
        self._did("flush")

    def begin_update(self) -> None:
        self._did("begin")

    def end_update(self) -> None:
        self._did("end")

    def update_weights_from_tensor(self, payloads: Sequence[str], **update: Any) -> None:
        assert update["flush_cache"] is False
        assert len(set(payloads)) == self.layout.num_ranks, "ranks must not share a payload"
        self._did("update")
        self.versions.add(update["weight_version"])
        for payload in payloads:
            self.loaded.update(self.wire.open(payload))

    def update_weights_from_disk(self, *, model_path: str, flush_cache: bool, weight_version: int) -> None:
        self._did(f"load {Path(model_path).name}")
        self.versions.add(weight_version)
        index = json.loads((Path(model_path) / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            with safe_open(Path(model_path) / file, "pt") as tensors:
                self.loaded[name] = tensors.get_tensor(name)

    def weight_checksums(self) -> list[RankChecksums]:
        self._did("checksums")
        ranks = []
        for rank in self.layout.ranks():
            tensors = dict(engine_tensors(self.table, self.loaded, layout=self.layout, rank=rank, on_cpu=True))
            tensors.pop(self.drop or "", None)
            ranks.append(RankChecksums(rank, self.layout, {n: digest(t) for n, t in tensors.items()}))
        return ranks


class FakeWire:
    """Keeps buckets by ticket; counts what is alive."""

    def __init__(self) -> None:
        self.tickets: dict[str, tuple[tuple[str, torch.Tensor], ...]] = {}

    def serialize(self, tensors: Any, num: int, *, runs: object = None, only: Any = None) -> tuple[list[str], object]:
        names = [f"ticket-{len(self.tickets) + i}" for i in range(num)]
        self.tickets.update({n: tuple((k, t.clone()) for k, t in tensors if only is None or k in only) for n in names})
        return names, None

    def open(self, ticket: str) -> State:
        return dict(self.tickets[ticket])


class Ranks:
    """Trainer ranks as threads, with what `Peers` needs."""

    def __init__(self, size: int, limit_s: float = 10) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=limit_s)
        self.slots: list[Any] = [None] * size
        self.words = SenderMessages(HashStore(), limit_s=limit_s)  # type: ignore[attr-defined]

    def peers(self, rank: int) -> Peers:
        def exchange(value: Any) -> list[Any]:
            self.slots[rank] = value
            self.barrier.wait()
            out = list(self.slots)
            self.barrier.wait()
            return out

        def share(memory: torch.Tensor, source: int) -> None:
            content = exchange(memory.clone() if rank == source else None)[source]
            memory.copy_(content)

        return Peers(
            rank=rank,
            broadcast=lambda v: exchange(v)[0],
            gather=lambda v: out if (out := exchange(v)) and rank == 0 else None,
            share=share,
            tell=self.words.tell,
            hear=self.words.hear,
        )


class Whole:
    """`Outgoing` of a trainer in which each rank holds all tensors whole."""

    def __init__(
        self,
        table: FamilyTable,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        rank: int = 0,
        senders: Sequence[Sequence[int]] = ((0,),),
    ) -> None:
        """`named_tensors`: (HF name, full tensor) in any order; the sync itself finds missing ones. `senders`: the
        ranks of each stage that take turns.
        """
        self.table, self._rank, self._senders = table, rank, senders
        self._tensors: Mapping[str, torch.Tensor] = dict(named_tensors)
        self._turns: dict[int, tuple[Turn, ...]] = {}
        self.device = next(iter(self._tensors.values())).device

    def turns(self, limit_bytes: int) -> Sequence[Turn]:
        """Raises `WeightSyncError` for a tensor that the table does not name."""
        if limit_bytes in self._turns:
            return self._turns[limit_bytes]
        groups = [
            TensorGroup((self.table.entry_of_hf(name),), (Spec(name, tuple(tensor.shape), tensor.dtype),))
            for name, tensor in self._tensors.items()
        ]
        together = self.table.together
        made = turns_of(groups, senders=self._senders, limit_bytes=limit_bytes, together=together)
        return self._turns.setdefault(limit_bytes, made)

    def fill_bytes(self, turn: Turn) -> int:
        return 0  # nothing is gathered

    @property
    def places(self) -> Any:
        moved = tuple(tensor.data_ptr() for tensor in self._tensors.values())
        return moved if self.device.type == "cuda" else None

    def tensors(self, turn: Turn) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in turn.specs if turn.sender == self._rank else ():
            yield spec.name, self._tensors[spec.name]
