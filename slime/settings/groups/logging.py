"""Where metrics go, beside the console and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import opt


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """TensorBoard and Weights & Biases."""

    use_tensorboard: bool = False
    """Write TensorBoard events."""
    tb_project_name: str | None = None
    """Folder of the events below TENSORBOARD_DIR or the run folder."""
    tb_experiment_name: str | None = None
    """Name of this run in TensorBoard."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of wandb."""
    wandb_dir: str | None = None
    """Folder of wandb's files. Default: the run folder."""
    wandb_key: str | None = opt(None, secret=True)
    """API key; better in the environment as WANDB_API_KEY."""
    wandb_host: str | None = None
    """Server of wandb."""
    wandb_team: str | None = None
    """Entity of wandb."""
    wandb_group: str | None = None
    """Group of runs."""
    wandb_project: str | None = None
    """Project of wandb."""
    wandb_random_suffix: bool = opt(True, off_names=("--disable-wandb-random-suffix",))
    """Add a random suffix to the run's name."""
    wandb_run_id: str | None = None
    """Id of the run, to continue one."""
