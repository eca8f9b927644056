"""How new weights reach the engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.settings.fields import UNSET, derived, opt
from slime.settings.group import Rule

if TYPE_CHECKING:
    from slime.settings.args import Args


def _separate(s: Any) -> bool:
    return s.device == "cuda" and not s.colocate


def _one_name(value: Any) -> Any:
    return {"auto": UNSET, "nccl": "distributed"}.get(value, value)


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """Weight sync. Every sync is verified; there is no switch for that."""

    update_weight_transport: str = derived(
        lambda s: "distributed" if _separate(s) else "tensor",
        lambda s: "trainer and engines have GPUs of their own" if _separate(s) else "trainer and engines share memory",
        choices=("auto", "tensor", "distributed", "nccl", "disk"),
        canonical=_one_name,
    )
    """tensor: shared memory, on cuda only under --colocate; distributed (alias nccl): a process group, gloo or NCCL;
    disk: a shared folder. auto: distributed on cuda without --colocate, else tensor."""
    update_weight_disk_dir: str | None = derived(
        lambda s: str(Path(s.run_dir) / "weights") if s.update_weight_transport == "disk" else None,
        "disk transport, below run_dir",
    )
    """Folder for the disk transport. Default: <run_dir>/weights."""
    update_weight_disk_keep_files: bool = False
    """Keep the folders of synced weights after the engines loaded them."""
    update_weight_buffer_size: int = opt(512 * 1024 * 1024, ge=1)
    """Bytes per bucket."""
    weight_sync_timeout_s: float = opt(300.0, gt=0)
    """Limit of one weight sync, in seconds."""


def tensor_transport_needs_shared_gpus(args: Args) -> str | None:
    """CUDA IPC hands a tensor over on the GPU that holds it."""
    separate = args.device == "cuda" and not args.colocate and not args.debug_train_only and not args.debug_rollout_only
    if args.update_weight_transport != "tensor" or not separate:
        return None
    return (
        "got --update-weight-transport tensor on cuda without --colocate: a tensor is handed over on its own GPU, "
        "where no engine is; use distributed or disk"
    )


def nccl_needs_separate_gpus(args: Args) -> str | None:
    """NCCL refuses two ranks of one group on one GPU."""
    shares = args.colocate and args.device == "cuda" and args.update_weight_transport == "distributed"
    if not shares:
        return None
    return (
        "got --update-weight-transport distributed with --colocate on cuda: NCCL cannot have two ranks on one GPU; "
        "use tensor or disk"
    )


RULES: tuple[Rule, ...] = (tensor_transport_needs_shared_gpus, nccl_needs_separate_gpus)
