"""An SGLang server: its specification (`ServerSpec`), command line and processes (`SGLangServer`).

The owner (an engine actor or a test) calls `start`, `wait_ready` and `stop`. If the owner exits for any reason, so do
the server's processes (`slime.serving.child_process`).

A multi-host engine has one server (node) per host. The nodes rendezvous at `dist_init_addr`, an address of the first
node. Only the first node serves requests; the others respond only to `/health`.

The engines of a prefill-decode pair transfer keys and values through one of SGLang's transfer backends
(`--sglang-disaggregation-transfer-backend`). SGLang imports the backend's package only when the engine starts, so
`pair_problem` checks in advance what is missing and what to install.

Invariants
1. The server listens only on `host`, by default loopback. The exception is Mooncake, which listens on two ports on
   every interface, with no setting to change that (docs/serving_topology.md).
2. The server's ports stay leased until it is stopped.
3. `dtype` is always passed, because SGLang's "auto" would serve a float32 checkpoint as float16.
4. User settings (`--sglang-...`) override every default in this file.
5. Only `layout` defines how the model is split over ranks. Settings that contradict it raise `ConfigError`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.compat.sglang_cpu.forked_children import ONE_THREAD
from slime.compat.sglang_memory_gate import GATE_ENV, WAITING
from slime.compat.sglang_trainer_kernels import KERNELS_ENV
from slime.core.cores import memory_variables, thread_variables
from slime.core.engine_interface import BEFORE_SESSIONS, is_installed
from slime.core.errors import START_FLAG, ConfigError, EngineError
from slime.core.processes import interface_variables, is_loopback
from slime.core.text import NO_KEYS, EngineKeys
from slime.core.topology import BOOTSTRAP_OFFSET, ONE_RANK, PAIRED, EngineLayout, Worker
from slime.serving.child_process import ChildProcess, python_module
from slime.serving.launch import ADMIN_KEY_ENV, API_KEY_ENV, SECRET_FLAGS_ENV, TOKEN_VERSIONS_FLAG
from slime.serving.leased_ports import DERIVED_OFFSETS, LeasedServer, lease_ports, request
from slime.settings import Args
from slime.settings.conditions import lends_at_start, requests_continue
from slime.settings.schema import SECRETS
from slime.settings.topology_yaml import LAYOUT_SETTINGS, STAGES_ENV, contradictions, layout_of, server_settings
from slime.weights.expert_runs import LOADER as EXPERT_LOADER

LEAVE_OUT_ENV = "SGLANG_DISABLED_MODEL_ARCHS"
"""Environment variable with model files that a scheduler skips. By default, it imports all two hundred of them to find
the class named in `config.json`, and some of them import other frameworks, such as Megatron-core."""
ALWAYS_WANTED = frozenset({"transformers"})
"""Contains SGLang's fallback for classes that no other file defines."""
CHOOSE_ANOTHER_CLASS = ("speculative", "model_impl", "json_model_override_args", "quantization", "model_config_parser")
"""Prefixes of settings that can make SGLang use a different class from the one in `config.json`."""


def files_left_out(model_path: str, settings: Mapping[str, Any]) -> list[str]:
    """Returns the model files that a server of `model_path` does not need to import. Empty if unsure.

    `settings`: the user's ServerArgs, by field name.
    """
    if any(name.startswith(CHOOSE_ANOTHER_CLASS) and value for name, value in settings.items()):
        return []
    config = Path(model_path) / "config.json"
    spec = importlib.util.find_spec("sglang")
    if not config.is_file() or spec is None or not spec.submodule_search_locations:
        return []
    wanted = json.loads(config.read_text()).get("architectures") or []
    return left_out(wanted, Path(spec.submodule_search_locations[0]) / "srt" / "models")


def left_out(wanted: Collection[str], folder: Path) -> list[str]:
    """Returns the files in `folder` that define none of the `wanted` classes. Empty if any class is missing."""
    classes = {
        path.stem: set(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)) for path in folder.glob("*.py")
    }
    if not wanted or not set(wanted) <= set().union(*classes.values()):
        return []
    keep = {name for name, defined in classes.items() if defined & set(wanted)} | ALWAYS_WANTED
    return sorted(classes.keys() - keep)


IMPORTING = "importing SGLang"
PHASES = (
    ("server_args=", IMPORTING + " in its scheduler"),
    (WAITING, "waiting for the trainer to lend the GPU"),
    ("Init torch distributed begin", "building the model"),
    ("Load weight begin", "loading weights"),
    ("Load weight end", "allocating its cache"),
    ("graph begin", "capturing CUDA graphs"),
    ("DeepGEMM JIT Compiling", "compiling FP8 kernels, which takes minutes on a new host"),
)
"""(text in SGLang's log, from 0.5.16 to 0.5.23, the phase that follows it)."""


def engine_phase(log: str) -> str:
    """Returns what a starting engine is currently doing, according to the last such text in its `log`."""
    place, phase = max((log.rfind(sign), phase) for sign, phase in PHASES)
    return phase if place >= 0 else IMPORTING


MODULES: Mapping[str, str] = {
    "mooncake": "mooncake.engine",
    "mooncake_tcp": "mooncake.engine",
    "nixl": "nixl._api",
    "mori": "mori",
}
"""Maps a transfer backend to the module that SGLang 0.5.16 imports for it. Other backends are not checked."""
DEFAULT = "mooncake"
SYSTEM_LIBRARIES = "libibverbs1 libnuma1 libcurl4"
"""Debian and Ubuntu packages with the libraries that Mooncake loads."""
PATIENT: Mapping[str, str] = dict.fromkeys(
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), "86400"
)
"""Seconds after which SGLang drops a request that waits for memory in the other engine of the pair. The default of 300
is too short for responses of many thousands of tokens. The client has its own timeout (`--request-timeout-s`)."""
ON_A_CPU: Mapping[str, str] = {
    "MOONCAKE_PROTOCOL": "tcp",
    # With early sending, SGLang waits on a CUDA event. Without a GPU, its scheduler crashes on the second prompt that
    # has a cached prefix (seen with 0.5.16).
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
"""Environment variables for a paired engine on a CPU."""
IMPORT_LIMIT_S = 600.0


def environment(worker: Worker, device: str, host: str) -> dict[str, str]:
    """Returns additional environment variables for a paired engine. Never overrides the user's variables."""
    if worker not in PAIRED:
        return {}
    wanted = {"SGLANG_HOST_IP": host, **PATIENT, **(ON_A_CPU if device == "cpu" else {})}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def missing_here(backend: str, device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Returns why SGLang cannot load a transfer backend here and how to fix it, else None. Takes under a second."""
    module = MODULES.get(backend)
    if module is None:
        return None
    command = [sys.executable, "-c", f"import {module}"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return (
            f"python did not import {module} within {limit_s:.0f} s ({START_FLAG} raises the limit); is the disk slow?"
        )
    if run.returncode == 0:
        return None
    said = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
    if "shared object file" in said and module == MODULES[DEFAULT]:
        return f"{said}; apt-get install {SYSTEM_LIBRARIES}"
    if module != MODULES[DEFAULT]:
        return f"{said}; install the package that SGLang's documentation names for the backend {backend}"
    package = "mooncake-transfer-engine-non-cuda" if device == "cpu" else "mooncake-transfer-engine"
    return f"{said}; pip install {package} (on a CPU, make venv does this)"


def pair_problem(worker: Worker, extra: Mapping[str, Any], device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Returns why a paired engine with these ServerArgs cannot start on this host; None if it can or is unpaired."""
    if worker not in PAIRED:
        return None
    backend = str(extra.get("disaggregation_transfer_backend") or DEFAULT)
    missing = missing_here(backend, device, limit_s)
    if missing is None:
        return None
    return f"a {worker.value} engine needs the transfer backend {backend}, which does not load here: {missing}"


DTYPES = ("bfloat16", "float16", "float32")
CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "watchdog_timeout": 3600.0,
}
"""ServerArgs of a CPU server. By default, SGLang's watchdog kills a server if a batch takes five minutes, which can
happen on a busy machine; `ServerWatch` is more accurate. `max_total_tokens` bounds the pool. `mem_fraction_static` only
has to pass a check: the memory free after loading must exceed 1 - fraction of the memory free before, and other
processes take memory in between. Without `sleep_on_idle`, an idle scheduler uses 75 % of a core."""
_OWNED = frozenset({"model_path", "host", "port", "base_gpu_id", "nccl_port", "nnodes", "node_rank", "dist_init_addr"})
_OWNED |= {"api_key", "admin_api_key"}  # fields of the spec that are passed in the environment
_PORT_TAKEN = ("address already in use", "is not available", "is already in use", "is used by a process already")
_START_TRIES = 3


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The model, hardware and settings of an SGLang server."""

    model_path: str
    """A Hugging Face checkpoint folder."""
    dtype: str
    """Dtype of served and synced weights: "bfloat16", "float16" or "float32"."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    layout: EngineLayout = ONE_RANK
    num_nodes: int = 1
    """Number of servers that form the engine, one per host."""
    node_rank: int = 0
    dist_init_addr: str | None = None
    """HOST:PORT on the first node where the nodes rendezvous (`lease_meeting_point`). None for a single node."""
    gpu_ids: tuple[str, ...] | None = None
    """[ranks of this node] The GPU of each rank, stage by stage, as in CUDA_VISIBLE_DEVICES (an index or a UUID). None:
    the first visible GPUs."""
    random_seed: int | None = None
    """Sampling seed. Has no effect on a CPU, where stock SGLang does not support seeded sampling."""
    memory_saver: bool = False
    """Whether the memory of weights and cache can be released and resumed (`--offload-rollout`). GPU only."""
    num_threads: int = 1
    """Threads per rank. CPU only."""
    api_key: str | None = None
    """Bearer token for every route except the health checks. None: no token."""
    admin_key: str | None = None
    """Bearer token for routes that change state. None: `api_key`."""
    gated: bool = False
    """Whether the server waits for `SGLangServer.open_gate` before it allocates device memory."""
    token_versions: bool = False
    """Whether responses contain the weight version of each token."""
    trainer_kernels: str | None = None
    """The run's --kernels, for an engine that matches the trainer bit for bit (`--true-on-policy`). None: SGLang's."""
    worker: Worker = Worker.REGULAR
    """A regular engine, or the prefill or decode engine of a pair."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The user's remaining ServerArgs, by field name (`args.sglang`)."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"engines do not support dtype {self.dtype!r}; use one of {DTYPES}")
        nodes, ranks, meeting = self.num_nodes, self.layout.num_ranks, self.dist_init_addr
        assert self.device in ("cpu", "cuda"), f"an engine on {self.device}"
        assert ranks % nodes == 0 and 0 <= self.node_rank < nodes, f"node {self.node_rank} of {nodes}, {ranks} ranks"
        assert (nodes > 1) == (meeting is not None), f"{nodes} nodes meet at {meeting}"
        assert self.gpu_ids is None or len(self.gpu_ids) == ranks // nodes, f"{self.gpu_ids} for {ranks // nodes} ranks"
        clash = sorted(_OWNED & self.extra.keys())
        if clash:
            raise ConfigError(f"slime sets the SGLang arguments {clash} itself; remove them")
        if contrary := contradictions(self.layout, self.extra):
            raise ConfigError(
                f"the SGLang settings {', '.join(f'{name} {self.extra[name]}' for name in contrary)} contradict the "
                f"engine's layout ({self.layout}); make them agree"
            )
        for name in ("dtype", "device"):
            if name in self.extra and self.extra[name] != getattr(self, name):
                raise ConfigError(
                    f"the SGLang setting {name} is {self.extra[name]!r}, but slime uses {getattr(self, name)!r}; "
                    "make them equal"
                )

    @property
    def keys(self) -> EngineKeys:
        return EngineKeys(self.api_key, self.admin_key)

    @property
    def answers_requests(self) -> bool:
        """Whether this is the first node, the only one that serves requests."""
        return self.node_rank == 0

    @classmethod
    def from_args(
        cls,
        args: Args,
        *,
        index: int = 0,
        num_threads: int = 1,
        gpu_ids: tuple[str, ...] | None = None,
        keys: EngineKeys = NO_KEYS,
        model_path: str | None = None,
        layout: EngineLayout | None = None,
        overrides: Mapping[str, Any] | None = None,
        shares: bool = True,
        worker: Worker = Worker.REGULAR,
    ) -> ServerSpec:
        """Returns the spec of engine `index` of a run. Raises `ConfigError` for contradictory settings.

        `keys`: the run's keys, overridden by --sglang-api-key and --sglang-admin-api-key. `model_path`: replaces
        --hf-checkpoint. `overrides`: ServerArgs by field name, which override --sglang-.... `layout`: replaces the
        layout derived from these and --rollout-num-gpus-per-engine. `shares`: whether this engine of a colocated run
        shares GPUs with training ranks. Without `gpu_ids`, the server uses the first GPUs visible to its owner, as
        restricted by Ray. Each engine has its own seed, because equal seeds would give equal continuations.
        """
        extra = {**args.sglang, **(overrides or {})}
        if args.metrics_port is not None:
            extra.setdefault("enable_metrics", True)
        dtype = extra.pop("dtype", None) or "bfloat16"
        if layout is None:
            layout = layout_of(int(args.rollout_num_gpus_per_engine), extra)
        else:  # the run's layout settings apply to other engines
            mine = overrides or {}
            extra = {name: value for name, value in extra.items() if name in mine or name not in LAYOUT_SETTINGS}
        return cls(
            model_path=model_path or str(args.hf_checkpoint),
            dtype={"half": "float16", "float": "float32"}.get(dtype, dtype),
            device=args.device,
            layout=layout,
            gpu_ids=gpu_ids,
            random_seed=int(args.rollout_seed) + index,
            memory_saver=bool(args.offload_rollout) and shares,
            gated=lends_at_start(args) and shares,
            num_threads=num_threads,
            api_key=extra.pop("api_key", None) or keys.use,
            admin_key=extra.pop("admin_api_key", None) or keys.admin,
            token_versions=requests_continue(args),
            trainer_kernels=args.kernels if args.true_on_policy and model_path in (None, args.hf_checkpoint) else None,
            worker=worker,
            extra=extra,
        )

    def server_args(self, *, host: str, port: int, nccl_port: int) -> dict[str, Any]:
        """Returns all explicit ServerArgs by field name: slime's defaults, overridden by user settings."""
        args: dict[str, Any] = dict(CPU_DEFAULTS) if self.device == "cpu" else {}
        args["skip_server_warmup"] = True  # the first weight sync tests the server instead
        args["weight_version"] = "0"  # the checkpoint on disk; the first sync sends version 1
        if self.random_seed is not None:
            args["random_seed"] = self.random_seed
        if self.memory_saver and self.device == "cuda":
            args["enable_memory_saver"] = True
        # Weight tables list shared experts separately, but on some GPUs SGLang would stack them with the routed ones.
        args["disable_shared_experts_fusion"] = True
        args |= {name: value for name, value in self.extra.items() if name not in LAYOUT_SETTINGS}
        args["custom_weight_loader"] = [EXPERT_LOADER, *(self.extra.get("custom_weight_loader") or ())]
        args["incremental_streaming_output"] = True  # otherwise each stream event repeats the earlier tokens
        args |= {
            "model_path": self.model_path,
            "host": host,
            "port": port,
            "nccl_port": nccl_port,
            "device": self.device,
            "dtype": self.dtype,
            **server_settings(self.layout),
        }
        if self.worker in PAIRED:
            args["disaggregation_mode"] = self.worker.value
        if self.worker is Worker.PREFILL:
            args["disaggregation_bootstrap_port"] = port + BOOTSTRAP_OFFSET
        if self.num_nodes > 1:
            args |= {"nnodes": self.num_nodes, "node_rank": self.node_rank, "dist_init_addr": self.dist_init_addr}
        return args

    def environment(self) -> dict[str, str | None]:
        """Returns changes to the environment of the server's processes. None removes a variable."""
        env: dict[str, str | None] = {
            KERNELS_ENV: self.trainer_kernels,
            API_KEY_ENV: self.api_key,
            ADMIN_KEY_ENV: self.admin_key,
            # By default, /health samples a token, and routers poll it every few seconds. An engine that has lent its
            # memory to the trainer would crash, because it has no weights (seen with 0.5.16, colocated on one GPU).
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # Law 1: must be unset. By default, SGLang uses exactly the token ids that it receives, even with images.
            "SGLANG_MM_AVOID_RETOKENIZE": None,
        }
        # Never overrides a list that the user has set.
        files = [] if LEAVE_OUT_ENV in os.environ else files_left_out(self.model_path, self.extra)
        if self.layout.pp_size > 1:  # stages as verified by the trainer; overrides this host's setting
            env[STAGES_ENV] = ",".join(map(str, self.layout.stage_layers)) or None
        env |= {LEAVE_OUT_ENV: ",".join(files)} if files else {}
        if self.device == "cuda":
            return env if self.gpu_ids is None else env | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpu_ids)}
        env |= {**thread_variables(self.num_threads, os.environ), **memory_variables(os.environ), **ONE_THREAD}
        # SGLang compiles expert selection with a C++ compiler, which takes half a minute without any benefit on a CPU.
        # A server that dies in the meantime can leave an empty library in the user's cache, which breaks later servers.
        env["TORCHDYNAMO_DISABLE"] = "1"
        return env | self._cores()

    def _cores(self) -> dict[str, str | None]:
        """Returns the variable that assigns a core to each rank. Without it, SGLang rejects more ranks than NUMA nodes.

        SGLang 0.5.16 counts and numbers the ranks of one pipeline stage, on all nodes. SGLang 0.5.23 counts the ranks
        of all stages, and numbers those of its own node.
        """
        if is_installed("sglang", BEFORE_SESSIONS):
            counted = numbered = self.layout.tp_size
        else:
            counted, numbered = self.layout.num_ranks, self.layout.num_ranks // self.num_nodes
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(numbered)))} if counted > 1 else {}


def command_line_flags(fields: Mapping[str, Any]) -> list[str]:
    """Converts settings (by field name) to command-line flags.

    True becomes a bare flag; None and False are omitted. A list becomes several values, and a dict becomes JSON.
    """
    flags: list[str] = []
    for name, value in fields.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Mapping):
            flags.append(json.dumps(dict(value)))
        elif isinstance(value, list | tuple):
            flags += [str(v) for v in value]
        else:
            flags.append(str(value))
    return flags


def without_secrets(fields: Mapping[str, Any]) -> tuple[list[str], dict[str, str | None]]:
    """Returns the flags for all settings except secrets, and an environment variable that contains the secrets."""
    secret = command_line_flags({name: value for name, value in fields.items() if name in SECRETS})
    others = command_line_flags({name: value for name, value in fields.items() if name not in SECRETS})
    return others, {SECRET_FLAGS_ENV: json.dumps(secret)} if secret else {}


class SGLangServer(LeasedServer):
    what = "the server"

    def __init__(self, spec: ServerSpec, *, host: str = "127.0.0.1", log_path: str | Path) -> None:
        super().__init__(host=host, log_path=log_path)
        self.spec = spec
        self._gate, self._opened = Path(log_path).with_suffix(".gate").absolute(), False

    @property
    def model_path(self) -> str:
        return self.spec.model_path

    def start(self) -> None:
        """Starts the server process and returns immediately. Call `wait_ready` to wait for the server.

        Raises `ConfigError` if this host lacks a package that a paired engine needs.
        """
        assert self._process is None, "start() was called twice; call stop() first"
        if problem := pair_problem(self.spec.worker, self.spec.extra, self.spec.device):
            raise ConfigError(problem)
        offsets = DERIVED_OFFSETS if self.spec.layout.dp_size > 1 and self.spec.num_nodes == 1 else ()
        offsets += (BOOTSTRAP_OFFSET,) if self.spec.worker is Worker.PREFILL else ()
        self._lease = lease_ports(2, beside_first=offsets)
        port, nccl_port = self._lease.ports[:2]
        flags, secret = without_secrets(self.spec.server_args(host=self.host, port=port, nccl_port=nccl_port))
        # A server on loopback has no peers on other hosts, so gloo must listen only on loopback.
        interface = interface_variables(self.host, {} if is_loopback(self.host) else os.environ)
        gate = {GATE_ENV: str(self._gate)} if self.spec.gated else {}
        self._set_gate()
        self._process = ChildProcess(
            f"SGLang server {self.url}",
            python_module("slime.serving.launch", [TOKEN_VERSIONS_FLAG] * self.spec.token_versions + flags),
            log_path=self.log_path,
            env={**self.spec.environment(), **environment(self.spec.worker, self.spec.device, self.host), **interface}
            | gate
            | secret,
        )
        self._process.start()

    def open_gate(self) -> None:
        """Lets a gated server allocate memory. Until then, the server waits with all imports done."""
        self._opened = True
        self._set_gate()

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until the server responds to `/health`. If another program took its port, restarts it on other ports.

        Raises `EngineError` with the end of the log if the server dies, or `DeadlineExceeded` after `timeout_s` without
        a sign of life.
        """
        for attempt in range(_START_TRIES):
            process = self._process
            if process is None:
                raise EngineError("wait_ready() was called before start()")
            try:
                process.wait_until(self.healthy, what="it was ready", timeout_s=timeout_s)
                if self.spec.device == "cpu" and self.spec.answers_requests:
                    # A cache flush runs garbage collection, which takes 0.3 s unless loaded objects are frozen.
                    request("POST", f"{self.url}/freeze_gc", timeout_s=timeout_s, api_key=self.spec.keys.control)
                return
            except EngineError as error:
                lost_port = any(sign in process.log_tail(16000).lower() for sign in _PORT_TAKEN)
                self.stop()
                if not lost_port or attempt + 1 == _START_TRIES or self.spec.num_nodes > 1:  # other nodes died too
                    raise error from None
                self.start()

    def healthy(self, timeout_s: float = 5.0) -> bool:
        status, _ = request("GET", f"{self.url}/health", timeout_s=timeout_s)
        return status == 200 and self.alive

    def problem(self) -> str | None:
        """Describes a problem with the processes in one line. None if they are running."""
        return "it has not been started" if self._process is None else self._process.problem()

    def stands(self) -> str:
        """Returns where the server's processes stand and who waits for whom (`ChildProcess.stands`)."""
        return "it has not been started" if self._process is None else self._process.stands()

    def processor_s(self) -> float:
        return 0.0 if self._process is None else self._process.processor_s()

    def scheduler_answers(self, timeout_s: float) -> bool:
        """Returns whether the scheduler responds, which it does between batches, even while its memory is lent out.

        Only the first node has a route for this. On other nodes, returns whether the process is running.
        """
        if not self.spec.answers_requests:
            return self.alive
        status, _ = request("GET", f"{self.url}/server_info", timeout_s=timeout_s, api_key=self.spec.api_key)
        return status == 200

    def stop(self, timeout_s: float = 2.0) -> None:
        """Sends SIGTERM to the server and its descendants, then SIGKILL after `timeout_s`. Idempotent.

        Raises `EngineError` if a process survives SIGKILL.
        """
        if self._process is not None:
            self._process.stop(timeout_s)
            self._process = None
            self._gate.unlink(missing_ok=True)
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _set_gate(self) -> None:
        """Creates the gate file if the gate is open, else deletes one that a killed server may have left."""
        if not self._opened:
            self._gate.unlink(missing_ok=True)
        elif self.spec.gated:
            self._gate.parent.mkdir(parents=True, exist_ok=True)
            self._gate.touch()

    def log_tail(self) -> str:
        return self._process.log_tail() if self._process else ""
