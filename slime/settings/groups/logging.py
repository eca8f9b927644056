"""What a run says and keeps of itself: logging, half loops and recorded rollouts, profiles, and how strictly its
settings are checked.
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.core.errors import ConfigError
from slime.settings.conditions import fine_tunes
from slime.settings.fields import Adjusted, Need, Rule, always, derived, opt
from slime.settings.flags import COUNT, COUNT_OR_NONE, STEPS, STEPS_OR_NONE
from slime.settings.groups.evaluation import loss_datasets, samples_evaluations
from slime.settings.groups.hooks import SFT_ROLLOUT

if TYPE_CHECKING:
    from slime.settings.args import Args

# What is logged beside the metrics, and where it goes beside the console and the run folder.

_TENSORBOARD = Need(lambda s: s.use_tensorboard, "--use-tensorboard")
_WANDB = Need(lambda s: s.use_wandb, "--use-wandb")
_SAMPLES = Need(lambda s: s.log_samples > 0, "--log-samples")


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Samples for people to read, TensorBoard, Weights & Biases."""

    log_samples: int = opt(3, within=COUNT_OR_NONE)
    """Samples of each step, and of each dataset of an evaluation, that samples.jsonl keeps: the best, the worst, others
    at random. 0: none."""
    log_samples_max_chars: int = opt(4000, needs=_SAMPLES, ge=10, le=100_000_000)
    """Characters of a prompt or a response that are kept; the middle of a longer one is left out."""
    log_samples_interval: int | None = opt(None, needs=_SAMPLES, within=STEPS_OR_NONE)
    """Steps between those whose best and worst sample the console shows; 0: never. Default: after steps 1, 2, 4, 8 and
    so on."""

    log_passrate: bool = False
    """Log pass@k of each step's prompts, for the powers of two up to n_samples_per_prompt; a reward of 1 passes."""
    log_correct_samples: bool = False
    """Log how long the samples with a reward of 1 are."""
    log_reward_category: str | None = None
    """Entry of a dict reward that says what kind of answer, or error, it was; the share of each is logged."""

    use_tensorboard: bool = False
    """Write TensorBoard events."""
    tensorboard_dir: str | None = opt(None, needs=_TENSORBOARD)
    """Folder of the events of many runs, as TENSORBOARD_DIR, before which it goes. Default: that, or the run folder."""
    tb_project_name: str | None = opt(None, needs=_TENSORBOARD)
    """Folder of the events below --tensorboard-dir, TENSORBOARD_DIR or the run folder."""
    tb_experiment_name: str | None = opt(None, needs=_TENSORBOARD)
    """Name of this run in TensorBoard."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = opt(None, needs=_WANDB)
    """Mode of wandb."""
    wandb_dir: str | None = opt(None, needs=_WANDB)
    """Folder of wandb's files. Default: the run folder."""
    wandb_key: str | None = opt(None, secret=True, needs=_WANDB)
    """API key; better in the environment as WANDB_API_KEY."""
    wandb_host: str | None = opt(None, needs=_WANDB)
    """Server of wandb."""
    wandb_team: str | None = opt(None, needs=_WANDB)
    """Entity of wandb."""
    wandb_group: str | None = opt(None, needs=_WANDB)
    """Group of runs."""
    wandb_project: str | None = opt(None, needs=_WANDB)
    """Project of wandb."""
    wandb_random_suffix: bool = opt(True, off_names=("--disable-wandb-random-suffix",), needs=_WANDB, asks=always)
    """Add a random suffix to the run's name."""
    wandb_run_id: str | None = opt(None, needs=_WANDB)
    """Id of the run, to continue one."""


# Running half of the loop, and recorded rollouts.

_PICKLE, _RECORD = ".pt", ".jsonl.zst"
"""Endings of the public slime's records, and of ours."""


def _trains_only(s: Any) -> bool | None:
    if s.load_debug_rollout_data:
        return True
    try:
        needs_no_engine = fine_tunes(s) and s.rollout_function_path == SFT_ROLLOUT and not samples_evaluations(s)
    except ConfigError:  # a rule tells it
        return None
    return True if needs_no_engine else None


def _why_trains_only(s: Any) -> str:
    if s.load_debug_rollout_data:
        return "--load-debug-rollout-data replays rollouts"
    return "supervised fine-tuning needs no engine, unless an evaluation samples"


def _below_details(s: Any, kind: str, ending: str) -> str | None:
    if s.dump_details is None:
        return None
    return str(Path(s.dump_details) / f"{kind}_data" / f"{{rollout_id}}.{ending}")


def _as(ending: str) -> Callable[[Any, Any], Adjusted | None]:
    """Files of pickles are neither written nor read: the same path, with the ending of what is."""

    def adjust(path: Any, s: Any) -> Adjusted | None:
        if not str(path).endswith(_PICKLE) or Path(path).is_file():
            return None
        return Adjusted(str(path).removesuffix(_PICKLE) + ending, f"{_PICKLE} would be a pickle; records are {ending}")

    return adjust


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """Debugging aids."""

    debug_rollout_only: bool = False
    """Generate and grade; no trainer is started. With --num-rollout 0 and nothing to evaluate, engines and router serve
    until Ctrl-C."""
    debug_train_only: bool = derived(_trains_only, _why_trains_only, default=False)
    """Train; no engine is started. Needs --load-debug-rollout-data, or an SFT rollout function."""
    save_debug_rollout_data: str | None = derived(
        lambda s: _below_details(s, "rollout", "jsonl.zst"), "--dump-details", adjust=_as(_RECORD)
    )
    """Write every rollout here; {rollout_id} in the path is replaced, by eval_STEP_NAME for an evaluation. Files are
    compressed JSON lines: a path that ends in .pt gets the ending .jsonl.zst."""
    save_debug_train_data: str | None = derived(
        lambda s: _below_details(s, "train", "npz"), "--dump-details", adjust=_as(".npz")
    )
    """Write every batch for the trainer here, as numpy's .npz, which a path that ends in .pt gets as its ending;
    {rollout_id} in the path is replaced."""
    dump_details: str | None = None
    """Folder for all of this: sets both --save-debug-... paths and gets the tokenizer."""
    load_debug_rollout_data: str | None = opt(None, adjust=_as(_RECORD))
    """Replay rollouts written by --save-debug-rollout-data, with the same path, instead of generating; implies
    --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = opt(None, gt=0, le=1)
    """Replay only this part of each rollout's groups, half from its head and half from its tail."""


def halves_are_compatible(args: Args) -> str | None:
    """A run cannot be rollout-only and train-only at once."""
    if args.debug_rollout_only and args.debug_train_only:
        return "got rollout-only and train-only together, so nothing would run; give one of them"
    part = args.load_debug_rollout_data_subsample
    if part is not None and not (0 < part <= 1 and args.load_debug_rollout_data):
        return f"got load_debug_rollout_data_subsample {part}; give 0 < part <= 1 with --load-debug-rollout-data"
    return None


def losses_have_a_trainer(args: Args) -> str | None:
    """The loss of held-out conversations is the trainer's."""
    if not args.debug_rollout_only or not (names := [one.name for one in loss_datasets(args)]):
        return None
    return (
        f"got --debug-rollout-only with held-out conversations ({', '.join(names)}), whose loss the trainer measures; "
        "drop one of the two, or give --rm-type to score sampled answers"
    )


def records_are_no_pickles(args: Args) -> str | None:
    """A record of the public slime runs code when it is read. A template names it if no record of ours is there."""
    path = args.load_debug_rollout_data
    if path is None or (not path.endswith(_PICKLE) and _there(path)):
        return None
    found = _there(path.removesuffix(_RECORD).removesuffix(_PICKLE) + _PICKLE)
    if not found:
        return None
    return (
        f"got load_debug_rollout_data {path}, for which there is {found[0]}, a pickle, which could run code; give what "
        "--save-debug-rollout-data of this slime wrote, or make that of it: "
        f"slime convert {found[0]} {found[0].removesuffix(_PICKLE)}{_RECORD} --trust-pickle"
    )


def _there(template: str) -> list[str]:
    """The files that a template with `{rollout_id}` names."""
    return sorted(glob.glob(glob.escape(template).replace("{rollout_id}", "*")))


RULES: tuple[Rule, ...] = (records_are_no_pickles, halves_are_compatible, losses_have_a_trainer)

# What a step does with its time and memory: traces of chosen steps, and the history of GPU memory.

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


PROFILING_RULES: tuple[Rule, ...] = (
    some_step_is_traced,
    ranks_exist,
    every_target_runs,
    engines_are_the_run_s,
    memory_is_of_a_gpu,
    snapshots_end_in_a_name,
)

# How the settings themselves are given and checked.


@dataclass(frozen=True, kw_only=True)
class ConfigurationSettings:
    """Where settings come from beside the command line, and how strictly they are taken."""

    custom_config_path: str | None = None
    """YAML file with any of these settings by name. The key `custom`, and keys that name no setting, are your own: your
    functions read them as args.custom["name"] or args.name. The latter are listed when the run starts."""
    megatron_config_path: str | None = None
    """YAML file with settings of Megatron that only the policy (role actor) or only the critic has."""
    strict: bool = False
    """A setting that is given and has no effect is an error. Default: it is listed when the run starts."""
