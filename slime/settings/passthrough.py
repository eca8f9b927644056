"""`Passthrough`: the settings of somebody else, as an immutable, picklable mapping that explains a missing key.

Holds what belongs to Megatron, SGLang, the router, the chosen entries of registries and the user, by field name.
`dict(settings)` gives a plain copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.core.text import nearest


class Passthrough(Mapping[str, Any]):
    """Read-only mapping of one owner's settings, by field name. Values are JSON data."""

    __slots__ = ("_owner", "_values")

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        self._owner = owner
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            near = nearest(name, self._values)
            hint = f"; the nearest is {near!r}" if near else ""
            raise KeyError(f"args.{self._owner} has no setting {name!r}{hint}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict does, without a search for the nearest name: it is asked in every step."""
        return self._values.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Passthrough({self._owner!r}, {self._values!r})"

    def __reduce__(self) -> tuple[type[Passthrough], tuple[str, dict[str, Any]]]:
        return Passthrough, (self._owner, self._values)
