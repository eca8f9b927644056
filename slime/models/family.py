"""`Family`: the contract of a model family. The defaults describe a plain pre-norm decoder.

A family is an entry of `slime.models.FAMILIES` without state: every method gets the checkpoint's `config.json`. The
fields of a family that is a frozen dataclass are settings, as in every registry.
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
    """The first `model_type` that it is registered for."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Supported rotary scalings."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Supported entries of `layer_types`."""
    refused_biases: ClassVar[tuple[str, ...]] = ("mlp_bias", "attention_bias")
    """Config keys for biases that the family does not train."""
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")
    """Config keys that hold one entry per layer."""
    rotates_itself: ClassVar[bool] = False
    """Whether the family's attention computes its own rotary embedding. Otherwise the model computes cos and sin once
    per packed row."""
    output_norms: ClassVar[bool] = False
    """Whether the outputs of attention and MLP are normed before they are added."""
    mtp_form: ClassVar[HeadForm] = HeadForm()
    """The form of the layer of multi-token prediction, if the family has one."""
    shares_prefixes: ClassVar[bool] = False
    """Whether samples may share a prefix (`--use-prefix-sharing`). The layers must read other tokens only through
    `PackedAttention`, without masks, and take positions from `PackedSequences`."""

    sees_images: ClassVar[bool] = False
    """Whether the family has `images` and a `tower`, for `--multimodal-keys`."""

    def architecture(self, hf_config: HfConfig) -> dict[str, Any]:
        """Megatron settings by field name. Raises `ConfigError` for a model that is not trained, or a missing key."""
        refuse_unsupported(self, hf_config)
        try:
            return {**decoder_architecture(hf_config), **self.departures(hf_config)}
        except KeyError as missing:
            raise ConfigError(
                f"the checkpoint's config.json lacks {missing}; it does not describe a {hf_config.get('model_type')}"
            ) from missing

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """The Megatron settings that differ from `decoder_architecture`. Raises `ConfigError`."""
        return {}

    def check(self, args: Args) -> str | None:
        """Returns an error message if the settings of a run do not work with this family, else None."""
        return None

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        """Returns why samples cannot share a prefix, as a clause for a message; None if they can."""
        return None if self.shares_prefixes else f"the layers of {hf_config.get('model_type')} do not support it"

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """The config that makes layer 0 the checkpoint's layer of multi-token prediction; None without such a layer.

        Raises `ConfigError` for a layer that this release does not train.
        """
        return None

    @abstractmethod
    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """One row per parameter: its names in Megatron, in files and in engines, and how ranks split it."""

    def spread(self, hf_config: HfConfig) -> Spread:
        """How an engine may spread the model over ranks, beyond tensor and expert parallelism."""
        return PLAIN

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """The attention module of a layer. `standard`: Megatron's own."""
        from slime.models.common.packed_attention import packed_attention

        return packed_attention(config, standard)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """The MLP or the experts of a layer: a module spec or a class. `standard`: Megatron's own."""
        from slime.models.common.mlp import DenseMLP, ExpertLayer

        return ExpertLayer if is_sparse(hf_config, layer) else DenseMLP

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """The class of a whole layer without experts; None: Megatron's own."""
        return None

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """The position (time, height or width) that each rotary frequency uses; None if a token has one position."""
        return None

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        """The image processor of the checkpoint in `folder`. Raises `ConfigError` for a family without images."""
        raise ConfigError(f"a {hf_config.get('model_type')} cannot read images; drop --multimodal-keys")

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        """The family's vision tower. `weights`: the tensors that the table carries, by their names in files."""
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    def flops(self, hf_config: HfConfig) -> FlopsModel:
        """The cost of a forward pass. Raises `ConfigError` for a missing key, or attention that is not modelled."""
        return decoder_flops(hf_config, self.attention_cost)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        return grouped_query_cost(hf_config, layer)
