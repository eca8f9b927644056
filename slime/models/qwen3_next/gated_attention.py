"""Full attention whose output passes a sigmoid gate (Qwen3-Next, Qwen3.5).

HF's `q_proj` holds [q; gate] per head, so `linear_qkv` holds [q, gate, q, gate, ..., k, v] per KV head; Megatron's own
gated attention expects [q..., gate..., k, v]. Norms are ops of this device; the split and the rotation are in plain
PyTorch, with the angles of the whole row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slime.models.common.attention import PackedSequences, RotatingAttention
from slime.ops.qk_rotary import rotate


class GatedAttention(RotatingAttention):
    """Needs `attention_output_gate` in the configuration."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_given: Any, **_unused: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T, 1, H] -> query [T, 1, heads, d], key and value [T, 1, groups, d], gate [T, 1, heads, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = mixed.unflatten(-1, (groups, -1, size))
        queries, key, value = heads.split([heads.size(-2) - 2, 1, 1], dim=-2)
        query, gate = (x.flatten(2, 3) for x in queries.unflatten(-2, (-1, 2)).unbind(-2))
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(-2)), value.squeeze(-2), gate

    def rotated(self, hidden_states: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[T_local, 1, H] -> query [T, heads, d], key and value [T, groups, d], gate [T, 1, heads, d]."""
        assert packed.rotary is not None, "the model makes cos and sin before its first layer"
        query, key, value, gate = self.get_query_key_value_tensors(hidden_states)
        interleaved = self.config.rotary_interleaved
        query, key = (rotate(x.squeeze(1), *packed.rotary, interleaved=interleaved) for x in (query, key))
        return query, key, value.squeeze(1), gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, 1, heads * d], gate [T, 1, heads, d] -> gated x. Megatron's own is compiled, which a CPU may lack."""
        return x * gate.flatten(2).sigmoid()
