"""Loss masks and context parallelism as functions of the public slime ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.core.errors import DataError
from slime.data.chat import ChatRenderer
from slime.data.conversations import SftTokens, sft_row

if TYPE_CHECKING:
    from torch import Tensor

# Loss masks of conversations for functions of the public slime: as the chat template writes the turns of the model.


class MultiTurnLossMaskGenerator:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        """`tokenizer_type` chose rules for one kind of template; the template itself says it all."""
        self.tokenizer = tokenizer
        self._chat = ChatRenderer(tokenizer, kwargs={})

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """([T] ids, [T] 1 where the model writes). Raises `DataError` for what the template cannot write as the model
        would have, and for a conversation that one sequence cannot hold.
        """
        masks = self.get_loss_masks(messages, tools)
        if len(masks) > 1:
            raise DataError(
                f"got a conversation that becomes {len(masks)} training samples, because its template rewrites earlier "
                'turns; do: call get_loss_masks, which returns all of them, or set "step_loss_mask": 0 on the turns '
                "before the last"
            )
        return masks[0]

    def get_loss_masks(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """One pair as of `get_loss_mask` for each training sample: together they train each turn once."""
        return [_pair(one) for one in sft_row(list(messages), self._chat, tools=list(tools or ())).samples]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The texts of the runs that the mask has."""
        runs: list[list[int]] = [[]]
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [str(self.tokenizer.decode(run)) for run in runs if run]


def _pair(one: SftTokens) -> tuple[list[int], list[int]]:
    return list(one.tokens), [0] * (len(one.tokens) - one.response_length) + list(one.loss_mask)


# What functions of the public slime do about context parallelism, where every rank has whole responses: nothing.


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
