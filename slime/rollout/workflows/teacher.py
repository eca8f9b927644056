"""On-policy distillation from a teacher served by SGLang (`--opd-type sglang --opd-teacher-url URL`).

The student samples; the teacher returns the log-prob of each response token (`slime.rollout.client.teacher_client`).
`judge` is a sample hook, so it works with every generate function, including fan-outs. Without a grader, samples get
reward 0.0, because they learn only from the teacher.

Invariants
1. The teacher's log-probs belong to the sampled ids. Teacher and student share the same vocabulary.
2. If the teacher fails or times out, the execution fails, and is retried or dropped like any other.
"""

from __future__ import annotations

from typing import Any

from slime.core.errors import HookError
from slime.core.sample import Sample
from slime.rollout.context import current
from slime.rollout.filters import has_grader


async def judge(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: sets `sample.teacher_log_probs`. With `--opd-teacher-url`, it runs after the user's own hooks."""
    if evaluation:
        return
    teacher = current().teacher
    if teacher is None:
        raise HookError("this sample hook requires a teacher; set --opd-teacher-url")
    sample.teacher_log_probs = await teacher.log_probs(sample.tokens, sample.response_length)
    if sample.reward is None and not has_grader(args, sample):
        sample.reward = 0.0


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Stands in for the public slime's function, and implies `--opd-teacher-url`. Raises `HookError` if called."""
    raise HookError(_INSTEAD.format("reward_func"))


def post_process_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    """See `reward_func`."""
    raise HookError(_INSTEAD.format("post_process_rewards"))


_INSTEAD = (
    "{} must not be called, because a sample hook gets the teacher's log-probs; set --opd-teacher-url, and read "
    "sample.teacher_log_probs"
)
