"""Which quantised format a checkpoint is in, from its config.json and the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError
from slime.core.hf_config import quantisation_of, read_hf_config, tensor_names
from slime.weights.quantised.block_fp8 import SCALE_SUFFIX, BlockFp8
from slime.weights.quantised.channel_fp8 import SCALE, ChannelFp8, require_channels
from slime.weights.quantised.format import QuantisedFormat
from slime.weights.quantised.grouped_int4 import PACKED, GroupedInt4, group_of

KNOWN = (
    "FP8 with block scales (quant_method 'fp8'), and of compressed-tensors FP8 with a scale for each output feature "
    "('float-quantized') and INT4 in groups ('pack-quantized')"
)


def format_of(config: Mapping[str, Any], names: Iterable[str]) -> QuantisedFormat | None:
    """The format of a checkpoint with this config.json and tensors of these names; None if nothing is quantised.

    The files say which weights are quantised: those that have scales. Raises `ConfigError` for a format that slime does
    not read.
    """
    found = quantisation_of(config)
    if found is None:
        return None
    method, known = found.get("quant_method"), set(names)
    if method == "fp8":
        from slime.weights.fp8 import block_of

        block = block_of(found)
        weights = frozenset(n for n in known if n + SCALE_SUFFIX in known)
        return BlockFp8(weights, *block, powers_of_two=found.get("scale_fmt") == "ue8m0")
    if method == "compressed-tensors" and found.get("format") == "float-quantized":
        require_channels(found)
        modules = {n.removesuffix(SCALE) for n in known if n.endswith(f".{SCALE}")}
        return ChannelFp8(frozenset(module + "weight" for module in modules))
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        weights = frozenset(n.removesuffix(PACKED) + "weight" for n in known if n.endswith(f".{PACKED}"))
        return GroupedInt4(weights, group_of(found))
    raise ConfigError(
        f"got a checkpoint with quant_method={method!r}, format={found.get('format')!r}; slime reads {KNOWN}, and no "
        "other; choose such a checkpoint or one in bfloat16"
    )


def format_of_folder(hf_checkpoint: str) -> QuantisedFormat | None:
    """The format of a checkpoint folder."""
    return format_of(read_hf_config(hf_checkpoint), tensor_names(Path(hf_checkpoint)))
