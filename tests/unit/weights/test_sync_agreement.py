"""What training ranks agree on when a weight sync fails: one error, the same on all, of what went wrong first."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import CheckpointError, DeadlineExceeded, EngineError
from slime.serving.payloads import digest
from slime.weights.delta.channel import DeltaChannel
from slime.weights.receivers import Peers, Receiver
from slime.weights.send_plan import Turn
from slime.weights.sync import sync_weights
from slime.weights.transports.tensor import TensorTransport
from tests.support.weights import FakeEngine, FakeWire, Ranks, TamperingChannel, Whole, model, transport_context


class Broken(Whole):
    """One tensor of a turn of rank 1 cannot be made, which is said when all of the turn were given."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.walked: list[str] = []

    def tensors(self, turn: Turn) -> Any:
        for item in super().tensors(turn):
            self.walked.append(item[0])
            yield item
        if turn.sender == self._rank == 1:
            raise CheckpointError("got a weight with an undefined entry")


def on_ranks(number: int, member: Callable[[int, Ranks], Any]) -> list[Any]:
    """What each training rank ends with, a result or an error."""
    ranks, outcomes = Ranks(number, limit_s=60), [None] * number

    def run_one(rank: int) -> None:
        try:
            outcomes[rank] = member(rank, ranks)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run_one, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def send(weights: Whole, engine: FakeEngine, wire: FakeWire, peers: Peers) -> dict[str, float]:
    """One rank's part of a weight sync through shared memory."""
    return sync_weights(
        weights,
        receivers=[Receiver(engine)],  # type: ignore[arg-type]
        channel=TensorTransport().open(transport_context(serialize=wire.serialize, peers=peers)),
        digest=digest,
        version=1,
        buffer_bytes=4096,
        peers=peers,
    )


@pytest.mark.parametrize("number", [1, 3])
def test_ranks_that_never_began_end_with_what_the_engine_said(number: int, tmp_path: Path) -> None:
    """Law: a channel that began nothing is asked for nothing."""
    table, state = model()
    engine = FakeEngine("http://a", table, FakeWire())
    engine.fail_at = "pause abort"
    senders = (tuple(range(number)),)

    def member(rank: int, ranks: Ranks) -> Any:
        peers = ranks.peers(rank)
        context = transport_context(peers=peers, hf_checkpoint=tmp_path)
        return sync_weights(
            Whole(table, state.items(), rank=rank, senders=senders),
            receivers=[Receiver(engine)],  # type: ignore[arg-type]
            channel=DeltaChannel(tmp_path, context, every=20, encoding="xor", checksum="xxh3-128", keep=False),
            digest=digest,
            version=1,
            buffer_bytes=4096,
            peers=peers,
        )

    outcomes = on_ranks(number, member)
    assert all(isinstance(o, EngineError) and "refuses to pause" in str(o) for o in outcomes), outcomes


def test_what_is_wrong_with_a_tensor_is_raised_on_all_ranks_once_all_were_given() -> None:
    table, state = model()
    wire = FakeWire()
    engine = FakeEngine("http://a", table, wire)
    walked: list[str] = []

    def member(rank: int, ranks: Ranks) -> Any:
        peers = ranks.peers(rank)
        weights = Broken(table, state.items(), rank=rank, senders=((0, 1, 2),))
        try:
            return send(weights, engine, wire, peers)
        finally:
            walked.extend(weights.walked)

    outcomes = on_ranks(3, member)
    assert all(isinstance(o, CheckpointError) for o in outcomes), outcomes
    assert sorted(walked) == sorted(state)
    assert "resume" not in engine.log


def test_the_engine_that_failed_is_named_and_not_who_waited_in_vain_for_a_rank_that_saw_it() -> None:
    table, state = model()
    wire = FakeWire()
    engine = FakeEngine("http://a", table, wire)
    engine.fail_at = "update"

    def member(rank: int, ranks: Ranks) -> Any:
        def expired(turn: int, num_turns: int) -> bool:
            raise DeadlineExceeded.waiting(owner="weight sync", for_what="a turn", limit_s=1)

        peers = ranks.peers(rank)
        if rank == 0:  # sends after rank 1, and gives up before that
            peers = dataclasses.replace(peers, hear=expired)
        return send(Whole(table, state.items(), rank=rank, senders=((1, 0),)), engine, wire, peers)

    outcomes = on_ranks(2, member)
    assert all(isinstance(o, EngineError) and o.engines == ("http://a",) for o in outcomes), outcomes


def test_the_engine_that_failed_is_named_and_not_what_went_wrong_with_a_later_bucket() -> None:
    """Law: on one rank, too."""
    table, state = model()
    wire = FakeWire()
    engine = FakeEngine("http://a", table, wire)
    engine.fail_at = "update"
    refused = threading.Event()

    class Late(Whole):
        def tensors(self, turn: Turn) -> Any:
            if turn is not self.turns(4096)[0]:
                refused.wait()
            yield from super().tensors(turn)
            if turn is not self.turns(4096)[0]:
                raise CheckpointError("got a weight with an undefined entry")

        def turns(self, limit_bytes: int) -> Any:
            self.__dict__.setdefault("known", super().turns(limit_bytes))
            return self.__dict__["known"]

    class Told(TamperingChannel):
        def deliver(self, *given: Any, **named: Any) -> None:
            try:
                super().deliver(*given, **named)
            finally:
                refused.set()

    channel = TensorTransport().open(transport_context(serialize=wire.serialize))
    with pytest.raises(EngineError) as caught:
        sync_weights(
            Late(table, state.items()),
            receivers=[Receiver(engine)],  # type: ignore[arg-type]
            channel=Told(channel, lambda name, tensor: tensor),
            digest=digest,
            version=1,
            buffer_bytes=4096,
        )
    assert caught.value.engines == ("http://a",)


def test_a_rank_that_breaks_off_waits_for_nobody() -> None:
    """Law: what breaks a collective off is raised while this rank's thread still waits for another rank's word."""
    table, state = model()
    over, waits = threading.Event(), threading.Event()

    class Broken(Whole):
        def tensors(self, turn: Turn) -> Any:
            if turn.sender == 1 and waits.is_set():
                raise MemoryError("no room")
            yield from super().tensors(turn)

    def hear(turn: int, num_turns: int) -> bool:
        waits.set()
        return over.wait()

    class Seen(Broken):
        def tensors(self, turn: Turn) -> Any:
            if turn.sender == 0:  # between two turns of this rank, whose first one is with the thread by then
                waits.wait()
            yield from super().tensors(turn)

    try:
        with pytest.raises(MemoryError):
            sync_weights(
                Seen(table, state.items(), rank=1, senders=((1, 0),)),
                receivers=[],
                channel=TensorTransport().open(transport_context()),
                digest=digest,
                version=1,
                buffer_bytes=6000,
                peers=dataclasses.replace(Ranks(2).peers(1), hear=hear),
            )
    finally:
        over.set()
