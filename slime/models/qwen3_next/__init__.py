"""Qwen3-Next, Qwen3.5 and 3.6: linear attention (gated delta net) mixed with layers of gated full attention."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.models import FAMILIES
from slime.models.common.config import softmax_experts
from slime.models.common.flops import AttentionCost
from slime.models.common.mtp import trains_mtp
from slime.models.common.table import FamilyTable, Spread
from slime.models.family import Family
from slime.models.qwen3_next.config import is_linear, mixer_cost, qwen_next_table, split_problem
from slime.settings.fields import Adjusted, opt

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.settings import Args

_SIZES = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
"""Dimensions of linear attention. Prefixed with `linear_`, these are keys of both HF's and Megatron's config."""


def _backend_that_exists(value: str, s: Any) -> Adjusted | None:
    return Adjusted("auto", "the trainer has no kernels of FlashQLA") if value == "flashqla" else None


@FAMILIES.register("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Family):
    """The language model, dense or MoE. In Qwen3.5 and 3.6, its config is nested as `text_config`."""

    refused_biases = ()
    layer_kinds = ("full_attention", "linear_attention")

    qwen_gdn_backend: str = opt("auto", choices=("auto", "fla", "flashqla", "torch"), adjust=_backend_that_exists)
    """Backend of linear attention in Qwen3-Next and Qwen3.5. fla: kernels of flash-linear-attention, which require a
    GPU and half precision; torch: plain PyTorch; auto: fla if it is installed and supported, else the slime kernels
    that `--kernels` allows, else torch; flashqla: same as auto."""

    def check(self, args: Args) -> str | None:
        m = args.megatron
        tp_size, cp_size = m["tensor_model_parallel_size"] or 1, m["context_parallel_size"] or 1
        return split_problem(m["linear_num_key_heads"], tp_size, cp_size) or self._kernel_problem(args)

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        return "its linear attention has a recurrent state per sample"

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        sizes = {f"linear_{name}": int(hf_config[f"linear_{name}"]) for name in _SIZES}
        keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        if values % keys:
            raise ConfigError(
                f"{keys} key heads of linear attention do not divide its {values} value heads; fix config.json"
            )
        gates = (None, "silu", "swish")
        trained = {"attention_bias": (None, False), "attn_output_gate": (None, True), "output_gate_type": gates}
        for name, allowed in trained.items():
            if hf_config.get(name) not in allowed:
                raise ConfigError(f"the checkpoint has {name} {hf_config[name]}, which this release does not support")
        parameters: HfConfig = hf_config.get("rope_parameters") or {}
        rotated = parameters.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 0.25))
        settings = {
            **sizes,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [
                int(is_linear(hf_config, layer)) for layer in range(int(hf_config["num_hidden_layers"]))
            ],
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "rotary_percent": float(rotated),
        }
        if not hf_config.get("num_experts"):
            return settings
        shared = int(hf_config.get("shared_expert_intermediate_size") or 0)
        if shared <= 0:
            raise ConfigError(
                "the checkpoint has experts and shared_expert_intermediate_size "
                f"{hf_config.get('shared_expert_intermediate_size')}; slime supports this family only with a "
                "shared expert, so use a checkpoint that has one"
            )
        return {
            **settings,
            **softmax_experts({"norm_topk_prob": True, **hf_config}),
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": True,
        }

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        mtp = self.mtp_config(hf_config) if trains_mtp(hf_config) else None
        return qwen_next_table(hf_config, self.spread(hf_config), mtp)

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """The MTP layer has full attention. Qwen3-Next checkpoints have one, although their config does not say so."""
        if int(hf_config.get("mtp_num_hidden_layers", 1)) != 1:
            return None
        return {**hf_config, "layer_types": ["full_attention"], "full_attention_interval": 1}

    def spread(self, hf_config: HfConfig) -> Spread:
        """Qwen3.5 and 3.6 are parts of multimodal models, which replicate the embedding on each rank.

        With experts, they have no dense layers, so `moe_dense_tp_size` has no effect.
        """
        wrapped, sparse = hf_config["model_type"] != "qwen3_next", num_experts_of(hf_config) > 0
        return Spread(dp_attention=True, whole_embedding=wrapped, whole_dense_mlp=wrapped and sparse)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from slime.models.common.packed_attention import packed_attention
        from slime.models.qwen3_next.layers import GatedAttention, GatedDeltaNet

        if is_linear(hf_config, layer):
            params = {"hf_config": hf_config, "backend": self.qwen_gdn_backend}
            return ModuleSpec(module=GatedDeltaNet, params=params)
        return packed_attention(config, standard, GatedAttention)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        return mixer_cost(hf_config, layer)

    def _kernel_problem(self, args: Args) -> str | None:
        if self.qwen_gdn_backend != "fla":
            return None
        problems = (
            ("flash-linear-attention is not installed", importlib.util.find_spec("fla") is None),
            ("the trainer runs on a CPU", args.device == "cpu"),
            ("the training dtype is float32", not (args.megatron["bf16"] or args.megatron["fp16"])),
        )
        reasons = " and ".join(reason for reason, holds in problems if holds)
        if not reasons:
            return None
        return f"--qwen-gdn-backend fla does not work here, because {reasons}; use torch or auto"
