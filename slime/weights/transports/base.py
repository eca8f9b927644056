"""The contract and the registry of weight transports.

A `Transport` is the user's choice: its fields are its settings, `check` says where it works. On every training rank it
opens a `Channel`. A weight sync is a sequence of turns, each a bucket that one rank sends (`weights.turns`); rank 0
conducts:

    allocate            a sender       memory for its buckets, whenever they grow
    begin               a sender       once per weight sync, in its first turn; the conductor before all others
    prepare, deliver    a sender       for each of its buckets, in its turn
    report              a sender       after its last turn
    finish              the conductor  with all reports, after all turns
    settle or abandon   every rank     when all engines have all tensors, or after a failure anywhere
    close               every rank     once, at the end of the run

If engines read the memory of the training rank on their GPU (`everywhere`), each bucket is copied to all ranks. All of
them `prepare` it, and only the conductor delivers. `prepare` may then be a collective and must not raise: it returns
the error, so that the ranks stay in the same collectives. Everything else may raise. When `finish` returns, every
engine has every tensor; the weight sync then compares digests, whatever the transport did.

One thread at a time calls `begin`, `prepare` and `deliver` of a rank, not always the same one.

A new transport is a new module beside this one. The command line imports it for its settings, so it imports torch
only inside functions.
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
        """A payload per receiver, and the owner of the memory, which must live until all have read it.

        Tensors end to end in memory of `TransportContext.shareable` are not copied. `runs`: of
        `weights.expert_runs.named_runs`. `only`: names that these receivers load; the memory holds all tensors.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """The training rank that a channel sends from."""

    peers: Peers
    device: str
    """The device of the trainer's tensors: "cpu" or "cuda"."""
    gpu_id: str | None
    """This rank's GPU, named as in `Receiver.gpu_ids`; None on a CPU."""
    training_gpus: frozenset[str] = frozenset()
    """GPUs of all training ranks, named in the same way; empty on a CPU."""
    address: str
    """This host, as engines reach it."""
    timeout_s: float
    """Limit of each wait for engines."""
    table: FamilyTable
    hf_checkpoint: Path
    """The folder with config.json and tokenizer of the model."""
    serialize: Serialize
    shareable: Callable[[int, torch.device], Tensor]
    """[bytes] uint8 of memory that engines on this host can map."""
    post_write: Callable[[Path, Sequence[str]], object] | None = None
    """(folder, addresses of the engines): the user's `--custom-update-weight-post-write-path`, called when a version on
    disk is complete, before engines load it."""


class Channel(ABC):
    """One training rank's end of a transport. `receivers` are the same in all calls of one weight sync."""

    everywhere = False
    """Whether every training rank needs each bucket."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A sender: [num_bytes] uint8 of memory for buckets."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """A sender: connects to new engines. Engines are paused, with `abort` also drained."""

    @abstractmethod
    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """A sender, or every rank: prepares the bucket for `deliver`."""

    @abstractmethod
    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """A sender, or the conductor: gives what `prepare` returned to all engines. Returns once they have it, because
        the memory of the bucket is then reused."""

    def report(self) -> Any:
        """A sender: what `finish` must know about its buckets; picklable."""
        return None

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:  # noqa: B027
        """The conductor: after the last turn. `reports`: of all senders, in rank order."""

    def abandon(self) -> None:  # noqa: B027
        """Every rank: the weight sync failed. Drops half-sent state, so that another one can start."""

    def settle(self) -> None:  # noqa: B027
        """Every rank: all engines have all tensors. Frees what was kept for them."""

    def close(self) -> None:  # noqa: B027
        """Every rank: the run ends."""

    @property
    def heals(self) -> bool:
        """The conductor: whether the failed sync may succeed if it is sent again in full, not as deltas."""
        return False

    def costs(self) -> Mapping[str, float]:
        """The conductor: this transport's own metrics of the last weight sync, `update_weights_*`."""
        return {}


class Transport(ABC):
    """One way of sending weights, and its settings."""

    name: ClassVar[str]
    """The value of `--update-weight-transport`; `TRANSPORTS.register` sets it."""
    groups_engines: ClassVar[bool] = False
    """Whether engines share a process group with their sender. A restarted engine then waits for the next weight sync:
    to serve it at once would need one more group just for it, and later another one for all engines."""

    def check(self, args: Args) -> str | None:
        """Why the transport cannot work on this device or placement, as an error message; None if it can. Asked at the
        start."""
        return None

    @abstractmethod
    def open(self, context: TransportContext) -> Channel:
        """The channel of one training rank. Every rank calls it once; not a collective."""


TRANSPORTS: Registry[Transport] = Registry(
    "weight transport",
    flag="--update-weight-transport",
    package="slime.weights.transports",
    contract=Transport,
)
