"""Starts and stops a run.

Startup order: preflight -> run folder -> guardian -> views (W&B has its own process) -> Ray -> other hosts, each with a
guardian (`hosts`) -> placement group, engines, trainers, rollout actor (`start_actors`). Shutdown is always in reverse
order, so the views close after all other processes have stopped and before the guardian kills any that remain.

Ray reads its environment once, on import. So this module sets the environment and does not import Ray:

    Ray started by the run     only listens on loopback, requires a token generated for the run, and passes on the
                               driver's entire environment, because its processes are descendants of the driver
    existing Ray cluster       keeps its own settings; processes start with the environment of its daemons plus selected
                               variables of the driver (`for_actors`)

A process killed by the kernel because memory ran out leaves no message and can no longer be measured. So a thread of
the driver (`MemoryWatch`) measures the run's processes on this host, and the error of a failed run includes the last
measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import shlex
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import slime
from slime.cluster.guardian import Guardian
from slime.cluster.hosts import GuardedHosts, hosts_of_run, plan_here
from slime.cluster.placement import PlacementPlan
from slime.cluster.preflight import has_other_metrics, preflight
from slime.cluster.restarting import stop_request, this_restart
from slime.core.blame import error_line
from slime.core.errors import ActorDied, ActorFailed, CheckpointError, Hung, LoopStalled, Terminated, Unfinished
from slime.core.lease import FILE_NAME, Lease
from slime.core.processes import RUN_ID_ENV
from slime.core.text import program
from slime.data.first_rows import data_warnings
from slime.observability.logs import FILE_ONLY, setup_logging
from slime.observability.progress import StartUp
from slime.observability.run_folder import RunFolder
from slime.observability.spans import start_recording
from slime.observability.start_record import hide_secrets
from slime.observability.tracker import Tracker, Views
from slime.observability.trackers import TRACKERS
from slime.rollout.guard import LAST_WORDS, last_words
from slime.serving.child_process import KEEP_ENVIRON_ENV, ProcessFamily, ProcessId, read_stat
from slime.settings import Args
from slime.settings.command_line import without
from slime.settings.conditions import replaced_folders
from slime.settings.custom_yaml import for_functions_listed
from slime.settings.hook_contracts import check_hooks
from slime.settings.rules import likely_mistakes
from slime.training.state import checkpoint

if TYPE_CHECKING:
    from slime.cluster.training_run import Run

LOCAL_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default, Ray starts one idle worker per core. The run only needs its planned actors.
    "RAY_prestart_worker_first_driver": "0",
    # "0" makes Ray single-host, so it listens on 127.0.0.1 instead of the host's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # By default, Ray lowers the CPU priority of its workers and their children.
    "RAY_worker_niceness": "0",
    # By default, Ray declares a host dead if its daemon does not respond for a minute. On a single host, the driver
    # detects the daemon's exit without this check.
    "RAY_health_check_failure_threshold": "60",
    # Do not record the last 100,000 calls (21 kB a step) for Ray's dashboard, which is disabled.
    "RAY_task_events_report_interval_ms": "0",
}
"""Environment variables for a single-machine Ray cluster that belongs to one run."""

JOINED_RAY = {"RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
"""Environment variables for a run on an existing cluster. `ray job submit --runtime-env-json` can set variables that
the run also sets, such as PYTHONPATH. By default, Ray then refuses to start. With this setting, the run's values
take precedence; they include the job's (`for_actors`)."""

NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""The values that SGLang sets in its own processes. If the trainer uses other values, the first broadcast of a weight
sync hangs."""

START_FOLDER_ENV = "SLIME_START_FOLDER"
"""The driver's working directory. All processes of the run change to it, so relative paths work everywhere."""
FORWARDED = (
    *("NCCL_", "GLOO_", "SGLANG_", "TORCH", "PYTORCH_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "OMP_"),
    *("GOMP_", "KMP_", "MKL_", "CUBLAS_", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("PYTHONHASHSEED", "MPLBACKEND"),
)
"""Prefixes of host-independent variables, which are always forwarded. --forward-env-vars adds others."""
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")
"""Variables with one of these words in their name are only forwarded on request, because Ray displays their values.
Matches whole words between underscores, so `TOKENIZERS_...` is forwarded."""
SETUP_HOOK = "slime.cluster.launch_run.enter_start_folder"
logger = logging.getLogger(__name__)


def prepare_environment(run_id: str, *, ray_address: str | None = None) -> None:
    """Sets environment variables for this process and its children: the run id, NCCL, and local Ray.

    If the run joins a cluster at `ray_address`, does not set the variables of a local Ray.
    """
    os.environ[RUN_ID_ENV] = run_id
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    if ray_address is not None:
        os.environ.update(JOINED_RAY)
        return
    assert "ray" not in sys.modules, "Ray was imported too early and would ignore its environment variables"
    for name, value in LOCAL_RAY.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def for_actors(environment: Mapping[str, str], *, named: Sequence[str] = ()) -> dict[str, str]:
    """Returns the environment for processes on an existing cluster: selected variables of the driver and PYTHONPATH.

    PYTHONPATH contains slime and the user's modules. `named`: additional variables selected by the user.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if name in named or (name.startswith(FORWARDED) and not _is_secret(name))
    }
    root = str(Path(slime.__file__).resolve().parent.parent)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(p for p in (root, *_own_folders(sys.path), *given) if p)
    chosen |= {RUN_ID_ENV: environment[RUN_ID_ENV], KEEP_ENVIRON_ENV: "1"}
    return chosen | {"PYTHONPATH": os.pathsep.join(paths), START_FOLDER_ENV: os.getcwd()}


def _own_folders(import_path: Sequence[str]) -> list[str]:
    """Returns the folders in `import_path` that do not belong to the Python installation."""
    brought = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    return [os.path.abspath(p) for p in import_path if os.path.isdir(p) and not os.path.abspath(p).startswith(brought)]


def _is_secret(name: str) -> bool:
    return any(word in name.split("_") for word in _SECRET)


def enter_start_folder() -> None:
    """Changes to the driver's working directory. On a cluster, every process of a run calls this first."""
    folder = os.environ.get(START_FOLDER_ENV)
    if folder:
        try:
            os.chdir(folder)
        except OSError as error:
            logger.warning("cannot change to the folder in which the run was started: %s", error)


LEFT_OUT = ("load", "run_dir", "ckpt_step", "finetune")
"""Settings that the resume command replaces or drops. `--finetune` would only load the weights and start at step 0."""


def resume_command(command: Sequence[str], *, load: str, run_dir: str) -> str:
    """Returns the command that resumes the run started with `command` (`slime train ...`), without secrets."""
    _, loop, *flags = command
    kept = without(flags, *LEFT_OUT)
    words = shlex.join(hide_secrets([*kept, "--load", load, "--run-dir", run_dir]))
    return f"{program(loop)} {words}"


def how_to_resume(args: Args, *, stopped: bool) -> str:
    """Returns one line on how to resume a run that was stopped or failed, or "" if it cannot be resumed.

    `stopped`: whether the run was stopped (`STOPPED`). Only then does the line mention a missing checkpoint.
    """
    if args.debug_rollout_only or args.num_rollout == 0:
        return ""
    try:
        found = checkpoint.find(Path(args.save)) if args.save else None
    except CheckpointError:
        return ""
    if found is None and not stopped:
        return ""
    if found is None:
        why = "no checkpoint is complete yet" if args.save else "--save is not set"
        return f"nothing to resume from: {why}; {_how_to_start_over(args)}"
    if args.num_rollout is not None and found.rollout_id + 1 >= args.num_rollout:
        return ""
    command = resume_command(args.command, load=str(args.save), run_dir=str(args.run_dir))
    return f"{found.path.name} is saved; to continue with step {found.rollout_id + 1}: {command}"


def _how_to_start_over(args: Args) -> str:
    """Returns how to start over: with the same command, or what to change first."""
    if args.was_given("run_dir") and has_other_metrics(args):
        return f"to start over, choose a new --run-dir or delete {args.run_dir}, which contains metrics of this run"
    if args.load is not None:
        return f"the same command starts again from the checkpoint in {args.load}"
    return f"the same command starts over with step {args.start_rollout_id or 0}"


def saves_nothing(args: Args) -> bool:
    """Returns whether the run trains weights that are lost when it ends."""
    trains = not args.debug_rollout_only and args.num_rollout != 0
    return trains and not (args.save or args.save_hf)


def start_warnings(args: Args) -> list[str]:
    """Returns warnings about what the user probably does not want the run to do."""
    found = [*replaced_folders(args), *likely_mistakes(args), *data_warnings(args)]
    if saves_nothing(args):
        found.append("nothing will be saved; to keep the trained weights, set --save DIR or --save-hf DIR")
    return found


T = TypeVar("T")

STOPPED = (KeyboardInterrupt, Terminated, Unfinished)
"""The exceptions of a run that somebody stopped."""
DRIVER_LOG = "driver.log"
ORDERLY_END_S, HASTY_END_S = 20.0, 2.0
"""Timeouts for processes to stop after a completed run, and after an error or Ctrl-C. Ray then kills the rest."""


@contextmanager
def launch(args: Args) -> Iterator[Run]:
    """Starts a run's processes, yields the `Run`, and stops all processes after the block."""
    began_s = time.monotonic()
    stop_request().listen(args)
    prepare_environment(args.run_id, ray_address=args.ray_address)  # before any user code, which may import Ray
    check_hooks(args)
    preflight(args)
    run_dir = Path(args.run_dir).resolve()
    save = None if args.save is None else Lease(Path(args.save), args.run_id, flag="--save")
    inside = save is not None and save.folder.is_relative_to(run_dir)
    with ExitStack() as leases:
        file = run_dir.with_name(f".{run_dir.name}{FILE_NAME}")
        leases.enter_context(Lease(run_dir, args.run_id, flag="--run-dir", file=file))
        if save is not None and not inside:
            leases.enter_context(save)
        settings = args.to_json_dict()
        folder = RunFolder.create(
            run_dir, run_id=args.run_id, args=settings, command=args.command, without_effect=settings["idle"]
        )
        if save is not None and inside:
            leases.enter_context(save)  # only now, because a new run folder must be empty
        yield from _launched(args, settings, folder, began_s)


def _launched(args: Args, settings: dict[str, Any], folder: RunFolder, began_s: float) -> Iterator[Run]:
    """Implements `launch` in the created run folder. `settings`: `args` as JSON."""
    run_id = args.run_id
    setup_logging(folder.logs / DRIVER_LOG)
    if (restart := this_restart()) is not None:
        logger.warning("%s", restart)
        folder.note("restart", restart.facts())
    if args.idle:
        told = "\n".join(f"  {name} {text}" for name, text in settings["idle"].items())
        logger.warning("these settings have no effect (--strict makes them errors):\n%s", told)
    if read := for_functions_listed(args):
        logger.info("these settings are read only by your functions:\n%s", "\n".join(f"  {text}" for text in read))
    for text in start_warnings(args):
        logger.warning("%s", text)
    from slime.cluster.ray_session import guarded
    from slime.cluster.start_actors import start

    spans = start_recording("driver", folder.traces, endpoint=args.otlp_traces_endpoint, run_id=run_id)
    startup = StartUp(began_s)
    try:
        with (
            guarded(run_id, log_path=folder.logs / "guardian.log", own_ray=args.ray_address is None) as guardian,
            MemoryWatch(run_id) as memory,
            Tracker.with_views(_views(args, settings), folder) as tracker,
        ):
            if restart is not None:
                tracker.alert("restart", str(restart))
            try:
                with _placed(args, startup, folder, guardian) as (plan, hosts):
                    with _explained(memory, folder):
                        run = start(args, plan, hosts, folder, tracker, startup)
                    yield from _used(run, memory, folder)
            except BaseException as error:  # the background save has finished by now
                stopped = isinstance(error, STOPPED)
                told = how_to_resume(args, stopped=stopped)
                if told:
                    error.add_note(told)
                if not stopped:
                    tracker.alert("failed", f"the run failed: {error_line(error)}" + (f"; {told}" if told else ""))
                raise
    except Exception:  # only to the log file, because `run_or_exit` prints the message to the console
        logger.error("the run failed", exc_info=True, extra=FILE_ONLY)
        raise
    finally:
        spans.close()
        folder.write_report()


@contextmanager
def _placed(
    args: Args, startup: StartUp, folder: RunFolder, guardian: Guardian
) -> Iterator[tuple[PlacementPlan, GuardedHosts]]:
    """Starts or joins a Ray cluster; stops or leaves it after the block. Yields the placement plan and its hosts."""
    from slime.cluster.ray_session import JoinedRay, RaySession, store_bytes_for

    if args.ray_address is None:
        plan = plan_here(args)
        num_gpus = plan.num_slots if args.device == "cuda" else 0
        session = RaySession(
            args.run_id,
            num_cpus=plan.num_slots + 2,
            num_gpus=num_gpus,
            store_bytes=store_bytes_for(args),
            stops_early=args.exit_signal_handler,
        )
        with _timed(startup, "ray", "Ray is up", session):
            yield plan, GuardedHosts(guardian)
        return
    with (
        _timed(startup, "ray", f"the run has joined {args.ray_address}", JoinedRay(args)),
        _timed(startup, "hosts", "the hosts are ready", hosts_of_run(args, folder, guardian)) as placed,
    ):
        yield placed


@contextmanager
def _timed(startup: StartUp, phase: str, line: str, block: AbstractContextManager[T]) -> Iterator[T]:
    """Times entering `block` as a startup phase. Exits `block` at the end of the `with` statement."""
    with ExitStack() as stack:
        with startup.phase(phase, line):
            entered = stack.enter_context(block)
        yield entered


def _used(run: Run, memory: MemoryWatch, folder: RunFolder) -> Iterator[Run]:
    """Yields the `Run` to the loop. Stops the actors cleanly, even after an error or Ctrl-C in the loop."""
    from slime.cluster.waiting import followed_by

    try:
        with _explained(memory, folder), _blamed(run, folder), followed_by(run.doctor.tend):
            run.tell_addresses()
            yield run
    except BaseException as error:
        if isinstance(error, Exception):  # not after Ctrl-C, which also stops a save
            _rescue(run)
        _end(run, limit_s=HASTY_END_S)
        raise
    _end(run, limit_s=ORDERLY_END_S)


@contextmanager
def _blamed(run: Run, folder: RunFolder) -> Iterator[None]:
    """Replaces an error that was caused by the death of a process with `ActorDied`.

    If the process left a message about a blocked event loop, raises `LoopStalled` with that message instead. An error
    that ends a reported hang, such as the timeout of a collective, becomes `Hung`: a restart may help.
    """
    try:
        yield
    except Exception as error:
        death = error if isinstance(error, ActorDied) else run.death(error_line(error))
        if death is not None and (said := last_words(folder.logs / LAST_WORDS)) is not None:
            raise LoopStalled(said) from death
        if death is not None and death is not error:
            raise death from error
        if death is None and isinstance(error, ActorFailed) and (hang := run.hang()) is not None:
            raise Hung(f"{hang}; it ended with: {error_line(error)}") from error
        raise


@contextmanager
def _explained(memory: MemoryWatch, folder: RunFolder) -> Iterator[None]:
    """Adds notes to an error: whether memory ran out, and where to find the traceback.

    Must run while other processes are still alive, so that their memory usage can be reported.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ActorDied) or memory.was_killed_for_memory():
            error.add_note(memory.report())
        if isinstance(error, ActorFailed | ActorDied):
            error.add_note(f"the traceback is in {folder.logs / DRIVER_LOG}")
        raise


def _views(args: Args, settings: dict[str, Any]) -> Views:
    names = {field.name for field in dataclasses.fields(Views)} - {"settings", "trackers"}
    trackers = tuple(TRACKERS.build(name, args) for name in args.trackers)
    return Views(**{name: getattr(args, name) for name in names}, settings=settings, trackers=trackers)


def _rescue(run: Run) -> None:
    """Completes a checkpoint that was being written when training failed. Never raises."""
    try:
        run.finish_save(limit_s=run.args.save_timeout_s)
    except Exception as error:  # for example if a rank has died
        logger.warning("the checkpoint in progress was not completed: %s", error_line(error))


def _end(run: Run, *, limit_s: float) -> None:
    """Closes the run. Never raises, so that the original error is not replaced."""
    try:
        run.close(limit_s=limit_s)
    except Exception as error:  # Ray kills remaining actors when it stops
        logger.warning("an actor did not stop cleanly: %s", error_line(error))
        logger.info("full traceback", exc_info=True, extra=FILE_ONLY)


# --- Memory

LOOK_EVERY_S = 5.0
NUM_SHOWN = 5
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Usage:
    id: ProcessId
    name: str
    rss_bytes: int
    """Resident memory. Shared pages count for every process that maps them."""
    peak_bytes: int
    """Highest measured `rss_bytes`."""


def num_oom_kills() -> int | None:
    """Returns the number of OOM kills in this cgroup, or else on this host.

    Returns None if the kernel does not report it.
    """
    for path in (
        _own_group() / "memory.events",
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
        Path("/proc/vmstat"),
    ):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return None


def _own_group() -> Path:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup", line.removeprefix("0::").lstrip("/"))
    return Path("/sys/fs/cgroup")


def read_usage(id: ProcessId, default_name: str, peak_bytes: int = 0) -> Usage | None:
    """Returns a process's memory usage, or None if the process is gone."""
    try:
        pages = int(Path(f"/proc/{id.pid}/statm").read_text().split()[1])
        words = Path(f"/proc/{id.pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):
        return None
    rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    return Usage(id, _name_of(words, default_name), rss_bytes, max(rss_bytes, peak_bytes))


def _name_of(words: Sequence[bytes], default: str) -> str:
    """Returns the process title set by Ray or SGLang, else the Python module or the program name."""
    text = [w.decode(errors="replace") for w in words if w.strip()]
    if not text:
        return default
    if "-m" in text[:-1]:
        return text[text.index("-m") + 1]
    return text[0] if "::" in text[0] else Path(text[0]).name


class MemoryWatch:
    """Context manager with a background thread that measures the run's processes."""

    def __init__(self, run_id: str) -> None:
        self._family = ProcessFamily(RUN_ID_ENV, run_id)
        self._usages: dict[ProcessId, Usage] = {}
        self._before = num_oom_kills()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def look(self) -> list[Usage]:
        """Measures the run's processes and returns the latest measurements, including those of dead processes."""
        with self._lock:
            for stat in self._family.refresh():
                last = self._usages.get(stat.id)
                usage = read_usage(stat.id, stat.name, last.peak_bytes if last else 0)
                if usage is not None:
                    self._usages[stat.id] = usage
            return list(self._usages.values())

    def was_killed_for_memory(self) -> bool:
        """Returns whether there has been an OOM kill since this object was created."""
        now = num_oom_kills()
        return now is not None and self._before is not None and now > self._before

    def report(self) -> str:
        """Returns a note for a run's error message: OOM kills and the processes that used the most memory."""
        usages = sorted(self.look(), key=lambda u: u.peak_bytes, reverse=True)
        if self.was_killed_for_memory():
            kills = (num_oom_kills() or 0) - (self._before or 0)
            verdict = (
                f"the kernel killed {kills} process{'es' if kills > 1 else ''} during the run because memory ran out"
            )
        else:
            verdict = "the kernel did not kill any process for lack of memory"
        shown = ", ".join(_usage_in_words(usage) for usage in usages[:NUM_SHOWN]) or "none seen"
        return f"memory: {verdict}; largest processes of the run, by peak memory: {shown}"

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()


def _usage_in_words(usage: Usage) -> str:
    now = read_stat(usage.id.pid)
    gone = "" if now is not None and now.id == usage.id and now.state not in "ZX" else ", gone"
    return f"{usage.name} (pid {usage.id.pid}{gone}) {usage.peak_bytes / GIB:.1f} GiB"
