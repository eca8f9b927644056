"""Builds one rank's model: layers, vocabulary shard, rotary frequencies, and parameter attributes for the optimizer.

Linear layers can compute with quantised numbers. Parameters, their names, gradients and optimizer states stay as
they are; in the forward pass, the gradient of a quantised weight goes straight through to the parameter.

`--trainer-weights fake-quantised`: linear weights are quantised and dequantised in every forward pass, so that training
sees the weights of the engines. They do not depend on the trainer's parallel layout (`weights.quantised.formats`).

`--fp8-format e4m3 --fp8-recipe blockwise`: the linear layers of attention and MLPs multiply in FP8
(`slime.ops.linear`), in the forward pass and for the gradients of their inputs. Their weights have the codes of FP8
engines, so training sees the engines' weights, and inputs are quantised as in engines. Experts' grouped products,
routers, the embedding and the output layer stay in the training dtype, as do weight gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import Module, Parameter

from slime.compat import megatron_gradients, megatron_moe
from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models import Family, family_of, table_for
from slime.models.common.config import rope_of
from slime.models.common.mlp import RoutedLayer
from slime.models.common.mtp import trains_mtp
from slime.models.common.mtp_layer import MultiTokenHead
from slime.models.common.packed_attention import RMSNorm, rotates_by_megatron
from slime.models.common.rotary import Rotary, attention_factor, inverse_frequencies
from slime.models.common.table import FamilyTable, Row
from slime.ops import linear
from slime.settings.args import Args
from slime.training.model.log_probs import VocabShard
from slime.training.model.megatron_config import transformer_config
from slime.training.model.parameter_names import global_names
from slime.training.model.policy_model import PolicyModel
from slime.training.state.sharded_model import split_of
from slime.weights.quantised.formats import (
    BlockFp8,
    QuantisedFormat,
    fake_quantised,
    format_of_folder,
    quantises,
    require_whole_blocks,
)


def decoder_spec(family: Family, config: TransformerConfig, hf_config: HfConfig) -> TransformerBlockSubmodules:
    """Returns the module specs of all layers: pre-norm, with the family's attention and MLP or experts."""

    def layer(number: int) -> ModuleSpec:
        spec = _layer(family, config, hf_config, number)
        module = RoutedLayer if config.num_moe_experts else family.layer(hf_config, number)
        return spec if module is None else dataclasses.replace(spec, module=module)

    return TransformerBlockSubmodules(
        layer_specs=[layer(number) for number in range(config.num_layers)], layer_norm=RMSNorm
    )


def mtp_layer_spec(family: Family, config: TransformerConfig, hf_config: HfConfig) -> ModuleSpec:
    """Returns the module spec of the MTP layer. Its routing is not replayed: engines do not record it for drafts.

    Raises `ConfigError` if the checkpoint has no trainable MTP layer.
    """
    mtp = family.mtp_config(hf_config)
    if mtp is None:
        raise ConfigError(
            "--enable-mtp-training requires a trainable multi-token prediction layer, but this "
            f"{hf_config.get('model_type')} checkpoint has none; remove the flag"
        )
    return _layer(family, config, mtp, 0)


def _layer(family: Family, config: TransformerConfig, hf_config: HfConfig, number: int) -> ModuleSpec:
    base = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = dataclasses.replace(
        base.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=family.attention(config, hf_config, number, base.submodules.self_attention),
        mlp=family.mlp(config, hf_config, number, base.submodules.mlp),
    )
    return ModuleSpec(module=base.module, submodules=parts)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rounds the vocabulary size up to a multiple of `tp_size`. Padding rows never enter a softmax."""
    return -(-vocab_size // tp_size) * tp_size


def build_model(
    args: Args, hf_config: HfConfig, device: torch.device, kind: type[PolicyModel] = PolicyModel
) -> list[PolicyModel]:
    """Builds this rank's model chunks. Their weights are uninitialized until `hf_weights.load_weights`.

    Returns one chunk, or one per virtual pipeline stage in order. Requires an initialized `parallel_state`. Raises
    `ConfigError` if the model or a setting is not supported.
    """
    family = family_of(hf_config, args)
    config = transformer_config(args.megatron, family.architecture(hf_config))
    if config.gradient_accumulation_fusion:
        config.gradient_accumulation_fusion = any(r.took_effect for r in megatron_gradients.activate_weights(device))
    if config.num_moe_experts:
        megatron_moe.activate()
    _check_split(config)
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    stages = range(num_chunks) if num_chunks > 1 else (None,)
    chunks = [_build_chunk(kind, family, config, hf_config, device, vp_stage) for vp_stage in stages]
    if kind is PolicyModel:
        quantise_layers(args, chunks, table_for(hf_config))
    return chunks


def _check_split(config: TransformerConfig) -> None:
    tp_size, pp_size = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    for what, count in (("attention heads", config.num_attention_heads), ("key-value heads", config.num_query_groups)):
        if count % tp_size:
            raise ConfigError(f"--tensor-model-parallel-size {tp_size} must divide the number of {what} ({count})")
    round_size = config.microbatch_group_size_per_vp_stage
    if config.virtual_pipeline_model_parallel_size and round_size < pp_size:
        raise ConfigError(
            f"--microbatch-group-size-per-vp-stage {round_size} is below --pipeline-model-parallel-size {pp_size}; "
            "interleaving needs at least one micro-batch per stage in a group; raise the group size or remove the flag"
        )
    try:
        for pp_rank in range(pp_size):
            for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
                get_num_layers_to_build(config, vp_stage, pp_rank)
    except AssertionError as error:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pp_size} and --virtual-pipeline-model-parallel-size "
            f"{config.virtual_pipeline_model_parallel_size} do not divide the {config.num_layers} layers "
            f"({' '.join(str(error).split())}); choose divisors, or set --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        ) from None


def _build_chunk(
    kind: type[PolicyModel],
    family: Family,
    config: TransformerConfig,
    hf_config: HfConfig,
    device: torch.device,
    vp_stage: int | None,
) -> PolicyModel:
    tp_size, tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    vocab_size = int(hf_config["vocab_size"])
    padded = padded_vocab_size(vocab_size, tp_size)
    theta, _ = rope_of(hf_config)
    offset = get_transformer_layer_offset(config, vp_stage)
    rotary_percent = family.architecture(hf_config)["rotary_percent"]
    spec = decoder_spec(family, config, hf_config)
    by_megatron = any(rotates_by_megatron(layer.submodules.self_attention) for layer in spec.layer_specs)
    own = slice(offset, offset + get_num_layers_to_build(config, vp_stage))
    model = kind(
        config,
        dataclasses.replace(spec, layer_specs=spec.layer_specs[own]),
        vocab_size=padded,
        max_sequence_length=int(hf_config.get("max_position_embeddings") or 1 << 20),
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope" if by_megatron and not family.rotates_itself else "none",
        rotary_percent=rotary_percent,
        rotary_base=theta,
        share_embeddings_and_output_weights=bool(hf_config.get("tie_word_embeddings")) and kind is PolicyModel,
        vp_stage=vp_stage,
    )
    model.layer_offset, model.num_tokens = offset, vocab_size
    with_mtp = trains_mtp(hf_config)
    if with_mtp and model.post_process:
        model.mtp = MultiTokenHead(config, mtp_layer_spec(family, config, hf_config), vp_stage, family.mtp_form)
    model.borrows_embedding = (
        with_mtp and config.pipeline_model_parallel_size > 1 and not model.share_embeddings_and_output_weights
    )
    model.lent_embedding = None
    local = padded // tp_size
    start = tp_rank * local
    group = mpu.get_tensor_model_parallel_group() if tp_size > 1 else None
    model.shard = VocabShard(start=start, num_valid=max(0, min(local, vocab_size - start)), group=group)
    if not family.rotates_itself:
        frequencies = inverse_frequencies(hf_config, int(config.kv_channels * rotary_percent)).to(device)
        axes = family.rotary_axes(hf_config)
        by_axis = None if axes is None else torch.tensor(axes, device=device)
        model.rotary = Rotary(frequencies, attention_factor(hf_config), by_axis)
        if model.position_embedding_type == "rope":
            model.rotary_pos_emb.inv_freq = frequencies
    _mark_sharded_parameters(model)
    return model.to(device)


def _mark_sharded_parameters(model: PolicyModel) -> None:
    """Sets the attributes that tell the optimizer which parameters are split by tensor parallelism.

    Megatron sets them when it initializes weights, which slime skips. Without them, the gradient norm would count only
    the first rank's shard, and clipping would be wrong.
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


def quantise_layers(args: Args, chunks: Sequence[PolicyModel], table: FamilyTable) -> None:
    """Applies both flags to this rank's layers.

    Raises `ConfigError` if a quantisation block would span two ranks, or if the checkpoint's format is not one that FP8
    training computes with.
    """
    stored = format_of_folder(args.hf_checkpoint)
    faked = stored if args.trainer_weights != "plain" else None
    multiplied = _format_of_products(stored, table) if args.megatron.get("fp8") else None
    for chunk in chunks:
        for local_name, module in chunk.named_modules():
            if not isinstance(module._parameters.get("weight"), Parameter):
                continue
            entry = table.entry(global_names(chunk, f"{local_name}.weight")[0])
            _, num_shards = split_of(entry)
            is_linear = isinstance(module, ColumnParallelLinear | RowParallelLinear)
            if is_linear and multiplied is not None and multiplied.is_quantised(entry.hf):
                require_whole_blocks(entry, num_shards, multiplied)
                vars(module)["_forward_impl"] = _multiply
            elif faked is not None and faked.is_quantised(entry.hf):
                require_whole_blocks(entry, num_shards, faked)
                _Swap(entry.row, num_shards, faked).attach(module)


def _format_of_products(stored: QuantisedFormat | None, table: FamilyTable) -> QuantisedFormat:
    if stored is None:
        return BlockFp8(frozenset(filter(quantises, table.hf_names)), linear.GROUP, linear.GROUP)
    if isinstance(stored, BlockFp8) and stored.block == (linear.GROUP, linear.GROUP) and not stored.powers_of_two:
        return stored
    raise ConfigError(
        f"--fp8-format multiplies weights in FP8 in blocks of {linear.GROUP} x {linear.GROUP} with float32 scales, but "
        f"the checkpoint's weights are in {stored.title}, with which the engines compute; drop --fp8-format"
    )


class _Swap:
    """Hooks that replace a layer's weight with its fake-quantised form during the forward pass."""

    def __init__(self, row: Row, num_shards: int, quantised: QuantisedFormat) -> None:
        self._of = row, num_shards, quantised
        self._kept: list[Any] = []

    def attach(self, module: Module) -> None:
        if hasattr(module, "gradient_accumulation_fusion"):  # the quantised weight is not a parameter with a main_grad
            vars(module)["gradient_accumulation_fusion"] = False
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._behind, always_call=True)

    def _before(self, module: Module, _inputs: Any) -> None:
        weight = module._parameters["weight"]
        assert isinstance(weight, Parameter), "the layer's forward pass is not reentrant"
        self._kept.append(weight)
        module._parameters["weight"] = fake_quantised(weight, *self._of)  # type: ignore[assignment]

    def _behind(self, module: Module, _inputs: Any, _output: Any) -> None:
        if self._kept:
            module._parameters["weight"] = self._kept.pop()


def _multiply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **_deferral: Any,
) -> Tensor:
    """Replaces a Megatron layer's `_forward_impl`: input [s, b, in], weight [out, in] -> [s * ranks, b, out]."""
    out: Tensor = _Multiply.apply(
        input, weight, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group
    )
    return out if bias is None else out + bias


class _Multiply(torch.autograd.Function):
    """A linear layer in FP8 with the communication of Megatron's: with sequence parallelism, ranks gather the input and
    scatter the sum of its gradients. Communication overlaps with the weight gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool, reduces: bool, gathers: bool, group: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if fused else None
        ctx.reduces, ctx.gathers, ctx.group = reduces, gathers, group
        whole = _gather(x, group)[0] if gathers else x
        return linear.fp8_product(whole.flatten(0, -2), weight).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        shape, grad = x.shape, grads[0].flatten(0, -2)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        whole, gathering = _gather(x, ctx.group, wait=False) if ctx.gathers and needs_weight else (x, None)
        grad_x, handle = None, None
        if needs_x:
            grad_x = linear.fp8_product(grad, weight, transposed=True)
            if ctx.gathers:
                total, grad_x = grad_x, x.new_empty(shape).flatten(0, -2)
                handle = torch.distributed.reduce_scatter_tensor(grad_x, total, group=ctx.group, async_op=True)
            elif ctx.reduces:
                handle = torch.distributed.all_reduce(grad_x, group=ctx.group, async_op=True)
        if gathering is not None:
            gathering.wait()
        grad_weight = _weight_gradient(ctx.main_grad, weight, grad, whole.flatten(0, -2)) if needs_weight else None
        if handle is not None:
            handle.wait()
        return None if grad_x is None else grad_x.view(shape), grad_weight, None, None, None, None


def _gather(x: Tensor, group: Any, *, wait: bool = True) -> tuple[Tensor, Any]:
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    return whole, torch.distributed.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=not wait)


def _weight_gradient(total: Tensor | None, weight: Tensor, grad: Tensor, inputs: Tensor) -> Tensor:
    """grad [T, out], inputs [T, in] -> [out, in]; with a `total`, adds to it and returns a dummy, as Megatron does."""
    if total is None:
        return linear.product(grad.t(), inputs)
    linear.add_fused(total, grad, inputs)
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)
