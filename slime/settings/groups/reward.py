"""Rewards: which grader, and the limits it runs under."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    """Grading. Graders run in processes that can be killed."""

    rm_type: str | None = None
    """Grader: a built-in one, or the import path of a class of yours; metadata["rm_type"] of a row overrides it."""
    rm_url: str | None = None
    """Address of the grader of --rm-type remote_rm."""
    rm_batch_size: int = 1
    """Most samples in one request to --rm-url: 1 sends an object for each, more a list of objects."""
    reward_key: str | None = None
    """Which entry of a dict reward is the number to train on."""
    group_rm: bool = False
    """Grade all samples of a prompt in one call."""
    reward_timeout_s: float = 30.0
    """Limit of one grading, in seconds; after it the sample is unscored, not zero."""
    reward_num_workers: int = 2
    """Grader processes."""
    reward_memory_limit_mb: int = 2048
    """Address space of one grader process, in MiB."""
