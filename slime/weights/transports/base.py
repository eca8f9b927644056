"""What the weight sync asks of a transport, and the registry of transports.

A `Transport` is the choice of the user: its fields are its settings, `check` says where it works. On every training
rank it opens a `Channel`, which is called for every bucket in the same order on all ranks:

    begin                   sender       once per weight sync
    prepare, deliver        every rank prepares a bucket, the sender delivers it; for every bucket
    finish                  sender       after the last bucket
    settle or abandon       every rank   when all engines have all, or after a failure anywhere
    close                   every rank   once, at the end of the run

`prepare` may be a collective among training ranks and must not raise (it returns what went wrong, so that the
collectives of the ranks stay matched); `begin`, `deliver` and `finish` run on the sender alone and may raise. When
`finish` returns, every engine has every tensor; the weight sync then compares digests, whatever the transport did.

A new transport is a new module beside this one. The command line imports it for its settings, so it imports torch
inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime.core.registry import Registry
from slime.weights.receivers import Peers, Receiver

if TYPE_CHECKING:
    from slime.models.common.table import FamilyTable
    from slime.settings import Args
    from slime.weights.buckets import Bucket

Serialize = Callable[
    [Sequence[tuple[str, Any]], int, object, Sequence[tuple[str, int]] | None], tuple[list[str], object]
]
"""(named tensors, number of receivers, an owner to reuse or None, runs or None) -> a payload per receiver, and the
owner of the memory, which must stay alive until all have read it. `runs`: as `weights.expert_runs` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """The training rank that a channel sends from."""

    peers: Peers
    """All training ranks."""
    device: str
    """Of the trainer's tensors: "cpu" or "cuda"."""
    gpu_id: str | None
    """This rank's GPU, in the naming of `Receiver.gpu_ids`; None on a CPU."""
    training_gpus: frozenset[str] = frozenset()
    """GPUs of all training ranks, in the same naming; empty on a CPU."""
    address: str
    """This host, as engines reach it."""
    timeout_s: float
    """Limit of each wait for engines, in seconds."""
    table: FamilyTable
    """Of the model that is sent."""
    hf_checkpoint: Path
    """The folder whose config.json and tokenizer belong to the weights."""
    serialize: Serialize
    """Makes payloads that engines of this host read."""
    rank: int = 0
    """This training rank's number; names of its files have it."""
    post_write: Callable[[Path, Sequence[str]], object] | None = None
    """(folder, addresses of the engines): called by the disk transport when a version is whole, before engines load
    it; the user's `--custom-update-weight-post-write-path`."""


class Channel(ABC):
    """One training rank's end of a transport; what it does not need to do, it leaves undefined.

    `receivers` are the engines, the same in every call of one weight sync.
    """

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """Sender: connects to engines that are new to it. Engines are paused, with `abort` also drained."""

    @abstractmethod
    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """Every rank: makes the bucket ready to travel. Returns an exception instead of raising one."""

    @abstractmethod
    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """Sender: hands to all engines what its `prepare` returned, and returns once they have it."""

    def finish(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """Sender: after the last bucket."""

    def abandon(self) -> None:  # noqa: B027
        """Every rank: the weight sync failed; forgets half-sent state, so that another one can start afresh."""

    def settle(self) -> None:  # noqa: B027
        """Every rank: all engines have everything; frees what was kept for them."""

    def close(self) -> None:  # noqa: B027
        """Every rank: the run ends."""

    @property
    def heals(self) -> bool:
        """Sender: whether what failed last may succeed in another way (whole, not as changes), sent once more."""
        return False

    def costs(self) -> Mapping[str, float]:
        """Sender: metrics of the last weight sync beside those of every transport, `update_weights_*`."""
        return {}


class Transport(ABC):
    """One way of sending weights, and its settings."""

    name: ClassVar[str]
    """As in `--update-weight-transport`; `TRANSPORTS.register` sets it."""

    def check(self, args: Args) -> str | None:
        """What is wrong with this device or placement (got / because / do); None if nothing. Asked at the start."""
        return None

    @abstractmethod
    def open(self, context: TransportContext) -> Channel:
        """The end of it on one training rank. Every rank calls it once; no collective."""


TRANSPORTS: Registry[Transport] = Registry(
    "weight transport",
    flag="--update-weight-transport",
    package="slime.weights.transports",
    contract=Transport,
)
