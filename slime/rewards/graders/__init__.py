"""The built-in graders: `grade(sample, options) -> float | dict`, sync or async, one module each.

`options` are the plain settings of `GraderOptions`; a grader sees nothing else of the run. A name with the prefix
`boxed_` grades the content of the last `\\boxed{}` alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime.core.sample import Sample
from slime.settings.graders import BOXED_PREFIX, base_type

REGISTRY: dict[str, str] = {
    "math": "slime.rewards.graders.math_answer",
    "exact_match": "slime.rewards.graders.exact_match",
    "reasoning_gym": "slime.rewards.graders.reasoning_gym_task",
    "remote_rm": "slime.rewards.graders.remote",
    "random": "slime.rewards.graders.chance",
    "f1": "slime.rewards.graders.f1",
    "deepscaler": "slime.rewards.graders.deepscaler",
    "dapo": "slime.rewards.graders.dapo",
    "gpqa": "slime.rewards.graders.gpqa",
    "ifbench": "slime.rewards.graders.ifbench",
    "code": "slime.rewards.graders.program_tests",
}
"""`--rm-type` -> module that defines `grade`; the names are those of `slime.settings.graders.GRADERS`."""

ASYNC_TYPES = frozenset({"remote_rm"})
"""Graders that wait more than they compute: one worker runs many at a time."""

SLOW_TYPES = frozenset({"code"})
"""Graders that compute for longer than a formula takes, within limits of their own; they may take the pool's limit."""


@dataclass(frozen=True, slots=True)
class GraderOptions:
    """What a built-in grader may know of the run."""

    rm_url: str | None = None
    """Address of the remote reward service."""
    rm_batch_size: int = 1
    """Samples in one request to it; 1: an object for each, more: a list of objects."""
    timeout_s: float = 30.0
    """Seconds after which the pool gives up on one sample."""


Grade = Callable[[Sample, GraderOptions], "float | dict[str, Any] | Awaitable[float | dict[str, Any]]"]


def load_grader(rm_type: str) -> Grade:
    """Imports the grader (inside its worker). Raises `ConfigError` on an unknown name."""
    grade: Grade = importlib.import_module(REGISTRY[base_type(rm_type)]).grade
    if not rm_type.startswith(BOXED_PREFIX):
        return grade

    from slime.rewards.graders.answers import last_boxed

    def boxed(sample: Sample, options: GraderOptions) -> Any:
        return grade(dataclasses.replace(sample, response=last_boxed(sample.response) or ""), options)

    async def boxed_async(sample: Sample, options: GraderOptions) -> Any:
        result = boxed(sample, options)
        return await result if inspect.isawaitable(result) else result

    return boxed_async if inspect.iscoroutinefunction(grade) else boxed
