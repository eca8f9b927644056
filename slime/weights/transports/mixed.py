"""The mixed transport, for runs in which only some of the engines share GPUs with training.

Engines that share all of their GPUs with training map the trainer's memory (`tensor`). All other engines, even those
that share some GPUs, receive broadcasts (`distributed`). Each bucket is sent to the two kinds of engines one after the
other. Every bucket is copied to all training ranks, because `tensor` requires it, but only the conductor broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.conditions import policy_has_own_gpus, policy_shares_gpus
from slime.weights.receivers import Receiver
from slime.weights.transports.base import TRANSPORTS, Channel, Transport, TransportContext
from slime.weights.transports.distributed import DistributedChannel
from slime.weights.transports.tensor import TensorChannel

if TYPE_CHECKING:
    from slime.settings import Args
    from slime.weights.send_plan import Bucket


@TRANSPORTS.register("mixed")
@dataclass(frozen=True, kw_only=True)
class MixedTransport(Transport):
    """Shared memory plus broadcasts. The default on cuda if --colocate is set and rollout has more GPUs than
    training."""

    groups_engines = True

    def check(self, args: Args) -> str | None:
        alone = args.debug_train_only or args.debug_rollout_only
        if alone or (args.device == "cuda" and policy_shares_gpus(args) and policy_has_own_gpus(args)):
            return None
        return (
            "--update-weight-transport mixed requires policy engines both on training GPUs and on other GPUs (cuda, "
            "--colocate, and more --rollout-num-gpus than training has); use tensor, distributed or disk"
        )

    def open(self, context: TransportContext) -> MixedChannel:
        return MixedChannel(TensorChannel(context), DistributedChannel(context), context.training_gpus)


class MixedChannel(Channel):
    """Two channels, each of which serves some of the engines. A channel without engines is never called."""

    everywhere = True

    def __init__(self, shared: Channel, apart: Channel, training_gpus: frozenset[str]) -> None:
        """`shared` serves engines that run only on `training_gpus`; `apart` serves all others."""
        self._shared, self._apart, self._training_gpus = shared, apart, training_gpus

    def _ways(self, receivers: Sequence[Receiver]) -> list[tuple[Channel, list[Receiver]]]:
        shared = [one for one in receivers if set(one.gpu_ids) <= self._training_gpus]
        apart = [one for one in receivers if one not in shared]
        return [(way, own) for way, own in ((self._shared, shared), (self._apart, apart)) if own]

    def begin(self, receivers: Sequence[Receiver], *, version: int) -> None:
        for way, own in self._ways(receivers):
            way.begin(own, version=version)

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        return [way.prepare(bucket, own) for way, own in self._ways(receivers)]

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        for (way, own), part in zip(self._ways(receivers), prepared, strict=True):
            way.deliver(part, own, version=version)

    def finish(self, receivers: Sequence[Receiver], *, version: int, reports: Sequence[Any]) -> None:
        for way, own in self._ways(receivers):
            way.finish(own, version=version, reports=[None for _ in reports])

    def costs(self) -> Mapping[str, float]:
        return self._apart.costs()

    def abandon(self) -> None:
        self._shared.abandon()
        self._apart.abandon()

    def settle(self) -> None:
        self._shared.settle()
        self._apart.settle()

    def close(self) -> None:
        self._shared.close()
        self._apart.close()
