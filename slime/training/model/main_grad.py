"""Gradients that are added to Megatron's float32 sums where they are computed, not by the hook behind autograd.

Megatron's data-parallel wrapper gives a trained parameter its sum (`main_grad`) and a mark (`grad_added_to_main_grad`).
The mark tells its hook that what autograd delivers must not be added. Where autograd delivers more than one gradient of
a parameter (the embedding, tied to an output layer of the same chunk: `zero_out_wgrad`) the hook adds it all the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The float32 sum of gradients of a parameter, of its shape; None for one that no wrapper trains."""
    return vars(parameter).get("main_grad")


def placeholder(parameter: Tensor) -> Tensor | None:
    """What a backward pass returns for `parameter` after adding its gradient to `main_grad`; marks it.

    Uninitialised, of its shape, and read by nobody: with `--overlap-grad-reduce` the hook wants to see some gradient.
    None where the embedding delivers one to the same parameter, which is then all that the hook adds.
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if vars(parameter).get("zero_out_wgrad") else torch.empty_like(parameter)
