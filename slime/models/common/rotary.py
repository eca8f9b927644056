"""Rotary embedding: frequencies, scaled according to the HF config, and the rotation.

Sources: RoFormer (Su et al. 2021); llama 3 scaling as released with Llama 3.1; yarn (Peng et al. 2023,
arXiv:2309.00071) with DeepSeek's two magnitudes: `attention_factor` on cos and sin, `softmax_scale` on the scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.core.hf_config import HfConfig
from slime.models.common.config import rope_kind, rope_of

Scaling = Mapping[str, Any]


def inverse_frequencies(hf_config: HfConfig, head_dim: int) -> Tensor:
    """Returns the rotary frequencies [head_dim / 2] float32, scaled according to the HF config.

    Computed here because Megatron hardcodes three of the four parameters of llama 3 scaling.
    """
    theta, scaling = rope_of(hf_config)
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return frequencies
    factor = _factor(hf_config, scaling)
    if rope_kind(scaling) == "linear":
        return frequencies / factor
    if rope_kind(scaling) == "yarn":
        slow = _yarn_share(theta, scaling, head_dim)
        return frequencies / factor * slow + frequencies * (1 - slow)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    long = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, blended, long)


def _factor(hf_config: HfConfig, scaling: Scaling) -> float:
    """Returns the context extension factor."""
    original = float(scaling.get("original_max_position_embeddings") or 1)
    return float(scaling.get("factor") or hf_config["max_position_embeddings"] / original)


def _yarn_share(theta: float, scaling: Scaling, head_dim: int) -> Tensor:
    """Returns yarn's interpolation weight for each frequency [head_dim / 2], from 0 to 1."""
    original = float(scaling["original_max_position_embeddings"])

    def dimension(rotations: float) -> float:
        """Returns the dimension that completes this many rotations over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(scaling.get("beta_fast") or 32))
    high = dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def attention_factor(hf_config: HfConfig) -> float:
    """Returns the factor for cos and sin, which is 1 except with yarn."""
    _, scaling = rope_of(hf_config)
    if scaling is None or rope_kind(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = _factor(hf_config, scaling), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _magnitude(factor, float(mscale)) / _magnitude(factor, float(all_dim))
    return _magnitude(factor)


def softmax_scale(hf_config: HfConfig, head_dim: int) -> float:
    """Returns the softmax scale of latent attention: 1 / sqrt(head_dim) times the square of yarn's magnitude."""
    _, scaling = rope_of(hf_config)
    all_dim = float((scaling or {}).get("mscale_all_dim") or 0)
    magnitude = _magnitude(_factor(hf_config, scaling), all_dim) if scaling and all_dim else 1.0
    return float(head_dim**-0.5 * magnitude * magnitude)


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """positions [T] int64, frequencies [d / 2] -> cos and sin, each [T, 1, d / 2] float32, scaled by `factor`."""
    angles = (positions.float().unsqueeze(1) * frequencies).unsqueeze(1)
    return angles.cos() * factor, angles.sin() * factor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embedding shared by all layers of a model."""

    frequencies: Tensor
    """[r / 2] float32 on the model's device."""
    factor: float
    """A factor for cos and sin."""
    axes: Tensor | None = None
    """[r / 2] int64: which of a token's three positions each frequency uses. None: tokens have one position."""

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64, or [3, T] with `axes` -> cos and sin, each [T, r / 2] float32."""
        if positions.dim() == 2:
            assert self.axes is not None, "a model without axes got several positions per token"
            angles = positions.float().index_select(0, self.axes).T * self.frequencies
            return angles.cos() * self.factor, angles.sin() * self.factor
        cos, sin = cos_sin(positions, self.frequencies, self.factor)
        return cos.squeeze(1), sin.squeeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """[T, heads, d] -> rotated [T, heads, d]. Pairs are (0, 1), (2, 3), … if `interleaved`, else (0, d / 2), ….

    The output lists the first members of all pairs, then the second members. This permutation cancels out in q @ k.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
