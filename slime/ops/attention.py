"""Packed causal attention: plain PyTorch, one sequence at a time, or one FlashAttention call for the whole row.

The queries [T, heads, d] and keys [K, groups, d] of N sequences are concatenated. The last query of a sequence is
aligned with its last key, so a sequence can have more keys than queries (context parallelism). heads / groups query
heads share one key head, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLASH_ARGUMENTS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask", "scale"),
)
"""Arguments that `flash` passes to torch's operator, in the order of torch 2.11 and 2.13."""


def per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scale: float | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Reference form: query [T, heads, d], key [K, groups, d], value [K, groups, d_v] -> [T, heads, d_v].

    `masks` has, per sequence, a bool mask [n, n] of the keys that each query attends to, or None for causal attention.
    `scale` defaults to 1 / sqrt(d).
    """
    # Views in the layout of scaled_dot_product_attention, [1, heads, T, d].
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    parts = []
    for a, b, c, mask in zip(
        q.split(list(query_lengths), dim=2),
        k.split(list(key_lengths), dim=2),
        v.split(list(key_lengths), dim=2),
        masks or [None] * len(query_lengths),
        strict=True,
    ):
        num_queries, num_keys = a.size(2), b.size(2)
        if num_keys != num_queries:  # is_causal would align the first query with the first key
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=a.device).tril(num_keys - num_queries)
        out = torch.nn.functional.scaled_dot_product_attention(
            a, b, c, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
        parts.append(out)
    return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """Same as `per_sequence`, for equal head sizes in half precision on a GPU. `cu_*`: [N + 1] int32 on the device.

    torch's operator has its own backward pass. It supports strided rows and heads and requires only that each head is
    contiguous, so keys and values can be views of a fused projection.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out: Tensor = torch.ops.aten._flash_attention_forward(
        *(query, key, value, cu_query, cu_key, longest_query, longest_key),
        *(0.0, True, False),  # no dropout, causal, no debug mask
        scale=scale,
    )[0]
    return out


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
) -> Tensor:
    """Same as `flash`, but calls `torch.nn.attention.varlen`, for torch versions with a different operator."""
    attend, options, grouped = _varlen_call()
    if query.size(1) != key.size(1):
        if grouped:
            options = {**options, "enable_gqa": True}
        else:
            repeats = query.size(1) // key.size(1)
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if scale is not None:
        options = {**options, "scale": scale}
    rows = (x.contiguous() for x in (query, key, value))
    out: Tensor = attend(*rows, cu_query, cu_key, longest_query, longest_key, **options)
    return out


@functools.cache
def _varlen_call() -> tuple[Any, dict[str, Any], bool]:
    """Returns (function, its arguments for causal attention, whether it supports fewer key heads than query heads).

    torch 2.10 takes `is_causal`, later versions take a window of (-1, 0), and still later ones support grouped queries.
    All versions align the last query of a sequence with its last key (FlashAttention since 2.1).
    """
    attend: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    names = inspect.signature(attend).parameters
    return attend, {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}, "enable_gqa" in names


def flash_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    names = [argument.name for argument in operator.default._schema.arguments] if operator is not None else []
    known = tuple(names[: len(FLASH_ARGUMENTS)]) == FLASH_ARGUMENTS
    return (*_kernel_problems(device, dtype), *(() if known else ("torch's operator has different arguments",)))


def varlen_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    there = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return (*_kernel_problems(device, dtype), *(() if there else ("this torch version does not have it",)))


def _kernel_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    reasons = (
        ("its kernels need a GPU", device.type != "cuda"),
        (f"its kernels do not support {dtype}", dtype not in (torch.bfloat16, torch.float16)),
    )
    return tuple(reason for reason, holds in reasons if holds)
