"""Converts samples recorded by the public slime (plain JSON) to `Sample`.

The public slime records one weight version per request, whereas `Sample` has one per token. If a sample has several
versions, all sampled tokens get the oldest one, because the record does not map tokens to versions. Tokens with loss
mask 1 are taken to be the sampled ones.
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
"""Fields that are dropped."""
_NEEDED = frozenset({"multimodal_inputs", "multimodal_train_inputs"})
"""Dropped fields that training needs. Samples that have them are rejected."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The groups of a rollout, and statistics on what the conversion lost."""

    groups: tuple[tuple[Sample, ...], ...]
    """One group per prompt, in order of first appearance."""
    left_out: Mapping[str, int]
    """Dropped field -> number of samples that had a value for it."""
    num_mixed: int
    """Number of samples with several weight versions."""


def groups_of(samples: Iterable[Mapping[str, Any]], rollout_id: int) -> Converted:
    """Converts `samples` and groups them by prompt. `rollout_id`: weight version for samples without one.

    Raises `DataError` for a sample that has no group_index, has images, or is inconsistent.
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
                f"sample {number} has no group_index; set it to the prompt's number, since order does not define groups"
            )
        groups.setdefault(sample.group_index, []).append(sample)
    return Converted(tuple(map(tuple, groups.values())), dict(left_out), num_mixed)


def _sample(fields: dict[str, Any], number: int, rollout_id: int) -> Sample:
    if any(fields.get(name) for name in _NEEDED):
        raise DataError(f"sample {number} has images, which cannot be converted; remove samples with images")
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
    except (TypeError, ValueError) as error:  # includes `DataError`
        raise DataError(f"sample {number} of the rollout is invalid: {error}") from error
    return sample
