"""A root mean square norm that does what `transformers` does (float32 statistics, weight in the model's dtype).

It allows sequence parallelism, which Megatron's wrapper of `torch.nn.RMSNorm` refuses.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.ops.norm import rms_norm


class RMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension (Zhang and Sennrich 2019), in the arithmetic of `transformers`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums such gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] in the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)


def current_device() -> torch.device:
    """Where parameters are made: this rank's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
