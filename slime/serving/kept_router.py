"""`KeptRouter`: one router that is to know certain servers, and the thread that sees to it.

A router of ours that ends or hangs is started again on its port and gets the same servers, so who asks it sees a
refused connection for a few seconds. One that runs already (`ExistingRouter`) is used and not kept: while it does not
answer the log says so, and when it does again it gets the servers that it ought to have. At the end it has none.

Consumes: servers to send to, from any thread. Produces: a router that sends to these. Waits for: the router, in its own
thread, each time with a limit. Is woken by: `admit`, `dismiss`, `begin_to_close`, and time.

Invariants
1. What it is to know is a note under a lock that nobody keeps while a router is asked: notes never wait.
2. Servers are asked for one by one, and none is waited for: what is missing at the next look is asked for again later.
3. Only servers that were admitted here are ever taken off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from slime.core.errors import DeadlineExceeded, SlimeError
from slime.core.silence import Silence
from slime.core.topology import Worker as Kind
from slime.serving.plain_http import request
from slime.serving.router import Router
from slime.serving.router_workers import ExistingRouter, Worker

logger = logging.getLogger(__name__)

AnyRouter = Router | ExistingRouter

LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.2
"""While the router does not know yet what it is to know."""
SILENCE_LIMIT_S, QUESTION_LIMIT_S = 7.5, 4.0
"""How long a router may leave questions unanswered, and one of them; it does nothing else than answering."""
CHANGE_LIMIT_S = 5.0
"""For its word that it will add or remove a server."""
ASK_AGAIN_S = 10.0
"""How long a server may be missing from the list before the router is asked for it again."""
START_LIMIT_S = 60.0
MAX_FAILURES = 3
"""After so many starts in a row that failed it is given up."""
LEAVE_LIMIT_S = 10.0
"""How long the end waits until a router that is not ours has forgotten the servers."""


class KeptRouter:
    """One of a run's routers, which runs when this is made. `begin_to_close`, then `close`, at the end."""

    def __init__(self, model: str, router: AnyRouter) -> None:
        self.router, self.url, self.restarts = router, router.url, 0
        self.problem: SlimeError | None = None
        """Why it has ended for good."""
        self._name = f"the router of model {model} at {router.url}"
        self._notes = threading.Condition()
        """Guards the next five; is notified when one of them changes."""
        self._wanted: dict[str, Kind] = {}
        """Server -> what it does of a request."""
        self._dismissed: set[str] = set()
        """Those to take off, even if they are wanted again: another engine may have come up at that address."""
        self._news, self._is_settled, self._closing = False, True, False
        self._asked: dict[str, float] = {}
        """Server -> when the router was asked to add it; a minus infinity is a router that has forgotten."""
        self._missing: set[str] = set()
        """Those of which the log has said that they are missing."""
        self._failures, self._silent = 0, False
        self._life = threading.Lock()
        """Of the process: nobody starts it while it is ended for good."""
        self._thread = threading.Thread(target=self._keep, name=f"router {model}", daemon=True)
        self._thread.start()

    def admit(self, urls: Iterable[str], kind: Kind = Kind.REGULAR) -> None:
        """It is to send to these, too."""
        with self._notes:
            self._wanted.update(dict.fromkeys(urls, kind))
            self._wake()

    def dismiss(self, urls: Iterable[str]) -> None:
        """It is to send nothing to these."""
        with self._notes:
            for url in urls:
                self._wanted.pop(url, None)
                self._dismissed.add(url)
            self._wake()

    def settled(self, limit_s: float) -> bool:
        """Waits until it sends where it is to. False if it does not within the limit and could."""
        with self._notes:
            self._notes.wait_for(lambda: self._is_settled or not self._can_settle(), limit_s)
            return self._is_settled or not self._can_settle()

    def begin_to_close(self) -> None:
        """Nothing is started any more. Returns at once."""
        with self._notes:
            self._closing = True
            self._notes.notify_all()

    def close(self) -> None:
        """Ends it if it is ours. The thread's last question ends with the router."""
        self.begin_to_close()
        if isinstance(self.router, Router):
            with self._life:
                self.router.stop()
        self._thread.join(SILENCE_LIMIT_S + LEAVE_LIMIT_S)

    def _wake(self) -> None:
        self._news, self._is_settled = True, False
        self._notes.notify_all()

    def _can_settle(self) -> bool:
        return self.problem is None and not self._silent and not self._closing

    def _keep(self) -> None:
        while not self._closing and self.problem is None:
            try:
                self._look()
            except Exception as error:  # a router may answer anything, and stays watched
                if not self._closing:
                    logger.warning("%s could not be looked after: %s", self._name, error, exc_info=True)
            with self._notes:
                pause_s = LOOK_EVERY_S if self._is_settled or self._silent else LOOK_SOON_S
                self._notes.wait_for(lambda: self._news or self._closing, pause_s)
                self._news = False
                self._notes.notify_all()
        if isinstance(self.router, ExistingRouter) and not self._silent:
            self._leave(self.router)

    def _look(self) -> None:
        trouble = _trouble(self.router)
        if isinstance(self.router, ExistingRouter):
            self._note(trouble)
        elif trouble:
            trouble = self._start_again(self.router, trouble)
        if trouble is None and not self._closing:
            self._follow()

    def _note(self, trouble: str | None) -> None:
        """What became of a router that is not ours."""
        if trouble and not self._silent:
            logger.warning("%s %s; requests of the run do without it", self._name, trouble)
        if self._silent and not trouble:
            self._forget_asking()
            logger.info("%s answers again", self._name)
        self._silent = trouble is not None

    def _start_again(self, router: Router, trouble: str) -> str | None:
        """What is wrong afterwards; None if it answers again."""
        logger.warning("%s %s; it is started again", self._name, trouble)
        try:
            with self._life:
                if self._closing:
                    return trouble
                router.stop()
                router.start()
            self._wait_ready(router)
        except SlimeError as error:
            if self._closing:
                return trouble
            self._failures += 1
            logger.error("%s did not come back: %s", self._name, error)
            if self._failures >= MAX_FAILURES:
                with self._notes:
                    self.problem = error
                    self._notes.notify_all()
            return str(error)
        self._forget_asking()
        self._failures, self.restarts = 0, self.restarts + 1
        logger.info("%s answers again", self._name)
        return None

    def _wait_ready(self, router: Router) -> None:
        """In short waits, because the run may end meanwhile."""
        silence = Silence()
        while True:
            try:
                return router.wait_ready(1.0)
            except DeadlineExceeded:
                if self._closing or silence.exceeds(START_LIMIT_S):
                    raise

    def _forget_asking(self) -> None:
        """The router may know nothing of what it was asked to do."""
        self._asked = dict.fromkeys(self._asked, float("-inf"))

    def _follow(self) -> None:
        """Asks the router for what differs between its servers and those that it is to have."""
        try:
            listed = self.router.workers()
        except SlimeError as error:
            logger.warning("%s does not list its servers: %s", self._name, error)
            return
        with self._notes:
            known = {worker.url for worker in listed}
            self._dismissed &= known  # the others are off already
            wanted, dismissed = dict(self._wanted), set(self._dismissed)
            here = {worker.url for worker in listed if worker.healthy} - dismissed
            off = [w for w in listed if w.url in dismissed or (w.url in self._asked and w.url not in self._wanted)]
            self._is_settled = not off and here.issuperset(wanted)
            self._notes.notify_all()
        for worker in off:
            self._take_off(worker)
        self._missing &= wanted.keys() - known
        for url, kind in wanted.items():
            if url not in known:
                self._ask_for(url, kind)

    def _take_off(self, worker: Worker) -> None:
        try:
            self.router.ask_to_remove(worker, CHANGE_LIMIT_S)
        except SlimeError as error:
            logger.warning("%s did not follow: %s", self._name, error)

    def _ask_for(self, url: str, kind: Kind) -> None:
        """Not too often: it may be on its way."""
        asked, now = self._asked.get(url), time.monotonic()
        if asked is not None and now - asked < ASK_AGAIN_S:
            return
        if asked is not None and asked > float("-inf") and url not in self._missing:
            logger.warning("%s has not taken %s in %.0f s; it is asked again", self._name, url, ASK_AGAIN_S)
            self._missing.add(url)
        self._asked[url] = now
        try:
            self.router.ask_to_add(url, CHANGE_LIMIT_S, kind)
        except SlimeError as error:
            logger.warning("%s did not follow: %s", self._name, error)

    def _leave(self, router: ExistingRouter) -> None:
        """None of the servers that were admitted here stays in a router that goes on."""
        deadline = time.monotonic() + LEAVE_LIMIT_S
        try:
            while left := [worker for worker in router.workers() if worker.url in self._asked]:
                if time.monotonic() > deadline:
                    logger.warning("%s still has %s", self._name, ", ".join(worker.url for worker in left))
                    return
                for worker in left:
                    self._take_off(worker)
                time.sleep(LOOK_SOON_S)
        except SlimeError as error:
            logger.warning("%s was not left without the servers: %s", self._name, error)


def _trouble(router: AnyRouter) -> str | None:
    """What is wrong with a router, in words; None if it answers."""
    if not router.alive:
        return "has ended"
    silence = Silence()
    while True:
        began = time.monotonic()
        status, text = request("GET", f"{router.url}/liveness", timeout_s=QUESTION_LIMIT_S)
        if status == 200:
            return None
        if status:
            return f"answers with status {status} when it is asked whether it lives"
        if time.monotonic() - began < QUESTION_LIMIT_S:
            return f"does not answer ({text})"
        if silence.exceeds(SILENCE_LIMIT_S):
            return f"did not answer within {silence.lasts_s:.0f} s"
