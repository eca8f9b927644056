"""What functions of the public slime do about context parallelism, where every rank has whole responses: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """[R] of a whole response, as it was given. Raises ValueError for a part of one."""
    _require_whole(tensor, response_length)
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int, *args: Any, **kwargs: Any) -> Any:
    """[R] the part of this rank, which is all of it; a list or a tensor. Raises ValueError for a part of one."""
    _require_whole(log_prob, response_length)
    return log_prob


def _require_whole(values: Any, response_length: int) -> None:
    if len(values) != response_length:
        raise ValueError(f"got {len(values)} values for a response of {response_length} tokens; give all of them")
