"""`Family`: the interface of a model family. Defaults are those of a plain pre-norm decoder.

A family is a stateless entry of `slime.models.FAMILIES`, so every method takes the checkpoint's `config.json`. As in
all registries, a family can be a frozen dataclass, whose fields are its settings.
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
    """The first `model_type` that the family is registered for."""
    rope_kinds: ClassVar[tuple[str, ...]] = ("default", "linear", "llama3")
    """Supported rotary scalings."""
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)
    """Supported entries of `layer_types`."""
    refused_biases: ClassVar[tuple[str, ...]] = ("mlp_bias", "attention_bias")
    """Config keys of biases that the family does not support."""
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")
    """Config keys with one entry per layer."""
    rotates_itself: ClassVar[bool] = False
    """Whether the family's attention computes its own rotary embedding. If not, the model computes cos and sin once per
    packed row."""
    output_norms: ClassVar[bool] = False
    """Whether the outputs of attention and MLP are normalised before they are added to the residual stream."""
    mtp_form: ClassVar[HeadForm] = HeadForm()
    """The variant of the MTP layer, if the family has one."""
    shares_prefixes: ClassVar[bool] = False
    """Whether samples can share a prefix (`--use-prefix-sharing`). This requires layers that access other tokens only
    through `PackedAttention`, and that take positions from `PackedSequences`."""

    lends_kernels: ClassVar[bool] = False
    """Whether engines can compute with the trainer's kernels (`--true-on-policy`,
    `slime.compat.sglang_trainer_kernels`)."""

    sees_images: ClassVar[bool] = False
    """Whether the family implements `images` and `tower`, for `--multimodal-keys`."""

    def architecture(self, hf_config: HfConfig) -> dict[str, Any]:
        """Returns Megatron settings by field name. Raises `ConfigError` if slime cannot train the model."""
        refuse_unsupported(self, hf_config)
        try:
            return {**decoder_architecture(hf_config), **self.departures(hf_config)}
        except KeyError as missing:
            raise ConfigError(
                f"the checkpoint's config.json has no {missing}, which {hf_config.get('model_type')} requires"
            ) from missing

    def departures(self, hf_config: HfConfig) -> dict[str, Any]:
        """Returns the Megatron settings that differ from `decoder_architecture`. Can raise `ConfigError`."""
        return {}

    def check(self, args: Args) -> str | None:
        """Returns an error message if a run's settings do not work with this family, else None."""
        return None

    def prefix_problem(self, hf_config: HfConfig) -> str | None:
        """Returns a clause for an error message if samples cannot share a prefix, else None."""
        return None if self.shares_prefixes else f"the layers of {hf_config.get('model_type')} do not support it"

    def kernels_problem(self, hf_config: HfConfig) -> str | None:
        """Returns a clause for an error message if engines cannot compute with the trainer's kernels, else None."""
        if self.lends_kernels and not (hf_config.get("attention_bias") or hf_config.get("mlp_bias")):
            return None
        return f"SGLang's layers of {hf_config.get('model_type')} cannot use the trainer's kernels"

    def memory_is_linear_from(self, hf_config: HfConfig) -> int:
        """Returns the sequence length, in tokens, above which the memory of a pass grows linearly."""
        return 0

    def mtp_config(self, hf_config: HfConfig) -> HfConfig | None:
        """Returns a config whose layer 0 is the checkpoint's MTP layer, or None if there is none.

        Raises `ConfigError` if this release does not support the layer.
        """
        return None

    @abstractmethod
    def weight_map(self, hf_config: HfConfig) -> FamilyTable:
        """Returns one row per parameter, with its names in Megatron, files and engines and the way it is split."""

    def spread(self, hf_config: HfConfig) -> Spread:
        """Returns which layouts engines support besides tensor and expert parallelism."""
        return PLAIN

    def attention(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: ModuleSpec) -> ModuleSpec:
        """Returns the module spec of a layer's attention. `standard`: Megatron's module spec."""
        from slime.models.common.packed_attention import packed_attention

        return packed_attention(config, standard)

    def mlp(self, config: TransformerConfig, hf_config: HfConfig, layer: int, standard: Any) -> Any:
        """Returns the module spec or class of a layer's MLP or experts. `standard`: Megatron's module spec."""
        from slime.models.common.mlp import DenseMLP, ExpertLayer

        return ExpertLayer if is_sparse(hf_config, layer) else DenseMLP

    def layer(self, hf_config: HfConfig, number: int) -> type | None:
        """Returns the class of a decoder layer without experts. None means Megatron's own class."""
        return None

    def rotary_axes(self, hf_config: HfConfig) -> tuple[int, ...] | None:
        """Returns the position axis (time, height, width) of each rotary frequency; None for one-axis positions."""
        return None

    def images(self, hf_config: HfConfig, folder: Path) -> ImageProcessor:
        """Returns the image processor of the checkpoint in `folder`. Raises `ConfigError` if the family has none."""
        raise ConfigError(f"{hf_config.get('model_type')} does not support images; remove --multimodal-keys")

    def tower(
        self, hf_config: HfConfig, weights: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
    ) -> VisionTower:
        """Returns the family's vision tower. `weights`: the `FamilyTable.carried` tensors, by checkpoint name."""
        raise NotImplementedError(f"{type(self).__name__} has no vision tower")

    def flops(self, hf_config: HfConfig) -> FlopsModel:
        """Returns the cost of a forward pass. Raises `ConfigError` for a missing key or unknown attention."""
        return decoder_flops(hf_config, self.attention_cost)

    def attention_cost(self, hf_config: HfConfig, layer: int) -> AttentionCost:
        return grouped_query_cost(hf_config, layer)
