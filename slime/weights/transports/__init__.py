"""Three ways for a bucket of tensors to reach engines: shared memory, a process group, files."""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError
from slime.weights.buckets import Tamper
from slime.weights.targets import Peers
from slime.weights.transports.base import Transport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.distributed import DistributedTransport
from slime.weights.transports.tensor import Serialize, TensorTransport

__all__ = ["DiskTransport", "DistributedTransport", "TensorTransport", "Transport", "make_transport"]


def make_transport(
    name: str,
    *,
    peers: Peers,
    device: str,
    serialize: Serialize,
    timeout_s: float,
    hf_checkpoint: Path,
    gpu_id: str | None = None,
    master_address: str = "127.0.0.1",
    disk_dir: Path | None = None,
    keep_disk: bool = False,
    tamper: Tamper | None = None,
) -> Transport:
    """The transport that `--update-weight-transport` names ("auto" is resolved by the caller, who knows the placement).

    `serialize` is `slime.serving.wire.serialize_bucket`; `device` is "cpu" or "cuda"; `gpu_id` identifies this rank's
    GPU (tensor on CUDA); `disk_dir` is needed for disk. Raises `ConfigError` for an unknown name or a missing setting.
    """
    if name == "tensor":
        if device == "cuda" and gpu_id is None:
            raise ConfigError("got --update-weight-transport tensor on CUDA without the id of this rank's GPU")
        return TensorTransport(serialize, peers, gpu_id=gpu_id if device == "cuda" else None, tamper=tamper)
    if name in ("distributed", "nccl"):
        backend = "nccl" if device == "cuda" else "gloo"
        return DistributedTransport(
            peers, backend=backend, timeout_s=timeout_s, master_address=master_address, tamper=tamper
        )
    if name == "disk":
        if disk_dir is None:
            raise ConfigError("got --update-weight-transport disk without a folder; add --update-weight-disk-dir")
        return DiskTransport(disk_dir, hf_checkpoint, peers, keep=keep_disk, tamper=tamper)
    raise ConfigError(f"got --update-weight-transport {name!r}; choose tensor, distributed or disk")
