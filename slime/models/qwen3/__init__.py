"""Qwen3: QK norms per head; dense or MoE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.core.hf_config import HfConfig, read_hf_config
from slime.models import FAMILIES
from slime.models.common.config import is_sparse, softmax_experts
from slime.models.common.rows import attention, decoder_table, experts, mlp, pre_norm
from slime.models.common.table import FamilyTable, Head, Spread
from slime.models.family import Family

if TYPE_CHECKING:
    from slime.settings import Args


@FAMILIES.register("qwen3")
class Qwen3(Family):
    """Dense Qwen3. The table covers optional biases, although this release does not train them."""

    shares_prefixes = True
    lends_kernels = True

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        return {"qk_layernorm": True}

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        bias = bool(hf_config.get("attention_bias", False))
        return decoder_table(
            hf_config,
            lambda s, layer: pre_norm(
                s.hidden_size,
                attention(s, qkv_bias=bias, out_bias=bias, qk_norm=True),
                experts(s) if is_sparse(hf_config, layer) else mlp(s.hidden_size, s.intermediate_size),
            ),
            spread=self.spread(hf_config),
        )

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(dp_attention=True, stages=Head.LAST, tied_stages=True)


@FAMILIES.register("qwen3_moe")
class Qwen3Moe(Qwen3):
    """Qwen3 with experts in all or some layers."""

    def check(self, args: Args) -> str | None:
        config = read_hf_config(str(args.hf_checkpoint))
        dense = [layer for layer in range(int(config["num_hidden_layers"])) if not is_sparse(config, layer)]
        if not dense or args.debug_train_only:
            return None
        return (
            f"layer {dense[0]} of this qwen3_moe is dense (mlp_only_layers, decoder_sparse_step), but SGLang's model "
            "has experts in every layer, so no engine can serve it; only fine-tuning (--loss-type sft_loss) works"
        )

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        return {**super().departures(hf_config), **softmax_experts(hf_config)}

    def spread(self, hf_config: HfConfig) -> Spread:
        return Spread(dp_attention=True, stages=Head.EVERY)
