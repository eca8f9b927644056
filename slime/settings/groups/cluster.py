"""Where things run: device, number of training and inference slots, sharing, the run folder."""

from __future__ import annotations

from dataclasses import dataclass

from slime.settings.fields import derived, internal, opt


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """Placement of training and inference. On a CPU a "GPU" is a logical slot."""

    device: str = derived(choices=("auto", "cpu", "cuda"))
    """Where training and inference compute; auto means cuda if this machine has an NVIDIA device, else cpu."""
    run_id: str = internal()
    """Id of this start of the run: names its processes, temporary files and, without --run-dir, its folder."""
    run_dir: str = derived()
    """Folder of this run: resolved settings, metrics, logs, report. Default runs/<run id>."""
    actor_num_nodes: int = 1
    """Number of training nodes."""
    actor_num_gpus_per_node: int = 1
    """Training GPUs (on a CPU: ranks) per node."""
    rollout_num_gpus: int = derived()
    """Inference GPUs in all. Default: the training GPUs under --colocate, else those of one engine."""
    rollout_num_gpus_per_engine: int = 1
    """GPUs of one SGLang server (its tensor-parallel size)."""
    colocate: bool = False
    """Training and inference share the same GPUs and take turns."""
    offload: bool = False
    """Same as --offload-train --offload-rollout."""
    offload_train: bool = derived()
    """Training leaves the GPU while inference runs. Default: on under --colocate on cuda."""
    offload_rollout: bool = derived()
    """Inference leaves the GPU while training runs. Default: on under --colocate on cuda."""
    train_env_vars: dict[str, str] = opt({})  # noqa: RUF009
    """Extra environment variables of the training processes, a JSON object."""
    distributed_timeout_minutes: int = 10
    """Limit of every collective of the training ranks, in minutes."""
