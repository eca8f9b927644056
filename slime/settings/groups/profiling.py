"""What a step does with its time and memory: traces of chosen steps, and the history of GPU memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.settings.fields import Need, opt
from slime.settings.group import Rule
from slime.settings.ranges import COUNT, COUNT_OR_NONE, STEPS, STEPS_OR_NONE

if TYPE_CHECKING:
    from slime.settings.args import Args

ROLLOUT = "rollout"
"""Of the targets the one outside of the trainer."""


def _runs(target: str, s: Any) -> bool:
    """Whether the run has the part that a target is of."""
    return not (s.debug_train_only if target == ROLLOUT else s.debug_rollout_only)


_IN_THE_RUN = Need(
    lambda s: s.num_rollout is None or s.profile_step_start < s.num_rollout,
    "a --profile-step-start below --num-rollout",
)
_SOME_PART = Need(
    lambda s: any(_runs(target, s) for target in s.profile_target),
    "a --profile-target that runs: with --debug-rollout-only rollout alone, with --debug-train-only the others",
)
_TRAINS = Need(lambda s: not s.debug_rollout_only, "training ranks, which --debug-rollout-only starts none of")
_STEPS = Need(
    lambda s: s.num_rollout is None or (s.memory_snapshot_num_steps or 0) <= s.num_rollout,
    "as many steps: at most --num-rollout",
)
_PROFILES = Need(lambda s: s.use_pytorch_profiler, "--use-pytorch-profiler")
_ENGINES = Need(lambda s: ROLLOUT in s.profile_target, f"--profile-target with {ROLLOUT}")
_RECORDS = Need(lambda s: s.record_memory_history, "--record-memory-history")


@dataclass(frozen=True, kw_only=True)
class ProfilingSettings:
    """Traces and snapshots are written into the run folder; docs/profiling.md."""

    use_pytorch_profiler: bool = opt(False, needs=(_IN_THE_RUN, _SOME_PART))
    """Trace the steps from --profile-step-start on with torch's profiler."""
    profile_step_start: int = opt(10, needs=_PROFILES, within=STEPS_OR_NONE)
    """First step that is traced."""
    profile_step_end: int = opt(12, needs=_PROFILES, within=STEPS)
    """The step before which tracing ends."""
    profile_ranks: tuple[int, ...] = opt((0,), needs=_PROFILES, within=COUNT_OR_NONE)
    """Training ranks that write a trace."""
    profile_target: tuple[str, ...] = opt(
        ("train_overall",), choices=("train_overall", "train_actor", "train_log_probs", ROLLOUT), needs=_PROFILES
    )
    """What a trace is of: all of a training step (the other two are marked in it), the policy's update, the passes
    before it, or the engines while they generate."""
    profile_engine_passes: int = opt(10, needs=(_PROFILES, _ENGINES), within=COUNT)
    """Forward passes of each engine that its trace has."""
    pytorch_profiler_collect_shapes: bool = opt(False, needs=_PROFILES)
    """Traces have the shapes of what operations get."""
    pytorch_profiler_collect_callstack: bool = opt(False, needs=_PROFILES)
    """Traces have the Python stack of every operation, at a price in time and size."""
    record_memory_history: bool = opt(False, needs=_TRAINS)
    """Record who allocates GPU memory in the training ranks; written when memory runs out, and see
    --memory-snapshot-num-steps. CUDA alone."""
    memory_recorder: str = opt("torch", choices=("torch", "memray"), needs=_RECORDS)
    """Who records: torch."""
    memory_snapshot_num_steps: int | None = opt(None, needs=(_RECORDS, _STEPS), within=STEPS)
    """Write the history after this many training steps of the process, and stop recording. Default: only when memory
    runs out."""
    memory_snapshot_dir: str | None = opt(None, needs=_RECORDS)
    """Folder of the snapshots. Default: memory in the run folder."""
    memory_snapshot_path: str = opt("snapshot.pickle", needs=_RECORDS)
    """How the name of each snapshot ends, without a folder; it begins with its step and its rank."""


def traces_engines(args: Args, rollout_id: int) -> bool:
    """Whether engines are traced while they generate the samples of a step."""
    asked = args.use_pytorch_profiler and ROLLOUT in args.profile_target and not args.debug_train_only
    return asked and args.profile_step_start <= rollout_id < args.profile_step_end


def some_step_is_traced(args: Args) -> str | None:
    """The last step is not before the first."""
    first, end = args.profile_step_start, args.profile_step_end
    if not args.use_pytorch_profiler or first < end:
        return None
    return f"got --profile-step-start {first} and --profile-step-end {end}, so no step is traced; give a later end"


def ranks_exist(args: Args) -> str | None:
    """Traces come from ranks of the run."""
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    wrong = [rank for rank in args.profile_ranks if not 0 <= rank < world]
    if not args.use_pytorch_profiler or not wrong:
        return None
    return f"got --profile-ranks {wrong[0]} with {world} training ranks; they are counted from 0"


def every_target_runs(args: Args) -> str | None:
    """Of several targets each is traced."""
    idle = [target for target in args.profile_target if not _runs(target, args)]
    if not args.use_pytorch_profiler or not idle:
        return None
    half = "--debug-train-only" if args.debug_train_only else "--debug-rollout-only"
    return f"got --profile-target {' '.join(idle)} with {half}, which leaves that part out; drop it from the targets"


def engines_are_the_run_s(args: Args) -> str | None:
    """The folder of a trace is on the hosts of the run."""
    if not args.use_pytorch_profiler or ROLLOUT not in args.profile_target or not args.rollout_external_engine_addrs:
        return None
    return (
        f"got --profile-target {ROLLOUT} with engines that run already, which write traces on hosts of their own; ask "
        "them by their route /start_profile"
    )


def memory_is_of_a_gpu(args: Args) -> str | None:
    """Torch knows who allocates memory of its CUDA allocator."""
    if not args.record_memory_history:
        return None
    if args.memory_recorder == "memray":
        return (
            "got --memory-recorder memray, which follows host memory, from outside; use torch for GPU "
            "memory, or attach memray to the process of a training rank"
        )
    if args.device == "cpu":
        return "got --record-memory-history on a CPU, where torch's allocator keeps no history; drop it, or run on CUDA"
    return None


def snapshots_end_in_a_name(args: Args) -> str | None:
    """A folder has a setting of its own."""
    if "/" not in args.memory_snapshot_path:
        return None
    return (
        f"got --memory-snapshot-path {args.memory_snapshot_path}, which is how file names end, behind step and rank; "
        "give the folder as --memory-snapshot-dir"
    )


RULES: tuple[Rule, ...] = (
    some_step_is_traced,
    ranks_exist,
    every_target_runs,
    engines_are_the_run_s,
    memory_is_of_a_gpu,
    snapshots_end_in_a_name,
)
