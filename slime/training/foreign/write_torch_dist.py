"""Writes weights to a `torch_dist` folder with Megatron-core's `dist_checkpointing`, on one rank, without GPU or model.

Layers are written separately ("non-homogeneous layers" in Megatron), as recorded in the folder's metadata
(`dist_checkpointing.load_content_metadata`). `dist_checkpointing.save` takes all weights in one call, so they must all
be in memory or memory-mapped.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.compat.megatron_cpu import activate
from slime.models.common.table import EMBEDDING, HEAD, FamilyTable
from slime.training.foreign.torch_dist import RELEASE, TRACKER, Places
from slime.weights.hf_shards import ReadHF, load_shard
from slime.weights.rendezvous import keep_gloo_on

CONTENT = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""Metadata for loaders: layers are separate, and the experts of a layer are stacked."""
STRATEGIES = "megatron.core.dist_checkpointing.strategies"
WRITERS = ("torch", "state_dict_saver", "filesystem_async")
"""Megatron modules that write checkpoints; core 0.19 imports two of them only when it saves."""
LIMIT = timedelta(minutes=10)


def write_torch_dist(
    folder: Path, table: FamilyTable, read_hf: ReadHF, advance: Callable[[], None] = lambda: None
) -> None:
    """Writes all parameters of a model to the empty `folder` as a Megatron release: `release/` and the tracker file.

    `read_hf` returns the full tensor for an HF name in the dtype to write. It is called once per name, in table order.
    `advance` is called after each parameter.
    """
    from megatron.core import dist_checkpointing

    release = folder / RELEASE
    release.mkdir(parents=True)
    with _one_rank():
        state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "args": _arguments(table)}
        state["model"] = _sharded(table, read_hf, advance)
        with writers_ended():
            dist_checkpointing.save(state, str(release), content_metadata=dict(CONTENT))
    (folder / TRACKER).write_text(RELEASE, encoding="utf-8")


def _sharded(table: FamilyTable, read_hf: ReadHF, advance: Callable[[], None]) -> dict[str, Any]:
    """Returns the sharded tensor of each parameter, plus the extra state that loaders expect for linear layers."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

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
        for module in _modules_with_state(place.key):
            state = make_sharded_object_for_checkpoint(
                None, f"{module}._extra_state", tuple(axes), replica_id=(0, 0, 0)
            )
            sharded[f"{entry.megatron} {state.unique_key}"] = state
        advance()
    return sharded


def _modules_with_state(key: str) -> list[str]:
    """Returns the Transformer Engine modules of the weight `key` that have extra state (for FP8; empty here).

    Loaders reject a folder without extra state.
    """
    module, _, kind = key.rpartition(".")
    found = [module] if kind == "weight" and module.rpartition(".")[2].startswith(("linear_", "eh_proj")) else []
    attention, is_output, _ = module.partition("self_attention.linear_proj")
    return [*found, *([f"{attention}self_attention.core_attention"] if is_output and found else [])]


def _arguments(table: FamilyTable) -> argparse.Namespace:
    """Returns the run arguments that Megatron's training script expects in a checkpoint."""
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
def writers_ended() -> Iterator[None]:
    """After the block, stops the process in which Megatron (core 0.16) collects the results of its writers.

    Megatron would keep it until this process exits, and leave it orphaned if this process were killed.
    """
    writer: Any = [importlib.import_module(f"{STRATEGIES}.{name}") for name in WRITERS][-1]
    activate("cpu")  # patches reach only loaded modules
    try:
        yield
    finally:
        results, writer._results_queue = writer._results_queue, None
        if results is not None:
            results._manager.shutdown()


@contextmanager
def _one_rank() -> Iterator[None]:
    before = dict(os.environ)
    keep_gloo_on("127.0.0.1")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
