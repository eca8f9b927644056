"""The names of the built-in graders, where both the command line and `slime.rewards.graders` see them."""

from __future__ import annotations

import difflib

from slime.core.errors import ConfigError

GRADERS = (
    "code",
    "dapo",
    "deepscaler",
    "exact_match",
    "f1",
    "gpqa",
    "ifbench",
    "math",
    "random",
    "reasoning_gym",
    "remote_rm",
)
"""What `--rm-type` and a row's metadata `rm_type` may name."""

BOXED_PREFIX = "boxed_"
"""Before a name: only the content of the last `\\boxed{}` is graded."""


FIND_THE_BOX = ("dapo", "deepscaler")
"""Graders that need what stands around the box: with the prefix they would score nothing but failures."""
SCORE_KEYS = {"dapo": "score, acc", "ifbench": "score, loose, strict_share, loose_share"}
"""Graders that return several numbers -> those that `--reward-key` may pick."""


def base_type(rm_type: str) -> str:
    """The name without the prefix. Raises `ConfigError` if no such grader exists."""
    name = rm_type.removeprefix(BOXED_PREFIX)
    if name in FIND_THE_BOX and name != rm_type:
        raise ConfigError(
            f"got --rm-type {rm_type!r} (or metadata rm_type), but {name} finds the box itself; drop the prefix"
        )
    if name not in GRADERS:
        near = difflib.get_close_matches(name, GRADERS, 1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise ConfigError(
            f"got --rm-type {rm_type!r} (or metadata rm_type), which names no grader{hint}; use one of "
            f"{', '.join(GRADERS)}, with the prefix {BOXED_PREFIX!r} if only the boxed answer counts, "
            "or give --custom-rm-path"
        )
    return name
