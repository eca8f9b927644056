"""The gated delta rule over the chunks of a packed row: plain PyTorch, Triton kernels, or flash-linear-attention.

The state of a head is a matrix S [d_k, d_v]. For each token, with decay a = exp(g), key k, value v and rate beta,

    S <- a S + k (beta (v - a S^T k))^T        and        output = S^T q

(Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464). Inside a chunk of `CHUNK` tokens that starts from S, with
G the running sum of g, the corrections u = beta (v - ...) solve a unit triangular system (the WY form, section 3.3):

    (I + A) U = beta V - (beta e^G K) S        A[t, i] = beta[t] e^(G[t] - G[i]) k[t].k[i]   for i < t

so the state after a chunk is linear in S, with L[t] = G[last] - G[t]:

    S' = e^G[last] S + (e^L K)^T U = P S + R

In plain PyTorch (`chunked`), P [d_k, d_k] and R [d_k, d_v] are computed for all chunks at once. A loop over chunks, one
product each, then gives the state before every chunk (`_States`), and all outputs follow at once. The Triton kernels
(`fused`, `ops.kernels.delta_rule`) loop over U and S instead, and compute their gradients from formulas.

Invariants
1. Each sequence starts with S = 0 and a new chunk, so its result does not depend on other sequences in the row.
2. Statistics and state are float32 (float64 for float64 inputs), whatever the model's dtype. So are the products of
   `chunked`. In `fused`, products of float32 values have a relative error of about 2^-16 if the inputs are in half
   precision (which itself rounds to 2^-8 or 2^-11), and are as accurate as float32 otherwise.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import ConfigError
from slime.ops.select import FUSED, name_of

CHUNK = 64
"""Number of tokens in a chunk."""

_SIZES = (64, 128)
"""Head sizes for which the Triton kernels are used. `LAUNCH` in `ops.kernels.delta_rule` says why not smaller ones."""

DeltaRule = Callable[..., Tensor]
"""(q [T, h, d_k], k [T, h, d_k], v [T, h, d_v], g float32 [T, h], beta [T, h], lengths, cu_seqlens) -> [T, h, d_v]."""


def delta_rule(device: torch.device, dtype: torch.dtype, backend: str = "auto") -> DeltaRule:
    """Returns the implementation for `backend` (--qwen-gdn-backend).

    "auto" uses the kernels of flash-linear-attention if they are installed and can run, which requires a GPU and half
    precision, and otherwise `chosen`. For "fla", raises `ConfigError` if its kernels cannot run.
    """
    reasons = kernel_problems(device, dtype)
    if backend == "fla" and reasons:
        raise ConfigError(
            f"--qwen-gdn-backend fla does not work here, because {' and '.join(reasons)}; use torch or auto"
        )
    if backend == "torch":
        return chunked
    return chosen if reasons else fla_kernels


@functools.lru_cache(maxsize=8)
def kernel_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns why the kernels of flash-linear-attention cannot run here. Empty if they can. The last reason is
    explained in its issue 640.

    Cached, because every layer calls it and finding a package takes milliseconds.
    """
    on_gpu = device.type == "cuda"
    hopper = on_gpu and torch.cuda.get_device_capability(device)[0] == 9
    problems = (
        ("flash-linear-attention is not installed", importlib.util.find_spec("fla") is None),
        ("its kernels need a GPU", not on_gpu),
        (f"its kernels do not compute in {dtype}", dtype not in (torch.bfloat16, torch.float16)),
        ("Triton before 3.7.1 computes wrong gradients on Hopper GPUs", hopper and _triton() < (3, 7, 1)),
    )
    return tuple(reason for reason, holds in problems if holds)


def _triton() -> tuple[int, ...]:
    numbers = importlib.metadata.version("triton").split("+")[0].split(".")[:3]
    return tuple(int(n) for n in numbers if n.isdecimal())


def fla_kernels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor
) -> Tensor:
    """Computes the same as `chunked` with Triton kernels. Only for half precision on a GPU."""
    rule: Any = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    row = (x.unsqueeze(0).contiguous() for x in (q, k, v))
    decay, rate = g.unsqueeze(0), beta.unsqueeze(0)
    result: Tensor = rule(*row, g=decay, beta=rate, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)[0].squeeze(0)
    return result


def chosen(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor | None = None
) -> Tensor:
    """Computes the same as `chunked` with the form that `ops.select` chose, if it supports the head sizes."""
    supported = all(size in _SIZES for size in (q.size(-1), v.size(-1)))
    rule = fused if supported and name_of("delta_rule", q) == FUSED else chunked
    return rule(q, k, v, g, beta, lengths)


def fused(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor | None = None
) -> Tensor:
    """Computes the same as `chunked` with Triton kernels. Not for float64.

    On a GPU, the head sizes must be in `_SIZES`.
    """
    out: Tensor = _Fused.apply(q, k, v, g, beta, _table(lengths, q.device))
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, table: tuple[Tensor, ...]
    ) -> Tensor:
        kernels: Any = importlib.import_module("slime.ops.kernels.delta_rule")
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        ctx.precision = "tf32x3" if q.dtype == torch.float32 else "bf16x3"
        out, saved = kernels.forward((q, k, v, g, beta), kernels.Tiles(*table), ctx.precision)
        ctx.save_for_backward(q, k, v, *saved)
        ctx.table, ctx.dtypes = table, (g.dtype, beta.dtype)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels: Any = importlib.import_module("slime.ops.kernels.delta_rule")
        q, k, v, *saved = ctx.saved_tensors
        *of_inputs, of_g, of_beta = kernels.backward(
            (grads[0].contiguous(), q, k, v), kernels.Tiles(*ctx.table), kernels.Saved(*saved), ctx.precision
        )
        return *of_inputs, of_g.to(ctx.dtypes[0]), of_beta.to(ctx.dtypes[1]), None


@functools.lru_cache(maxsize=8)
def _table(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the fields of `kernels.delta_rule.Tiles` for sequences of these lengths."""
    begins = itertools.accumulate(lengths, initial=0)
    starts = [range(begin, begin + length, CHUNK) for begin, length in zip(begins, lengths, strict=False) if length]
    count = [min(CHUNK, held.stop - start) for held in starts for start in held]
    begin = itertools.accumulate((len(held) for held in starts), initial=0)
    columns = ([start for held in starts for start in held], count, list(begin))
    return tuple(torch.tensor(column, dtype=torch.int32).to(device) for column in columns)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor | None = None
) -> Tensor:
    """Computes the recurrence over a row of T tokens and N sequences of `lengths` [N] -> [T, h, d_v], dtype of `q`.

    q, k [T, h, d_k] before normalisation, v [T, h, d_v], g float32 [T, h] log decay, beta [T, h]. Queries are scaled by
    1 / sqrt(d_k) as in attention. Only kernels use `cu_seqlens`.
    """
    plan = _plan(lengths, q.device)
    narrow, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (plan.chunks(x.to(wide)) for x in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    q, k = _normalised(q) * q.size(-1) ** -0.5, _normalised(k)  # [M, h, CHUNK, d]
    total = g.cumsum(-2)
    decay = _decay(total)
    growth, last = total.exp(), total[..., -1:, :]
    scores = (q @ k.mT) * decay
    system = beta * (k @ k.mT) * decay  # only entries below the diagonal are read
    right = torch.cat([beta * v, beta * growth * k], dim=-1)
    free, bound = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.size(-1), k.size(-1)], dim=-1
    )
    keys = (k * (last - total).exp()).mT
    kept = keys @ -bound
    kept.diagonal(dim1=-2, dim2=-1).add_(last.exp().squeeze(-1))
    states: Tensor = _States.apply(kept, keys @ free, plan)
    return plan.tokens((q * growth) @ states + scores @ (free - bound @ states)).to(narrow)


class _States(torch.autograd.Function):
    """(P [M, h, d_k, d_k], R [M, h, d_k, d_v]) -> the state before each of M chunks [M, h, d_k, d_v].

    One product per chunk in each direction. Autograd over the loop would launch about ten times as many kernels.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, plan: _Plan) -> Tensor:
        states = torch.zeros_like(added)
        for now, then in plan.steps:
            torch.baddbmm(*(x[now].flatten(0, 1) for x in (added, kept, states)), out=states[then].flatten(0, 1))
        ctx.save_for_backward(kept, states)
        ctx.plan = plan
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        kept, states = ctx.saved_tensors
        whole = grads[0].clone(memory_format=torch.contiguous_format)
        back = torch.zeros_like(whole)  # gradient of the state after each chunk; zero after the last of a sequence
        for now, then in reversed(ctx.plan.steps):
            back[now] = whole[then]
            whole[now].flatten(0, 1).baddbmm_(kept[now].flatten(0, 1).mT, whole[then].flatten(0, 1))
        return back @ states.mT, back, None


def _normalised(x: Tensor) -> Tensor:
    """Returns x / |x| over the last dimension, with the same epsilon under the root as in released models."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _decay(total: Tensor) -> Tensor:
    """Running sums G of the log decay [..., C, 1] -> e^(G[t] - G[i]) [..., C, C], zero for i > t.

    Masks before the exponential, which could overflow above the diagonal and then give NaN (infinity times zero).
    """
    size = total.size(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total - total.mT).masked_fill(later, -torch.inf).exp()


@dataclass(frozen=True)
class _Plan:
    """Assigns a row's tokens to chunks. Chunks are sorted by their index within the sequence, then by sequence
    length, longest first.

    That makes the chunks of a loop iteration adjacent, and they continue the first sequences of the previous one.
    """

    gather: Tensor
    """[M * CHUNK] int64: the token in each slot; T for padding."""
    place: Tensor
    """[T] int64: the slot of each token."""
    widths: tuple[int, ...]
    """Number of chunks in each loop iteration. Never increases."""

    @functools.cached_property
    def steps(self) -> list[tuple[slice, slice]]:
        """For each loop iteration except the last: the chunks whose sequences continue, and their next chunks."""
        found, start = [], 0
        for width, continuing in itertools.pairwise(self.widths):
            found.append((slice(start, start + continuing), slice(start + width, start + width + continuing)))
            start += width
        return found

    def chunks(self, x: Tensor) -> Tensor:
        """[T, h, d] -> [M, h, CHUNK, d], padded with zeros."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, self.gather).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """[M, h, CHUNK, d] -> [T, h, d]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


@functools.lru_cache(maxsize=8)
def _plan(lengths: tuple[int, ...], device: torch.device) -> _Plan:
    """Returns the plan for sequences of these lengths, which all layers of a forward pass share."""
    num_tokens = sum(lengths)
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    turns = [[i for i in longest_first if lengths[i] > start] for start in range(0, max(lengths), CHUNK)]
    first = torch.tensor([begins[i] + CHUNK * turn for turn, held in enumerate(turns) for i in held])
    end = torch.tensor([begins[i] + lengths[i] for held in turns for i in held])
    token = first.unsqueeze(1) + torch.arange(CHUNK)
    gather = torch.where(token < end.unsqueeze(1), token, num_tokens).flatten()
    place = torch.empty(num_tokens + 1, dtype=torch.int64)
    place[gather] = torch.arange(gather.numel())
    return _Plan(gather.to(device), place[:num_tokens].to(device), tuple(len(held) for held in turns))
