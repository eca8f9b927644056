"""A real `MegatronBackend` of one rank in the test process; one at a time, because Megatron's groups are global."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import free_port, training_args


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def make_backend() -> Iterator[Callable[..., Any]]:
    """`make_backend(checkpoint, **settings)`; making another one closes the one before."""
    import gc

    from slime.training.backend import MegatronBackend
    from slime.training.parallel import destroy_process_groups

    open_ones: list[MegatronBackend] = []

    def close() -> None:
        while open_ones:
            open_ones.pop().close()
        destroy_process_groups()  # of one that was refused half built
        gc.collect()  # threads of its groups end with it

    def make(checkpoint: Path, **settings: Any) -> MegatronBackend:
        close()
        args = training_args(checkpoint, **settings)
        backend = MegatronBackend(
            args, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
        )
        open_ones.append(backend)
        backend.weight_version = 1
        return backend

    yield make
    close()
