"""What engines recorded reaches the tokens that it was recorded for, in any packing; what is missing is counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.core.batch import TrainBatch
from slime.core.errors import DataError
from slime.data.packing import pack
from slime.data.shared_prefixes import Prefixes
from slime.training.step.routing import BatchRouting
from tests.support.tiny import write_tiny_model
from tests.support.training import forked_batch, random_batch, training_args, with_routed_experts, with_samples

LAYERS, EXPERTS, TOPK = 2, 4, 2
CPU = torch.device("cpu")
CONFIG = SimpleNamespace(num_layers=LAYERS, moe_router_topk=TOPK)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def recorded_batch(**how: Any) -> TrainBatch:
    return with_routed_experts(random_batch(), LAYERS, EXPERTS, TOPK, **how)


def routing_of(checkpoint: Path, batch: TrainBatch, **settings: Any) -> BatchRouting | None:
    return BatchRouting.of(training_args(checkpoint, **settings), batch, CONFIG, CPU)


@pytest.mark.parametrize("pad_each_to", [1, 4])
@pytest.mark.parametrize("positions", [[0], [5, 2, 7], list(range(8)), []], ids=str)
def test_a_row_has_the_experts_of_its_tokens(positions: list[int], pad_each_to: int, checkpoint: Path) -> None:
    batch = recorded_batch()
    routing = routing_of(checkpoint, batch, use_rollout_routing_replay=True)
    assert routing is not None
    row = pack([batch.samples[p] for p in positions], pad_to_multiple=8, pad_each_to=pad_each_to)
    made = routing.row(positions, row, None, CPU)
    assert (len(made.recorded) == LAYERS) == bool(positions)
    for layer, ids in made.recorded.items():
        assert ids.shape == (len(row.tokens), TOPK)
        rest = torch.ones(len(row.tokens), dtype=torch.bool)
        for start, position in zip(row.cu_seqlens.tolist(), positions, strict=False):
            own = batch.samples[position].routed_experts
            assert own is not None
            assert np.array_equal(ids[start : start + len(own)].numpy(), own[:, layer])
            rest[start : start + len(own)] = False
        assert (ids[rest] == 255).all(), "last tokens and padding have no record"


def test_shared_tokens_have_the_experts_of_all_that_share_them(checkpoint: Path) -> None:
    """Law: with a record, samples share tokens as far as it is the same, and each finds its own record in the row."""
    batch = forked_batch()

    def record(tokens: np.ndarray) -> np.ndarray:
        """By token and place, so that equal beginnings have equal records; one turn was recorded in two ways."""
        other = int(tokens[-1]) % 2 * (np.arange(len(tokens) - 1) > 30)
        first = (tokens[:-1] + np.arange(len(tokens) - 1) + other) % EXPERTS
        pairs = np.stack([first, (first + 1) % EXPERTS], axis=-1)[:, None, :]
        return np.repeat(pairs, LAYERS, axis=1).astype(np.uint8)

    batch = with_samples(batch, [dataclasses.replace(s, routed_experts=record(s.tokens)) for s in batch.samples])
    routing = routing_of(checkpoint, batch, use_rollout_routing_replay=True)
    assert routing is not None
    positions = list(range(len(batch.samples)))
    row = pack(batch.samples, shared=Prefixes.of(batch.samples, replays=True).of_row(positions), pad_to_multiple=8)
    free = Prefixes.of(batch.samples, replays=False).of_row(positions)
    assert 0 < sum(row.num_shared) < sum(one.num_tokens for one in free), "some records differ where ids are equal"
    for layer, ids in routing.row(positions, row, None, CPU).recorded.items():
        for sample, rows in zip(batch.samples, row.token_rows, strict=True):
            own = sample.routed_experts
            assert own is not None and np.array_equal(ids[rows[: len(own)]].numpy(), own[:, layer])


def test_only_passes_of_the_policy_read_a_record(checkpoint: Path) -> None:
    """Which pass does what, by the settings."""
    batch = recorded_batch()
    bare = with_samples(batch, [dataclasses.replace(s, routed_experts=None) for s in batch.samples])
    assert routing_of(checkpoint, bare) is None
    compared = routing_of(checkpoint, batch)
    assert compared is not None and not compared.replays and compared.afterwards() is None
    engines = routing_of(checkpoint, batch, use_rollout_routing_replay=True)
    assert engines is not None and engines.replays
    later = engines.afterwards()
    assert later is not None and later.samples == batch.samples and later.counts is None
    old = routing_of(checkpoint, bare, use_routing_replay=True)
    assert old is not None and old.keeps and old.metrics(bare, [0]) == {}
    row = pack([bare.samples[1]])
    kept = old.row([1], row, None, CPU)
    kept_choice = torch.zeros(len(row.tokens), TOPK, dtype=torch.uint8)
    assert kept.keeps is not None
    kept.keeps[0] = kept_choice
    trained = old.afterwards()
    assert trained is not None and trained.row([1], row, None, CPU).recorded[0] is kept_choice
    assert trained.row([], pack([]), None, CPU).recorded == {}, "a dummy has nothing to replay"


def test_a_batch_without_a_record_cannot_be_replayed(checkpoint: Path) -> None:
    with pytest.raises(DataError, match="no routed experts"):
        routing_of(checkpoint, random_batch(), use_rollout_routing_replay=True)


def test_a_record_of_another_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(DataError, match="a different model"):
        routing_of(checkpoint, with_routed_experts(random_batch(), LAYERS + 1, EXPERTS, TOPK))
