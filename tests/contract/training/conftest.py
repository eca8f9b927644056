"""A real `MegatronBackend` of one rank in the test process; one at a time, because Megatron's groups are global."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_parity import one_rank


@pytest.fixture
def make_backend() -> Iterator[Callable[..., Any]]:
    """`make_backend(checkpoint, **settings)`; making another one closes the one before."""
    with contextlib.ExitStack() as current:

        def make(checkpoint: Path, **settings: Any) -> Any:
            current.close()
            return current.enter_context(one_rank(checkpoint, **settings))

        yield make
