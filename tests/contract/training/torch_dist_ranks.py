"""What ranks do with Megatron-core's own model and `dist_checkpointing`; of slime are the patches for a CPU alone."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from slime.compat import megatron_cpu, megatron_moe
from slime.core.hf_config import num_experts_of
from slime.training.foreign.write_torch_dist import writers_ended
from tests.support.ranks import Seat

AHEAD_OF_EXPERTS = "pre_mlp_layernorm."
"""The norm that local layers and those of Transformer Engine call otherwise where experts follow."""


@dataclass(frozen=True)
class Layout:
    """How Megatron's model is spread, and what it writes."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of `sharded_state_dict`, when it is written; empty: layers stacked."""
    te_names: bool = True
    """The names of Transformer Engine's layers, also where local ones have others."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.ep


def rewrite(seat: Seat, source: Path, target: Path, config: dict[str, Any], layout: Layout) -> list[str]:
    """Megatron loads what slime wrote, every rank its part, and writes it again in its own form.

    Returns the names of the processes that are left below the rank.
    """
    with seat.world(), _model(config, layout) as model:
        from megatron.core import dist_checkpointing

        _load(model, source)
        if not layout.te_names:
            for layer in model.decoder.layers:
                layer.submodules_config.sharded_state_dict_keys_map[AHEAD_OF_EXPERTS] = "mlp.linear_fc1.layer_norm_"
        if seat.rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        optimizer = {"optimizer": {"param_groups": [1]}, "opt_param_scheduler": {"num_steps": 3}}
        state = {**model.sharded_state_dict(metadata=dict(layout.metadata)), **optimizer}
        for key, tensor in _moments(model, layout).items():
            state[key] = tensor
        with _may_have_children(), writers_ended():
            dist_checkpointing.save(state, str(target))
    return [child.name for child in multiprocessing.active_children()]


def log_probs(seat: Seat, source: Path, config: dict[str, Any], tokens: list[int]) -> Any:
    """What the model computes that Megatron builds and fills by itself. [tokens, vocabulary]"""
    with seat.world(), _model(config, Layout()) as model, torch.no_grad():
        _load(model, source)
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        mask = torch.triu(torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool), 1)
        return model(ids, positions, mask)[0].float().log_softmax(-1)


@contextmanager
def _may_have_children() -> Iterator[None]:
    """Megatron writes in processes of its own, and those of the tests end with their parent, which forbids them."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["daemon"] = config.get("daemon"), False
    try:
        yield
    finally:
        config["daemon"] = before


def _load(model: Any, source: Path) -> None:
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(str(source))
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=content)}, str(source))
    model.load_state_dict(state["model"])


def _moments(model: Any, layout: Layout) -> dict[str, Any]:
    """A moment of the optimizer for each parameter, under the key that Megatron gives it."""
    from megatron.core.dist_checkpointing import ShardedTensor

    out = {}
    for name, held in model.sharded_state_dict(metadata=dict(layout.metadata)).items():
        if isinstance(held, ShardedTensor):
            moment = held.without_data()
            moment.key, moment.data = f"optimizer.state.exp_avg.{held.key}", torch.zeros_like(held.data)
            out[f"exp_avg.{name}"] = moment
    return out


def _transformer_config(config: dict[str, Any], layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    routed = {
        "num_moe_experts": num_experts_of(config),
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": config.get("moe_intermediate_size"),
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": layout.ep,
    }
    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        layernorm_epsilon=config["rms_norm_eps"],
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        **(routed if routed["num_moe_experts"] else {}),
    )


@contextmanager
def _model(config: dict[str, Any], layout: Layout) -> Iterator[Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    megatron_cpu.activate("cpu")
    megatron_moe.activate()
    mpu.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(1)
    experts = num_experts_of(config) or None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=True, normalization="RMSNorm")
    if experts:
        del spec.submodules.sharded_state_dict_keys_map[AHEAD_OF_EXPERTS]
    try:
        yield GPTModel(
            _transformer_config(config, layout),
            spec,
            vocab_size=config["vocab_size"],
            max_sequence_length=config["max_position_embeddings"],
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=10000,
            share_embeddings_and_output_weights=bool(config["tie_word_embeddings"]),
        )
    finally:
        mpu.destroy_model_parallel()
