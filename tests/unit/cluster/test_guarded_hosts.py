"""Laws of the guardians of hosts: one that is lost is replaced, nothing starts where none watches, and a refusal is not
for ever."""

from __future__ import annotations

import pytest

from slime.cluster.hosts import AFTER_LOSS_S, ASK_AGAIN_S, MOST_DEATHS, GuardedHosts, close_all
from slime.cluster.placement import Host
from slime.core.errors import ActorDied, EngineError

HERE, THERE = Host("a", "10.0.0.1", 1, 1, "node-a"), Host("b", "10.0.0.2", 1, 1, "node-b")


class FakeHandle:
    """The actor of a host: a test says what it answers."""

    def __init__(self) -> None:
        self.answer: list[str] | Exception | None = None
        self.guards = True
        self.ended = ""

    def unseen(self) -> list[str] | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def watches(self) -> bool:
        return self.guards

    def drop(self) -> None:
        self.ended = "dropped"

    def begin_close(self) -> None:
        self.ended = "closing"

    def close(self, end_s: float) -> None:
        assert self.ended == "closing"
        self.ended = "closed"


class Cluster:
    """Two hosts, the driver's first; a clock that a test moves."""

    def __init__(self) -> None:
        self.now, self.own_looks = 100.0, 0
        self.nodes = {HERE.address: ["node-a"], THERE.address: ["node-b"]}
        self.first, self.taken = FakeHandle(), list[tuple[str, FakeHandle]]()
        self.hosts = GuardedHosts(self, self, {THERE: self.first}, clock=lambda: self.now)

    def tend(self) -> None:
        """As the guardian of the driver's host."""
        self.own_looks += 1

    def living(self) -> dict[str, list[str]]:
        return self.nodes

    def take_up(self, node_id: str) -> FakeHandle:
        self.taken.append((node_id, FakeHandle()))
        return self.taken[-1][1]

    def after(self, seconds: float) -> tuple[bool, bool]:
        """Time passes, and the driver looks; whether the host is there, and whether something may start on it."""
        self.now += seconds
        self.hosts.tend()
        assert self.hosts.has(HERE) and self.hosts.is_guarded(HERE), "the driver's guardian is its own affair"
        return self.hosts.has(THERE), self.hosts.is_guarded(THERE)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_host_whose_actor_ends_while_its_node_lives_gets_another_one(cluster: Cluster) -> None:
    assert cluster.after(0) == (True, True) and cluster.own_looks == 1
    cluster.first.guards = False
    assert cluster.after(1) == (True, False), "it is there, but nothing starts on it"
    assert cluster.first.ended == "dropped" and cluster.taken == []
    assert cluster.after(AFTER_LOSS_S - 1) == (True, False) and cluster.taken == [], "its guardian ends the run there"
    assert cluster.after(1) == (True, False)
    ((node, second),) = cluster.taken
    assert node == "node-b"
    assert cluster.after(1) == (True, False), "no answer yet"
    second.answer = []
    assert cluster.after(1) == (True, True)
    second.guards = False
    assert cluster.after(0) == (True, False)
    cluster.after(AFTER_LOSS_S)
    assert len(cluster.taken) == 2, "and so on"


def test_an_actor_that_the_old_guardian_ends_is_no_refusal(cluster: Cluster) -> None:
    cluster.first.guards = False
    cluster.after(0)
    for number in range(3):
        cluster.after(AFTER_LOSS_S)
        cluster.taken[number][1].answer = ActorDied("the owner of a host's guardian died")
        assert cluster.after(1) == (True, False)
        assert cluster.taken[number][1].ended == "dropped"


def test_a_host_whose_actors_only_ever_end_is_refused_in_the_end(cluster: Cluster) -> None:
    """Law: engines do not wait for ever for a host on which nothing can start."""
    cluster.first.guards = False
    cluster.after(0)
    for number in range(MOST_DEATHS + 1):
        cluster.after(AFTER_LOSS_S)
        cluster.taken[number][1].answer = ActorDied("no memory")
        assert cluster.after(1) == (number < MOST_DEATHS, False)
    assert cluster.after(ASK_AGAIN_S) == (False, False) and len(cluster.taken) == MOST_DEATHS + 2
    cluster.taken[-1][1].answer = []
    assert cluster.after(1) == (True, True)


@pytest.mark.parametrize(
    "answer", [["--save /shared/save (No such file)"], EngineError("no guardian"), OSError("stale")]
)
def test_a_host_that_came_back_and_is_refused_is_asked_again(cluster: Cluster, answer: list[str] | Exception) -> None:
    cluster.nodes[THERE.address], cluster.first.guards = [], False
    assert cluster.after(0) == (False, False), "it is lost"
    assert cluster.after(1000) == (False, False) and cluster.taken == []
    cluster.nodes[THERE.address] = ["node-c"]
    assert cluster.after(1) == (False, False)
    assert [node for node, _ in cluster.taken] == ["node-c"], "at once"
    cluster.taken[0][1].answer = answer
    assert cluster.after(1) == (False, False)
    assert cluster.taken[0][1].ended == "dropped"
    assert cluster.after(ASK_AGAIN_S - 1) == (False, False) and len(cluster.taken) == 1
    assert cluster.after(1) == (False, False) and len(cluster.taken) == 2
    cluster.taken[1][1].answer = []
    assert cluster.after(1) == (True, True), "the folder is mounted by now"


def test_the_same_refusal_is_told_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.first.guards = False
    cluster.after(0)
    cluster.after(AFTER_LOSS_S)
    for number, answer in enumerate((["--save"], ["--save"], ["--run-dir"])):
        cluster.taken[number][1].answer = answer
        assert cluster.after(0) == (False, False), "engines that wait for it are told so"
        cluster.after(ASK_AGAIN_S)
    told = [record.message for record in caplog.records if "not using host" in record.message]
    assert len(told) == 2 and "--save" in told[0] and "--run-dir" in told[1]


def test_a_node_that_is_lost_leaves_nothing_to_wait_for(cluster: Cluster) -> None:
    """Law: at the end only actors of nodes that live are asked to end what is left there."""
    cluster.nodes[THERE.address], cluster.first.guards = ["node-c"], False
    cluster.after(0)
    (taken,) = [handle for _, handle in cluster.taken]
    cluster.hosts.close()
    assert (cluster.first.ended, taken.ended) == ("dropped", "closed")


def test_no_host_waits_for_another_one_to_close() -> None:
    """Law: all hosts are asked before the driver waits for the first, so that 64 hosts end in the time of one."""
    order, ends = list[str](), list[float]()

    class Slow(FakeHandle):
        def begin_close(self) -> None:
            order.append("asked")
            super().begin_close()

        def close(self, end_s: float) -> None:
            order.append("waited for")
            ends.append(end_s)
            super().close(end_s)

    close_all([Slow() for _ in range(3)])
    assert order == ["asked"] * 3 + ["waited for"] * 3
    assert len(set(ends)) == 1, "many hosts that do not respond cost no more time than one"


def test_a_run_of_one_host_asks_ray_nothing() -> None:
    looks = Cluster()
    alone = GuardedHosts(looks)
    alone.tend()
    assert looks.own_looks == 1 and alone.has(HERE) and alone.is_guarded(HERE)
    alone.close()
