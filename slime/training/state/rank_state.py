"""The files that one rank writes to a checkpoint: shards of weights, master weights and moments, scheduler, RNG state.

Ranks write without communicating. Each rank writes the master weights and moments that its optimizer owns, and its
portion of the model weights: ranks that hold the same shard divide it among themselves. Files are safetensors and JSON.

Invariants
1. Loading with the same parallel layout and settings is bitwise exact. With a different layout, weights and optimizer
   are still bitwise exact, but RNGs are reseeded.
2. A checkpoint of a different model, or with a missing tensor, raises `CheckpointError` and is never partially loaded:
   all tensors are looked up before anything changes.
3. Computed state comes from the checkpoint, settings (learning rate, weight decay, betas) from this run. The state of
   Python's `random` is not saved: training does not use it, but libraries can use it at any time.
4. Saving and loading need memory for at most one parameter in addition to the model.
5. Stacked experts are written and read individually under separate names, so a checkpoint does not depend on how
   experts are stacked or distributed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.core.files import full_disk_named
from slime.core.hf_config import read_hf_config
from slime.training.model.parameter_names import Held
from slime.training.parallel import ParallelInfo, seed_everything
from slime.training.state.checkpoint import Seal
from slime.training.state.hf_files import copy_assets
from slime.training.state.sharded_model import ShardedModel, ShardedTensor
from slime.training.state.shards import (
    FORMAT,
    HF,
    MASTER,
    MODEL,
    OTHER_POLICY,
    SHARDS_KEY,
    CheckpointShard,
    ShardReader,
    architecture,
    digest_of,
    split_again,
    write_meta,
    write_tensors,
)
from slime.training.step.adamw import HeldAdamW
from slime.training.step.optimizer import MOMENTUM, Owned, Trainable, owned_part

logger = logging.getLogger(__name__)

# RNG state of training: torch's generators on each device, NumPy's generator, and Megatron's tracker.

RNG = "rng/"
"""Prefix of RNG tensors in a file."""


def generator_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the RNG state: tensors by name, and everything else as JSON."""
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    tensors = {RNG + "torch": torch.get_rng_state(), RNG + "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors[RNG + "cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    tensors.update({f"{RNG}megatron.{name}": state for name, state in tracked.items()})
    return tensors, {"numpy": [kind, int(pos), int(has_gauss), float(cached)], "names": sorted(tensors)}


def set_generator_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    kind, pos, has_gauss, cached = meta["numpy"]
    np.random.set_state((kind, tensors[RNG + "numpy"].numpy().astype(np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(tensors[RNG + "torch"])
    if torch.cuda.is_available() and RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RNG + "cuda"])
    prefix = RNG + "megatron."
    get_cuda_rng_tracker().set_states({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A model that checkpoints include: the policy or the critic."""

    trainable: Trainable
    info: ParallelInfo
    hf_checkpoint: Path
    """Folder with the model's config.json and tokenizer."""
    other_policies: Mapping[str, Mapping[str, Tensor]] = dataclasses.field(default_factory=dict)
    """Policies that a new run could not rebuild, such as an updated reference, by name. Loading fills them in place."""

    @property
    def model(self) -> ShardedModel:
        return self.trainable.model

    def of_others(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (role, shard) of the parameter `name` for each of `other_policies` that has it."""
        return ((OTHER_POLICY + p, held[name]) for p, held in self.other_policies.items() if name in held)

    def state(self, held: Held) -> Iterator[tuple[str, Tensor, int]]:
        """Yields (role, tensor, start of the tensor in the flattened shard) for a shard's optimizer state.

        Omits master weights that are views of the parameter or bitwise equal to it.
        """
        owned = owned_part(self.trainable.inner, held)
        if owned is not None:
            if owned.main.dtype != held.parameter.dtype:
                yield MASTER, owned.part(owned.main), owned.start
            for role, value in owned.optimizer.state.get(owned.main, {}).items():
                if role != "step" and (role != MASTER or held.parameter.dtype != torch.float32):
                    yield role, owned.part(value), owned.start


@dataclasses.dataclass(frozen=True, slots=True)
class RankState:
    """Everything that one rank saves for one model."""

    rank: int
    tensors: Mapping[str, Tensor]
    """Name in the file -> tensor. Until `on_host`, these are the trainer's own tensors, on its device."""
    meta: Mapping[str, Any]
    assets_from: Path | None
    """Folder from which rank 0 copies config and tokenizer; None on other ranks."""

    def on_host(self) -> RankState:
        """Returns a copy in host memory, which further training does not change."""
        tensors = {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t.detach(), non_blocking=True)
            for name, t in self.tensors.items()
        }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return dataclasses.replace(self, tensors=tensors)

    def write(self, directory: Path) -> dict[str, Seal]:
        """Writes and flushes `rank_NNNNN.safetensors` and `.json`. Returns their seals by file name.

        Raises `DiskFull` with the name of `directory`.
        """
        stem = f"rank_{self.rank:05d}"
        with full_disk_named(directory):
            directory.mkdir(parents=True, exist_ok=True)
            seals = {f"{stem}.safetensors": write_tensors(directory / f"{stem}.safetensors", self.tensors)}
            if self.assets_from is not None:
                (directory / HF).mkdir(exist_ok=True)
                copy_assets(self.assets_from, directory / HF)
            return seals | {f"{stem}.json": write_meta(directory / f"{stem}.json", self.meta)}


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one rank saves, for all models."""

    states: Mapping[str, RankState]
    """Folder relative to the checkpoint -> state."""

    def write(self, directory: Path) -> dict[str, Seal]:
        """Writes all files. Returns their seals by path relative to `directory`."""
        return {
            f"{folder}/{name}".lstrip("/"): seal
            for folder, state in self.states.items()
            for name, seal in state.write(directory / folder).items()
        }


def rank_state(kept: Kept, *, weight_version: int, with_optimizer: bool = True) -> RankState:
    """Collects everything that this rank saves for a model, without copying or communicating."""
    tensors: dict[str, Tensor] = {}
    shards: list[CheckpointShard] = []

    def add(shard: CheckpointShard, flat: Tensor) -> None:
        if shard.end > shard.start:
            shards.append(shard)
            tensors[shard.key] = flat

    for own in kept.model.own:
        if own.share is None:
            continue
        place = (own.name, own.tp_rank, own.tp_size, own.shape)
        number, num_shares = own.share
        parameter = own.shard
        first, end = (parameter.numel() * i // num_shares for i in (number, number + 1))
        for role, tensor in ((MODEL, parameter), *kept.of_others(own.name)):
            add(CheckpointShard(role, *place, first, end, str(tensor.dtype)), tensor.detach().reshape(-1)[first:end])
        for role, tensor, start in kept.state(own.here) if with_optimizer else ():
            add(CheckpointShard(role, *place, start, start + tensor.numel(), str(tensor.dtype)), tensor)
    hf_config = read_hf_config(str(kept.hf_checkpoint))
    meta: dict[str, Any] = {
        "format": FORMAT,
        "layout": _layout(kept.info),
        "architecture": digest_of(hf_config),
        "weight_version": weight_version,
        "with_optimizer": with_optimizer,
        "adapter_scale": kept.model.adapter_scale,
        SHARDS_KEY: [list(dataclasses.astuple(shard)) for shard in shards],
    }
    if with_optimizer:
        meta["optimizer"] = _computed(kept.trainable)
        meta["scheduler"] = kept.trainable.scheduler.state_dict()
        rng_tensors, meta["rng"] = generator_state()
        tensors |= rng_tensors
    return RankState(kept.info.rank, tensors, meta, kept.hf_checkpoint if kept.info.rank == 0 else None)


@torch.no_grad()
def load_rank(directory: Path, kept: Kept, *, seed: int, with_optimizer: bool = True, with_rng: bool = True) -> int:
    """Restores the state that all ranks saved, including `kept.other_policies`, and returns the weight version.

    `seed` is the run's seed. If the checkpoint does not match this run, raises `CheckpointError` before any change.
    """
    reader = ShardReader(directory)
    meta = reader.metas[min(kept.info.rank, len(reader.metas) - 1)]
    destinations = list(_destinations(kept, reader, with_optimizer))
    _check(reader, meta, kept, with_optimizer)
    for to in destinations:
        dtype = to.target.dtype if to.state_of is None and to.role != MASTER else None
        _check_split(reader.any_shard(to.role, to.own.name), to.own, dtype, directory)
    for optimizer in _optimizers(kept.trainable) if with_optimizer else ():
        optimizer.state.clear()
    for to in destinations:
        own, end = to.own, to.start + to.target.numel()
        if reader.any_shard(to.role, own.name).tp_size == own.tp_size:
            source = reader.flat(to.role, own.name, own.tp_rank, to.start, end)
        else:
            split = {"tp_rank": own.tp_rank, "tp_size": own.tp_size}
            source = split_again(reader, kept.model.table, to.role, own.name, **split).reshape(-1)[to.start : end]
        to.fill(source)
    for held in (optimizer for optimizer in _optimizers(kept.trainable) if isinstance(optimizer, HeldAdamW)):
        held.adopt() if with_optimizer else held.renew_masters()
    if with_optimizer:
        _set_computed(kept.trainable, [other["optimizer"] for other in reader.metas])
        kept.trainable.scheduler.num_steps = 0
        kept.trainable.scheduler.step(int(meta["scheduler"]["num_steps"]))
    else:
        kept.trainable.optimizer.reload_model_params()
    version = int(meta["weight_version"])
    if with_rng and meta["with_optimizer"]:
        if meta["layout"] == _layout(kept.info):
            states = {name: reader.tensor(kept.info.rank, name) for name in meta["rng"]["names"]}
            set_generator_state(states, meta["rng"])
        else:
            if kept.info.rank == 0:
                logger.info(
                    "the checkpoint %s has a different parallel layout (%s): weights and optimizer are restored, but "
                    "RNGs are reseeded from --seed and weight version %d",
                    directory,
                    meta["layout"],
                    version,
                )
            seed_everything((seed + 1_000_003 * version) % 2**31, kept.info.dp_rank)
    return version


def _layout(info: ParallelInfo) -> dict[str, int]:
    return {"rank": info.rank, "world_size": info.world_size, **dataclasses.asdict(info.sizes)}


def _optimizers(trainable: Trainable) -> list[Any]:
    return [inner.optimizer for inner in trainable.inner if inner.optimizer is not None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Destination:
    role: str
    own: ShardedTensor
    target: Tensor
    """Filled from element `start` of the flattened shard, unless `state_of` is set."""
    start: int = 0
    state_of: Owned | None = None
    """If set, entry `role` of this optimizer state is filled instead of `target`."""

    def fill(self, source: Tensor) -> None:
        if self.state_of is None:
            self.target.copy_(source.reshape(self.target.shape))
            return
        main, state = self.state_of.main, self.state_of.optimizer.state[self.state_of.main]
        if self.role not in state:  # experts of one stack fill it one after the other
            dtype = source.dtype if isinstance(self.state_of.optimizer, HeldAdamW) else main.dtype
            state[self.role] = torch.empty(main.shape, dtype=dtype, device=main.device)
        self.state_of.part(state[self.role]).copy_(source)


def _destinations(kept: Kept, reader: ShardReader, with_optimizer: bool) -> Iterator[_Destination]:
    others = {MODEL, MASTER, MOMENTUM}
    moments = [role for role in reader.roles if role not in others and not role.startswith(OTHER_POLICY)]
    for own in kept.model.own:
        filled = ((MODEL, own.shard.detach()), *kept.of_others(own.name))
        yield from (_Destination(role, own, target) for role, target in filled)
        owned = owned_part(kept.trainable.inner, own.here) if with_optimizer else None
        if owned is not None:
            part = owned.part(owned.main.detach())
            if part.dtype != own.dtype:
                yield _Destination(MASTER, own, part, owned.start)
            elif isinstance(owned.optimizer, HeldAdamW) and own.dtype != torch.float32:
                yield _Destination(MASTER, own, part, owned.start, owned)
            roles = [MOMENTUM] if MOMENTUM in owned.optimizer.state.get(owned.main, ()) else moments
            yield from (_Destination(role, own, part, owned.start, owned) for role in roles)


def _check(reader: ShardReader, meta: Mapping[str, Any], kept: Kept, with_optimizer: bool) -> None:
    hf_config = read_hf_config(str(kept.hf_checkpoint))
    if meta["architecture"] != digest_of(hf_config):
        there, here = architecture(read_hf_config(str(reader.folder / HF))), architecture(hf_config)
        odd = [k for k in sorted(there | here) if there.get(k) != here.get(k)]
        raise CheckpointError(
            f"{reader.folder / HF}/config.json describes a different model from {kept.hf_checkpoint}: "
            f"{', '.join(f'{k} {there.get(k)} instead of {here.get(k)}' for k in odd[:6])}; set --hf-checkpoint to the "
            "model that the checkpoint was trained from"
        )
    if with_optimizer and not meta["with_optimizer"]:
        raise CheckpointError(
            f"{reader.folder} has no optimizer, scheduler or RNG state, because it was saved with --no-save-optim; "
            "pass --no-load-optim to load only the weights (or --finetune to also restart from step 0)"
        )
    others = {role.removeprefix(OTHER_POLICY) for role in reader.roles if role.startswith(OTHER_POLICY)}
    if with_optimizer and others != set(kept.other_policies):
        raise CheckpointError(
            f"{reader.folder} has the additional policies {sorted(others)}, but this run needs "
            f"{sorted(kept.other_policies)}; set --ref-update-interval and --keep-old-actor as in the run that saved "
            "the checkpoint, or pass --finetune to create new policies"
        )
    held, own = ({n for n in names if ".lora_" in n} for names in (reader.names(MODEL), kept.model.tensors))
    if held != own or meta["adapter_scale"] != kept.model.adapter_scale:
        raise CheckpointError(
            f"{reader.folder} has {len(held)} adapters with scale {meta['adapter_scale']}, but this run has {len(own)} "
            f"with scale {kept.model.adapter_scale}; use the LoRA settings of the run that saved the checkpoint, or "
            "merge the adapters with slime convert and pass the result as --hf-checkpoint"
        )


def _check_split(there: CheckpointShard, own: ShardedTensor, dtype: torch.dtype | None, directory: Path) -> None:
    """Raises `CheckpointError` if a saved shard does not have the shape and dtype of the model's shard.

    `dtype` is None for optimizer state, which can have another dtype.
    """
    is_other = there.tp_size == own.tp_size and there.shape != own.shape
    if is_other or (dtype is not None and there.dtype != str(dtype)):
        raise CheckpointError(
            f"{there.role} of {there.name} is {there.dtype} {list(there.shape)} in {directory}, but the model has "
            f"{dtype or there.dtype} {list(own.shape)}; resume with the settings of the run that saved the checkpoint"
        )


def _counts(trainable: Trainable) -> set[float]:
    """Returns the optimizers' step counts. torch keeps one per parameter, fused optimizers one per group."""
    optimizers = _optimizers(trainable)
    found = [group["step"] for o in optimizers for group in o.param_groups if "step" in group]
    for optimizer in optimizers:
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        found += torch.stack(steps).tolist() if steps else []  # one copy, because fused kernels keep them on the device
    return {float(step) for step in found}


def _computed(trainable: Trainable) -> dict[str, Any]:
    counts = _counts(trainable)
    assert len(counts) <= 1, f"parameters have different step counts: {counts}"
    scaler = trainable.inner[0].grad_scaler
    state = {k: torch.as_tensor(v).tolist() for k, v in scaler.state_dict().items()} if scaler else None
    return {"step": next(iter(counts), None), "grad_scaler": state}


def _set_computed(trainable: Trainable, metas: Sequence[Mapping[str, Any]]) -> None:
    """Restores what `_computed` returned on each rank. Ranks without trained parameters have no step count."""
    meta = next((meta for meta in metas if meta["step"] is not None), metas[0])
    step = meta["step"]
    for optimizer in _optimizers(trainable) if step is not None else ():
        for group in optimizer.param_groups:
            if type(optimizer).__module__.startswith("torch."):
                for parameter in (p for p in group["params"] if MOMENTUM not in optimizer.state.get(p, ())):
                    device = parameter.device if group["fused"] else "cpu"  # as in torch
                    optimizer.state[parameter]["step"] = torch.tensor(step, device=device)
            else:
                group["step"] = int(step)
    scaler = trainable.inner[0].grad_scaler
    if scaler and meta["grad_scaler"]:
        # Megatron's load_state_dict is not used, because it always moves the scale to a GPU.
        scaler._scale.fill_(meta["grad_scaler"]["scale"][0])
        scaler._growth_tracker = meta["grad_scaler"]["growth_tracker"]
        scaler._hysteresis_tracker = meta["grad_scaler"]["hysteresis_tracker"]
