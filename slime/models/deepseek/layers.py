"""Layers of DeepSeek's models: latent attention, and the indexer of sparse attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import skip_init

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.packed_attention import PackedAttention, PackedSequences, RMSNorm, RowShard, current_device
from slime.models.common.rotary import attention_factor, cos_sin, inverse_frequencies, rotate, softmax_scale
from slime.models.deepseek.config import indexer_kinds
from slime.ops.attention import per_sequence, to_selected, wide_product
from slime.ops.select import name_of

SCORES_AT_ONCE = 1 << 27
"""Maximum number of indexer scores (heads x queries x keys, float32) in memory at once."""
TIE_STEP = 1e-30
"""Offset between neighbouring keys that both score zero, to break the tie. Other scores are far larger."""


class SparseIndexer(torch.nn.Module):
    """The indexer of sparse attention (DeepSeek-V3.2, section 2.1; GLM-5), which selects the keys for each query.

    Lightweight attention scores all keys at or before a query and selects the top `index_topk`. Selection is not
    differentiable, so the policy loss gives the indexer no gradient: its parameters are frozen, but loaded, exported
    and synced. For sequences of at most `index_topk` tokens, queries attend to all keys and the indexer does not run.
    The indexer is replicated on tensor-parallel ranks, which all compute the same selection. Under context parallelism,
    a rank selects keys for its own queries, from the keys of all ranks.
    """

    def __init__(self, config: TransformerConfig, hf_config: HfConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.heads, self.dim, self.topk = (int(hf_config[f"index_{n}"]) for n in ("n_heads", "head_dim", "topk"))
        self.rope_dim = int(hf_config["qk_rope_head_dim"])
        # Defaults to False even if the attention is interleaved.
        self.interleaved = bool(hf_config.get("indexer_rope_interleave", False))

        def linear(size: int, out: int) -> torch.nn.Linear:
            made = skip_init(torch.nn.Linear, size, out, bias=False, device=current_device(), dtype=config.params_dtype)
            assert isinstance(made, torch.nn.Linear), "skip_init keeps the class"
            return made

        self.linear_wq_b = linear(int(hf_config["q_lora_rank"]), self.heads * self.dim)
        self.linear_wk = linear(config.hidden_size, self.dim)
        self.k_norm = torch.nn.LayerNorm(self.dim, eps=1e-6, device=current_device(), dtype=torch.float32)
        self.linear_weights_proj = linear(config.hidden_size, self.heads)
        self.requires_grad_(False)

    def needed(self, packed: PackedSequences) -> bool:
        """Returns whether any sequence in the row has more than `topk` tokens. The same on all ranks."""
        return int(packed.cu_seqlens_q.diff().max()) > self.topk

    @torch.no_grad()
    def forward(
        self, hidden: Tensor, query_latent: Tensor, cos: Tensor, sin: Tensor, packed: PackedSequences
    ) -> list[Tensor | None]:
        """Returns per sequence, or local chunk, the indices of the selected keys, int32 [n, topk], or None if all keys
        are visible.

        Under sequence parallelism, hidden [T_local, 1, H] and query_latent [T_local, 1, rank] are shards of this rank's
        tokens. cos and sin [T, 1, d / 2] cover all of these. If a query has fewer than `topk` keys, its remaining
        indices point to later keys, which must be masked.
        """
        projected = [self.linear_wq_b(query_latent), self.linear_wk(hidden), self.linear_weights_proj(hidden)]
        row = torch.cat(projected, dim=-1)
        if self.sequence_parallel:
            row = gather_from_sequence_parallel_region(row)
        q, k, weights = row.squeeze(1).split([self.heads * self.dim, self.dim, self.heads], dim=-1)
        k = self.k_norm(k.float()).to(k.dtype).unsqueeze(1)
        q, k = (self._rotated(x, cos, sin) for x in (q.unflatten(-1, (self.heads, self.dim)), k))
        weights = weights.float() * (self.heads * self.dim) ** -0.5
        if packed.shard is not None:
            k = packed.shard.of_keys(k)
        queries, weight_parts = (x.split(packed.query_lengths) for x in (q, weights))
        rows = zip(queries, k.squeeze(1).split(packed.key_lengths), weight_parts, strict=True)
        return [None if b.size(0) <= self.topk else self._choose(a, b, c) for a, b, c in rows]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, still = x.split([self.rope_dim, self.dim - self.rope_dim], dim=-1)
        return torch.cat([rotate(turned, cos, sin, interleaved=self.interleaved), still], dim=-1)

    def _choose(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """q [n, heads, d], k [m, d], weights [n, heads] of one sequence or chunk -> [n, topk].

        Keys for which no head has a positive product all score zero. Among them, `topk` alone would choose depending
        on the number of keys, and therefore on padding and chunks. Here, earlier keys come first instead.
        """
        n, m = q.size(0), k.size(0)
        place = torch.arange(m, device=k.device)
        step = max(1, SCORES_AT_ONCE // (self.heads * m))
        chosen = []
        for a in range(0, n, step):
            b = min(a + step, n)
            first, end = m - n + a, m - n + b
            scores = wide_product(q[a:b].reshape(1, -1, self.dim), k[:end].T.unsqueeze(0)).relu_()
            score = torch.bmm(weights[a:b].unsqueeze(1), scores.view(b - a, self.heads, end)).squeeze(1)
            score = torch.where(score == 0, place[:end] * -TIE_STEP, score)
            score = score.masked_fill_(place[:end] > place[first:end].unsqueeze(1), -float("inf"))
            score = functional.pad(score, [0, max(0, self.topk - end)], value=-float("inf"))
            chosen.append(score.topk(self.topk, dim=-1).indices.int())
        return torch.cat(chosen)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the latent norms, as in transformers. SGLang uses `rms_norm_eps`, which is the same in DeepSeek-V3, but
1e-5 in GLM-4.7-Flash and GLM-5. There, results differ by 4.5e-6 divided by the latent's variance.
"""


class LatentAttention(MegatronModule):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Keys and values share a small latent.

    Megatron's module with the local spec splits the down projections. Here they are replicated on tensor-parallel
    ranks, as in the engines, and only heads are split. The core attention is `PackedAttention`, but context-parallel
    ranks gather latents instead of keys and values (except with `--cp-comm-type a2a`). Used for DeepSeek-V3 and
    GLM-4.7-Flash, and with a `SparseIndexer` for DeepSeek-V3.2 and GLM-5: rows with a sequence of more than
    `index_topk` tokens then attend to the selected latents (`to_selected`).

    Invariants
    1. The rotary part of a key is shared by all heads, so its gradient is summed over tensor-parallel ranks.
    2. A layer without an indexer reuses the selection of the last layer that has one, for the same row and on the same
       pipeline stage. The selection is stored in the row, so recomputation reuses it as well.
    """

    frequencies: Tensor

    def __init__(self, config: TransformerConfig, layer_number: int, hf_config: HfConfig, **_unused: Any) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        self.kv_rank, self.nope, self.rope, self.value = (int(hf_config[name]) for name in names)
        heads, head_dim, hidden = config.num_attention_heads, self.nope + self.rope, config.hidden_size
        self.heads = heads // config.tensor_model_parallel_size
        """Number of heads on this rank."""
        self.interleaved = bool(hf_config.get("rope_interleave", True))
        self.factor = attention_factor(hf_config)
        frequencies = inverse_frequencies(hf_config, self.rope).to(current_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method}
        linear |= {"bias": False, "skip_bias_add": False, "is_expert": False}
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
        self.scale = softmax_scale(hf_config, head_dim)
        self.core_attention = PackedAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=self.scale
        )
        self.recompute_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self._choose_indexer(hf_config)

    def _whole(self, size: int, out: int) -> torch.nn.Module:
        """Returns a linear layer that is replicated on tensor-parallel ranks. Its gradients are summed under sequence
        parallelism."""
        config = self.config
        linear = skip_init(torch.nn.Linear, size, out, bias=False, device=current_device(), dtype=config.params_dtype)
        linear.weight.sequence_parallel = config.sequence_parallel
        return linear

    def _choose_indexer(self, hf_config: HfConfig) -> None:
        """Sets `indexer`, `chooser` (the layer whose selection is used) and `shares` (whether the next layer reuses
        this layer's selection).
        """
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
        """[T_local, 1, H] -> [T_local, 1, H] (a shard of the row under sequence parallelism), and None for the bias."""
        packed = packed_seq_params
        assert packed.positions is not None, "a packed row must have token positions"
        cos, sin = cos_sin(packed.positions, self.frequencies, self.factor)
        query_latent = None
        if hasattr(self, "linear_q_proj"):
            query = self.linear_q_proj(hidden_states)[0]
        else:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query = self.linear_q_up_proj(query_latent)[0]
        latent, turned = self.linear_kv_down_proj(hidden_states).split([self.kv_rank, self.rope], dim=-1)
        latent = self.kv_layernorm(latent)
        q, q_turned = query.squeeze(1).unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], dim=-1)
        query = torch.cat([q, rotate(q_turned, cos, sin, interleaved=self.interleaved)], dim=-1)
        turned = rotate(self._of_all_tokens(turned), cos, sin, interleaved=self.interleaved)
        selected = self._selected(hidden_states, query_latent, cos, sin, packed)
        if selected is None:
            out = self._attend_to_all(query, latent, turned, packed)
        else:
            out = self._attend_to_selected(query, latent, turned, packed, selected)
        return self.linear_proj(out.unsqueeze(1))[0], None

    def _attend_to_all(self, query: Tensor, latent: Tensor, turned: Tensor, packed: PackedSequences) -> Tensor:
        """query [T, heads, nope + rope], latent [T_local, 1, rank], turned [T, 1, rope] -> [T, heads * v]."""
        if packed.shard is not None and not self.core_attention.splits_heads:
            return self._attend_to_row(query, latent, turned, packed, packed.shard)
        core = functools.partial(self.core_attention, packed_seq_params=packed)
        key_value = self.linear_kv_up_proj(latent)[0].squeeze(1).unflatten(-1, (self.heads, -1))
        return self._causal(query, key_value, turned, core, recompute=self.recompute_core)

    def _attend_to_row(
        self, query: Tensor, latent: Tensor, turned: Tensor, packed: PackedSequences, shard: RowShard
    ) -> Tensor:
        """Like `_attend_to_all`, under context parallelism. Ranks gather latents, which are much smaller than the keys
        and values of all heads, and each computes the keys and values of the row. Recomputation includes both."""
        core = functools.partial(self.core_attention, packed_seq_params=dataclasses.replace(packed, shard=None))

        def attend(query: Tensor, latent: Tensor, turned: Tensor) -> Tensor:
            key_value, turned = self._keys_of_row(latent, turned, shard)
            return self._causal(query, key_value, turned, core, recompute=False)

        out: Tensor = (
            checkpoint(attend, False, query, latent, turned) if self.recompute_core else attend(query, latent, turned)
        )
        return out

    def _keys_of_row(self, latent: Tensor, turned: Tensor, shard: RowShard) -> tuple[Tensor, Tensor]:
        """latent [T_local, 1, rank], turned [T, 1, rope] of this rank's tokens -> [K, heads, nope + v] and [K, 1, rope]
        of all keys that they attend to."""
        parallel = self.config.sequence_parallel
        if parallel:  # the gradient comes back whole from the scattering below
            latent = gather_from_sequence_parallel_region(latent, tensor_parallel_output_grad=False)
        keys = shard.of_keys(torch.cat([latent, turned], dim=-1))
        latent, turned = keys.split([self.kv_rank, self.rope], dim=-1)
        if parallel:
            missing = -keys.size(0) % self.config.tensor_model_parallel_size
            latent = scatter_to_sequence_parallel_region(functional.pad(latent, (0, 0, 0, 0, 0, missing)))
        key_value = self.linear_kv_up_proj(latent)[0][: keys.size(0)].squeeze(1)
        return key_value.unflatten(-1, (self.heads, -1)), turned

    def _attend_to_selected(
        self, query: Tensor, latent: Tensor, turned: Tensor, packed: PackedSequences, selected: Sequence[Tensor | None]
    ) -> Tensor:
        """Like `_attend_to_all`. Sequences or chunks without selected keys get ordinary causal attention."""
        keys = torch.cat([self._of_all_tokens(latent), turned], dim=-1)
        if packed.shard is not None:
            keys = packed.shard.of_keys(keys)
        up, out = self._kv_up_matrices(latent.device), []
        for q, kv, chosen in zip(
            query.split(packed.query_lengths), keys.split(packed.key_lengths), selected, strict=True
        ):
            if chosen is not None:
                out.append(to_selected(q, up, kv.squeeze(1), chosen, scale=self.scale).flatten(1))
                continue
            latent, turned = kv.split([self.kv_rank, self.rope], dim=-1)
            key_value = functional.linear(latent, up.flatten(0, 1).to(kv.dtype)).view(kv.size(0), self.heads, -1)
            core = functools.partial(
                per_sequence, query_lengths=[q.size(0)], key_lengths=[kv.size(0)], scale=self.scale
            )
            out.append(self._causal(q, key_value, turned, core, recompute=self.recompute_core))
        return torch.cat(out)

    def _causal(
        self, query: Tensor, key_value: Tensor, turned: Tensor, core: Callable[..., Tensor], *, recompute: bool
    ) -> Tensor:
        """key_value [K, heads, nope + v], turned [K, 1, rope] -> the output of `core` for query, key and value, [T,
        heads * v]."""
        key, value = key_value.split([self.nope, self.value], dim=-1)
        key = torch.cat([key, turned.expand(-1, self.heads, -1)], dim=-1)
        equal = query.is_cuda and name_of("attention", query) != "flash4"  # what other kernels need of head sizes
        missing = query.size(-1) - self.value if equal else 0
        if missing > 0:
            value = functional.pad(value, [0, missing])
        out: Tensor = checkpoint(core, False, query, key, value) if recompute else core(query, key, value)
        return out.view(query.size(0), self.heads, -1)[..., : self.value].flatten(1)

    def _of_all_tokens(self, x: Tensor) -> Tensor:
        """x [T_local, 1, d], shared by all heads -> [T, 1, d]. Gradients are summed over tensor-parallel ranks."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x)
        return copy_to_tensor_model_parallel_region(x)

    def _kv_up_matrices(self, device: torch.device) -> Tensor:
        """Returns the up projection [heads, nope + v, rank] in float32, the dtype in which its gradients are summed.

        Applies the layer to unit vectors, so that adapters, quantised weights, and the layer's own accumulation and
        communication of weight gradients still take effect.
        """
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        size = -(-self.kv_rank // shards) * shards
        dtype = self.config.params_dtype
        unit = torch.eye(size, self.kv_rank, dtype=dtype, device=device).unsqueeze(1)
        if shards > 1:
            unit = scatter_to_sequence_parallel_region(unit)
        columns = self.linear_kv_up_proj(unit)[0][: self.kv_rank].squeeze(1)
        return columns.T.to(torch.promote_types(dtype, torch.float32)).unflatten(0, (self.heads, -1))

    def _selected(
        self, hidden: Tensor, query_latent: Tensor | None, cos: Tensor, sin: Tensor, packed: PackedSequences
    ) -> list[Tensor | None] | None:
        """Returns the selected keys per sequence or local chunk, or None if no sequence is long enough to select."""
        if self.chooser is None:
            return None
        if self.indexer is None:
            return packed.chosen_keys.get(self.chooser)
        assert query_latent is not None, "an indexer needs q_lora_rank"
        if not self.indexer.needed(packed):
            return None
        selected = self.indexer(hidden, query_latent, cos, sin, packed)
        if self.shares:
            packed.chosen_keys[self.chooser] = selected
        return selected


def check_stages(kinds: Sequence[str], first_layers: Iterable[int]) -> None:
    """Raises `ConfigError` if the first layer of a pipeline stage reuses the selection of an earlier layer."""
    for layer in first_layers:
        if kinds[layer : layer + 1] == ["shared"]:
            raise ConfigError(
                f"a pipeline stage starts with layer {layer}, which depends on an indexer on an earlier stage; choose "
                "--pipeline-model-parallel-size so that each stage starts with a layer of indexer type full"
            )
