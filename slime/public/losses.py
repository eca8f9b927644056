"""Loss masks and context-parallel helpers for plugins of the public slime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from slime.core.errors import DataError
from slime.data.chat import ChatRenderer
from slime.data.sft_loss_mask import SftTokens, sft_row

if TYPE_CHECKING:
    from torch import Tensor


class MultiTurnLossMaskGenerator:
    """Computes loss masks for conversations: 1 for the tokens that the model would have generated."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        """`tokenizer_type` is ignored, because masks are derived from the chat template itself."""
        self.tokenizer = tokenizer
        self._chat = ChatRenderer(tokenizer, kwargs={})

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns ([T] token ids, [T] loss mask).

        Raises `DataError` if the template cannot render the conversation as the model would have generated it, or if
        the conversation becomes several training samples.
        """
        masks = self.get_loss_masks(messages, tools)
        if len(masks) > 1:
            raise DataError(
                f"the conversation becomes {len(masks)} training samples because the chat template rewrites earlier "
                'turns; call get_loss_masks to get all of them, or set "step_loss_mask": 0 on all turns but the last'
            )
        return masks[0]

    def get_loss_masks(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Like `get_loss_mask`, but returns one pair per training sample. Each turn is trained in just one of them."""
        return [_pair(one) for one in sft_row(list(messages), self._chat, tools=list(tools or ())).samples]

    @staticmethod
    def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Returns the number of tokens from the first trained one to the end of each mask; 0 if none is trained."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Returns the text of each run of trained tokens."""
        runs: list[list[int]] = [[]]
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [str(self.tokenizer.decode(run)) for run in runs if run]


def _pair(one: SftTokens) -> tuple[list[int], list[int]]:
    return list(one.tokens), [0] * (len(one.tokens) - one.response_length) + list(one.loss_mask)


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Returns `tensor` unchanged, because user functions get full responses [R]. Raises `ValueError` otherwise."""
    _require_whole(tensor, response_length)
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int, *args: Any, **kwargs: Any) -> Any:
    """Returns `log_prob` unchanged, because user functions get full responses [R]. Raises `ValueError` otherwise."""
    _require_whole(log_prob, response_length)
    return log_prob


class WeightBounds(Protocol):
    tis_clip: float
    tis_clip_low: float


def icepop_function(
    args: WeightBounds,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    **named: Any,
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """Weights the loss [R] by exp(trainer - engine log-prob), or by zero outside `tis_clip_low` to `tis_clip`.

    For `--custom-tis-function-path`. Returns the loss, the masks unchanged, and metrics [R].
    """
    import torch

    ratio = (torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))).exp().detach()
    kept = (ratio >= args.tis_clip_low) & (ratio <= args.tis_clip)
    weight = torch.where(kept, ratio, torch.zeros_like(ratio))
    metrics = {"tis": ratio, "tis_clipfrac": (~kept).float(), "tis_abs": (ratio - 1).abs()}
    return pg_loss * weight, loss_masks, metrics


def _require_whole(values: Any, response_length: int) -> None:
    if len(values) != response_length:
        raise ValueError(f"expected one value per token of the {response_length}-token response, got {len(values)}")
