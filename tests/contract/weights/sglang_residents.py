"""Loads checkpoints with SGLang's own model classes and loaders and compares their parameters with the weight table.

One rank of an engine of any layout, in bfloat16, no server. For what SGLang builds but does not serve on a CPU: it is
told that this is none where the models ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.core.engine_interface import BEFORE_SESSIONS, WITH_SESSIONS, is_installed
from slime.core.topology import EngineLayout, EngineRank
from slime.settings.topology_yaml import server_settings
from tests.support.ranks import Seat


@contextlib.contextmanager
def meet(seat: Seat) -> Iterator[None]:
    """The process group of all ranks, in the block, for SGLang to make its own groups in."""
    from slime.compat.sglang_cpu import activate

    activate("cpu")
    from sglang.srt.distributed.parallel_state import init_distributed_environment
    from sglang.srt.models import qwen3_5, qwen3_next

    qwen3_5._is_cpu = qwen3_next._is_cpu = False
    with seat.world():  # SGLang uses a process group that exists, and would open a port again otherwise
        init_distributed_environment(seat.world_size, seat.rank, local_rank=seat.rank, backend="gloo")
        yield


def load(checkpoint: Path, layout: EngineLayout) -> Any:
    """SGLang's model with the weights of the checkpoint. Call it inside `meet`."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    args = _server_args(checkpoint, layout)
    config = ModelConfig.from_server_args(args)
    _initialise(args, config, layout)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def _initialise(args: Any, config: Any, layout: EngineLayout) -> None:
    """Gives SGLang the settings of a model, and makes its groups of ranks before the first one.

    Since 0.5.23, all of it reads the widths from the settings, which have to come with this process's rank.
    """
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config

    is_first = not parallel_state.model_parallel_is_initialized()
    if is_installed("sglang", BEFORE_SESSIONS):
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
        if is_first:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp_size,
                attention_data_parallel_size=layout.dp_size,
                pipeline_model_parallel_size=layout.pp_size,
                expert_model_parallel_size=layout.ep_size,
            )
        initialize_moe_config(args)
        initialize_dp_attention(args, config)
    else:
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=dist.get_rank()))
        if is_first:
            parallel_state.initialize_model_parallel()
        initialize_moe_config()
        initialize_dp_attention(args)


def _server_args(checkpoint: Path, layout: EngineLayout) -> Any:
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        dtype="bfloat16",
        disable_shared_experts_fusion=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        # It asserts kernels that know sinks; nothing attends here.
        attention_backend="triton" if '"gpt_oss"' in (checkpoint / "config.json").read_text() else "torch_native",
        **server_settings(layout),
    )


def compare_quantised(seat: Seat, layout: EngineLayout, *checkpoints: Path) -> list[dict[str, list[str]]]:
    """As `compare`, of quantised checkpoints, as SGLang's loaders leave them.

    What follows on a GPU is left out: nothing for FP8 on Hopper, Marlin's order for INT4, whose kernels need one.
    """
    with meet(seat):
        _load_as_on_hopper()
        return [_compare_quantised(layout, layout.ranks()[seat.rank], checkpoint) for checkpoint in checkpoints]


def _load_as_on_hopper() -> None:
    import torch
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8,
        compressed_tensors_wNa16,
        compressed_tensors_wNa16_moe,
    )

    fp8._is_cpu = False
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    compressed_tensors_w8a8_fp8.CompressedTensorsW8A8Fp8.process_weights_after_loading = lambda *_: None
    for scheme in (
        compressed_tensors_wNa16.CompressedTensorsWNA16,
        compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE,
    ):
        scheme.process_weights_after_loading = lambda *_: None


def _compare_quantised(layout: EngineLayout, rank: EngineRank, checkpoint: Path) -> dict[str, list[str]]:
    from safetensors.torch import load_file

    from slime.compat.sglang_quantised import NOT_WEIGHTS
    from slime.core.hf_config import read_hf_config
    from slime.models import table_for
    from slime.weights.quantised.formats import engine_table, format_of_folder
    from tests.support.weights import engine_tensors

    reported = (
        (n, p)
        for n, p in load(checkpoint, layout).named_parameters()
        if not n.endswith(NOT_WEIGHTS) and not getattr(p, "_skip_weight_check", False)
    )
    held = {n: p.detach() for n, p in reported}
    table = engine_table(table_for(read_hf_config(str(checkpoint))), format_of_folder(str(checkpoint)))
    source = load_file(checkpoint / "model.safetensors")
    state = {n: source[n].float() if table.entry_of_hf(n).row.wide else source[n] for n in table.hf_names}
    return _differences(table, dict(engine_tensors(table, state, layout=layout, rank=rank, on_cpu=False)), held)


def compare(seat: Seat, layout: EngineLayout, *checkpoints: Path) -> list[dict[str, list[str]]]:
    """For each checkpoint the names that are missing, extra, hold other bits, or are equal."""
    with meet(seat):
        return [_compare(layout, layout.ranks()[seat.rank], checkpoint) for checkpoint in checkpoints]


def _compare(layout: EngineLayout, rank: EngineRank, checkpoint: Path) -> dict[str, list[str]]:
    held = {name: p.detach() for name, p in load(checkpoint, layout).named_parameters()}
    from safetensors.torch import load_file

    from slime.core.hf_config import read_hf_config
    from slime.models import table_for
    from tests.support.weights import engine_tensors

    table = table_for(read_hf_config(str(checkpoint)))
    source = load_file(checkpoint / "model.safetensors")
    rows = {n: table.entry_of_hf(n).row for n in table.hf_names}
    # SGLang reads the float32 of the file itself, and rounds what it does not hold in float32.
    state = {n: source[n] if row.wide or _is_widened(row) else source[n].bfloat16() for n, row in rows.items()}
    return _differences(table, dict(engine_tensors(table, state, layout=layout, rank=rank, on_cpu=False)), held)


def reload(seat: Seat, first: Path, second: Path) -> dict[str, list[str]]:
    """Loads a checkpoint, then another one of the same sizes into the same model, as updates in a server do.

    What differs from a model that loaded the second one alone: before SGLang put weights in order, behind that, and the
    tensors that moved meanwhile.
    """
    with meet(seat):
        return _reload(first, second)


def _reload(first: Path, second: Path) -> dict[str, list[str]]:
    layout = EngineLayout()
    import torch
    from safetensors.torch import load_file
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.plugins.hook_registry import HookRegistry

    from slime.compat import register
    from slime.compat import sglang_quantised as hooks

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    register(hooks.HOOKS)
    HookRegistry.apply_hooks()
    missing = [target for target in HookRegistry._hooks if target not in HookRegistry._patched]
    assert not missing, missing
    alone = load(second, layout)
    want = {n: p.detach().clone() for n, p in alone.named_parameters()}
    model = load(first, layout)
    where = {n: p.data_ptr() for n, p in model.named_parameters()}
    waiting = load(second, layout)
    hooks._expect(waiting)
    state = load_file(second / "model.safetensors")
    out = {}
    for name, update in (("tensor", lambda: (hooks._expect(model), model.load_weights(iter(state.items())))),) * 2 + (
        (
            "disk",
            lambda: DefaultModelLoader.load_weights_and_postprocess(model, iter(state.items()), torch.device("cpu")),
        ),
    ):
        update()
        shapes = {n: p.shape for n, p in waiting.named_parameters()}
        loading = {n: p.shape for n, p in model.named_parameters()}
        out[f"{name}: not as loaders fill it"] = sorted(n for n in shapes if loading.get(n) != shapes[n])
        for module in hooks._layers(model):
            module.quant_method.process_weights_after_loading(module)
        hooks._serve(model)
        got = dict(model.named_parameters())
        out[f"{name}: other bits"] = sorted(
            n for n in want if not torch.equal(_bits(got[n].contiguous()), _bits(want[n].contiguous()))
        )
        out[f"{name}: elsewhere"] = sorted(n for n in where if got[n].data_ptr() != where[n])
    out["compared"] = sorted(want)
    return out


def _is_widened(row: Any) -> bool:
    """Whether the installed SGLang holds in float32 what is sent in the dtype of the model."""
    return row.widened and is_installed("sglang", WITH_SESSIONS)


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.flatten().view(torch.uint8)


def _differences(table: Any, want: dict[str, Any], held: dict[str, Any]) -> dict[str, list[str]]:
    import torch

    both = want.keys() & held.keys()
    widened = {name for name, entries in table.resident.items() if _is_widened(entries[0].row)}
    want = {name: tensor.float() if name in widened else tensor for name, tensor in want.items()}
    return {
        "missing": sorted(want.keys() - held.keys()),
        "extra": sorted(n for n in held.keys() - want.keys() if not table.carries(n)),
        "other": sorted(
            n for n in both if want[n].dtype != held[n].dtype or not torch.equal(_bits(want[n]), _bits(held[n]))
        ),
        "equal": sorted(both),
    }
