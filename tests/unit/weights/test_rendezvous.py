"""Stores listen where they are told, and nowhere else."""

from __future__ import annotations

import os
from datetime import timedelta

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
