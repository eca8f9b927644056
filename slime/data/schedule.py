"""The schedule: which samples each data-parallel rank trains in which micro-batch of which optimizer step.

Pure and deterministic: every rank computes it from the same whole batch and reads its own row.

Invariants
1. Every sample position occurs exactly once in the whole schedule. Nothing is dropped or repeated.
2. A step holds `global_batch_size` executions; all samples of an execution (fan-out siblings) are in one step.
3. Within a step every rank has the same number of micro-batches, at least one. A micro-batch is empty (`()`) only
   when the step has fewer samples than slots; the trainer runs it as a dummy with zero mask.
4. A micro-batch holds at most `micro_batch_size` samples, or at most `max_tokens_per_gpu` tokens unless it is a single
   sample that is longer than that by itself.
5. Without `balance`, a rank sees its samples in batch order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from slime.core.errors import ConfigError, DataError

MicroBatch = tuple[int, ...]
"""Positions in the batch of the samples that are packed into one forward pass."""


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """One optimizer step."""

    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """[dp_rank][micro_batch] -> sample positions; the same number of micro-batches on each rank, some perhaps empty."""
    num_executions: int
    """Distinct executions of the step over all ranks: the denominator of the default loss aggregation."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.micro_batches[0])

    @property
    def positions(self) -> tuple[int, ...]:
        """All sample positions of the step, ascending."""
        return tuple(sorted(p for rank in self.micro_batches for mb in rank for p in mb))


@dataclass(frozen=True, slots=True)
class Schedule:
    """All optimizer steps of one rollout, in order."""

    steps: tuple[StepSchedule, ...]


def build_schedule(
    num_tokens_S: Sequence[int],
    execution_S: Sequence[int],
    *,
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    max_tokens_per_gpu: int | None = None,
    balance: bool = False,
) -> Schedule:
    """Cuts a batch of S samples into optimizer steps, ranks and micro-batches.

    `num_tokens_S`: length in tokens of each sample. `execution_S`: execution id of each sample; equal ids are siblings.
    `global_batch_size` counts executions. Exactly one way to fill micro-batches: `micro_batch_size` samples (default 1)
    or `max_tokens_per_gpu` tokens (dynamic; the caller multiplies by the context-parallel size). `balance` evens out
    the tokens per rank (Karmarkar-Karp with equal counts; Michiels et al. 2003, "balanced largest differencing").

    A batch with fewer executions than `global_batch_size` is one step. Raises `ConfigError` if the executions do not
    divide into whole steps (samples would have to be dropped) or a size is impossible, `DataError` on malformed input.
    """
    _check(num_tokens_S, execution_S, dp_size, global_batch_size, micro_batch_size, max_tokens_per_gpu)
    lengths = [int(n) for n in num_tokens_S]
    members: dict[int, list[int]] = {}
    for position, execution in enumerate(execution_S):
        members.setdefault(int(execution), []).append(position)
    executions = list(members)
    if len(executions) > global_batch_size and len(executions) % global_batch_size:
        raise ConfigError(
            f"got {len(executions)} executions in one rollout and --global-batch-size {global_batch_size}, because "
            f"{len(executions) % global_batch_size} would be left over after whole steps and no sample is dropped; "
            "do: choose rollout_batch_size * n_samples_per_prompt divisible by global_batch_size"
        )
    steps = []
    for start in range(0, len(executions), global_batch_size):
        chosen = executions[start : start + global_batch_size]
        positions = sorted(p for execution in chosen for p in members[execution])
        if max_tokens_per_gpu is not None:
            bins = _first_fit(positions, lengths, max_tokens_per_gpu)
        else:
            size = micro_batch_size or 1
            bins = [positions[i : i + size] for i in range(0, len(positions), size)]
        bins = _to_multiple(bins, lengths, dp_size)
        steps.append(StepSchedule(_assign(bins, lengths, dp_size, balance), num_executions=len(chosen)))
    return Schedule(tuple(steps))


def _check(
    num_tokens_S: Sequence[int],
    execution_S: Sequence[int],
    dp_size: int,
    global_batch_size: int,
    micro_batch_size: int | None,
    max_tokens_per_gpu: int | None,
) -> None:
    if len(num_tokens_S) != len(execution_S):
        raise DataError(f"got {len(num_tokens_S)} lengths and {len(execution_S)} execution ids; one of each per sample")
    if len(num_tokens_S) == 0:
        raise DataError("got a batch without samples; there is nothing to train, look at what the rollout filtered")
    if min(num_tokens_S) < 1:
        raise DataError(f"got a sample of {min(num_tokens_S)} tokens; each needs at least one")
    if micro_batch_size is not None and max_tokens_per_gpu is not None:
        raise ConfigError("got micro_batch_size and max_tokens_per_gpu, because only one can fill it; give one")
    sizes = {
        "dp_size": dp_size,
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "max_tokens_per_gpu": max_tokens_per_gpu,
    }
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"got {name}={value}; it must be at least 1")


def _first_fit(positions: Sequence[int], lengths: Sequence[int], cap_tokens: int) -> list[list[int]]:
    """Puts each sample, in order, into the first bin with room; one longer than the cap gets a bin of its own."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for position in positions:
        for i, load in enumerate(loads):
            if load + lengths[position] <= cap_tokens:
                bins[i].append(position)
                loads[i] += lengths[position]
                break
        else:
            bins.append([position])
            loads.append(lengths[position])
    return bins


def _to_multiple(bins: list[list[int]], lengths: Sequence[int], dp_size: int) -> list[list[int]]:
    """Splits the heaviest divisible bins until the ranks can share them evenly; empty bins only when none divides."""
    bins = [list(b) for b in bins]
    while len(bins) % dp_size:
        divisible = [i for i, b in enumerate(bins) if len(b) > 1]
        if not divisible:
            bins.append([])
            continue
        heaviest = max(divisible, key=lambda i: (sum(lengths[p] for p in bins[i]), -i))
        cut = _even_cut([lengths[p] for p in bins[heaviest]])
        bins[heaviest : heaviest + 1] = [bins[heaviest][:cut], bins[heaviest][cut:]]
    return bins


def _even_cut(lengths: Sequence[int]) -> int:
    """Where to cut a list of at least two lengths so that the heavier side is as light as possible."""
    total, left, best, best_cost = sum(lengths), 0, 1, sum(lengths)
    for cut, length in enumerate(lengths[:-1], start=1):
        left += length
        cost = max(left, total - left)
        if cost < best_cost:
            best, best_cost = cut, cost
    return best


def _assign(
    bins: list[list[int]], lengths: Sequence[int], dp_size: int, balance: bool
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Deals the bins (a multiple of `dp_size`) to the ranks, the same number to each."""
    if not balance:
        return tuple(tuple(tuple(b) for b in bins[rank::dp_size]) for rank in range(dp_size))
    weights = [sum(lengths[p] for p in b) for b in bins]
    shares = _balanced_differencing(weights, dp_size)
    # Heaviest first on every rank: what runs side by side (expert parallelism waits for the slowest) is of like size.
    ordered = [sorted(share, key=lambda i: (-weights[i], i)) for share in shares]
    return tuple(tuple(tuple(bins[i]) for i in share) for share in ordered)


def _balanced_differencing(weights: Sequence[int], num_shares: int) -> list[list[int]]:
    """Splits items into `num_shares` lists of equal count and nearly equal weight; returns item indices.

    Start from tuples of `num_shares` items of neighbouring weight; merge the two tuples of largest spread, heavy side
    onto light side, until one tuple is left.
    """
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
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
