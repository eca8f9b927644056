"""Extension points: names on the command line that select classes, one file per entry.

A registry belongs to a package. Every module of that package may register entries under public names. A user's own file
may do so too, and the command line names the file by its path:

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

An entry is a class. If it is a frozen dataclass, its fields are settings: the command line gets their flags as soon as
the entry is registered, and `build` fills them. Listing the names imports the package's modules, so the modules import
torch and the engines only inside functions.

An entry may refuse settings with `check(self, args: Args) -> str | None`, which is called before anything starts, for
the entries that a run has chosen. `check` returns one message (what is wrong, why, what to do) or None. It does not
raise.

Invariants
1. A name has one entry; registering a second one is an error.
2. A name that is not registered must be an import path. Anything else is refused, and the error lists the known names.
3. If a built-in module cannot be imported, every lookup raises; its names are never silently missing.
4. A lookup waits while another thread imports the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from slime.core.errors import ConfigError
from slime.core.text import nearest

# Loading by path imports the user's module, so it happens only on request, never while this package is imported.


class LoadingFailed(Exception):
    """A path cannot be loaded. The message says why. The caller adds the name of the setting."""


def load_module(name: str) -> ModuleType:
    """Imports the module `pkg.mod` or the file `path/to/file.py`, once per process.

    Raises `LoadingFailed`, also for any error that the user's module raises.
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
            raise LoadingFailed(f"{module_name} has no {name}; it has {', '.join(names) or 'nothing'}")
        target = getattr(target, part)
    return target


def _file_module(path: Path) -> ModuleType:
    """Imports a file as a module. Errors of the module pass through."""
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
    """Returns name -> value for each field of `entry`, read from the attribute of `settings` with that name."""
    fields = dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()
    return {field.name: getattr(settings, field.name) for field in fields if field.init}


class Registry(Generic[T]):
    """The entries of one extension point in this process."""

    def __init__(self, what: str, *, flag: str, package: str, contract: type[Any]) -> None:
        """`what`: the noun for messages. `flag`: the setting that names an entry. `package`: the package with the
        built-in entries. `contract`: the base class of all entries."""
        self.what, self.flag, self.package, self.contract = what, flag, package, contract
        self._entries: dict[str, type[T]] = {}
        self._complete = False
        self._importing = threading.RLock()

    def register(self, *names: str) -> Callable[[C], C]:
        """Class decorator that registers the class under `names`. The first of them becomes its `name`."""
        assert names, f"an entry of the registry of {self.what} needs a name"

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
        """Returns the sorted names of all built-in entries and of entries that users' files have registered so far."""
        self._import_all()
        return tuple(sorted(self._entries))

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        return iter((name, self._entries[name]) for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def get(self, name: str) -> type[T]:
        """Returns the class registered as `name`, or the user's class at that import path. Raises `ConfigError`."""
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
        """Returns an instance of the entry `name`, with its fields from `settings` (`settings_of`)."""
        entry = self.get(name)
        return entry(**settings_of(entry, settings))

    def _import_all(self) -> None:
        with self._importing:
            if self._complete:
                return
            package = importlib.import_module(self.package)
            self._complete = True  # set before the imports, because an entry may ask for names
            for found in pkgutil.iter_modules(package.__path__):
                self._import(f"{self.package}.{found.name}")

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except BaseException:
            # Otherwise the next import of the module would register its entries twice.
            self._entries = {n: entry for n, entry in self._entries.items() if entry.__module__ != name}
            self._complete = False
            raise

    def _of_path(self, path: str) -> type[T]:
        """Returns the class at a path, or the only entry that the module at that path registers."""
        try:
            found = self._only_entry_of(path) if path.endswith(".py") else self._class_or_module(path)
        except LoadingFailed as error:
            raise ConfigError(f"{self.flag} {path}: {error}") from error
        if not (isinstance(found, type) and issubclass(found, self.contract)):
            raise ConfigError(
                f"{self.flag} {path} cannot be used as {self.what}; derive a class from "
                f"{self.contract.__module__}.{self.contract.__qualname__}"
            )
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{self.flag} {path} does not define {', '.join(missing)}; add the definitions")
        return found

    def _class_or_module(self, path: str) -> Any:
        """Loads `pkg.mod`, which may be a module, or a class `mod` of module `pkg`."""
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
        if len(entries) != 1:
            raise LoadingFailed(f"{path} registers {len(entries)} entries; name one as {path}:ClassName")
        return next(iter(entries.values()))


def _is_module(path: str) -> bool:
    """Returns whether `path` names a module that exists. Imports its parent packages."""
    try:
        return ":" not in path and importlib.util.find_spec(path) is not None
    except Exception:  # a user's package raised this; the caller reports the first error
        return False
