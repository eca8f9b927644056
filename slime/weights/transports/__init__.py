"""Three ways for a bucket of tensors to reach engines: shared memory, a process group, files."""

from __future__ import annotations

from slime.weights.transports.base import Transport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.tensor import TensorTransport

__all__ = ["DiskTransport", "DistributedTransport", "TensorTransport", "Transport"]
