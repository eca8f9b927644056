"""Weights of the policy's shape on the host, lent to the policy's model for a forward pass: reference and teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from slime.config.model_shape import read_hf_config
from slime.core.errors import ConfigError
from slime.training.state.hf_weights import Holder, load_weights
from slime.weights.tables import FamilyTable, table_for


class HostWeights:
    """This rank's shard of another model of the same family and size."""

    def __init__(
        self,
        directory: Path,
        flag: str,
        parameters: Mapping[str, Tensor],
        table: FamilyTable,
        holders: dict[str, Holder],
    ) -> None:
        """Loads an HF checkpoint, cast to the dtypes of `parameters`. Raises `ConfigError` for another shape."""
        other = table_for(read_hf_config(str(directory)))
        if (other.family, other.shape, other.tied) != (table.family, table.shape, table.tied):
            raise ConfigError(
                f"got {flag} {directory} of another family or shape than the policy; use a model of the same size"
            )
        self._parameters = parameters
        self._own, self._kept = _room_for(parameters), _room_for(parameters)
        load_weights(self._own, table, directory, holders)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Puts these weights into the policy's parameters, and afterwards the policy's back, bit for bit."""
        with torch.no_grad():
            _copy(self._parameters, self._kept)
            try:
                _copy(self._own, self._parameters)
                yield
            finally:
                _copy(self._kept, self._parameters)


def _room_for(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host memory for them, which a GPU can reach by itself."""
    return {name: torch.empty_like(p, device="cpu", pin_memory=p.is_cuda) for name, p in parameters.items()}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
