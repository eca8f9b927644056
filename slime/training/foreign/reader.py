"""The confined process: opens one `torch_dist` folder or one pickled rollout, and answers with JSON and plain bytes.

Consumes: requests of `confined.Confined`, a line of JSON each, from stdin. Produces: for each a frame on stdout:
lengths, JSON, and for a tensor its bytes. Waits for: the next request. Is woken by: a line, or the end of stdin.

Invariants
1. It has left the network, and confined itself to the one path and to libraries, before a byte of the path is read. It
   starts no program, opens no socket and sees no other process.
2. Nothing that a pickle names is imported or called (`inert`); no file is written; memory is bounded.
3. Every request gets a reply; what is wrong with a file is a reply, too.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from slime.core.processes import die_with_parent

HEADER = struct.Struct("<QQ")
"""Lengths of the JSON and of the bytes behind it."""
NETWORK, FILES, SYSTEM = "network", "files", "system"
"""What it is held from, programs and sockets with the last; a name is missing in its first reply where the kernel does
not give it."""
SPARE_BYTES = 4 << 30
"""Address space beside what the libraries take and what the files are."""
MAX_DEPTH = 200
VALUES_PER_BYTE, SPARE_VALUES = 4, 100_000
"""Of a sample, or of what is said of all: so many may a file say; one that names nothing twice says one a byte."""
_METADATA, _CHUNKS_HELD = ".metadata", 2
_Chunk: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], Any]"


class Folder:
    """A `torch_dist` folder: which tensors it stores, and where."""

    def __init__(self, folder: Path) -> None:
        from slime.training.foreign import inert

        self._folder = folder
        self._held: dict[tuple[str, int], Any] = {}
        with open(folder / _METADATA, "rb") as file:
            fields = inert.load(file).fields
        infos = {(i.fields["fqn"], i.fields.get("offset")): info for i, info in fields["storage_data"].items()}
        self.tensors: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._chunks: dict[str, list[_Chunk]] = {}
        for key, stored in fields["state_dict_metadata"].items():
            if type(stored).__name__ != "TensorStorageMetadata":
                continue
            self.tensors[key] = (stored.fields["properties"].state[0], tuple(stored.fields["size"]))
            places = [(tuple(c.fields["offsets"]), tuple(c.fields["sizes"])) for c in stored.fields["chunks"]]
            self._chunks[key] = [(start, size, infos.get((key, start))) for start, size in dict(places).items()]

    def describe(self) -> dict[str, Any]:
        """Name -> type and shape of each tensor."""
        return {name: [str(kind).removeprefix("torch."), size] for name, (kind, size) in self.tensors.items()}

    def read(self, key: str, at: tuple[int, ...]) -> Any:
        """A tensor, without its leading axes, on which it is the one of number `at`."""
        import torch

        kind, size = self.tensors[key]
        axes = len(at)
        out = torch.empty(size[axes:], dtype=kind)
        missing = out.numel()
        for start, length, info in self._chunks[key]:
            inside = [number - first for number, first in zip(at, start, strict=False)]
            if any(not 0 <= i < n for i, n in zip(inside, length, strict=False)):
                continue
            part = self._chunk(info, kind, length)
            for number in inside:
                part = part[number]
            target = out
            for axis, (first, num) in enumerate(zip(start[axes:], length[axes:], strict=True)):
                target = target.narrow(axis, first, num)
            target.copy_(part)
            missing -= part.numel()
        if missing:
            raise ValueError(f"{missing} of its {out.numel()} numbers are stored nowhere")
        return out

    def _chunk(self, info: Any, kind: Any, size: tuple[int, ...]) -> Any:
        """A stored part; the last few stay, since several experts may be in one."""
        from slime.training.foreign import inert

        fields = info.fields
        name, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if fields.get("transform_descriptors"):
            raise ValueError(f"{name} is compressed ({fields['transform_descriptors']}), which is not read")
        if Path(name).name != name:
            raise ValueError(f"it is said to be in {name}, outside of the folder")
        if (name, offset) in self._held:
            return self._held[name, offset]
        with open(self._folder / name, "rb") as file:
            file.seek(offset)
            tensor = inert.tensor_of(file.read(length))
        if tensor.dtype != kind or tuple(tensor.shape) != size:
            raise ValueError(f"{name} holds {tensor.dtype} {tuple(tensor.shape)} instead of {kind} {size}")
        while len(self._held) >= _CHUNKS_HELD:
            self._held.pop(next(iter(self._held)))
        self._held[name, offset] = tensor
        return tensor


class Plain:
    """Makes of one value what JSON can say of it, of no more numbers and letters than `most`: a pickle that names one
    list many times is small, and all of it is not. Raises `ValueError` that says where it cannot.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def of(self, value: Any, where: str = "it", depth: int = 0) -> Any:
        """`where`: its name; `depth`: how many are around it."""
        from slime.training.foreign.inert import Array, Record

        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"{where} is beyond {self._most:,} values and letters, or {MAX_DEPTH} values around it")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            return {self.of(str(key), where): self.of(held, f"{where}.{key}", depth + 1) for key, held in value.items()}
        if isinstance(value, list | tuple | set):
            return [self.of(held, f"{where}[{i}]", depth + 1) for i, held in enumerate(value)]
        if isinstance(value, Record):
            enum = value.state is None and len(value.given) == 1
            return self.of(value.given[0] if enum else value.fields, where, depth + 1)
        if isinstance(value, Array) or hasattr(value, "untyped_storage"):  # or a tensor
            return self.of(value.tolist(), where, depth + 1)
        raise ValueError(f"{where} is of {type(value).__name__}, which is not JSON")


class Dump:
    """A pickled rollout."""

    def __init__(self, path: Path) -> None:
        from slime.training.foreign import inert

        with open(path, "rb") as file:
            held = inert.load_archive(file)
        if not isinstance(held, dict) or "samples" not in held:
            raise ValueError("it is not a rollout: a dict with samples")
        self._samples = list(held["samples"])
        self._most = VALUES_PER_BYTE * path.stat().st_size + SPARE_VALUES
        said = ((key, value) for key, value in held.items() if key in ("rollout_id", "metadata"))
        self._other = {key: Plain(self._most).of(value, key) for key, value in said}

    def describe(self) -> dict[str, Any]:
        """All but the samples, and how many there are."""
        return {**self._other, "num_samples": len(self._samples)}

    def sample(self, number: int) -> Any:
        """The fields of a sample; its memory is given back."""
        held, self._samples[number] = self._samples[number], None
        return Plain(self._most).of(held, f"sample {number}")


class Server:
    """Answers requests about one path, which the first one opens."""

    def __init__(self, path: Path, held: list[str]) -> None:
        self._path, self._held = path, held
        self._opened: Folder | Dump | None = None

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """(reply, tensor or None)"""
        if self._opened is None:
            self._opened = Folder(self._path) if self._path.is_dir() else Dump(self._path)
        if "tensor" in request and isinstance(self._opened, Folder):
            tensor = self._opened.read(request["tensor"], tuple(request["at"]))
            return {}, tensor
        if "sample" in request and isinstance(self._opened, Dump):
            return {"sample": self._opened.sample(request["sample"])}, None
        return {"held": self._held, "content": self._opened.describe()}, None


def limits_of(path: Path) -> dict[int, int]:
    """No file, few open at a time, no process, no more memory than the largest file explains."""
    files = list(path.iterdir()) if path.is_dir() else [path]
    largest = max((file.stat().st_size for file in files), default=0)
    with open("/proc/self/statm") as file:
        own = int(file.read().split()[0]) * resource.getpagesize()
    factor = 4 if path.is_dir() else 32  # numbers of a pickle are objects
    return {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_AS: own + SPARE_BYTES + factor * largest,
    }


def serve(requests: BinaryIO, replies: BinaryIO, server: Server) -> None:
    """One reply for each request, until there are no more."""
    for line in requests:
        tensor = None
        try:
            reply, tensor = server.answer(json.loads(line))
            text = json.dumps(reply).encode()
        except (pickle.UnpicklingError, OSError, ValueError, RuntimeError, MemoryError) as error:
            text = json.dumps({"error": f"{error}" or type(error).__name__}).encode()
        except Exception as error:  # whatever a damaged or hostile file makes of it
            text = json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()
        content = b"" if tensor is None else memoryview(_bytes_of(tensor))
        replies.write(HEADER.pack(len(text), len(content)) + text)
        replies.write(content)
        replies.flush()


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def shut_in(path: Path) -> list[str]:
    """Gives up all but the path and libraries, while there is one thread; from what it is held then.

    It goes on in a child, whose end and status are those of this process.
    """
    from slime.core import confine

    left = confine.leave(confine.NEW_NETWORK | confine.NEW_IPC | confine.NEW_PROCESSES) is not None
    if left and (child := os.fork()):  # which is the first of the new namespace of processes
        os.closerange(0, 64)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    if left:
        die_with_parent(None)
    from slime.training.foreign import inert  # noqa: F401  (its libraries, before the limits)

    here = [str(Path(entry)) for entry in sys.path if entry]
    files = {**confine.readable_libraries(here), str(path): confine.READ}
    calls = confine.Calls(programs=False)
    missing = confine.give_up(limits=limits_of(path), calls=calls, user=None, files=files)
    held = {NETWORK: left, FILES: confine.LANDLOCK not in missing, SYSTEM: confine.CALLS not in missing}
    return [name for name, is_so in held.items() if is_so]


def main() -> None:
    """Entry of `python -m slime.training.foreign.reader PARENT_PID PATH`."""
    die_with_parent(int(sys.argv[1]))
    path = Path(sys.argv[2])
    replies, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    held = shut_in(path)
    serve(requests, replies, Server(path, held))


if __name__ == "__main__":
    main()
