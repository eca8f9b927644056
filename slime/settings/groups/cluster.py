"""Settings for placement (device, training and inference slots, run folder), and for restarts after failures."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.processes import new_run_id
from slime.core.registry import load_object
from slime.settings.fields import UNSET, Adjusted, Need, Rule, derived, internal, opt, refuse_if
from slime.settings.flags import COUNT, COUNT_OR_NONE, PORT, SECONDS, SECONDS_OR_NONE
from slime.settings.topology_yaml import topology_of

if TYPE_CHECKING:
    from slime.settings.args import Args

_SHARED = Need(lambda s: s.colocate, "--colocate: nothing else needs the memory")
_OWN_ENGINES = Need(
    lambda s: not s.rollout_external_engine_addrs,
    "engines that the run starts; those of --rollout-external-engine-addrs report their own size",
)
_JOINED = Need(lambda s: s.ray_address is not None, "a Ray cluster that the run joins (--ray-address)")


def _address(given: str | None) -> str | None:
    """Returns the address of a running Ray cluster; None if the run starts its own."""
    return None if given in (None, "", "local") else given


def has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*"))


def gpus_here() -> int | None:
    """Counts the NVIDIA devices that a run on this machine can use; None if /dev does not list them (WSL)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = len(glob.glob("/dev/nvidia[0-9]*"))
    if not found and os.path.exists("/dev/dxg"):
        return None
    if visible is None:
        return found
    names = [name for name in map(str.strip, visible.split(",")) if name]
    return len(names) if found and any(name.startswith("MIG-") for name in names) else min(found, len(names))


def _num_rollout_gpus(s: Any) -> int:
    if s.rollout_external_engine_addrs:
        return 0
    if s.sglang_config is not None:
        return topology_of(s).num_gpus
    shared = s.actor_num_nodes * s.actor_num_gpus_per_node
    return int(shared if s.colocate else s.rollout_num_gpus_per_engine)


def _why_so_many(s: Any) -> str:
    if s.rollout_external_engine_addrs:
        return "external engines take no slots"
    if s.sglang_config is not None:
        return "the groups of --sglang-config"
    return "--colocate: the training GPUs" if s.colocate else "one engine"


def _hands_over(s: Any) -> bool:
    """Returns whether training and inference take turns on the GPU."""
    return bool(s.offload or (s.colocate and s.device == "cuda"))


def _why_handed_over(s: Any) -> str:
    if s.offload:
        return "--offload"
    if s.colocate:
        return "--colocate on cuda" if s.device == "cuda" else "a CPU has no device memory to hand over"
    return "training and inference do not share GPUs"


def _without_trainer(value: Any, s: Any) -> Adjusted | None:
    if value and s.debug_rollout_only:
        return Adjusted(False, "--debug-rollout-only starts no trainer")
    return None


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Placement of training and inference. On a CPU a "GPU" is a logical slot."""

    device: str = derived(
        lambda s: "cuda" if has_gpu() else "cpu",
        lambda s: "/dev/nvidia* exists" if s.device == "cuda" else "no /dev/nvidia* on this machine",
        choices=("auto", "cpu", "cuda"),
        canonical=lambda value: UNSET if value == "auto" else value,
        first="Placement",
    )
    """Device for training and inference. auto: cuda if this machine has an NVIDIA device, else cpu."""
    run_id: str = internal(lambda s: new_run_id(), "time and a random number")
    """Id of this launch; part of the names of its processes, temporary files and, without --run-dir, its folder."""
    run_dir: str = derived(lambda s: f"runs/{s.run_id}", "the run id", first="Run folder")
    """Folder of this run: resolved settings, metrics, logs, report. Default: runs/<run id>."""
    ray_address: str | None = derived(
        lambda s: _address(os.environ.get("RAY_ADDRESS")),
        "the environment variable RAY_ADDRESS",
        canonical=_address,
    )
    """HOST:PORT of the Ray cluster to join, or local to start a cluster on this host. Default: the environment variable
    RAY_ADDRESS, else local."""
    forward_env_vars: tuple[str, ...] = opt((), needs=_JOINED)
    """Environment variables to pass from the driver to all processes of the run, in addition to those of NCCL, gloo,
    SGLang, torch, Hugging Face and OpenMP. Ray shows their values to everyone with access to the cluster."""
    actor_num_nodes: int = opt(1, within=COUNT, first="Placement")
    """Number of training hosts; more than one needs a Ray cluster with several hosts."""
    actor_num_gpus_per_node: int = opt(1, within=COUNT, first="Placement")
    """Training GPUs (on a CPU: ranks) per host."""
    num_gpus_per_node: int | None = opt(None, needs=_JOINED, within=COUNT)
    """Maximum number of GPUs (on a CPU: slots) that the run uses per host. Default: all free GPUs."""
    rollout_num_gpus: int = derived(
        _num_rollout_gpus, _why_so_many, needs=_OWN_ENGINES, within=COUNT_OR_NONE, first="Placement"
    )
    """Total number of inference GPUs. Default: those in --sglang-config; else the training GPUs with --colocate; else
    those of one engine. With --colocate, GPUs beyond the training GPUs are used only by engines."""
    rollout_num_gpus_per_engine: int = opt(1, needs=_OWN_ENGINES, within=COUNT, first="Placement")
    """GPUs per SGLang engine: tensor-parallel ranks times --sglang-pp-size pipeline stages."""
    colocate: bool = opt(False, adjust=_without_trainer, first="Placement")
    """Training and inference share the same GPUs and take turns."""
    offload: bool = opt(False, needs=_SHARED)
    """Same as --offload-train --offload-rollout."""
    offload_train: bool = derived(_hands_over, _why_handed_over, needs=_SHARED)
    """Release the GPU memory of training while inference runs. Default: on with --colocate on cuda."""
    offload_rollout: bool = derived(_hands_over, _why_handed_over, needs=_SHARED)
    """Release the GPU memory of inference while training runs. Default: on with --colocate on cuda."""
    cluster_wait_s: float = opt(0.0, needs=_JOINED, within=SECONDS_OR_NONE)
    """Seconds for which the run waits at start until the Ray cluster responds and has enough free slots. For hosts that
    join late; an autoscaler is asked for them."""
    train_env_vars: dict[str, str] = opt({})
    """Extra environment variables of the training processes, as a JSON object."""
    distributed_timeout_minutes: int = opt(10, ge=1, le=43_200)
    """Timeout of each collective between training ranks, in minutes."""


def split_address(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. An IPv6 host must be in brackets. Raises `ValueError` for anything else."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or "/" in host or not port.isdecimal() or PORT.problem(int(port)):
        raise ValueError(address)
    return host, int(port)


def ray_address_in_words(args: Args) -> str:
    """Returns the address and where the user set it, for messages."""
    given = args.was_given("ray_address")
    return f"ray_address {args.ray_address}" if given else f"RAY_ADDRESS={args.ray_address} in the environment"


def ray_address_is_one(args: Args) -> str | None:
    address = args.ray_address
    if address in (None, "auto"):
        return None
    said = ray_address_in_words(args)
    if address.startswith("ray://"):
        return (
            f"{said} is a Ray Client address, which would start the driver on a different host; use the HOST:PORT "
            "that `ray start --head` printed (6379 by default), on a host of the cluster"
        )
    try:
        split_address(address)
    except ValueError:
        return f"{said} is not HOST:PORT; use the address that `ray start --head` printed, or local"
    return None


def variables_can_be_set(args: Args) -> str | None:
    for name, value in args.train_env_vars.items():
        if not name or "=" in name or "\0" in name + value:
            return f"train_env_vars has the name {name!r}, but a name must not be empty or contain `=`; correct it"
    return None


def engines_divide(args: Args) -> str | None:
    total, each = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if args.debug_train_only or args.sglang_config or args.rollout_external_engine_addrs:
        return None
    if total > 0 and each > 0 and total % each == 0:
        return None
    return (
        f"rollout_num_gpus {total} is not a multiple of rollout_num_gpus_per_engine {each}; change --rollout-num-gpus "
        "or --rollout-num-gpus-per-engine"
    )


def engines_fit_on_training_hosts(args: Args) -> str | None:
    """Raises the `ConfigError` of the placement plan if an engine could share only some of its slots."""
    if not args.colocate or args.debug_train_only or engines_divide(args):
        return None
    host, demand = (load_object(f"slime.cluster.placement:{name}") for name in ("Host", "EngineDemand"))
    per_host = args.actor_num_gpus_per_node
    load_object("slime.cluster.placement:plan_placement")(
        num_nodes=args.actor_num_nodes,
        num_per_node=per_host,
        engines=[demand(engine.num_gpus, engine.runs) for engine in topology_of(args).wanted()],
        colocate=True,
        hosts=[host("", "", per_host + args.rollout_num_gpus, 1)] * args.actor_num_nodes,  # a lower bound
    )
    return None


RULES: tuple[Rule, ...] = (
    ray_address_is_one,
    variables_can_be_set,
    engines_divide,
    engines_fit_on_training_hosts,
    refuse_if(
        lambda s: (
            s.num_gpus_per_node is not None
            and s.actor_num_gpus_per_node > s.num_gpus_per_node
            and not s.debug_rollout_only
        ),
        "actor_num_gpus_per_node {s.actor_num_gpus_per_node} is above num_gpus_per_node {s.num_gpus_per_node}, the "
        "most that the run uses on a host; lower --actor-num-gpus-per-node and raise --actor-num-nodes",
    ),
    refuse_if(
        lambda s: s.actor_num_nodes > 1 and s.ray_address is None,
        "actor_num_nodes {s.actor_num_nodes} needs a Ray cluster of several hosts, but the run would start Ray only on "
        "this host; set --ray-address HOST:PORT, or use --actor-num-gpus-per-node",
    ),
)


_REPORTS = Need(lambda s: s.hang_report_s > 0, "--hang-report-s above 0")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """How engines are monitored, and how the run reacts to failures."""

    use_fault_tolerance: bool = True
    """Restart an engine that exits, hangs or fails a weight sync. It serves again after it has received and verified
    the current weights; until then the run continues with other engines. --no-use-fault-tolerance: the run fails."""
    rollout_health_check_interval: float = opt(5.0, within=SECONDS)
    """Seconds between health checks of an engine's scheduler. The engine's processes are checked every second."""
    rollout_health_check_timeout: float = opt(30.0, within=SECONDS)
    """Seconds without a sign of life, after one interval, before an engine counts as hung. A sign of life is a token
    for any request or, on CPUs, any computation. On a busy machine the limit is longer (docs/fault_tolerance.md)."""
    rollout_health_check_first_wait: float = derived(
        lambda s: 180.0 if s.device == "cuda" else None,
        "on a GPU the scheduler does not respond while the first requests compile kernels",
        default=0.0,
        within=SECONDS_OR_NONE,
    )
    """Seconds before the first health check of a newly started engine. Default: 180 on cuda, else 0."""
    hang_report_s: float = derived(
        lambda s: 300.0 if s.device == "cuda" else None,
        "on a GPU, a rank can wait for minutes for the kernels of a large batch",
        default=30.0,
        within=SECONDS_OR_NONE,
    )
    """Seconds in which no training rank moves before the run reports the stacks of all ranks and who waits for whom.
    Stopped processes are reported after ten seconds. 0: no reports. Default: 300 on cuda, else 30."""
    hang_limit_s: float = opt(1800.0, needs=_REPORTS, within=SECONDS_OR_NONE)
    """Seconds without progress after which a reported hang ends the run, or restarts it (--max-restarts). 0: never."""
    max_restarts: int = opt(0, within=COUNT_OR_NONE)
    """Maximum number of restarts from the newest checkpoint after a fault (a lost process or host). Needs --save, the
    same folder as --load, and --save-interval."""
    restart_wait_s: float = opt(
        600.0,
        needs=(Need(lambda s: s.max_restarts, "--max-restarts"), _JOINED),
        within=SECONDS_OR_NONE,
    )
    """Seconds for which a restart (--max-restarts) waits until the Ray cluster has enough free slots again, because a
    lost host may take minutes to be replaced."""
    min_actor_num_nodes: int = opt(
        0, needs=(Need(lambda s: s.max_restarts, "--max-restarts"), _JOINED), within=COUNT_OR_NONE
    )
    """Fewest training hosts with which a restart continues if not all of --actor-num-nodes are back after
    --restart-wait-s. The data-parallel size shrinks; batches stay as they are. 0: a restart needs all hosts."""
    exit_signal_handler: bool = False
    """On SIGTERM, finish the current step, save a checkpoint and exit with code 75, as always on SIGUSR1. A second
    SIGTERM ends the run at once. Default: SIGTERM ends the run at once, without a checkpoint."""
    exit_duration_in_mins: int | None = opt(None, within=COUNT)
    """After this many minutes, restarts included, finish the current step, save a checkpoint and exit with code 75."""


def fewer_hosts_are_fewer(args: Args) -> str | None:
    if args.min_actor_num_nodes <= args.actor_num_nodes:
        return None
    return (
        f"min_actor_num_nodes {args.min_actor_num_nodes} is more than actor_num_nodes {args.actor_num_nodes}, but a "
        "restart never uses more hosts than the first launch; lower it"
    )


def restarts_have_a_checkpoint(args: Args) -> str | None:
    """A restart runs the same command again, so the command must load what it saved."""
    if not args.max_restarts:
        return None
    said = f"max_restarts {args.max_restarts}"
    if args.save is None:
        return f"{said} needs --save, because a restart continues from a checkpoint; set --save FOLDER --load FOLDER"
    dropped = args.load is None and "--load is --save" in args.origins.get("load", "")
    if not dropped and (args.load is None or Path(args.load).resolve() != Path(args.save).resolve()):
        given = f"--load {args.load}" if args.load else "no --load"
        return (
            f"{said} does not work with --save {args.save} and {given}: a restart must load what the previous launch "
            f"saved; set --load {args.save}, which may be empty at first"
        )
    if args.save_interval is None:
        return (
            f"{said} needs --save-interval, because by default only the last step is saved; set it to a number of steps"
        )
    others = {"--ckpt-step": args.ckpt_step is not None, "--finetune": args.finetune}
    if again := [flag for flag, given in others.items() if given]:
        flags = " and ".join(again)
        return f"{said} does not work with {flags}: every launch would go back to the same step; drop {flags}"
    return None


def early_end_has_a_checkpoint(args: Args) -> str | None:
    given = {
        "--exit-signal-handler": args.exit_signal_handler,
        f"--exit-duration-in-mins {args.exit_duration_in_mins}": args.exit_duration_in_mins is not None,
    }
    flags = [flag for flag, is_given in given.items() if is_given]
    if not flags or args.save is not None:
        return None
    return (
        f"{' and '.join(flags)} needs --save, because a run that stops early continues from a checkpoint; set --save "
        "FOLDER --load FOLDER"
    )


FLEET_RULES: tuple[Rule, ...] = (restarts_have_a_checkpoint, fewer_hosts_are_fewer, early_end_has_a_checkpoint)
