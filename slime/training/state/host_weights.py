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
        self._own = {name: torch.empty_like(p, device="cpu") for name, p in parameters.items()}
        load_weights(self._own, table, directory, holders)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Puts these weights into the policy's parameters, and afterwards the policy's back, bit for bit."""
        kept = {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}
        with torch.no_grad():
            try:
                self._copy(self._own)
                yield
            finally:
                self._copy(kept)

    def _copy(self, source: Mapping[str, Tensor]) -> None:
        for name, p in self._parameters.items():
            p.copy_(source[name])
