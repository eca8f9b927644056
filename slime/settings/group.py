"""What a group of settings consists of, beside its dataclass: its heading, its rules, and what it sets for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.settings.fields import Compute, Why

if TYPE_CHECKING:
    from slime.settings.args import Args

Rule = Callable[["Args"], "str | None"]
"""None, or what was got, because of what it cannot work, and what to do."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A setting of Megatron or SGLang that is computed where the user does not give it."""

    owner: Literal["megatron", "sglang"]
    name: str
    compute: Compute
    """Of the settings, each derived when it is read. None leaves the owner's default."""
    why: Why
    """The reason for the value, shown by --explain."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group of slime's settings."""

    settings: type
    """A frozen dataclass, a base of `Args`."""
    heading: str
    """Above its flags in --help."""
    rules: tuple[Rule, ...] = ()
    """What cannot work, reported before any process starts, in this order."""
    passed: tuple[Passed, ...] = ()
    """What it sets for Megatron and SGLang."""
