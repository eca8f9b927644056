"""A registry of toys, with a group of settings that chooses from it: what the settings do with registries, in small."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.core.registry import Registry
from slime.settings.fields import Need, derived, opt


class Shape(ABC):
    """The contract."""

    name: ClassVar[str]

    def check(self, args: Any) -> str | None:
        """As of every registry."""
        return None


SHAPES: Registry[Shape] = Registry("shape", flag="--shape", package="tests.support.toy_shapes", contract=Shape)  # type: ignore[type-abstract]


@dataclass(frozen=True, kw_only=True)
class ToySettings:
    """A drawing."""

    draws: bool = True
    """Draw at all."""
    scale: float = 2.0
    """A group's setting that an entry reads as well."""
    shape: str = derived(
        lambda s: "circle" if s.scale > 1 else "square",
        lambda s: f"scale {s.scale}",
        chosen_from="tests.support.toy_shapes:SHAPES",
        needs=Need(lambda s: s.draws, "--draws"),
    )
    """What is drawn."""
    others: tuple[str, ...] = opt((), chosen_from="tests.support.toy_shapes:SHAPES")
    """What is drawn beside it."""
