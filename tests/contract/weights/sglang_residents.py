"""Loads a checkpoint with SGLang's own model class and loader and compares its parameters with the weight table.

One tensor-parallel rank, in bfloat16, no server. For models that SGLang builds but does not serve on a CPU: it is told
that this is none where the models ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.ranks import Seat

KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""What SGLang's Qwen3.5 looks up on a CPU when it is imported, and only a build of its kernels has."""


def load(checkpoint: Path, seat: Seat) -> Any:
    """SGLang's model with the weights of the checkpoint."""
    rank, size = seat.rank, seat.world_size
    if seat.listener is not None:
        seat.listener.close()  # SGLang opens the store itself
    from slime.compat.sglang_cpu import activate

    activate("cpu")
    import torch

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for kernel in KERNELS:
        library.define(f"{kernel}(Tensor a) -> Tensor")
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader import get_model
    from sglang.srt.models import qwen3_5, qwen3_next
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    qwen3_5._is_cpu = qwen3_next._is_cpu = False
    args = ServerArgs(
        model_path=str(checkpoint),
        device="cpu",
        dtype="bfloat16",
        tp_size=size,
        disable_shared_experts_fusion=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        attention_backend="torch_native",
    )
    set_global_server_args_for_scheduler(args)
    config = ModelConfig.from_server_args(args)
    parallel_state.init_distributed_environment(
        world_size=size,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{seat.port}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    initialize_dp_attention(args, config)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def compare(seat: Seat, checkpoint: Path) -> dict[str, list[str]]:
    """Names that are missing, extra, hold other bits, or are equal."""
    held = {name: p.detach() for name, p in load(checkpoint, seat).named_parameters()}
    import torch
    from safetensors.torch import load_file

    from slime.core.hf_config import read_hf_config
    from slime.models import table_for
    from tests.support.weights import engine_tensors

    table = table_for(read_hf_config(str(checkpoint)))
    source = load_file(checkpoint / "model.safetensors")
    state = {n: source[n] if table.entry_of_hf(n).row.wide else source[n].bfloat16() for n in table.hf_names}
    want = dict(engine_tensors(table, state, tp_rank=seat.rank, tp_size=seat.world_size, on_cpu=False))
    both = want.keys() & held.keys()
    return {
        "missing": sorted(want.keys() - held.keys()),
        "extra": sorted(n for n in held.keys() - want.keys() if not table.carries(n)),
        "other": sorted(
            n for n in both if want[n].dtype != held[n].dtype or not torch.equal(want[n].flatten(), held[n].flatten())
        ),
        "equal": sorted(both),
    }
