"""Watches how large the tensors are that a computation makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the largest storage of all results of operations under this mode, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0
        """Of the storage, so an expanded view does not count."""
        self.made_by = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                if size > self.num_elements:
                    self.num_elements, self.made_by = size, f"{func} -> {tuple(leaf.shape)} {leaf.dtype}"
        return out
