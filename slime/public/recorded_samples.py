"""Converts samples that the public slime recorded, as plain JSON, into ours.

The public slime records a weight version per request; we record one per token. If a sample has one version, all its
sampled tokens get that version. If it has several versions, all tokens get the oldest one, because the record does not
map tokens to versions. The loss mask marks the tokens that an engine sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.core.errors import DataError
from slime.core.routed_experts import RoutedExperts, dtype_for
from slime.core.sample import FIELDS, NOT_SAMPLED, Sample, Status

_EXPERTS = "rollout_routed_experts"
_OURS = frozenset(field.name for field in FIELDS) - {"attributes"}
_LEFT_OUT = frozenset(
    {
        "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets",
        "multimodal_inputs",
        "multimodal_train_inputs",
        "multimodal_train_input_id",
        "spec_info",
        "prefix_cache_info",
        "non_generation_time",
        "trace",
    }
)
"""Fields that a replay does not need."""
_NEEDED = frozenset({"multimodal_inputs", "multimodal_train_inputs"})
"""Fields of `_LEFT_OUT` without which the tokens cannot be trained."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The groups of a rollout, and the fields that were dropped."""

    groups: tuple[tuple[Sample, ...], ...]
    """One group per prompt, ordered by first sample."""
    left_out: Mapping[str, int]
    """Field -> number of samples that had a value in the field."""
    num_mixed: int
    """Number of samples with several weight versions."""


def groups_of(samples: Iterable[Mapping[str, Any]], rollout_id: int) -> Converted:
    """Converts `samples` and groups them by prompt. `rollout_id`: used as weight version of samples that have none.

    Raises `DataError` for a sample without group_index, with images, or with inconsistent fields.
    """
    groups: dict[int, list[Sample]] = {}
    left_out: Counter[str] = Counter()
    num_mixed = 0
    for number, fields in enumerate(samples):
        left_out.update(name for name in _LEFT_OUT if fields.get(name))
        num_mixed += len(set(fields.get("weight_versions") or ())) > 1
        sample = _sample(dict(fields), number, rollout_id)
        if sample.group_index is None:
            raise DataError(
                f"sample {number} has no group_index, the number of its prompt; groups are not formed by position"
            )
        groups.setdefault(sample.group_index, []).append(sample)
    return Converted(tuple(map(tuple, groups.values())), dict(left_out), num_mixed)


def _sample(fields: dict[str, Any], number: int, rollout_id: int) -> Sample:
    if any(fields.get(name) for name in _NEEDED):
        raise DataError(f"sample {number} has images, which cannot be converted; drop such samples")
    versions, execution = fields.pop("weight_versions", None) or (), fields.pop("rollout_id", None)
    experts = fields.pop(_EXPERTS, None)
    other = {name: value for name, value in fields.items() if name not in _OURS | _LEFT_OUT and value is not None}
    other = {**(other.pop("attributes", None) or {}), **other}
    other |= {"rollout_id": execution} if execution is not None else {}
    own = {name: value for name, value in fields.items() if name in _OURS and value is not None}
    try:
        sample = Sample(**{**own, "status": Status(own.get("status", "pending")), "attributes": other})
        if execution is not None:
            sample.index = int(execution)
        if sample.rollout_log_probs is not None and sample.token_versions is None:
            version = min((int(v) for v in versions if str(v).isdigit()), default=rollout_id)
            mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
            sample.loss_mask = [int(trained) for trained in mask]
            sample.token_versions = [version if trained else NOT_SAMPLED for trained in sample.loss_mask]
        if experts:
            ids = np.asarray(experts)
            sample.rollout_routed_experts = RoutedExperts(ids.astype(dtype_for(int(ids.max()) + 1)))
        sample.validate()
    except (TypeError, ValueError) as error:  # `DataError` among them
        raise DataError(f"sample {number} of the rollout cannot be read: {error}") from error
    return sample
