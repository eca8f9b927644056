"""`Family`: the contract of a model family, with defaults for a plain pre-norm decoder.

A family is an entry of `slime.models.FAMILIES`. It has no state: every method takes the checkpoint's `config.json`. A
family that is a frozen dataclass has settings, its fields, like entries of every registry.
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
    """One family of models. Each defines its own weight map; everything else has a default."""

    name: ClassVar[str]
    """The first `model_type` that it is registered for."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Supported rotary scalings."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Supported entries of `layer_types`."""
    refused_biases: ClassVar[tuple[str, ...]] = ("mlp_bias", "attention_bias")
    """Config keys that must not enable a bias. Empty for a family that supports biases or has its own keys for them."""
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")
    """Config keys with one entry per layer."""
    rotates_itself: ClassVar[bool] = False
    """Its attention computes its own rotary embedding; otherwise the model computes cos and sin once per packed row."""
    output_norms: ClassVar[bool] = False
    """Attention and MLP outputs are normed before they are added to the residual."""
    mtp_form: ClassVar[HeadForm] = HeadForm()
    """How its multi-token prediction layer, if any, is built."""
    shares_prefixes: ClassVar[bool] = False
    """Its layers see other tokens only through `PackedAttention`, without masks, and take positions from
    `PackedSequences`. Then samples may share the tokens with which they begin (`--use-prefix-sharing`).
    """

    sees_images: ClassVar[bool] = False
    """It has `images` and a `tower`, for `--multimodal-keys`."""

    # --- the architecture ---------------------------------------------------------------------------------------------

    def architecture(self, hf_config: HfConfig) -> dict[str, Any]:
        """Megatron settings by field name. Raises `ConfigError` for unsupported options and for a missing key."""
        refuse_unsupported(self, hf_config)
        try:
            return {**decoder_architecture(hf_config), **self.departures(hf_config)}
        except KeyError as missing:
            raise ConfigError(
                f"the checkpoint's config.json lacks {missing}; it does not describe a {hf_config.get('model_type')}"
            ) from missing

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Megatron settings that differ from `decoder_architecture`. Raises `ConfigError` for unsupported options."""
        return {}

    def check(self, args: Args) -> str | None:
        """The problem with a run's settings for this family (got / because / do); None if there is no problem."""
        return None

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        """Why samples cannot share the tokens with which they begin, as a clause for a message; None if they can."""
        return None if self.shares_prefixes else f"{hf_config.get('model_type')} does not say that its layers can"

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """The config that builds layer 0 as the checkpoint's multi-token prediction layer; None without a trainable
        one.

        Raises `ConfigError` for unsupported options.
        """
        return None

    # --- tensors ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """One row per parameter: its names in Megatron, in files and in engines, and how ranks split it."""

    def spread(self, hf_config: HfConfig) -> Spread:
        """How an engine may spread the model over ranks, beyond tensor and expert parallelism."""
        return PLAIN

    # --- layers -------------------------------------------------------------------------------------------------------

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """The attention module of a layer. `standard`: Megatron's own, on which it may build."""
        from slime.models.common.packed_attention import packed_attention

        return packed_attention(config, standard)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """The MLP or experts of a layer: a module spec or a class. `standard`: Megatron's own."""
        from slime.models.common.mlp import DenseMLP, ExpertLayer

        return ExpertLayer if is_sparse(hf_config, layer) else DenseMLP

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """The module of a whole layer without experts; None: Megatron's own."""
        return None

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """For each frequency, the index of the position (time, height, width) that it uses; None: tokens have one
        position.
        """
        return None

    # --- vision -------------------------------------------------------------------------------------------------------

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        """The image processor of the checkpoint in `folder`. Raises `ConfigError` for a family that reads no images."""
        raise ConfigError(f"got images for a {hf_config.get('model_type')}, which reads none; drop --multimodal-keys")

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        """Its vision tower. `weights`: the tensors that its table carries, under their names in the files."""
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    # --- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, hf_config: HfConfig) -> FlopsModel:
        """The cost of a forward pass. Raises `ConfigError` for a missing key or an unsupported kind of attention."""
        return decoder_flops(hf_config, self.attention_cost)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        """Multiply-adds of a layer's attention."""
        return grouped_query_cost(hf_config, layer)
