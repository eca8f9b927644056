"""Extension points: command line names that select classes, one file per entry.

Each registry belongs to a package whose modules register entries under public names. A user's own file can register
entries too; it is selected by its path on the command line:

    ESTIMATORS: Registry[AdvantageEstimator] = Registry(
        "advantage estimator", flag="--advantage-estimator", package="slime.algorithms.advantages",
        contract=AdvantageEstimator,
    )

    @ESTIMATORS.register("rloo")
    @dataclass(frozen=True, kw_only=True)
    class LeaveOneOut(AdvantageEstimator):
        "A description, with its source."
        some_setting: float = 1.0
        "Its help text; the flag is --some-setting."

An entry is a class. If it is a frozen dataclass, its fields become settings: registering the entry adds their flags to
the command line, and `build` sets their values. Because listing the names imports all modules of the package, these
modules may only import torch and the engines inside functions.

An entry can validate settings with `check(self, args: Args) -> str | None`. It is called before anything starts, for
the entries selected by the run. `check` does not raise: it returns an error message (what is wrong, why, what to do) or
None.

Invariants
1. A name has one entry. Registering a second one is an error.
2. A name that is not registered must be an import path. Otherwise, the error lists the known names.
3. If a built-in module cannot be imported, every lookup raises. Its names never silently disappear.
4. A lookup waits while another thread is importing the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from slime.core.errors import ConfigError
from slime.core.text import nearest

# Loading by path runs the user's module, so it only happens on lookup, never when this package is imported.


class LoadingFailed(Exception):
    """A path cannot be loaded. The message says why, and the caller adds the name of the setting."""


def load_module(name: str) -> ModuleType:
    """Imports the module `pkg.mod` or the file `path/to/file.py`, once per process.

    Raises `LoadingFailed`, including for any error raised by the user's module.
    """
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise LoadingFailed(f"there is no file {name}; check the path")
    try:
        return _file_module(Path(name).resolve()) if is_file else importlib.import_module(name)
    except Exception as error:
        raise LoadingFailed(f"importing {name} raised {error!r}; fix or install it") from error


def load_object(path: str) -> Any:
    """Loads `pkg.mod:name`, `pkg.mod.name` or `path/to/file.py:name`; the name after a colon may contain dots.

    Raises `LoadingFailed`.
    """
    module_name, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name or (name == "py" and ":" not in path):
        raise LoadingFailed("write pkg.module:name or path/to/file.py:name")
    module = load_module(module_name)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise LoadingFailed(f"{module_name} does not define {name}; it defines {', '.join(names) or 'nothing'}")
        target = getattr(target, part)
    return target


def _file_module(path: Path) -> ModuleType:
    """Imports a file as a module. Propagates errors raised by the module."""
    name = f"slime_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no loader for {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


T = TypeVar("T")
C = TypeVar("C", bound=type)


def settings_of(entry: type[Any], settings: object) -> dict[str, Any]:
    """Returns name -> value for each field of `entry`, read from the `settings` attribute of the same name."""
    fields = dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()
    return {field.name: getattr(settings, field.name) for field in fields if field.init}


class Registry(Generic[T]):
    """The entries of one extension point in this process."""

    def __init__(self, what: str, *, flag: str, package: str, contract: type[Any]) -> None:
        """`what`: noun used in messages. `flag`: the setting that selects an entry. `package`: contains the built-in
        entries. `contract`: base class of all entries."""
        self.what, self.flag, self.package, self.contract = what, flag, package, contract
        self._entries: dict[str, type[T]] = {}
        self._complete = False
        self._importing = threading.RLock()

    def register(self, *names: str) -> Callable[[C], C]:
        """Returns a class decorator that registers the class under `names`. The first becomes its `name`."""
        assert names, f"a registered {self.what} needs at least one name"

        def add(entry: C) -> C:
            kind: Any = entry
            assert issubclass(kind, self.contract), f"{entry} is not a {self.contract.__name__}"
            for name in names:
                assert self._entries.get(name, kind) is kind, f"two entries of {self.what} are called {name!r}"
                self._entries[name] = kind
            kind.name = names[0]
            return entry

        return add

    def names(self) -> tuple[str, ...]:
        """Returns the sorted names of all built-in entries and of entries registered by user files so far."""
        self._import_all()
        return tuple(sorted(self._entries))

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        return iter((name, self._entries[name]) for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def get(self, name: str) -> type[T]:
        """Returns the class registered as `name`, or else the class at the import path `name`. Raises `ConfigError`."""
        self._import_all()
        if name in self._entries:
            return self._entries[name]
        if "." not in name and ":" not in name:
            near = nearest(name, self._entries)
            hint = f"did you mean {near}? " if near else ""
            known = ", ".join(sorted(self._entries))
            raise ConfigError(f"{self.flag} {name}: there is no such {self.what}; {hint}choose from {known}")
        return self._of_path(name)

    def build(self, name: str, settings: object) -> T:
        """Instantiates the entry `name` with its fields taken from `settings` (see `settings_of`)."""
        entry = self.get(name)
        return entry(**settings_of(entry, settings))

    def _import_all(self) -> None:
        with self._importing:
            if self._complete:
                return
            package = importlib.import_module(self.package)
            self._complete = True  # set before the imports, because an entry may look up names itself
            for found in pkgutil.iter_modules(package.__path__):
                self._import(f"{self.package}.{found.name}")

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except BaseException:
            # Otherwise, importing the module again would register its entries twice.
            self._entries = {n: entry for n, entry in self._entries.items() if entry.__module__ != name}
            self._complete = False
            raise

    def _of_path(self, path: str) -> type[T]:
        """Returns the class at an import path, or the only entry registered by the module at that path."""
        try:
            found = self._only_entry_of(path) if path.endswith(".py") else self._class_or_module(path)
        except LoadingFailed as error:
            raise ConfigError(f"{self.flag} {path}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self.contract)):
            raise ConfigError(
                f"{self.flag} {path} cannot be used as {self.what}; it must be a subclass of "
                f"{self.contract.__module__}.{self.contract.__qualname__}"
            )
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{self.flag} {path} does not define {', '.join(missing)}; implement them")
        if problem := _wrong_parameters(found):
            raise ConfigError(f"{self.flag} {path}: {problem}")
        return found

    def _class_or_module(self, path: str) -> Any:
        """Loads a class by its import path, or the only entry of a module."""
        try:
            found = load_object(path)
        except LoadingFailed:
            if not _is_module(path):
                raise
            return self._only_entry_of(path)
        return self._only_entry_of(path) if isinstance(found, type(importlib)) else found

    def _only_entry_of(self, path: str) -> Any:
        module = load_module(path)
        entries = {id(e): e for e in self._entries.values() if e.__module__ == module.__name__}
        if not entries:
            raise LoadingFailed(f"{path} registers no entry; add the decorator to its class, or use {path}:ClassName")
        if len(entries) != 1:
            raise LoadingFailed(f"{path} registers {len(entries)} entries; select one with {path}:ClassName")
        return next(iter(entries.values()))


def _wrong_parameters(entry: type[Any]) -> str | None:
    """Returns an error message if slime cannot call one of an entry's required methods, else None."""
    for name in dir(entry):
        declared = next(vars(kind)[name] for kind in reversed(entry.__mro__) if name in vars(kind))
        if not getattr(declared, "__isabstractmethod__", False) or not callable(declared):
            continue
        wanted, own = inspect.signature(declared), inspect.signature(getattr(entry, name))
        by_name = {n: None for n, p in wanted.parameters.items() if p.kind is p.KEYWORD_ONLY}
        try:
            own.bind(*(n for n in wanted.parameters if n not in by_name), **by_name)
        except TypeError:
            named = ", ".join(wanted.parameters)
            return f"{name}({', '.join(own.parameters)}) must take the parameters ({named})"
    return None


def _is_module(path: str) -> bool:
    """Returns whether `path` is an existing module. Imports its parent packages."""
    try:
        return ":" not in path and importlib.util.find_spec(path) is not None
    except Exception:  # raised by a user's package; the caller reports the original error
        return False
