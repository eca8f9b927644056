"""The contract and the registry of weight transports.

The user chooses a `Transport`. Its fields are its settings, and `check` says whether it works in this run. It opens a
`Channel` on every training rank. A weight sync is a sequence of turns. In each turn, one rank sends one bucket
(`weights.send_plan`). Rank 0 conducts. The calls of a channel, in order:

    allocate            a sender       when its buckets need more memory
    begin               a sender       once per weight sync, in its first turn; the conductor first of all
    prepare, deliver    a sender       for each of its buckets, in its turn
    report              a sender       after its last turn
    finish              the conductor  with all reports, after all turns
    settle or abandon   every rank     when all engines have all tensors, or after a failure anywhere
    close               every rank     once, at the end of the run

If engines read the memory of the training rank on their GPU (`everywhere`), each bucket is copied to all ranks. All
ranks call `prepare`, and only the conductor delivers. `prepare` may then be a collective. In that case it must return
its error instead of raising it, so that the ranks stay in the same collectives. All other methods may raise. When
`finish` returns, every engine has every tensor. The weight sync then compares digests, for every transport.

The calls of `begin`, `prepare` and `deliver` on a rank never overlap, but may come from different threads.

A new transport is a new module in this package. The command line imports it for its settings, so it may import torch
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
    from slime.weights.send_plan import Bucket


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
        """Returns a payload per receiver, and the owner of the memory, which must live until all have read it.

        Tensors that are adjacent in memory from `TransportContext.shareable` are not copied. `runs`: the result of
        `weights.expert_runs.named_runs`. `only`: names of the tensors to load; the memory contains all tensors.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """The training rank from which a channel sends, and the resources that the channel uses."""

    peers: Peers
    device: str
    """The device of the trainer's tensors: "cpu" or "cuda"."""
    gpu_id: str | None
    """This rank's GPU, named as in `Receiver.gpu_ids`; None on a CPU."""
    training_gpus: frozenset[str] = frozenset()
    """GPUs of all training ranks, named like `gpu_id`; empty on a CPU."""
    address: str
    """Address of this host for engines."""
    timeout_s: float
    """Time limit for each wait for engines."""
    table: FamilyTable
    hf_checkpoint: Path
    """The folder with config.json and tokenizer of the model."""
    serialize: Serialize
    shareable: Callable[[int, torch.device], Tensor]
    """Allocates memory that engines on this host can map, [bytes] uint8."""
    post_write: Callable[[Path, Sequence[str]], object] | None = None
    """The user's `--custom-update-weight-post-write-path`, called with (folder, addresses of the engines) when a
    version on disk is complete, before engines load it."""


class Channel(ABC):
    """A transport on one training rank. `receivers` are the same in all calls of one weight sync."""

    everywhere = False
    """Whether every training rank needs each bucket."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Sender: returns memory for buckets, [num_bytes] uint8."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """Sender: connects to new engines. All engines are paused, and drained if the pause mode is `abort`."""

    @abstractmethod
    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """Sender, or every rank (`everywhere`): prepares the bucket for `deliver`."""

    @abstractmethod
    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """Sender, or the conductor (`everywhere`): sends the prepared bucket to all engines. Returns once the engines
        have the bucket, because its memory is reused afterwards."""

    def report(self) -> Any:
        """Sender: returns picklable facts about its buckets for `finish`."""
        return None

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:  # noqa: B027
        """Conductor: completes the transfer after the last turn. `reports`: reports of all senders, in rank order."""

    def abandon(self) -> None:  # noqa: B027
        """Every rank: drops the state of a failed weight sync, so that the next one can start."""

    def settle(self) -> None:  # noqa: B027
        """Every rank: frees resources kept for engines, after all engines have all tensors."""

    def close(self) -> None:  # noqa: B027
        """Every rank: frees everything at the end of the run."""

    @property
    def heals(self) -> bool:
        """Conductor: whether a failed sync may succeed if it is repeated with full weights instead of deltas."""
        return False

    def costs(self) -> Mapping[str, float]:
        """Conductor: returns this transport's own metrics of the last weight sync, `update_weights_*`."""
        return {}


class Transport(ABC):
    """A way to send weights, with its settings."""

    name: ClassVar[str]
    """The value of `--update-weight-transport`; `TRANSPORTS.register` sets it."""
    groups_engines: ClassVar[bool] = False
    """Whether engines share a process group with their sender. A restarted engine then waits for the next weight sync,
    because sending to this engine alone would need its own group first, and later a new group for all engines."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if the transport cannot work on this device or placement, else None. Called at the
        start of a run."""
        return None

    @abstractmethod
    def open(self, context: TransportContext) -> Channel:
        """Returns the channel of one training rank. Every rank calls this once; not a collective."""


TRANSPORTS: Registry[Transport] = Registry(
    "weight transport",
    flag="--update-weight-transport",
    package="slime.weights.transports",
    contract=Transport,
)
