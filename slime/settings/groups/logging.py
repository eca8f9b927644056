"""What is logged beside the metrics, and where it goes beside the console and the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.settings.fields import Need, always, opt
from slime.settings.ranges import COUNT_OR_NONE, STEPS_OR_NONE

_TENSORBOARD = Need(lambda s: s.use_tensorboard, "--use-tensorboard")
_WANDB = Need(lambda s: s.use_wandb, "--use-wandb")
_SAMPLES = Need(lambda s: s.log_samples > 0, "--log-samples")


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Samples for people to read, TensorBoard, Weights & Biases."""

    log_samples: int = opt(3, within=COUNT_OR_NONE)
    """Samples of each step, and of each dataset of an evaluation, that samples.jsonl keeps: the best, the worst, others
    at random. 0: none."""
    log_samples_max_chars: int = opt(4000, needs=_SAMPLES, ge=10, le=100_000_000)
    """Characters of a prompt or a response that are kept; the middle of a longer one is left out."""
    log_samples_interval: int | None = opt(None, needs=_SAMPLES, within=STEPS_OR_NONE)
    """Steps between those whose best and worst sample the console shows; 0: never. Default: after steps 1, 2, 4, 8 and
    so on."""

    log_passrate: bool = False
    """Log pass@k of each step's prompts, for the powers of two up to n_samples_per_prompt; a reward of 1 passes."""
    log_correct_samples: bool = False
    """Log how long the samples with a reward of 1 are."""
    log_reward_category: str | None = None
    """Entry of a dict reward that says what kind of answer, or error, it was; the share of each is logged."""

    use_tensorboard: bool = False
    """Write TensorBoard events."""
    tensorboard_dir: str | None = opt(None, needs=_TENSORBOARD)
    """Folder of the events of many runs, as TENSORBOARD_DIR, before which it goes. Default: that, or the run folder."""
    tb_project_name: str | None = opt(None, needs=_TENSORBOARD)
    """Folder of the events below --tensorboard-dir, TENSORBOARD_DIR or the run folder."""
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
