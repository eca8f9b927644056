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
import re
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.hf_config import HfConfig
from slime.core.text import listed, one_line
from slime.models import table_for
from slime.models.common.mtp import PREFIX, with_mtp
from slime.models.common.table import Entry, FamilyTable, Unit
from slime.rewards.environment import grader_environment
from slime.training.foreign.reader import FILES, HEADER, NETWORK, SYSTEM
from slime.training.state.shards import DTYPES, iter_full

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


# Where a Megatron-core checkpoint keeps a parameter: its names there are not those of a model's parameters.
#
# A layer or an expert has a tensor of its own (`decoder.layers.3.`, `experts.experts.5.`), or all of them share one
# with an axis for them in front. A norm ahead of a linear layer has the name of a part of it where Transformer Engine
# fuses the two. Gate and up of an MLP are one tensor, or two.

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.",
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}
"""Norm of a layer -> the linear layer behind it, which Transformer Engine has in one module with it."""
_LAYER, _LAYERS = re.compile(r"^decoder\.layers\.(\d+)\."), "decoder.layers."
_EXPERT, _EXPERTS = re.compile(r"\.experts\.local_experts\.(\d+)\."), ".experts.experts."
_GATED = re.compile(r"\.linear_fc1\.(weight|bias)$")
_NOT_WEIGHTS = re.compile(r"^(chained_\d+\.)?optimizer\.|^rng_state|^rerun_state_machine|\._extra_state(/|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a checkpoint, or one of those that are stacked in it."""

    key: str
    at: tuple[int, ...] = ()
    """Its numbers on the leading axes: layer, expert."""


class Places:
    """Where checkpoints keep the parameters of one model."""

    def __init__(self, table: FamilyTable) -> None:
        self._own = frozenset(table.megatron_names)

    def find(self, parameter: str, stored: Container[str]) -> tuple[Place, ...]:
        """Where a checkpoint that stores tensors of these names keeps a parameter; nothing if it does not.

        Several places lie end to end.
        """
        return next((form for form in self.forms(parameter) if all(place.key in stored for place in form)), ())

    def written(self, parameter: str) -> Place:
        """Where slime writes it: layers by themselves, norms in the names of Transformer Engine, experts stacked."""
        fused, linear = _fused(parameter)
        name = fused if linear in self._own else parameter
        *_, (key, at) = _unstacked(name, _EXPERT, _EXPERTS)
        return Place(key, at)

    def forms(self, parameter: str) -> Iterator[tuple[Place, ...]]:
        """All that it may look like."""
        for name in dict.fromkeys((parameter, _fused(parameter)[0])):
            for key, layer in _unstacked(name, _LAYER, _LAYERS):
                for stored, expert in _unstacked(key, _EXPERT, _EXPERTS):
                    at = layer + expert
                    yield (Place(stored, at),)
                    if _GATED.search(stored):
                        yield Place(f"{stored}_w", at), Place(f"{stored}_v", at)


def _fused(parameter: str) -> tuple[str, str]:
    """A norm's name as a part of the linear layer behind it, which layers of experts have, too, in Megatron's local
    layers; and the weight of that layer. What is not such a norm keeps its name.
    """
    for norm, linear in _FUSED.items():
        prefix, found, kind = parameter.rpartition(norm)
        if found:
            return f"{prefix}{linear}layer_norm_{kind}", f"{prefix}{linear}weight"
    return parameter, ""


def is_weight(key: str) -> bool:
    """Whether a tensor of a checkpoint belongs to the model, and not to the optimizer or the run."""
    return not _NOT_WEIGHTS.search(key)


def _unstacked(name: str, pattern: re.Pattern[str], stack: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A name as it is, and those under which what `pattern` counts is stacked: (name, number on the axis)."""
    found = pattern.search(name)
    yield name, ()
    if found is None:
        return
    before, number, behind = name[: found.start()], found[1], name[found.end() :]
    if pattern is _EXPERT:
        yield f"{before}{stack}{number}.{behind}", ()
    yield f"{before}{stack}{behind}", (int(number),)


# Weights of a Megatron-core `torch_dist` folder, as Hugging Face tensors: through the family's own weight table.

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
"""Megatron's file that names the newest checkpoint, by its number, and what it says of one that no training made."""
METADATA = ".metadata"


def checkpoint_in(folder: Path) -> Path | None:
    """Where the tensors are: `folder` itself, or the one that its tracker names; None if it is not a `torch_dist`."""
    if (folder / METADATA).is_file():
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        return None
    said = tracker.read_text(encoding="utf-8", errors="replace").strip()
    number = re.fullmatch(r"\d{1,12}", said)
    found = folder / (f"iter_{int(said):07d}" if number else RELEASE)
    if (said == RELEASE or number) and (found / METADATA).is_file():
        return found
    raise CheckpointError(
        f"got {tracker}, which says {said[:40]!r}, and no {found / METADATA}: the newest checkpoint is missing, or not "
        "of the format torch_dist; name the folder of another one"
    )


class TorchDist:
    """An opened folder: every parameter of the model is there, in its shape, and no weight besides.

    Raises `CheckpointError` before a tensor is read.
    """

    table: FamilyTable
    """With the layer of multi-token prediction if the folder has it."""

    def __init__(self, confined: Confined, folder: Path, hf_config: HfConfig) -> None:
        self._confined, self._folder = confined, folder
        stored = {name for name in confined.content if is_weight(name)}
        trained = any(name.startswith(PREFIX) for name in stored)
        self.table = table_for(with_mtp(hf_config) if trained else hf_config)
        places = Places(self.table)
        self._places = {entry.megatron: places.find(entry.megatron, stored) for entry in self.table.entries}
        self._require_whole(stored)
        for entry in self.table.entries:
            self._require_shape(entry)

    def iter_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) in table order, one at a time, in the types that are stored."""
        return iter_full(self.table, lambda entry: [self._parameter(entry)])

    def _parameter(self, entry: Entry) -> Tensor:
        """As the only one of its tensor-parallel ranks would hold it; a vocabulary may be padded."""
        parts = [self._confined.tensor(place.key, place.at) for place in self._places[entry.megatron]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _require_shape(self, entry: Entry) -> None:
        """A parameter, whose parts lie end to end, is as large as config.json says."""
        places = self._places[entry.megatron]
        shapes = [self._confined.content[place.key][1][len(place.at) :] for place in places]
        row, got = entry.row, [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
        wanted = list(row.shapes[0])
        if row.dim is not None:
            wanted[row.dim] = sum(shape[row.dim] for shape in row.shapes)
        padded = row.units == (Unit.VOCAB,) and got[1:] == wanted[1:] and got[0] > wanted[0]
        if got != wanted and not padded:
            said = ", ".join(place.key for place in places)
            raise CheckpointError(
                f"got {said} of shape {got} in {self._folder}; config.json implies {wanted}; checkpoint and "
                "--hf-checkpoint do not belong together"
            )

    def _require_whole(self, stored: set[str]) -> None:
        missing = [name for name, found in self._places.items() if not all(map(self._has, found or (None,)))]
        used = Counter(place.key for found in self._places.values() for place in set(found))
        axes = {place.key: len(place.at) for found in self._places.values() for place in found}
        unknown = [name for name in stored if name not in used]
        unknown += [f"{name} beyond {n}" for name, n in used.items() if self._count(name, axes[name]) > n]
        if missing or unknown:
            raise CheckpointError(
                f"got {self._folder} with {len(stored)} tensors of weights, which are not those of a "
                f"{self.table.family} of {self.table.sizes.num_layers} layers: missing {listed(missing)}, unknown "
                f"{listed(sorted(unknown))}; give the --hf-checkpoint that it was made of"
            )

    def _count(self, key: str, axes: int) -> int:
        """How many tensors are stacked on the leading axes of one."""
        return math.prod(self._confined.content[key][1][:axes])

    def _has(self, place: Place | None) -> bool:
        """Whether it is stored; of a stack, whether the axes have these numbers."""
        if place is None:
            return False
        shape = self._confined.content[place.key][1]
        return len(place.at) <= len(shape) and all(i < n for i, n in zip(place.at, shape, strict=False))
