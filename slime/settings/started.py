"""A run that a program starts: the command `slime train` with the words of a launch script."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

from slime.core.errors import ConfigError

_LOOPS = {"train.py": "train", "train_async.py": "train-async"}


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    extra_env_vars: Mapping[str, str] | None = None,
) -> None:
    """Runs `slime train` until it ends. `num_gpus_per_node` and `megatron_model_type` repeat what flags and checkpoint
    say. Raises `ConfigError` for another script, `subprocess.CalledProcessError` for a run that failed.
    """
    if train_script not in _LOOPS:
        raise ConfigError(f"got train_script {train_script}; give one of {', '.join(_LOOPS)}")
    command = [sys.executable, "-m", "slime", _LOOPS[train_script], *shlex.split(train_args)]
    subprocess.run(command, check=True, env={**os.environ, **(extra_env_vars or {})})
