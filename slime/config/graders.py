"""The names of the built-in graders, where both the command line and `slime.rewards.graders` see them."""

from __future__ import annotations

import difflib

from slime.core.errors import ConfigError

GRADERS = ("dapo", "deepscaler", "exact_match", "f1", "math", "random", "reasoning_gym", "remote_rm")
"""What `--rm-type` and a row's metadata `rm_type` may name."""

BOXED_PREFIX = "boxed_"
"""Before a name: only the content of the last `\\boxed{}` is graded."""


def base_type(rm_type: str) -> str:
    """The name without the prefix. Raises `ConfigError` if no such grader exists."""
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name not in GRADERS:
        near = difflib.get_close_matches(name, GRADERS, 1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise ConfigError(
            f"got --rm-type {rm_type!r} (or metadata rm_type), which names no grader{hint}; use one of "
            f"{', '.join(GRADERS)}, with the prefix {BOXED_PREFIX!r} if only the boxed answer counts, "
            "or give --custom-rm-path"
        )
    return name
