"""Confines processes that grade text: answers are not executed, and even if one were, it could do no harm.

Libraries used by graders evaluate answers as Python: reasoning-gym verifiers call `eval`, and pass formulas to sympy's
`parse_expr`, which also calls `eval`. A malicious answer could read the label, set its own reward and all later ones,
and take over the machine. In these shared, long-lived processes (`grader_worker`), there are two barriers:

- The gate (`Gate`) inspects all code before Python executes it. While a grader processes an answer, the gate admits
  only modules being imported, and formulas: numbers, strings, lists, sympy classes and a few functions.
- The process gives up access to everything but libraries (`shut_in`, based on `slime.core.confine`). It has no network,
  sees no other processes, cannot start programs, and runs under an unused user id in its own root, which contains only
  libraries and a small tmpfs.

Invariants
1. An answer cannot access attributes, import modules, define functions, or call Python functions not in `FUNCTIONS`.
2. If the machine does not support a part of the confinement, the rest still applies, and the process reports that part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from slime.core import confine
from slime.core.confine import view

NAMESPACES = "namespaces"
ROOT = "/tmp"
"""Folder in which the view is built. It exists on every system, and the view hides its contents."""
TMP_BYTES, TMP_FILES = 1 << 24, 1000
MAX_THREADS, MAX_FILES = 32, 64
DEVICES = ("/dev/null", "/dev/urandom")

FUNCTIONS = frozenset({"abs", "divmod", "float", "int", "list", "max", "min", "pow", "round", "str", "sum", "tuple"})
FUNCTIONS |= {"cbrt", "diff", "expand", "factor", "integrate", "real_root", "root", "simplify", "sqrt", "sympy"}
"""Names allowed in formulas besides sympy's classes and constants. `sympy` is for sympy's own `from sympy import *`."""
LIBRARIES_MAKE = frozenset({"collections", "dataclasses"})
"""Standard library modules that generate code, for named tuples and dataclasses."""
IMPORTS, PARSER = "importlib._bootstrap", "sympy.parsing.sympy_parser"


class NotAFormula(ValueError):
    """A library tried to execute an answer as a program."""


class Gate:
    """While closed, blocks all code except formulas. It cannot be removed from the process."""

    def __init__(self) -> None:
        self._closed = False
        sys.addaudithook(self._look)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Keeps the gate closed inside the block, in which a grader processes an answer."""
        self._closed = True
        try:
            yield
        finally:
            self._closed = False

    def _look(self, event: str, given: tuple[Any, ...]) -> None:
        """Audit hook. Raises `NotAFormula` for code that the gate does not admit."""
        if event != "exec" or not self._closed:
            return
        code, asks = given[0], sys._getframe(1)
        if isinstance(code, CodeType) and (_is_library(asks) or is_formula(code, _symbols_of(asks))):
            return
        raise NotAFormula("the answer is a program, and graders do not run programs")


def is_formula(code: CodeType, symbols: Collection[str] = ()) -> bool:
    """Returns whether code contains no definitions and uses only `symbols` and names allowed in formulas.

    Attributes and imports count as names.
    """
    if any(isinstance(one, CodeType) for one in code.co_consts):
        return False
    return all(name in FUNCTIONS or name in symbols or name in _of_sympy() for name in code.co_names)


def _symbols_of(asks: FrameType) -> list[str]:
    """Returns the names of symbols that a task passes to `parse_expr`."""
    given = asks.f_locals.get("local_dict") if asks.f_globals.get("__name__") == PARSER else None
    import sympy

    return [name for name, value in (given or {}).items() if isinstance(value, sympy.Basic)]


def _is_library(asks: FrameType) -> bool:
    """Returns whether the code is run by a module in `LIBRARIES_MAKE` or as part of an import."""
    if asks.f_globals.get("__name__") in LIBRARIES_MAKE:
        return True
    above: FrameType | None = asks
    while above is not None:
        if above.f_globals.get("__name__") == IMPORTS:
            return True
        above = above.f_back
    return False


@functools.cache
def _of_sympy() -> frozenset[str]:
    """Returns the names of the sympy classes and constants that `parse_expr` accepts."""
    import sympy

    def is_part(value: object) -> bool:
        return isinstance(value, sympy.Basic) or (isinstance(value, type) and issubclass(value, sympy.Basic))

    return frozenset(name for name in sympy.__all__ if is_part(getattr(sympy, name))) | {"Matrix"}


def shut_in() -> tuple[str, ...]:
    """Permanently gives up access to everything but libraries. Returns the parts of the confinement that are missing.

    The process must be single-threaded. Modules in the same folders as those in `sys.modules` can still be imported.
    """
    shown = libraries()
    user = confine.any_user() if os.getuid() == 0 else None
    alone = _works(user, shown) and _leave(user, shown)
    if not alone:
        confine.leave(confine.NEW_NETWORK)
    files = confine.readable_libraries(shown) | dict.fromkeys(DEVICES, confine.ALL)
    files |= {ROOT: confine.ALL} if alone else {}
    limits = {resource.RLIMIT_NOFILE: MAX_FILES} | ({resource.RLIMIT_NPROC: MAX_THREADS} if alone else {})
    missing = confine.give_up(limits=limits, calls=confine.Calls(programs=False), user=None, files=files)
    return (*([] if alone else [NAMESPACES]), *missing)


def libraries() -> list[str]:
    """Returns the files and folders of all modules that have been, or may later be, imported."""
    places = [sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places += [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and isinstance(file, str):
            places.append(os.path.dirname(file) if hasattr(module, "__path__") else file)
    return view.outermost(place for place in places if os.path.isabs(place))


def _works(user: int | None, shown: list[str]) -> bool:
    """Returns whether `_leave` works, by trying it in a child process, because a partial failure cannot be undone."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if _leave(user, shown) and all(os.access(path, os.R_OK) for path in shown) else 1)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _leave(user: int | None, shown: list[str]) -> bool:
    kept = confine.leave(confine.NEW_NETWORK | confine.NEW_MOUNTS | confine.NEW_IPC, user, keep=shown)
    if kept is None:
        return False
    try:
        view.build(ROOT, readable=kept, places={"tmp": (TMP_BYTES, TMP_FILES)})
        view.enter(ROOT)
    except OSError:
        return False
    return True


# ---- environment variables -----------------------------------------------------------------------------------------
# A short allowlist. Graders process text that a model wrote, so they get no secrets of the run, such as keys of
# trackers, Ray or model hubs. Users can pass more variables to their own graders by name: `SLIME_REWARD_ENV=A,B`.
EXTRA = "SLIME_REWARD_ENV"
"""Lists additional variables for users' graders, separated by commas."""
_NAMES = """
PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH PYTHONHOME PYTHONHASHSEED
PYTHONUTF8 PYTHONDONTWRITEBYTECODE SLIME_RUN_ID CUDA_VISIBLE_DEVICES XDG_CACHE_HOME TRANSFORMERS_OFFLINE NLTK_DATA
"""
ALLOWED = frozenset(_NAMES.split())
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "HF_")
SECRET_ENDS = ("TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD")
"""Variables with these suffixes are excluded even if they match `ALLOWED_PREFIXES`."""
NETWORK = frozenset(
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"]
)
"""Passed only to graders with network access, because a proxy URL can contain a password. Case-insensitive."""
FEW_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc reserves 64 MiB of address space per arena, with up to eight arenas per core. On a machine with many cores,
    # the arenas of idle threads would exhaust the memory limit.
    "MALLOC_ARENA_MAX": "2",
}
"""Limits on libraries that would otherwise use all cores."""


def grader_environment(full: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """Selects the variables of `full` for a grader process. `offline`: the process has no network access."""

    def allowed(name: str) -> bool:
        if name in ALLOWED or (name.startswith(ALLOWED_PREFIXES) and not name.endswith(SECRET_ENDS)):
            return True
        return not offline and (name.upper() in NETWORK or name in extra)

    extra = {name.strip() for name in full.get(EXTRA, "").split(",")}
    kept = {name: value for name, value in full.items() if allowed(name)}
    return {**kept, **FEW_THREADS}
