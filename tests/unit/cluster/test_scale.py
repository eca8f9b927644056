"""What must not grow with the square of ranks, engines or hosts: laws about counts of calls and messages."""

from __future__ import annotations

import http.client
import pickle
import ssl
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from slime.cluster import engine_actors, engine_tracker, waiting
from slime.cluster.engine_actors import RayEngines
from slime.cluster.engine_tracker import Actors, Engines
from slime.cluster.hosts import GuardedHosts
from slime.cluster.placement import Host
from slime.cluster.rank_weight_sync import RankValues
from slime.cluster.training_run import EngineMetrics
from slime.core.errors import WeightSyncError
from slime.core.topology import ONE_RANK
from slime.fleet.supervisor import Engine, Membership, State, Supervisor
from slime.rollout.manager import RolloutManager
from slime.serving import control
from slime.weights import receivers
from slime.weights.receivers import Receiver, on_all

NUM = 64


def engines_ready() -> Membership:
    """All engines are ready."""
    members = Membership(Engine(i, (i,), host=f"10.0.0.{i}") for i in range(NUM))
    for engine in members.engines:
        members.change(engine.index, State.SYNCING, url=f"http://{engine.index}")
        members.change(engine.index, State.READY, version=1)
    return members


def test_the_list_of_engines_is_serialized_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: else a weight sync costs the driver ranks times engines."""
    put: list[Any] = []
    monkeypatch.setattr(engine_tracker, "put_once", lambda value: put.append(value) or "reference")
    monkeypatch.setattr(engine_tracker, "wait_for", lambda refs, **_: refs)
    trainers = tuple(SimpleNamespace(sync_weights=SimpleNamespace(remote=lambda *given: given)) for _ in range(NUM))
    actors = Actors(trainers=trainers, engines=None, rollout=None)  # type: ignore[arg-type]
    assert actors.on_trainers("sync_weights", ["infos"], "abort") == [("reference", "abort")] * NUM
    assert put == [["infos"]]


def test_all_engines_are_admitted_with_one_call_which_is_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        waited.append(len(refs))
        return refs, []

    monkeypatch.setattr(engine_tracker.ray, "wait", wait)
    monkeypatch.setattr(engine_tracker, "wait_for", lambda refs, **_: refs)
    calls: list[list[str]] = []
    admit = SimpleNamespace(remote=lambda model, urls, worker: calls.append(urls))
    tracker: Any = SimpleNamespace(
        members=engines_ready(), _admissions=[], _admitted=set(), _rollout=SimpleNamespace(admit=admit)
    )
    for _ in range(3):
        Engines._admit(tracker)
    assert list(map(len, calls)) == [NUM] and waited == [1]


def test_a_weight_sync_that_changes_every_engine_is_reported_to_prometheus_once() -> None:
    members, looks = engines_ready(), list[Any]()
    reported: Counter[str] = Counter()
    exposed = SimpleNamespace(replace=lambda name, *_: reported.update([name]), count=lambda *_, **__: None)
    sink: Any = SimpleNamespace(exposed=exposed, set_scraped=lambda targets: None)
    tracker = SimpleNamespace(members=members, follow_looks=looks.append)
    asked = SimpleNamespace(router_metrics=SimpleNamespace(remote=lambda: None))
    EngineMetrics(sink, SimpleNamespace(engines=tracker, rollout=asked))  # type: ignore[arg-type]
    reported.clear()
    for state in (State.SYNCING, State.READY):
        for engine in members.engines:
            members.change(engine.index, state)
    for _ in range(3):
        looks[0]()
    assert set(reported.values()) == {1}


def test_the_checks_of_all_engines_are_read_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        calls["wait"] += 1
        return refs, []

    def get(refs: list[Any]) -> list[Any]:
        calls["get"] += 1
        return ["has exited" if ref == "check 7" else None for ref in refs]

    monkeypatch.setattr(engine_actors.ray, "wait", wait)
    monkeypatch.setattr(engine_actors.ray, "get", get)
    port: Any = RayEngines.__new__(RayEngines)
    port._looks, port._seen_at, port._heard_at, port._look_every_s = {}, {}, {}, 1.0
    port._watched = dict.fromkeys(range(NUM), State.READY)
    checks = [SimpleNamespace(remote=lambda asks, i=i: f"check {i}") for i in range(NUM)]
    port._crews = [(SimpleNamespace(problem=check),) for check in checks]
    assert port.troubles() == {} and calls == {}
    assert port.troubles() == {7: "has exited"} and calls == {"wait": 1, "get": 1}


def test_looking_at_the_hosts_compares_no_host_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [Host(f"h{i}", f"10.0.0.{i}", 8, 8, f"node-{i}") for i in range(NUM)]
    watched: list[int] = []
    handles = [SimpleNamespace(watches=lambda i=i: not watched.append(i)) for i in range(NUM)]
    own: Any = SimpleNamespace(tend=lambda: None)
    first: Any = dict(zip(hosts[1:], handles[1:], strict=True))
    guarded = GuardedHosts(own, SimpleNamespace(living=dict), first)  # type: ignore[arg-type]
    compared: list[Any] = []
    monkeypatch.setattr(Host, "__eq__", lambda one, other: compared.append(one) or one is other)
    guarded.tend()
    assert all(map(guarded.is_guarded, hosts)) and all(map(guarded.has, hosts))
    assert compared == [] and watched == list(range(1, NUM))


def test_a_dead_engine_asks_for_its_own_host_alone() -> None:
    """Law: many dead engines do not ask for the hosts of all dead engines each."""
    members, asked = engines_ready(), list[int]()
    port: Any = SimpleNamespace(
        troubles=lambda: dict.fromkeys(range(NUM // 2), "has exited") if not asked else {},
        has_host=lambda index: not asked.append(index),
        dismiss=lambda engine: None,
        start=lambda engine: None,
        started=lambda index: None,
        newcomers=list,
    )
    now = [0.0]
    supervisor = Supervisor(members, port, clock=lambda: now[0])
    supervisor.tend()
    now[0], num_lost = 60.0, len(asked)
    supervisor.tend()
    assert len(members.in_states(State.STARTING)) == NUM // 2 == num_lost
    assert len(asked) <= 3 * num_lost, "once when it is lost, once before it starts, once while it starts"


def test_a_response_of_one_engine_is_no_reason_to_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: whether engines are lost is asked at intervals, not at each of the responses."""
    monkeypatch.setattr(receivers, "POLL_S", 60.0)
    looks: list[int] = []
    some = [
        Receiver(SimpleNamespace(url=f"http://{i}", layout=ONE_RANK), (), lambda: bool(looks.append(0)))  # type: ignore[arg-type]
        for i in range(NUM)
    ]
    assert on_all(some, lambda c: c.url, "answer") == [one.control.url for one in some]
    assert len(looks) < NUM


class CountedStore:
    """A store that counts what one rank asks of it."""

    def __init__(self, store: Any) -> None:
        self._store, self.num = store, 0

    def __getattr__(self, name: str) -> Any:
        self.num += 1
        return getattr(self._store, name)


def exchanged(size: int) -> tuple[list[Any], list[int]]:
    """What ranks get of a gather and two broadcasts, and the number of calls of each at the store."""
    store = HashStore()
    stores, got = [CountedStore(store) for _ in range(size)], list[Any]([None] * size)

    def run(rank: int) -> None:
        values = RankValues(stores[rank], b"key", rank=rank, size=size, limit_s=60)
        first = values.broadcast(f"of {rank}")
        got[rank] = first, values.gather(rank), values.broadcast({"rank": rank})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_keys() <= 2, "only the last broadcast is left, which some may not have read"
    return got, [one.num for one in stores]


def test_ranks_exchange_values_with_messages_that_do_not_grow_with_the_ranks() -> None:
    """Law: each rank speaks to the store alone; the conductor's part is one message for each rank."""
    for size in (1, 2, 8):
        got, nums = exchanged(size)
        assert got[0] == ("of 0", list(range(size)), {"rank": 0})
        assert got[1:] == [("of 0", None, {"rank": 0})] * (size - 1)
        assert set(nums[1:]) <= {5} and nums[0] <= size + 5


class Spreads:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> Any:
        return ran.append, (1,)


ran: list[int] = []


def test_a_value_that_no_rank_wrote_is_refused_unread() -> None:
    """Law: whoever reaches the store's port has no key, neither for a new value nor for one of another place."""
    store = HashStore()
    first, second = (RankValues(store, b"key", rank=rank, size=2, limit_s=5) for rank in (0, 1))
    first.broadcast("one")
    true = store.get("value 1")
    assert second.broadcast(None) == "one"
    for forged in (pickle.dumps(Spreads()), bytes(32) + pickle.dumps(Spreads()), true):
        store.set("value 2", forged)
        with pytest.raises(WeightSyncError, match=r"'value 2' in the store .* was not written by a rank of this run"):
            second.broadcast(None)
        second._number = 1
    assert not ran


def test_a_control_that_is_never_used_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: every training rank has a control of every engine, and few ranks call any."""
    opened: list[Any] = []
    for owner, name in ((http.client, "HTTPConnection"), (http.client, "HTTPSConnection"), (ssl, "SSLContext")):
        monkeypatch.setattr(owner, name, lambda *given, **_: opened.append(given))
    for scheme in ("http", "https"):
        control.HttpEngineControl(f"{scheme}://engine", ONE_RANK, 1.0, "key").close()
    assert opened == []


def test_engines_that_join_together_get_their_numbers_with_one_look_at_those_in_use() -> None:
    looks: list[int] = []

    class Numbers(dict[str, int]):
        def values(self) -> Any:
            looks.append(len(self))
            return super().values()

    manager: Any = RolloutManager.__new__(RolloutManager)
    manager._clients = {"policy": SimpleNamespace(admit=lambda urls, prefill: None)}
    manager._policy, manager._workers, manager._numbers = "policy", None, Numbers({"http://5": 1})
    manager.admit("policy", [f"http://{i}" for i in range(NUM)])
    assert len(looks) == 1 and sorted(dict(manager._numbers).values()) == list(range(NUM))
    assert manager._numbers["http://5"] == 1


def test_a_search_for_the_dead_reads_all_answers_that_are_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def wait(refs: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        calls.append(len(refs))
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(waiting.ray, "wait", wait)
    monkeypatch.setattr(waiting.ray, "get", lambda refs: refs)
    assert waiting.first_death(list(range(NUM)), for_what="the run", limit_s=60.0) is None
    assert calls == [NUM, NUM]
