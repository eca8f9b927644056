"""Registries: a name finds its entry, and an error says what is wrong with the path that was given."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime.core.errors import ConfigError
from slime.core.registry import Registry

_NUMBERS = itertools.count()


class Toy:
    """A contract."""

    name: ClassVar[str]


ENTRY = """
from {package} import TOYS, Toy

@TOYS.register("{name}")
class {cls}(Toy):
    pass
"""
PACKAGE = """
from slime.core.registry import Registry
from {here} import Toy

TOYS = Registry("toy", flag="--toy", package="{package}", contract=Toy)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own with one entry, `block`; modules stay imported, so no name comes twice."""
    root = tmp_path / f"toys_{next(_NUMBERS)}"
    root.mkdir()
    (root / "__init__.py").write_text(PACKAGE.format(here=__name__, package=root.name))
    (root / "block.py").write_text(ENTRY.format(package=root.name, name="block", cls="Block"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def registry(package: Path) -> Registry[Any]:
    found: Registry[Any] = __import__(package.name).TOYS
    return found


def test_a_misspelt_class_is_told_with_those_that_exist(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"block does not define Blok; it defines .*Block"):
        registry(package).get(f"{package.name}.block.Blok")


def test_a_module_is_its_only_entry(package: Path) -> None:
    for path in (f"{package.name}.block", f"{package.name}.block:Block", f"{package.name}.block.Block"):
        assert registry(package).get(path) is registry(package).get("block")


def test_a_path_to_nowhere_is_told(package: Path) -> None:
    with pytest.raises(ConfigError, match="No module named 'nowhere_at_all'"):
        registry(package).get("nowhere_at_all.mine")


def test_a_users_module_that_cannot_be_imported_says_why(package: Path) -> None:
    (package.parent / f"{package.name}_user.py").write_text("raise RuntimeError('out of wood')")
    with pytest.raises(ConfigError, match="out of wood"):
        registry(package).get(f"{package.name}_user.Mine")


def test_an_entry_that_cannot_be_imported_is_told_each_time(package: Path) -> None:
    broken = package / "car.py"
    broken.write_text(ENTRY.format(package=package.name, name="car", cls="Car") + "raise RuntimeError('no wheels')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no wheels"):
            registry(package).names()
    broken.write_text(ENTRY.format(package=package.name, name="car", cls="TheCar"))
    assert registry(package).names() == ("block", "car")


def test_a_thread_that_asks_during_the_import_waits_for_it(package: Path) -> None:
    toys: Any = registry(package)
    begun, may_end = toys.begun, toys.may_end = threading.Event(), threading.Event()
    slow = f"from {package.name} import TOYS\nTOYS.begun.set()\nassert TOYS.may_end.wait(60)\n"
    (package / "aaa.py").write_text(slow)  # the first one to be imported
    found: list[tuple[str, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(toys.names())) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # it would be back at once with the names that there are
    seen_meanwhile = list(found)
    may_end.set()
    for thread in threads:
        thread.join(60)
    assert (seen_meanwhile, found) == ([], [("block",), ("block",)])
