"""Settings on their way to `Args`: every one is found when it is read, so that derivations need no order.

`s.name` is slime's or an entry's setting, else Megatron's; `s.megatron["name"]` and `s.sglang["name"]` are those
of the engines. A value is what the user gave, else what the field's derivation computes, else its default; then other
settings may put another in its place (`adjust`).

Invariants
1. Each setting is computed once, and its origin is noted when it is.
2. Settings that derive from each other in a circle are an error that names the circle, never a recursion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.settings.components import Components
from slime.settings.fields import UNSET, Compute, Declared, Why, declared, default_of
from slime.settings.group import Passed


class Resolver:
    """The settings of one run while they are resolved."""

    def __init__(
        self,
        components: Components,
        given: Mapping[str, Any],
        *,
        origins: Mapping[str, str],
        megatron: Mapping[str, tuple[Any, str]],
        passed: Mapping[tuple[str, str], Passed],
    ) -> None:
        """`given`: values by name, those of engines as `owner.name`; `origins`: where each was given; `megatron`:
        default and its origin by name; `passed`: what is computed for Megatron and SGLang."""
        self.components = components
        self.origins: dict[str, str] = {}
        self.megatron = _Owner(self, "megatron")
        self.sglang = _Owner(self, "sglang")
        self._given = {name: value for name, value in _canonical(components, given) if value is not UNSET}
        self._given_where = origins
        self._defaults = megatron
        self._passed = passed
        self._values: dict[str, Any] = {}
        self._underway: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self.components.knows(name):
            return self._once(name, lambda: self._own(name))
        if name in self.megatron:
            return self.megatron[name]
        raise AttributeError(f"there is no setting {name!r}")

    def was_given(self, name: str) -> bool:
        """Whether the user gave a setting (an engine's as `owner.name`)."""
        return name in self._given

    def given(self, name: str) -> Any:
        """The value that the user gave, whatever is made of it; None if there is none."""
        return self._given.get(name)

    def fix(self, owner: str, name: str, value: Any, origin: str) -> None:
        """Settles an engine's setting, whatever was given."""
        self._values[f"{owner}.{name}"] = value
        self.origins[f"{owner}.{name}"] = origin

    def names(self, owner: str) -> list[str]:
        """The settings of an engine that have a value, or may get one."""
        known = dict.fromkeys(self._defaults) if owner == "megatron" else {}
        known |= dict.fromkeys(name for of, name in self._passed if of == owner)
        spelled = (*self._given, *self._values)
        known |= dict.fromkeys(n.removeprefix(f"{owner}.") for n in spelled if n.startswith(f"{owner}."))
        return list(known)

    def engine(self, owner: str, name: str) -> Any:
        """An engine's setting; `UNSET` if it is not set."""
        return self._once(f"{owner}.{name}", lambda: self._of_engine(owner, name))

    def _own(self, name: str) -> Any:
        field = self.components.field_of(name, self)
        says = declared(field)
        if name in self._given:
            value, origin = self._given[name], self._given_where[name]
        else:
            value, origin = self._derived(name, says.compute, says.why, default_of(field), "default")
        adjusted = None if says.adjust is None else says.adjust(value, self)
        if adjusted is not None:
            value, origin = adjusted.value, f"derived: {adjusted.why}"
        self.origins[name] = origin
        return value

    def _of_engine(self, owner: str, name: str) -> Any:
        spelled = f"{owner}.{name}"
        if spelled in self._given:
            value, origin = self._given[spelled], self._given_where[spelled]
        else:
            rule = self._passed.get((owner, name))
            default, why = self._defaults.get(name, (UNSET, "")) if owner == "megatron" else (UNSET, "")
            compute = None if rule is None else rule.compute
            value, origin = self._derived(spelled, compute, "" if rule is None else rule.why, default, why)
        if value is not UNSET:
            self.origins[spelled] = origin
        return value

    def _derived(self, name: str, compute: Compute | None, why: Why, default: Any, origin: str) -> tuple[Any, str]:
        value = None if compute is None else compute(self)
        if value is None:
            return default, origin
        self._values[name] = value  # the reason may name it
        return value, f"derived: {why if isinstance(why, str) else why(self)}"

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._underway:
            circle = " -> ".join((*self._underway[self._underway.index(name) :], name))
            raise ConfigError(f"got settings that derive from each other: {circle}; give one of them")
        self._underway.append(name)
        try:
            value = compute()
        finally:
            self._underway.pop()
        self._values[name] = value
        return value


class _Owner(Mapping[str, Any]):
    """An engine's settings, each found when it is read."""

    def __init__(self, resolver: Resolver, owner: str) -> None:
        self._resolver, self._owner = resolver, owner

    def __getitem__(self, name: str) -> Any:
        value = self._resolver.engine(self._owner, name)
        if value is UNSET:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        names = self._resolver.names(self._owner)
        return (name for name in names if self._resolver.engine(self._owner, name) is not UNSET)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _canonical(components: Components, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Given values in the spelling that rules and rooms know."""
    for name, value in given.items():
        says = declared(components.own[name]) if name in components.own else Declared()
        yield name, value if says.canonical is None else says.canonical(value)
