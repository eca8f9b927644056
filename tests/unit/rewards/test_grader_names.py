"""The names that the command line knows are the graders that exist."""

from __future__ import annotations

import pytest

from slime.config.graders import GRADERS, base_type
from slime.core.errors import ConfigError
from slime.rewards.graders import ASYNC_TYPES, REGISTRY, load_grader


def test_the_command_line_and_the_registry_know_the_same_names() -> None:
    assert set(GRADERS) == set(REGISTRY) and set(GRADERS) >= ASYNC_TYPES
    assert all(callable(load_grader(name)) for name in GRADERS)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert base_type("boxed_math") == "math"
    with pytest.raises(ConfigError, match="'reasoning_gym'"):
        base_type("reasoning-gym")
