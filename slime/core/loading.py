"""Finding a user's code by the path that a setting gives: `pkg.mod:name`, `pkg.mod.name` or `path/to/file.py:name`.

Loading imports the user's module, so it happens on request only, never while this package is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class LoadingFailed(Exception):
    """Nothing stands at a path. The message says why; the caller says for which setting."""


def load_module(name: str) -> ModuleType:
    """The module `pkg.mod`, or that of a file `path/to/file.py`, which is imported once per process.

    Raises `LoadingFailed`, also for whatever the user's module raises while it is imported.
    """
    try:
        return _file_module(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except FileNotFoundError:
        if name.endswith(".py") and not Path(name).is_file():
            raise LoadingFailed(f"there is no file {name}; check the path") from None
        raise
    except Exception as error:
        raise LoadingFailed(f"importing {name} raised {error!r}; fix or install it") from error


def load_object(path: str) -> Any:
    """What stands at `pkg.mod:name`, `pkg.mod.name` or `path/to/file.py:name`; a name may have dots behind a colon.

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


def _file_module(file: Path) -> ModuleType:
    """The module of a file. Raises FileNotFoundError and what the module raises."""
    path = file.resolve()
    if not path.is_file():
        raise FileNotFoundError(file)
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
