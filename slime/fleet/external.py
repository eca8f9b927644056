"""Watches external engines (servers that the run did not start) for the fleet's supervisor.

slime neither starts nor stops these servers. If one is lost, slime waits for its owner to start a compatible server
(`fitting`) at the same address. If the addresses come from a file, the file is reread when it changes
(`slime.settings.topology_yaml`): engines at new addresses join, and engines at removed addresses leave.

The supervisor calls this module from one thread. Background threads poll the servers, with a timeout for each response.
Only `find`, at the start of a run, blocks. All other methods just read the results of the polls.

Invariants
1. A server is used only after it has passed the compatibility checks, and is checked again after a restart.
2. A server counts as lost if it no longer serves the weights that the run sent, because it must have been restarted.
3. slime never stops a server whose address is removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, EngineError, SlimeError
from slime.core.processes import host_of, is_loopback
from slime.core.text import EngineKeys
from slime.core.topology import EngineLayout
from slime.fleet.fitting import Wanted, layout_of_server, misfits, refuse, report
from slime.fleet.supervisor import EXPECTS_ANSWERS, Engine, State
from slime.serving.watch import NotAnswering, ServerFacts, ServerWatch, facts_of_server, server_info, weight_version
from slime.settings import Args
from slime.settings.topology_yaml import address_file, read_addresses

logger = logging.getLogger(__name__)

KNOCK_EVERY_S = 2.0
"""Poll interval for an address at which no compatible server has responded yet."""
DOOR_EVERY_S = 1.0
"""Poll interval for the HTTP front end of a server in use."""
LOOK_AGAIN_S = 0.5
"""Delay before a failed connection is retried. If the retry fails too, the server counts as gone. Also the poll
interval of `find`."""


class ExternalEngines:
    actors: tuple[()] = ()
    """Always empty, because external engines are not processes of the run."""

    def __init__(self, args: Args, keys: EngineKeys, *, wanted: Wanted | None = None) -> None:
        """`wanted`: by default, derived from `args`. Call `find` next."""
        self._args, self._keys, self._wanted = args, keys, wanted or Wanted.of(args)
        self._list = AddressList(args.rollout_external_engine_addrs)
        self._known: list[Engine] = []
        self._urls: list[str] = []
        """[engines] address of each engine, which never changes."""
        self._knocks: dict[str, _Knock] = {}
        self._looks: dict[int, _Look] = {}
        self.may_take_memory: Callable[[], bool] = lambda: True
        self.dismissed: Callable[[Engine], None] = lambda engine: None
        """Called with each engine that is taken out of service. Set by `Engines`."""

    def find(self, limit_s: float, note: Callable[[str], object] = lambda text: None) -> None:
        """Waits until the servers at all addresses have responded.

        Raises `ConfigError` listing all incompatibilities, or `EngineError` if some servers do not respond in time.
        """
        knocks = {url: self._knock(url) for url in self._list.urls}
        deadline = time.monotonic() + limit_s
        while silent := {url: knock.silence for url, knock in knocks.items() if knock.problems is None}:
            if all(knock.asked for knock in knocks.values()) and any(knock.problems for knock in knocks.values()):
                refuse({url: knock.problems or [silent[url]] * (url in silent) for url, knock in knocks.items()})
            note(f"waiting for {', '.join(silent)}")
            if time.monotonic() > deadline:
                told = "; ".join(f"{url}: {why}" for url, why in silent.items())
                raise EngineError(
                    f"{len(silent)} of {len(knocks)} external engines did not respond within {limit_s:.0f} s "
                    f"(--engine-start-timeout-s): {told}; start them, or remove their addresses"
                )
            time.sleep(LOOK_AGAIN_S)
        refuse({url: knock.problems or [] for url, knock in knocks.items()})
        for url in self._list.urls:
            self._take(url)

    def engines(self) -> list[Engine]:
        """Returns the known engines, in the order of their addresses."""
        return list(self._known)

    @property
    def urls(self) -> list[str]:
        return list(self._urls)

    @property
    def num_gpus(self) -> int:
        return sum(engine.layout.num_ranks for engine in self._known)

    @property
    def takes_memory(self) -> bool:
        return False  # external engines do not share GPUs with the trainer

    def heard(self, index: int) -> None:
        if (look := self._looks.get(index)) is not None:
            look.heard()

    def troubles(self) -> Mapping[int, str]:
        listed = self._list.now()
        found = {index: problem for index, look in self._looks.items() if (problem := look.trouble())}
        gone = {i: f"its address is no longer in {self._list.file}" for i in self._looks if self._urls[i] not in listed}
        return {**found, **gone}

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Returns engines at new addresses that respond and are compatible."""
        listed = self._list.now()
        for url in [url for url in self._knocks if url not in listed]:
            self._drop(url)
        joined = [url for url in listed if url not in self._urls]
        return [(self._take(url), url) for url in joined if self._knock(url).facts is not None]

    def start(self, engine: Engine) -> None:
        self._drop(self._urls[engine.index])

    def started(self, index: int) -> str | None:
        url = self._urls[index]
        if url not in self._list.now():
            self._drop(url)
            return None
        if self._knock(url, self._known[index].layout).facts is None:
            return None
        self._drop(url)
        return url

    def dismiss(self, engine: Engine) -> None:
        self.watch(engine.moved(State.DEAD))
        self.dismissed(engine)

    def watch(self, engine: Engine) -> None:
        """Starts or stops watching an engine, depending on its state. Dead and starting engines are not watched."""
        look = self._looks.get(engine.index)
        if engine.url is None or engine.state is State.DEAD:
            if look is not None:
                self._looks.pop(engine.index).close()
            return
        if look is None:
            look = self._looks[engine.index] = _Look(engine.url, self._args, self._keys.use)
        look.state, look.version = engine.state, engine.version

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        raise AssertionError(f"cannot call {method}: engine {index} is external and has no actor")

    def has_host(self, index: int) -> bool:
        """Always returns True, because the run does not know the hosts of external engines."""
        return True

    def stop(self, indices: Sequence[int]) -> list[Any]:
        """Does nothing, because the run does not stop external engines."""
        return []

    def close(self) -> None:
        """Stops watching. Warns about engines that an interrupted weight sync may have left paused."""
        for index, look in self._looks.items():
            look.close()
            if look.state is State.TAINTED or (look.state is State.SYNCING and look.served):
                logger.warning(
                    "engine %d at %s may be paused because a weight sync to it was interrupted. The next run resumes "
                    "it; to resume it earlier, send POST /continue_generation",
                    index,
                    self._urls[index],
                )
        for knock in self._knocks.values():
            knock.close()

    def _take(self, url: str) -> Engine:
        """Adds the server at `url` as an engine. The server must be compatible."""
        facts = self._knock(url).facts
        assert facts is not None, f"the server at {url} has not been checked"
        if not facts.asks_for_key and not is_loopback(host_of(url)):
            logger.warning("anyone who can reach %s can replace its weights; start the server with an API key", url)
        engine = Engine(len(self._known), (), layout=layout_of_server(facts), host=host_of(url), external=True)
        self._known.append(engine)
        self._urls.append(url)
        self._drop(url)
        logger.info("engine %d is the server at %s: %s", engine.index, url, _told(facts))
        return engine

    def _knock(self, url: str, layout: EngineLayout | None = None) -> _Knock:
        """Returns the thread that polls an address. `layout`: the layout that a new server there must have."""
        if url not in self._knocks:
            args, experts = self._args, self._wanted.experts
            limits = (args.rollout_health_check_timeout, args.weight_sync_timeout_s)
            self._knocks[url] = _Knock(
                url,
                partial(facts_of_server, url, self._keys, *limits, experts=experts),
                partial(self._judge, layout=layout),
            )
        return self._knocks[url]

    def _drop(self, url: str) -> None:
        if knock := self._knocks.pop(url, None):
            knock.close()

    def _judge(self, facts: ServerFacts, layout: EngineLayout | None) -> list[str]:
        found = misfits(facts, self._wanted)
        if not found and layout not in (None, layout_of_server(facts)):
            found.append(f"its layout is {layout_of_server(facts)}; start it with {layout}, like the lost engine")
        return found


class AddressList:
    """The addresses of external engines, from the command line or a file."""

    def __init__(self, given: Sequence[str]) -> None:
        """Reads the addresses. Raises the same errors as `read_addresses`."""
        self._given, self.file = given, address_file(given)
        self._seen = self._stamp()
        self.urls = read_addresses(given)
        """The addresses from the last valid read."""

    def now(self) -> tuple[str, ...]:
        """Returns the current addresses. Rereads the file if it has changed; logs and ignores an invalid file."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self.urls = read_addresses(self._given)
                logger.info("%s has changed; the external engines are now %s", self.file, ", ".join(self.urls))
            except ConfigError as error:
                logger.warning("%s; keeping the current engines", error)
        return self.urls

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = Path(self.file).stat() if self.file is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


class _Knock:
    """A thread that polls one address until a compatible server responds."""

    def __init__(
        self, url: str, ask_once: Callable[[], ServerFacts], judge: Callable[[ServerFacts], list[str]]
    ) -> None:
        self._url, self._ask, self._judge = url, ask_once, judge
        self.facts: ServerFacts | None = None
        """The server's properties once it is known to be compatible, else None."""
        self.problems: list[str] | None = None
        """Incompatibilities found in the last response. None: no response yet."""
        self.asked, self.silence = False, "not polled yet"
        """Whether the address was polled at least once, and why no server responds."""
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"knock {url}", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            facts, problems = self._once()
            if problems and problems != self.problems:
                logger.warning("%s", report({self._url: problems}))
            self.problems, self.asked = problems, True
            if facts is not None and not problems:
                self.facts = facts
                return
            self._over.wait(KNOCK_EVERY_S)

    def _once(self) -> tuple[ServerFacts | None, list[str] | None]:
        try:
            facts = self._ask()
            return facts, self._judge(facts)
        except NotAnswering as error:
            self.silence = str(error)
            return None, None
        except SlimeError as error:
            return None, [str(error)]
        except Exception as error:  # a different kind of server may be listening at the address
            return None, [f"its responses are invalid: {type(error).__name__}: {error}; is it an SGLang server?"]


class _Look:
    """Checks whether a server still responds and still serves the weights that the run sent.

    Polls the front end every second, so that the cause of a failed call is found quickly. Polls the scheduler at the
    same interval as for the run's own engines.
    """

    def __init__(self, url: str, args: Args, api_key: str | None) -> None:
        self._url, self._api_key, self._limit_s = url, api_key, args.rollout_health_check_timeout
        self.state, self.served = State.SYNCING, False
        self._version: int | None = None
        self._problem: str | None = None
        self._over = threading.Event()
        self._watch = ServerWatch(
            lambda: self._problem,
            self._scheduler_answers,
            interval_s=args.rollout_health_check_interval,
            timeout_s=args.rollout_health_check_timeout,
            first_wait_s=args.rollout_health_check_first_wait,
        )
        threading.Thread(target=self._at_the_door, name=f"door {url}", daemon=True).start()

    @property
    def version(self) -> int | None:
        """Version of the last weights sent to the server."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version, self.served = version, self.served or version is not None

    def trouble(self) -> str | None:
        return self._watch.trouble(expects_answers=self.state in EXPECTS_ANSWERS)

    def heard(self) -> None:
        self._watch.heard()

    def close(self) -> None:
        self._over.set()
        self._watch.close()

    def _scheduler_answers(self, timeout_s: float) -> bool:
        try:
            server_info(self._url, self._api_key, timeout_s)
        except EngineError:
            return False
        return True

    def _at_the_door(self) -> None:
        refused = 0
        while self._problem is None and not self._over.wait(LOOK_AGAIN_S if refused else DOOR_EVERY_S):
            began, asked_of = time.monotonic(), self._version
            try:
                found = weight_version(self._url, self._api_key, self._limit_s)
            except NotAnswering as error:
                refused += 1
                if refused > 1 or time.monotonic() - began >= self._limit_s:
                    self._problem = str(error)
            except EngineError as error:
                self._problem = str(error)
            else:
                refused = 0
                if asked_of and asked_of == self._version and found != str(asked_of):
                    self._problem = (
                        f"it was restarted: the run sent version {asked_of}, but it serves version {found!r}"
                    )


def _told(facts: ServerFacts) -> str:
    names: Iterator[tuple[str, Any]] = ((name, facts.info.get(name)) for name in ("version", "dtype", "device"))
    parts = [f"{name} {value}" for name, value in names if value is not None]
    return ", ".join([*parts, str(layout_of_server(facts)), f"weights {facts.model.get('weight_version')!r}"])
