"""Keeps the reference, teacher and old policies in host memory, and swaps them into the model for forward passes.

The caller decides which policies exist and when they change.

Invariants
1. Nothing else may use the model during a swap. Afterwards, the trained policy's weights are restored bitwise.
2. If the model has adapters, copies of the trained policy contain only these, to save memory. Otherwise they contain
   all parameters, even those frozen by name, because loading a checkpoint can change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.core.hf_config import read_hf_config
from slime.models import table_for
from slime.models.common.mtp import PREFIX
from slime.training.state.hf_weights import load_weights
from slime.training.state.sharded_model import ShardedModel
from slime.training.state.sleeping import HostArena, pin_for, room_of


class HostPolicies:
    """This rank's shards of each offloaded policy, by policy name."""

    def __init__(self, model: ShardedModel) -> None:
        """`model` is the trained policy. Its parameters must not move in memory after this call."""
        self._model, self._parameters = model, model.shards
        self._taken = model.adapters if model.adapters.tensors else model
        self._policies: dict[str, dict[str, Tensor]] = {}
        self._arenas: list[HostArena] = []
        """Memory stays pinned only as long as these objects exist."""
        self._kept: dict[str, Tensor] = {}
        """The trained policy's weights while another policy is in the model."""

    def __contains__(self, name: str) -> bool:
        return name in self._policies

    def take(self, name: str) -> None:
        """Copies the trained policy's current weights to policy `name`."""
        if name not in self._policies:
            self._policies[name] = self._rooms([own.name for own in self._taken.own])
        _copy(self._policies[name], self._parameters, self._policies[name])

    def read(self, name: str, directory: Path, flag: str) -> None:
        """Loads an HF checkpoint into policy `name`, cast to the trained policy's dtypes, with zero adapters.

        Raises `ConfigError` if its architecture differs.
        """
        table, other = self._model.table, table_for(read_hf_config(str(directory)))
        if (other.family, other.sizes, other.tied) != (table.family, table.sizes, table.tied):
            raise ConfigError(
                f"{flag} {directory} must have the policy's architecture; use a model of the same family and size"
            )
        # Only the trained policy needs multi-token prediction.
        policy = self._rooms(name for name in self._parameters if not name.startswith(PREFIX))
        load_weights(self._model.base.within(other).at(policy), directory)
        self._policies[name] = policy

    def shift(self, newer: str, older: str) -> None:
        """Moves policy `newer` to `older`, then copies the trained policy's current weights to `newer`."""
        self._policies[newer], self._policies[older] = self._policies[older], self._policies[newer]
        self.take(newer)

    def lasting(self, names: Iterable[str]) -> dict[str, Mapping[str, Tensor]]:
        """Returns the existing policies among `names`, to be saved to a checkpoint or restored in place from one."""
        return {name: self._policies[name] for name in names if name in self._policies}

    @contextmanager
    def lent(self, name: str) -> Iterator[None]:
        """Swaps a policy into the trained policy's parameters, and restores them bitwise at the end of the block."""
        policy = self._policies[name]
        self._kept |= self._rooms([n for n in policy if n not in self._kept])
        with torch.no_grad():
            _copy(policy, self._parameters, self._kept)
            try:
                _copy(policy, policy, self._parameters)
                yield
            finally:
                _copy(policy, self._kept, self._parameters)

    def _rooms(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Allocates zeroed host memory for these parameters. Those on a GPU share one pinned range."""
        like = {name: self._parameters[name] for name in names}
        on_gpu = {n: p for n, p in like.items() if p.is_cuda}
        rooms = {n: torch.zeros_like(p, device="cpu", requires_grad=False) for n, p in like.items() if not p.is_cuda}
        if on_gpu:
            sizes = {n: p.numel() * p.element_size() for n, p in on_gpu.items()}
            device = next(iter(on_gpu.values())).device
            self._arenas.append(HostArena(sum(map(room_of, sizes.values())), pin_for(device)))
            rooms |= {n: self._arenas[-1].take(sizes[n]).zero_().view(p.dtype).view(p.shape) for n, p in on_gpu.items()}
        return {n: rooms[n] for n in like}


def _copy(names: Iterable[str], source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name in names:
        target[name].copy_(source[name].detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
