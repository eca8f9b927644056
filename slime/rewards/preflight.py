"""Whether this machine can hold the code that graders run, looked at before any process starts.

The settings cannot say it: what is refused here may run on another machine.
"""

from __future__ import annotations

from slime.core.registry import settings_of
from slime.rewards.graders import GRADERS
from slime.settings import Args
from slime.settings.eval_config import eval_datasets

ALLOW = "allow_unconfined_code"
"""Setting of a grader that runs code."""


def code_problems(args: Args) -> list[str]:
    """What is wrong if a grader that the settings name runs code which nothing would hold here; empty if nothing.

    A grader that a row names is refused when it is asked: its samples stay unscored, with the same reason.
    """
    named = {args.rm_type, *(one.rm_type for one in eval_datasets(args))}
    kinds = [GRADERS.get(name) for name in sorted(name for name in named if name)]
    if not any(kind.runs_code and not settings_of(kind, args).get(ALLOW) for kind in kinds):
        return []
    from slime.rewards.graders.sandbox import missing_here, refusal

    try:
        missing = missing_here()
    except OSError as error:
        return [str(error)]
    return [refusal(missing)] if missing else []
