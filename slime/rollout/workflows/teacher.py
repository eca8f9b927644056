"""On-policy distillation with a teacher that SGLang serves (`--opd-type sglang --opd-teacher-url URL`).

The student samples; for each finished sample the teacher reads prompt and response and says how probable it finds each
response token (`slime.rollout.client.teacher_client`). `judge` is a sample hook, so it works with every generate
function, fan-outs included. Where no grader is set, samples get reward 0.0: the teacher is all that there is to learn
from.

Invariants
1. The ids that the teacher judged are the sampled ids. Both models read one vocabulary.
2. A teacher that fails or is late fails the execution, which is tried again or given up like any other.
"""

from __future__ import annotations

from typing import Any

from slime.core.errors import HookError
from slime.core.sample import Sample
from slime.rollout.context import current


async def judge(args: Any, sample: Sample, evaluation: bool = False) -> None:
    """Sample hook: writes `sample.teacher_log_probs`. `--opd-teacher-url` puts it behind the user's own hooks."""
    if evaluation:
        return
    teacher = current().teacher
    if teacher is None:
        raise HookError("got a sample for a teacher without an address; set --opd-teacher-url")
    sample.teacher_log_probs = await teacher.log_probs(sample.tokens, sample.response_length)
    graded = args.rm_type or args.custom_rm_path or sample.custom_rm_path or sample.metadata.get("rm_type")
    if sample.reward is None and not graded:
        sample.reward = 0.0


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The name that means `--opd-teacher-url`. Raises `HookError`: nothing asks the teacher for a reward."""
    raise HookError(_INSTEAD.format("reward_func"))


def post_process_rewards(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    """As `reward_func`."""
    raise HookError(_INSTEAD.format("post_process_rewards"))


_INSTEAD = (
    "got a call of {} by your own function, because the teacher is asked by a sample hook; give --opd-teacher-url, "
    "behind which your functions see sample.teacher_log_probs"
)
