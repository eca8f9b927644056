"""The parent's side of the confined process that opens pickles (`reader`): start, ask, end.

Consumes: nothing. Produces: tensors and JSON of one path. Waits for: a reply, at most `LIMIT_S` without a byte of it.
Is woken by: bytes on the process's stdout, or its end.

Invariants
1. Nothing that the process says is unpickled: it is JSON, or numbers of the type and shape that were announced.
2. After the block the process is gone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.text import one_line
from slime.rewards.environment import grader_environment
from slime.training.foreign.reader import FILES, HEADER, NETWORK, SYSTEM
from slime.training.state.tensor_file import DTYPES

LIMIT_S = 600.0
"""The longest silence: opening a large `.metadata`, reading the largest tensor from a slow disk."""
MAX_REPLY_BYTES = 1 << 30
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
_WHAT = {
    NETWORK: "the network (no user namespaces)",
    FILES: "other files (no Landlock)",
    SYSTEM: "other programs (no seccomp)",
}

logger = logging.getLogger(__name__)


class Confined:
    """One path, read in a process of its own. A context manager. Every method raises `CheckpointError`."""

    content: dict[str, Any]
    """What the process says of the whole path, once the block is entered."""
    lacks: tuple[str, ...]
    """From what this machine cannot hold the process: of `NETWORK`, `FILES`, `SYSTEM`."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    def __enter__(self) -> Self:
        imports = [os.path.abspath(entry) for entry in sys.path if entry]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slime.training.foreign.reader", str(os.getpid()), str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
            env=grader_environment(os.environ, offline=True) | {"PYTHONPATH": os.pathsep.join(imports)},
        )
        try:
            reply = self._ask({})[0]
            self.content = dict(reply["content"])
            self.lacks = tuple(name for name in _WHAT if name not in reply["held"])
        except BaseException:
            self._end()
            raise
        if self.lacks:
            lacks = " and ".join(_WHAT[name] for name in self.lacks)
            logger.warning(
                "%s is read as data alone, but in a process that this machine lets near %s", self._path, lacks
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def tensor(self, key: str, at: tuple[int, ...] = ()) -> Tensor:
        """A tensor of a folder, or the one of numbers `at` on its leading axes."""
        kind, shape = self.content[key]
        dtype, wanted = _DTYPES.get(str(kind)), tuple(int(size) for size in shape)[len(at) :]
        if dtype is None:
            raise CheckpointError(f"got {key} of {self._path} as {kind}, which is none of the types of weights")
        num_bytes = math.prod(wanted) * dtype.itemsize
        _, content = self._ask({"tensor": key, "at": at}, num_bytes)
        return torch.frombuffer(content, dtype=dtype).view(wanted) if num_bytes else torch.empty(wanted, dtype=dtype)

    def sample(self, number: int) -> Any:
        """The fields of a sample of a pickled rollout, as JSON says them."""
        return self._ask({"sample": number})[0]["sample"]

    def _ask(self, request: dict[str, Any], num_bytes: int = 0) -> tuple[dict[str, Any], bytearray]:
        """The reply, and the bytes behind it, which must be so many."""
        stdin, _ = self._pipes()
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        length, num_follow = HEADER.unpack(self._read(HEADER.size))
        if length > MAX_REPLY_BYTES:
            raise CheckpointError(f"got a description of {length} bytes of {self._path}; that is not a checkpoint")
        reply: dict[str, Any] = json.loads(self._read(length))
        if "error" in reply:
            what = f"{request['tensor']} in {self._path}" if "tensor" in request else str(self._path)
            raise CheckpointError(f"got {what}, which is not read: {one_line(str(reply['error']), 600)}")
        if num_follow != num_bytes:
            raise CheckpointError(f"got {num_follow} bytes for {request} of {self._path}, whose shape has {num_bytes}")
        return reply, self._read(num_bytes)

    def _read(self, length: int) -> bytearray:
        """So many bytes of its answer."""
        _, stdout = self._pipes()
        content = bytearray(length)
        view, at = memoryview(content), 0
        while at < length:
            if not select.select([stdout], [], [], LIMIT_S)[0]:
                raise CheckpointError(f"got nothing of {self._path} for {LIMIT_S:g} s; look at its disk")
            num = os.readv(stdout.fileno(), [view[at:]])
            if not num:
                raise self._died()
            at += num
        return content

    def _died(self) -> CheckpointError:
        code = self._process.wait()
        return CheckpointError(
            f"got {self._path}, over which the process that reads it ended (status {code}); the file is damaged, or "
            "memory was short"
        )

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None and self._process.stdout is not None, "started with both pipes"
        return self._process.stdin, self._process.stdout

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes():
            pipe.close()
