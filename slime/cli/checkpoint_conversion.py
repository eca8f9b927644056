"""Implements `slime convert`: converts weights between folder formats, and rollouts from the public slime's format.

Weights are converted one tensor at a time (except to `torch_dist`), without a model, ranks or engines. The target
folder gets its final name once it is complete.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.cli.convert import check_folders, check_rollout
from slime.core.errors import CheckpointError, ConfigError, DataError
from slime.core.hf_config import read_hf_config
from slime.models import load_family, table_for
from slime.models.common.table import FamilyTable
from slime.observability.logs import setup_logging
from slime.observability.progress import Progress
from slime.public.recorded_samples import groups_of
from slime.rollout.recordings import save_rollout
from slime.training.foreign.reader import Rollout
from slime.training.foreign.torch_dist import TorchDist, checkpoint_in
from slime.training.state.adapter_files import write_peft
from slime.training.state.hf_files import HfReader, begin_export, commit_export, with_duplicates, write_hf
from slime.training.state.shards import MASTER, MODEL, TensorFile, digest_of, open_checkpoint
from slime.weights.quantised import formats
from slime.weights.quantised.formats import SCALE_SUFFIX

PEFT, FP8, TORCH_DIST = "peft", "fp8", "torch_dist"
"""Values of `--to` for adapters only, for quantised weights, and for a Megatron folder."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The other values of `--to`."""


@dataclass(frozen=True, slots=True)
class _Source:
    assets: Path
    """The folder with config.json and tokenizer."""
    table: FamilyTable
    names: tuple[str, ...]
    tensors: Iterable[tuple[str, Tensor]]
    """Iterator over (name, full tensor), for `names`."""


def convert(
    source: Path,
    target: Path,
    to: str | None = None,
    hf_checkpoint: Path | None = None,
    model_family: str | None = None,
    *,
    trust_pickle: bool = False,
) -> None:
    """Converts `source` and writes `target`.

    `to` is a key of `DTYPES`, "fp8", `PEFT`, `TORCH_DIST` or None; the last two keep dtypes. For a checkpoint,
    `hf_checkpoint` is its initial model, which provides the tensors that training does not use; for a `torch_dist`
    folder, the model with config and tokenizer; for adapters, the base model to record. `model_family` is the value of
    `--model-family`. `trust_pickle` allows a `torch_dist` folder as source. Raises `CheckpointError` if `target` is not
    empty or `source` is damaged, `ConfigError` for an unknown model, a missing tensor, or pickles without trust.
    """
    check_folders(source, target, to, hf_checkpoint, trusted=trust_pickle)
    if not logging.getLogger().handlers:
        setup_logging()
    if model_family is not None:
        load_family(model_family)
    if to == PEFT:
        _write_adapters(source, target, hf_checkpoint)
        return
    with ExitStack() as stack:
        if (source / "config.json").is_file():
            found = _of_hf(source, to, stack)
        elif (megatron := checkpoint_in(source)) is not None:
            found = _of_torch_dist(megatron, to, hf_checkpoint, stack)
        else:
            found = _of_checkpoint(source, to, hf_checkpoint, stack)
        _refuse_other_experts(found.table, to)
        if to == TORCH_DIST:
            _write_torch_dist(found, target, stack)
            return
        quantization = formats.config_entry(_kept(found.names)) if to == FP8 else None
        progress = stack.enter_context(Progress("convert", total=len(found.names), unit="tensors"))
        tensors = _converted(found, to, progress)
        with _complete(target) as partial:
            write_hf(partial, tensors, assets_from=found.assets, quantization=quantization)


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """Yields the folder to write to. It becomes `target` at the end; after an error or a signal it is removed."""
    partial = begin_export(target)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    commit_export(partial, target)


def _refuse_other_experts(table: FamilyTable, to: str | None) -> None:
    if to in (FP8, TORCH_DIST) and any(row.transposed for rows in table.layers for row in rows):
        raise ConfigError(
            f"--to {to} does not work with {table.family}: the format cannot store experts that are stacked [in, out] "
            "with interleaved gates and values; choose a different --to"
        )


def _write_adapters(source: Path, target: Path, base: Path | None) -> None:
    with open_checkpoint(source) as opened:
        table, scale, tensors = opened.adapters()
        with _complete(target) as partial:
            write_peft(partial, table, tensors, scale=scale, base=str(base.resolve()) if base is not None else None)


def _write_torch_dist(found: _Source, target: Path, stack: ExitStack) -> None:
    """Writes a `torch_dist` folder, without tensors that training does not use: Megatron has no names for them."""
    from slime.training.foreign.write_torch_dist import write_torch_dist

    progress = stack.enter_context(Progress("convert", total=len(found.table.entries), unit="parameters"))
    wanted = set(found.table.hf_names)
    with _complete(target) as partial:
        held = {name: tensor for name, tensor in found.tensors if name in wanted}
        write_torch_dist(partial, found.table, held.__getitem__, progress.advance)


def described(folder: Path) -> str:
    """Returns a summary of the files, tensors, dtypes and sizes in a folder of weights."""
    if (megatron := checkpoint_in(folder)) is not None:
        parts = sorted(file for file in megatron.glob("*.distcp"))
        num_bytes = sum(file.stat().st_size for file in parts)
        return f"wrote {folder}: {_size(num_bytes)} in {len(parts)} files of {megatron.name}/, format torch_dist"
    lines, num_tensors, num_bytes = [], 0, 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors = TensorFile(file)
        kinds = Counter(str(tensors.read(name).dtype).removeprefix("torch.") for name in tensors.names)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"  {file.name}: {told}, {_size(file.stat().st_size)}")
        num_tensors, num_bytes = num_tensors + sum(kinds.values()), num_bytes + file.stat().st_size
    others = [p.name for p in sorted(folder.iterdir()) if p.suffix != ".safetensors" and not p.name.startswith(".")]
    head = f"wrote {folder}: {num_tensors} tensors, {_size(num_bytes)} in {len(lines)} weight files"
    return "\n".join([head, *lines, f"  {', '.join(others)}"])


def _size(num_bytes: int) -> str:
    unit = next((u for u in (3, 2, 1) if num_bytes >= 1000**u), 0)
    return f"{num_bytes / 1000**unit:.1f} {('B', 'kB', 'MB', 'GB')[unit]}" if unit else f"{num_bytes} B"


def _of_hf(folder: Path, to: str | None, stack: ExitStack) -> _Source:
    read = stack.enter_context(HfReader(folder))
    table = table_for(read_hf_config(str(folder)))
    table.check(hf_names=read.names)
    return _Source(folder, table, read.names, _read_all(read, read.names, exact=to in (*DTYPES, FP8)))


def _of_checkpoint(folder: Path, to: str | None, hf_checkpoint: Path | None, stack: ExitStack) -> _Source:
    opened = stack.enter_context(open_checkpoint(folder))
    if hf_checkpoint is not None:  # only its files show how experts are stored
        config = read_hf_config(str(hf_checkpoint))
        if digest_of(config) != opened.reader.metas[0]["architecture"]:
            raise CheckpointError(
                f"--hf-checkpoint {hf_checkpoint} is a different model from {opened.assets / 'config.json'}; pass the "
                "folder that the model was loaded from"
            )
        opened.table = opened.table_of(config)
    # Training updates the master weights. The model's weights are rounded to the training dtype, as in the engines.
    tensors = opened.iter_hf(MASTER if to == "fp32" else MODEL)
    found = _Source(opened.assets, opened.table, opened.table.hf_names, tensors)
    return _with_carried(found, to, hf_checkpoint, stack)


def _of_torch_dist(folder: Path, to: str | None, hf_checkpoint: Path | None, stack: ExitStack) -> _Source:
    assert hf_checkpoint is not None, "`check_folders` requires it"
    opened = TorchDist(folder, read_hf_config(str(hf_checkpoint)))
    found = _Source(hf_checkpoint, opened.table, opened.table.hf_names, opened.iter_hf())
    has_weights = any(hf_checkpoint.glob("*.safetensors"))
    return _with_carried(found, to, hf_checkpoint if has_weights else None, stack)


def _with_carried(found: _Source, to: str | None, hf_checkpoint: Path | None, stack: ExitStack) -> _Source:
    """Adds tensors that training does not use, from the model's files."""
    table = found.table
    if hf_checkpoint is None:
        if table.carried and to != TORCH_DIST:
            raise ConfigError(
                f"model folders of {table.family} contain tensors that training does not use "
                f"({', '.join(table.carried)}); set --hf-checkpoint to the folder that the model was loaded from"
            )
        return found
    read = stack.enter_context(HfReader(hf_checkpoint))
    table.check(hf_names=read.names)
    carried = tuple(filter(table.carries, read.names))
    more = _read_all(read, carried, exact=to in (*DTYPES, FP8))
    doubled = tuple(name for name in read.names if name in table.duplicates)
    tensors = iter(with_duplicates(found.tensors, table.duplicates, frozenset(doubled)))
    return replace(found, names=table.hf_names + doubled + carried, tensors=chain(tensors, more))


def _read_all(read: HfReader, names: Iterable[str], *, exact: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor). `exact` dequantises to float32, because the caller rounds the tensors again."""
    for name in names:
        yield name, read(name) if exact else read.plain(name)
        read.release()


def _converted(source: _Source, to: str | None, progress: Progress) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors in the dtype of `to`. Wide rows keep their dtype, even in layers that training does not use."""
    wide = {_anywhere(name) for e in source.table.entries if e.row.wide for name in e.hf}
    for name, tensor in source.tensors:
        for part, weight in formats.apart(name, tensor) if to == FP8 else [(name, tensor)]:
            if to == FP8 and formats.quantises(part):
                codes, scale = formats.quantise(weight)
                yield part, codes
                yield part + SCALE_SUFFIX, scale
            elif to in DTYPES and weight.is_floating_point() and _anywhere(part) not in wide:
                yield part, weight.to(DTYPES[to])
            else:
                yield part, weight
        progress.advance()


def _anywhere(name: str) -> str:
    """Replaces the numbers in a name, so that the name is the same for all layers."""
    return re.sub(r"\d+", "N", name)


def _kept(names: Iterable[str]) -> list[str]:
    """Returns the modules whose matrix `--to fp8` does not quantise, in the form that engines expect in the config."""
    kept = [name for name in names if not formats.quantises(name)]
    return [n.removesuffix(".weight") for n in kept if n.endswith(".weight") and not n.endswith("norm.weight")]


def convert_rollout(source: Path, target: Path, *, trusted: bool) -> str:
    """Writes a rollout of the public slime in the format of `--load-debug-rollout-data`. Returns a description.

    Raises the errors of `check_rollout`, `CheckpointError` if `source` is not a rollout or reading it runs code, and
    `DataError` for samples that cannot be replayed.
    """
    check_rollout(source, target, trusted=trusted)
    rollout = Rollout(source)
    number, num_samples = rollout.rollout_id, rollout.num_samples
    if not isinstance(number, int):
        raise DataError(f"{source} is from evaluation {number!r}; pass the rollout of a training step")

    def samples() -> Iterator[Any]:
        with Progress("convert", total=num_samples, unit="samples") as progress:
            for i in range(num_samples):
                yield rollout.sample(i)
                progress.advance()

    found = groups_of(samples(), number)
    save_rollout(target, number, found.groups)
    told = [f"wrote {target}: {num_samples} samples in {len(found.groups)} groups of step {number}"]
    told += [f"  left out: {name} ({count} samples)" for name, count in sorted(found.left_out.items())]
    if found.num_mixed:
        told.append(f"  {found.num_mixed} samples have several weight versions; all their tokens get the oldest one")
    return "\n".join(told)
