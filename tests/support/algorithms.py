"""Entries of `slime.algorithms` by their name and plain numbers, for tests of formulas."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from slime.algorithms.aggregation import AGGREGATIONS as _AGGREGATIONS
from slime.algorithms.kl import KL_ESTIMATORS

KL_TYPES = KL_ESTIMATORS.names()
AGGREGATIONS = _AGGREGATIONS.names()


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str, **options: Any) -> Tensor:
    """The estimate [R] of the estimator called `kind`."""
    return KL_ESTIMATORS.build(kind, None).estimate(log_probs, ref_log_probs, mask, **options)


def token_weights(
    mask_S: Sequence[Any],
    execution_S: Sequence[int],
    *,
    kind: str = "sequence_mean",
    constant_length: float | None = None,
    count_masked: bool = True,
) -> list[Any]:
    """The weights of the aggregation called `kind`."""
    aggregation = _AGGREGATIONS.build(kind, SimpleNamespace(loss_constant_length=constant_length))
    return aggregation.token_weights(mask_S, execution_S, count_masked=count_masked)
