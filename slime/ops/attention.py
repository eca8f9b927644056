"""Packed causal attention: plain PyTorch, one sequence at a time, or one FlashAttention call for the whole row. Also
attention to selected keys (`to_selected`).

The queries [T, heads, d] and keys [K, groups, d] of N sequences are concatenated. The last query of a sequence is
aligned with its last key, so a sequence can have more keys than queries (context parallelism). heads / groups query
heads share one key head, as in FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FLASH_ARGUMENTS = (
    *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
    *("dropout_p", "is_causal", "return_debug_mask", "scale"),
)
"""Arguments that `flash` passes to torch's operator, in the order of torch 2.11 and 2.13."""
ENTRIES_AT_ONCE = 1 << 25
"""Maximum number of scores plus gathered latent elements in one block of queries in `to_selected`."""


def per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scale: float | None = None,
) -> Tensor:
    """Reference form: query [T, heads, d], key [K, groups, d], value [K, groups, d_v] -> [T, heads, d_v].

    `scale` defaults to 1 / sqrt(d).
    """
    # Views in the layout of scaled_dot_product_attention, [1, heads, T, d].
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    parts = []
    for a, b, c in zip(
        q.split(list(query_lengths), dim=2),
        k.split(list(key_lengths), dim=2),
        v.split(list(key_lengths), dim=2),
        strict=True,
    ):
        num_queries, num_keys, mask = a.size(2), b.size(2), None
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


def flash4(
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
    """Same as `flash`, by FlashAttention 4 (package flash-attn-4), whose kernels are written for Hopper and later GPUs.

    Values may have another head size than queries and keys. With torch's deterministic mode, the backward pass adds in
    a fixed order.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = _flash4_call()(
        *(query, key, value),
        cu_seqlens_q=cu_query,
        cu_seqlens_k=cu_key,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scale,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    attended: Tensor = out[0] if isinstance(out, tuple) else out
    return attended


@functools.cache
def _flash4_call() -> Any:
    return importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func


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


@functools.cache
def flash4_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns why `flash4` cannot run, or () if a trial run, which compiles its kernels, succeeds."""
    found = _kernel_problems(device, dtype)
    if not found and importlib.util.find_spec("flash_attn") is None:
        found = ("flash-attn-4 is not installed",)
    if not found and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        found = ("its kernels need compute capability 9 or 10",)
    if found:
        return found
    try:
        _probe_flash4(device, dtype)
    except Exception as error:  # compilers raise errors of many kinds
        return (f"a trial run failed: {' '.join(str(error).split())[:200]}",)
    return ()


def _probe_flash4(device: torch.device, dtype: torch.dtype) -> None:
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    query, key, value = (
        torch.ones(3, heads, 128, dtype=dtype, device=device, requires_grad=True) for heads in (4, 2, 2)
    )
    with torch.enable_grad():
        out = flash4(query, key, value, ends, ends, 2, 2)
        gradient = torch.autograd.grad(out.sum(), value)[0]
    want = torch.tensor([2.0, 3.0, 1.0], device=device)  # two query heads; the second sequence sees its first key twice
    if not bool((out == 1).all()) or not bool((gradient == want[:, None, None]).all()):
        raise RuntimeError("its results are wrong")


def varlen_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    there = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return (*_kernel_problems(device, dtype), *(() if there else ("this torch version does not have it",)))


def _kernel_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    reasons = (
        ("its kernels need a GPU", device.type != "cuda"),
        (f"its kernels do not support {dtype}", dtype not in (torch.bfloat16, torch.float16)),
    )
    return tuple(reason for reason, holds in reasons if holds)


def to_selected(query: Tensor, up: Tensor, latents: Tensor, selected: Tensor, *, scale: float) -> Tensor:
    """Multi-head latent attention of one sequence's queries to the keys that an indexer selected for them.

    query [n, heads, nope + r], rotated; up [heads, nope + v, c] in float32 or wider, the up projection of keys and
    values; latents [m, c + r], latents and rotated keys; selected [n, k] int32, indices of keys -> [n, heads, v]. The
    last query is aligned with the last key. Keys after the query are ignored, and if a query has at most k keys up to
    itself, all of them must be selected.

    The key of head h is (U_h c, r) and its value V_h c, with a latent c and a rotated part r that all heads share. So
    its score is (U_h^T q, q_r) . (c, r), and the sum of p V_h c is V_h (sum of p c): the up projection is applied to
    queries and results, and all heads attend to the latents themselves (DeepSeek-V3.2, arXiv:2512.02556, appendix A:
    the MQA mode of MLA). Multiply-adds and gathered bfloat16 per query, for h heads on this rank and the sizes of
    DeepSeek-V3.2 (nope 128, v 128, c 512, r 64, k 2048):

        keys and values, gathered   k h (nope + r + v) = 0.66M h   2 k h (nope + r + v) bytes = 1.3 MB h
        latents, gathered           k h (2 c + r) = 2.2M h         2 k (c + r) bytes = 2.4 MB
        latents of all m keys       m h (2 c + r) = 1088 m h       none

    Applying U and V takes as long as expanding a key. Gathered data serves only one query, so the first form is limited
    by memory bandwidth (168 MB per query for 128 heads, 21 MB for 16), and the second is faster although it multiplies
    more. The third form needs no gathering, because a block of queries shares its keys. As an estimate for both passes
    together, a gathered element costs 32 bytes of memory traffic (it is written in both and read six times, and its
    gradient is written, read and added to the sum). A score costs 84 bytes plus 8 (2 c + r) operations, which on a
    GPU with 200 operations per byte take as long as 44 bytes. So the second form costs k (32 (c + r) + 128 h) bytes per
    query and the third 128 m h. Latents are therefore gathered if m is at least k (1 + (c + r) / (4 h)), which is
    20,480 for 16 heads and 4,352 for 128. Beyond that, the cost of a query is constant.

    Queries are processed in blocks of at most `ENTRIES_AT_ONCE` scores and gathered elements. The backward pass
    recomputes each block, because autograd saves only the arguments. Apart from arguments, results and gradients,
    memory therefore depends neither on n nor on m. Scores, softmax and sums of gradients are float32.
    """
    out: Tensor = _ToSelected.apply(query, up, latents, selected, scale)
    return out


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive queries of a sequence and their keys."""

    rows: slice
    num_keys: int
    """Number of keys up to the last query."""
    gathers: bool
    """Whether each query has its own selected keys. If not, all queries share all keys up to the last query."""

    def indices(self, selected: Tensor) -> Tensor:
        """selected [n, k] -> indices of all gathered latents [queries * k]."""
        return selected[self.rows].flatten()

    def keys(self, latents: Tensor, selected: Tensor) -> Tensor:
        """Returns the latents of the keys [groups, keys, c + r]: one group per query, or one for all queries."""
        if not self.gathers:
            return latents[: self.num_keys].unsqueeze(0)
        return latents.index_select(0, self.indices(selected)).unflatten(0, (-1, selected.size(1)))

    def bias(self, selected: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the bias of the scores [queries, 1, keys]: 0, or -inf for keys that a query does not see."""
        chosen = selected[self.rows]
        first = self.num_keys - chosen.size(0)
        place = torch.arange(first, self.num_keys, device=chosen.device, dtype=chosen.dtype).unsqueeze(1)
        if self.gathers:
            seen = chosen <= place
        else:  # if a later key is selected, so are all keys up to the query, and the query's own key can replace it
            seen = torch.zeros(chosen.size(0), self.num_keys, dtype=torch.bool, device=chosen.device)
            seen.scatter_(1, chosen.minimum(place).long(), True)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -float("inf")).unsqueeze(1)


def gathered_from(num_selected: int, heads: int, width: int) -> int:
    """Returns the smallest number of keys for which latents [width] are gathered; see `to_selected`."""
    return num_selected + num_selected * width // (4 * heads)


def _blocks(query: Tensor, latents: Tensor, selected: Tensor) -> Iterator[_Block]:
    """Divides the queries into blocks."""
    (num_queries, heads), (num_keys, width), num_selected = query.shape[:2], latents.shape, selected.size(1)
    first, turn = num_keys - num_queries, gathered_from(num_selected, heads, width)
    start = 0
    while start < num_queries:
        before = first + start
        gathers = before >= turn
        if gathers:
            size = ENTRIES_AT_ONCE // (num_selected * (heads + width))
        else:  # the largest size with (before + size) * size * heads entries
            size = (math.isqrt(before * before + 4 * ENTRIES_AT_ONCE // heads) - before) // 2
            size = min(size, turn - before)
        end = min(start + max(size, 1), num_queries)
        yield _Block(slice(start, end), first + end, gathers)
        start = end


class _ToSelected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, up: Tensor, latents: Tensor, selected: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query, up, latents, selected)
        ctx.scale = scale
        up_key, up_value = _up_of(query, up, latents)
        out = query.new_empty(*query.shape[:2], up_value.size(1))
        for block in _blocks(query, latents, selected):
            absorbed, keys = _absorbed(query[block.rows], up_key), block.keys(latents, selected)
            weights = _weights(absorbed, keys, block.bias(selected, up.dtype), scale).to(query.dtype)
            mean = wide_product(weights, keys[..., : up.size(-1)]).view(*absorbed.shape[:2], -1)
            out[block.rows] = _by_head(mean.to(query.dtype), up_value.mT)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, up, latents, selected = ctx.saved_tensors
        up_key, up_value = _up_of(query, up, latents)
        nope, rank = up_key.shape[1:]
        d_query, d_up = torch.empty_like(query), torch.zeros_like(up)
        d_latents = torch.zeros_like(latents, dtype=up.dtype)
        for block in _blocks(query, latents, selected):
            own, grad, keys = query[block.rows], grads[0][block.rows], block.keys(latents, selected)
            absorbed, d_mean = _absorbed(own, up_key), _by_head(grad, up_value).to(query.dtype)
            both = _weights_and_gradient(absorbed, d_mean, keys, block.bias(selected, up.dtype), ctx.scale)
            mean = wide_product(both[:, 0], keys[..., :rank]).view(d_mean.shape).to(query.dtype)
            d_absorbed = wide_product(both[:, 1], keys).view(absorbed.shape).to(query.dtype)
            d_query[block.rows, :, :nope] = _by_head(d_absorbed[..., :rank], up_key.mT)
            d_query[block.rows, :, nope:] = d_absorbed[..., rank:]
            d_up[:, :nope] += _over_queries(own[..., :nope], d_absorbed[..., :rank])
            d_up[:, nope:] += _over_queries(grad, mean)
            outer = torch.nn.functional.pad(d_mean, [0, keys.size(-1) - rank]), absorbed
            outer_rows = torch.stack([x.reshape(keys.size(0), -1, keys.size(-1)) for x in outer], dim=1)
            d_keys = wide_product(both.flatten(1, 2).mT, outer_rows.flatten(1, 2))
            if block.gathers:
                d_latents.index_add_(0, block.indices(selected), d_keys.flatten(0, 1))
            else:
                d_latents[: block.num_keys] += d_keys.squeeze(0)
        return d_query, d_up, d_latents.to(latents.dtype), None, None


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b [g, i, o] in float32 (float64 for float64 inputs), without rounding half-precision products."""
    if a.element_size() > 2:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def _up_of(query: Tensor, up: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the up projections of keys [heads, nope, c] and values [heads, v, c], in the dtype of the queries."""
    nope = query.size(-1) - (latents.size(-1) - up.size(-1))
    up_key, up_value = up.to(query.dtype).split([nope, up.size(1) - nope], dim=1)
    return up_key, up_value


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [n, heads, i], matrices [heads, i, o] -> [n, heads, o], like `wide_product`."""
    return wide_product(x.transpose(0, 1), matrices).transpose(0, 1)


def _over_queries(x: Tensor, y: Tensor) -> Tensor:
    """Sums x [n, heads, i] times y [n, heads, o] over the queries -> [heads, i, o], like `wide_product`."""
    return wide_product(x.permute(1, 2, 0), y.transpose(0, 1))


def _absorbed(query: Tensor, up_key: Tensor) -> Tensor:
    """query [n, heads, nope + r] -> [n, heads, c + r], whose products with latents are the scores."""
    plain, turned = query.split([up_key.size(1), query.size(-1) - up_key.size(1)], dim=-1)
    return torch.cat([_by_head(plain, up_key).to(query.dtype), turned], dim=-1)


def _weights(absorbed: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """absorbed [n, heads, c + r], keys [g, m, c + r] -> attention weights [g, n / g * heads, m]."""
    scores = wide_product(absorbed.view(keys.size(0), -1, keys.size(-1)), keys.mT)
    by_query = scores.view(*absorbed.shape[:2], -1)
    torch.add(bias, by_query, alpha=scale, out=by_query)
    return scores.softmax(dim=-1)


def _weights_and_gradient(absorbed: Tensor, d_mean: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Returns the attention weights and the gradient of the products with the keys, [g, 2, n / g * heads, m].

    `d_mean` [n, heads, c] is the gradient of the mean latents. The result has the dtype of the keys.
    """
    weights = _weights(absorbed, keys, bias, scale)
    rank = d_mean.size(-1)
    d_weights = wide_product(d_mean.reshape(keys.size(0), -1, rank), keys[..., :rank].mT)
    both = keys.new_empty(weights.size(0), 2, *weights.shape[1:])
    both[:, 0] = weights
    d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
    torch.mul(d_scores, scale, out=both[:, 1])
    return both
