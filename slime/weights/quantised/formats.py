"""Quantised formats of checkpoints and engines, one class each. A class defines which weights are quantised, quantises
and dequantises them, and builds an engine's weight table. `format_of` detects the format of a checkpoint.
`fake_quantised` gives the trainer the weights that engines compute with: a shard that is quantised and dequantised.

Invariants
1. The codes and scales of a weight depend only on that weight. So every rank that has the full tensor computes
   bitwise-identical results, whatever the layout of trainer or engine.
2. All entries of a `block` share one scale. So if a shard starts and ends at block boundaries, quantising the shard
   gives the same codes and scales as quantising the full weight. `require_whole_blocks` rejects other shards, so
   fake-quantised weights do not depend on how weights are sharded.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.core.errors import CheckpointError, ConfigError
from slime.core.hf_config import quantisation_of, read_hf_config, tensor_names
from slime.core.text import listed
from slime.models.common.table import EXPERT, Entry, FamilyTable, Row, Unit
from slime.weights.hf_shards import by_segments

WHOLE = 0
"""As a block size: all rows or all columns."""


def require_finite(scales: Tensor, weights: Tensor, kind: str) -> None:
    """Raises `CheckpointError` if a scale, and therefore an entry of `weights` [..., out, in], is not finite."""
    if not scales.isfinite().all():
        raise CheckpointError(
            f"a weight of shape {list(weights.shape[-2:])} has an infinite or NaN entry, which {kind} cannot "
            "represent; check the training step that produced it"
        )


@dataclass(frozen=True)
class QuantisedFormat(ABC):
    """The quantisation of one checkpoint."""

    names: frozenset[str]
    """HF names (`<module>.weight`) of the quantised weights. All others are plain."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name of the format in messages."""

    @property
    @abstractmethod
    def block(self) -> tuple[int, int]:
        """Number of rows and columns that share a scale. `WHOLE` means all of them."""

    @abstractmethod
    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        """Returns the names of the tensors that replace weight `hf_name` in checkpoint files."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each part, in the order of `parts_of`."""

    def about(self, hf_name: str) -> str | None:
        """Returns the name of the extra tensor that stores the weight's shape in checkpoint files, or None."""
        return None

    @abstractmethod
    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Quantises weights [..., out, in] into parts [..., *part shape] on the same device.

        Raises `CheckpointError` for a weight that is not finite.
        """

    @abstractmethod
    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        """Reconstructs the weight [..., out, in] in float32, as the engine computes it before its own rounding.

        Raises `CheckpointError` if the shapes do not match.
        """

    @abstractmethod
    def rows(self, row: Row) -> tuple[Row, ...]:
        """Returns the rows that replace a quantised row in an engine's table, one per part.

        Raises `ConfigError` if engines do not support this row in quantised form.
        """

    def row_of_part(self, row: Row, part: int, **changes: Any) -> Row:
        """Returns a copy of `row` renamed for part number `part`, with `changes` applied."""

        def name(weight: str) -> str:
            return self.parts_of(weight)[part]

        hf, engines = tuple(map(name, row.hf)), tuple(map(name, row.engines))
        megatron = row.megatron + name("weight").removeprefix("weight")
        return dataclasses.replace(row, megatron=megatron, hf=hf, engine=name(row.engine), engines=engines, **changes)

    def require_linear(self, row: Row) -> None:
        """Raises `ConfigError` if engines do not support this row in quantised form."""
        if row.stacked or Unit.VOCAB in row.units:
            raise ConfigError(
                f"{row.hf[0]} is in {self.title}, but engines do not support quantised embeddings, output layers or "
                "stacked experts; quantise only linear layers"
            )

    def fake(self, weights: Tensor) -> Tensor:
        """Rounds weights as engines do (to bfloat16, quantised, and back to bfloat16), then restores their dtype."""
        return self.dequantise(self.quantise(weights.to(torch.bfloat16))).to(torch.bfloat16).to(weights.dtype)

    def is_quantised(self, hf_names: Sequence[str]) -> bool:
        """Returns whether all of these weights, which an engine fuses into one tensor, are quantised."""
        found = [name in self.names for name in hf_names]
        return bool(found) and all(found)

    def one_by_one(self, names: Sequence[str], weights: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Quantises n weights [n, out, in] together and yields (name, part) for each part of each weight."""
        parts = self.quantise(weights)
        for i, name in enumerate(names):
            for part_name, part in zip(self.parts_of(name), parts, strict=True):
                yield part_name, part[i]


SMALLEST = 1e-4
"""Lower bound on a block's largest entry, which keeps scales above zero. Same value as in SGLang."""
E4M3_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of the scales' names, after the name of the weight, in files and engines."""


@dataclass(frozen=True)
class BlockFp8(QuantisedFormat):
    """FP8 with one scale per block, as in the public DeepSeek-V3 and Qwen3 checkpoints. Uses the engine's arithmetic.

    `<name>` holds e4m3 codes, `<name>_scale_inv` float32 scales. A scale is the block's largest magnitude / 448, and a
    code is entry / scale, rounded to nearest. This is DeepSeek's recipe (arXiv:2412.19437, section 3.3.2), bitwise
    equal to SGLang's `bf16_to_block_fp8_128`. With `scale_fmt: ue8m0` in config.json (DeepSeek-V3.1), scales are
    rounded up to powers of two, as in SGLang's `per_block_cast_to_fp8`.

    `slime convert --to fp8` (`quantise` below) rounds scales to 20 bits, so that dequantising and requantising its
    files is bitwise lossless. A weight sync gains nothing from this, because the trainer has rounded its weights to
    bfloat16. That changes the largest entry of a block, and with it the scale, by up to 2^-9. Requantised codes are
    unaffected, because half a step of e4m3 is at least eight times larger.
    """

    block_rows: int
    block_columns: int
    powers_of_two: bool = False
    """Whether scales are powers of two."""

    @property
    def title(self) -> str:
        return f"FP8 in blocks of {self.block_rows} x {self.block_columns}"

    @property
    def block(self) -> tuple[int, int]:
        return self.block_rows, self.block_columns

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        return hf_name, hf_name + SCALE_SUFFIX

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.float8_e4m3fn, torch.float32

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        rows, columns = self.block
        *lead, out, size = weights.shape
        more = -out % rows, -size % columns
        padded = torch.nn.functional.pad(weights, (0, more[1], 0, more[0])) if any(more) else weights
        blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
        scales = blocks.abs().amax((-3, -1)).float().clamp(min=SMALLEST) / E4M3_MAX
        require_finite(scales, weights, "FP8")
        if self.powers_of_two:
            scales = power_of_two_above(scales)
        codes = (blocks.float() / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
        codes = codes.reshape(*lead, out + more[0], size + more[1])
        return (codes[..., :out, :size].contiguous() if any(more) else codes), scales

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        codes, scales = parts
        return dequantise(codes, scales, self.block)

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        block = self.block
        if row.dim is not None and len(row.segments) > 1 and any(size % block[row.dim] for size in row.segments):
            raise ConfigError(
                f"engines stack {' and '.join(row.hf)} of {list(row.segments)} rows in {self.title}, so two of these "
                "weights would share a scale; use a checkpoint whose sizes are multiples of the block size"
            )
        dim = row.dim
        shapes = tuple((-(-out // block[0]), -(-size // block[1])) for out, size in row.shapes)
        segments = () if dim is None else tuple(-(-size // block[dim]) for size in row.segments)
        return row, self.row_of_part(row, 1, shapes=shapes, segments=segments, wide=True)


def power_of_two_above(scales: Tensor) -> Tensor:
    """Rounds positive numbers up to powers of two."""
    bits = scales.view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


# --- block-scaled FP8 files of `slime convert --to fp8`, in the format of `BlockFp8`
#
# Invariants
# 1. `quantise(dequantise(q, s))` equals `(q, s)` bitwise for files written by `quantise`: scales have 20 significant
#    bits and codes at most 4, so their product is exact in float32. Scales from other tools use all 24 bits and can
#    change by 2^-19. Their codes stay the same if each block contains the largest e4m3 code, as in public files.
# 2. The error of an entry w is at most max(|w| / 16, scale / 1024): half a step of e4m3, normal or subnormal.

BLOCK = (128, 128)
"""Block size [rows, columns] of files written by slime. Other files specify theirs in config.json."""
_SMALLEST = 2.0**-90
"""A block with no entry above this value is written as zeros, because its scale would be subnormal in float32."""
_DROPPED_BITS = 0b1111
"""Mask of the low float32 mantissa bits that are zero in every scale."""
_LINEAR = re.compile(
    r"(?:^|.*\.)layers\.\d+\.(?:self_attn\.(?:[qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|indexer\.(?:wq_b|wk))"
    r"|linear_attn\.(?:in_proj_(?:qkvz|qkv|z)|out_proj)"
    r"|mlp\.(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up|down|gate_up)_proj"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight"
)
_STACKED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")


def block_of(quantisation: Mapping[str, Any]) -> tuple[int, int]:
    """Reads the block size [rows, columns] from the `quantization_config` of an FP8 checkpoint.

    Raises `ConfigError` if the checkpoint uses a different kind of FP8.
    """
    block = quantisation.get("weight_block_size")
    if not block or len(block) != 2 or min(block) < 1:
        raise ConfigError(
            f"the checkpoint has quant_method='fp8', weight_block_size={block}; slime reads FP8 only with block "
            "scales, for which weight_block_size is [rows, columns]; use a supported format or bfloat16"
        )
    return int(block[0]), int(block[1])


def quantises(hf_name: str) -> bool:
    """Returns whether `--to fp8` quantises a tensor. As in public checkpoints, it quantises only linear weights of
    attention, MLPs and experts.

    Embeddings, norms, routers, gates, convolutions and the output layer are not quantised.
    """
    return _LINEAR.fullmatch(hf_name) is not None


def apart(hf_name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Splits stacked experts, including [gate; up], as in FP8 files. Yields other tensors unchanged."""
    stacked = _STACKED.fullmatch(hf_name)
    if stacked is None:
        yield hf_name, tensor
        return
    parts = stacked[2].split("_")
    for i, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{stacked[1]}{i}.{part}_proj.weight", weight


def quantise(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Returns codes [..., out, in] in float8_e4m3fn and scales [..., ceil(out / rows), ceil(in / columns)] in float32.

    A scale is the block's largest magnitude / 448, rounded up to 20 bits, or 1 for a block of zeros. Processes one row
    of blocks at a time. Raises `CheckpointError` if a weight is not finite.
    """
    codes, scales = [], []
    for rows in weight.float().split(block[0], -2):
        largest = rows.abs().amax(-2)
        largest = torch.nn.functional.pad(largest, (0, -largest.shape[-1] % block[1]))
        largest = largest.unflatten(-1, (-1, block[1])).amax(-1)
        scale = torch.where(largest <= _SMALLEST, 1.0, _round_up(largest / E4M3_MAX))  # keeps NaN for the check below
        codes.append((rows / _widen(scale, block[1], rows.shape[-1])).to(torch.float8_e4m3fn))
        scales.append(scale)
    stacked = torch.stack(scales, -2)
    if not stacked.isfinite().all():
        raise CheckpointError(
            f"a weight of shape {list(weight.shape)} has an infinite or NaN entry, which FP8 cannot represent"
        )
    return torch.cat(codes, -2), stacked


def dequantise(codes: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns the weight [..., out, in] in float32. `scale`: [..., ceil(out / rows), ceil(in / columns)].

    Raises `CheckpointError` if the shapes do not match.
    """
    *lead, out, columns = codes.shape
    want = [*lead, -(-out // block[0]), -(-columns // block[1])]
    if list(scale.shape) != want:
        raise CheckpointError(
            f"a weight of shape {list(codes.shape)} in blocks of {list(block)} has scales of shape "
            f"{list(scale.shape)}, expected {want}; weight_block_size in config.json does not match these files"
        )
    weight = codes.float()
    for i, rows in enumerate(weight.split(block[0], -2)):
        rows *= _widen(scale[..., i, :].float(), block[1], columns)
    return weight


def config_entry(kept: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of the written files. `kept`: modules that are not quantised."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }


def _widen(scale: Tensor, block_columns: int, columns: int) -> Tensor:
    """Expands one row of block scales [..., blocks] to [..., 1, columns]."""
    return scale.repeat_interleave(block_columns, -1)[..., :columns].unsqueeze(-2)


def _round_up(scale: Tensor) -> Tensor:
    """Rounds positive float32 numbers up to 20 significant bits."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + _DROPPED_BITS) & ~_DROPPED_BITS).view(torch.float32)


CHANNEL_SCALE = "weight_scale"
"""Name of the scales in checkpoint files, next to `weight`."""


def require_channels(quantisation: Mapping[str, Any]) -> None:
    """Raises `ConfigError` unless a `float-quantized` checkpoint is e4m3 with one scale per output feature."""
    found = [group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values()]
    want = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    if not found or any(weights.get(key) != value for weights in found for key, value in want.items()):
        raise ConfigError(
            f"the compressed-tensors checkpoint has {found}; slime reads FP8 with one scale per output feature, "
            "and symmetric INT4 in groups; use a supported format or bfloat16"
        )


@dataclass(frozen=True)
class ChannelFp8(QuantisedFormat):
    """FP8 with one scale per output feature, as written by compressed-tensors (`float-quantized`; GLM-4.5-FP8).

    `<module>.weight` holds the codes in e4m3, `weight_scale` [out, 1] the scales. A scale is the row's largest
    magnitude / 448, computed in the weight's dtype as in compressed-tensors, and a code is entry / scale, rounded to
    nearest. Scales are sent in float32, as stored by engines.
    """

    @property
    def title(self) -> str:
        return "FP8 in rows"

    @property
    def block(self) -> tuple[int, int]:
        return 1, WHOLE

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        return hf_name, hf_name.removesuffix("weight") + CHANNEL_SCALE

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.float8_e4m3fn, torch.float32

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        scales = weights.abs().amax(-1, keepdim=True) / E4M3_MAX
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        require_finite(scales, weights, "FP8")
        codes = (weights / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return codes, scales.float()

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        codes, scales = parts
        if list(scales.shape) != [*codes.shape[:-1], 1]:
            raise CheckpointError(
                f"a weight of shape {list(codes.shape)} has scales of shape {list(scales.shape)}, expected one per "
                "row; config.json does not match these files"
            )
        return codes.float() * scales.float()

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        shapes = tuple((out, 1) for out, _ in row.shapes)
        whole = {} if row.dim == 0 else {"dim": None, "units": (), "segments": ()}
        return row, self.row_of_part(row, 1, shapes=shapes, wide=True, **whole)


PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
"""Names of the tensors that replace `weight` in checkpoint files."""
PER_WORD = 8
"""Number of codes in an int32."""
BITS = 4
LOWEST, HIGHEST = -8, 7


def group_of(quantisation: Mapping[str, Any]) -> int:
    """Reads the group size of a compressed-tensors checkpoint. Raises `ConfigError` unless it is symmetric INT4."""
    groups = list((quantisation.get("config_groups") or {}).values())
    found = [g.get("weights") or {} for g in groups]
    want = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group"}
    plain = [g for g in found if all(g.get(key) == value for key, value in want.items()) and not g.get("actorder")]
    sizes = {int(g["group_size"]) for g in plain if g.get("group_size")}
    activations = any(g.get("input_activations") for g in groups)
    if len(plain) != len(found) or len(sizes) != 1 or activations or min(sizes) % PER_WORD:
        raise ConfigError(
            f"the compressed-tensors checkpoint has {found}; slime reads symmetric INT4 in groups of one size, "
            "without quantised activations or activation order; use a supported format or bfloat16"
        )
    return sizes.pop()


@dataclass(frozen=True)
class GroupedInt4(QuantisedFormat):
    """INT4 with one scale per group of input features, as packed by compressed-tensors (`pack-quantized`, symmetric).

    `<module>.weight_packed` packs eight codes into each int32, lowest bits first, each stored as code + 8.
    `weight_scale` has one scale per group: the largest magnitude / 7.5, computed in the weight's dtype, which must
    match the engine's for bitwise-equal scales. `weight_shape` is in the files but not sent, because engines derive it
    from config.json.
    """

    group: int
    """Number of consecutive input features that share a scale."""

    @property
    def title(self) -> str:
        return f"INT4 in groups of {self.group}"

    @property
    def block(self) -> tuple[int, int]:
        return 1, self.group

    def parts_of(self, hf_name: str) -> tuple[str, ...]:
        module = hf_name.removesuffix("weight")
        return module + PACKED, module + SCALE

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.int32, torch.bfloat16

    def about(self, hf_name: str) -> str | None:
        return hf_name.removesuffix("weight") + SHAPE

    def quantise(self, weights: Tensor) -> tuple[Tensor, ...]:
        size = weights.shape[-1]
        if size % self.group:
            raise CheckpointError(
                f"a weight has {size} input features, which is not a multiple of the group size {self.group}"
            )
        groups = weights.unflatten(-1, (-1, self.group))
        scales = groups.abs().amax(-1) / ((HIGHEST - LOWEST) / 2)
        scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
        require_finite(scales, weights, "INT4")
        codes = (groups / scales.unsqueeze(-1)).clamp(LOWEST, HIGHEST).round().to(torch.int32) - LOWEST
        words = codes.flatten(-2).unflatten(-1, (-1, PER_WORD))
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=weights.device)
        packed = (words << shifts).sum(-1, dtype=torch.int32)  # the codes' bits do not overlap
        return packed, scales

    def dequantise(self, parts: Sequence[Tensor]) -> Tensor:
        packed, scales = parts[0], parts[1]
        *lead, words = packed.shape
        if list(scales.shape) != [*lead, words * PER_WORD // self.group] or packed.dtype is not torch.int32:
            raise CheckpointError(
                f"packed codes {packed.dtype} {list(packed.shape)} have scales of shape {list(scales.shape)} in groups "
                f"of {self.group}; config.json does not match these files"
            )
        shifts = torch.arange(0, 32, BITS, dtype=torch.int32, device=packed.device)
        codes = ((packed.unsqueeze(-1) >> shifts) & 0xF) + LOWEST
        groups = codes.flatten(-2).unflatten(-1, (-1, self.group)).float() * scales.float().unsqueeze(-1)
        return groups.flatten(-2)

    def rows(self, row: Row) -> tuple[Row, ...]:
        self.require_linear(row)
        inputs = {shape[1] for shape in row.shapes} | (set(row.segments) if row.dim == 1 else set())
        if any(size % self.group for size in inputs):
            raise ConfigError(
                f"the group size {self.group} does not divide the {sorted(inputs)} input features of {row.hf[0]}; use "
                "a checkpoint whose group size does"
            )
        return tuple(
            self.row_of_part(
                row,
                part,
                shapes=tuple((out, size // each) for out, size in row.shapes),
                segments=tuple(s // each for s in row.segments) if row.dim == 1 else row.segments,
                transposed=EXPERT in row.megatron,
            )
            for part, each in enumerate((PER_WORD, self.group))
        )


KNOWN = (
    "FP8 with block scales (quant_method 'fp8'), and from compressed-tensors, FP8 with one scale per output feature "
    "('float-quantized') or INT4 in groups ('pack-quantized')"
)


def format_of(config: Mapping[str, Any], names: Iterable[str]) -> QuantisedFormat | None:
    """Detects the format of a checkpoint from its config.json and tensor names. Returns None if it is not quantised.

    A weight is quantised if it has scales. Raises `ConfigError` if the format is not supported.
    """
    found = quantisation_of(config)
    if found is None:
        return None
    method, known = found.get("quant_method"), set(names)
    if method == "fp8":
        block = block_of(found)
        weights = frozenset(n for n in known if n + SCALE_SUFFIX in known)
        return BlockFp8(weights, *block, powers_of_two=found.get("scale_fmt") == "ue8m0")
    if method == "compressed-tensors" and found.get("format") == "float-quantized":
        require_channels(found)
        modules = {n.removesuffix(CHANNEL_SCALE) for n in known if n.endswith(f".{CHANNEL_SCALE}")}
        return ChannelFp8(frozenset(module + "weight" for module in modules))
    if method == "compressed-tensors" and found.get("format") == "pack-quantized":
        weights = frozenset(n.removesuffix(PACKED) + "weight" for n in known if n.endswith(f".{PACKED}"))
        return GroupedInt4(weights, group_of(found))
    raise ConfigError(
        f"the checkpoint has quant_method={method!r}, format={found.get('format')!r}; slime reads only {KNOWN}; "
        "use a supported format or bfloat16"
    )


def format_of_folder(hf_checkpoint: str) -> QuantisedFormat | None:
    return format_of(read_hf_config(hf_checkpoint), tensor_names(Path(hf_checkpoint)))


def engine_table(table: FamilyTable, quantised: QuantisedFormat | None) -> FamilyTable:
    """Returns `table` with one row per part of each quantised weight. Raises `ConfigError` if engines do not support
    it.

    The weight sync reads everything from this table: names and shapes of the tensors to send, shards and stages of
    ranks, fusing, and digests (`weights.engine_layout`). Its Megatron names do not exist as model parameters.
    """
    if quantised is None:
        return table
    unknown = sorted(n for n in quantised.names - set(table.hf_names) if not table.ignores(n))
    if unknown:
        raise ConfigError(f"the checkpoint has quantised weights that the model does not have: {listed(unknown, 4)}")
    _check_fused(table, quantised)

    def parts(rows: Iterable[Row], layer: int | None) -> tuple[Row, ...]:
        return tuple(part for row in rows for part in _parts(row, layer, quantised))

    return dataclasses.replace(
        table,
        before=parts(table.before, None),
        layers=tuple(parts(rows, number) for number, rows in enumerate(table.layers)),
        after=parts(table.after, None),
    )


def _parts(row: Row, layer: int | None, quantised: QuantisedFormat) -> tuple[Row, ...]:
    return quantised.rows(row) if quantised.is_quantised(Entry.of(row, layer, 0).hf) else (row,)


def _check_fused(table: FamilyTable, quantised: QuantisedFormat) -> None:
    """Raises `ConfigError` if an engine tensor would mix plain and quantised weights or contain a partial block."""
    for resident, held in table.resident.items():
        names = [name for entry in held for name in entry.hf]
        plain = [name for name in names if name not in quantised.names]
        if plain and len(plain) < len(names):
            odd = next(name for name in names if name in quantised.names)
            raise ConfigError(
                f"{odd} is in {quantised.title} and {plain[0]} is not quantised, but engines fuse both into one "
                f"tensor, {resident}; quantise both or neither"
            )
        entries = held if held[0].expert is None and not plain else ()
        uneven = [e for e in entries[:-1] if any(shape[0] % quantised.block[0] for shape in e.row.shapes)]
        if uneven:
            raise ConfigError(
                f"engines stack {uneven[0].hf[0]} of {uneven[0].row.shapes[0][0]} rows in {quantised.title} with "
                f"other weights in {resident}, so two weights would share a scale; use a different checkpoint"
            )


def require_whole_blocks(entry: Entry, num_shards: int, quantised: QuantisedFormat) -> None:
    """Raises `ConfigError` if splitting over `num_shards` ranks would divide a block of weights."""
    row = entry.row
    if row.dim is None:
        return
    block = quantised.block[row.dim]
    if num_shards == 1 and len(row.segments) == len(row.hf):
        return
    uneven = [size for size in row.segments if block == WHOLE or size // num_shards % block]
    if uneven:
        raise ConfigError(
            f"{num_shards} tensor-parallel ranks split the {uneven[0]} entries of {entry.hf[0]} in {quantised.title} "
            f"within a block of {block or 'all'}, so rounding would depend on the layout; use fewer ranks or set "
            "--trainer-weights plain"
        )


def fake_quantised(shard: Tensor, row: Row, num_shards: int, quantised: QuantisedFormat) -> Tensor:
    """Returns the weights that engines use in place of `shard`, in the same dtype and layout.

    `shard`: one of `num_shards` shards of a row's parameter, or a stack of experts. The gradient passes through
    unchanged (straight-through estimator, arXiv:1308.3432), even for clipped entries, because clipping moves them by at
    most half a step.
    """
    faked: Tensor = _StraightThrough.apply(shard, lambda weight: by_segments(row, weight, num_shards, quantised.fake))
    return faked


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, change: Any) -> Tensor:
        with torch.no_grad():
            return change(weight.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
