"""The harness that starts ranks: results by rank; a failure of one ends all and is told; the next function runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.marks import quick
from tests.support.ranks import RankError, Ranks, Seat


@pytest.fixture
def own() -> Iterator[Ranks]:
    """Ranks that may fail: the shared ones go on."""
    with Ranks() as ranks:
        yield ranks


def sum_of_ranks(seat: Seat) -> tuple[int, int, float]:
    """(pid, rank, the sum of all ranks)"""
    with seat.world():
        total = torch.tensor(float(seat.rank))
        dist.all_reduce(total)
    return os.getpid(), seat.rank, float(total)


def raises_on_rank_1(seat: Seat) -> None:
    with seat.world():
        if seat.rank == 1:
            raise ValueError("a mistake on rank 1")
        dist.barrier()


def dies_on_rank_1(seat: Seat) -> None:
    if seat.rank == 1:
        os._exit(3)
    time.sleep(300)


def hangs(seat: Seat) -> None:
    time.sleep(300)


@pytest.mark.slow
def test_processes_are_kept_for_the_next_function(own: Ranks) -> None:
    first, second = own.run(sum_of_ranks, 2), own.run(sum_of_ranks, 3)
    assert [told[1:] for told in first] == [(0, 1.0), (1, 1.0)]
    assert [told[1:] for told in second] == [(0, 3.0), (1, 3.0), (2, 3.0)]
    assert [told[0] for told in second[:2]] == [told[0] for told in first]


FAILURES = (
    (raises_on_rank_1, 60, "a mistake on rank 1"),
    (dies_on_rank_1, 60, "rank 1 died"),
    (hangs, 5, "no answer of"),
)


@pytest.mark.parametrize(("function", "limit_s", "message"), quick(FAILURES, FAILURES[0]))
def test_a_failure_ends_all_and_is_told(
    own: Ranks, function: Callable[[Seat], None], limit_s: float, message: str
) -> None:
    before = own.run(sum_of_ranks, 2)
    with pytest.raises(RankError, match=message):
        own.run(function, 2, limit_s=limit_s)
    after = own.run(sum_of_ranks, 2)
    assert not {told[0] for told in before} & {told[0] for told in after}, "a process outlived the failure"
