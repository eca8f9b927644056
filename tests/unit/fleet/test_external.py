"""Laws of engines that run already: they join, leave and come back by themselves, and only ever one that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError, EngineError
from slime.core.text import EngineKeys
from slime.fleet import external
from slime.fleet.external import ExternalEngines
from slime.fleet.fitting import Wanted
from slime.fleet.supervisor import MAX_FAILURES, Engine, Membership, State, Supervisor
from slime.serving import watch
from slime.serving.watch import ServerWatch
from slime.settings import Args, parse_args
from tests.support.command_line import complete
from tests.support.stranger import Stranger

LIMIT_S = 60.0
KEY = "key"
KEYS = EngineKeys(KEY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "KNOCK_EVERY_S", 0.05)
    monkeypatch.setattr(external, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(external, "DOOR_EVERY_S", 0.05)


@pytest.fixture
def args(tmp_path: Path) -> Callable[..., Args]:
    """Settings with these addresses."""

    base = [*complete(tmp_path), "--rollout-health-check-interval", "0.05"]

    def make(*addresses: str, flags: tuple[str, ...] = ()) -> Args:
        return parse_args([*base, *flags, "--rollout-external-engine-addrs", *addresses])

    return make


def stranger(args: Args) -> Stranger:
    """A server that fits."""
    wanted = Wanted.of(args)
    info = {"version": "0.5.23", "tp_size": 1, "weight_version": "default", "custom_weight_loader": []}
    model = {"model_type": wanted.config["model_type"], "weight_version": "default", "is_generation": True}
    return Stranger(info={**info, **wanted.settings}, model=model, resident=sorted(wanted.table.resident), key=KEY)


class Fleet:
    """Engines that run already, and their supervisor."""

    def __init__(self, args: Args) -> None:
        self.port = ExternalEngines(args, KEYS)
        self.port.find(LIMIT_S)
        self.members = Membership(self.port.engines())
        self.supervisor = Supervisor(self.members, self.port)
        self.members.follow(lambda before, after: self.port.watch(after))
        self.gone: list[int] = []
        self.port.dismissed = lambda engine: self.gone.append(engine.index)
        for engine, url in zip(self.members.engines, self.port.urls, strict=True):
            self.supervisor.up(engine.index, url)

    def sync(self, version: int, *servers: Stranger) -> None:
        """All that answer serve this version."""
        takers = self.members.in_states(State.SYNCING, State.READY)
        self.supervisor.syncing(takers)
        for server in servers:
            server.model["weight_version"] = str(version)
        self.supervisor.synced(takers, version)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, [str(engine) for engine in self.members.engines]
            self.supervisor.tend()
            time.sleep(0.01)

    def state(self, index: int) -> State:
        return self.members[index].state


@pytest.fixture
def server(args: Callable[..., Args]) -> Iterator[Stranger]:
    """A server that fits, and answers."""
    one = stranger(args("a:1"))
    with one.serving():
        yield one


def test_a_server_that_fits_is_an_engine_without_slots(args: Callable[..., Args], server: Stranger) -> None:
    server.info["tp_size"] = 2
    fleet = Fleet(args(server.url))
    (engine,) = fleet.members.engines
    assert (engine.slots, engine.layout.tp_size, engine.lends, engine.external) == ((), 2, False, True)
    assert fleet.port.num_gpus == 2 and fleet.state(0) is State.SYNCING
    assert "continue_generation" in server.asked, "one that an earlier run left paused goes on"
    fleet.port.close()


def test_what_does_not_fit_is_refused_with_all_of_it(args: Callable[..., Args], server: Stranger) -> None:
    server.info |= {"dtype": "float16", "version": "0.1"}
    port = ExternalEngines(args(server.url), KEYS)
    with pytest.raises(ConfigError, match=r"SGLang 0\.1(.|\n)*--dtype float16"):
        port.find(LIMIT_S)
    port.close()


def test_an_address_where_nobody_answers_is_named(args: Callable[..., Args]) -> None:
    port = ExternalEngines(args("127.0.0.1:9"), KEYS)
    with pytest.raises(EngineError, match=r"http://127.0.0.1:9: it does not respond"):
        port.find(0.5)
    port.close()


def test_an_engine_that_ends_is_dismissed_and_joins_when_its_address_answers_again(args: Callable[..., Args]) -> None:
    one = stranger(args("a:1"))
    with one.serving():
        fleet, port = Fleet(args(one.url)), int(one.url.rpartition(":")[2])
        fleet.sync(1, one)
        assert fleet.state(0) is State.READY
    fleet.until(lambda: fleet.state(0) is not State.READY)
    assert fleet.gone == [0]
    fleet.until(lambda: fleet.state(0) is State.STARTING)
    wrong = stranger(args("a:1"))
    wrong.model["model_type"] = "other"
    with wrong.serving(port):
        fleet.until(lambda: "generate" in wrong.asked)
        fleet.supervisor.tend()
        assert fleet.state(0) is State.STARTING, "what does not fit is not let in"
    with one.serving(port):
        fleet.until(lambda: fleet.state(0) is State.SYNCING)
        (joiner,) = fleet.supervisor.wants_weights()
        assert (joiner.incarnation, joiner.url) == (1, one.url)
        fleet.sync(2, one)
        assert fleet.state(0) is State.READY
    fleet.port.close()


def test_a_server_that_was_started_again_behind_our_back_is_lost(args: Callable[..., Args], server: Stranger) -> None:
    fleet = Fleet(args(server.url))
    for version in (4, 5):
        fleet.sync(version, server)
        for _ in range(10):
            time.sleep(0.02)
            fleet.supervisor.tend()
        assert fleet.state(0) is State.READY and fleet.gone == []
    server.model["weight_version"] = "default"
    fleet.until(lambda: fleet.gone == [0])
    assert "the run sent version 5, but it serves version 'default'" in fleet.members[0].reason
    fleet.until(lambda: fleet.state(0) is State.SYNCING)
    fleet.port.close()


def test_engines_join_and_leave_with_the_lines_of_a_file(
    args: Callable[..., Args], server: Stranger, tmp_path: Path
) -> None:
    file, other = tmp_path / "engines", stranger(args("a:1"))
    with other.serving():
        file.write_text(f"{server.url}\n")
        fleet = Fleet(args(f"@{file}"))
        fleet.sync(1, server)
        file.write_text(f"{server.url}\n{other.url}\n")
        fleet.until(lambda: len(fleet.members.engines) == 2)
        assert fleet.state(1) is State.SYNCING and fleet.members[1].url == other.url
        fleet.sync(2, server, other)
        file.write_text(f"{other.url}\n")
        fleet.until(lambda: fleet.gone == [0])
        fleet.until(lambda: fleet.state(0) is State.STARTING)
        assert fleet.state(1) is State.READY
        file.write_text("nonsense\n")
        fleet.supervisor.tend()
        assert fleet.state(1) is State.READY, "a file that cannot be meant changes nothing"
        file.write_text(f"{server.url}\n{other.url}\n")
        fleet.until(lambda: fleet.state(0) is State.SYNCING)
    fleet.until(lambda: fleet.gone == [0, 1])
    fleet.port.close()


def test_each_question_has_the_key_and_its_own_limit(
    args: Callable[..., Args], server: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: a scheduler answers within the limit of health checks, digests of all tensors within that of a sync."""
    asked: list[Any] = []

    def ask(*given: Any, **named: Any) -> Any:
        asked.append(given)
        return watch.facts_of_server(*given, **named)

    class Watch(ServerWatch):
        def __init__(self, *given: Any, **named: float) -> None:
            asked.append(named)
            super().__init__(*given, **named)

    monkeypatch.setattr(external, "facts_of_server", ask)
    monkeypatch.setattr(external, "ServerWatch", Watch)
    limits = ("--rollout-health-check-timeout", "17", "--weight-sync-timeout-s", "41")
    fleet = Fleet(args(server.url, flags=(*limits, "--rollout-health-check-first-wait", "3")))
    assert asked == [
        (server.url, KEYS, 17.0, 41.0),
        {"interval_s": 0.05, "timeout_s": 17.0, "first_wait_s": 3.0},
    ]
    look = fleet.port._looks[0]
    assert look._scheduler_answers(17.0)
    server.key = "another"
    assert not look._scheduler_answers(17.0)
    fleet.port.close()


def test_one_that_only_ever_ends_does_not_end_the_run(args: Callable[..., Args], server: Stranger) -> None:
    """The supervisor gives up on engines of the run after `MAX_FAILURES`; somebody else's may be mended."""
    fleet = Fleet(args(server.url))
    supervisor, members = fleet.supervisor, Membership([Engine(0, (), external=True)])
    supervisor = Supervisor(members, fleet.port, clock=lambda: now[0])
    now, found = [0.0], {0: "gone"}
    fleet.port.troubles = lambda: dict(found)  # type: ignore[method-assign]
    for _ in range(2 * MAX_FAILURES):
        supervisor.up(0, server.url)
        supervisor.tend()
        assert members[0].state is State.DEAD
        now[0] += 100.0
        members.change(0, State.STARTING)
    fleet.port.close()
