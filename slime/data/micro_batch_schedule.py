"""The schedule: assigns every sample to an optimizer step, a data-parallel rank and a micro-batch.

Pure and deterministic: every rank computes the same schedule from the complete batch.

Invariants
1. Every sample position occurs exactly once in the schedule. Nothing is dropped, repeated or padded.
2. A step has `global_batch_size` executions; with `num_steps`, step sizes differ by at most one execution. All samples
   of an execution (fan-out siblings) are in the same step.
3. Within a step, all ranks have the same number of micro-batches, a multiple of `micro_batch_multiple`. A micro-batch
   is empty (`()`) only if the step has fewer samples than slots; the trainer runs it as a dummy with a zero mask.
4. A micro-batch has at most `micro_batch_size` samples, or at most `max_tokens_per_gpu` tokens unless a single sample
   is longer. Cost balancing respects the token limit, because memory depends on tokens.
5. Without `balance` and shared prefixes, each rank sees its samples in batch order.
6. With `balance`, each rank runs its most expensive micro-batches first, and micro-batches that run concurrently have
   similar costs: none costs less than one that any rank runs later.

Samples that share a prefix (`slime.data.shared_prefixes`) form a bundle, which counts shared tokens once and goes into
one micro-batch. A bundle is split only to reach the required number of micro-batches or, with `micro_batch_size`, when
a micro-batch is full. A group whose tree exceeds a micro-batch is divided along its branches.

Beyond bundles, groups are not kept together: a step boundary can separate the executions of a prompt. Advantages are
computed from the whole batch, so only a step's loss denominators depend on the boundary, and steps of equal size
matter more. Groups of equal size are never split if the number of steps divides the number of groups.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slime.core.errors import ConfigError, DataError
from slime.data.shared_prefixes import MOST_COPIED, Prefixes

MicroBatch = tuple[int, ...]
"""Batch positions of the samples in one forward pass."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """[dp_rank][micro_batch] -> sample positions. All ranks have equally many micro-batches; some may be empty."""
    num_executions: int
    """Executions of the step across all ranks: the denominator of the default loss aggregation."""

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches on each rank."""
        return len(self.micro_batches[0])

    @property
    def positions(self) -> tuple[int, ...]:
        """All sample positions, in ascending order."""
        return tuple(sorted(p for rank in self.micro_batches for mb in rank for p in mb))


@dataclass(frozen=True, slots=True)
class Schedule:
    """All optimizer steps of one rollout, in order."""

    steps: tuple[StepSchedule, ...]

    def of_rank(self, dp_rank: int) -> tuple[int, ...]:
        """Returns the sample positions of a data-parallel rank."""
        return tuple(p for step in self.steps for row in step.micro_batches[dp_rank] for p in row)


def build_schedule(
    num_tokens_S: Sequence[int],
    execution_S: Sequence[int],
    *,
    dp_size: int,
    global_batch_size: int | None = None,
    num_steps: int | None = None,
    micro_batch_size: int | None = None,
    max_tokens_per_gpu: int | None = None,
    cp_size: int = 1,
    splits_heads: bool = False,
    micro_batch_multiple: int = 1,
    balance: bool = False,
    cost_S: Sequence[float] | None = None,
    prefixes: Prefixes | None = None,
    prefix_cost: Callable[[int], float] = float,
) -> Schedule:
    """Splits a batch of S samples into optimizer steps, ranks and micro-batches.

    `num_tokens_S`: length of each sample in tokens. `execution_S`: execution id of each sample, shared by siblings.

    A step has `global_batch_size` executions, or the batch is split into `num_steps` steps of nearly equal size (fewer
    if there are fewer executions). A micro-batch has up to `micro_batch_size` samples (default 1), or up to
    `max_tokens_per_gpu` tokens on each of `cp_size` context-parallel ranks. With an interleaved pipeline,
    `micro_batch_multiple` is the number of stages.

    `balance` evens out the micro-batches (longest processing time first; Graham 1969) and the ranks (Karmarkar-Karp
    with equal counts; Michiels et al. 2003, "balanced largest differencing"). The cost of each sample is `cost_S`, in
    any unit, such as from `FlopsModel.forward`; the default is its number of tokens.

    `prefixes`: the shared prefixes, if sharing is on. `prefix_cost`: the cost of n shared tokens, in units of `cost_S`.
    `splits_heads`: context-parallel ranks split heads, so each copies only a part of every shared key.

    A batch with fewer executions than `global_batch_size` is one step. Raises `ConfigError` if a size is invalid or the
    executions do not divide into whole steps (samples would be dropped), `DataError` on malformed input.
    """
    sizes = {
        "dp_size": dp_size,
        "global_batch_size": global_batch_size,
        "num_steps": num_steps,
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_gpu": max_tokens_per_gpu,
        "cp_size": cp_size,
        "micro_batch_multiple": micro_batch_multiple,
    }
    costs = [float(c) for c in (num_tokens_S if cost_S is None else cost_S)]
    _check(num_tokens_S, execution_S, costs, sizes)
    cap = micro_batch_size or 1 if max_tokens_per_gpu is None else max_tokens_per_gpu * cp_size
    tokens = None if max_tokens_per_gpu is None else [int(n) for n in num_tokens_S]
    bundling = _Bundling(cap, 1 if splits_heads else cp_size, tokens, costs, prefixes, prefix_cost)
    members = _members(execution_S)
    steps = []
    for chosen in _split_into_steps(list(members), global_batch_size, num_steps):
        positions = sorted(p for execution in chosen for p in members[execution])
        bins = _to_multiple(_bins_of(positions, bundling), bundling, dp_size * micro_batch_multiple)
        if balance:
            bins = _evened(bins, cap)
        steps.append(StepSchedule(_assign(bins, dp_size, balance), num_executions=len(chosen)))
    return Schedule(tuple(steps))


def _members(execution_S: Sequence[int]) -> dict[int, list[int]]:
    """Returns the positions of each execution's samples, in the order in which the executions first occur."""
    members: dict[int, list[int]] = {}
    for position, execution in enumerate(execution_S):
        members.setdefault(int(execution), []).append(position)
    return members


def _check(
    num_tokens_S: Sequence[int], execution_S: Sequence[int], costs: Sequence[float], sizes: dict[str, int | None]
) -> None:
    if not len(num_tokens_S) == len(execution_S) == len(costs):
        raise DataError(
            f"got {len(num_tokens_S)} lengths, {len(execution_S)} execution ids and {len(costs)} costs; pass one of "
            "each per sample"
        )
    if len(num_tokens_S) == 0:
        raise DataError("the batch has no samples to train on; check what the rollout filtered")
    if min(num_tokens_S) < 1:
        raise DataError(f"a sample has {min(num_tokens_S)} tokens; each needs at least one")
    if not all(0 < c < math.inf for c in costs):
        raise DataError("the cost of a sample is not positive and finite; correct cost_S")
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if sizes["micro_batch_size"] is not None and sizes["max_tokens_per_gpu"] is not None:
        raise ConfigError("micro_batch_size and max_tokens_per_gpu both set the size of a micro-batch; set only one")
    if (sizes["global_batch_size"] is None) == (sizes["num_steps"] is None):
        raise ConfigError("set exactly one of global_batch_size and num_steps, which determine the size of a step")


def _split_into_steps(executions: list[int], global_batch_size: int | None, num_steps: int | None) -> list[list[int]]:
    """Returns the executions of each step, in order."""
    total = len(executions)
    if num_steps is not None:
        num_steps = min(num_steps, total)
        bounds = [total * i // num_steps for i in range(num_steps + 1)]
        return [executions[a:b] for a, b in itertools.pairwise(bounds)]
    assert global_batch_size is not None, "_check requires a size"
    if total > global_batch_size and total % global_batch_size:
        raise ConfigError(
            f"the {total} executions of a rollout do not divide into steps of --global-batch-size {global_batch_size}: "
            f"{total % global_batch_size} would be left over, but no samples are dropped; make rollout_batch_size * "
            "n_samples_per_prompt a multiple of global_batch_size, or set --use-dynamic-global-batch-size to split any "
            "number evenly"
        )
    return [executions[i : i + global_batch_size] for i in range(0, total, global_batch_size)]


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A single sample, or several with a common prefix that stay in one micro-batch."""

    positions: tuple[int, ...] = ()
    tokens: int = 0
    """Total number of tokens, counting shared tokens once."""
    copied: int = 0
    """Total number of keys of shared prefixes that a rank copies."""
    cost: float = 0.0
    room: int = 0
    """Share of a micro-batch that the bundle takes up, in units of `cap`."""


@dataclass(frozen=True, slots=True)
class _Bundling:
    """Builds bundles that fit into a micro-batch of `cap` tokens, or `cap` samples if `tokens_S` is None."""

    cap: int
    num_gathering: int
    """Number of context-parallel ranks that gather keys; 1 if each has whole sequences."""
    tokens_S: Sequence[int] | None
    costs_S: Sequence[float]
    prefixes: Prefixes | None
    prefix_cost: Callable[[int], float]

    def of(self, positions: Sequence[int]) -> list[_Bundle]:
        """Adds each sample to the bundle of its group with the longest common prefix, among those with room.

        Samples are added in the order of their tree, so a full bundle ends between two branches, as near to the leaves
        as possible. Returns the bundles in the order of their first samples in `positions`.
        """
        if self.prefixes is None:
            return [self._joined(_Bundle(), position, 0) for position in positions]
        bundles: list[_Bundle] = []
        of_group: dict[int, list[int]] = {}
        for position in self.prefixes.in_tree_order(positions):
            peers = of_group.setdefault(self.prefixes.group_S[position], [])
            options = [(self._shared(position, bundles[i]), i) for i in peers]
            fitting = [(n, i) for n, i in options if n and self._joined(bundles[i], position, n).room <= self.cap]
            shared, chosen = max(fitting, key=lambda option: option[0], default=(0, len(bundles)))
            if chosen == len(bundles):
                peers.append(chosen)
                bundles.append(_Bundle())
            bundles[chosen] = self._joined(bundles[chosen], position, shared)
        return sorted(bundles, key=lambda bundle: min(bundle.positions))

    def halves(self, bundle: _Bundle) -> list[_Bundle]:
        at = _even_split([self.costs_S[p] for p in bundle.positions])
        return [self.one(bundle.positions[:at]), self.one(bundle.positions[at:])]

    def one(self, positions: Sequence[int]) -> _Bundle:
        bundle = _Bundle()
        for position in positions:
            bundle = self._joined(bundle, position, self._shared(position, bundle))
        return bundle

    def _shared(self, position: int, bundle: _Bundle) -> int:
        return 0 if self.prefixes is None else self.prefixes.longest(position, bundle.positions).num_tokens

    def _joined(self, bundle: _Bundle, position: int, shared: int) -> _Bundle:
        """Adds a sample that shares its first `shared` tokens with the bundle."""
        positions = (*bundle.positions, position)
        cost = bundle.cost + self.costs_S[position] - (self.prefix_cost(shared) if shared else 0.0)
        if self.tokens_S is None:
            return _Bundle(positions, cost=cost, room=len(positions))
        # A rank that gathers keys has two chunks of each sample, and each reads the whole prefix.
        chunks = 1 if self.num_gathering == 1 else 2
        tokens, copied = bundle.tokens + self.tokens_S[position] - shared, bundle.copied + chunks * shared
        # `MOST_COPIED` limits the copies on one rank, `cap` the tokens of all ranks. The tighter limit applies.
        most = math.ceil(copied * self.num_gathering / MOST_COPIED)
        room = max(tokens, most) if len(positions) > 1 else min(tokens, self.cap)
        return _Bundle(positions, tokens, copied, cost, room)


_Bin = list[_Bundle]
"""A micro-batch under construction."""


def _first_fit(bundles: Sequence[_Bundle], cap: int) -> list[_Bin]:
    """Places each bundle, in order, into the first bin with room."""
    bins: list[_Bin] = []
    loads: list[int] = []
    smallest = min(b.room for b in bundles)
    open_bins: list[int] = []  # skipping full bins makes this linear for samples of equal size
    for bundle in bundles:
        chosen = next((i for i in open_bins if loads[i] + bundle.room <= cap), len(bins))
        if chosen == len(bins):
            bins.append([])
            loads.append(0)
            open_bins.append(chosen)
        bins[chosen].append(bundle)
        loads[chosen] += bundle.room
        if loads[chosen] + smallest > cap:
            open_bins.remove(chosen)
    return bins


def _bins_of(positions: Sequence[int], bundling: _Bundling) -> list[_Bin]:
    bundles = bundling.of(positions)
    return _filled(bundles, bundling) if bundling.tokens_S is None else _first_fit(bundles, bundling.cap)


def _filled(bundles: Sequence[_Bundle], bundling: _Bundling) -> list[_Bin]:
    """Fills each bin with `cap` samples, in order. A bundle that does not fit continues in the next bin."""
    bins: list[_Bin] = []
    room = 0
    for bundle in bundles:
        rest = bundle.positions
        while rest:
            if not room:
                bins.append([])
                room = bundling.cap
            part, rest = rest[:room], rest[room:]
            bins[-1].append(bundle if part == bundle.positions else bundling.one(part))
            room -= len(part)
    return bins


def _to_multiple(bins: list[_Bin], bundling: _Bundling, multiple: int) -> list[_Bin]:
    """Splits the most expensive bins until their number is a multiple of `multiple`: first bins with several bundles,
    then single bundles. Adds empty bins only if nothing can be split.
    """
    bins = [list(b) for b in bins]
    while len(bins) % multiple:
        divisible = [i for i, b in enumerate(bins) if len(b) > 1]
        whole = [i for i, b in enumerate(bins) if len(b) == 1 and len(b[0].positions) > 1]
        if not divisible and not whole:
            bins.append([])
            continue
        dearest = max(divisible or whole, key=lambda i: (sum(b.cost for b in bins[i]), -i))
        parts = bins[dearest] if divisible else bundling.halves(bins[dearest][0])
        at = _even_split([b.cost for b in parts])
        bins[dearest : dearest + 1] = [parts[:at], parts[at:]]
    return bins


def _evened(bins: list[_Bin], cap: int) -> list[_Bin]:
    """Redistributes the bundles, most expensive first, each into the cheapest bin with room.

    Returns `bins` unchanged if a bundle does not fit or if the most expensive bin would get more expensive.
    """
    out: list[_Bin] = [[] for _ in bins]
    loads = [0] * len(bins)
    heap = [(0.0, i) for i in range(len(bins))]
    bundles = sorted((one for b in bins for one in b), key=lambda b: (-b.cost, b.positions))
    smallest = min(b.room for b in bundles)
    for bundle in bundles:
        aside = []
        while heap and loads[heap[0][1]] + bundle.room > cap:
            aside.append(heapq.heappop(heap))
        if not heap:
            return bins
        cost, chosen = heapq.heappop(heap)
        out[chosen].append(bundle)
        loads[chosen] += bundle.room
        if loads[chosen] + smallest <= cap:
            aside.append((cost + bundle.cost, chosen))
        for item in aside:
            heapq.heappush(heap, item)
    if max(_costs_of(out)) > max(_costs_of(bins)):
        return bins
    return out


def _costs_of(bins: Sequence[_Bin]) -> list[float]:
    return [math.fsum(one.cost for one in b) for b in bins]


def _even_split(costs: Sequence[float]) -> int:
    """Returns the index at which to split two or more costs to minimize the cost of the more expensive side."""
    total, left, best, best_cost = sum(costs), 0.0, 1, sum(costs)
    for at, one in enumerate(costs[:-1], start=1):
        left += one
        cost = max(left, total - left)
        if cost < best_cost:
            best, best_cost = at, cost
    return best


def _assign(bins: list[_Bin], dp_size: int, balance: bool) -> tuple[tuple[MicroBatch, ...], ...]:
    """Assigns the same number of bins to each rank. The number of bins is a multiple of `dp_size`."""
    micro_batches = [tuple(sorted(p for one in b for p in one.positions)) for b in bins]
    if not balance:
        return tuple(tuple(micro_batches[rank::dp_size]) for rank in range(dp_size))
    weights = _costs_of(bins)
    shares = _balanced_differencing(weights, dp_size)
    # Most expensive first on every rank, because expert parallelism waits for the slowest rank in each micro-batch.
    ordered = [sorted(share, key=lambda i: (-weights[i], i)) for share in shares]
    return tuple(tuple(micro_batches[i] for i in share) for share in ordered)


def _balanced_differencing(weights: Sequence[float], num_shares: int) -> list[list[int]]:
    """Partitions item indices into `num_shares` lists of equal length and nearly equal weight.

    Sorts the items by weight, groups them into tuples of `num_shares`, and repeatedly merges the two tuples with the
    largest spread, heaviest share with lightest, until one tuple is left.
    """
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for tie, start in enumerate(range(0, len(order), num_shares)):
        shares = [(weights[i], [i]) for i in order[start : start + num_shares]]
        heap.append((shares[-1][0] - shares[0][0], tie, shares))
    heapq.heapify(heap)
    tie = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    return [items for _, items in heap[0][2]]
