"""What a spec becomes on SGLang's command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.core.layout import EngineLayout
from slime.core.topology import Worker, bootstrap_of
from slime.serving.launch import value_of
from slime.serving.server import ServerSpec, command_line_flags
from slime.settings.engine_layout import STAGES_ENV, server_settings

TP2 = EngineLayout(tp_size=2)


def args_of(spec: ServerSpec) -> dict[str, object]:
    return spec.server_args(host="127.0.0.1", port=1, nccl_port=2)


def test_what_the_user_gave_wins_over_the_cpu_defaults() -> None:
    spec = ServerSpec(model_path="m", dtype="float32", extra={"max_total_tokens": 99, "sleep_on_idle": False})
    args = args_of(spec)
    assert args["max_total_tokens"] == 99
    assert "--sleep-on-idle" not in command_line_flags(args)
    assert args["attention_backend"] == "torch_native"


def test_a_gpu_server_gets_none_of_the_cpu_settings() -> None:
    spec = ServerSpec(model_path="m", dtype="bfloat16", device="cuda", gpu_ids=(2, 3), layout=TP2, memory_saver=True)
    args = args_of(spec)
    assert "attention_backend" not in args and "disable_cuda_graph" not in args and "base_gpu_id" not in args
    assert args["enable_memory_saver"] is True
    environment = {name for name, value in spec.environment().items() if value is not None}
    assert environment == {"CUDA_VISIBLE_DEVICES", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"}
    assert spec.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert spec.environment()["SGLANG_MM_AVOID_RETOKENIZE"] is None, "no prompt with images is tokenised again"


def test_more_ranks_than_numa_nodes_name_their_cores() -> None:
    env = ServerSpec(model_path="m", dtype="float32", layout=TP2, cpu_ids=((0, 1), (2, 3)), num_threads=2).environment()
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "auto"},
        {"dtype": "float32", "device": "tpu"},
        {"dtype": "float32", "extra": {"port": 30000}},
        {"dtype": "float32", "extra": {"tp_size": 4}},
        {"dtype": "float32", "gpu_ids": (0, 1)},
        {"dtype": "float32", "num_nodes": 2, "dist_init_addr": "h:1"},
        {"dtype": "float32", "layout": TP2, "num_nodes": 2},
        {"dtype": "float32", "dist_init_addr": "h:1"},
    ],
)
def test_contradictions_are_refused_before_any_process_starts(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSpec(model_path="m", **settings)  # type: ignore[arg-type]


def test_flags_are_written_as_sglang_reads_them() -> None:
    fields = {"a_b": 1, "on": True, "off": False, "none": None, "many": ["x", "y"], "mapping": {"k": 1}}
    assert command_line_flags(fields) == ["--a-b", "1", "--on", "--many", "x", "y", "--mapping", '{"k": 1}']


def test_the_launcher_patches_only_where_the_device_is_a_cpu() -> None:
    assert value_of(["--model-path", "m"], "--device", "cuda") == "cuda"
    assert value_of(["--device", "cpu"], "--device", "cuda") == value_of(["--device=cpu"], "--device", "cuda") == "cpu"


def test_a_token_never_stands_on_a_command_line() -> None:
    spec = ServerSpec(model_path="m", dtype="float32", api_key="secret")
    assert "secret" not in command_line_flags(args_of(spec))
    assert "secret" in spec.environment().values()


@pytest.mark.parametrize(
    "layout",
    [EngineLayout(tp_size=2, pp_size=2, stage_layers=(3, 1)), EngineLayout(tp_size=4, dp_size=2, ep_size=2), TP2],
)
def test_a_layout_is_said_once_and_in_sglangs_words(layout: EngineLayout) -> None:
    spec = ServerSpec(model_path="m", dtype="float32", layout=layout, extra=server_settings(layout))
    assert server_settings(layout).items() <= args_of(spec).items()
    stages = spec.environment().get(STAGES_ENV, "not set")
    assert stages == ("3,1" if layout.stage_layers else "not set")
    with pytest.raises(ConfigError, match="make them agree"):
        ServerSpec(model_path="m", dtype="float32", layout=layout, extra={"ep_size": 8})


def test_an_even_pipeline_does_not_inherit_the_stages_of_this_host() -> None:
    spec = ServerSpec(model_path="m", dtype="float32", layout=EngineLayout(pp_size=2))
    assert spec.environment()[STAGES_ENV] is None


def test_a_node_of_an_engine_has_its_share_of_ranks_and_knows_where_they_meet() -> None:
    layout = EngineLayout(tp_size=4)
    given: dict[str, object] = {"layout": layout, "num_nodes": 2, "dist_init_addr": "10.0.0.1:20000"}
    spec = ServerSpec(model_path="m", dtype="bfloat16", device="cuda", node_rank=1, gpu_ids=(6, 7), **given)  # type: ignore[arg-type]
    assert spec.num_local_ranks == 2 and not spec.answers_requests
    said = args_of(spec)
    assert (said["nnodes"], said["node_rank"], said["dist_init_addr"]) == (2, 1, "10.0.0.1:20000")
    assert said["tp_size"] == 4 and spec.environment()["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "nnodes" not in args_of(ServerSpec(model_path="m", dtype="float32", layout=layout))


def test_overrides_win_over_what_was_given_for_all_engines() -> None:
    args: Any = SimpleNamespace(
        hf_checkpoint="m",
        device="cpu",
        rollout_num_gpus_per_engine=2,
        rollout_seed=1,
        colocate=False,
        offload_rollout=False,
        offload_train=False,
        debug_rollout_only=False,
        pause_generation_mode="abort",
        sglang={"dtype": "float32", "ep_size": 2, "log_level": "x"},
    )
    assert ServerSpec.from_args(args).layout == EngineLayout(tp_size=2, ep_size=2)
    own = ServerSpec.from_args(
        args, model_path="other", layout=EngineLayout(pp_size=2), overrides={"log_level": "y", "dtype": "bfloat16"}
    )
    assert (own.model_path, own.dtype, own.extra["log_level"]) == ("other", "bfloat16", "y")
    assert "ep_size" not in args_of(own) and args_of(own)["pp_size"] == 2
    assert ServerSpec.from_args(args, overrides={"ep_size": 1}).layout == TP2


def test_an_engine_of_a_pair_is_told_which_half_it_does() -> None:
    half = {
        worker: {k: v for k, v in args_of(ServerSpec("m", "float32", worker=worker)).items() if "disagg" in k}
        for worker in (Worker.REGULAR, Worker.PREFILL, Worker.DECODE)
    }
    assert half[Worker.REGULAR] == {}
    assert half[Worker.PREFILL] == {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 2}
    assert half[Worker.DECODE] == {"disaggregation_mode": "decode"}
    assert bootstrap_of("http://127.0.0.1:1") == ("127.0.0.1", 2)
