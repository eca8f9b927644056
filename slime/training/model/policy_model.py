"""`PolicyModel`, Megatron's GPT model with log-probs of response tokens as output, and `ValueModel`, the critic.

The output layer runs in chunks (see `log_probs`) and only at positions that predict a response token.

Multi-token prediction needs the embedding on the last pipeline stage. With several stages, only the first one has it.
Training changes it, so `lent_embedding` copies it to the last stage in every step. If the embedding is tied, the last
stage already has it. The copy exists only during a step and is never saved or synced, and multi-token prediction sends
no gradient to the embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from slime.models.common.mtp_layer import MultiTokenHead, following
from slime.models.common.packed_attention import PackedSequences
from slime.models.common.rotary import Rotary
from slime.models.common.vision import VisionTower
from slime.ops.repeats import repeat_rows
from slime.training.model.log_probs import (
    DEFAULT_CHUNK_TOKENS,
    RowLogits,
    ScoreOptions,
    TokenScores,
    VocabShard,
    row_logits,
    score_tokens,
    token_values,
)


class PolicyModel(GPTModel):
    """A decoder with packed input and log-prob output."""

    shard: VocabShard
    num_tokens: int
    """Vocabulary size without padding."""
    layer_offset: int
    """Global index of this chunk's first layer."""
    rotary: Rotary | None = None
    """Rotary embedding shared by all layers; None if each layer computes its own."""
    mtp: MultiTokenHead
    """Exists only on the last chunk, and only if multi-token prediction is trained."""
    borrows_embedding: bool
    """Whether multi-token prediction is trained and the last stage has no embedding."""
    lent_embedding: Tensor | None
    """[V_local, H] on the last stage during a step; see `lent_embedding` below."""
    tower: VisionTower | None = None
    """Encodes the images of a row. It is not a submodule, because it is not trained, synced or saved."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Sets parameter attributes as Megatron's method does, but does not synchronize weights: they are loaded later.

        The last stage has a copy of a tied embedding. Megatron sums the gradients of both, and the gradient norm counts
        the sum once.
        """
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights:
            return
        weight = self.shared_embedding_or_output_weight()
        if self.pre_process and self.post_process:
            weight.zero_out_wgrad = True
        elif weight is not None:
            weight.shared_embedding = True
            weight.shared = not self.pre_process

    def _postprocess(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        """Skips the output layer, which Megatron would run on every position; `forward` runs it in chunks."""
        return hidden_states

    def output_weight(self) -> Tensor:
        """Returns this rank's rows [V_local, H] of the output layer, or of the embedding if they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def states(self, tokens: Tensor, position_ids: Tensor, packed: PackedSequences) -> Tensor:
        """Returns the output [T_local, 1, H] of this chunk's last layer for this rank's shard of `tokens` [T]."""
        if self.rotary is not None and packed.rotary is None:
            positions = packed.positions if packed.images is None else packed.images.positions
            assert positions is not None, "the packed row has no token positions"
            packed.rotary = self.rotary.of(positions)
        if packed.shard is not None:
            tokens, position_ids = (x.index_select(0, packed.shard.positions) for x in (tokens, position_ids))
        ids, positions, embedded = tokens.unsqueeze(0), position_ids.unsqueeze(0), None
        if packed.images is not None:
            assert self.tower is not None, "a row with images requires a vision tower"
            embedded = packed.images.into(self.embedding(input_ids=ids, position_ids=positions), self.tower)
        out: Tensor = super().forward(
            input_ids=ids, position_ids=positions, attention_mask=None, decoder_input=embedded, packed_seq_params=packed
        )
        return out

    def gathered(self, states: Tensor) -> Tensor:
        """Gathers the last chunk's `states` [T_local, 1, H] into the full row [T, H].

        Supports sequence parallelism. The backward pass sums the gradients over tensor-parallel ranks.
        """
        if self.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True)
        else:
            states = copy_to_tensor_model_parallel_region(states)
        return states.squeeze(1)

    def hidden(self, tokens: Tensor, position_ids: Tensor, packed: PackedSequences) -> Tensor:
        """Returns the final hidden states [T, H] of the full row, even under sequence parallelism.

        tokens, position_ids [T]. Under context parallelism, the result is only this rank's shard (`packed.shard`),
        [T / cp, H]. Chunks before the last return the input of the next chunk, [T_local, 1, H].
        """
        out = self.states(tokens, position_ids, packed)
        return self.gathered(out) if self.post_process else out

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
        positions: Tensor,
        target_tokens: Tensor,
        answers: Tensor | None = None,
        draft: bool = False,
        with_logits: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Tensor | TokenScores | RowLogits:
        """Returns float32 scores [U] of `target_tokens` [U], predicted at `positions` [U] of a row; see `score_tokens`.

        `answers` [R] selects among the scores. `draft` adds `draft_log_probs`. `with_logits` returns the logits of the
        full row instead. Each context-parallel rank scores its own positions, and all of them get all results. Chunks
        before the last return the hidden states for the next chunk.
        """
        states = self.states(tokens, position_ids, packed)
        if not self.post_process:
            return states
        if with_logits:
            assert packed.shard is None and answers is None, "logits require unsplit rows without shared prefixes"
            return row_logits(
                self.gathered(states),
                self.output_weight(),
                self.shard,
                self.num_tokens,
                positions,
                target_tokens,
                chunk_tokens=options.get("chunk_tokens", DEFAULT_CHUNK_TOKENS),
            )
        scores = self._scores(self.gathered(states), self.output_weight(), packed, positions, target_tokens, options)
        if draft:
            ahead = self._ahead(states.detach(), tokens, position_ids, packed, positions, target_tokens, options)
            scores = dataclasses.replace(scores, draft_log_probs=ahead)
        return scores.at(answers)

    def _ahead(
        self,
        states: Tensor,
        tokens: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
        positions: Tensor,
        target_tokens: Tensor,
        options: ScoreOptions,
    ) -> Tensor:
        """Returns the MTP head's log-probs [U] of `target_tokens` [U], predicted one token before `positions` [U].

        states [T_local, 1, H]: the model's output, detached. Results at the first position of a sequence are undefined.
        """
        next_tokens = following(tokens, packed.cu_seqlens_q)
        if packed.shard is not None:
            next_tokens = next_tokens.index_select(0, packed.shard.positions)
        embedded = embedded_tokens(self, next_tokens)
        hidden = self.gathered(self.mtp(states, embedded, packed))
        before = positions - (position_ids.index_select(0, positions) > 0).long()
        plain: ScoreOptions = {"chunk_tokens": options.get("chunk_tokens", DEFAULT_CHUNK_TOKENS)}
        return self._scores(hidden, self.output_weight().detach(), packed, before, target_tokens, plain).log_probs

    def _scores(
        self,
        hidden: Tensor,
        weight: Tensor,
        packed: PackedSequences,
        positions: Tensor,
        target_tokens: Tensor,
        options: ScoreOptions,
    ) -> TokenScores:
        """Returns the full row's scores [U]. Under context parallelism, `hidden` [T, H] is only this rank's shard."""
        shard, size = packed.shard, positions.size(0)
        which: Tensor | None = None
        if shard is not None:
            which, positions = shard.owned(positions)
            target_tokens = target_tokens.index_select(0, which)
        scores = score_tokens(
            _picked(hidden, packed, positions),
            weight,
            target_tokens,
            self.shard,
            into_main_grad=self.config.gradient_accumulation_fusion,
            **options,
        )
        if shard is None or which is None:
            return scores
        return TokenScores(
            log_probs=shard.whole(scores.log_probs, which, size),
            entropy=None if scores.entropy is None else shard.whole(scores.entropy, which, size),
            full_log_probs=shard.whole(scores.full_log_probs, which, size),
            outside=shard.whole(scores.outside.float(), which, size) > 0,
        )


class ValueModel(PolicyModel):
    """The critic: a decoder that predicts one value per response token."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Replaces the output layer with a zero-initialized value head, replicated on all tensor-parallel ranks."""
        if self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(
                self.config.hidden_size, 1, dtype=self.config.params_dtype, device=torch.get_default_device()
            )
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed: PackedSequences,
        positions: Tensor,
        answers: Tensor | None = None,
    ) -> Tensor:
        """Returns float32 values [U] at `positions` [U], each right before a response token, of a row of T tokens.

        `answers` [R] selects among the values. Context parallelism and chunks before the last work as in
        `PolicyModel.forward`.
        """
        hidden = self.hidden(tokens, position_ids, packed)
        if not self.post_process:
            return hidden
        shard, size = packed.shard, positions.size(0)
        if shard is not None:
            which, positions = shard.owned(positions)
        if hidden.requires_grad:  # all tensor-parallel ranks compute the same values, and their gradients are summed
            hidden.register_hook(lambda grad: grad / self.config.tensor_model_parallel_size)
        values = token_values(_picked(hidden, packed, positions), self.value_head.weight, self.value_head.bias)
        values = values if shard is None else shard.whole(values, which, size)
        return values if answers is None else values.index_select(0, answers)


def _picked(hidden: Tensor, packed: PackedSequences, positions: Tensor) -> Tensor:
    """Selects the hidden states [U, H] at `positions` [U] of this rank's `hidden` [T, H]."""
    if packed.asked is None:
        return hidden.index_select(0, positions)
    assert packed.asked.rows.numel() == positions.numel(), "the positions do not match the packed row"
    return repeat_rows(hidden, packed.asked)


@torch.no_grad()
def embedded_tokens(chunk: PolicyModel, tokens: Tensor) -> Tensor:
    """Returns the embeddings [T, H] of `tokens` [T], which must be the same on all tensor-parallel ranks."""
    weight, shard = _weight(chunk), chunk.shard
    local, held = shard.local(tokens)
    rows = weight.index_select(0, local).masked_fill_(~held.unsqueeze(1), 0)
    return shard.all_reduce(rows)


def _weight(chunk: PolicyModel) -> Tensor:
    if chunk.pre_process:
        weight: Tensor = chunk.embedding.word_embeddings.weight
    elif chunk.share_embeddings_and_output_weights:
        weight = chunk.output_weight()
    else:
        assert chunk.lent_embedding is not None, "the last stage has no copy of the embedding outside a step"
        weight = chunk.lent_embedding
    return weight.detach()


@contextmanager
def lent_embedding(chunks: Sequence[Any]) -> Iterator[None]:
    """Lends the first stage's embedding to the last stage inside the block, if needed. Collective over the pipeline.

    `chunks` are this rank's model chunks, wrapped in Megatron's DDP.
    """
    models: list[PolicyModel] = [chunk.module for chunk in chunks]
    if not models[-1].borrows_embedding:
        yield
        return
    group = mpu.get_pipeline_model_parallel_group()
    first, last = dist.get_global_rank(group, 0), dist.get_global_rank(group, group.size() - 1)
    if dist.get_rank() == first:
        dist.send(models[0].embedding.word_embeddings.weight.detach(), dst=last, group=group)
    elif dist.get_rank() == last:
        weight = models[-1].output_layer.weight
        models[-1].lent_embedding = torch.empty_like(weight, requires_grad=False)
        dist.recv(models[-1].lent_embedding, src=first, group=group)
    try:
        yield
    finally:
        models[-1].lent_embedding = None
