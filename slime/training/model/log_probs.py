"""Computes log-probs and entropy of target tokens from hidden states without materializing all logits of a batch.

Only `chunk_tokens` rows of logits exist at a time, in the model's dtype. The backward pass recomputes each chunk and
overwrites it with its gradient, the input of two matrix products. Elementwise float32 work runs on a few rows at a time
(`WORK_BYTES`), so only top-p and top-k need a float32 buffer as large as a chunk. The vocabulary can be split over the
tensor-parallel group: maxima, sums and target logits are reduced per chunk.

Invariants
1. Padding rows of the output weight never enter a product, so even NaNs in them have no effect. Their gradient is zero.
2. The result does not depend on `chunk_tokens`, and depends on the number of vocabulary shards only through rounding.
3. The gradient of `hidden` covers only this rank's shard. The caller sums it over the tensor-parallel group.
4. Float64 input is computed in float64. For other dtypes, products run in the input dtype and the rest in float32.
5. Under top-p or top-k, the kept set includes the target and is treated as constant in the backward pass. Entropy and
   `full_log_probs` refer to the full distribution over the vocabulary.
6. With `into_main_grad`, the weight gradient is accumulated into `main_grad` chunk by chunk (see `placeholder`),
   without another float32 buffer of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.utils._triton import has_triton

from slime.ops import invariant
from slime.ops.linear import add_fused, add_reference, product
from slime.ops.select import is_invariant

# The weight gradient is accumulated into Megatron's float32 `main_grad` right here, not by the autograd hook.
#
# Megatron's DDP gives each trained parameter a `main_grad` buffer and a flag, `grad_added_to_main_grad`. If the flag is
# set, DDP's hook does not add the gradient from autograd. The exception is an embedding tied to the output layer of the
# same chunk (`zero_out_wgrad`): autograd computes a second gradient for it, so the hook ignores the flag and adds that
# gradient.


def placeholder(parameter: Tensor) -> Tensor | None:
    """Flags the gradient of `parameter` as added to `main_grad`. Returns the gradient to hand to autograd instead.

    This is an uninitialized tensor that is never read. The hook of `--overlap-grad-reduce` expects a gradient.
    For a tied embedding it is None, because autograd already has the embedding's gradient.
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if vars(parameter).get("zero_out_wgrad") else torch.empty_like(parameter)


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of the vocabulary that this tensor-parallel rank holds."""

    start: int
    """Token id of the first local row; increases with the rank."""
    num_valid: int
    """Number of local rows that are real tokens; the rest are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel group; None if the vocabulary is not split."""

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x

    def sum_of_lower_ranks(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over the lower ranks, which hold smaller token ids. Collective."""
        if self.group is None or self.group.size() == 1:
            return torch.zeros_like(x)
        parts = x.new_zeros((self.group.size(), *x.shape))
        parts[self.group.rank()] = x
        return self.all_reduce(parts)[: self.group.rank()].sum(dim=0).to(x.dtype)

    def local(self, target_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the local row of each token (0 if another rank holds it) and whether it is local (bool), both [T]."""
        local = target_tokens - self.start
        held = (local >= 0) & (local < self.num_valid)
        return torch.where(held, local, torch.zeros_like(local)), held


# Logits of a whole packed row, for `--custom-loss-logits`. Every tensor-parallel rank holds the logits [T, V] and their
# gradient in memory at the same time, in the model's dtype.


@dataclass(frozen=True, slots=True)
class RowLogits:
    logits: Tensor
    """[T, V] in the model's dtype, before temperature. Includes the prompts and padding of the row."""
    log_probs: Tensor
    """[U] float32 log-probs of the target tokens, without temperature or gradient."""


def row_logits(
    hidden: Tensor,
    weight: Tensor,
    shard: VocabShard,
    vocab_size: int,
    positions: Tensor,
    target_tokens: Tensor,
    *,
    chunk_tokens: int,
) -> RowLogits:
    """Returns the logits of a packed row and the log-probs of `target_tokens` [U], predicted at `positions` [U].

    hidden [T, H] is the same on all tensor-parallel ranks; weight [V_local, H]. Collective over these ranks. All ranks
    compute the same loss from the result, so each rank gets the gradient for its own shard. The caller sums the
    gradient of `hidden`.
    """
    logits = F.linear(hidden, weight[: shard.num_valid])
    if shard.group is not None:
        padded = F.pad(logits, (0, weight.size(0) - shard.num_valid))
        logits = gather_from_tensor_model_parallel_region(padded)[:, :vocab_size]
    step = chunk_tokens if chunk_tokens > 0 else max(positions.numel(), 1)
    with torch.no_grad():
        parts = [
            F.cross_entropy(logits.index_select(0, at).float(), token, reduction="none").neg()
            for at, token in zip(positions.split(step), target_tokens.split(step), strict=True)
        ]
    return RowLogits(logits, torch.cat(parts))


# Finds the tokens that top-k and top-p keep, without sorting or gathering the vocabulary.
#
# The rule matches SGLang's samplers ("joint" order). Sort tokens by descending probability; token i is kept if
# i < top_k and tokens 0 to i - 1 have a total probability <= top_p. So the token that crosses top_p is still kept, and
# probabilities are not renormalized between top-k and top-p.
#
# The mass above a threshold shrinks as the threshold rises, so a binary search over the bit patterns of the logits'
# dtype finds the lowest kept logit of a row. It takes 16 rounds in half precision and 32 in float32, each with one
# reduction of [n] numbers over the tensor-parallel group. Half-precision logits often tie. Among ties at the lowest
# kept logit, the lowest ids are kept, as in a stable sort (the engine's sort leaves their order undefined).
#
# Invariants
# 1. Every rank of the group finds the same set, because only reduced numbers are compared.
# 2. The most probable token is always kept.

_INTEGERS = {
    torch.bfloat16: (torch.int16, 16),
    torch.float16: (torch.int16, 16),
    torch.float32: (torch.int32, 32),
    torch.float64: (torch.int64, 64),
}


@dataclass(frozen=True, slots=True)
class TopPSet:
    """The tokens kept in each of n rows, encoded as two numbers per row."""

    edge: Tensor
    """[n] in the logits' dtype: the lowest kept logit."""
    last_tie: Tensor
    """[n] int64: the last kept local column whose logit equals `edge`, or -1 if this rank has none."""

    def kept(self, raw: Tensor, rows: slice) -> Tensor:
        """Returns the bool mask [rows, V_local] of kept tokens. `raw` [rows, V_local] has the logits of these rows."""
        edge = self.edge[rows].unsqueeze(1)
        columns = torch.arange(raw.size(1), device=raw.device)
        return (raw > edge) | ((raw == edge) & (columns <= self.last_tie[rows].unsqueeze(1)))


def find_top_p_set(
    raw: Tensor, exp: Tensor, total: Tensor, shard: VocabShard, *, top_p: float, top_k: int, slices: Sequence[slice]
) -> TopPSet:
    """Returns the kept set of each row. Collective.

    raw [n, V_local]: logits. exp [n, V_local]: unnormalized probabilities. total [n]: the global sum of `exp`. Top-p
    is off if `top_p` >= 1, and top-k if `top_k` < 1. `slices` of rows bound the size of temporary tensors.
    """
    limit = total * top_p if top_p < 1.0 else torch.full_like(total, float("inf"))
    most = top_k if top_k > 0 else 1 << 30

    def above(value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mass and the number of tokens, over all ranks, whose logits exceed `value` [n]."""
        sums = total.new_zeros(2, raw.size(0))
        for rows in slices:
            mask = raw[rows] > value[rows].unsqueeze(1)
            sums[0, rows] = torch.where(mask, exp[rows], 0.0).sum(dim=1)
            if top_k > 0:
                sums[1, rows] = mask.sum(dim=1).to(sums.dtype)
        mass, count = shard.all_reduce(sums)
        return mass, count

    low, high = _bounds(raw, total.dtype, shard)
    for _ in range(_INTEGERS[raw.dtype][1]):
        middle = (low & high) + ((low ^ high) >> 1)  # the floor of the mean, without overflow
        mass, count = above(_value(middle, raw.dtype))
        enough = (mass <= limit) & (count < most)
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    edge = _value(high, raw.dtype)
    if raw.size(1):  # `edge` is a lower bound; replace it with the lowest kept logit
        floors = [torch.where(raw[r] >= edge[r].unsqueeze(1), raw[r], float("inf")).amin(dim=1) for r in slices]
        edge = torch.cat(floors)
    edge = shard.all_reduce(edge.to(total.dtype), dist.ReduceOp.MIN).to(raw.dtype)
    mass, count = above(edge)
    return TopPSet(edge, _last_ties(raw, exp, edge, (limit - mass, most - count), shard, slices))


def _last_ties(
    raw: Tensor, exp: Tensor, edge: Tensor, room: tuple[Tensor, Tensor], shard: VocabShard, slices: Sequence[slice]
) -> Tensor:
    """Returns `TopPSet.last_tie`. `room` is the mass [n] and the number [n] of ties that can still be kept."""
    ties, each = torch.zeros_like(room[0]), torch.zeros_like(room[0])
    for rows in slices if raw.size(1) else ():
        tie = raw[rows] == edge[rows].unsqueeze(1)
        ties[rows] = tie.sum(dim=1).to(ties.dtype)
        each[rows] = torch.where(tie, exp[rows], 0.0).amax(dim=1)
    shard.all_reduce(each, dist.ReduceOp.MAX)
    # The j-th tie (from 0) is kept if mass + j * each <= limit. If `each` underflowed to 0, all ties are kept.
    by_mass = torch.where(each > 0, torch.floor(room[0] / each) + 1, float("inf"))
    allowed = torch.minimum(by_mass, room[1]) - shard.sum_of_lower_ranks(ties)
    last = torch.full(edge.shape, -1, dtype=torch.int64, device=edge.device)
    columns = torch.arange(raw.size(1), device=raw.device)
    for rows in slices if raw.size(1) else ():
        tie = raw[rows] == edge[rows].unsqueeze(1)
        kept = tie & (tie.cumsum(dim=1, dtype=torch.int32) <= allowed[rows].unsqueeze(1))
        last[rows] = torch.where(kept, columns, -1).amax(dim=1)
    return last


def _bounds(raw: Tensor, wide: torch.dtype, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns the keys [n] of each row's lowest and highest logit, over all ranks."""
    if raw.size(1):
        ends = torch.stack([-raw.amin(dim=1), raw.amax(dim=1)]).to(wide)
    else:
        ends = torch.full((2, raw.size(0)), -float("inf"), dtype=wide, device=raw.device)
    low, high = shard.all_reduce(ends, dist.ReduceOp.MAX)
    return _key(-low, raw.dtype), _key(high, raw.dtype)


def _key(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns int64 keys that sort like the values: their bit patterns in `dtype`, flipped for negative values."""
    integer, bits = _INTEGERS[dtype]
    pattern = value.to(dtype).view(integer).to(torch.int64)
    return torch.where(pattern < 0, pattern ^ ((1 << (bits - 1)) - 1), pattern)


def _value(key: Tensor, dtype: torch.dtype) -> Tensor:
    integer, bits = _INTEGERS[dtype]
    pattern = torch.where(key < 0, key ^ ((1 << (bits - 1)) - 1), key)
    return pattern.to(integer).view(dtype)


# --- scores -----------------------------------------------------------------------------------------------------------

DEFAULT_CHUNK_TOKENS = 1024
"""Rows of logits in memory at a time: 1024 x 152k x 2 bytes = 0.3 GB in bf16."""
WORK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of a float32 work buffer by device type; two buffers exist at a time. On a CPU, a buffer should fit in a core's
cache. On a GPU, larger buffers mean fewer kernel launches; fused kernels need no buffer."""


class ScoreOptions(TypedDict, total=False):
    temperature: float
    with_entropy: bool
    entropy_grad: bool
    chunk_tokens: int
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of T target tokens in float32, or in float64 for float64 hidden states."""

    log_probs: Tensor
    """[T] nats, under the sampling distribution: temperature, then top-k and top-p."""
    entropy: Tensor | None
    """[T] nats, with temperature but without top-k and top-p; None if not requested."""
    full_log_probs: Tensor
    """[T] nats, with temperature but without top-k and top-p; no gradient."""
    outside: Tensor
    """[T] bool: whether the target was outside the kept set and had to be added."""
    draft_log_probs: Tensor | None = None
    """[T] nats, from multi-token prediction, which sees one less token of context; None if not requested."""

    def at(self, answers: Tensor | None) -> TokenScores:
        """Selects the scores at indices `answers` [R] int64, which may repeat. None selects all of them in order."""
        if answers is None:
            return self
        entropy = None if self.entropy is None else self.entropy.index_select(0, answers)
        ahead = None if self.draft_log_probs is None else self.draft_log_probs.index_select(0, answers)
        full, outside = (x.index_select(0, answers) for x in (self.full_log_probs, self.outside))
        return TokenScores(self.log_probs.index_select(0, answers), entropy, full, outside, ahead)


@dataclass(frozen=True, slots=True)
class _Settings:
    shard: VocabShard
    temperature: float
    with_entropy: bool
    entropy_grad: bool
    chunk_tokens: int
    top_p: float
    top_k: int
    into_main_grad: bool

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / self.temperature

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0


def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    target_tokens: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    top_p: float = 1.0,
    top_k: int = -1,
    into_main_grad: bool = False,
) -> TokenScores:
    """Scores `target_tokens` [T] int64 under softmax(hidden @ weight.T / temperature) with top-k and top-p.

    hidden [T, H]; weight [V_local, H]. `log_probs` is differentiable, and so is `entropy` with `entropy_grad`. With
    `chunk_tokens` 0, all rows form one chunk. With `into_main_grad`, the weight gradient is added directly to
    `main_grad`. Collective over `shard.group`.
    """
    rows = chunk_tokens if chunk_tokens > 0 else max(hidden.size(0), 1)
    entropy_grad = with_entropy and entropy_grad
    settings = _Settings(shard, temperature, with_entropy, entropy_grad, rows, float(top_p), int(top_k), into_main_grad)
    log_probs, entropy, full, outside = _TokenScores.apply(hidden, weight, target_tokens, settings)
    return TokenScores(log_probs, entropy if with_entropy else None, full, outside)


def token_log_probs(
    hidden: Tensor, weight: Tensor, target_tokens: Tensor, shard: VocabShard, **options: Unpack[ScoreOptions]
) -> tuple[Tensor, Tensor | None]:
    """Returns `log_probs` and `entropy` of `score_tokens`."""
    scores = score_tokens(hidden, weight, target_tokens, shard, **options)
    return scores.log_probs, scores.entropy


def token_values(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Applies a value head: hidden [R, H], weight [1, H], bias [1] -> float32 [R] (float64 for float64 hidden states).

    bf16 would be too coarse: it resolves values near 1 only to 1/256.
    """
    dtype = _wide(hidden)
    values = torch.mv(hidden.to(dtype), weight.squeeze(0).to(dtype))
    return values if bias is None else values + bias.to(dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_slices(raw: Tensor) -> list[slice]:
    """Splits the rows of a chunk into slices that need about `WORK_BYTES` in float32."""
    size = WORK_BYTES.get(raw.device.type, WORK_BYTES["cuda"])
    step = max(1, size // (4 * max(raw.size(1), 1)))
    return [slice(start, min(start + step, raw.size(0))) for start in range(0, raw.size(0), step)]


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
    if is_invariant():
        return invariant.linear(hidden, weight)
    return product(hidden, weight.t(), buffer[: hidden.size(0)])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _is_fused(x: Tensor) -> bool:
    """Returns whether elementwise operations on the logits are compiled into fused kernels, which is 2.5 times faster
    than one kernel per operation. `TORCHDYNAMO_DISABLE=1` disables this."""
    return x.is_cuda and has_triton()


def _sums(raw: Tensor, top: Tensor, inverse_temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Returns sum(exp(z)) and, with entropy, sum(exp(z) * z) [n], where z = (raw - top) / temperature; raw [n, V]."""
    z = torch.sub(raw, top.unsqueeze(1))  # promotes half precision
    if inverse_temperature != 1.0:
        z = z.mul_(inverse_temperature)
    if not with_entropy:
        total = z.exp_().sum(dim=1)
        return total, torch.zeros_like(total)
    exp = z.exp()
    return exp.sum(dim=1), z.mul_(exp).sum(dim=1)


@dataclass(frozen=True, slots=True)
class _RowFactors:
    """Coefficients of n rows' gradients: p * (slope + curve * log p + [kept] * kept_slope), plus own at the target."""

    slope: Tensor
    curve: Tensor | None
    """Coefficient of p * log p; None if the entropy has no gradient."""
    kept_slope: Tensor | None
    """Additional coefficient of p for kept tokens; None without top-p and top-k."""
    local: Tensor
    """int64: the local row of the target."""
    own: Tensor
    """Added at the target; 0 if another rank holds it."""

    def at(self, rows: slice) -> _RowFactors:
        curve = None if self.curve is None else self.curve[rows]
        kept_slope = None if self.kept_slope is None else self.kept_slope[rows]
        return _RowFactors(self.slope[rows], curve, kept_slope, self.local[rows], self.own[rows])


def _write_gradient(
    raw: Tensor, top: Tensor, log_total: Tensor, factors: _RowFactors, inverse_temperature: float, kept: Tensor | None
) -> None:
    """Overwrites the logits `raw` [n, V] with their gradient. top, log_total [n]; kept: bool [n, V]."""
    slope, at = factors.slope.unsqueeze(1), factors.local.unsqueeze(1)
    if factors.kept_slope is not None and kept is not None:
        kept.scatter_(1, at, kept.gather(1, at) | (factors.own != 0).unsqueeze(1))
        slope = torch.where(kept, factors.kept_slope.unsqueeze(1), 0.0).add_(slope)
    log_p = torch.sub(raw, top.unsqueeze(1))
    log_p = torch.add(-log_total.unsqueeze(1), log_p, alpha=inverse_temperature, out=log_p)
    if factors.curve is None:
        p, factor = log_p.exp_(), slope
    else:
        p = log_p.exp()
        factor = torch.addcmul(slope, log_p, factors.curve.unsqueeze(1), out=log_p)
    # Add before rounding to half precision; otherwise p - 1 would lose all precision for a near-certain token.
    picked = p.gather(1, at) * factor.expand_as(p).gather(1, at) + factors.own.unsqueeze(1)
    torch.mul(p, factor, out=raw)
    raw.scatter_(1, at, picked.to(raw.dtype))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Forward results for n rows, identical on every rank. Each tensor is [n], in float32 or float64."""

    top: Tensor
    """Largest logit, before temperature."""
    log_total: Tensor
    """log sum exp((logit - top) / temperature)."""
    target: Tensor
    """(logit of the target - top) / temperature."""
    entropy: Tensor
    log_kept: Tensor
    """`log_total` of the kept set."""
    outside: Tensor
    """bool: whether the target had to be added to the kept set."""
    top_p_set: TopPSet | None


def _forward_chunk(raw: Tensor, target_tokens: Tensor, settings: _Settings, wide: torch.dtype) -> _Chunk:
    """Computes the results for the local logits `raw` [n, V_valid] and target_tokens [n]."""
    shard, scale = settings.shard, settings.inverse_temperature
    slices, fused = _row_slices(raw), _is_fused(raw)
    sums_of = _compiled(_sums) if fused else _sums
    if raw.size(1):
        top = raw.amax(dim=1).to(wide)
    else:
        top = torch.full((raw.size(0),), -float("inf"), dtype=wide, device=raw.device)
    shard.all_reduce(top, dist.ReduceOp.MAX)
    local, held = shard.local(target_tokens)
    sums = top.new_zeros(3, raw.size(0))
    for rows in [slice(None)] if fused else slices:
        sums[0, rows], sums[1, rows] = sums_of(raw[rows], top[rows], scale, settings.with_entropy)
    picked = raw.gather(1, local.unsqueeze(1)).squeeze(1) if raw.size(1) else top
    sums[2] = torch.where(held, (picked.to(wide) - top) * scale, 0.0)
    total, weighted, target = shard.all_reduce(sums)
    log_total = total.log()
    entropy = log_total - weighted / total
    if is_invariant():
        target, log_total = _as_engines_do(raw, picked, settings)
    if not settings.truncated:
        return _Chunk(top, log_total, target, entropy, log_total, torch.zeros_like(held), None)
    exp = torch.empty(raw.shape, dtype=wide, device=raw.device)
    for rows in slices:
        torch.sub(raw[rows], top[rows].unsqueeze(1), out=exp[rows]).mul_(scale).exp_()
    top_p_set = find_top_p_set(raw, exp, total, shard, top_p=settings.top_p, top_k=settings.top_k, slices=slices)
    sums = torch.zeros_like(sums[:2])
    for rows in slices:
        kept = top_p_set.kept(raw[rows], rows)
        sums[0, rows] = torch.where(kept, exp[rows], 0.0).sum(dim=1)
        if raw.size(1):
            inside = kept.gather(1, local[rows].unsqueeze(1)).squeeze(1)
            sums[1, rows] = (held[rows] & ~inside).to(wide)
    mass, added = shard.all_reduce(sums)
    log_kept = (mass + added * target.exp()).log()
    return _Chunk(top, log_total, target, entropy, log_kept, added > 0, top_p_set)


def _as_engines_do(raw: Tensor, picked: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Returns `_Chunk.target` and `_Chunk.log_total` in the engines' arithmetic (`--true-on-policy`).

    raw [n, V] and picked [n], the logits of the targets. The vocabulary is not split.
    """
    temperature = torch.full((1,), settings.temperature, dtype=torch.float32, device=raw.device)
    top, log_total = invariant.log_totals(raw, temperature)
    return picked.float() / temperature - top, log_total


class _TokenScores(torch.autograd.Function):
    """Outputs log-probs, entropy and full log-probs [T] in float32 or float64, and `outside` [T] bool."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target_tokens: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.num_rows, ctx.parameter, weight = weight.size(0), weight, weight[: settings.shard.num_valid]
        wide, step = _wide(hidden), settings.chunk_tokens
        buffer = hidden.new_empty(min(step, hidden.size(0)), weight.size(0))
        chunks: list[_Chunk] = []
        for start in range(0, hidden.size(0), step):
            raw = _logits(hidden[start : start + step], weight, buffer)
            chunks.append(_forward_chunk(raw, target_tokens[start : start + step], settings, wide))

        def whole(name: str, dtype: torch.dtype = wide) -> Tensor:
            parts = [getattr(chunk, name) for chunk in chunks]
            return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=hidden.device)

        top, log_total, target, entropy = (whole(name) for name in ("top", "log_total", "target", "entropy"))
        log_kept, outside = whole("log_kept"), whole("outside", torch.bool)
        full = target - log_total
        log_probs = target - log_kept if settings.truncated else full.clone()
        ctx.save_for_backward(hidden, weight, target_tokens, top, log_total, entropy, log_kept)
        ctx.settings, ctx.top_p_sets = settings, [chunk.top_p_set for chunk in chunks]
        ctx.mark_non_differentiable(full, outside, *(() if settings.entropy_grad else (entropy,)))
        return log_probs, entropy, full, outside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors[:2]
        settings: _Settings = ctx.settings
        step, num_tokens = settings.chunk_tokens, hidden.size(0)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        factors = _row_factors(ctx, grads[0], grads[1])
        top, log_total = ctx.saved_tensors[3:5]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        main_grad = vars(ctx.parameter).get("main_grad") if wants_weight and settings.into_main_grad else None
        grad_weight: Tensor | None = None
        buffer = hidden.new_empty(min(step, num_tokens), weight.size(0))
        for index, start in enumerate(range(0, num_tokens, step)):
            part = slice(start, min(start + step, num_tokens))
            raw = _logits(hidden[part], weight, buffer)
            _chunk_gradient(raw, top[part], log_total[part], factors.at(part), settings, ctx.top_p_sets[index])
            if grad_hidden is not None:
                product(raw, weight, grad_hidden[part])
            if main_grad is not None:
                add_fused(main_grad[: weight.size(0)], raw, hidden[part])
            elif wants_weight and num_tokens <= step:
                grad_weight = product(raw.t(), hidden)
            elif wants_weight:
                if grad_weight is None:
                    grad_weight = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
                add = add_fused if raw.is_cuda or grad_weight.dtype == raw.dtype else add_reference
                add(grad_weight, raw, hidden[part])
        if main_grad is not None:
            grad_weight = placeholder(ctx.parameter)
        elif wants_weight:
            grad_weight = _with_padding(grad_weight, weight, ctx.num_rows)
        return grad_hidden, grad_weight, None, None


def _with_padding(grad: Tensor | None, weight: Tensor, num_rows: int) -> Tensor:
    if grad is not None and weight.size(0) == num_rows:
        return grad.to(weight.dtype)
    whole = weight.new_zeros(num_rows, weight.size(1))
    if grad is not None:
        whole[: weight.size(0)] = grad
    return whole


def _row_factors(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> _RowFactors:
    _, _, target_tokens, _, log_total, entropy, log_kept = ctx.saved_tensors
    settings: _Settings = ctx.settings
    scale = settings.inverse_temperature
    local, held = settings.shard.local(target_tokens)
    own = torch.where(held, grad_log_probs * scale, 0.0)
    curve = -grad_entropy * scale if settings.entropy_grad else None  # dH/dlogit = -p (log p + H) / temperature
    slope = torch.zeros_like(own) if curve is None else curve * entropy
    if not settings.truncated:
        return _RowFactors(slope - grad_log_probs * scale, curve, None, local, own)
    kept_slope = -grad_log_probs * scale * (log_total - log_kept).exp()  # p / (mass of the kept set)
    return _RowFactors(slope, curve, kept_slope, local, own)


def _chunk_gradient(
    raw: Tensor, top: Tensor, log_total: Tensor, factors: _RowFactors, settings: _Settings, top_p_set: TopPSet | None
) -> None:
    """Calls `_write_gradient` on a chunk, a few rows at a time."""
    if not raw.size(1):
        return
    fused = _is_fused(raw)
    write = _compiled(_write_gradient) if fused else _write_gradient
    for rows in [slice(None)] if fused else _row_slices(raw):
        kept = None if top_p_set is None else top_p_set.kept(raw[rows], rows)
        write(raw[rows], top[rows], log_total[rows], factors.at(rows), settings.inverse_temperature, kept)
