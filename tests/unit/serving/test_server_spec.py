"""What a spec becomes on SGLang's command line, and what servers, routers and agents are started with and asked."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from slime.compat.sglang_memory_gate import GATE_ENV
from slime.compat.sglang_patches import value_of
from slime.core.cores import WAITING
from slime.core.engine_interface import matches, parsed
from slime.core.errors import ConfigError
from slime.core.text import EngineKeys
from slime.core.topology import EngineLayout, Worker, bootstrap_of
from slime.serving import agent_process
from slime.serving import router as router_module
from slime.serving import router as router_workers
from slime.serving import server as server_module
from slime.serving.launch import ADMIN_KEY_ENV, API_KEY_ENV, SECRET_FLAGS_ENV, TOKEN_VERSIONS_FLAG, Secret
from slime.serving.leased_ports import _claim
from slime.serving.router import ExistingRouter, Router
from slime.serving.server import ServerSpec, SGLangServer, command_line_flags
from slime.settings.topology_yaml import STAGES_ENV, server_settings

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
    spec = ServerSpec(
        model_path="m", dtype="bfloat16", device="cuda", gpu_ids=("GPU-5b", "MIG-07/1"), layout=TP2, memory_saver=True
    )
    args = args_of(spec)
    assert "attention_backend" not in args and "disable_cuda_graph" not in args and "base_gpu_id" not in args
    assert args["enable_memory_saver"] is True
    environment = {name for name, value in spec.environment().items() if value is not None}
    assert environment == {"CUDA_VISIBLE_DEVICES", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"}
    assert spec.environment()["CUDA_VISIBLE_DEVICES"] == "GPU-5b,MIG-07/1"
    assert spec.environment()["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0", "/health samples nothing"
    assert spec.environment()["SGLANG_MM_AVOID_RETOKENIZE"] is None, "no prompt with images is tokenised again"


@pytest.mark.parametrize(
    ("layout", "num_nodes", "before", "since"),
    [
        (EngineLayout(), 1, None, None),
        (TP2, 1, "0|1", "0|1"),
        (EngineLayout(tp_size=2, dp_size=2), 1, "0|1", "0|1"),  # DP attention divides the ranks of a stage
        (TP2, 2, "0|1", "0"),
        (EngineLayout(pp_size=2), 1, None, "0|1"),
        (EngineLayout(pp_size=2), 2, None, "0"),
        (EngineLayout(tp_size=2, pp_size=2), 1, "0|1", "0|1|2|3"),
        (EngineLayout(tp_size=2, pp_size=2), 2, "0|1", "0|1"),
    ],
)
def test_more_ranks_than_numa_nodes_name_their_cores(
    monkeypatch: pytest.MonkeyPatch, layout: EngineLayout, num_nodes: int, before: str | None, since: str | None
) -> None:
    """`before`, `since`: what SGLang 0.5.16 and 0.5.23 need on the last node."""
    where = {"num_nodes": num_nodes, "node_rank": num_nodes - 1, "dist_init_addr": "h:1" if num_nodes > 1 else None}
    spec = ServerSpec("m", "float32", layout=layout, num_threads=2, **where)  # type: ignore[arg-type]
    for version, cores in (("0.5.16", before), ("0.5.23", since)):
        monkeypatch.setattr(server_module, "is_installed", lambda _, wanted, v=version: matches(parsed(v), wanted))
        assert spec.environment().get("SGLANG_CPU_OMP_THREADS_BIND") == cores
    assert spec.environment()["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("num_threads", "of_the_user", "waits"),
    [
        (2, {}, "PASSIVE"),
        (1, {}, None),  # the other core is for the trainer
        (2, {"OMP_WAIT_POLICY": "ACTIVE"}, None),
        (2, {"GOMP_SPINCOUNT": "9"}, None),
    ],
)
def test_threads_that_share_cores_do_not_spin_and_the_users_word_stands(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, of_the_user: dict[str, str], waits: str | None
) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in of_the_user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("slime.core.cores.usable_cores", lambda: 2)
    assert ServerSpec("m", "float32", num_threads=num_threads).environment().get("OMP_WAIT_POLICY") == waits


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "auto"},
        {"dtype": "float32", "device": "tpu"},
        {"dtype": "float32", "extra": {"port": 30000}},
        {"dtype": "float32", "extra": {"tp_size": 4}},
        {"dtype": "float32", "gpu_ids": ("0", "1")},
        {"dtype": "float32", "num_nodes": 2, "dist_init_addr": "h:1"},
        {"dtype": "float32", "layout": TP2, "num_nodes": 2},
        {"dtype": "float32", "dist_init_addr": "h:1"},
    ],
)
def test_contradictions_are_refused_before_any_process_starts(settings: dict[str, object]) -> None:
    with pytest.raises((ConfigError, AssertionError)):
        ServerSpec(model_path="m", **settings)  # type: ignore[arg-type]


@dataclass
class Arguments:
    api_key: str


def test_flags_are_written_as_sglang_reads_them() -> None:
    fields = {"a_b": 1, "on": True, "off": False, "none": None, "many": ["x", "y"], "mapping": {"k": 1}}
    assert command_line_flags(fields) == ["--a-b", "1", "--on", "--many", "x", "y", "--mapping", '{"k": 1}']


def test_the_launcher_patches_only_where_the_device_is_a_cpu() -> None:
    assert value_of(["--model-path", "m"], "--device", "cuda") == "cuda"
    assert value_of(["--device", "cpu"], "--device", "cuda") == value_of(["--device=cpu"], "--device", "cuda") == "cpu"


def test_a_token_never_stands_on_a_command_line() -> None:
    spec = ServerSpec(model_path="m", dtype="float32", api_key="secret", admin_key="secret, too")
    assert not {"secret", "secret, too"} & set(command_line_flags(args_of(spec)))
    assert {"secret", "secret, too"} <= set(spec.environment().values())


def test_a_copy_of_a_key_opens_nothing() -> None:
    """Law: SGLang copies its arguments into answers, and pickles them for its children: those hold no key."""
    key = Secret("sesame")
    assert key == "sesame" and f"Bearer {key}" == "Bearer sesame" and repr(key) == "'<hidden>'"
    copies = [copy.deepcopy(key), pickle.loads(pickle.dumps(key)), asdict(Arguments(key))["api_key"]]
    assert "sesame" not in copies and len(set(copies)) == 3 and all(c.startswith("<hidden>") for c in copies)


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
    spec = ServerSpec(model_path="m", dtype="bfloat16", device="cuda", node_rank=1, gpu_ids=("6", "7"), **given)  # type: ignore[arg-type]
    assert not spec.answers_requests
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
        true_on_policy=False,
        metrics_port=None,
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


def test_an_engine_is_what_the_settings_say_and_lends_its_memory_where_it_shares_gpus() -> None:
    """Law: engines sample unlike each other, and the user's keys go before those of the run."""
    run = EngineKeys("the run's", "to its weights")
    args: Any = SimpleNamespace(
        hf_checkpoint="m",
        device="cuda",
        rollout_num_gpus_per_engine=1,
        rollout_seed=5,
        offload_rollout=True,
        offload_train=True,
        debug_train_only=False,
        pause_generation_mode="retract",
        true_on_policy=False,
        metrics_port=None,
        sglang={"api_key": "the user's"},
    )
    spec = ServerSpec.from_args(args, index=3, num_threads=2, keys=run)
    assert (spec.random_seed, spec.num_threads, spec.token_versions) == (8, 2, True)
    assert spec.keys == EngineKeys("the user's", "to its weights")
    apart = ServerSpec.from_args(args, keys=run, shares=False)
    assert [(one.memory_saver, one.gated) for one in (spec, apart)] == [(True, True), (False, False)]
    args.sglang, args.pause_generation_mode = {}, "abort"
    spec = ServerSpec.from_args(args, keys=run)
    assert spec.keys == run and not spec.token_versions
    args.sglang = {"admin_api_key": "the user's"}
    assert ServerSpec.from_args(args, keys=run).keys == EngineKeys("the run's", "the user's")


class Started:
    """Of `ChildProcess` what its owner sees: its words, its environment, and that it lives."""

    all: ClassVar[list[Started]] = []

    def __init__(self, name: str, command: list[str], *, log_path: Path, env: dict[str, str | None]) -> None:
        self.words, self.env, self.alive = command, env, True
        Started.all.append(self)

    def start(self) -> None:
        pass

    def wait_until(self, holds: Any, **_: Any) -> None:
        assert holds()

    def stop(self, timeout_s: float = 0.0) -> None:
        self.alive = False


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, str | None]]:
    """What servers and routers are asked, with which limit and key; processes are not started."""
    found: list[tuple[str, float, str | None]] = []

    def ask(method: str, url: str, *body: Any, timeout_s: float, api_key: str | None = None) -> tuple[int, str]:
        found.append((url.rpartition("/")[2], timeout_s, api_key))
        return 200, ""

    Started.all = []
    for module in (server_module, router_module, agent_process):
        monkeypatch.setattr(module, "ChildProcess", Started)
    for module in (server_module, router_module):
        monkeypatch.setattr(module, "request", ask)
    return found


def test_a_server_has_ports_of_its_own_its_key_and_its_gate(
    tmp_path: Path, asked: list[tuple[str, float, str | None]]
) -> None:
    spec = ServerSpec(
        "m",
        "float32",
        api_key="secret",
        admin_key="admin",
        gated=True,
        token_versions=True,
        extra={"ssl_keyfile_password": "p w"},
    )
    servers = [SGLangServer(spec, host="10.0.0.4", log_path=tmp_path / f"engine_{i}.log") for i in range(2)]
    for server in servers:
        server.start()
    ports = [value_of(p.words, name, "") for p in Started.all for name in ("--port", "--nccl-port")]
    assert len(set(ports)) == 4 and ports[::2] == [str(server.port) for server in servers]
    for number, process in enumerate(Started.all):
        assert value_of(process.words, "--host", "") == "10.0.0.4" and "--incremental-streaming-output" in process.words
        assert value_of(process.words, "--weight-version", "") == "0", "the first weight sync makes it 1"
        assert process.words[process.words.index("slime.serving.launch") + 1] == TOKEN_VERSIONS_FLAG
        assert "p w" not in process.words and "p w" in str(process.env[SECRET_FLAGS_ENV])
        assert (process.env[API_KEY_ENV], process.env[ADMIN_KEY_ENV]) == ("secret", "admin")
        assert process.env[GATE_ENV] == str(tmp_path / f"engine_{number}.gate")
    assert not any(_claim(int(port)) for port in ports), "nobody else can lease them"
    gate = tmp_path / "engine_0.gate"
    assert not gate.exists()
    servers[0].open_gate()
    assert gate.exists()
    servers[0].wait_ready(7.0)
    assert servers[0].scheduler_answers(3.0)
    assert asked == [("health", 5.0, None), ("freeze_gc", 7.0, "admin"), ("server_info", 3.0, "secret")]
    for server in servers:
        server.stop()
    leases = [_claim(int(port)) for port in ports]
    assert all(leases), "ports are given back"
    for lease in leases:
        lease.close()  # type: ignore[union-attr]


def test_a_router_has_its_key_ports_of_its_own_and_no_proxies(
    tmp_path: Path, asked: list[tuple[str, float, str | None]]
) -> None:
    given: dict[str, Any] = {"worker_api_key": "secret", "extra_args": {"policy": "random", "oracle_password": "p w"}}
    routers = [Router(log_path=tmp_path / f"{i}.log", pairs=bool(i), **given) for i in range(2)]
    for router in routers:
        router.start()
    words = [process.words for process in Started.all]
    ports = [value_of(one, name, "") for one in words for name in ("--port", "--prometheus-port")]
    assert len(set(ports)) == 4 and ports[::2] == [str(router.port) for router in routers]
    assert ["--pd-disaggregation" in one for one in words] == [False, True]
    assert {value_of(one, "--policy", "") for one in words} == {"random"}
    more = {SECRET_FLAGS_ENV: '["--oracle-password", "p w"]'}
    assert Started.all[0].env == {API_KEY_ENV: "secret", **router_module.NO_PROXIES, **more}
    assert not any("p w" in one for one in words), "everybody on the host sees a command line"
    for router in routers:
        router.stop()
    leases = [_claim(int(port)) for port in ports]
    assert all(leases), "ports are given back"
    for lease in leases:
        lease.close()  # type: ignore[union-attr]
    assert not asked


def test_servers_are_added_to_a_router_and_taken_off_with_its_key_and_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: the router asks a server with that server's key, and is asked with its own."""
    said: list[Any] = []

    def ask(method: str, url: str, body: Any = None, *, timeout_s: float, api_key: str = "") -> tuple[int, str]:
        said.append((method, url, body, api_key))
        return 202, ""

    monkeypatch.setattr(router_workers, "request", ask)
    router, url = ExistingRouter("10.0.0.9", 81, api_key="its own", worker_api_key="the engines'"), "http://10.0.0.4:1"
    router.ask_to_add(url, 5.0, Worker.REGULAR)
    router.ask_to_add(url, 5.0, Worker.PREFILL)
    router.ask_to_remove(router_workers.RouterWorker("a/b", url, True), 5.0)
    added, at = {"url": url, "api_key": "the engines'"}, "http://10.0.0.9:81/workers"
    half = {**added, "worker_type": "prefill", "bootstrap_port": bootstrap_of(url)[1]}
    assert said == [
        ("POST", at, added, "its own"),
        ("POST", at, half, "its own"),
        ("DELETE", f"{at}/a%2Fb", None, "its own"),
    ]


def test_a_weights_agent_has_its_engine_its_folders_and_its_key(
    tmp_path: Path, asked: list[tuple[str, float, str | None]]
) -> None:
    """Law: also when it is started again; after its end it stays ended."""
    settings = agent_process.AgentSettings("/shared", "/local", "my.hooks.pre_read", 41.0)
    agent = agent_process.AgentProcess(settings, "http://10.0.0.4:1", "secret", tmp_path / "agent.log")
    agent.tend()
    assert len(Started.all) == 1
    Started.all[0].alive = False
    agent.tend()
    first, second = Started.all
    assert first.words == second.words and first.env == second.env == {ADMIN_KEY_ENV: "secret", API_KEY_ENV: None}
    named = {"engine": "http://10.0.0.4:1", "disk-dir": "/shared", "local-dir": "/local", "limit-s": "41.0"}
    named["pre-read-hook"] = "my.hooks.pre_read"
    assert {name: value_of(first.words, f"--{name}", "") for name in named} == named
    agent.stop()
    agent.tend()
    assert len(Started.all) == 2 and not second.alive and not asked
