"""One SGLang server: its specification (`ServerSpec`), its command line, and its life (`SGLangServer`).

The owner (an engine actor, a test) calls `start`, `wait_ready`, `stop`; the server runs in processes of its own, which
end with the owner whatever happens to it (`slime.serving.child_process`).

An engine that is wider than a host is one server per host: the nodes of an engine. They meet at `dist_init_addr`, an
address of the first one, which alone answers requests; the others answer `/health` alone.

Invariants
1. The server listens on `host` only (loopback unless set otherwise).
2. Its ports are leased for as long as it may run, so no other run on the host is given them.
3. `dtype` is always passed: SGLang's own "auto" serves a float32 checkpoint as float16.
4. What the user gave with `--sglang-...` wins over every default here.
5. What divides a model among ranks (`layout`) is said once, and nothing beside it says otherwise.
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
from slime.core.cores import thread_variables
from slime.core.errors import START_FLAG, ConfigError, EngineError
from slime.core.processes import interface_variables, is_loopback
from slime.core.text import NO_KEYS, EngineKeys
from slime.core.topology import BOOTSTRAP_OFFSET, ONE_RANK, PAIRED, EngineLayout, Worker
from slime.serving.child_process import ChildProcess, python_module
from slime.serving.launch import ADMIN_KEY_ENV, API_KEY_ENV, SECRET_FLAGS_ENV, TOKEN_VERSIONS_FLAG
from slime.serving.leased_ports import DERIVED_OFFSETS, LeasedServer, lease_ports, request
from slime.settings import Args
from slime.settings.conditions import lends_at_start
from slime.settings.schema import SECRETS
from slime.settings.topology_yaml import LAYOUT_SETTINGS, STAGES_ENV, contradictions, layout_of, server_settings
from slime.weights.expert_runs import LOADER as EXPERT_LOADER

# Which of SGLang's model files an engine can do without.
#
# A scheduler imports the files of all models, two hundred of them, to find the class that `config.json` names; some of
# them import other frameworks, Megatron-core among them, if they are installed. A variable of SGLang names files to
# leave out. Which file defines a class is a matter of reading, not of importing.

LEAVE_OUT_ENV = "SGLANG_DISABLED_MODEL_ARCHS"
ALWAYS_WANTED = frozenset({"transformers"})
"""SGLang's fallback for what no other file defines."""
CHOOSE_ANOTHER_CLASS = ("speculative", "model_impl", "json_model_override_args", "quantization", "model_config_parser")
"""Beginnings of settings under which SGLang may look for a class that `config.json` does not name."""


def files_left_out(model_path: str, settings: Mapping[str, Any]) -> list[str]:
    """Names of the files that a server of `model_path` need not import; none where that is not certain.

    `settings`: the user's ServerArgs by field name.
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
    """Names of the files in `folder` that define none of the `wanted` classes; none if one of those is nowhere."""
    classes = {
        path.stem: set(re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)) for path in folder.glob("*.py")
    }
    if not wanted or not set(wanted) <= set().union(*classes.values()):
        return []
    keep = {name for name, defined in classes.items() if defined & set(wanted)} | ALWAYS_WANTED
    return sorted(classes.keys() - keep)


# What a starting engine is doing, by the lines that SGLang writes into its log (0.5.16).
#
# Without these lines the phase stays the last one that was seen.

IMPORTING = "importing SGLang"
PHASES = (
    ("Load weight end", "taking memory for its cache"),
    ("Load weight begin", "loading weights"),
    ("Init torch distributed begin", "building the model"),
    (WAITING, "waiting for the trainer to lend the GPU"),
    ("server_args=", IMPORTING + " in its scheduler"),
)
"""(sign in the log, what follows it), the last one first."""


def engine_phase(log: str) -> str:
    """What the engine that wrote `log` is doing."""
    return next((phase for sign, phase in PHASES if sign in log), IMPORTING)


# How an engine that reads prompts hands keys and values to one that samples: SGLang's transfer backends.
#
# `--sglang-disaggregation-transfer-backend` says which; the default is Mooncake, on a CPU over TCP. A backend is a
# package that SGLang loads when an engine of a pair starts, and Mooncake's needs libraries of the system as well.
#
# Invariants
# 1. Whoever would start an engine of a pair learns first what is missing here, and what to install.
# 2. Engines of a run on one host exchange addresses on loopback. Mooncake's own two ports listen on every interface
#    nevertheless, whatever its settings say (docs/topologies.md says what that means).

MODULES: Mapping[str, str] = {
    "mooncake": "mooncake.engine",
    "mooncake_tcp": "mooncake.engine",
    "nixl": "nixl._api",
    "mori": "mori",
}
"""Backend -> what SGLang 0.5.16 imports for it; others have no name here."""
DEFAULT = "mooncake"
SYSTEM_LIBRARIES = "libibverbs1 libnuma1 libcurl4"
"""Packages of Debian and Ubuntu that hold what Mooncake's library loads."""
PATIENT: Mapping[str, str] = dict.fromkeys(
    ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), "86400"
)
"""Seconds after which SGLang gives up a request whose other engine has no room for it, by itself 300. That is nothing
beside answers of many thousand tokens; who waits for a request has a limit of his own (`--request-timeout-s`)."""
ON_A_CPU: Mapping[str, str] = {
    "MOONCAKE_PROTOCOL": "tcp",
    # It would send the cached part of a prompt early, and waits for that with an event of CUDA: the scheduler of an
    # engine without a GPU dies of the second prompt that begins like an earlier one (seen with 0.5.16).
    "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
}
"""Environment of an engine of a pair."""
IMPORT_LIMIT_S = 600.0
"""By default, of a backend."""


def backend_of(extra: Mapping[str, Any]) -> str:
    """The backend of an engine with these ServerArgs."""
    return str(extra.get("disaggregation_transfer_backend") or DEFAULT)


def server_arguments(worker: Worker, bootstrap_port: int | None) -> dict[str, Any]:
    """ServerArgs by field name that make an engine what it is. `bootstrap_port`: of one that reads prompts."""
    if worker not in PAIRED:
        return {}
    port = {"disaggregation_bootstrap_port": bootstrap_port} if worker is Worker.PREFILL else {}
    return {"disaggregation_mode": worker.value, **port}


def environment(worker: Worker, device: str, host: str) -> dict[str, str]:
    """Additions to the environment of an engine that listens on `host`; what the user has set stays."""
    if worker not in PAIRED:
        return {}
    wanted = {"SGLANG_HOST_IP": host, **PATIENT, **(ON_A_CPU if device == "cpu" else {})}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def missing_here(backend: str, device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Why SGLang cannot load a backend on this host, and what to do; None if it can. Takes a fraction of a second."""
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
        return f"{said}; do: apt-get install {SYSTEM_LIBRARIES}"
    if module != MODULES[DEFAULT]:
        return f"{said}; do: install the package that SGLang's documents name for the backend {backend}"
    package = "mooncake-transfer-engine-non-cuda" if device == "cpu" else "mooncake-transfer-engine"
    return f"{said}; do: pip install {package} (make venv does it for a CPU)"


def pair_problem(worker: Worker, extra: Mapping[str, Any], device: str, limit_s: float = IMPORT_LIMIT_S) -> str | None:
    """Why an engine with these ServerArgs could not start on this host; None if it is of no pair, or could."""
    if worker not in PAIRED:
        return None
    backend = backend_of(extra)
    missing = missing_here(backend, device, limit_s)
    if missing is None:
        return None
    return f"got a {worker.value} engine, which needs the transfer backend {backend}, and that does not load: {missing}"


def require_transfer(worker: Worker, extra: Mapping[str, Any], device: str) -> None:
    """Raises `ConfigError` if an engine could not start on this host for want of a way to the other of its pair."""
    if (problem := pair_problem(worker, extra, device)) is not None:
        raise ConfigError(problem)


DTYPES = ("bfloat16", "float16", "float32")
CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "watchdog_timeout": 3600.0,
}
"""ServerArgs of a CPU server. SGLang itself would end one whose batch takes five minutes, as one beside other work may;
`ServerWatch` knows more. The pool is bounded by tokens: the fraction is of memory that is free at start, and small
ones fail on a busy machine. Without `sleep_on_idle` an idle scheduler keeps a core at 75 %."""
_OWNED = frozenset({"model_path", "host", "port", "base_gpu_id", "nccl_port", "nnodes", "node_rank", "dist_init_addr"})
_OWNED |= {"api_key", "admin_api_key"}  # `api_key` and `admin_key` of the spec; they travel in the environment
_PORT_TAKEN = ("address already in use", "is not available", "is already in use", "is used by a process already")
_START_TRIES = 3


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What one SGLang server serves, and on what."""

    model_path: str
    """A Hugging Face checkpoint folder."""
    dtype: str
    """"bfloat16", "float16" or "float32"; the dtype that weights are served (and synced) in."""
    device: str = "cpu"
    """"cpu" or "cuda"."""
    layout: EngineLayout = ONE_RANK
    """How the ranks of the engine divide the model."""
    num_nodes: int = 1
    """Servers that the engine consists of, one per host."""
    node_rank: int = 0
    """Which of them this is."""
    dist_init_addr: str | None = None
    """Where they meet, HOST:PORT of the first one (`ports.lease_meeting_point`); None with one node."""
    gpu_ids: tuple[str, ...] | None = None
    """[ranks of this node] GPU of each, stage by stage, as CUDA_VISIBLE_DEVICES names it: a number or a UUID; None: the
    GPUs from `base_gpu_id` on."""
    base_gpu_id: int = 0
    """First GPU among the visible ones; ignored with `gpu_ids`."""
    random_seed: int | None = None
    """Seed of the sampler (has no effect on a CPU, where stock SGLang cannot sample by seed)."""
    memory_saver: bool = False
    """True: weights and cache can be released and taken again (`--offload-rollout`); GPUs only."""
    num_threads: int = 1
    """CPU threads per rank; CPU only."""
    cpu_ids: tuple[tuple[int, ...], ...] | None = None
    """[layout.tp_size] cores of each rank of a stage, which the stages share; None: rank r gets core r. CPU with more
    than one rank in a stage only."""
    api_key: str | None = None
    """Bearer token that every route but the health checks asks for; None: no token."""
    admin_key: str | None = None
    """What routes that change or end something ask for instead; None: the same."""
    gated: bool = False
    """True: it takes no device memory before `SGLangServer.open_gate`."""
    token_versions: bool = False
    """True: answers tell the weight version of each token."""
    worker: Worker = Worker.REGULAR
    """What it does of a request: all, or one of the two halves."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further ServerArgs by field name, as the user gave them (`args.sglang`)."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"got dtype {self.dtype!r} for the engine, because SGLang would guess; use one of {DTYPES}"
            )
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"got device {self.device!r}; an engine runs on 'cpu' or 'cuda'")
        if self.layout.num_ranks % self.num_nodes or not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"got node {self.node_rank} of {self.num_nodes} for an engine of {self.layout.num_ranks} ranks; nodes "
                "have equally many"
            )
        if (self.num_nodes > 1) != (self.dist_init_addr is not None):
            raise ConfigError(
                f"got dist_init_addr {self.dist_init_addr!r} for an engine of {self.num_nodes} nodes; several nodes "
                "need an address to meet at, one needs none"
            )
        if self.gpu_ids is not None and len(self.gpu_ids) != self.num_local_ranks:
            raise ConfigError(f"got {len(self.gpu_ids)} GPUs for {self.num_local_ranks} ranks; give one per rank")
        clash = sorted(_OWNED & self.extra.keys())
        if clash:
            raise ConfigError(f"got {clash} among the SGLang arguments, which slime sets itself; leave them out")
        if contrary := contradictions(self.layout, self.extra):
            raise ConfigError(
                f"got sglang {', '.join(f'{name} {self.extra[name]}' for name in contrary)} for an engine of "
                f"{self.layout}; make them agree"
            )
        for name in ("dtype", "device"):
            if name in self.extra and self.extra[name] != getattr(self, name):
                raise ConfigError(
                    f"got sglang {name} {self.extra[name]!r} and {getattr(self, name)!r} from slime's own settings; "
                    "make them equal"
                )

    @property
    def num_local_ranks(self) -> int:
        """Ranks of this node."""
        return self.layout.num_ranks // self.num_nodes

    @property
    def keys(self) -> EngineKeys:
        """What it asks for."""
        return EngineKeys(self.api_key, self.admin_key)

    @property
    def answers_requests(self) -> bool:
        """Whether it is the first node."""
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
        node_rank: int = 0,
        num_nodes: int = 1,
        dist_init_addr: str | None = None,
    ) -> ServerSpec:
        """The spec of engine `index` of a run, or of one of its nodes. Raises `ConfigError` on contradictions.

        `keys`: those of the run; `--sglang-api-key` and `--sglang-admin-api-key`, if given, go first. `model_path`: in
        place of `--hf-checkpoint`; `overrides`: ServerArgs by field name that win over `--sglang-...`; `layout`: in
        place of what these say for an engine of `--rollout-num-gpus-per-engine`; `shares`: whether it is on GPUs of
        training ranks, if any engine is.
        `worker`: what it does of a request.
        Without `gpu_ids` the server uses the first GPUs that its owner can see (Ray narrows them). Engines get
        different seeds: with one for all they would sample the same continuations of equal prompts.
        """
        extra = {**args.sglang, **(overrides or {})}
        dtype = extra.pop("dtype", None) or "bfloat16"
        if layout is None:
            layout = layout_of(int(args.rollout_num_gpus_per_engine), extra)
        else:  # of the settings of other engines it takes what is not said for it
            mine = overrides or {}
            extra = {name: value for name, value in extra.items() if name in mine or name not in LAYOUT_SETTINGS}
        return cls(
            model_path=model_path or str(args.hf_checkpoint),
            dtype={"half": "float16", "float": "float32"}.get(dtype, dtype),
            device=args.device,
            layout=layout,
            num_nodes=num_nodes,
            node_rank=node_rank,
            dist_init_addr=dist_init_addr,
            gpu_ids=gpu_ids,
            random_seed=int(args.rollout_seed) + index,
            memory_saver=bool(args.offload_rollout) and shares,
            gated=lends_at_start(args) and shares,
            num_threads=num_threads,
            api_key=extra.pop("api_key", None) or keys.use,
            admin_key=extra.pop("admin_api_key", None) or keys.admin,
            token_versions=args.pause_generation_mode != "abort",
            worker=worker,
            extra=extra,
        )

    def server_args(self, *, host: str, port: int, nccl_port: int) -> dict[str, Any]:
        """Every explicit ServerArgs field, defaults first and the user's over them."""
        args: dict[str, Any] = dict(CPU_DEFAULTS) if self.device == "cpu" else {}
        args["skip_server_warmup"] = True  # the first verified weight sync exercises the server instead
        args["weight_version"] = "0"  # what the checkpoint on disk is called before the first sync calls it 1
        if self.random_seed is not None:
            args["random_seed"] = self.random_seed
        if self.memory_saver and self.device == "cuda":
            args["enable_memory_saver"] = True
        # Weight tables name shared experts apart; on some GPUs SGLang would stack them with the routed ones.
        args["disable_shared_experts_fusion"] = True
        args |= self.extra
        args["custom_weight_loader"] = [EXPERT_LOADER, *(self.extra.get("custom_weight_loader") or ())]
        args["incremental_streaming_output"] = True  # otherwise each event of a stream repeats all before it
        args |= {
            "model_path": self.model_path,
            "host": host,
            "port": port,
            "nccl_port": nccl_port,
            "device": self.device,
            "dtype": self.dtype,
            **server_settings(self.layout),
            **server_arguments(self.worker, port + BOOTSTRAP_OFFSET),
        }
        if self.num_nodes > 1:
            args |= {"nnodes": self.num_nodes, "node_rank": self.node_rank, "dist_init_addr": self.dist_init_addr}
        if self.device == "cuda" and self.gpu_ids is None:
            args["base_gpu_id"] = self.base_gpu_id
        return args

    def environment(self) -> dict[str, str | None]:
        """Additions to the environment of the server's processes only; None removes a variable."""
        env: dict[str, str | None] = {
            API_KEY_ENV: self.api_key,
            ADMIN_KEY_ENV: self.admin_key,
            # By default /health samples a token. The router asks it every few seconds; an engine whose memory has been
            # given to the trainer would then compute on nothing and die (seen with 0.5.16 on one GPU, colocated).
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # With images, ids that come are those that are read (SGLang's default): law 1.
            "SGLANG_MM_AVOID_RETOKENIZE": None,
        }
        # A list of the user's own is left as it is.
        files = [] if LEAVE_OUT_ENV in os.environ else files_left_out(self.model_path, self.extra)
        if self.layout.pp_size > 1:  # stages as the trainer verifies them, whatever this host's environment says
            env[STAGES_ENV] = ",".join(map(str, self.layout.stage_layers)) or None
        env |= {LEAVE_OUT_ENV: ",".join(files)} if files else {}
        if self.device == "cuda":
            return env if self.gpu_ids is None else env | {"CUDA_VISIBLE_DEVICES": ",".join(self.gpu_ids)}
        env |= {**thread_variables(self.num_threads, os.environ), **ONE_THREAD}
        # SGLang compiles the choice of experts with a C++ compiler: half a minute for nothing on a CPU. A server that
        # dies meanwhile can leave an empty library in the user's cache, on which all later ones fail.
        env["TORCHDYNAMO_DISABLE"] = "1"
        if self.layout.tp_size > 1:  # SGLang refuses more ranks than NUMA nodes unless it is given their cores
            cores = self.cpu_ids or tuple((rank,) for rank in range(self.layout.tp_size))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, ids)) for ids in cores)
        return env


def command_line_flags(fields: Mapping[str, Any]) -> list[str]:
    """`--flag value` for settings by field name: True is a bare flag, None and False are left out, a list is many
    values, a dict is JSON."""
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
    """The flags of these settings, and the environment in which those travel that are nobody's to read."""
    secret = command_line_flags({name: value for name, value in fields.items() if name in SECRETS})
    others = command_line_flags({name: value for name, value in fields.items() if name not in SECRETS})
    return others, {SECRET_FLAGS_ENV: json.dumps(secret)} if secret else {}


class SGLangServer(LeasedServer):
    """One server and its life."""

    what = "the server"

    def __init__(self, spec: ServerSpec, *, host: str = "127.0.0.1", log_path: str | Path) -> None:
        super().__init__(host=host, log_path=log_path)
        self.spec = spec
        self._gate, self._opened = Path(log_path).with_suffix(".gate").absolute(), False

    @property
    def model_path(self) -> str:
        """The checkpoint that it was started from."""
        return self.spec.model_path

    def start(self) -> None:
        """Starts the server process and returns at once; `wait_ready` waits for it.

        Raises `ConfigError` if this host lacks what an engine of a pair needs.
        """
        assert self._process is None, "the server was started twice; stop() it first"
        require_transfer(self.spec.worker, self.spec.extra, self.spec.device)
        offsets = DERIVED_OFFSETS if self.spec.layout.dp_size > 1 and self.spec.num_nodes == 1 else ()
        offsets += (BOOTSTRAP_OFFSET,) if self.spec.worker is Worker.PREFILL else ()
        self._lease = lease_ports(2, beside_first=offsets)
        port, nccl_port = self._lease.ports[:2]
        flags, secret = without_secrets(self.spec.server_args(host=self.host, port=port, nccl_port=nccl_port))
        # A server of this host alone meets nobody outside it: gloo must not listen elsewhere.
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
        """Lets a gated server take its memory. It waits with everything imported; before this it is never ready."""
        self._opened = True
        self._set_gate()

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until the server answers `/health`; starts it again on other ports if something took its port.

        Raises `EngineError` with the end of the log if it dies, `DeadlineExceeded` after `timeout_s` without a sign of
        life.
        """
        for attempt in range(_START_TRIES):
            process = self._process
            if process is None:
                raise EngineError("wait_ready before start(): there is nothing to wait for")
            try:
                process.wait_until(self.healthy, what="it was ready", timeout_s=timeout_s)
                if self.spec.device == "cpu" and self.spec.answers_requests:
                    # A flush collects garbage: 0.3 s, unless what is loaded is left out.
                    request("POST", f"{self.url}/freeze_gc", timeout_s=timeout_s, api_key=self.spec.keys.control)
                return
            except EngineError as error:
                lost_port = any(sign in process.log_tail(16000).lower() for sign in _PORT_TAKEN)
                self.stop()
                if not lost_port or attempt + 1 == _START_TRIES or self.spec.num_nodes > 1:  # the others are gone, too
                    raise error from None
                self.start()

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """One question to `/health`; with a status other than 200, or none, False."""
        status, _ = request("GET", f"{self.url}/health", timeout_s=timeout_s)
        return status == 200 and self.alive

    def problem(self) -> str | None:
        """What is wrong with its processes, in one line; None if they run."""
        return "it was not started" if self._process is None else self._process.problem()

    def processor_s(self) -> float:
        """Processor time that its processes have used so far, seconds."""
        return 0.0 if self._process is None else self._process.processor_s()

    def scheduler_answers(self, timeout_s: float) -> bool:
        """Asks for the state of its scheduler, which that one answers between two batches, also without memory.

        On other nodes than the first one nobody can be asked: their processes are all that is known.
        """
        if not self.spec.answers_requests:
            return self.alive
        status, _ = request("GET", f"{self.url}/server_info", timeout_s=timeout_s, api_key=self.spec.api_key)
        return status == 200

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the server and everything below it: SIGTERM, after `timeout_s` SIGKILL. May be called again.

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
        """The gate as it is to be: also for a server that is started again, and after one that was killed."""
        if not self._opened:
            self._gate.unlink(missing_ok=True)
        elif self.spec.gated:
            self._gate.parent.mkdir(parents=True, exist_ok=True)
            self._gate.touch()

    def log_tail(self) -> str:
        """The end of the server's log."""
        return self._process.log_tail() if self._process else ""
