"""Makes an engine compute with the trainer's kernels, so that log-probs are bitwise equal (`--true-on-policy`).

`slime.ops.invariant` explains why log-probs differ otherwise. SGLang's own deterministic mode makes an engine agree
with itself, but its kernels still round differently from the trainer's.

Hooks replace the norms, the activations, the products, the attention layers of the families in `ATTENTION`, the expert
layers, the attention kernels of the triton backend (on a CPU, of the torch_native backend) and the log-probs that
the sampler returns. SGLang's cache, batches, CUDA graphs, choice of experts and sampler are unchanged. Its own
invariant kernels, which `--enable-deterministic-inference` would install, are not needed. Remove this file when SGLang
lets a registered plugin choose the kernels.

Invariants
1. Hooks are registered only if `KERNELS_ENV` is set. Models, layouts and dtypes that are not supported are
   rejected when the settings are checked.
2. The trainer compares log-probs in every step and, under `--true-on-policy`, stops at any difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from slime.compat import Hook

KERNELS_ENV = "SLIME_ENGINE_KERNELS"
"""Environment variable with the value of the run's --kernels, for an engine that uses the trainer's kernels."""
ATTENTION = {
    "llama": "sglang.srt.models.llama.LlamaAttention",
    "qwen3": "sglang.srt.models.qwen3.Qwen3Attention",
    "qwen3_moe": "sglang.srt.models.qwen3_moe.Qwen3MoeAttention",
}
"""Maps a `model_type` to SGLang's attention layer. All these layers have the same attributes."""
MAX_SEQUENCES = 65536
"""Maximum number of sequences in a decode step."""
_of_model: dict[str, Any] = {}
"""This process's `dtype`, `rotary` and `counts` (0, 1, 2, ...), the `angles` of the current pass, and `logits` and
`temperatures` of the batch that is being sampled."""


def prepare(runner: Any, *_: Any, **__: Any) -> None:
    """Chooses the kernels of this process. Runs before the model is loaded."""
    import torch

    from slime.core.hf_config import read_hf_config
    from slime.models.common.rotary import Rotary, attention_factor, inverse_frequencies
    from slime.ops import select

    device = torch.device(runner.device)
    _of_model["dtype"] = runner.model_config.dtype
    select.use(device, runner.model_config.dtype, os.environ[KERNELS_ENV], invariant=True)
    _of_model["counts"] = torch.arange(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
    config = read_hf_config(runner.model_config.model_path)
    size = int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    frequencies = inverse_frequencies(config, size).to(device)
    _of_model["rotary"] = Rotary(frequencies, attention_factor(config))


def normalise(norm: Any, x: Any, residual: Any = None, post_residual_addition: Any = None, **_: Any) -> Any:
    """Replaces `RMSNorm.forward`: the norm of x [..., H], or of x + residual, which is then also returned."""
    from slime.ops.norm import add_and_normalise, rms_norm

    if residual is None:
        return rms_norm(x, norm.weight, norm.variance_epsilon)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    return add_and_normalise(x, residual, norm.weight, norm.variance_epsilon), residual


def activate(_module: Any, mixed: Any, **_: Any) -> Any:
    """Replaces `SiluAndMul.forward`."""
    from slime.ops.swiglu import swiglu

    return swiglu(mixed)


def multiply(_method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    """Replaces `UnquantizedLinearMethod.apply`."""
    from slime.ops.invariant import linear

    return linear(x, layer.weight, bias)


def unembed(_processor: Any, hidden_states: Any, head: Any, _bias: Any = None, out: Any = None, **_: Any) -> Any:
    """Replaces `LogitsProcessor._compute_lm_head`. SGLang 0.5.23 can pass a buffer for the result."""
    from slime.ops.invariant import linear

    logits = linear(hidden_states, head.weight)
    return logits if out is None else out.copy_(logits)


def leave_products(*_: Any, **__: Any) -> None:
    """Replaces `enable_batch_invariant_mode`."""


def attend(layer: Any, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:
    """Replaces an attention layer's `forward`: hidden_states [T, H] -> [T, H]."""
    from slime.ops.qk_rotary import Heads, split_and_rotate

    mixed = layer.qkv_proj(hidden_states)[0]
    norms = [getattr(layer, name, None) for name in ("q_norm", "k_norm")]
    weights = [None if norm is None else norm.weight for norm in norms]
    eps = 1e-6 if norms[0] is None else norms[0].variance_epsilon
    heads = Heads(groups=layer.num_kv_heads, size=layer.head_dim, eps=eps, apart=True)
    query, key, value = split_and_rotate(mixed, heads, *_angles(layer, positions), *weights)
    out = layer.attn(query.flatten(1), key.flatten(1), value.flatten(1), forward_batch)
    return layer.o_proj(out)[0]


def mix_experts(layer: Any, hidden_states: Any, *_: Any, **__: Any) -> Any:
    """Replaces the `forward` of a Qwen3 MoE layer: hidden_states [T, H] -> [T, H]. SGLang's router still chooses the
    experts, and records its choices for the trainer's replay."""
    from slime.ops import experts

    logits = layer.gate(hidden_states)[0]
    chosen = layer.topk(hidden_states, logits).topk_ids.long()
    share = layer.topk.topk_config.renormalize
    weighed = experts.weigh(logits.float().softmax(-1), chosen, logits.dtype, share=share, scale=1.0)
    return experts.mix(hidden_states, *weighed, chosen.size(1), (layer.experts.w13_weight, layer.experts.w2_weight))


def _angles(layer: Any, positions: Any) -> Any:
    """Returns cos and sin of a batch. The first layer computes them in each pass, even in a replayed CUDA graph."""
    if layer.attn.layer_id == 0:
        _of_model["angles"] = _of_model["rotary"].of(positions)
    return _of_model["angles"]


def use_attention_kernels(_result: Any, backend: Any, *_: Any, **__: Any) -> None:
    """Replaces the two kernels of a `TritonAttnBackend`."""
    backend.decode_attention_fwd, backend.extend_attention_fwd = _decode, _extend
    backend.enable_deterministic = False  # SGLang's own invariant kernel would be used instead


def _decode(query: Any, keys: Any, values: Any, out: Any, starts: Any, slots: Any, *rest: Any, **_: Any) -> None:
    """Decode attention: one query per sequence, all keys cached. `rest`: splits of the keys, then the scale."""
    from slime.ops.kernels import invariant

    cu_query = _of_model["counts"][: query.size(0) + 1]
    cache = keys, values, starts[: query.size(0) + 1], slots
    invariant.attend(query, keys, values, out, cu_query, None, 1, rest[4], cache=cache)


def _extend(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    keys: Any,
    values: Any,
    cu: Any,
    starts: Any,
    slots: Any,
    *rest: Any,
    **_: Any,
) -> None:
    """Prefill attention: new keys follow a cached prefix. `rest`: masks, the longest query, two scales, scale."""
    from slime.ops.kernels import invariant

    invariant.attend(query, key, value, out, cu, cu, int(rest[3]), rest[6], cache=(keys, values, starts, slots))


def extend_on_cpu(_backend: Any, *given: Any, scaling: float, **_: Any) -> Any:
    """Replaces `TorchNativeAttnBackend._run_sdpa_forward_extend`."""
    *tensors, _prefix_lengths, lengths, _encoder_lengths = given
    return _on_cpu(tensors, lengths.tolist(), scaling)


def decode_on_cpu(_backend: Any, *given: Any, scaling: float, **_: Any) -> Any:
    """Replaces `TorchNativeAttnBackend._run_sdpa_forward_decode`."""
    *tensors, _encoder_lengths = given
    return _on_cpu(tensors, [1] * tensors[-1].numel(), scaling)


def _on_cpu(tensors: Sequence[Any], queries: list[int], scale: float) -> Any:
    """`tensors`: query, out, keys and values of the cache, slots of each row, rows and lengths of the sequences."""
    from slime.ops.invariant import attend_in_tiles

    query, out, keys, values, slots, rows, lengths = tensors
    start = 0
    for row, length, num_queries in zip(rows.tolist(), lengths.tolist(), queries, strict=True):
        own, mine = slice(start, start + num_queries), slots[row, :length]
        out[own] = attend_in_tiles(query[own], keys[mine], values[mine], scale=scale)
        start += num_queries
    return out


def score(_sampler: Any, logits_output: Any, sampling_info: Any, *_: Any, **__: Any) -> None:
    """Keeps the logits of a batch, which the sampler overwrites. SGLang only casts the product's
    rounded logits to a wider dtype, so the copy is exact."""
    _of_model["logits"] = logits_output.next_token_logits.to(_of_model["dtype"], copy=True)
    _of_model["temperatures"] = sampling_info.temperatures.clone()


def report(
    compute: Callable[..., Any], processor: Any, _log_probs: Any, top: Any, ids: Any, sampled: Any, *rest: Any
) -> Any:
    """Replaces the log-probs from which `compute_logprobs` selects those of the sampled tokens and any others that
    a request asks for."""
    from slime.ops.invariant import log_probs_of, log_softmax

    logits, temperatures = _of_model.pop("logits"), _of_model.pop("temperatures")
    if any(top) or any(given is not None for given in ids):
        return compute(processor, log_softmax(logits, temperatures), top, ids, sampled, *rest)
    own = log_probs_of(logits, temperatures, sampled.long())
    return compute(processor, own.unsqueeze(1), top, ids, sampled.new_zeros(sampled.shape), *rest)


_LAYERS = "sglang.srt.layers"
_CPU = f"{_LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend"
HOOKS = (
    Hook("BEFORE", "sglang.srt.model_executor.model_runner.ModelRunner.load_model", prepare),
    Hook("REPLACE", f"{_LAYERS}.layernorm.RMSNorm.forward", normalise),
    Hook("REPLACE", f"{_LAYERS}.activation.SiluAndMul.forward", activate),
    Hook("REPLACE", f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply", multiply),
    Hook("REPLACE", f"{_LAYERS}.logits_processor.LogitsProcessor._compute_lm_head", unembed),
    Hook("REPLACE", "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", leave_products),
    *(Hook("REPLACE", f"{layer}.forward", attend) for layer in ATTENTION.values()),
    Hook("REPLACE", "sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock.forward", mix_experts),
    Hook("BEFORE", f"{_LAYERS}.sampler.Sampler.forward", score),
    Hook("AROUND", f"{_LAYERS}.logprob_processor.OutputLogprobProcessor.compute_logprobs", report),
)
GPU_HOOKS = (Hook("AFTER", f"{_LAYERS}.attention.triton_backend.TritonAttnBackend.__init__", use_attention_kernels),)
CPU_HOOKS = (
    Hook("REPLACE", f"{_CPU}._run_sdpa_forward_extend", extend_on_cpu),
    Hook("REPLACE", f"{_CPU}._run_sdpa_forward_decode", decode_on_cpu),
)
