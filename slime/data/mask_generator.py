"""Loss masks of conversations for functions of the public slime: proved from the chat template, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.data.chat import ChatRenderer
from slime.data.sft import sft_tokens


class MultiTurnLossMaskGenerator:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        """`tokenizer_type` chose rules for one kind of template; the template itself says it all."""
        self.tokenizer = tokenizer
        self._chat = ChatRenderer(tokenizer, kwargs={})

    def get_loss_mask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """([T] ids, [T] 1 where the model writes). Raises `DataError` for what the template cannot mask faithfully."""
        row = sft_tokens(list(messages), self._chat, tools=None if tools is None else list(tools))
        return list(row.tokens), [0] * (len(row.tokens) - row.response_length) + list(row.loss_mask)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The texts of the runs that the mask has."""
        runs: list[list[int]] = [[]]
        for token, trained in zip(token_ids, loss_masks, strict=True):
            if trained:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        return [str(self.tokenizer.decode(run)) for run in runs if run]
