"""A toy: tensors go to engines in parcels that each hold a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.fields import opt
from slime.weights.receivers import Receiver
from slime.weights.transports import TRANSPORTS, Channel, Transport, TransportContext

if TYPE_CHECKING:
    from slime.weights.send_plan import Bucket


@TRANSPORTS.register("parcel")
@dataclass(frozen=True, kw_only=True)
class ParcelTransport(Transport):
    """For one training rank beside its engines."""

    tensors_per_parcel: int = opt(3, gt=0)
    """Tensors that the parcel transport sends together."""

    def open(self, context: TransportContext) -> Channel:
        """See `Transport`."""
        return ParcelChannel(context, self.tensors_per_parcel)


class ParcelChannel(Channel):
    """The sender's end."""

    def __init__(self, context: TransportContext, size: int) -> None:
        self._context, self._size, self._alive = context, size, list[object]()

    def prepare(self, bucket: Bucket, receivers: Sequence[Receiver]) -> Any:
        """One payload for each engine rank and parcel."""
        num = sum(receiver.control.layout.num_ranks for receiver in receivers)
        parcels = []
        for start in range(0, len(bucket.tensors), self._size):
            payloads, owner = self._context.serialize(bucket.tensors[start : start + self._size], num)
            self._alive.append(owner)
            parcels.append(payloads)
        return parcels

    def deliver(self, prepared: Any, receivers: Sequence[Receiver], *, version: int) -> None:
        """In order, to one engine after the other."""
        for payloads in prepared:
            for receiver in receivers:
                own = [payloads.pop() for _ in range(receiver.control.layout.num_ranks)]
                receiver.control.update_weights_from_tensor(
                    own, load_format="flattened_bucket", flush_cache=False, weight_version=version
                )

    def settle(self) -> None:
        """All parcels were opened."""
        self._alive.clear()
