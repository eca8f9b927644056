"""Patches that make features of SGLang work on a CPU, or work faster: grammar masks, attention, norms over all heads,
vision models, routed experts. Each report gives the symptom and says when the patch can be removed."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from slime.compat import SGLANG, PatchReport
from slime.compat.sglang_cpu.after_import import Change, after_import, is_in_place
from slime.core.errors import EngineError


def _patched(module: str, change: Change, *, name: str, symptom: str, removal: str) -> PatchReport:
    """Applies `change` to `module` when SGLang imports it."""
    after_import(module, change)
    return PatchReport(name, symptom, SGLANG, removal, applied=True, took_effect=is_in_place(module))


GRAMMARS = "sglang.srt.constrained.xgrammar_backend"


def _apply(logits: Any, vocab_mask: Any) -> None:
    """Sets logits [requests, V] to -inf for tokens whose bit in `vocab_mask` [requests, V / 32] int32 is not set."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _on_grammar(_grammar: Any, logits: Any, vocab_mask: Any) -> None:
    _apply(logits, vocab_mask)


def _use_cpu_kernel(module: types.ModuleType) -> None:
    module.XGrammarGrammar.apply_vocab_mask = _on_grammar
    module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(_apply)
    if _allowed_of_a_mask(module) != [1, 33]:
        raise EngineError(
            f"the CPU patch of {GRAMMARS} had no effect: SGLang or xgrammar has changed; install the pinned "
            "versions or start engines with --sglang-grammar-backend none"
        )


def _allowed_of_a_mask(module: types.ModuleType) -> list[int]:
    """Returns which of 40 tokens SGLang's class allows for a mask with bits 1 and 33 set."""
    import torch

    logits = torch.zeros(1, 40)
    mask = torch.tensor([[1 << 1, 1 << 1]], dtype=torch.int32)
    module.XGrammarGrammarBackend.apply_vocab_mask(logits=logits, vocab_mask=mask)
    return [i for i, logit in enumerate(logits[0].tolist()) if logit == 0]


def masks_on_a_cpu() -> PatchReport:
    """Makes SGLang apply the masks of xgrammar (its default) with xgrammar's own function, which supports CPUs.

    SGLang's own function supports only accelerators and fails on a CPU in the middle of a forward pass.
    """
    return _patched(
        GRAMMARS,
        _use_cpu_kernel,
        name="grammar masks of xgrammar",
        symptom="RuntimeError: Unsupported device: cpu, on a request with json_schema or regex; the server exits",
        removal="apply_vocab_mask in xgrammar_backend.py supports the CPU",
    )


def _register(module: types.ModuleType) -> None:
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def latents_in_every_pass() -> PatchReport:
    """Makes latent attention (DeepSeek-V3, GLM-4.7-Flash) work on `torch_native`.

    For a prefill without a prefix, SGLang expands keys and values per head and does not write them to the cache that
    this backend reads. With the patch, every pass uses the cached latents, as decoding always does.
    """
    return _patched(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        _register,
        name="latent attention on torch_native",
        symptom="RuntimeError about unequal head sizes in the first prefill of a model with latent attention",
        removal="SGLang registers a handler for torch_native in attention_backend_handler.py",
    )


def _attend(query: Any, key: Any, value: Any, mask: Any, scale: float | None) -> Any:
    """Returns attention [B, Lq, H, Dv] of `query` [B, Lq, H, D] over `key` [B, Lk, Hkv, D] and `value` [B, Lk, Hkv, Dv]
    where `mask` [B, Lq, Lk] is True. The H / Hkv query heads of a KV head become more queries of that head."""
    from torch.nn.functional import scaled_dot_product_attention

    (num, len_q, heads, width), kv_heads = query.shape, key.shape[2]
    folded = query.view(num, len_q, kv_heads, -1, width).permute(0, 2, 3, 1, 4).reshape(num, kv_heads, -1, width)
    key, value = (x.transpose(1, 2).to(query.dtype) for x in (key, value))
    masks = mask.repeat(1, heads // kv_heads, 1)[:, None]
    out = scaled_dot_product_attention(folded, key, value, attn_mask=masks, scale=scale)
    return out.view(num, kv_heads, -1, len_q, out.shape[-1]).permute(0, 3, 1, 2, 4).reshape(num, len_q, heads, -1)


PADDING_LIMIT = 4
"""Requests are padded to the longest in the batch if that computes at most this many times the needed scores."""


def _batch_of_requests(
    query: Any, caches: tuple[Any, Any], slots: Any, lens: Any, num_new: Any, scale: float | None, window: int | None
) -> Any:
    """Returns the attention [tokens, H, Dv] of all requests in one call, or None if SGLang should loop over them.

    `query` [tokens, H, D] has the last `num_new` [B] tokens of each request. `caches`: keys and values [slot, Hkv, D].
    `slots` [B, Lk]: cache slot of each position. `lens` [B]: tokens per request. `window`: None means all.
    """
    import torch

    (num, len_k), len_q = slots.shape, int(num_new.max())
    if num * len_q * len_k > PADDING_LIMIT * int((num_new * lens).sum()):
        return None
    at, row = torch.arange(len_k), torch.arange(len_q)
    # Slots after the end of a request can contain NaN, which a mask does not remove; its last slot is always finite.
    last = slots.gather(1, (lens - 1)[:, None])
    used = torch.where(at < lens[:, None], slots, last).long()
    real = row < num_new[:, None]
    padded = query.new_zeros(num, len_q, *query.shape[1:])
    padded[real] = query[: int(num_new.sum())]
    position = (lens - num_new)[:, None] + row
    mask = at <= position[:, :, None]
    if window is not None:
        mask &= at >= position[:, :, None] - window
    keys, values = (cache[used] for cache in caches)
    return _attend(padded, keys, values, mask, scale)[real]


def _together(loop: Callable[..., Any], *, decode: bool) -> Callable[..., Any]:
    """Returns a replacement of `loop`, SGLang's method that calls torch once per request."""

    def run(
        self: Any,
        query: Any,
        output: Any,
        keys: Any,
        values: Any,
        table: Any,
        rows: Any,
        lens: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        ordinary = more[-1] is None and not named["is_cross_attn"] and named["causal"] != decode
        if ordinary and len(lens) > 1:
            num_new, window = lens.new_ones(len(lens)) if decode else more[1], named["sliding_window_size"]
            slots = table[rows, : int(lens.max())]
            found = _batch_of_requests(query, (keys, values), slots, lens, num_new, named["scaling"], window)
            if found is not None:
                output[: len(found)] = found
                return output
        return loop(self, query, output, keys, values, table, rows, lens, *more, **named)

    return run


def _attend_together(module: types.ModuleType) -> None:
    backend = module.TorchNativeAttnBackend
    for name, decode in (("_run_sdpa_forward_decode", True), ("_run_sdpa_forward_extend", False)):
        setattr(backend, name, _together(getattr(backend, name), decode=decode))


def attention_of_a_batch() -> PatchReport:
    """Makes `torch_native` compute the attention of a batch in one call. SGLang calls torch once per request and layer,
    which took half of the time of a 135M model with 64 requests."""
    return _patched(
        "sglang.srt.layers.attention.torch_native_backend",
        _attend_together,
        name="attention of a batch on torch_native",
        symptom="200 short prompts to a 135M model take 69 s instead of 46 s",
        removal="the loops over seq_idx in torch_native_backend.py are gone",
    )


def _send_indices_at_once(module: types.ModuleType) -> None:
    module.MooncakeKVSender.supports_host_tensor_indices = False


def pairs_without_pinned_memory() -> PatchReport:
    """Makes prefill engines hand over keys and values on a CPU: SGLang copies the indices of their pages to pinned
    memory and waits for an event of a GPU."""
    return _patched(
        "sglang.srt.disaggregation.mooncake.conn",
        _send_indices_at_once,
        name="prefill engines without pinned memory",
        symptom="RuntimeError: pin_memory=True requires a CUDA or other accelerator backend, at the first request",
        removal="_send_kv_chunk in disaggregation/prefill.py asks for pinned memory only on a GPU",
    )


def _in_plain_torch(norms: Any, q: Any, k: Any) -> tuple[Any, Any]:
    return norms._q_norm(q.contiguous()), norms._k_norm(k.contiguous())


def _take_the_plain_form(module: types.ModuleType) -> None:
    norms = module.MiniMaxM2QKRMSNorm
    norms._forward_naive = norms._forward_cpu = _in_plain_torch


def norms_of_all_heads() -> PatchReport:
    """Makes MiniMax-M2's QK norms use SGLang's form in plain PyTorch.

    Without AMX, SGLang calls a GPU kernel. With AMX, SGLang 0.5.23 calls `sgl_kernel`, which may be missing.
    """
    return _patched(
        "sglang.srt.models.minimax_m2",
        _take_the_plain_form,
        name="norms of all heads of MiniMax-M2",
        symptom="AssertionError or AttributeError in the first forward pass of MiniMax-M2",
        removal="MiniMaxM2QKRMSNorm needs no kernel on a CPU",
    )


KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Kernels that SGLang looks up when it imports vision models."""


def _missing(name: str) -> Any:
    def missing(*given: Any, **named: Any) -> Any:
        raise EngineError(f"torch.ops.sgl_kernel.{name} is not available on this CPU; use a GPU")

    return missing


def names_of_kernels() -> PatchReport:
    """Defines missing kernels of `sgl_kernel`'s CPU build as functions that raise. SGLang's Qwen-VL processor imports
    Qwen3.5, which looks them up; if the lookup fails, the processor is not registered.
    """
    import torch

    absent = [name for name in KERNELS if not hasattr(torch.ops.sgl_kernel, name)]
    for name in absent:
        setattr(torch.ops.sgl_kernel, name, _missing(name))
    return PatchReport(
        name="kernels of vision models",
        symptom="ValueError: No processor registered for architecture: ['Qwen3VLForConditionalGeneration']",
        upstream=SGLANG,
        removal="sglang/srt/models/qwen3_5.py looks up fused_sigmoid_mul_cpu only when it calls it",
        applied=bool(absent),
        took_effect=all(hasattr(torch.ops.sgl_kernel, name) for name in KERNELS),
    )


class _Unpinned(types.ModuleType):
    """A facade of torch whose `zeros` ignores `pin_memory`."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.zeros(*size, **options)


def _copied(output: Any, to_host: Callable[[Any], Any]) -> None:
    """Replaces `TopkCaptureOutput.map_device_tensors`. Copies even if `to_host` returns the same memory."""
    output.out_cache_loc, output.topk = (to_host(x).clone() for x in (output.out_cache_loc, output.topk))


def _ordinary_memory(size: Any, *, dtype: Any, device: str, **_: Any) -> Any:
    """Replaces SGLang's function that allocates pinned memory."""
    import torch

    return torch.empty(size, dtype=dtype, device=device)


def _change(module: Any) -> None:
    if hasattr(module, "ALLOC_MEMORY_FUNCS"):  # 0.5.23
        module.ALLOC_MEMORY_FUNCS["cpu"] = _ordinary_memory
    elif not isinstance(module.torch, _Unpinned):
        module.torch = _Unpinned(module.torch)
    module.TopkCaptureOutput.map_device_tensors = _copied


def experts_on_the_host() -> PatchReport:
    """Makes routed experts work on a CPU: stores them in ordinary memory, because pinned memory requires a GPU driver,
    and copies them.

    Each forward pass writes the experts to one device buffer, which SGLang copies to the host before the next pass.
    With overlapped scheduling, the next pass runs before the copy is read. On a CPU, SGLang's "copy" is the buffer
    itself, so each token would get the next token's experts.
    """
    return _patched(
        "sglang.srt.state_capturer.base",
        _change,
        name="routed experts on the host",
        symptom="with --enable-return-routed-experts a server does not start (RuntimeError about pinned memory), or "
        "returns the experts of the next token",
        removal="sglang/srt/state_capturer/base.py requests pinned memory only on a GPU and also copies on a CPU",
    )
