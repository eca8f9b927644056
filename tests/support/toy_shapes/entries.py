"""The built-in toys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.settings.fields import derived, opt
from tests.support.toy_shapes import SHAPES, Shape


@dataclass(frozen=True, kw_only=True)
class Lined(Shape):
    """A base of shapes."""

    line_width: float = opt(1.0, gt=0)
    """Width of the line."""


@SHAPES.register("circle", "round")
@dataclass(frozen=True, kw_only=True)
class Circle(Lined):
    """Round."""

    radius: float = derived(lambda s: s.line_width * s.scale, "line_width * scale", gt=0)
    """Half its width."""
    scale: float = 1.0
    """The group's."""

    def check(self, args: Any) -> str | None:
        return f"got radius {self.radius} above 100; give less" if self.radius > 100 else None


@SHAPES.register("square")
@dataclass(frozen=True, kw_only=True)
class Square(Lined):
    """Not round."""

    line_width: float = opt(3.0, gt=0)
    """Width of the line."""
    corners: str = opt("sharp", choices=("sharp", "soft"))
    """How corners look."""


@SHAPES.register("point")
class Point(Shape):
    """Without settings."""
