"""What the weight sync asks of a transport, and the registry of transports.

A `Transport` is the choice of the user: its fields are its settings, `check` says where it works. On every training
rank it opens a `Channel`. A weight sync is a row of turns, each a bucket that one rank sends (`weights.turns`); rank 0
conducts:

    allocate            a sender      for the memory of its buckets, as often as they grow
    begin               a sender      once per weight sync, in its first turn; the conductor before all others
    prepare, deliver    a sender      for each of its buckets, in its turn
    report              a sender      after its last turn
    finish              the conductor with all reports, when all turns are over
    settle or abandon   every rank    when all engines have all, or after a failure anywhere
    close               every rank    once, at the end of the run

Where engines read the memory of the training rank beside them (`everywhere`), each bucket is brought to all ranks:
all of them `prepare` it, and the conductor alone delivers. `prepare` may then be a collective, and must not raise: it
returns what went wrong, so that the collectives of the ranks stay matched. All else may raise. When `finish` returns,
every engine has every tensor; the weight sync then compares digests, whatever the transport did.

One thread calls `begin`, `prepare` and `deliver` of a rank, not always the same one.

A new transport is a new module beside this one. The command line imports it for its settings, so it imports torch
inside functions only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime.core.registry import Registry
from slime.weights.receivers import Peers, Receiver

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime.models.common.table import FamilyTable
    from slime.settings import Args
    from slime.weights.turns import Bucket


class Serialize(Protocol):
    """Makes payloads for engines that can map the memory of tensors."""

    def __call__(
        self,
        named_tensors: Sequence[tuple[str, Any]],
        num_receivers: int,
        *,
        runs: Sequence[tuple[str, int]] | None = None,
        only: Container[str] | None = None,
    ) -> tuple[list[str], object]:
        """A payload per receiver, and the owner of the memory, which must stay alive until all have read it.

        Tensors end to end in memory of `TransportContext.shareable` are not copied. `runs`: as `weights.expert_runs`
        names them. `only`: names of those that these receivers are to load; the memory holds all.
        """
        ...


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
    shareable: Callable[[int, torch.device], Tensor]
    """[bytes] uint8 of memory that engines of this host can map."""
    post_write: Callable[[Path, Sequence[str]], object] | None = None
    """(folder, addresses of the engines): called by the disk transport when a version is whole, before engines load
    it; the user's `--custom-update-weight-post-write-path`."""


class Channel(ABC):
    """One training rank's end of a transport; what it does not need to do, it leaves undefined.

    `receivers` are the engines, the same in every call of one weight sync.
    """

    everywhere = False
    """Whether every training rank has to have each bucket."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A sender: [num_bytes] uint8 of memory that buckets are filled in and sent from."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """A sender: connects to engines that are new to it. Engines are paused, with `abort` also drained."""

    @abstractmethod
    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """A sender, or every rank: makes the bucket ready to travel."""

    @abstractmethod
    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """A sender, or the conductor: hands what its `prepare` returned to all engines, and returns once they have it;
        the memory of the bucket is filled again then."""

    def report(self) -> Any:
        """A sender: what `finish` has to know of what it sent; picklable."""
        return None

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:  # noqa: B027
        """The conductor: after the last turn. `reports`: of all senders, in the order of their ranks."""

    def abandon(self) -> None:  # noqa: B027
        """Every rank: the weight sync failed; forgets half-sent state, so that another one can start afresh."""

    def settle(self) -> None:  # noqa: B027
        """Every rank: all engines have everything; frees what was kept for them."""

    def close(self) -> None:  # noqa: B027
        """Every rank: the run ends."""

    @property
    def heals(self) -> bool:
        """The conductor: whether what failed last may succeed in another way (not as changes), sent once more."""
        return False

    def costs(self) -> Mapping[str, float]:
        """The conductor: metrics of the last weight sync beside those of every transport, `update_weights_*`."""
        return {}


class Transport(ABC):
    """One way of sending weights, and its settings."""

    name: ClassVar[str]
    """As in `--update-weight-transport`; `TRANSPORTS.register` sets it."""
    groups_engines: ClassVar[bool] = False
    """Whether engines are in one process group with their sender. One that comes back would need a group of its own to
    be served at once, and the next weight sync another one for all; so it waits for that one."""

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
