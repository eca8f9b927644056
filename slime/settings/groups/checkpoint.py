"""What is loaded and saved, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointArgs:
    """Checkpoints hold everything needed to resume: weights, optimizer, RNG, data cursor, buffer, version."""

    load: str | None = None
    """Checkpoint folder to resume from. If it is also --save and still empty, the run starts from --hf-checkpoint."""
    ckpt_step: int | None = None
    """The step to load of --load. Default: the latest."""
    save: str | None = None
    """Checkpoint folder."""
    save_interval: int | None = None
    """Steps between checkpoints; the last step is always saved when --save is given."""
    async_save: bool = False
    """Copy the state to host memory and write it while training goes on; the next save waits for the one before."""
    save_keep_last: int | None = None
    """Checkpoints to keep below --save; older ones are removed after a new one is complete. Default: all."""
    save_retain_interval: int | None = None
    """Of those that --save-keep-last would remove, keep each that ends a multiple of this many steps."""
    save_hf: str | None = None
    """Also save in HF format here; {rollout_id} in the path is replaced."""
    no_save_optim: bool = False
    """Leave optimizer, scheduler and RNG out of checkpoints (resuming then needs --no-load-optim or --finetune)."""
    no_load_optim: bool = False
    """Start with a fresh optimizer."""
    no_load_rng: bool = False
    """Start with a fresh RNG."""
    finetune: bool = False
    """Take only the weights of --load and start at step 0."""
