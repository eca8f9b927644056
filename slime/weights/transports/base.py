"""The interface and the registry of weight transports.

The user selects a `Transport`. Its fields are its settings, `check` says whether it works in this run, and `open`
returns a `Channel` on every training rank. A weight sync is a sequence of turns, in each of which one rank sends one
bucket (`weights.send_plan`). Rank 0 is the conductor. A channel's methods are called in this order:

    allocate            a sender       when its buckets need more memory
    begin               a sender       once per weight sync, in its first turn; on the conductor before all others
    announce            a sender       before the first of several turns in a row, unless `everywhere`
    prepare, deliver    a sender       for each of its buckets, in turn
    report              a sender       after its last turn
    finish              the conductor  after all turns, with all reports
    settle or abandon   every rank     once all engines have all tensors, or after a failure on any rank
    close               every rank     once, at the end of the run

If each engine reads from the training rank on its own GPU (`everywhere`), every bucket is copied to all ranks. All
ranks then call `prepare`, and only the conductor calls `deliver`. Here `prepare` can be a collective, in which case it
must return its error instead of raising it, so that the ranks stay in step. All other methods may raise. When `finish`
returns, every engine has every tensor. The weight sync then compares digests, whatever the transport.

On a rank, calls to `begin`, `announce`, `prepare` and `deliver` never overlap but can come from different threads.

To add a transport, add a module to this package. The command line imports it to read its settings, so import torch only
inside functions.
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
    from slime.weights.send_plan import Bucket, Turn


class Serialize(Protocol):
    """Creates payloads for engines that can map the memory of tensors."""

    def __call__(
        self,
        named_tensors: Sequence[tuple[str, Any]],
        num_receivers: int,
        *,
        runs: Sequence[tuple[str, int]] | None = None,
        only: Container[str] | None = None,
    ) -> tuple[list[str], object]:
        """Returns one payload per receiver, and an object that owns the memory. Keep it until all receivers have read
        it.

        Tensors that are adjacent in memory from `TransportContext.shareable` are not copied. `runs`: the result of
        `weights.expert_runs.named_runs`. `only`: names of the tensors to load, although the memory contains all of
        them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """The training rank that a channel belongs to, and the resources that the channel uses."""

    peers: Peers
    device: str
    """The device of the trainer's tensors: "cpu" or "cuda"."""
    gpu_id: str | None
    """This rank's GPU, in the format of `Receiver.gpu_ids`; None on a CPU."""
    training_gpus: frozenset[str] = frozenset()
    """The GPUs of all training ranks; empty on a CPU."""
    address: str
    """This host's address, as seen by the engines."""
    timeout_s: float
    """Timeout of each wait for engines."""
    table: FamilyTable
    hf_checkpoint: Path
    """The folder with the model's config.json and tokenizer."""
    serialize: Serialize
    shareable: Callable[[int, torch.device], Tensor]
    """Allocates memory that engines on this host can map, [bytes] uint8."""
    post_write: Callable[[Path, Sequence[str]], object] | None = None
    """The user's `--custom-update-weight-post-write-path`. Called with (folder, engine addresses) once a version is
    complete on disk and before engines load it."""


class Channel(ABC):
    """A transport on one training rank. `receivers` is the same in all calls during one weight sync."""

    everywhere = False
    """Whether every training rank needs each bucket."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Sender: returns memory for buckets, [num_bytes] uint8."""
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """Sender: connects to new engines. All engines are paused, and also drained if the pause mode is `abort`."""

    def announce(self, turns: Sequence[Turn], receivers: Sequence[Receiver], *, version: int) -> None:  # noqa: B027
        """Sender: says which buckets it will deliver next, before any other rank delivers one. If a later bucket cannot
        be filled, `abandon` follows instead."""

    @abstractmethod
    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """Sender, or every rank if `everywhere`: prepares the bucket for `deliver`."""

    @abstractmethod
    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """Sender, or the conductor if `everywhere`: sends the prepared bucket to all engines. Must not return before
        GPU work that the current stream does later may overwrite the bucket. After the last announced bucket, all
        engines must have all of them."""

    def report(self) -> Any:
        """Sender: returns picklable information about its buckets for `finish`."""
        return None

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:  # noqa: B027
        """Conductor: completes the transfer after the last turn. `reports`: all senders' reports, in rank order."""

    def abandon(self) -> None:  # noqa: B027
        """Every rank: discards the state of a failed weight sync so that the next one can start."""

    def settle(self) -> None:  # noqa: B027
        """Every rank: releases resources held for engines, once all engines have all tensors."""

    def close(self) -> None:  # noqa: B027
        """Every rank: releases everything at the end of the run."""

    @property
    def heals(self) -> bool:
        """Conductor: whether a failed sync is worth retrying with full weights instead of deltas."""
        return False

    def costs(self) -> Mapping[str, float]:
        """Conductor: returns transport-specific metrics (`update_weights_*`) of the last weight sync."""
        return {}


class Transport(ABC):
    """A method of sending weights, with its settings."""

    name: ClassVar[str]
    """The value of `--update-weight-transport`, set by `TRANSPORTS.register`."""
    groups_engines: ClassVar[bool] = False
    """Whether engines are in a process group with their sender. If so, a restarted engine gets its weights from the
    next weight sync. Sending to it earlier would take a separate group, and later a new group for all engines."""

    def check(self, args: Args) -> str | None:
        """Returns an error message if the transport does not support this device or placement, else None. Called when a
        run starts."""
        return None

    @abstractmethod
    def open(self, context: TransportContext) -> Channel:
        """Returns a channel for one training rank. Every rank calls it once, and once more with `--eval-fleet`, for the
        engines of the fleet. Not a collective."""


TRANSPORTS: Registry[Transport] = Registry(
    "weight transport",
    flag="--update-weight-transport",
    package="slime.weights.transports",
    contract=Transport,
)
