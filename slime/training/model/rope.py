"""Rotary frequencies as the HF config scales them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slime.config.model_shape import rope_kind, rope_of


def inverse_frequencies(hf_config: Mapping[str, Any], head_dim: int) -> Tensor:
    """[head_dim / 2] float32 rotary frequencies with the scaling of the HF config.

    Megatron's own llama 3 scaling fixes three of its four parameters, so the frequencies are computed here.
    Source: RoFormer (Su et al. 2021); llama 3 scaling as published with Llama 3.1.
    """
    theta, scaling = rope_of(hf_config)
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if rope_kind(scaling) == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    long = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, blended, long)
