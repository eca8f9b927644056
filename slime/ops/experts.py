"""The ops of an MoE layer: permuting token rows into expert order and back, multiplying groups of rows, and SwiGLU
weighted by the router.

Each op has two forms. "reference" runs on any device. It waits for the device once per layer to get the group sizes,
and multiplies one group at a time. "fused" uses PyTorch's grouped matmul for bfloat16 (`torch._grouped_mm`): one kernel
multiplies all groups, and their sizes stay on the device.

Invariants
1. Rows are sorted by expert, then by token. Every row belongs to one group and is multiplied only by the weight of that
   group.
2. The weight gradient of an empty group is zero.
3. "reference" is bitwise equal to one linear layer per group: outputs, row gradients and weight gradients.
4. `gather_rows` and `sum_rows` are each other's backward pass. A token's rows are added in expert order: "reference"
   adds in the dtype of the rows, bitwise equal to Megatron, and "fused" adds in float32.
5. In both forms, SwiGLU (Shazeer 2020, arXiv:2002.05202) rounds three results to the dtype of the rows: silu(gate), its
   product with `up`, and this product times the router weight, which can be float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from slime.ops import swiglu
from slime.ops.select import FUSED, is_invariant, name_of

Form = Literal["reference", "fused"]

_MULTIPLE = 8
"""Row lengths are padded to a multiple of this, because the kernel requires bfloat16 rows with 16-byte alignment."""


@dataclass(frozen=True)
class RowGroups:
    """A partition of rows into contiguous groups."""

    ends: Tensor
    """int32 [groups], on the rows' device: the index after each group's last row."""

    @classmethod
    def of(cls, sizes: Tensor, device: torch.device) -> RowGroups:
        """Builds the groups from `sizes` [groups], the number of rows per group, on any device."""
        return cls(sizes.cumsum(0).to(torch.int32).to(device, non_blocking=True))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of rows per group, on the host. Waits for the device once."""
        ends: list[int] = self.ends.tolist()
        return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def form_of(x: Tensor) -> Form:
    """Returns the form that `select` chose for rows like `x` and weights of the same dtype."""
    return "fused" if name_of("experts", x) == FUSED and x.dtype is torch.bfloat16 else "reference"


def grouped_problems(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Returns why the fused form cannot run, or () if a trial run succeeds."""
    reasons = (
        ("its kernels need a GPU", device.type != "cuda"),
        (f"PyTorch's grouped matmul supports bfloat16, not {dtype}", dtype is not torch.bfloat16),
        (f"PyTorch {torch.__version__} has no grouped matmul", not hasattr(torch, "_grouped_mm")),
    )
    found = tuple(reason for reason, holds in reasons if holds)
    if found:
        return found
    try:
        if torch.cuda.get_device_capability()[0] not in (
            9,
            10,
        ):  # on other GPUs, PyTorch falls back to a loop that waits for the sizes
            return ("PyTorch's grouped matmul has kernels only for compute capability 9 and 10",)
        _probe()
    except (RuntimeError, ImportError, AssertionError) as error:
        return (f"a trial run failed: {error}",)
    return ()


def _probe() -> None:
    from slime.ops.kernels.mlp import sum_slots

    x = torch.ones(24, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.ones(3, 32, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    groups = RowGroups.of(torch.tensor([9, 0, 15]), x.device)
    with torch.enable_grad():
        out = grouped_linear(x, weight, groups, "fused")
        gradients = torch.autograd.grad(out.sum(), (x, weight))
    want = torch.tensor([9.0, 0.0, 15.0], device="cuda")
    right = bool((out == 16).all()) and bool((gradients[0] == 32).all())
    right = right and bool((gradients[1] == want[:, None, None]).all())
    sums = sum_slots(out.detach(), torch.tensor([[0, 23], [5, 5]], dtype=torch.int32, device="cuda"))
    assert right and bool((sums == 32).all()), "the results are wrong"


def grouped_linear(x: Tensor, weight: Tensor, groups: RowGroups, form: Form) -> Tensor:
    """x [rows, in], weight [groups, out, in] -> [rows, out]: x_g @ weight_g^T for the rows of each group.

    x and weight must have the same dtype. The fused form requires bfloat16 and a GPU.
    """
    match form:
        case "reference":
            return _OneByOne.apply(x, weight, groups)
        case "fused":
            more_in, more_out = -x.size(1) % _MULTIPLE, -weight.size(1) % _MULTIPLE
            if not more_in and not more_out:
                return _Together.apply(x, weight, groups)
            x, padded = functional.pad(x, (0, more_in)), functional.pad(weight, (0, more_in, 0, more_out))
            return _Together.apply(x, padded, groups)[:, : weight.size(1)]
    assert_never(form)


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        out = x.new_empty(x.size(0), weight.size(1))
        for own, part, result in zip(weight, x.split(groups.sizes), out.split(groups.sizes), strict=True):
            torch.mm(part, own.t(), out=result)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        sizes, (grad,) = ctx.groups.sizes, grads
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        if grad_x is not None:
            for own, part, result in zip(weight, grad.split(sizes), grad_x.split(sizes), strict=True):
                torch.mm(part, own, out=result)
        if grad_weight is not None:
            for part, rows, result in zip(grad.split(sizes), x.split(sizes), grad_weight, strict=True):
                torch.mm(part.t(), rows, out=result)  # writes zeros if there are no rows
        return grad_x, grad_weight, None


class _Together(torch.autograd.Function):
    """Runs each of the three products as one kernel, in layouts that the kernel accepts for any group size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight, groups.ends)
        return _product(x, weight.transpose(1, 2), groups.ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _product(grad, weight, ends) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _outer(grad, x, ends) if x.size(0) else torch.zeros_like(weight)
        return grad_x, grad_weight, None


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not x.size(0):
        return x.new_empty(0, weight.size(2))
    return torch._grouped_mm(x, weight, offs=ends)


def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad [rows, out], x [rows, in] -> [groups, out, in]: grad_g^T x_g."""
    out: Tensor = torch._grouped_mm(grad.t(), x, offs=ends)
    if torch.cuda.get_device_capability(x.device) >= (10, 0):
        # On these GPUs, kernels leave an empty group's result uninitialized: github.com/pytorch/pytorch/issues/172439
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        out.masked_fill_(empty[:, None, None], 0)
    return out


@dataclass(frozen=True, slots=True)
class RowPlan:
    tokens: Tensor
    """int64 [rows]"""
    experts: Tensor
    """int64 [rows]"""
    slots: Tensor
    """int32 [tokens, topk]: the rows of each token, in expert order."""
    groups: RowGroups


def plan_rows(routing_map: Tensor, topk: int) -> RowPlan:
    """Builds the plan for a routing map, bool [tokens, experts], with exactly `topk` experts per token.

    Because `topk` is fixed, the host knows all sizes without waiting for the device. Raises an error if a token has a
    different number of experts; on a GPU, the error surfaces at a later synchronization.
    """
    num_tokens, num_experts = routing_map.shape
    device, num_rows = routing_map.device, num_tokens * topk
    pairs = routing_map.t().reshape(-1)  # ordered by expert
    ranks = pairs.cumsum(0)
    if num_tokens:
        torch._assert_async(ranks[-1] == num_rows, "a token does not have topk experts")
    # All pairs that were not chosen share one extra slot after the rows.
    places = torch.where(pairs, ranks - 1, num_rows).clamp_(max=num_rows)
    chosen = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    with _in_any_order():
        chosen = chosen.scatter_(0, places, torch.arange(pairs.numel(), device=device))[:num_rows]
    tokens, experts = chosen.remainder(max(1, num_tokens)), chosen.div(max(1, num_tokens), rounding_mode="floor")
    nth = routing_map.cumsum(1).t().reshape(-1).index_select(0, chosen) - 1
    slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
    with _in_any_order():
        slots.scatter_(0, tokens * topk + nth, torch.arange(num_rows, dtype=torch.int32, device=device))
    ends = ranks.view(num_experts, num_tokens)[:, -1] if num_tokens else ranks.new_zeros(num_experts)
    return RowPlan(tokens, experts, slots.view(num_tokens, topk), RowGroups(ends.to(torch.int32)))


def interleave(sizes: Tensor, num_rows: int) -> tuple[Tensor, Tensor, RowGroups]:
    """Returns the order that sorts rows by expert, int64 [rows], its inverse, and the groups.

    The rows are ordered by source, then by expert. sizes: int32 [sources, experts], with the sum `num_rows`, which the
    host knows, so that it does not wait for the device. Rows of an expert stay in the order of their sources.
    """
    device, totals = sizes.device, sizes.sum(0)
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)  # of each part, ordered by source
    moved = sizes.t().flatten()
    shifts = starts.t().flatten() - (moved.cumsum(0) - moved)
    rows = torch.arange(num_rows, device=device)
    order = rows + torch.repeat_interleave(shifts, moved.long(), output_size=num_rows)
    with _in_any_order():
        inverse = torch.empty_like(order).scatter_(0, order, rows)
    return order, inverse, RowGroups.of(totals, device)


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Turns off PyTorch's deterministic mode, which would sort the indices of a copy even if they are all distinct."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def weigh(scores: Tensor, chosen: Tensor, dtype: torch.dtype, *, share: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the router weights [T, experts] in `dtype`, 0 for experts that were not chosen, and the choices as bool.

    scores float32 [T, experts], chosen int64 [T, topk]. `share`: divide the chosen scores by their sum.
    """
    weights = scores.gather(1, chosen)
    if share:
        weights = weights / (_total(weights) + 1e-20)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    return torch.zeros_like(scores, dtype=dtype).scatter(1, chosen, (weights * scale).to(dtype)), routing_map


def _total(weights: Tensor) -> Tensor:
    """[T, topk] -> [T, 1]"""
    if not is_invariant():
        return weights.sum(-1, keepdim=True)
    return functools.reduce(torch.add, weights.split(1, dim=1))  # the summation order of `sum` depends on the shape


def mix(x: Tensor, weights: Tensor, routing_map: Tensor, topk: int, projections: tuple[Tensor, Tensor]) -> Tensor:
    """Runs an MoE layer without gradients, for an engine: x [T, H] -> [T, H], the same result as in the trainer.

    Router weights [T, experts] and routing map as in `weigh`; projections [experts, 2F, H] and [experts, H, F].
    """
    form, plan = form_of(x), plan_rows(routing_map, topk)
    mixed = grouped_linear(gather_rows(x, plan, form), projections[0], plan.groups, form)
    inner = weighted_swiglu(mixed, row_weights(weights, plan), form)
    return sum_rows(grouped_linear(inner, projections[1], plan.groups, form), plan, form)


def row_weights(weights: Tensor, plan: RowPlan) -> Tensor:
    """Gathers the router weights [tokens, experts] into row order, [rows]."""
    return weights.reshape(-1).gather(0, plan.tokens * weights.size(1) + plan.experts)


def gather_rows(x: Tensor, plan: RowPlan, form: Form) -> Tensor:
    """Copies tokens [tokens, H] to rows [rows, H]. The gradient of a token is the sum over its rows."""
    match form:
        case "reference":
            return x.index_select(0, plan.tokens)
        case "fused":
            return _Gather.apply(x, plan.tokens, plan.slots)
    assert_never(form)


def sum_rows(y: Tensor, plan: RowPlan, form: Form) -> Tensor:
    """Sums each token's rows: [rows, H] -> [tokens, H]. Each row gets the gradient of its token."""
    match form:
        case "reference":
            out = y.new_zeros(plan.slots.size(0), y.size(1))
            if torch.are_deterministic_algorithms_enabled() or is_invariant():
                return out.index_add_(0, plan.tokens, y)
            return out.scatter_add_(0, plan.tokens.unsqueeze(1).expand(-1, y.size(1)), y)
        case "fused":
            return _Sum.apply(y, plan.tokens, plan.slots)
    assert_never(form)


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x [rows, ...] -> x[order]. `inverse`: the inverse permutation, by which gradients return."""
    result: Tensor = _Permute.apply(x, order, inverse)
    return result


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from slime.ops.kernels.mlp import sum_slots  # imports Triton, which may be missing without a GPU

        (slots,) = ctx.saved_tensors
        return sum_slots(grads[0].contiguous(), slots), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, slots: Tensor) -> Tensor:
        from slime.ops.kernels.mlp import sum_slots

        ctx.save_for_backward(tokens)
        return sum_slots(y.contiguous(), slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens), None, None


def weighted_swiglu(x: Tensor, weights: Tensor, form: Form) -> Tensor:
    """x [rows, 2F] (gates, then values), weights [rows] -> silu(gate) * value * weight [rows, F], in the dtype of x."""
    match form:
        case "reference":
            return (swiglu.reference(x) * weights.unsqueeze(-1)).to(x.dtype)
        case "fused":
            return _WeightedSwiGLU.apply(x, weights)
    assert_never(form)


class _WeightedSwiGLU(torch.autograd.Function):
    """Computes gradients in float32 from the rounded products, and rounds them once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        from slime.ops.kernels.mlp import swiglu_forward  # imports Triton, which may be missing without a GPU

        x, weights = x.contiguous(), weights.contiguous()
        ctx.save_for_backward(x, weights)
        return swiglu_forward(x, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from slime.ops.kernels.mlp import swiglu_backward

        return swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)
