"""How new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import derived


@dataclass(frozen=True, kw_only=True)
class WeightSyncArgs:
    """Weight sync. Every sync is verified; there is no switch for that."""

    update_weight_transport: str = derived(choices=("auto", "tensor", "distributed", "nccl", "disk"))
    """tensor: shared memory, on cuda only under --colocate; distributed (alias nccl): a process group, gloo or NCCL;
    disk: a shared folder. auto: distributed on cuda without --colocate, else tensor."""
    update_weight_disk_dir: str | None = derived()
    """Folder for the disk transport. Default: <run_dir>/weights."""
    update_weight_disk_keep_files: bool = False
    """Keep published weight folders after the engines loaded them."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Bytes per bucket."""
    weight_sync_timeout_s: float = 300.0
    """Limit of one weight sync, in seconds."""
