"""`PolicyModel`: Megatron's GPT model that answers with log-probs of response tokens instead of logits.

The output layer is applied inside a loop over tokens (`log_probs`), and only to positions that predict a response
token.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from slime.training.layers import PackedSequences
from slime.training.log_probs import DEFAULT_CHUNK_TOKENS, VocabShard, token_log_probs


class PolicyModel(GPTModel):
    """A decoder with packed input and log-prob output."""

    shard: VocabShard

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        """Megatron would apply the output layer to every position here; `forward` does it in chunks."""
        return hidden_states

    def output_weight(self) -> Tensor:
        """[V_local, H]: this rank's rows of the output layer (the embedding when tied)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def hidden(self, tokens: Tensor, position_ids: Tensor, packed: PackedSequences) -> Tensor:
        """tokens, position_ids [T] -> last hidden states [T, H] (whole row, also under sequence parallelism).

        The backward pass of the returned tensor sums what the tensor-parallel ranks add to it.
        """
        out = super().forward(
            input_ids=tokens.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            attention_mask=None,
            packed_seq_params=packed,
        )
        if self.config.sequence_parallel:
            out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=True)
        else:
            out = copy_to_tensor_model_parallel_region(out)
        return out.squeeze(1)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
        positions: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_grad: bool = False,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and entropy) float32 [R] of `targets` [R] predicted at `positions` [R] of a row of T tokens."""
        hidden = self.hidden(tokens, position_ids, packed)
        return token_log_probs(
            hidden.index_select(0, positions),
            self.output_weight(),
            targets,
            self.shard,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            chunk_tokens=chunk_tokens,
        )
