"""The agent on an engine's host. Updates the local checkpoint to the trainer's version and has the engine load it.

The engine is an ordinary server, and the agent calls its control routes as a trainer would. The agent opens no port. It
polls the shared folder every `POLL_S` for calls, which arrive one at a time (`slime.weights.delta.mailbox`). Each
request to the engine has a timeout.

Invariants
1. The engine loads a checkpoint only after it was verified against the call's manifest. This covers every tensor that
   was copied or changed for this version, or all tensors if there was no change.
2. `apply` always pauses the engine before loading, because the trainer that paused it may be gone. The engine serves
   again only after a separate `resume` from a caller that has verified its digests.
3. Calls refer to versions, never to paths or code.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime.core.engine_interface import EngineControl
from slime.core.errors import EngineError, SlimeError
from slime.weights.delta.folder import Base, folder_of
from slime.weights.delta.local_checkpoint import LocalCheckpoint
from slime.weights.delta.mailbox import POLL_S, AgentMailbox, mailbox

logger = logging.getLogger(__name__)

KEEP_REQUESTS = "in_place"
"""Pause mode used by the agent. It preserves the requests that the trainer's own pause kept."""
PreRead = Callable[[str, int], object]
"""A hook, called with (folder of the version, version number) before the version is read."""


class WeightsAgent:
    def __init__(
        self,
        folder: Path,
        name: str,
        control: EngineControl,
        local: Path,
        *,
        pre_read: PreRead | None = None,
        on_note: Callable[[str], object] = lambda doing: None,
    ) -> None:
        """`folder`: the shared folder; `name`: the engine's address as seen by the trainer; `local`: a folder on this
        host; `on_note`: called with the name of each task before it starts.
        """
        self._folder, self._control, self._pre_read = folder, control, pre_read
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time(), "engine": control.url}
        self._box = AgentMailbox(mailbox(folder, name), about)
        self._on_note = on_note
        self.local = LocalCheckpoint(local, folder, on_note)
        self._methods: Mapping[str, Callable[..., Any]] = {
            "apply": self.apply,
            "pause": lambda mode: control.pause(str(mode)),
            "flush_cache": control.flush_cache,
            "begin_update": control.begin_update,
            "end_update": control.end_update,
            "weight_checksums": self._checksums,
            "resume": control.resume,
        }

    def run(self, over: threading.Event) -> None:
        try:
            while not over.is_set():
                self.answer_one()
                over.wait(POLL_S)
        finally:
            self._box.close()

    def answer_one(self) -> bool:
        """Answers the latest call if it is still unanswered. Returns whether there was one."""
        pending = self._box.pending()
        if pending is None:
            return False
        own, method, arguments, sender = pending
        self._box.note(method)
        try:
            if method not in self._methods:
                raise EngineError(f"unknown method {method}; supported: {', '.join(self._methods)}")
            self._control.speak_for(sender)
            result = self._methods[method](**arguments)
        except Exception as error:  # every error is returned to the caller
            if not isinstance(error, SlimeError):
                logger.exception("call of %s failed", method)
            self._box.answer(own, error=f"{type(error).__name__}: {error}")
        else:
            self._box.answer(own, result=result)
        self._box.note("waiting")
        return True

    def apply(self, version: int, digest: str) -> dict[str, Any]:
        """Updates the local checkpoint to `version`, pauses the engine and has it load the checkpoint."""
        began = time.monotonic()
        if self._pre_read is not None:
            self._pre_read(str(self._folder / folder_of(int(version))), int(version))
        done = self.local.bring_to(Base(int(version), str(digest)))
        applied_s = time.monotonic() - began
        self._on_note("loading")
        self._control.pause(KEEP_REQUESTS)
        with self.local.reading() as model:
            self._control.update_weights_from_disk(
                model_path=str(model.absolute()), flush_cache=False, weight_version=int(version)
            )
        logger.info("version %d: %s in %.2f s, loaded in %.2f s", version, done, applied_s, time.monotonic() - began)
        return asdict(done)

    def _checksums(self) -> list[dict[str, Any]]:
        return [asdict(rank) for rank in self._control.weight_checksums()]
