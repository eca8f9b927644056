"""Model families, each in its own folder or in a user's file.

A family defines its Megatron settings (architecture), its tensors (weight map), the modules of its layers and its FLOPs
(see `Family`). Code shared by families is in `common/`. Each family registers its class under the `model_type` values
of `config.json` that it supports:

    @FAMILIES.register("my_model")
    class MyModel(Family): ...

The command line needs architectures, so only modules that define layers may import torch or Megatron. A family imports
these modules when a model is built.
"""

from __future__ import annotations

from typing import Any

from slime.core.errors import ConfigError
from slime.core.hf_config import HfConfig, num_experts_of
from slime.core.registry import Registry
from slime.core.topology import EngineLayout
from slime.models.common.table import FamilyTable, problem
from slime.models.family import Family

__all__ = [
    "FAMILIES",
    "Family",
    "architecture",
    "family_of",
    "images_problem",
    "kernels_problem",
    "layout_problem",
    "load_family",
    "mtp_problem",
    "prefix_problem",
    "table_for",
]

FAMILIES: Registry[Family] = Registry(
    "model family",
    flag="--model-family",
    package="slime.models",
    contract=Family,
)
"""Families by `model_type`."""


def load_family(path: str) -> None:
    """Loads a user's family: `pkg.module`, `path/to/file.py` or `pkg.module:ClassName`. Raises `ConfigError`."""
    found = FAMILIES.get(path)
    if all(entry is not found for _, entry in FAMILIES):
        raise ConfigError(
            f"--model-family {path} is not registered for a model_type; decorate the class with "
            '@FAMILIES.register("the model_type of its config.json")'
        )


def family_of(hf_config: HfConfig, settings: object | None = None) -> Family:
    """Returns a checkpoint's family. `settings` contains the family's settings; None means defaults.

    Like all functions below, raises `ConfigError` for an unknown `model_type`.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"the checkpoint has model_type {model_type!r}; slime supports {', '.join(FAMILIES.names())}; choose "
            "one of these, or pass your own family with --model-family"
        )
    return FAMILIES.get(model_type)() if settings is None else FAMILIES.build(model_type, settings)


def architecture(hf_config: HfConfig) -> dict[str, Any]:
    """Returns Megatron settings by field name. Raises `ConfigError` if the family cannot train the model."""
    return family_of(hf_config).architecture(hf_config)


def layout_problem(hf_config: HfConfig, layout: EngineLayout) -> str | None:
    """Returns a clause for an error message if engines do not support this model in this layout, else None."""
    spread, tied = family_of(hf_config).spread(hf_config), bool(hf_config.get("tie_word_embeddings", False))
    return problem(spread, layout, tied=tied, num_experts=num_experts_of(hf_config))


def mtp_problem(hf_config: HfConfig) -> str | None:
    """Returns a clause for an error message if this model's MTP layer cannot be trained, else None."""
    try:
        found = family_of(hf_config).mtp_config(hf_config)
    except ConfigError as error:
        return str(error)
    return None if found is not None else f"slime cannot train an MTP layer of {hf_config.get('model_type')}"


def prefix_problem(hf_config: HfConfig) -> str | None:
    """Returns a clause for an error message if samples of this model cannot share a prefix, else None."""
    return family_of(hf_config).prefix_problem(hf_config)


def kernels_problem(hf_config: HfConfig) -> str | None:
    """See `Family.kernels_problem`. Raises `ConfigError` for unknown families."""
    return family_of(hf_config).kernels_problem(hf_config)


def images_problem(hf_config: HfConfig) -> str | None:
    """Returns a clause for an error message if this model cannot be trained on images, else None."""
    if not family_of(hf_config).sees_images:
        readers = ", ".join(name for name, entry in FAMILIES if entry.sees_images)
        return f"{hf_config.get('model_type')} cannot be trained on images; use one of {readers}"
    vision = hf_config.get("vision_config")
    return None if vision else "its config.json has no vision_config: this is only the language model"


def table_for(hf_config: HfConfig) -> FamilyTable:
    """Returns a model's weight map, which has one row per parameter."""
    return family_of(hf_config).weight_map(hf_config)
