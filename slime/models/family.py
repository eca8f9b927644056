"""`Family`: the contract of a model family, and what holds for a plain pre-norm decoder where a family does not differ.

A family is an entry of `slime.models.FAMILIES`. It holds no state: a checkpoint's `config.json` is an argument of every
method. A family that is a frozen dataclass has settings, its fields, as entries of every registry do.
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
    """One family of models. Its weight map is its own; the rest has a default."""

    name: ClassVar[str]
    """The first `model_type` that it is registered for."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Rotary scalings that it trains."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Entries of `layer_types` that it trains."""
    refused_biases: ClassVar[tuple[str, ...]] = ("mlp_bias", "attention_bias")
    """Keys of the config that must not ask for a bias; a family with biases, or with words of its own for them, has
    none."""
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")
    """Keys of the config that hold one entry per layer."""
    rotates_itself: ClassVar[bool] = False
    """Its attention makes its rotary embedding by itself; else the model makes cos and sin once for a packed row."""
    output_norms: ClassVar[bool] = False
    """Attention and MLP end with a norm before they are added."""
    mtp_form: ClassVar[HeadForm] = HeadForm()
    """How its layer of multi-token prediction, if it has one, is put together."""
    shares_prefixes: ClassVar[bool] = False
    """Its layers read other tokens through `PackedAttention` alone, without masks, and places from `PackedSequences`.
    Then samples may share the tokens with which they begin (`--use-prefix-sharing`)."""

    sees_images: ClassVar[bool] = False
    """It has `images` and a `tower`, for `--multimodal-keys`."""

    # --- the architecture ---------------------------------------------------------------------------------------------

    def architecture(self, hf_config: HfConfig) -> dict[str, Any]:
        """Megatron settings by field name. Raises `ConfigError` for what is not trained, and for a missing key."""
        refuse_unsupported(self, hf_config)
        try:
            return {**decoder_architecture(hf_config), **self.departures(hf_config)}
        except KeyError as missing:
            raise ConfigError(
                f"the checkpoint's config.json lacks {missing}; it does not describe a {hf_config.get('model_type')}"
            ) from missing

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """The Megatron settings in which it departs from `decoder_architecture`. Raises `ConfigError`."""
        return {}

    def check(self, args: Args) -> str | None:
        """What the settings of a run ask of it that cannot work (got / because / do); None if nothing."""
        return None

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        """Why samples cannot share tokens with which they begin alike, in a half sentence; None if they can."""
        return None if self.shares_prefixes else f"{hf_config.get('model_type')} does not say that its layers can"

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """The config under which layer 0 is built as the checkpoint's layer of multi-token prediction; None without
        one that is trained. Raises `ConfigError` for what is not trained."""
        return None

    # --- its tensors --------------------------------------------------------------------------------------------------

    @abstractmethod
    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """One row per parameter: its names in Megatron, in files and in engines, and how ranks split it."""

    def spread(self, hf_config: HfConfig) -> Spread:
        """How its model in an engine may spread over ranks beyond tensor and expert parallelism; for the weight map."""
        return PLAIN

    # --- its layers ---------------------------------------------------------------------------------------------------

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """The attention module of a layer. `standard`: Megatron's own, which it may build upon."""
        from slime.models.common.packed_attention import packed_attention

        return packed_attention(config, standard)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """The MLP of a layer, or its experts: a module spec or a class. `standard`: Megatron's own."""
        from slime.models.common.mlp import DenseMLP, ExpertLayer

        return ExpertLayer if is_sparse(hf_config, layer) else DenseMLP

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """The module of a whole layer without experts; None: Megatron's own."""
        return None

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """For each frequency which of a token's three positions (time, height, width) turns it; None: tokens have one
        position."""
        return None

    # --- what it sees -------------------------------------------------------------------------------------------------

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        """How the checkpoint in `folder` reads images. Raises `ConfigError` for a family that reads none."""
        raise ConfigError(f"got images for a {hf_config.get('model_type')}, which reads none; drop --multimodal-keys")

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        """Its vision tower. `weights`: the tensors that its table carries, by their names in the files."""
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    # --- its cost -----------------------------------------------------------------------------------------------------

    def flops(self, hf_config: HfConfig) -> FlopsModel:
        """What a forward pass costs. Raises `ConfigError` for a missing key and for attention that is not modelled."""
        return decoder_flops(hf_config, self.attention_cost)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        """Multiply-adds of the attention of a layer."""
        return grouped_query_cost(hf_config, layer)
