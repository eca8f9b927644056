"""Engines that run already: how the supervisor of a fleet watches servers which somebody else started.

Nothing can be started here and nothing is ended. To start one again is to wait until its address answers, with a server
that fits (`fitting`): who started it may start another. Addresses may come from a file that is read again when it
changes (`slime.settings.topology_yaml`): new ones join, those that are taken off it leave.

Consumes: addresses, what servers say of themselves, and the supervisor's calls, on one thread. Produces: engines that
answer and fit, and what is wrong with each. Waits for nothing but in `find`, at the start of a run: threads of its own
ask the servers, each answer with a limit, and its methods read what they have found. Is woken by nothing.

Invariants
1. An engine is handed out only after its server was found to fit, each time that it comes back.
2. A server that serves other weights than it was sent, as one that was started again behind our back does, is lost.
3. What leaves is left as it is: it serves, unless it was lost with weights that nobody has verified.
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
from slime.serving.watch import NotAnswering, ServerFacts, ServerWatch, ask, server_info, weight_version
from slime.settings import Args
from slime.settings.topology_yaml import address_file, read_addresses

logger = logging.getLogger(__name__)

KNOCK_EVERY_S = 2.0
"""Between two questions to an address at which no server that fits has answered."""
DOOR_EVERY_S = 1.0
"""Between two questions to the front door of a server that serves."""
LOOK_AGAIN_S = 0.5
"""Between the two failed connections after which a server counts as gone; and between two looks in `find`."""


class ExternalEngines:
    """The engines at the addresses of a run."""

    actors: tuple[()] = ()
    """None: nothing of them is a process of the run."""

    def __init__(self, args: Args, keys: EngineKeys, *, wanted: Wanted | None = None) -> None:
        """`wanted`: what they have to be; None is what `args` asks for. `find` comes next."""
        self._args, self._keys, self._wanted = args, keys, wanted or Wanted.of(args)
        self._list = AddressList(args.rollout_external_engine_addrs)
        self._known: list[Engine] = []
        self._urls: list[str] = []
        """Of each engine, for good."""
        self._knocks: dict[str, _Knock] = {}
        self._looks: dict[int, _Look] = {}
        self.may_take_memory: Callable[[], bool] = lambda: True
        self.dismissed: Callable[[Engine], None] = lambda engine: None
        """Called with an engine that nothing may be sent to; set by who informs router and clients."""

    # --- the start of a run -------------------------------------------------------------------------------------------

    def find(self, limit_s: float, note: Callable[[str], object] = lambda text: None) -> None:
        """Waits until every address has answered. Raises `ConfigError` with all that does not fit, `EngineError` if
        some do not answer in time.
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
                    f"got no answer from {len(silent)} of {len(knocks)} external engines within {limit_s:.0f} s "
                    f"(--engine-start-timeout-s): {told}; start them, or leave them out"
                )
            time.sleep(LOOK_AGAIN_S)
        refuse({url: knock.problems or [] for url, knock in knocks.items()})
        for url in self._list.urls:
            self._take(url)

    def engines(self) -> list[Engine]:
        """Those that were found, in the order of their addresses."""
        return list(self._known)

    @property
    def urls(self) -> list[str]:
        """Of each engine where it is."""
        return list(self._urls)

    @property
    def num_gpus(self) -> int:
        """Ranks of all of them."""
        return sum(engine.layout.num_ranks for engine in self._known)

    @property
    def takes_memory(self) -> bool:
        """None shares a GPU with a trainer."""
        return False

    # --- as the supervisor asks ---------------------------------------------------------------------------------------

    def heard(self, index: int) -> None:
        if (look := self._looks.get(index)) is not None:
            look.heard()

    def troubles(self) -> Mapping[int, str]:
        listed = self._list.now()
        found = {index: problem for index, look in self._looks.items() if (problem := look.trouble())}
        gone = {i: f"its address was taken off {self._list.file}" for i in self._looks if self._urls[i] not in listed}
        return {**found, **gone}

    def newcomers(self) -> Sequence[tuple[Engine, str]]:
        """Engines at addresses that have joined the list, as soon as they answer and fit."""
        listed = self._list.now()
        for url in [url for url in self._knocks if url not in listed]:
            self._drop(url)
        joined = [url for url in listed if url not in self._urls]
        return [(self._take(url), url) for url in joined if self._knock(url).facts is not None]

    def start(self, engine: Engine) -> None:
        """Waits for its address: `started` says when something that fits answers there."""
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
        """Looks at an engine from now on, in the state that it is in; at a dead one or one that is awaited, no more."""
        look = self._looks.get(engine.index)
        if engine.url is None or engine.state is State.DEAD:
            if look is not None:
                self._looks.pop(engine.index).close()
            return
        if look is None:
            look = self._looks[engine.index] = _Look(engine.url, self._args, self._keys.use)
        look.state, look.version = engine.state, engine.version

    def ask(self, index: int, method: str, *arguments: Any) -> Any:
        raise AssertionError(f"engine {index} lends no memory, so it has no actor to ask for {method}")

    def has_host(self, index: int) -> bool:
        """True: where it is, is not ours to know."""
        return True

    def stop(self, indices: Sequence[int]) -> list[Any]:
        """Nothing ends here that did not begin here."""
        return []

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Looks at nothing any more. Says which engines may be paused: a weight sync to them was interrupted."""
        for index, look in self._looks.items():
            look.close()
            if look.state is State.TAINTED or (look.state is State.SYNCING and look.served):
                logger.warning(
                    "engine %d at %s may be paused: a weight sync to it was interrupted; the next run lets it go on, "
                    "or POST /continue_generation",
                    index,
                    self._urls[index],
                )
        for knock in self._knocks.values():
            knock.close()

    # --- addresses ----------------------------------------------------------------------------------------------------

    def _take(self, url: str) -> Engine:
        """The engine at an address that answers and fits, under the next number."""
        facts = self._knock(url).facts
        assert facts is not None, f"{url} has not been found to fit"
        if not facts.asks_for_key and not is_loopback(host_of(url)):
            logger.warning("%s asks for no key: whoever reaches it can replace its weights; start it with one", url)
        engine = Engine(len(self._known), (), layout=layout_of_server(facts), host=host_of(url), external=True)
        self._known.append(engine)
        self._urls.append(url)
        self._drop(url)
        logger.info("engine %d is the server at %s: %s", engine.index, url, _told(facts))
        return engine

    def _knock(self, url: str, layout: EngineLayout | None = None) -> _Knock:
        """Who asks an address; `layout`: of the engine that was there before."""
        if url not in self._knocks:
            args, experts = self._args, self._wanted.experts
            limits = (args.rollout_health_check_timeout, args.weight_sync_timeout_s)
            self._knocks[url] = _Knock(
                url, partial(ask, url, self._keys, *limits, experts=experts), partial(self._judge, layout=layout)
            )
        return self._knocks[url]

    def _drop(self, url: str) -> None:
        if knock := self._knocks.pop(url, None):
            knock.close()

    def _judge(self, facts: ServerFacts, layout: EngineLayout | None) -> list[str]:
        found = misfits(facts, self._wanted)
        if not found and layout not in (None, layout_of_server(facts)):
            found.append(f"{layout_of_server(facts)}, and the engine before it had {layout}: start it with that")
        return found


class AddressList:
    """The addresses of a run; those of a file as it is now."""

    def __init__(self, given: Sequence[str]) -> None:
        """Raises `ConfigError` as `read_addresses` does."""
        self._given, self.file = given, address_file(given)
        self._seen = self._stamp()
        self.urls = read_addresses(given)
        """As they were last read."""

    def now(self) -> tuple[str, ...]:
        """Reads the file again if it has changed; one that cannot be meant is logged, and the list stays."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self.urls = read_addresses(self._given)
                logger.info("%s has changed: external engines are %s", self.file, ", ".join(self.urls))
            except ConfigError as error:
                logger.warning("%s; the engines stay as they are", error)
        return self.urls

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = Path(self.file).stat() if self.file is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


class _Knock:
    """Asks one address, in a thread of its own, until a server that fits has answered."""

    def __init__(
        self, url: str, ask_once: Callable[[], ServerFacts], judge: Callable[[ServerFacts], list[str]]
    ) -> None:
        self._url, self._ask, self._judge = url, ask_once, judge
        self.facts: ServerFacts | None = None
        """Of a server that fits."""
        self.problems: list[str] | None = None
        """Of the last answer; None as long as nobody answers."""
        self.asked, self.silence = False, "it was not asked yet"
        """Whether it was asked at least once, and why it does not answer."""
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
        except Exception as error:  # whatever a stranger answers
            return None, [f"its answers make no sense: {type(error).__name__}: {error}; is it an SGLang server?"]


class _Look:
    """Looks at one server that answers: whether it still does, and whether it is the one that weights were sent to.

    Its front door is asked every second, because whoever a call to it has failed wants to know soon whether it is gone;
    its scheduler as seldom as those of the run's own engines.
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
        """That it serves, as far as we know."""
        return self._version

    @version.setter
    def version(self, version: int | None) -> None:
        self._version, self.served = version, self.served or version is not None

    def trouble(self) -> str | None:
        """What is wrong with it, in one line."""
        return self._watch.trouble(expects_answers=self.state in EXPECTS_ANSWERS)

    def heard(self) -> None:
        """It brings tokens."""
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
                    self._problem = f"it was started again: it serves weights {found!r} and was sent version {asked_of}"


def _told(facts: ServerFacts) -> str:
    """What it is, in a few words."""
    names: Iterator[tuple[str, Any]] = ((name, facts.info.get(name)) for name in ("version", "dtype", "device"))
    parts = [f"{name} {value}" for name, value in names if value is not None]
    return ", ".join([*parts, str(layout_of_server(facts)), f"weights {facts.model.get('weight_version')!r}"])
