"""Arithmetic in which the result for a token does not depend on the other tokens of the batch (`--true-on-policy`).

A trainer processes a token in a row of thousands of tokens, an engine in a decode step with a few requests. Libraries
pick their kernels by the shape of the batch, and a different summation order rounds differently, so the log-probs of
trainer and engine differ by about 0.01 nats in bfloat16 even with equal weights. Three operations of a dense model
depend on the batch; here, each of them sums in an order that is fixed per token (He et al. 2025, "Defeating
nondeterminism in LLM inference"). Trainer and engines use the same functions, so their log-probs are bitwise equal.

- Matrix products. cuBLAS sums a product in one order unless it splits the sum over several thread blocks ("split-K"),
  which it does for few rows. `fix_products` rules this out. For few rows (`FEW_ROWS`), `linear` uses a kernel of its
  own, which gives the same bits and is faster than cuBLAS without split-K. On a CPU, a product runs on tiles of
  `TILE_ROWS` rows, so that every call has the same shape.
- Attention (`attend`). A query reads its keys in blocks of `KEYS_AT_ONCE`, from the first to the last, whether the keys
  are the tokens of a packed row or are spread over an engine's cache.
- The softmax normalizer over the vocabulary (`log_totals`). One program adds up one row, in blocks.

The norms, rotary embedding and activations of `slime.ops` process each token independently anyway, and so does
PyTorch's grouped matmul, which multiplies the rows of experts. A token's rows are summed in expert order
(`slime.ops.experts`).

Invariant: for all three, the result for a token is bitwise the same in any batch on the same type of device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

KEYS_AT_ONCE = 64
FEW_ROWS = 128
"""On a GPU, products of at most this many rows bypass cuBLAS, which has special kernels for one row too."""
TILE_ROWS = 32
"""Number of rows per product on a CPU."""
QUERIES_AT_ONCE = 16
"""Number of queries per tile on a CPU."""


# --- products ---------------------------------------------------------------------------------------------------------


def fix_products(device: torch.device) -> None:
    """Makes every matrix product of this process on `device` independent of its number of rows. Idempotent."""
    if device.type == "cuda":
        torch.backends.cuda.preferred_blas_library("cublaslt")  # plain cuBLAS has no such setting
        for name in ("bf16", "fp16"):
            setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", (False, False))
    else:
        _tile_products_of_the_cpu()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] @ weight [N, K].T (+ bias [N], after rounding, as in Megatron) -> [..., N]. Without a gradient."""
    rows = x.reshape(-1, x.size(-1))
    if x.is_cuda and rows.size(0) <= FEW_ROWS:
        kernels: Any = importlib.import_module("slime.ops.kernels.invariant")
        out: Tensor = kernels.product(rows, weight)
    else:
        out = torch.mm(rows, weight.t())
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)


@functools.cache
def _tile_products_of_the_cpu() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", tiled_product, "CPU")
    library.impl("mm.out", lambda a, b, *, out: out.copy_(tiled_product(a, b)), "CPU")
    library.impl("addmm", _tiled_addmm, "CPU")
    return library


def tiled_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] -> [M, N], computed on `TILE_ROWS` rows at a time, in float32 for half precision."""
    wide = torch.promote_types(a.dtype, torch.float32)
    out = torch.empty(a.size(0), b.size(1), dtype=a.dtype)
    right = b.to(wide).unsqueeze(0)
    tile = torch.zeros(1, TILE_ROWS, a.size(1), dtype=wide)
    for start in range(0, a.size(0), TILE_ROWS):
        rows = a[start : start + TILE_ROWS]
        tile[0, : rows.size(0)] = rows
        out[start : start + TILE_ROWS] = torch.bmm(tile, right)[0, : rows.size(0)]
    return out


def _tiled_addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return bias * beta + tiled_product(a, b) * alpha


# --- attention --------------------------------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_lengths: tuple[Tensor | None, Tensor | None],
    lengths: tuple[Sequence[int], Sequence[int]],
    *,
    scale: float | None = None,
) -> Tensor:
    """Causal attention within packed sequences: query [T, heads, d], key and value [K, groups, d] -> [T, heads, d].

    The last query of a sequence is aligned with its last key. `lengths`: numbers of queries and of keys per sequence.
    `cu_lengths`: their cumulative sums [N + 1] int32 on the device, needed on a GPU. The backward pass is
    FlashAttention's on a GPU and autograd's on a CPU.
    """
    scale = query.size(-1) ** -0.5 if scale is None else scale
    query_lengths, key_lengths = lengths
    if query.is_cuda:
        cu_query, cu_key = cu_lengths
        longest = max(query_lengths, default=0), max(key_lengths, default=0)
        out: Tensor = _Attend.apply(query, key, value, cu_query, cu_key, longest, scale)
        return out
    parts = zip(
        query.split(list(query_lengths)), key.split(list(key_lengths)), value.split(list(key_lengths)), strict=True
    )
    return torch.cat([attend_in_tiles(*part, scale=scale) for part in parts])


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_query: Tensor,
        cu_key: Tensor,
        longest: tuple[int, int],
        scale: float,
    ) -> Tensor:
        kernels: Any = importlib.import_module("slime.ops.kernels.invariant")
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        log_totals = torch.empty(query.shape[1::-1], dtype=torch.float32, device=query.device)
        kernels.attend(query, key, value, out, cu_query, cu_key, longest[0], scale, log_totals=log_totals)
        ctx.save_for_backward(query, key, value, out, log_totals, cu_query, cu_key)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_totals, cu_query, cu_key = ctx.saved_tensors
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # state of the dropout, which is 0
        found = torch.ops.aten._flash_attention_backward(
            *(grads[0].contiguous(), query, key, value, out, log_totals, cu_query, cu_key, *ctx.longest),
            *(0.0, True, unused, torch.empty(0, dtype=torch.uint64, device=query.device)),
            scale=ctx.scale,
        )
        return *found, None, None, None, None


def attend_in_tiles(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """One sequence on a CPU: query [n, heads, d], key and value [m, groups, d], m >= n -> [n, heads, d].

    The query of row i attends to the keys up to m - n + i. All products have the same shape: `QUERIES_AT_ONCE` queries
    and `KEYS_AT_ONCE` keys, padded with zeros.
    """
    num_queries, num_keys, groups = query.size(0), key.size(0), key.size(1)
    wide = torch.promote_types(query.dtype, torch.float32)
    repeats = query.size(1) // groups
    padded = -num_keys % KEYS_AT_ONCE
    keys, values = (
        torch.nn.functional.pad(x.to(wide), (0, 0, 0, 0, 0, padded)).repeat_interleave(repeats, 1).transpose(0, 1)
        for x in (key, value)
    )  # [heads, m, d]
    parts = []
    for start in range(0, num_queries, QUERIES_AT_ONCE):
        rows = query[start : start + QUERIES_AT_ONCE].to(wide)
        missing = QUERIES_AT_ONCE - rows.size(0)
        tile = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, missing)).transpose(0, 1)  # [heads, QUERIES_AT_ONCE, d]
        last = num_keys - num_queries + start + torch.arange(QUERIES_AT_ONCE)
        out = _attend_tile(tile, keys, values, last.clamp(max=num_keys - 1), scale)
        parts.append(out.transpose(0, 1)[: rows.size(0)])
    return torch.cat(parts).to(query.dtype) if parts else torch.empty_like(query)


def _attend_tile(tile: Tensor, keys: Tensor, values: Tensor, last: Tensor, scale: float) -> Tensor:
    """tile [heads, q, d], keys and values [heads, m, d], last [q]: each query's last key -> [heads, q, d]."""
    top = torch.full((*tile.shape[:2], 1), -float("inf"), dtype=tile.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(tile)
    for start in range(0, int(last[-1]) + 1, KEYS_AT_ONCE):
        block = slice(start, start + KEYS_AT_ONCE)
        scores = torch.bmm(tile, keys[:, block].mT) * scale
        hidden = torch.arange(start, start + KEYS_AT_ONCE) > last.unsqueeze(1)
        scores = scores.masked_fill(hidden, -float("inf"))
        highest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
        weights, kept = (scores - highest).exp(), (top - highest).exp()
        total = total * kept + weights.cumsum(-1)[..., -1:]
        out = out * kept + torch.bmm(weights, values[:, block])
        top = highest
    return out / total


# --- log-probs --------------------------------------------------------------------------------------------------------


def log_totals(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the highest z and log sum exp(z - highest) of each row, for z = logits / temperature, both float32 [n].

    logits [n, V] in the model's dtype, temperatures float32 [n] or [1]. The log-prob of a token is (z - highest) - log
    sum. In a different dtype, the same logits are summed in a different order.
    """
    if logits.is_cuda:
        kernels: Any = importlib.import_module("slime.ops.kernels.invariant")
        found: tuple[Tensor, Tensor] = kernels.log_totals(logits, temperatures)
        return found
    z = logits.float() / temperatures.view(-1, 1)
    top = z.amax(dim=1)
    return top, (z - top.unsqueeze(1)).exp().cumsum(dim=1)[:, -1].log()


def log_probs_of(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Tensor:
    """Log-probs of one token per row: tokens int64 [n] -> [n] float32. Other arguments as in `log_totals`."""
    top, log_total = log_totals(logits, temperatures)
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float() / temperatures.view(-1) - top - log_total


def log_softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log softmax(logits / temperature), [n, V] float32. Arguments as in `log_totals`."""
    top, log_total = log_totals(logits, temperatures)
    z = (
        logits.float().div_(temperatures.view(-1, 1))
        if logits.dtype != torch.float32
        else logits / temperatures.view(-1, 1)
    )
    return z.sub_(top.unsqueeze(1)).sub_(log_total.unsqueeze(1))
