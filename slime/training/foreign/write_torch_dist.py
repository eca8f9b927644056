"""Weights to a `torch_dist` folder, by Megatron-core's own `dist_checkpointing`: on one rank, on a CPU, without a model.

Layers are written by themselves (what Megatron calls non-homogeneous layers), which the folder says, and which a loader
asks it (`dist_checkpointing.load_content_metadata`). All weights are in memory, or mapped, while they are written:
`dist_checkpointing.save` takes them at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.compat.megatron_cpu import activate
from slime.core.durable import sync_to_disk
from slime.models.common.table import EMBEDDING, HEAD, FamilyTable
from slime.training.foreign.names import Places
from slime.training.foreign.torch_dist import RELEASE, TRACKER
from slime.weights.convert import ReadHF, load_shard
from slime.weights.rendezvous import keep_gloo_on

CONTENT = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""What a loader has to know of the form: every layer by itself, the experts of a layer stacked."""
LIMIT = timedelta(minutes=10)


def write_torch_dist(folder: Path, table: FamilyTable, read_hf: ReadHF, advance: Any = lambda: None) -> None:
    """Writes all parameters of a model to `folder`, which is empty, as a release: `release/` and the tracker.

    `read_hf`: HF name -> the full tensor, in the type that is to be written; asked once for each, in table order.
    `advance` is called for each parameter that was read.
    """
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  (before the patches of what is loaded)
    from megatron.core import dist_checkpointing

    activate("cpu")
    release = folder / RELEASE
    release.mkdir(parents=True)
    with _one_rank():
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "args": _arguments(table)}
        state["model"] = _sharded(table, read_hf, advance)
        dist_checkpointing.save(state, str(release), content_metadata=dict(CONTENT))
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        sync_to_disk(path)


def _sharded(table: FamilyTable, read_hf: ReadHF, advance: Any) -> dict[str, Any]:
    """Parameter -> its tensor, with its place in the folder."""
    from megatron.core.dist_checkpointing import ShardedTensor

    places, sharded = Places(table), {}
    for entry in table.entries:
        tensor = load_shard(table, entry.megatron, read_hf, tp_rank=0, tp_size=1)
        place = places.written(entry.megatron)
        axes = [(axis, number, table.sizes.num_experts) for axis, number in enumerate(place.at)]
        sharded[entry.megatron] = ShardedTensor.from_rank_offsets(
            place.key,
            tensor.contiguous(),
            *axes,
            prepend_axis_num=len(axes),
            allow_shape_mismatch=entry.megatron in (EMBEDDING, HEAD),
        )
        advance()
    return sharded


def _arguments(table: FamilyTable) -> argparse.Namespace:
    """What Megatron's training script compares with its own arguments, or asks of the run that wrote a folder."""
    return argparse.Namespace(
        num_layers=table.sizes.num_layers,
        hidden_size=table.sizes.hidden_size,
        num_attention_heads=table.sizes.num_heads,
        add_position_embedding=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )


@contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of this process alone, for the block."""
    before = dict(os.environ)
    keep_gloo_on("127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
