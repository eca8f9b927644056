"""A grader process: reads samples from stdin and writes scores to stdout, as frames. It can be killed at any time.

Consumes: frames from `grader_process.GraderProcess`, which starts it and owns both pipes. The first frame configures
the process; every later frame is a request. Produces, for each request: a frame with the time limit when work starts;
for a compute-only grader, another frame when it starts on the answer; then one reply. Waits for: the next frame, and
the running graders (async ones until their time limit, others until the parent kills this process). Woken by: frames.
The worker trusts the parent, whose first frame contains pickled args for users' functions. Output of graders and models
is never unpickled; replies are JSON.

Invariants
1. The process does not outlive its parent: the kernel sends SIGKILL when the parent thread exits, or stdin reaches EOF.
2. Anything that a grader prints goes to stderr. Graders do not know the file descriptor of the reply pipe.
3. Every request gets a reply unless the process dies, because every exception becomes a reply, even `SystemExit`. It is
   blamed on the answer (`ungradable`) only if it was raised while the grader processed the answer, and not because of
   the machine, the installation or the row.
4. A `held` process gives up access to everything but libraries (`grader_confinement`) before it sees an answer, and
   never runs an answer as a program.
5. Changes that a user's function makes to a sample's metadata are returned with the reply, whether or not the sample is
   scored, because judges store their explanations there.
6. Up to `CONCURRENT_PER_PROCESS` async graders run concurrently, even if each blocks in a thread (`to_thread`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import inspect
import json
import os
import pickle
import resource
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np

from slime.core import confine
from slime.core.blame import asks_again, error_line, raised_by_user
from slime.core.columns import Column
from slime.core.engine_interface import ASK_AGAIN
from slime.core.processes import die_with_parent
from slime.core.sample import Sample
from slime.rewards.grader_confinement import Gate, shut_in
from slime.rewards.graders import NOT_OF_THE_ANSWER, Grader, make_grader
from slime.rewards.scores import MAX_RESULT_BYTES, Scored, Unscored, check_reward

ONLINE, OFFLINE, HELD = "online", "offline", "held"
"""Kinds of processes. `ONLINE` has network access and the settings of the run, `OFFLINE` has neither, and `HELD` can
access only libraries."""
HEADER = struct.Struct("<I")
"""Length in bytes of the JSON that follows. The columns that a request lists in `columns` follow its JSON."""
CONCURRENT_PER_PROCESS = 64
"""Maximum number of concurrent async graders per process, and of threads for their blocking calls."""
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Maximum size of a file that a grader writes."""


def limit_resources(memory_limit_bytes: int | None) -> None:
    """Limits memory and file sizes, and disables core dumps. Exceeding the memory limit raises `MemoryError`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    if memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))


def load_custom(path: str) -> Callable[..., Any]:
    """Loads a user's reward function for samples or groups. Raises `HookError`."""
    from slime.settings.hook_contracts import load_hook

    return load_hook(path, "custom_rm")


def _own(settings: object) -> object:
    """Returns a copy of the settings for one call of a user's function, which may set attributes on it."""
    from slime.settings import for_hook

    return for_hook(settings)


class Server:
    """Serves requests: synchronous graders one at a time, async graders concurrently."""

    def __init__(self, replies: BinaryIO, *, parent: int, kind: str) -> None:
        self.replies, self.parent, self.kind = replies, parent, kind
        self.gate: Gate | None = None
        """Set only in a `held` process."""
        self.args: object = None
        self.limit_s = 0.0
        self.functions: dict[str, Callable[..., Any]] = {}
        """Import path -> user's function."""
        self.graders: dict[str, Grader] = {}
        """`rm_type` -> grader."""

    def configure(self, message: dict[str, Any]) -> tuple[str, ...]:
        """Applies the settings in the first frame. Returns the parts of the confinement that this machine lacks."""
        sys.path[:0] = [p for p in message["sys_path"] if p not in sys.path]
        self.args = pickle.loads(base64.b64decode(message["args"])) if message["args"] else None
        self.limit_s = message["limit_s"]
        limit_resources(message["memory_limit_bytes"])
        with contextlib.suppress(Exception):  # grading a sample fails again and reports the reason
            if message["custom"]:
                self.function(message["grader"])
            else:
                self.grader(message["grader"], message["settings"]).warm_up()
        if self.kind != HELD:
            return ()
        for name, settings in message["others"]:
            with contextlib.suppress(Exception):  # as above; load it now, because `shut_in` makes its files unreadable
                self.grader(name, settings)
        missing = shut_in()
        die_with_parent(self.parent)  # again, because changing the user cancels the first call
        self.gate = Gate()
        return missing

    def reply(self, request_id: int, answer: dict[str, Any]) -> None:
        data = json.dumps({"id": request_id, **answer}, allow_nan=False).encode()
        self.replies.write(HEADER.pack(len(data)) + data)
        self.replies.flush()

    async def score(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs the requested grader. The reply contains the reason for any failure, and the metadata if a user's
        function changed it."""
        samples: list[Sample] = []
        if not request["custom"]:
            return await self._score(request, samples)
        given = [copy.deepcopy(sample["metadata"]) for sample in request["samples"]]
        answer = await self._score(request, samples)
        try:
            changed = [noted(*pair) for pair in zip((s.metadata for s in samples), given, strict=False)]
        except (TypeError, ValueError, RecursionError) as problem:
            reason = (
                f"the reward function changed sample.metadata to a value that cannot be stored: {str(problem)[:200]}"
            )
            return {**answer, "scores": [{"unscored": reason}] * len(given)}
        return {**answer, "metadata": changed}

    async def _score(self, request: dict[str, Any], samples: list[Sample]) -> dict[str, Any]:
        """Runs the requested grader. Appends the samples of the request to `samples` for the caller."""
        limit_s, failure, memory = self.limit_s, "unscored", False
        try:
            samples += [Sample.from_dict(s) for s in request["samples"]]
            grader = None if request["custom"] else self.grader(request["grader"], request["settings"])
            limit_s = self.limit_s if grader is None else grader.limit_of(samples[0], self.limit_s)
            self.reply(request["id"], {"limit_s": limit_s, "used_s": time.process_time()})
            if grader is not None:
                grader.prepare(samples[0])
                if request["computes"]:
                    self.reply(request["id"], {"looks_since_s": time.process_time()})
                    failure = "ungradable"
                with self.gate.closed() if self.gate else contextlib.nullcontext():
                    result = grader.grade(samples[0], limit_s)
            else:
                function = self.function(request["grader"])
                result = function(_own(self.args), samples if request["group"] else samples[0])
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(_contained(result), limit_s)
            values = result if request["group"] else [result]
            if not isinstance(values, list | tuple) or len(values) != len(samples):
                size = len(values) if isinstance(values, list | tuple) else type(values).__name__
                reason = f"the group grader returned {size}, expected {len(samples)} rewards"
                return {"scores": [{"unscored": reason}] * len(samples)}
            return {"scores": [encode(value, failure) for value in values]}
        except TimeoutError:
            reason, failure = f"timeout after {limit_s:g} s", "unscored"
        except (MemoryError, RecursionError) as problem:
            memory = isinstance(problem, MemoryError)
            reason = f"the grader ran out of {'memory' if memory else 'stack'}"
        except BaseException as problem:
            if isinstance(problem, asyncio.CancelledError) and _is_ended():
                raise
            problem = problem.error if isinstance(problem, _Exited) else problem
            traceback.print_exc(limit=8)
            reason = f"the grader raised {error_line(problem, 300)}{raised_by_user(problem)}"
            if asks_again(problem) and ASK_AGAIN not in reason:
                reason = f"{reason}; {ASK_AGAIN}"
            failure = "unscored" if isinstance(problem, NOT_OF_THE_ANSWER) else failure
        return {"scores": [{failure: reason}] * len(request["samples"]), "out_of_memory": memory}

    def function(self, path: str) -> Callable[..., Any]:
        if path not in self.functions:
            self.functions[path] = load_custom(path)
        return self.functions[path]

    def grader(self, name: str, settings: dict[str, Any]) -> Grader:
        if name not in self.graders:
            self.graders[name] = make_grader(name, settings)
        return self.graders[name]


class _Exited(Exception):
    """Wraps a `BaseException` from a grader, which would otherwise stop the event loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _contained(work: Awaitable[Any]) -> Any:
    """Awaits `work`. Converts `SystemExit` and the like, which would stop the process, to `_Exited`."""
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _Exited(error) from error


def _is_ended() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def noted(metadata: dict[str, Any], given: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the metadata that a user's function left in a sample as plain JSON; None if it is unchanged.

    Raises `TypeError` or `ValueError` if it is not JSON, or if it grew by more than `MAX_RESULT_BYTES`.
    """
    if metadata == given:
        return None
    if not isinstance(metadata, dict):
        raise TypeError(f"it is now of type {type(metadata).__name__}, not dict")
    text = json.dumps(metadata, allow_nan=False)
    if (grown := len(text) - len(json.dumps(given))) > MAX_RESULT_BYTES:
        raise ValueError(f"it grew by {grown} bytes, more than {MAX_RESULT_BYTES}")
    kept: dict[str, Any] = json.loads(text)
    return kept


def encode(value: Any, failure: str) -> dict[str, Any]:
    """Encodes a reward for the reply. If it is invalid, returns the reason under the key `failure`."""
    score = check_reward(value)
    if isinstance(score, Unscored):
        return {failure: score.reason}
    assert isinstance(score, Scored), score
    try:
        size = len(json.dumps(score.value, allow_nan=False))
    except (TypeError, ValueError) as problem:
        return {failure: f"the grader returned a dict that is not JSON: {str(problem)[:200]}"}
    if size > MAX_RESULT_BYTES:
        return {failure: f"the grader returned {size} bytes, more than {MAX_RESULT_BYTES}"}
    return {"value": score.value}


async def read_columns(message: dict[str, Any], reader: asyncio.StreamReader) -> None:
    """Puts the columns that follow a request into its samples. A field becomes a list when the grader reads it."""
    for number, name, kind, num_values, num_counts in message.pop("columns", ()):
        values = np.frombuffer(await reader.readexactly(num_values * np.dtype(kind).itemsize), kind)
        counts = None
        if num_counts is not None:
            counts = np.frombuffer(await reader.readexactly(num_counts * np.dtype(np.int32).itemsize), np.int32)
        message["samples"][number][name] = Column(values, counts)


async def serve(requests: BinaryIO, replies: BinaryIO, *, parent: int, kind: str) -> None:
    """Reads frames until EOF. Requests marked `concurrent` run as tasks; others block the loop."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(CONCURRENT_PER_PROCESS, thread_name_prefix="grader"))
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
    server = Server(replies, parent=parent, kind=kind)
    tasks: set[asyncio.Task[None]] = set()

    async def handle(request: dict[str, Any]) -> None:
        server.reply(request["id"], await server.score(request))

    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            message = json.loads(await reader.readexactly(length))
            await read_columns(message, reader)
            if "limit_s" in message:
                missing = server.configure(message)
                server.reply(message["id"], {"scores": [], "missing": missing})
            elif message["concurrent"]:
                task = asyncio.create_task(handle(message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            else:
                await handle(message)


def main() -> None:
    """`python -m slime.rewards.grader_worker PARENT_PID online|offline|held`."""
    parent, kind = int(sys.argv[1]), sys.argv[2]
    if kind == OFFLINE:
        confine.leave(confine.NEW_NETWORK)
        confine.Calls(namespaces=True).give_up()  # also blocks Unix sockets; the code sandbox still needs namespaces
    die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "wb")
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    asyncio.run(serve(requests, replies, parent=parent, kind=kind))
    os._exit(0)  # a thread left behind by a grader must not keep the process alive


if __name__ == "__main__":
    main()
