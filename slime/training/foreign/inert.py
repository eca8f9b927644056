"""Pickles that run nothing: they may name a short list of harmless things, and classes are replaced by records.

Used in the confined process alone (`reader`), which is the second wall, not the first.

Invariants
1. No module is imported because a pickle names it, and no attribute of one is looked up but the dtypes of torch.
2. An object of a class of `RECORDED` is a `Record`: what its constructor was given, and its state. No code of the class
   runs, not even its import.
3. What is neither recorded nor listed is refused, by name.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import re
from typing import Any, BinaryIO

import numpy
import torch

RECORDED = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
        "megatron.core.dist_checkpointing.strategies.torch",
        "torch.serialization",
        "pathlib",
        "pathlib._local",
        "slime.utils.types",
        "slime.core.sample",
    }
)
"""Modules whose classes are replaced by records."""


class Record:
    """In place of an object: data alone."""

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """By name, of an object whose state is its fields."""
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


@functools.cache
def record_class(module: str, name: str) -> type[Record]:
    """A class of records, for one class of a pickle."""
    return type(name, (Record,), {"__module__": module})


def _nested(owner: Any, name: Any) -> type[Record]:
    """In place of `getattr`, by which older pickles name a class within a class."""
    if not (isinstance(owner, type) and issubclass(owner, Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("it asks for an attribute of what is not a class of records")
    return record_class(owner.__module__, f"{owner.__name__}.{name}")


_NUMPY = {
    (f"{place}.multiarray", name): getattr(numpy._core.multiarray, name)  # type: ignore[attr-defined]
    for place in ("numpy.core", "numpy._core")
    for name in ("_reconstruct", "scalar")
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **_NUMPY,
    ("numpy", "ndarray"): numpy.ndarray,
    ("numpy", "dtype"): numpy.dtype,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): torch._utils._rebuild_tensor_v3,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): lambda text, _encoding: text.encode("latin1"),
    **{(place, "getattr"): _nested for place in ("builtins", "__builtin__")},
    **{(place, name): kind for place in ("builtins", "__builtin__") for name, kind in (("set", set), ("list", list))},
}
"""(module, name) -> what it is here."""


class Unpickler(pickle.Unpickler):
    """Reads a pickle as data. Raises `pickle.UnpicklingError` that says what it must not name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in RECORDED:
            return record_class(module, name)
        if module == "torch" and isinstance(kind := vars(torch).get(name), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is neither a weight nor a sample")


def load(file: BinaryIO, **_options: Any) -> Any:
    """A pickle that is a file by itself; this module is a `pickle_module` for `torch.load`."""
    return Unpickler(file).load()


def load_archive(file: BinaryIO) -> Any:
    """What `torch.save` wrote: objects with tensors. Raises `pickle.UnpicklingError` for another kind of file."""
    import sys
    import zipfile

    try:
        names = {name.rpartition("/")[2] for name in zipfile.ZipFile(file).namelist()}
    except zipfile.BadZipFile as error:
        raise pickle.UnpicklingError(f"it is not a file of torch.save since 1.6 ({error})") from None
    if "constants.pkl" in names or "data.pkl" not in names:
        raise pickle.UnpicklingError("it is a program of TorchScript, not a file of torch.save")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=sys.modules[__name__])


def tensor_of(content: bytes) -> torch.Tensor:
    """One tensor that `torch.save` wrote. Raises `pickle.UnpicklingError` for anything else."""
    try:
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose text says how to load it all the same
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(
            f"it names {named[1]}, which is not a weight" if named else "it is not a tensor of torch.save"
        ) from None
    if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
        raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}, not a plain tensor")
    return loaded.detach()
