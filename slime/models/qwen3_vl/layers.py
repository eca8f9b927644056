"""Layers of Qwen3-VL: the frozen vision tower, and decoder layers that add the tower's deeper features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.hf_config import HfConfig


class SeeingLayer(TransformerLayer):
    """Megatron's layer plus features from a deeper layer of the tower (DeepStack, arXiv:2406.04334)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's block passes the row's `PackedSequences` as `packed_seq_params`."""
        hidden, context = super().forward(*args, **kwargs)
        packed = kwargs.get("packed_seq_params")
        images = None if packed is None else packed.images
        if images is not None:
            hidden = hidden.index_add(0, images.rows, images.deep[self.layer_number - 1])
        return hidden, context


ROWS = 64
"""SGLang pads embeddings, including the patch position embedding, to a multiple of this number of rows."""


class Qwen3VLTower:
    """The vision tower (`VisionTower`): a frozen module from transformers."""

    def __init__(
        self, hf_config: HfConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`weights`: tensors by checkpoint name, in any dtype. Raises `CheckpointError` if they do not match the
        config."""
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        shape = {name: value for name, value in hf_config["vision_config"].items() if name != "model_type"}
        model = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**shape), dtype=dtype, attn_implementation="sdpa")
        own = {name.removeprefix("model.").removeprefix("visual."): tensor for name, tensor in weights.items()}
        try:
            model.load_state_dict(own)
        except RuntimeError as error:
            raise CheckpointError(f"the vision tower's weights do not match config.json: {error}") from error
        self._model, self._device = model.eval().requires_grad_(False), device

    @torch.no_grad()
    def __call__(self, pixels: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
        model = self._model.to(self._device)
        seen = model(pixels.to(model.dtype), grid_thw=grids.to(self._device))
        return seen.pooler_output, *seen.deepstack_features

    def resident(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Uses the names of SGLang 0.5.16."""
        for name, tensor in self._model.named_parameters():
            held = tensor.detach().to(self._device, dtype)
            if name == "pos_embed.weight":
                held = torch.cat([held, held.new_zeros(-len(held) % ROWS, held.size(1))])
            yield f"visual.{name}".replace(".attn.qkv.", ".attn.qkv_proj."), held

    def leave(self) -> None:
        self._model.to("cpu")
