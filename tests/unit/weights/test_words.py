"""The word whose turn it is, over torch's own store: late words spoil nothing."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from slime.core.errors import DeadlineExceeded
from slime.weights.delivery import SenderMessages
from slime.weights.rendezvous import join_store, listen_on, open_store

LIMIT = timedelta(seconds=60)


@pytest.fixture
def stores() -> tuple[TCPStore, TCPStore]:
    """Clients of one store: who keeps it, and another rank."""
    listener = listen_on("127.0.0.1")
    address, port = listener.getsockname()[:2]
    kept = open_store(listener, world_size=2, timeout=LIMIT, wait=False)
    return kept, join_store(address, port, world_size=2, timeout=LIMIT)  # type: ignore[return-value]


def test_who_waits_in_vain_says_so_and_hears_the_next_weight_sync(stores: tuple[TCPStore, TCPStore]) -> None:
    """Law: a word that comes too late is not taken for one of the weight sync that follows."""
    impatient, other = SenderMessages(stores[1], limit_s=0.01), SenderMessages(stores[0], limit_s=60)
    for words in (impatient, other):
        words.begin()
    with pytest.raises(DeadlineExceeded, match="other training ranks to send 2 buckets before bucket 5"):
        impatient.hear(5, 2)
    other.tell(5, False)
    patient = SenderMessages(stores[1], limit_s=60)
    patient.begin()
    patient.begin()
    other.begin()
    other.tell(5, True)
    assert patient.hear(5, 2) is True


@pytest.mark.parametrize("good", [True, False])
def test_a_word_waits_for_who_comes_later_and_wakes_who_came_before(
    stores: tuple[TCPStore, TCPStore], good: bool
) -> None:
    here, there = (SenderMessages(store, limit_s=60) for store in stores)
    here.tell(1, good)  # nobody listens yet
    assert there.hear(1, 1) is good
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(there.hear(2, 1)))
    waiting.start()
    here.tell(2, good)
    waiting.join()
    assert heard == [good]
