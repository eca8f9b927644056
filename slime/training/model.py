"""`PolicyModel`: Megatron's GPT model that answers with log-probs of response tokens instead of logits.

Built from an HF config for Llama, Qwen2 and Qwen3 (dense). The output layer is applied inside a loop over tokens
(`log_probs`), and only to positions that predict a response token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from slime.config.model_shape import rope_kind, rope_of
from slime.core.errors import ConfigError
from slime.training.layers import PackedSequences, decoder_spec
from slime.training.log_probs import DEFAULT_CHUNK_TOKENS, VocabShard, token_log_probs
from slime.training.model_config import transformer_config


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


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The smallest multiple of the tensor-parallel size that holds the vocabulary; added rows never enter a softmax."""
    return -(-vocab_size // tp_size) * tp_size


def build_model(megatron: Mapping[str, Any], hf_config: Mapping[str, Any], device: torch.device) -> PolicyModel:
    """Builds this rank's part of the model with undefined weights; `load_hf.load_weights` fills them.

    Needs an initialised `parallel_state`. Raises `ConfigError` for models or settings that cannot be trained.
    """
    config = transformer_config(megatron, hf_config)
    tp_size, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for what, count in (("attention heads", config.num_attention_heads), ("key-value heads", config.num_query_groups)):
        if count % tp_size:
            raise ConfigError(f"got --tensor-model-parallel-size {tp_size} and {count} {what}; it must divide them")
    vocab_size = int(hf_config["vocab_size"])
    padded = padded_vocab_size(vocab_size, tp_size)
    theta, _ = rope_of(hf_config)
    model = PolicyModel(
        config,
        decoder_spec(config),
        vocab_size=padded,
        max_sequence_length=int(hf_config.get("max_position_embeddings") or 1 << 20),
        position_embedding_type="rope",
        rotary_base=theta,
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings")),
    )
    local = padded // tp_size
    start = tp_rank * local
    group = mpu.get_tensor_model_parallel_group() if tp_size > 1 else None
    model.shard = VocabShard(start=start, num_valid=max(0, min(local, vocab_size - start)), group=group)
    model.rotary_pos_emb.inv_freq = inverse_frequencies(hf_config, config.kv_channels).to(device)
    _mark_sharded_parameters(model)
    return model.to(device)


def _mark_sharded_parameters(model: PolicyModel) -> None:
    """Tells the optimizer which parameters each tensor-parallel rank holds a part of.

    Megatron sets these marks while it initialises weights, which we skip. Without them the gradient norm counts only
    the first rank's part, and clipping is wrong under tensor parallelism.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            parts = [(module.weight, 0), (getattr(module, "bias", None), 0)]
        elif isinstance(module, RowParallelLinear):
            parts = [(module.weight, 1)]
        else:
            continue
        for parameter, dim in parts:
            if parameter is not None and not getattr(parameter, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def inverse_frequencies(hf_config: Mapping[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] float32 rotary frequencies with the scaling of the HF config.

    Megatron's own llama 3 scaling fixes three of its four parameters, so the frequencies are computed here.
    Source: RoFormer (Su et al. 2021); llama 3 scaling as published with Llama 3.1.
    """
    theta, scaling = rope_of(hf_config)
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if rope_kind(scaling) == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    long = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, blended, long)
