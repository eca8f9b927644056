"""`Family`: the contract of a model family. The defaults describe a plain pre-norm decoder.

A family is a stateless entry of `slime.models.FAMILIES`: every method gets the checkpoint's `config.json`. If a family
is a frozen dataclass, its fields are settings, as in every registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig
from slime.models.common.config import decoder_architecture, is_sparse, refuse_unsupported
from slime.models.common.flops import AttentionCost, FlopsModel, decoder_flops, grouped_query_cost
from slime.models.common.mtp import HeadForm
from slime.models.common.table import PLAIN, FamilyTable, Spread

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.models.common.vision import ImageProcessor, VisionTower
    from slime.settings import Args


class Family(ABC):
    name: ClassVar[str]
    """The first `model_type` for which the family is registered."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Supported rotary scalings."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Supported entries of `layer_types`."""
    refused_biases: ClassVar[tuple[str, ...]] = ("mlp_bias", "attention_bias")
    """Config keys for biases that the family does not train."""
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")
    """Config keys with one entry per layer."""
    rotates_itself: ClassVar[bool] = False
    """Whether the family's attention computes its own rotary embedding. Otherwise the model computes cos and sin once
    per packed row."""
    output_norms: ClassVar[bool] = False
    """Whether the outputs of attention and MLP are normalised before the residual addition."""
    mtp_form: ClassVar[HeadForm] = HeadForm()
    """The form of the MTP layer, if the family has one."""
    shares_prefixes: ClassVar[bool] = False
    """Whether samples may share a prefix (`--use-prefix-sharing`). The layers must read other tokens only through
    `PackedAttention`, without masks, and take positions from `PackedSequences`."""

    sees_images: ClassVar[bool] = False
    """Whether the family has `images` and a `tower`, for `--multimodal-keys`."""

    def architecture(self, hf_config: HfConfig) -> dict[str, Any]:
        """Returns Megatron settings by field name. Raises `ConfigError` for a model that slime cannot train."""
        refuse_unsupported(self, hf_config)
        try:
            return {**decoder_architecture(hf_config), **self.departures(hf_config)}
        except KeyError as missing:
            raise ConfigError(
                f"the checkpoint's config.json has no {missing}, which a {hf_config.get('model_type')} needs"
            ) from missing

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Returns the Megatron settings that differ from `decoder_architecture`. Raises `ConfigError`."""
        return {}

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings of a run do not work with this family, else None."""
        return None

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        """Returns why samples cannot share a prefix, as a clause for a message; None if they can."""
        return None if self.shares_prefixes else f"the layers of {hf_config.get('model_type')} do not support it"

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """Returns a config in which layer 0 is the checkpoint's MTP layer; None without such a layer.

        Raises `ConfigError` for a layer that this release does not train.
        """
        return None

    @abstractmethod
    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """Returns one row per parameter: its names in Megatron, in files and in engines, and how ranks split it."""

    def spread(self, hf_config: HfConfig) -> Spread:
        """Returns how an engine can distribute the model over ranks, besides tensor and expert parallelism."""
        return PLAIN

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """Returns the module spec of a layer's attention. `standard`: Megatron's module spec."""
        from slime.models.common.packed_attention import packed_attention

        return packed_attention(config, standard)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """Returns the module spec or the class of a layer's MLP or experts. `standard`: Megatron's module spec."""
        from slime.models.common.mlp import DenseMLP, ExpertLayer

        return ExpertLayer if is_sparse(hf_config, layer) else DenseMLP

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """Returns the class of a decoder layer without experts; None means Megatron's class."""
        return None

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """Returns the position (time, height, width) that each rotary frequency uses; None if tokens have only one."""
        return None

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        """Returns the image processor of a checkpoint in `folder`. Raises `ConfigError` if the family has none."""
        raise ConfigError(f"a {hf_config.get('model_type')} cannot read images; remove --multimodal-keys")

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        """Returns the family's vision tower. `weights`: the `FamilyTable.carried` tensors, by their names in files."""
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    def flops(self, hf_config: HfConfig) -> FlopsModel:
        """Returns the cost of a forward pass. Raises `ConfigError` for a missing key or an unknown attention."""
        return decoder_flops(hf_config, self.attention_cost)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        return grouped_query_cost(hf_config, layer)
