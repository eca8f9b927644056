"""Token weights: the denominators are those of the whole step, so no cut of it matters."""

from __future__ import annotations

import numpy as np
import pytest

from slime.core.errors import ConfigError
from tests.support.algorithms import AGGREGATIONS, token_weights


def _masks(*lengths: int) -> list[np.ndarray]:
    return [np.ones(n, np.float32) for n in lengths]


def _sums(weights: list[np.ndarray]) -> list[float]:
    return [float(w.sum()) for w in weights]


def test_default_is_the_mean_over_executions() -> None:
    assert _sums(token_weights(_masks(2, 10), [0, 1])) == pytest.approx([0.5, 0.5])


def test_siblings_share_one_execution() -> None:
    assert _sums(token_weights(_masks(2, 6, 4), [0, 0, 1])) == pytest.approx([0.125, 0.375, 0.5])
    sums = token_weights(_masks(2, 6, 4), [0, 0, 1], kind="sequence_sum")
    assert np.concatenate(sums).tolist() == pytest.approx([0.5] * 12)
    constant = token_weights(_masks(2, 6, 4), [0, 0, 1], kind="constant_length", constant_length=8)
    assert np.concatenate(constant).tolist() == pytest.approx([1 / 16] * 12)


def test_token_mean() -> None:
    weights = token_weights(_masks(2, 6), [0, 1], kind="token_mean")
    assert np.concatenate(weights).tolist() == pytest.approx([0.125] * 8)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_an_execution_without_trained_tokens_counts_unless_told_otherwise(kind: str) -> None:
    masks = [np.zeros(3, np.float32), np.ones(4, np.float32)]
    kept = _sums(token_weights(masks, [0, 1], kind=kind, constant_length=4))
    left_out = _sums(token_weights(masks, [0, 1], kind=kind, constant_length=4, count_masked=False))
    alone = _sums(token_weights(masks[1:], [1], kind=kind, constant_length=4))
    assert kept[0] == left_out[0] == 0.0
    assert left_out[1] == alone[0]
    assert kept[1] == (alone[0] if kind == "token_mean" else alone[0] / 2)
    for count_masked in (True, False):
        nothing = token_weights(masks[:1], [0], kind=kind, constant_length=4, count_masked=count_masked)
        assert nothing[0].tolist() == [0.0] * 3


@pytest.mark.parametrize("length", [None, 0, -3])
def test_a_constant_length_must_be_a_length(length: int | None) -> None:
    with pytest.raises(ConfigError, match="loss-constant-length"):
        token_weights(_masks(1), [0], kind="constant_length", constant_length=length)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="mean_of_means"):
        token_weights(_masks(1), [0], kind="mean_of_means")
