"""m / (N * constant_length): every execution is divided by the same number of tokens (Dr. GRPO, arXiv:2503.20783)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from slime.algorithms.aggregation import AGGREGATIONS, Aggregation, Array, divided, num_counted, tokens_per_execution
from slime.core.errors import ConfigError
from slime.settings.fields import derived


@AGGREGATIONS.register("constant_length")
@dataclass(frozen=True, kw_only=True)
class ConstantLength(Aggregation):
    """The sum over tokens with one divisor for all, which no length can bias."""

    loss_constant_length: int = derived(
        lambda s: s.rollout_max_total_response_len or s.rollout_max_response_len,
        lambda s: f"rollout_max_{'total_' if s.rollout_max_total_response_len else ''}response_len",
        gt=0,
        le=100_000_000,
    )
    """Divisor of every execution with constant_length (Dr. GRPO, arXiv:2503.20783). Default:
    --rollout-max-total-response-len if that is given, else --rollout-max-response-len."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a length that is not positive."""
        if not self.loss_constant_length or self.loss_constant_length < 0:
            raise ConfigError(
                f"got --loss-constant-length {self.loss_constant_length}, because constant_length divides by it; give "
                "a number of tokens, for example the longest response"
            )

    def token_weights(
        self, mask_S: Sequence[npt.NDArray[Any]], execution_S: Sequence[int], *, count_masked: bool = True
    ) -> list[Array]:
        """See `Aggregation`."""
        num = num_counted(tokens_per_execution(mask_S, execution_S), count_masked)
        return [divided(m, num * self.loss_constant_length) for m in mask_S]
