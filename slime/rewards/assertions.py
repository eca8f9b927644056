"""Checks assertions about a program from another process, so that the program never sees expected values.

The program process runs its definitions, then serves calls over a socket (`serve`). The checker process runs the
statements of the test (`check`), where names from the program are proxies for remote functions and classes. Only plain
data crosses the socket, in either direction: numbers, strings and containers of them. The checker decodes JSON to
built-in types and compares them itself, so an `__eq__` defined by the program has no effect.

Any other object stays where it is, and the other side gets a `Remote` proxy. This applies to instances of the program's
classes, whose methods a test calls, and to functions or objects that the test passes to the program. A `Remote` cannot
be compared or combined with plain data: that would reveal the expected value to the program and let it decide whether
its own answer is right. Two objects of the program can be compared; the program does the comparison.

Invariants
1. The checker sends only call arguments, and no other values of the test.
2. The program can call only functions that it received, and can read only public attributes of objects whose classes
   are defined in the test.
3. The checker writes the verdict after the last statement, and only if no message was missing or malformed.

Uses only the standard library and nothing from slime, because the supervisor of the sandbox imports this module, and
its forks have no packages.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import itertools
import json
import operator
import os
import struct
import sys
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

HEADER = struct.Struct("<I")
"""Length in bytes of the JSON that follows."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
ARRAY_KINDS = "biufcU"
"""NumPy dtype kinds that are sent as arrays. Arrays of other kinds are sent as lists."""
MAX_ITEMS = 1_000_000
"""Maximum length of an iterator that is sent to a program, as a list."""
ALIASES = {"np": "numpy", "pd": "pandas"}
"""Common alias -> module."""
TESTS = "tests"
"""Name of the module that contains a test's definitions."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "is": lambda kind, value: isinstance(value, kind),
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__str__": str,
    "__repr__": repr,
    "__bool__": bool,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__invert__": operator.invert,
    "__abs__": abs,
    "__int__": int,
    "__float__": float,
    "__round__": round,
}
"""Operations that one side can request on an object of the other."""
BETWEEN_REMOTES = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")
"""Operators between two objects on the same side."""
OPERATIONS |= {f"__{name}__": getattr(operator, name) for name in BETWEEN_REMOTES}

PLAIN: dict[str, tuple[type | tuple[()], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "deque": (deque, list, deque),
    "bytes": (bytes, lambda value: bytes(value).hex(), bytes.fromhex),
    "bytearray": (bytearray, lambda value: bytes(value).hex(), bytearray.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    "Decimal": (Decimal, str, Decimal),
    "Fraction": (Fraction, lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    "datetime": (datetime, lambda value: value.isoformat(), datetime.fromisoformat),
    "date": (date, lambda value: value.isoformat(), date.fromisoformat),
    "time": (time, lambda value: value.isoformat(), time.fromisoformat),
    "timedelta": (timedelta, lambda value: [value.days, value.seconds, value.microseconds], lambda p: timedelta(*p)),
    "Counter": (Counter, dict, Counter),
    "OrderedDict": (OrderedDict, dict, OrderedDict),
    "keys": (type({}.keys()), list, lambda keys: dict.fromkeys(keys).keys()),
    "items": (type({}.items()), list, lambda items: dict(items).items()),
    "namedtuple": ((), lambda value: [type(value).__name__, [*value._fields], [*value]], lambda p: _named(*p)),
    "ndarray": ((), lambda value: [value.dtype.str, [*value.shape], value.ravel().tolist()], lambda p: _array(*p)),
}
"""Name on the wire -> (type, encoder, decoder). The type is () if `_plain_name` recognizes values in another way."""


class Remote:
    """A reference to an object on the other side."""

    __slots__ = ("__ask", "__key")

    def __init__(self, ask: Callable[..., Any], key: int) -> None:
        object.__setattr__(self, "_Remote__ask", ask)
        object.__setattr__(self, "_Remote__key", key)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask("set", self, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self.__ask("is", self, value) is True

    __hash__ = object.__hash__


def _forward(name: str, *, between_remotes: bool) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if between_remotes and not isinstance(args[0], Remote):
            return NotImplemented
        return self._Remote__ask(name, self, *args)

    return method


for _name in OPERATIONS:
    if _name.startswith("__"):
        setattr(Remote, _name, _forward(_name, between_remotes=_name.strip("_") in BETWEEN_REMOTES))


class NotPlain(BaseException):
    """The test passes an object that cannot be sent. Not an `Exception`, so that tests do not mistake it for an error
    raised by the program."""


class Broken(BaseException):
    """The other side has exited or sent an invalid message. Not an `Exception`, for the same reason as `NotPlain`."""


class Peer:
    """One side of the connection. Calls can nest: while a call is pending, this side serves incoming calls."""

    def __init__(self, channel: int, *, guarded: bool) -> None:
        """`guarded`: this is the checker, which serves only what invariant 2 allows."""
        self._channel, self._guarded = channel, guarded
        self._kept: dict[int, Any] = {}
        """Key -> local object for which the other side has a `Remote`."""
        self._keys: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._own_errors: dict[str, type[Exception]] = {}
        """Name -> local copy of an exception class that the program defines and the test uses."""
        self.failure: BaseException | None = None
        """The error that broke the connection, even if the test caught it."""

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message. Raises `Broken`."""
        data = json.dumps(message).encode()
        data = HEADER.pack(len(data)) + data
        try:
            while data:
                data = data[os.write(self._channel, data) :]
        except OSError as error:
            raise self._break(Broken(f"the program has exited: {error}")) from None

    def receive(self) -> dict[str, Any]:
        """Waits for one message. Raises `Broken`."""
        (length,) = HEADER.unpack(self._read(HEADER.size))
        if length > MAX_MESSAGE_BYTES:
            raise self._break(Broken(f"the program sent a message of {length} bytes"))
        try:
            message = json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise self._break(Broken(f"the program sent a message that is not JSON: {error}")) from None
        if not isinstance(message, dict):
            raise self._break(Broken("the program sent a message that is not an object"))
        return message

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._channel, min(size, 1 << 20))
            if not part:
                raise self._break(Broken("the program exited before it answered"))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _break(self, failure: BaseException) -> BaseException:
        self.failure = self.failure or failure
        return failure

    def ask(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Requests `operation` on an object of the other side. Returns the result, or raises the other side's error."""
        try:
            call = {"do": operation, "target": self.encode(target), "args": [self.encode(a) for a in args]}
            call["kwargs"] = {name: self.encode(value) for name, value in kwargs.items()}
        except NotPlain as problem:
            raise self._break(problem) from None
        answer = self.converse(call)
        try:
            error = self._error(answer["raised"], operation) if "raised" in answer else None
            value = None if error else self.decode(answer["value"])
            sent_and_got = zip(args, call["args"], answer.get("args", ()) if value is None else (), strict=False)
            after = [(arg, self.decode(got)) for arg, sent, got in sent_and_got if got != sent]
        except Exception as problem:
            raise self._break(Broken(f"the program sent a malformed reply: {problem!r}")) from None
        if error is not None:
            raise error
        for arg, content in after:
            _replace_content(arg, content)
        return value

    def converse(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the reply. Serves incoming calls until the reply arrives."""
        self.send(message)
        while True:
            got = self.receive()
            if "answer" in got:
                answer = got["answer"]
                if not isinstance(answer, dict):
                    raise self._break(Broken("the program sent a reply that is not an object"))
                return answer
            self.send({"answer": self.serve(got)})

    def serve(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            target, args = self.decode(call["target"]), [self.decode(a) for a in call["args"]]
            kwargs = {str(name): self.decode(value) for name, value in call["kwargs"].items()}
            if self._guarded and not _is_allowed(target, call["do"], args):
                raise PermissionError("a program can only call what the test passed to it, and read public attributes")
            value = OPERATIONS[call["do"]](target, *args, **kwargs)
            answer = {"value": self.encode(value)}
            if value is None and call["do"] == "call" and not self._guarded:  # it may have modified its arguments
                after = [self.encode(a) for a in args]
                answer |= {"args": after} if after != call["args"] else {}
            return answer
        except Broken:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            try:
                args = [self.encode(a) for a in error.args]
                state = {} if self._guarded else {name: self.encode(value) for name, value in vars(error).items()}
            except BaseException:
                args, state = [], {}
            return {"raised": {"names": names, "args": args, "state": state}}

    def _error(self, raised: dict[str, Any], operation: str) -> BaseException:
        """Rebuilds an error from the other side. Errors that would end a loop in the test or stop the checker become a
        `RuntimeError`, except `StopIteration` from `__next__`.
        """
        args = [self.decode(a) for a in raised["args"]]
        names = [str(name) for name in raised["names"]]
        if operation == "__next__" and names[0] == "StopIteration":
            return StopIteration()
        for name in names:
            kind = self._own_errors.get(name) or getattr(builtins, name, None)
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                continue
            if issubclass(kind, StopIteration | StopAsyncIteration):
                break
            with contextlib.suppress(TypeError):
                error = kind(*args)
                if name in self._own_errors:
                    vars(error).update({k: self.decode(v) for k, v in raised["state"].items() if not k.startswith("_")})
                return error
        return RuntimeError(names[0], *args)

    def define(self, names: Sequence[str]) -> dict[str, Any]:
        """Requests names from the program. Functions and classes become a `Remote`; exception classes are copied."""
        found = self.converse({"names": list(names)})
        space: dict[str, Any] = {}
        for name, value in found.items():
            if name not in names:
                continue
            if isinstance(value, dict) and "error" in value:
                bases = (getattr(builtins, str(base), None) for base in value["error"])
                fits = (b for b in bases if isinstance(b, type) and issubclass(b, Exception))
                base = next((b for b in fits if not issubclass(b, StopIteration | StopAsyncIteration)), Exception)
                space[name] = self._own_errors[name] = type(name, (base,), {"__module__": TESTS})
            else:
                space[name] = self.decode(value)
        return space

    def show(self, space: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Replies to the checker's `define`, on the program's side."""
        shown: dict[str, Any] = {}
        for name in names:
            value = space.get(name)
            if isinstance(value, type) and issubclass(value, BaseException):
                shown[name] = {"error": [kind.__name__ for kind in value.__mro__]}
            elif name in space and not isinstance(value, ModuleType):
                shown[name] = self.encode(value)
        return shown

    def encode(self, value: Any) -> Any:
        """Encodes a value as JSON. An object that is not plain data is replaced by a key. Raises `NotPlain`."""
        if value is None or isinstance(value, bool | float | str):
            return value if type(value) in (type(None), bool, float, str) else _bare(value)
        if isinstance(value, int):
            return int(value) if abs(value) < 2**63 else {"int": hex(value)}
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_Remote__key")}
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        name = _plain_name(value)
        if name is not None:
            return {name: self.encode(PLAIN[name][1](value))}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        return self._key_of(value)

    def _key_of(self, value: Any) -> dict[str, Any]:
        """Encodes an object that stays on this side."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if self._guarded:
            if module in sys.stdlib_module_names and getattr(sys.modules.get(module), name, None) is value:
                return {"global": [module, name]}
            if isinstance(value, Iterator | type({}.values())):
                items = list(itertools.islice(value, MAX_ITEMS + 1))
                if len(items) <= MAX_ITEMS:
                    return {"iterator": [self.encode(item) for item in items]}
            if not callable(value) and type(value).__module__ != TESTS:
                raise NotPlain(f"the test passes a {type(value).__name__} to the program; only plain data can be sent")
        key = self._keys.setdefault(id(value), len(self._keys))
        self._kept[key] = value  # also prevents reuse of its id
        return {"mine": key}

    def decode(self, data: Any) -> Any:
        """Inverts `encode`. Raises `ValueError`, `KeyError` or similar for invalid data."""
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        ((name, content),) = data.items()
        if name == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if name == "int":
            return int(content, 16)
        if name == "yours":
            return self._kept[int(content)]
        if name == "mine":
            return self._remotes.setdefault(int(content), Remote(self.ask, int(content)))
        if name in PLAIN:
            return PLAIN[name][2](self.decode(content))
        if not self._guarded and name == "global":
            return getattr(importlib.import_module(content[0]), content[1])
        if not self._guarded and name == "iterator":
            return iter([self.decode(item) for item in content])
        raise ValueError(f"unknown {name!r:.40}")


def _plain_name(value: Any) -> str | None:
    """Returns the key in `PLAIN` for a value, or None."""
    kind = type(value)
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return "namedtuple"
    if kind.__module__ == "numpy" and hasattr(value, "shape") and hasattr(value, "ravel") and value.shape != ():
        return "ndarray" if value.dtype.kind in ARRAY_KINDS else None
    fits = (name for name, (plain, _, _) in PLAIN.items() if isinstance(value, plain))
    return next((name for name in fits if not (name == "date" and isinstance(value, datetime))), None)


@functools.lru_cache(maxsize=256)
def _named_type(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)  # rejects private names


def _named(name: str, fields: Sequence[str], values: Sequence[Any]) -> Any:
    return _named_type(name, tuple(fields))(*values)


def _array(kind: str, shape: Sequence[int], values: Sequence[Any]) -> Any:
    """Builds an array of numbers or strings. Raises `ValueError` for object arrays, whose elements define `__eq__`."""
    import numpy

    dtype = numpy.dtype(kind)
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"arrays of kind {kind:.40} are not supported")
    return numpy.array(values, dtype).reshape(shape)


def _bare(value: Any) -> Any:
    """Converts an instance of a subclass of float or str to the plain type."""
    return float(value) if isinstance(value, float) else "".join(value)


def _replace_content(before: Any, after: Any) -> None:
    """Updates a container in place with the contents of the program's modified copy."""
    if type(before) is not type(after):
        return
    if isinstance(before, list | bytearray):
        before[:] = after
    elif isinstance(before, deque):
        before.clear()
        before.extend(after)
    elif type(before).__name__ == "ndarray" and before.shape == after.shape:
        before[...] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)


def _is_allowed(target: Any, operation: str, args: Sequence[Any]) -> bool:
    """Returns whether the checker may serve this operation (invariant 2)."""
    if operation == "call":
        return callable(target)
    if type(target).__module__ != TESTS or isinstance(target, type):
        return False
    return operation not in ("get", "set") or (isinstance(args[0], str) and not args[0].startswith("_"))


def serve(channel: int, space: dict[str, Any]) -> None:
    """Main loop of the program side: serves calls until the checker exits. Its definitions have already run."""
    peer = Peer(channel, guarded=False)
    with contextlib.suppress(Broken):
        while True:
            message = peer.receive()
            shown = peer.show(space, message["names"]) if "names" in message else peer.serve(message)
            peer.send({"answer": shown})


def check(channel: int, test: dict[str, Any]) -> Any:
    """Runs the checker side. Returns True if all of `test["statements"]` hold, False if one fails, or the reason why
    they are undecidable.

    `test["names"]`: names from the program that the statements use. `test["modules"]`: name -> module to import.
    """
    sys.set_int_max_str_digits(0)
    module = sys.modules[TESTS] = ModuleType(TESTS)
    space: dict[str, Any] = module.__dict__
    peer = Peer(channel, guarded=True)
    try:
        for name, path in test["modules"].items():
            with contextlib.suppress(ImportError):
                space[name] = importlib.import_module(path)
        space.update(peer.define(test["names"]))
        for statement in test["statements"]:
            exec(compile(statement, "tests.py", "exec", dont_inherit=True), space)
    except BaseException as error:
        peer.failure = peer.failure or error
    return str(peer.failure) if isinstance(peer.failure, NotPlain) else peer.failure is None


@dataclass(frozen=True, slots=True)
class Names:
    requested: list[str]
    """Names to request from the program. Excludes built-ins, except the entry point."""
    modules: dict[str, str]
    """Name -> standard library module (or one in `ALIASES`) that the checker imports, because the test uses its
    attributes without importing it."""
    free: frozenset[str]
    """Names that the test uses but neither defines nor imports (as in `count = count(2)`). Without any, the statements
    do not test the program."""
    bound: frozenset[str]
    """Names that the test defines, imports or assigns."""


def names_in(statements: Sequence[str], entry_point: str | None = None) -> Names:
    """Classifies the names in the statements of a test. Raises `SyntaxError`."""
    loads: set[str] = set()
    bound: set[str] = set()
    stored: set[str] = set()
    called: set[str] = set()
    bare: set[str] = set()
    for statement in statements:
        tree = ast.parse(statement)
        of_attributes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    loads.add(name)
                    bare |= {name} if id(node) not in of_attributes else set()
                case ast.Name(id=name):
                    stored.add(name)
                case ast.Call(func=ast.Name(id=name)):
                    called.add(name)
                case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=alias):
                    bound.add(alias or name.partition(".")[0])
    bound |= stored - called
    known = set(dir(builtins)) - {entry_point}
    free = (loads | {entry_point} if entry_point else loads) - bound - known
    modules = {n: ALIASES.get(n, n) for n in free - bare if n in sys.stdlib_module_names or n in ALIASES}
    requested = (loads - known - modules.keys()) | ({entry_point} if entry_point else set())
    return Names(sorted(requested), modules, frozenset(free - modules.keys()), frozenset(bound))
