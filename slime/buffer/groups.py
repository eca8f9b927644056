"""Small pure operations on groups: nests, ids, starting over, age, and the contract of a user's buffer filter."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from slime.core.errors import DataError, LedgerError
from slime.core.sample import TURN_COUNTS, Group, Sample, Status

logger = logging.getLogger(__name__)

MAX_SAVED_TEXT = 2**24
"""Characters of one response's text that a checkpoint holds; a million tokens are rarely more."""
BufferFilter = Callable[[list[list[Sample]], int], list[list[Sample]]]
"""`(buffered groups, n) -> at most n groups to issue`; removes what it takes, or drops, from the list in place."""


def apply_filter(buffer_filter: BufferFilter, queue: Sequence[Group], n: int) -> tuple[list[Group], list[Group]]:
    """Runs a user's buffer filter; returns the groups it chose and those it left. What is in neither was dropped.

    Raises `LedgerError` if it takes more than `n`, invents a group, or leaves in the list what it took.
    """
    by_index = {group.group_index: group for group in queue}
    left = [list(group.samples) for group in queue]
    chosen = [group_index_of(samples) for samples in buffer_filter(left, n)]
    kept = [group_index_of(samples) for samples in left]
    both = chosen + kept
    if len(chosen) > n or len(set(both)) < len(both) or not set(both) <= set(by_index):
        raise LedgerError(
            f"got groups {chosen} from the buffer filter, which leaves {kept} of {sorted(by_index)}, because it must "
            f"take at most {n} and remove what it takes from the list in place; do: correct --buffer-filter-path"
        )
    return [by_index[index] for index in chosen], [by_index[index] for index in kept]


def flatten(nest: Sequence[Any]) -> list[Sample]:
    """The samples of a nest of lists, in order."""
    return [s for item in nest for s in (flatten(item) if isinstance(item, list | tuple) else [item])]


def group_index_of(samples: Sequence[Sample]) -> int:
    """The prompt id that all samples share. Raises `DataError` if they share none."""
    found = {s.group_index for s in samples}
    index = next(iter(found), None)
    if len(found) != 1 or index is None:
        raise DataError(f"got a group whose samples have group_index {sorted(map(str, found))}; they must share one")
    return index


def reset(sample: Sample) -> Sample:
    """The sample as it was before any generation."""
    metadata = {k: v for k, v in sample.metadata.items() if k != TURN_COUNTS}
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        token_versions=None,
        teacher_log_probs=None,
        rollout_routed_experts=None,
        reward=None,
        status=Status.PENDING,
        failure="",
        unscored="",
        ungradable="",
        started_version=None,
        remove_sample=False,
        metadata=metadata,
    )


def reset_group(group: Group) -> Group:
    """The group before any generation: the first sample of each execution, reset."""
    first = {s.index: s for s in reversed(group.samples)}
    return group.with_samples([reset(s) for s in reversed(first.values())])


def oldest_version(group: Group) -> int | None:
    """Of the weights that its oldest token was sampled with; None without a sampled token."""
    return min((v for s in group.samples for v in s.weight_versions), default=None)


def with_bounded_text(sample: Sample, finished: bool) -> Sample:
    """The sample as a checkpoint holds it: text beyond `MAX_SAVED_TEXT` is truncated once no grader will read it.

    That is in scored samples, and in all of a `finished` group. Others would be graded, or continued, with a part of
    their text: they start over after a resume.
    """
    if len(sample.response) <= MAX_SAVED_TEXT:
        return sample
    logger.warning("checkpoint: truncated a text of %d characters of sample %s", len(sample.response), sample.index)
    bounded = sample.copy()  # whoever reads a field of the live one would have it hold lists
    bounded.response = sample.response[:MAX_SAVED_TEXT]
    return bounded if finished or sample.reward is not None else reset(bounded)
