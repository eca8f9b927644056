"""Where metrics go, beside the console and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import Need, always, opt

_TENSORBOARD = Need(lambda s: s.use_tensorboard, "--use-tensorboard")
_WANDB = Need(lambda s: s.use_wandb, "--use-wandb")


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """TensorBoard and Weights & Biases."""

    use_tensorboard: bool = False
    """Write TensorBoard events."""
    tb_project_name: str | None = opt(None, needs=_TENSORBOARD)
    """Folder of the events below TENSORBOARD_DIR or the run folder."""
    tb_experiment_name: str | None = opt(None, needs=_TENSORBOARD)
    """Name of this run in TensorBoard."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = opt(None, needs=_WANDB)
    """Mode of wandb."""
    wandb_dir: str | None = opt(None, needs=_WANDB)
    """Folder of wandb's files. Default: the run folder."""
    wandb_key: str | None = opt(None, secret=True, needs=_WANDB)
    """API key; better in the environment as WANDB_API_KEY."""
    wandb_host: str | None = opt(None, needs=_WANDB)
    """Server of wandb."""
    wandb_team: str | None = opt(None, needs=_WANDB)
    """Entity of wandb."""
    wandb_group: str | None = opt(None, needs=_WANDB)
    """Group of runs."""
    wandb_project: str | None = opt(None, needs=_WANDB)
    """Project of wandb."""
    wandb_random_suffix: bool = opt(True, off_names=("--disable-wandb-random-suffix",), needs=_WANDB, asks=always)
    """Add a random suffix to the run's name."""
    wandb_run_id: str | None = opt(None, needs=_WANDB)
    """Id of the run, to continue one."""
