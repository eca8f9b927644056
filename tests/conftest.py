"""Shared by every test: an environment that suits a small machine, time limits, and the tiny models.

The environment is set before anything imports torch. Unit tests are pure and must be quick; contract and end-to-end
tests start real engines and get longer.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from tests.support.ranks import Ranks
from tests.support.tiny import write_tiny_model

for _name, _value in {
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(_name, _value)

# A shell that puts the tests in the background makes them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure of a law: the limits of whole tests are in TIMEOUTS_S. Nor is chance: `make test` tries
# the same few examples every time, `make test-all` looks for new ones.
settings.register_profile("slime", deadline=None, derandomize=True, max_examples=15)
settings.register_profile("explore", deadline=None)
settings.load_profile("slime")

TIMEOUTS_S = {"unit": 300, "contract": 900, "e2e": 2700, "gpu": 900}
"""Limit of one test by its top folder; `@pytest.mark.timeout` overrides it."""


# Imports make objects by the million, and none of them is garbage: who looks for it finds nothing and takes a tenth of
# the time. Behind the collection they are never looked at again.
gc.disable()

NO_GPU = not Path("/dev/nvidiactl").exists()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the tests of GPUs out of the quick suite where there is no GPU, rather than skip each."""
    left_out = NO_GPU and "not slow" in config.option.markexpr and collection_path == Path(__file__).parent / "gpu"
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test the time limit of its folder and skips GPU tests where there is no GPU."""
    root = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if item.get_closest_marker("timeout") is None and folder in TIMEOUTS_S:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[folder]))
        if (folder == "gpu" or item.get_closest_marker("gpu")) and NO_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Tests find the garbage collector switched on, and nothing in its way that the imports made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws the same numbers, alone or after others."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The training ranks of the session: as many processes as a test asks for, kept for the next one."""
    with Ranks() as shared:
        yield shared


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Qwen3 checkpoint with the character tokenizer. Shared: do not write into it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama checkpoint with tied embeddings. Shared: do not write into it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True)
