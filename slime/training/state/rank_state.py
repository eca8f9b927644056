"""One rank's part of a checkpoint: weights, master weights, moments, schedule, RNG. Safetensors and JSON, nothing else.

Invariants
1. Loading what was saved, at the same parallel layout and settings, restores every bit.
2. Another layout, another model or a missing tensor is a `CheckpointError`, never a partial load.
3. What was computed comes from the checkpoint, what was set (learning rate, weight decay, betas) from this run's
   settings. Python's `random` is not kept: training draws nothing from it, but libraries do, at times of their own.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.core.errors import CheckpointError
from slime.training.model.names import parameters_of
from slime.training.parallel import ParallelInfo
from slime.training.step.optimizer import Trainable

FORMAT = 2
MODEL, MASTER, MOMENT, RNG = "model/", "master/", "moment/", "rng/"
"""Prefixes of tensor names in a rank's file."""
COMPUTED = frozenset({"step"})
"""What an optimizer computes in its parameter groups (fused Adam counts there); all else in them is a setting."""


def save_rank(
    directory: Path, trainable: Trainable, info: ParallelInfo, *, weight_version: int, with_optimizer: bool = True
) -> None:
    """Writes `rank_NNNNN.safetensors` and `rank_NNNNN.json`. Every rank calls it, each for itself."""
    tensors = {MODEL + name: p for name, p in parameters_of(trainable.chunks).items()}
    meta: dict[str, Any] = {
        "format": FORMAT,
        "layout": _layout(info),
        "weight_version": weight_version,
        "with_optimizer": with_optimizer,
    }
    if with_optimizer:
        optimizer_tensors, meta["optimizer"] = _optimizer_state(trainable)
        tensors.update(optimizer_tensors)
        meta["scheduler"] = trainable.scheduler.state_dict()
        rng_tensors, meta["rng"] = _rng_state()
        tensors.update(rng_tensors)
    # Own memory for every tensor: parameters are views into one buffer, which the format would refuse as shared.
    host = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(host, directory / f"rank_{info.rank:05d}.safetensors")
    (directory / f"rank_{info.rank:05d}.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


@torch.no_grad()
def load_rank(
    directory: Path, trainable: Trainable, info: ParallelInfo, *, with_optimizer: bool = True, with_rng: bool = True
) -> int:
    """Restores what `save_rank` wrote and returns the weight version. Raises `CheckpointError` if it does not fit."""
    meta, tensors = _read(directory, info)
    if meta["layout"] != _layout(info):
        raise CheckpointError(
            f"got a checkpoint of layout {meta['layout']} for a run of {_layout(info)}, because optimizer state "
            f"is sharded by "
            "rank; resume with the same sizes, or start from its Hugging Face export (--save-hf) with --hf-checkpoint"
        )
    if with_optimizer and not meta["with_optimizer"]:
        raise CheckpointError(
            f"got {directory} to resume from, which holds no optimizer, schedule and RNG because it was written with "
            "--no-save-optim; pass --no-load-optim to go on with its weights and fresh ones (or --finetune, from step "
            "0)"
        )
    _copy_all({MODEL + n: p for n, p in parameters_of(trainable.chunks).items()}, tensors, MODEL, directory)
    if with_optimizer:
        _load_optimizer(trainable, tensors, meta["optimizer"], directory)
        trainable.scheduler.num_steps = 0
        trainable.scheduler.step(int(meta["scheduler"]["num_steps"]))
    else:
        trainable.optimizer.reload_model_params()
    if with_rng and meta["with_optimizer"]:
        _set_rng_state(tensors, meta["rng"])
    return int(meta["weight_version"])


def _layout(info: ParallelInfo) -> dict[str, int]:
    return {"rank": info.rank, "world_size": info.world_size, **dataclasses.asdict(info.sizes)}


def _read(directory: Path, info: ParallelInfo) -> tuple[dict[str, Any], dict[str, Tensor]]:
    stem = directory / f"rank_{info.rank:05d}"
    try:
        meta: dict[str, Any] = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        tensors = load_file(stem.with_suffix(".safetensors"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"got {error} from {stem}.*; the checkpoint is damaged or of fewer ranks than {info.world_size}"
        ) from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"got checkpoint format {meta.get('format')} in {stem}.json; this release reads format {FORMAT}"
        )
    return meta, tensors


def _copy_all(targets: dict[str, Tensor], tensors: dict[str, Tensor], prefix: str, directory: Path) -> None:
    found = {k for k in tensors if k.startswith(prefix)}
    if found != set(targets):
        odd = sorted(found ^ set(targets))[:4]
        raise CheckpointError(
            f"got other {prefix} tensors in {directory} than the model has, for example {odd}; wrong checkpoint"
        )
    for name, target in targets.items():
        source = tensors[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"got {name} as {source.dtype} {list(source.shape)} in {directory}; the model has {target.dtype} "
                f"{list(target.shape)}; resume with the settings of the first run"
            )
        target.copy_(source)


def _groups(trainable: Trainable) -> list[tuple[Any, dict[str, Any]]]:
    """(torch optimizer, parameter group) of all inner optimizers, in their order."""
    return [(inner.optimizer, group) for inner in trainable.inner for group in inner.optimizer.param_groups]


def _optimizer_state(trainable: Trainable) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by `group.index.key`, and the plain numbers of each group (most for people: see `COMPUTED`)."""
    tensors: dict[str, Tensor] = {}
    groups = []
    for g, (optimizer, group) in enumerate(_groups(trainable)):
        groups.append(
            {k: v for k, v in group.items() if isinstance(v, int | float | bool | str | list | tuple) and k != "params"}
        )
        for i, parameter in enumerate(group["params"]):
            tensors[f"{MASTER}{g}.{i}"] = parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{MOMENT}{g}.{i}.{key}"] = torch.as_tensor(value)
    scaler = trainable.inner[0].grad_scaler
    state = {k: torch.as_tensor(v).tolist() for k, v in scaler.state_dict().items()} if scaler else None
    return tensors, {"groups": groups, "grad_scaler": state}


def _load_optimizer(trainable: Trainable, tensors: dict[str, Tensor], meta: dict[str, Any], directory: Path) -> None:
    groups = _groups(trainable)
    masters = {
        f"{MASTER}{g}.{i}": (optimizer, p)
        for g, (optimizer, group) in enumerate(groups)
        for i, p in enumerate(group["params"])
    }
    _copy_all({name: p for name, (_, p) in masters.items()}, tensors, MASTER, directory)
    for inner in trainable.inner:
        inner.optimizer.state.clear()
    for name, tensor in tensors.items():
        if name.startswith(MOMENT):
            g, i, key = name.removeprefix(MOMENT).split(".", 2)
            optimizer, parameter = masters[f"{MASTER}{g}.{i}"]
            # torch keeps the step counter on the host; moments live beside their parameter.
            value = tensor.clone() if key == "step" else tensor.to(parameter.device, copy=True)
            optimizer.state[parameter][key] = value
    for (_, group), saved in zip(groups, meta["groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k in COMPUTED})
    scaler = trainable.inner[0].grad_scaler
    if scaler and meta["grad_scaler"]:
        # Megatron's own load_state_dict moves the scale to a GPU by name.
        scaler._scale.fill_(meta["grad_scaler"]["scale"][0])
        scaler._growth_tracker = meta["grad_scaler"]["growth_tracker"]
        scaler._hysteresis_tracker = meta["grad_scaler"]["hysteresis_tracker"]


def _rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    tensors = {RNG + "torch": torch.get_rng_state(), RNG + "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors[RNG + "cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    tensors.update({f"{RNG}megatron.{name}": state for name, state in tracked.items()})
    return tensors, {"numpy": [kind, int(pos), int(has_gauss), float(cached)]}


def _set_rng_state(tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    kind, pos, has_gauss, cached = meta["numpy"]
    np.random.set_state((kind, tensors[RNG + "numpy"].numpy().astype(np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(tensors[RNG + "torch"])
    if torch.cuda.is_available() and RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RNG + "cuda"])
    prefix = RNG + "megatron."
    get_cuda_rng_tracker().set_states({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
