"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values come from one small latent.

Megatron's own with the local specification splits the down projections. Here they are whole on each tensor-parallel
rank, as in the engines, and only what belongs to heads is split. It feeds `PackedAttention`, so context parallelism is
the same as elsewhere. DeepSeek-V3, GLM-4.7-Flash; with a `SparseIndexer` GLM-5.

Invariants
1. The rotary part of a key is one for all heads: its gradient is summed over the tensor-parallel ranks.
2. A layer without an indexer of its own uses the choice of the last layer with one, for the same row; both lie on one
   pipeline stage. The choice is kept with the row, so that recomputation finds that of the right layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn.utils import skip_init

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.attention import PackedAttention, PackedSequences
from slime.models.common.norm import RMSNorm, current_device
from slime.models.common.rotary import attention_factor, cos_sin, inverse_frequencies, rotate, softmax_scale
from slime.models.deepseek.indexer import indexer_kinds
from slime.models.deepseek.sparse_indexer import SparseIndexer, masks_of

LATENT_NORM_EPS = 1e-6
"""Of the norms on latents, as in transformers. SGLang takes `rms_norm_eps`, which is the same in DeepSeek-V3, but 1e-5
in GLM-4.7-Flash and GLM-5: there the two differ by 4.5e-6 over the variance of a latent."""


class LatentAttention(MegatronModule):
    """The attention of one layer in Megatron's interface; it needs no rotary embedding from the model."""

    frequencies: Tensor

    def __init__(self, config: TransformerConfig, layer_number: int, hf_config: HfConfig, **_unused: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self.kv_rank, self.nope, self.rope, self.value = (int(hf_config[name]) for name in names)
        heads, head_dim, hidden = config.num_attention_heads, self.nope + self.rope, config.hidden_size
        self.heads = heads // config.tensor_model_parallel_size
        """Of this rank."""
        self.interleaved = bool(hf_config.get("rope_interleave", True))
        self.factor = attention_factor(hf_config)
        frequencies = inverse_frequencies(hf_config, self.rope).to(current_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        linear: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
        }
        column = functools.partial(ColumnParallelLinear, gather_output=False, **linear)
        query_size = int(hf_config.get("q_lora_rank") or 0)
        if query_size:
            self.linear_q_down_proj = self._whole(hidden, query_size)
            self.q_layernorm = RMSNorm(config, query_size, eps=LATENT_NORM_EPS)
            self.linear_q_up_proj = column(query_size, heads * head_dim)
        else:
            self.linear_q_proj = column(hidden, heads * head_dim)
        self.linear_kv_down_proj = self._whole(hidden, self.kv_rank + self.rope)
        self.kv_layernorm = RMSNorm(config, self.kv_rank, eps=LATENT_NORM_EPS)
        self.linear_kv_up_proj = column(self.kv_rank, heads * (self.nope + self.value))
        self.linear_proj = RowParallelLinear(heads * self.value, hidden, input_is_parallel=True, **linear)
        self.core_attention = PackedAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=softmax_scale(hf_config, head_dim)
        )
        self.recompute_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self._choose_indexer(hf_config)

    def _whole(self, size: int, out: int) -> torch.nn.Module:
        """A linear layer that every tensor-parallel rank holds all of; its gradients are summed if it sees a part."""
        config = self.config
        linear = skip_init(torch.nn.Linear, size, out, bias=False, device=current_device(), dtype=config.params_dtype)
        linear.weight.sequence_parallel = config.sequence_parallel
        return linear

    def _choose_indexer(self, hf_config: HfConfig) -> None:
        """Sets `indexer`, whose choice is used (`chooser`) and whether other layers use this one's (`shares`)."""
        kinds, layer = indexer_kinds(hf_config), self.layer_number - 1
        self.chooser = max((i for i in range(layer + 1) if kinds[i] == "full"), default=None) if kinds else None
        self.shares = bool(kinds) and "shared" in kinds[layer + 1 : layer + 2]
        self.indexer = SparseIndexer(self.config, hf_config) if self.chooser == layer else None
        stages = range(self.config.virtual_pipeline_model_parallel_size or 1)
        ranks = range(self.config.pipeline_model_parallel_size)
        check_stages(kinds, [get_transformer_layer_offset(self.config, vp, pp) for pp in ranks for vp in stages])

    def forward(
        self, hidden_states: Tensor, *_given: Any, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[Tensor, None]:
        """[T_local, 1, H] -> [T_local, 1, H] (a part of the row under sequence parallelism), and no bias."""
        packed = packed_seq_params
        assert packed.positions is not None, "a packed row knows the positions of its tokens"
        cos, sin = cos_sin(packed.positions, self.frequencies, self.factor)
        query_latent = None
        if hasattr(self, "linear_q_proj"):
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query = self.linear_q_up_proj(query_latent)[0]
        latent, turned = self.linear_kv_down_proj(hidden_states).split([self.kv_rank, self.rope], dim=-1)
        key_value = self.linear_kv_up_proj(self.kv_layernorm(latent))[0]
        if self.config.sequence_parallel:
            turned = gather_from_sequence_parallel_region(turned)
        else:
            turned = copy_to_tensor_model_parallel_region(turned)
        query, key_value = (x.squeeze(1).unflatten(-1, (self.heads, -1)) for x in (query, key_value))
        q, q_turned = query.split([self.nope, self.rope], dim=-1)
        k, value = key_value.split([self.nope, self.value], dim=-1)
        q_turned, turned = (rotate(x, cos, sin, interleaved=self.interleaved) for x in (q_turned, turned))
        query = torch.cat([q, q_turned], dim=-1)
        key = torch.cat([k, turned.expand(-1, self.heads, -1)], dim=-1)
        masks = self._masks(hidden_states, query_latent, cos, sin, packed)
        return self.linear_proj(self._attend(query, key, value, packed, masks).unsqueeze(1))[0], None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, masks: list[Tensor | None] | None
    ) -> Tensor:
        """query, key [T, heads, nope + rope], value [T, heads, v] -> [T, heads * v]."""
        missing = query.size(-1) - self.value if query.is_cuda else 0  # kernels of GPUs want equal heads
        if missing > 0:
            value = torch.nn.functional.pad(value, [0, missing])

        def core(*qkv: Tensor) -> Tensor:
            out: Tensor = self.core_attention(*qkv, packed_seq_params=packed, masks=masks)
            return out

        out = checkpoint(core, False, query, key, value) if self.recompute_core else core(query, key, value)
        if missing > 0:
            out = out.unflatten(-1, (self.heads, -1))[..., : self.value].flatten(1)
        return out

    def _masks(
        self, hidden: Tensor, query_latent: Tensor | None, cos: Tensor, sin: Tensor, packed: PackedSequences
    ) -> list[Tensor | None] | None:
        """What each query sees, per sequence; None where every query sees all before it."""
        if self.chooser is None:
            return None
        if self.indexer is not None:
            assert query_latent is not None, "an indexer needs q_lora_rank"
            if not self.indexer.needed(packed):
                return None
            chosen = self.indexer(hidden, query_latent, cos, sin, packed)
            if self.shares:
                packed.chosen_keys[self.chooser] = chosen
            return masks_of(chosen)
        kept = packed.chosen_keys.get(self.chooser)
        return None if kept is None else masks_of(kept)


def check_stages(kinds: Sequence[str], first_layers: Iterable[int]) -> None:
    """Raises `ConfigError` if one of the layers that begin a pipeline stage uses the choice of a layer before it."""
    for layer in first_layers:
        if kinds[layer : layer + 1] == ["shared"]:
            raise ConfigError(
                f"got a pipeline stage that begins with layer {layer}, which shares the indexer of a layer before it; "
                "choose --pipeline-model-parallel-size so that stages begin with layers of indexer type full"
            )
