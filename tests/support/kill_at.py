"""Kills a run at a named point of its code, without a word in the product: `KILL_AT=MODULE:NAME#N:WHEN:WHOM`.

`environment(point, folder)` gives the variables of such a run. A `sitecustomize` that it writes into `folder` makes
every Python process of the run, engines included, wrap the function MODULE:NAME when it imports the module; the Nth
call in one process is killed `before` it begins or `after` it returned. WHOM is `run` (the driver and the process of
the call; the run's guardian ends the others, as after the loss of a machine) or `process` (that of the call alone). It
may also be the name of a signal, which the driver gets instead.

Invariants
1. One kill per folder: it is announced in the file `killed`, which is made before the signal and only once.
2. Standard library only, since every process imports this when it starts.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
POINT, FOLDER, DRIVER = "KILL_AT", "KILL_AT_FOLDER", "KILL_AT_DRIVER"
"""Variables: the point, where the kill is announced, and the pid of the first process, which is the driver."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where to kill, and whom."""

    module: str
    name: str
    """Qualified name of a function, or method, of the module."""
    call: int
    """Which call of it within one process, counted from 1."""
    when: str
    """`before` or `after`."""
    whom: str = "run"
    """`run`, `process`, or the name of a signal."""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}#{self.call}:{self.when}:{self.whom}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Reads what `str` wrote."""
        module, name, when, whom = text.split(":")
        name, _, call = name.partition("#")
        return cls(module, name, int(call), when, whom)


def environment(point: Point, folder: Path) -> dict[str, str]:
    """Variables of a run that is to be killed at `point`; `folder` is new, and holds `killed` afterwards."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text("from tests.support import kill_at\n\nkill_at.install()\n")
    return {POINT: str(point), FOLDER: str(folder), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def install() -> None:
    """Called once in every process of the run, before anything else is imported."""
    os.environ.setdefault(DRIVER, str(os.getpid()))
    sys.meta_path.insert(0, _Finder(Point.parse(os.environ[POINT])))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of the point as the others do, and wraps its function as soon as it is there."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._point.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, f"no module {fullname}"
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            _wrap(module, self._point)

        spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, point: Point) -> None:
    *owners, last = point.name.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    function, calls = getattr(owner, last), itertools.count(1)

    @functools.wraps(function)
    def before(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == point.call:
            _kill(point)
        return function(*args, **kwargs)

    @functools.wraps(function)
    def after(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if next(calls) == point.call:
            _kill(point)
        return result

    assert not (inspect.iscoroutinefunction(function) and point.when == "after"), f"{point} returns before it ends"
    wrappers: dict[str, Callable[..., Any]] = {"before": before, "after": after}
    setattr(owner, last, wrappers[point.when])


def _kill(point: Point) -> None:
    try:
        announced = os.open(Path(os.environ[FOLDER]) / "killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(announced, f"{point} in process {os.getpid()}\n".encode())
    if point.whom.startswith("SIG"):
        os.kill(int(os.environ[DRIVER]), signal.Signals[point.whom])
        return
    if point.whom == "run":
        os.kill(int(os.environ[DRIVER]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


async def now_and_then_no_answer(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """For `--custom-generate-function-path`: the first try of every seventh training prompt has no answer."""
    from slime.core.errors import DeadlineExceeded
    from slime.rollout.generate import generate

    if sample.group_index >= 0 and sample.group_index % 7 == 3 and not sample.num_quarantined:
        raise DeadlineExceeded(f"an engine had no answer for sample {sample.index}")
    return await generate(args, sample, sampling_params)
