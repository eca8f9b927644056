"""A decoder layer behind which the features of a deeper layer of the vision tower are added (DeepStack,
arXiv:2406.04334)."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer


class SeeingLayer(TransformerLayer):
    """Megatron's, but for rows with images."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, called by its block with the row's `PackedSequences` as `packed_seq_params`."""
        hidden, context = super().forward(*args, **kwargs)
        packed = kwargs.get("packed_seq_params")
        images = None if packed is None else packed.images
        if images is not None:
            hidden = hidden.index_add(0, images.rows, images.deep[self.layer_number - 1])
        return hidden, context
