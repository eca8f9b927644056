"""Stores listen where they are told, and nowhere else."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import rendezvous

from slime.compat.sglang_security import know_scheme, meeting_place
from slime.core.errors import EngineError
from slime.weights.rendezvous import join_store, listen_on, open_store
from tests.support.training import listening_addresses

LIMIT = timedelta(seconds=20)


def test_a_store_is_reached_at_its_address_only() -> None:
    before = listening_addresses(os.getpid())
    listener = listen_on("127.0.0.1")
    port = listener.getsockname()[1]
    store = open_store(listener, world_size=2, timeout=LIMIT, wait=False)
    assert listening_addresses(os.getpid()) - before <= {"127.0.0.1"}
    guest = join_store("127.0.0.1", port, world_size=2, timeout=LIMIT)
    guest.set("greeting", "hello")
    assert store.get("greeting") == b"hello"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "[::]"])
def test_ranks_of_an_engine_on_one_host_meet_on_loopback(host: str) -> None:
    """Law: wherever its server listens, an engine's store listens on loopback; torch's own takes every interface."""
    free = listen_on("127.0.0.1")
    port = free.getsockname()[1]
    free.close()
    before = listening_addresses(os.getpid())
    know_scheme()
    address = meeting_place(SimpleNamespace(host=host, nnodes=1, dp_size=1, nccl_port=port))
    store, rank, size = next(rendezvous(address, 0, 1, timeout=LIMIT))
    assert (rank, size) == (0, 1) and listening_addresses(os.getpid()) - before <= {"127.0.0.1"}
    join_store("127.0.0.1", port, world_size=1, timeout=LIMIT).set("greeting", "hello")
    assert store.get("greeting") == b"hello"


def test_ranks_on_several_hosts_meet_at_the_address_of_the_first() -> None:
    assert meeting_place(SimpleNamespace(nnodes=2, dist_init_addr="10.0.0.7:5")) == "slime://10.0.0.7:5"


def test_replicas_in_one_server_are_refused() -> None:
    """Law: the ranks of two replicas never meet in one store."""
    with pytest.raises(EngineError, match="one server per replica"):
        meeting_place(SimpleNamespace(nnodes=1, dp_size=2, enable_dp_attention=False, nccl_port=5))
