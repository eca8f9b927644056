"""gpt-oss: attention with sinks and, in every second layer, a sliding window; biases everywhere; experts with a clamped
SwiGLU.

Checkpoints and the trainer stack a layer's experts as [in, out], with gates and values interleaved. Engines store [out,
in].
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, quantisation_of, read_hf_config
from slime.models import FAMILIES
from slime.models.common.config import softmax_experts
from slime.models.common.rows import Rows, attention, column, copy, decoder_table, pre_norm
from slime.models.common.table import EXPERT, FamilyTable, Head, ModelSizes, Row, Spread, Unit
from slime.models.family import Family

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.settings import Args

SWIGLU_LIMIT = 7.0
"""The limit to which gates and values are clamped. Hardcoded in transformers; SGLang reads `swiglu_limit`."""
_EXPERTS = f"mlp.experts.local_experts.{EXPERT}"


@FAMILIES.register("gpt_oss")
class GptOss(Family):
    """Every layer is an MoE layer. `intermediate_size` is the expert size."""

    rope_kinds = ("default", "linear", "llama3", "yarn")
    refused_biases = ()
    layer_kinds = ("full_attention", "sliding_attention")
    shares_prefixes = True

    def check(self, args: Args) -> str | None:
        """Rejects LoRA adapters on experts and engine kernels that reorder experts after loading."""
        rows = self.weight_map(read_hf_config(str(args.hf_checkpoint))).layers[0]
        names = [name for row in rows if EXPERT in row.megatron for name in (row.megatron, *row.hf)]
        if args.lora_rank and any(re.search(p, n) for p in args.lora_target_modules or ("",) for n in names):
            return (
                "--lora-rank would add adapters to the experts of gpt-oss, which is not supported; set "
                "--lora-target-modules self_attention"
            )
        backend = args.sglang.get("moe_runner_backend")
        if backend == "triton" or args.debug_train_only:
            return None
        return (
            f"with --sglang-moe-runner-backend {backend} SGLang can store the experts of gpt-oss in an order that "
            "the weight sync cannot verify; set --sglang-moe-runner-backend triton"
        )

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Also rejects configs that the engine would interpret differently."""
        if (quantised := quantisation_of(hf_config)) is not None:
            raise ConfigError(
                f"this gpt_oss is in {quantised.get('quant_method')}, which slime does not support; convert it to "
                "bfloat16 with transformers (dequantize=True in Mxfp4Config)"
            )
        wanted = {"attention_bias": True, "swiglu_limit": SWIGLU_LIMIT}
        for name, value in wanted.items():
            if hf_config.get(name) != value:
                raise ConfigError(
                    f"this gpt_oss has {name} {hf_config.get(name)}; slime supports only {value}, as released"
                )
        if hf_config.get("tie_word_embeddings"):
            raise ConfigError("this gpt_oss has tie_word_embeddings, which the engine ignores; untie the embeddings")
        if not hf_config.get("layer_types"):
            raise ConfigError("config.json of this gpt_oss has no layer_types, which SGLang requires; add it")
        experts = softmax_experts({**_of_experts(hf_config), "norm_topk_prob": True})
        return {"add_bias_linear": True, "add_qkv_bias": True, **experts}

    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        return decoder_table(_of_experts(hf_config), _layer, spread=self.spread(hf_config))

    def spread(self, hf_config: HfConfig) -> Spread:
        """Returns single-rank stages, each with the output layer: SGLang 0.5.16 cannot split experts with biases
        under EP, and overwrites the biases under TP."""
        return Spread(stages=Head.EVERY, whole_stages=True)

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from slime.models.common.packed_attention import packed_attention
        from slime.models.gpt_oss.layers import SinkAttention

        slides = hf_config["layer_types"][layer] == "sliding_attention"
        window = int(hf_config["sliding_window"]) if slides else None
        spec = packed_attention(config, standard)
        spec.submodules.core_attention = ModuleSpec(module=SinkAttention, params={"window": window})
        return spec

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        from slime.models.gpt_oss.layers import BiasedExpertLayer

        return BiasedExpertLayer


def _of_experts(hf_config: HfConfig) -> HfConfig:
    """Returns the config with the standard keys for experts."""
    return {**hf_config, "moe_intermediate_size": hf_config["intermediate_size"]}


def _layer(s: ModelSizes, _: int) -> Rows:
    sinks = column("self_attention.core_attention.sinks", "self_attn.sinks", [(s.num_heads,)], Unit.HEADS)
    return pre_norm(s.hidden_size, (*attention(s, qkv_bias=True, out_bias=True), sinks), _experts(s))


def _experts(s: ModelSizes) -> Rows:
    hidden, size, hf = s.hidden_size, s.moe_intermediate_size, "mlp.experts"

    def stacked(ours: str, name: str, engine: str, *shape: int, **options: Any) -> Row:
        return Row(f"{_EXPERTS}.{ours}", (f"{hf}.{name}",), (shape,), f"{hf}.{engine}", stacked=True, **options)

    matrix: dict[str, Any] = {"units": (Unit.EVEN,), "transposed": True}
    return (
        copy("mlp.router.weight", "mlp.router.weight", s.num_experts, hidden),
        copy("mlp.router.bias", "mlp.router.bias", s.num_experts),
        stacked("linear_fc1.weight", "gate_up_proj", "w13_weight", hidden, 2 * size, dim=1, **matrix),
        stacked("linear_fc1.bias", "gate_up_proj_bias", "w13_weight_bias", 2 * size, wide=True),
        stacked("linear_fc2.weight", "down_proj", "w2_weight", size, hidden, dim=0, **matrix),
        stacked("linear_fc2.bias", "down_proj_bias", "w2_weight_bias", hidden, wide=True),
    )
