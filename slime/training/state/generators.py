"""States of the random generators that training draws from, kept with a rank's part of a checkpoint: torch's on each
device, NumPy's, Megatron's tracked ones. Python's `random` is not among them (see `rank_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

RNG = "rng/"
"""Begins the names of their tensors in a file."""


def generator_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name, and the rest as JSON, of the generators as they are."""
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    tensors = {RNG + "torch": torch.get_rng_state(), RNG + "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors[RNG + "cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    tensors.update({f"{RNG}megatron.{name}": state for name, state in tracked.items()})
    return tensors, {"numpy": [kind, int(pos), int(has_gauss), float(cached)], "names": sorted(tensors)}


def set_generator_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """As they were when `generator_state` gave both."""
    kind, pos, has_gauss, cached = meta["numpy"]
    np.random.set_state((kind, tensors[RNG + "numpy"].numpy().astype(np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(tensors[RNG + "torch"])
    if torch.cuda.is_available() and RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RNG + "cuda"])
    prefix = RNG + "megatron."
    get_cuda_rng_tracker().set_states({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
