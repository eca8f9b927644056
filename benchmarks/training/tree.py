"""Access to a checkout of slime. This module handles all differences between checkouts.

Invariant: `enter` runs before any module of `slime` is imported in the process.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PHASES: Mapping[str, tuple[str, ...]] = {
    "prepare the batch": ("prepare",),
    "log-probs before the update": ("forward_batch", "forward_signals"),
    "advantages": ("with_advantages", "with_signals"),
    "clear gradients": ("zero_grad",),
    "forward and backward": ("run_step", "_run_step"),
    "pack and copy micro-batches": ("to_device",),
    "reduce gradients": ("reduce_grads",),
    "share metrics": ("_share",),
    "train-inference mismatch": ("_finish_mismatch", "_finish_gap"),
    "optimizer": ("apply_update",),
}
"""Part of a training call -> its function, under the names in different checkouts, newest first."""
PHASE_MODULES = ("slime.training.backend", "slime.training.step.train_step")
WITHOUT_SYNC = ("pack and copy micro-batches",)
"""Parts inside a step, whose host time is measured without synchronising the device."""


@dataclass(frozen=True)
class Tree:
    """The functions and classes of a checkout that the benchmark uses."""

    root: Path
    parse_args: Any
    backend: type[Any]
    """`MegatronBackend`."""
    train_batch: type[Any]
    train_sample: type[Any]

    def batch(self, samples: Iterable[Mapping[str, Any]]) -> Any:
        """A `TrainBatch`."""
        return self.train_batch(rollout_id=0, samples=tuple(self.train_sample(**fields) for fields in samples))


def enter(root: Path) -> Tree:
    """Puts the checkout first on the path and imports it. Raises `RuntimeError` if another is already imported."""
    sys.path.insert(0, str(root))
    return load(root)


def load(root: Path) -> Tree:
    """Returns the checkout that is first on the path. Raises `RuntimeError` if it is not `root`."""
    import slime

    if Path(str(slime.__file__)).resolve().parents[1] != root.resolve():
        raise RuntimeError(f"slime was imported from {slime.__file__} before {root} was entered")
    batch = import_module("slime.core.batch")
    return Tree(
        root,
        _settings().parse_args,
        import_module("slime.training.backend").MegatronBackend,
        batch.TrainBatch,
        batch.TrainSample,
    )


def _settings() -> Any:
    try:
        return import_module("slime.settings")
    except ModuleNotFoundError:  # a checkout from before this package had its name
        return import_module("slime.config")


@contextlib.contextmanager
def random_weights(seed: int) -> Iterator[None]:
    """Makes a backend in the block fill its parameters with random numbers instead of reading a checkpoint.

    Each name has its own generator on the device, so ranks that hold the same parameter draw the same numbers.
    """
    module: Any = import_module("slime.training.state.hf_weights")

    def fill(model: Any, *_given: Any, **_named: Any) -> None:
        import torch

        shards = model if isinstance(model, Mapping) else model.shards  # older checkouts
        with torch.no_grad():
            for name, parameter in shards.items():
                if parameter.ndim == 1:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                generator = torch.Generator(parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
                parameter.normal_(0.0, 0.02, generator=generator)

    assert hasattr(module, "load_weights"), "the checkout loads its weights elsewhere; say here where"
    original, module.load_weights = module.load_weights, fill
    try:
        yield
    finally:
        module.load_weights = original


def num_parameters(backend: Any) -> int:
    """Returns the number of parameters of one rank."""
    shards = backend._parameters if hasattr(backend, "_parameters") else backend.model.shards
    return sum(p.numel() for p in shards.values())


def functions(names: Sequence[str]) -> list[tuple[Any, str]]:
    """Returns (module, name) of every place where a checkout looks up one of these functions."""
    modules = [import_module(name) for name in PHASE_MODULES]
    return [(module, name) for module in modules for name in names if hasattr(module, name)]
