"""Parses pickles without executing them: only a few harmless names are allowed, and classes are replaced by records.

The loaders of torch and numpy are not used, because they call functions named in the file and trust its offsets.
Archives are read as zip files. Tensors and arrays are built from plain bytes after checking their size and dtype.

Invariants
1. A name in a pickle never triggers an import. The only attributes looked up are torch's dtypes.
2. An instance of a class from a `RECORDED` module becomes a `Record` of constructor arguments and state. The class is
   not imported.
3. Any other name is rejected unless it is in `_ALLOWED`: containers, and functions here that a pickle cannot modify.
4. Tensors and arrays contain only numbers and never extend beyond their bytes in the file.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import re
import zipfile
from collections.abc import Callable
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
    """Stand-in for an object of any recorded class; contains only data."""

    def __init__(self, *given: Any) -> None:
        self.given, self.state = given, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        state = self.state[1] if isinstance(self.state, tuple) and len(self.state) == 2 else self.state
        return state if isinstance(state, dict) else {}


@functools.cache
def record_class(module: str, name: str) -> type[Record]:
    return type(name, (Record,), {"__module__": module})


def _nested(owner: Any, name: Any) -> type[Record]:
    """Stands in for `getattr`, which older pickles use to reference nested classes."""
    if not (isinstance(owner, type) and issubclass(owner, Record) and isinstance(name, str)):
        raise pickle.UnpicklingError("it references an attribute of an object that is not a recorded class")
    return record_class(owner.__module__, f"{owner.__name__}.{name}")


class _Function:
    """Wraps a function of this module so that a pickle can call it but not set its attributes."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> Any:
        return self._function(*given)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets an attribute of a function")


# --- numpy ------------------------------------------------------------------------------------------------------------

_NUMBERS = re.compile(r"[<>=|]?([fiu][1248]|b1|\?)")


class _Dtype:
    """Stand-in for `numpy.dtype` that accepts only plain numbers."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_options: Any) -> None:
        if not isinstance(code, str) or _NUMBERS.fullmatch(code) is None:
            raise pickle.UnpicklingError(f"it contains an array with dtype {code!r}, but only numbers are supported")
        self._code, self._order = code.lstrip("<>=|"), "="

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError("it contains an array with an unknown byte order")
        self._order = state[1]

    def made(self) -> numpy.dtype[Any]:
        return numpy.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]


class Array:
    """Stand-in for `numpy.ndarray`, because a pickle could point the real class at arbitrary memory."""

    __slots__ = ("_array",)

    def __init__(self, *_shape_and_type: Any) -> None:
        self._array: Any = numpy.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, content = state
        self._array = _numbers(dtype, content).reshape(shape, order="F" if by_columns else "C")

    def tolist(self) -> Any:
        return self._array.tolist()


def _numbers(dtype: Any, content: Any) -> Any:
    if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
        raise pickle.UnpicklingError("it contains an array of objects, but only numbers are supported")
    return numpy.frombuffer(content, dtype.made())


def _number(dtype: Any, content: Any) -> Any:
    """Stands in for `numpy.core.multiarray.scalar`."""
    return _numbers(dtype, content).reshape(()).tolist()


# --- tensors ----------------------------------------------------------------------------------------------------------

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Storage:
    """The bytes of one or more tensors."""

    __slots__ = ("content", "dtype")

    def __init__(self, dtype: torch.dtype, content: bytearray) -> None:
        self.dtype, self.content = dtype, content


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """Stands in for `torch._utils._rebuild_tensor_v2` and for `_v3`, which also passes the dtype."""
    dtype = next((kind for kind in rest if isinstance(kind, torch.dtype)), None)
    if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
        raise pickle.UnpicklingError("it contains a malformed tensor")
    dtype = dtype or storage.dtype
    if 0 in size:  # torch.frombuffer rejects empty buffers
        return torch.empty(tuple(size), dtype=dtype)
    return torch.frombuffer(storage.content, dtype=dtype).as_strided(tuple(size), tuple(stride), offset)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (f"{place}.multiarray", name): _Function(make)
        for place in ("numpy.core", "numpy._core")
        for name, make in (("_reconstruct", Array), ("scalar", _number))
    },
    ("numpy", "ndarray"): _Function(Array),
    ("numpy", "dtype"): _Function(_Dtype),
    ("torch", "Size"): _Function(tuple),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(lambda tensor, *_given: tensor),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _Function(lambda text, _encoding: text.encode("latin1")),
    **{(place, "getattr"): _Function(_nested) for place in ("builtins", "__builtin__")},
    **{(place, name): kind for place in ("builtins", "__builtin__") for name, kind in (("set", set), ("list", list))},
    **{("torch", name): kind for name, kind in _STORAGES.items()},
    ("torch", "UntypedStorage"): torch.uint8,
    ("torch.storage", "UntypedStorage"): torch.uint8,
}
"""(module, name) -> replacement."""


class Unpickler(pickle.Unpickler):
    """Parses a pickle as data. Raises `pickle.UnpicklingError` for a name that is not allowed."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module in RECORDED:
            return record_class(module, name)
        if module == "torch" and isinstance(kind := vars(torch).get(name), torch.dtype):
            return kind
        raise pickle.UnpicklingError(f"it references {module}.{name}, which is not part of any weight or sample")


class _Archive(Unpickler):
    """Reads the `torch.save` format of torch 1.6 and later: a zip file with a pickle and the bytes of each storage."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        self._archive, self._folder = archive, folder
        self._storages: dict[str, bytearray] = {}

    def persistent_load(self, named: Any) -> _Storage:
        kind, dtype, key = named[:3]
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str) or not key.isdecimal():
            raise pickle.UnpicklingError("it references a storage in a form that torch.save does not write")
        if key not in self._storages:
            self._storages[key] = bytearray(self._archive.read(f"{self._folder}/data/{key}"))
        return _Storage(dtype, self._storages[key])


def load(file: BinaryIO) -> Any:
    return Unpickler(file).load()


def load_archive(file: BinaryIO) -> Any:
    """Reads a `torch.save` file. Raises `pickle.UnpicklingError` for any other file."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            folders = [name.removesuffix("/data.pkl") for name in names if name.count("/") == 1 and "/data.pkl" in name]
            if any(name.endswith("/constants.pkl") for name in names) or len(folders) != 1:
                raise pickle.UnpicklingError("it is a TorchScript program, not a torch.save file")
            order = f"{folders[0]}/byteorder"
            if order in names and archive.read(order) != b"little":
                raise pickle.UnpicklingError("its byte order is not little-endian")
            return _Archive(archive, folders[0]).load()
    except (zipfile.BadZipFile, KeyError, NotImplementedError) as error:
        raise pickle.UnpicklingError(f"it is not a complete torch.save file of torch 1.6 or later ({error})") from None


def tensor_of(content: bytes) -> torch.Tensor:
    """Returns the tensor in a `torch.save` file. Raises `pickle.UnpicklingError` if the file has any other content."""
    loaded = load_archive(io.BytesIO(content))
    if not isinstance(loaded, torch.Tensor):
        raise pickle.UnpicklingError(f"it contains a {type(loaded).__name__}, not a plain tensor")
    return loaded
