"""Copies of the policy's weights on the host, lent to its model for a forward pass: reference, teacher, old actor.

Invariants
1. While a copy is lent nothing else may run; afterwards the policy has its own bits again.
2. A copy of the policy holds all of it, but with adapters only these, so that it is small. (What is frozen by name does
   not differ within a run, but a checkpoint may bring other weights of it than the copy was made of.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.models import table_for
from slime.models.common.table import FamilyTable
from slime.training.state.hf_weights import Holder, load_weights


class HostCopies:
    """This rank's shards of the copies, by name."""

    def __init__(self, parameters: Mapping[str, Tensor], names: Collection[str]) -> None:
        """`parameters`: the policy's, under their global names; `names`: of all ranks, those that copies of it hold."""
        self._parameters, self._names = parameters, names
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._kept: dict[str, Tensor] = {}
        """The policy's own weights while a copy is lent."""

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def take(self, name: str) -> None:
        """The policy as it is now, into a new copy or an old one."""
        if name not in self._copies:
            self._copies[name] = {n: _room_for(p) for n, p in self._parameters.items() if n in self._names}
        _copy(self._copies[name], self._parameters, self._copies[name])

    def read(self, name: str, directory: Path, flag: str, table: FamilyTable, holders: Mapping[str, Holder]) -> None:
        """An HF checkpoint, cast to the policy's dtypes; adapters are zero. Raises `ConfigError` for another shape.

        `holders`: of all parameters, those of adapters among them.
        """
        other = table_for(read_hf_config(str(directory)))
        if (other.family, other.sizes, other.tied) != (table.family, table.sizes, table.tied):
            raise ConfigError(
                f"got {flag} {directory} of another family or shape than the policy; use a model of the same size"
            )
        copy = {n: _room_for(p) for n, p in self._parameters.items()}
        known = set(table.megatron_names)
        named = {n: holder for n, holder in holders.items() if n in known}
        load_weights({n: p for n, p in copy.items() if n in known}, table, directory, named)
        self._copies[name] = copy

    def shift(self, newer: str, older: str) -> None:
        """`newer` becomes `older`, and is the policy as it is now."""
        self._copies[newer], self._copies[older] = self._copies[older], self._copies[newer]
        self.take(newer)

    def lasting(self, names: Iterable[str]) -> dict[str, Mapping[str, Tensor]]:
        """Those of `names` that exist, to be written into a checkpoint, or filled from one in place."""
        return {name: self._copies[name] for name in names if name in self._copies}

    @contextmanager
    def lent(self, name: str) -> Iterator[None]:
        """Puts a copy into the policy's parameters, and afterwards the policy's own weights back, bit for bit."""
        copy = self._copies[name]
        for n in copy.keys() - self._kept.keys():
            self._kept[n] = _room_for(self._parameters[n])
        with torch.no_grad():
            _copy(copy, self._parameters, self._kept)
            try:
                _copy(copy, copy, self._parameters)
                yield
            finally:
                _copy(copy, self._kept, self._parameters)


def _room_for(parameter: Tensor) -> Tensor:
    """Zeros in host memory, which a GPU can reach by itself."""
    return torch.zeros_like(parameter, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False)


def _copy(names: Iterable[str], source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name in names:
        target[name].copy_(source[name].detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
