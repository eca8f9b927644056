"""Law: the routed experts of a batch come to the hosts whose ranks compute its samples, and are what they were."""

from __future__ import annotations

import pytest

from tests.support.ray_program import output_of

PROGRAM = """
import dataclasses
import numpy as np
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster
from slime.cluster.rollout_actor import set_apart
from slime.core.batch import TrainBatch
from slime.core.routed_experts import digests_of
from tests.support.training import random_batch

ROWS = 100_000  # of 96 bytes: 9.6 MB a sample

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"here": 1}})
there = cluster.add_node(num_cpus=1, resources={"there": 1})
ray.init(address=cluster.address, log_to_driver=False)


def record(position):
    return np.random.default_rng(position).integers(0, 64, (ROWS, 48, 2)).astype(np.uint8)


@ray.remote(resources={"here": 1})
class Rollout:
    def batch(self):
        samples = [dataclasses.replace(s, routed_experts=record(i)) for i, s in enumerate(random_batch().samples)]
        return set_apart(TrainBatch(1, tuple(samples[:4])), compared=True)


@ray.remote(resources={"there": 1})
class Rank:
    def train(self, batch, own):
        sizes = [s.routed_experts.nbytes for s in batch.samples]
        assert sizes == [ROWS * 96] * 4, sizes
        assert all((s.routed_experts.digests == digests_of(record(i))).all() for i, s in enumerate(batch.samples))
        for position in own:
            ids = np.asarray(batch.samples[position].routed_experts)
            assert (ids == record(position)).all() and not ids.flags.writeable
        return len(own)


def held_there():
    return node_stats(there.node_ip_address, there.node_manager_port).store_stats.object_store_bytes_used


rollout, rank = Rollout.remote(), Rank.remote()
batch = rollout.batch.remote()
assert ray.get(rank.train.remote(batch, [2])) == 1
print("fetched", held_there() // (ROWS * 96))
assert ray.get(rank.train.remote(batch, [0, 1, 2, 3])) == 4
print("all", held_there() // (ROWS * 96))
ray.shutdown()  # before the cluster goes, or the batch that is held here would be missed
"""


@pytest.mark.slow
def test_a_host_fetches_what_its_ranks_compute() -> None:
    printed = output_of(PROGRAM)
    assert "fetched 1\nall 4" in printed, printed
