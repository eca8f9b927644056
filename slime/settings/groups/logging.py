"""Settings for logging, recorded rollouts, runs without trainer or engines, profiles, and configuration files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from slime.core.errors import ConfigError
from slime.core.processes import LOOPBACK
from slime.core.text import slime_command
from slime.settings.conditions import fine_tunes
from slime.settings.fields import Adjusted, Need, Rule, always, derived, opt, refuse_if
from slime.settings.flags import COUNT, COUNT_OR_NONE, PORT_OR_FREE, STEPS, STEPS_OR_NONE, host_form, url_form
from slime.settings.groups.evaluation import loss_datasets, samples_evaluations
from slime.settings.groups.hooks import SFT_ROLLOUT

if TYPE_CHECKING:
    from slime.settings.args import Args

_PROMETHEUS = Need(lambda s: s.metrics_port is not None, "--metrics-port")
_TENSORBOARD = Need(lambda s: s.use_tensorboard, "--use-tensorboard")
_WANDB = Need(lambda s: s.use_wandb, "--use-wandb")
_WANDB_HOST = "api.wandb.ai"


def _has_no_login(s: Any) -> bool:
    """Returns whether the user gave an empty key, and neither WANDB_API_KEY nor `wandb login` provides another."""
    empty = s.use_wandb and s.was_given("wandb_key") and s.wandb_key is None
    if not empty or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return False
    host = urlsplit(s.wandb_host or os.environ.get("WANDB_BASE_URL") or f"https://{_WANDB_HOST}").hostname
    try:
        return str(host) not in Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return True


_SAMPLES = Need(lambda s: s.log_samples > 0, "--log-samples")


@dataclass(frozen=True, kw_only=True)
class LoggingSettings:
    """Logged samples, TensorBoard and Weights & Biases. Metrics always go to the console and the run folder."""

    log_samples: int = opt(3, within=COUNT_OR_NONE)
    """Number of samples to log in samples.jsonl, per step and per evaluation dataset: the best, the worst, and random
    others. 0: none."""
    log_state_digest: bool = False
    """Adds train/state_digest to every step: a digest of the weights and optimizer states of all training ranks, to see
    whether two runs are bitwise equal. It reads all of them once per step."""
    log_samples_max_chars: int = opt(4000, needs=_SAMPLES, ge=10, le=100_000_000)
    """Maximum characters of a prompt or response in samples.jsonl; the middle of a longer text is omitted."""
    log_samples_interval: int | None = opt(None, needs=_SAMPLES, within=STEPS_OR_NONE)
    """Steps between prints of the best and worst sample to the console; 0: never. Default: after steps 1, 2, 4, 8 and
    so on."""

    log_passrate: bool = False
    """Log pass@k of each step's prompts, for powers of two up to n_samples_per_prompt. A reward of 1 counts as a pass.
    """
    log_correct_samples: bool = False
    """Log the lengths of samples with a reward of 1."""
    log_reward_category: str | None = None
    """Key in a dict reward that holds the category of the answer or error; the share of each category is logged."""

    metrics_port: int | None = opt(None, within=PORT_OR_FREE)
    """Serve the metrics for Prometheus on this port of the driver's host; 0: any free port. The engines then also serve
    theirs. The folder `prometheus` of the run has the targets, the key and a Grafana dashboard."""
    metrics_host: str = opt(LOOPBACK, form=host_form, needs=_PROMETHEUS)
    """Address that the metrics port listens on."""
    alert_webhook: str | None = opt(None, form=url_form, secret=True)
    """URL that gets a JSON message (POST) for a hang, a restart, a failure, or a finding about the metrics: slow steps,
    a drop in TFLOP/s, a lost learning signal. One message for each incident."""
    alert_command: str | None = None
    """Shell command that runs for the same incidents; it reads SLIME_ALERT_KIND, SLIME_ALERT_TEXT, SLIME_ALERT_RUN_DIR,
    SLIME_ALERT_RUN_ID, SLIME_ALERT_HOST, SLIME_ALERT_STEP and SLIME_ALERT_TIME_S."""
    otlp_traces_endpoint: str | None = opt(None, form=url_form)
    """URL of an OpenTelemetry collector (OTLP over HTTP, such as http://127.0.0.1:4318) that gets the spans of the
    driver and the rollout side, besides the files in the folder `traces`."""
    trackers: tuple[str, ...] = opt((), chosen_from="slime.observability.trackers:TRACKERS")
    """Other trackers that get the metrics: mlflow, trackio, swanlab, or import paths of your own."""
    use_tensorboard: bool = False
    """Write TensorBoard events."""
    tensorboard_dir: str | None = opt(None, needs=_TENSORBOARD)
    """Folder for TensorBoard events, which several runs can share. Default: $TENSORBOARD_DIR, else the run folder."""
    tb_project_name: str | None = opt(None, needs=_TENSORBOARD)
    """Subfolder for the events in --tensorboard-dir, TENSORBOARD_DIR or the run folder."""
    tb_experiment_name: str | None = opt(None, needs=_TENSORBOARD)
    """Name of this run in TensorBoard."""
    use_wandb: bool = opt(False, first="Run folder")
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = derived(
        lambda s: "offline" if _has_no_login(s) else None,
        "--wandb-key is empty, and this machine has no W&B login",
        needs=_WANDB,
    )
    """wandb mode. Default: offline if --wandb-key is empty and there is no W&B login, else wandb's."""
    wandb_dir: str | None = opt(None, needs=_WANDB)
    """Folder for wandb's files. Default: the run folder."""
    wandb_key: str | None = opt(None, secret=True, may_be_empty=True, needs=_WANDB)
    """wandb API key; preferably set as WANDB_API_KEY in the environment. It may be empty."""
    wandb_host: str | None = opt(None, form=url_form, may_be_empty=True, needs=_WANDB)
    """URL of the wandb server."""
    wandb_team: str | None = opt(None, may_be_empty=True, needs=_WANDB)
    """wandb entity."""
    wandb_group: str | None = opt(None, may_be_empty=True, needs=_WANDB)
    """wandb group."""
    wandb_project: str | None = opt(None, may_be_empty=True, needs=_WANDB)
    """wandb project."""
    wandb_random_suffix: bool = opt(True, off_names=("--disable-wandb-random-suffix",), needs=_WANDB, asks=always)
    """Add a random suffix to the run's name."""
    wandb_run_id: str | None = opt(None, may_be_empty=True, needs=_WANDB)
    """Id of the wandb run to continue."""


# --- Recorded rollouts, and runs without trainer or engines

_PICKLE, _RECORD = ".pt", ".jsonl.zst"
"""File name suffixes of recorded rollouts: the public slime's, and this slime's."""


def _trains_only(s: Any) -> bool | None:
    if s.load_debug_rollout_data:
        return True
    try:
        needs_no_engine = fine_tunes(s) and s.rollout_function_path == SFT_ROLLOUT and not samples_evaluations(s)
    except ConfigError:  # a rule reports the problem
        return None
    return True if needs_no_engine else None


def _why_trains_only(s: Any) -> str:
    if s.load_debug_rollout_data:
        return "--load-debug-rollout-data replays rollouts"
    return "supervised fine-tuning needs no engine, unless an evaluation samples"


_GENERATES = Need(
    lambda s: s.load_debug_rollout_data is None,
    "generated rollouts; --load-debug-rollout-data replays recorded ones, which are not recorded again",
)


def _below_details(s: Any, kind: str, ending: str) -> str | None:
    if s.dump_details is None or (kind == "rollout" and not _GENERATES.acts(s)):
        return None
    return str(Path(s.dump_details) / f"{kind}_data" / f"{{rollout_id}}.{ending}")


def _as(ending: str) -> Callable[[Any, Any], Adjusted | None]:
    """Replaces the suffix .pt of a path with `ending`, because slime does not write pickles.

    Leaves the path of an existing file unchanged.
    """

    def adjust(path: Any, s: Any) -> Adjusted | None:
        if not str(path).endswith(_PICKLE) or Path(path).is_file():
            return None
        return Adjusted(str(path).removesuffix(_PICKLE) + ending, f"{_PICKLE} is for pickles; slime writes {ending}")

    return adjust


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """Recorded rollouts, and runs without trainer or engines."""

    debug_rollout_only: bool = False
    """Generate and grade without a trainer. With --num-rollout 0 and nothing to evaluate, engines and router serve
    until Ctrl-C."""
    debug_train_only: bool = derived(_trains_only, _why_trains_only, default=False)
    """Train without engines. Needs --load-debug-rollout-data, or an SFT rollout function."""
    save_debug_rollout_data: str | None = derived(
        lambda s: _below_details(s, "rollout", "jsonl.zst"), "--dump-details", adjust=_as(_RECORD), needs=_GENERATES
    )
    """Write every generated rollout to this path. {rollout_id} is replaced by the step, or by eval_STEP_NAME for an
    evaluation. Files are compressed JSON lines; the suffix .pt becomes .jsonl.zst."""
    save_debug_train_data: str | None = derived(
        lambda s: _below_details(s, "train", "npz"), "--dump-details", adjust=_as(".npz")
    )
    """Write every training batch to this path, as numpy's .npz; the suffix .pt becomes .npz. {rollout_id} is replaced
    by the step."""
    dump_details: str | None = None
    """Folder for the outputs of both --save-debug-... flags and for the tokenizer."""
    load_debug_rollout_data: str | None = opt(None, adjust=_as(_RECORD))
    """Replay the rollouts that --save-debug-rollout-data wrote to this path, without generating. Implies
    --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = opt(None, gt=0, le=1)
    """Replay only this fraction of each rollout's groups: half from the beginning and half from the end."""


def halves_are_compatible(args: Args) -> str | None:
    if args.debug_rollout_only and args.debug_train_only:
        return "--debug-rollout-only and --debug-train-only together leave nothing to run; set only one of them"
    part = args.load_debug_rollout_data_subsample
    if part is not None and not (0 < part <= 1 and args.load_debug_rollout_data):
        return f"load_debug_rollout_data_subsample {part} needs --load-debug-rollout-data; set both or neither"
    return None


def losses_have_a_trainer(args: Args) -> str | None:
    """Datasets that are evaluated by their loss need the trainer."""
    if not args.debug_rollout_only or not (names := [one.name for one in loss_datasets(args)]):
        return None
    return (
        f"--debug-rollout-only does not work with held-out conversations ({', '.join(names)}), whose loss the trainer "
        "measures; drop one of the two, or set --rm-type to score sampled answers"
    )


def records_are_no_pickles(args: Args) -> str | None:
    """Refuses a pickle of the public slime, which could run code, unless the same record exists in slime's format."""
    path = args.load_debug_rollout_data
    if path is None or (not path.endswith(_PICKLE) and _there(path)):
        return None
    found = _there(path.removesuffix(_RECORD).removesuffix(_PICKLE) + _PICKLE)
    if not found:
        return None
    return (
        f"load_debug_rollout_data {path} finds {found[0]}, a pickle, which could run code; pass a file written by "
        f"this slime's --save-debug-rollout-data, or convert the pickle: {slime_command('convert')} {found[0]} "
        f"{found[0].removesuffix(_PICKLE)}{_RECORD} --trust-pickle"
    )


def _there(template: str) -> list[str]:
    """Returns the existing files that match a template with `{rollout_id}`."""
    return sorted(glob.glob(glob.escape(template).replace("{rollout_id}", "*")))


RULES: tuple[Rule, ...] = (records_are_no_pickles, halves_are_compatible, losses_have_a_trainer)

# --- Profiles: traces of steps, and the history of GPU memory

ROLLOUT = "rollout"
"""The profile target for engines. All other targets are in the trainer."""


def _runs(target: str, s: Any) -> bool:
    """Returns whether the run executes the code that the target profiles."""
    return not (s.debug_train_only if target == ROLLOUT else s.debug_rollout_only)


_IN_THE_RUN = Need(
    lambda s: s.num_rollout is None or s.profile_step_start < s.num_rollout,
    "a --profile-step-start below --num-rollout",
)
_SOME_PART = Need(
    lambda s: any(_runs(target, s) for target in s.profile_target),
    "a --profile-target that runs: only rollout with --debug-rollout-only, only the others with --debug-train-only",
)
_TRAINS = Need(lambda s: not s.debug_rollout_only, "training ranks; --debug-rollout-only starts none")
_STEPS = Need(
    lambda s: s.num_rollout is None or (s.memory_snapshot_num_steps or 0) <= s.num_rollout,
    "a --num-rollout of at least as many steps",
)
_PROFILES = Need(lambda s: s.use_pytorch_profiler, "--use-pytorch-profiler")
_ENGINES = Need(lambda s: ROLLOUT in s.profile_target, f"--profile-target with {ROLLOUT}")
_RECORDS = Need(lambda s: s.record_memory_history, "--record-memory-history")


@dataclass(frozen=True, kw_only=True)
class ProfilingSettings:
    """Traces and memory snapshots in the run folder; see docs/profiling.md."""

    use_pytorch_profiler: bool = opt(False, needs=(_IN_THE_RUN, _SOME_PART))
    """Trace steps with torch's profiler, starting at --profile-step-start."""
    profile_step_start: int = opt(10, needs=_PROFILES, within=STEPS_OR_NONE)
    """First step to trace."""
    profile_step_end: int = opt(12, needs=_PROFILES, within=STEPS)
    """Tracing stops before this step."""
    profile_ranks: tuple[int, ...] = opt((0,), needs=_PROFILES, within=COUNT_OR_NONE)
    """Training ranks that write a trace."""
    profile_target: tuple[str, ...] = opt(
        ("train_overall",), choices=("train_overall", "train_actor", "train_log_probs", ROLLOUT), needs=_PROFILES
    )
    """What to trace: an entire training step, with the next two targets marked; the policy's update; the forward passes
    before the update; or the engines while they generate."""
    profile_engine_passes: int = opt(10, needs=(_PROFILES, _ENGINES), within=COUNT)
    """Number of forward passes in each engine's trace."""
    pytorch_profiler_collect_shapes: bool = opt(False, needs=_PROFILES)
    """Record the input shapes of each operation."""
    pytorch_profiler_collect_callstack: bool = opt(False, needs=_PROFILES)
    """Record the Python stack of every operation, which costs time and disk space."""
    record_memory_history: bool = opt(False, needs=_TRAINS)
    """Record which code allocates GPU memory in the training ranks (cuda only). The history is written when memory runs
    out, or after --memory-snapshot-num-steps."""
    memory_recorder: str = opt("torch", choices=("torch", "memray"), needs=_RECORDS)
    """Allocation recorder. Must be torch."""
    memory_snapshot_num_steps: int | None = opt(None, needs=(_RECORDS, _STEPS), within=STEPS)
    """Write the history after this many training steps of the process, then stop recording. Default: only when memory
    runs out."""
    memory_snapshot_dir: str | None = opt(None, needs=_RECORDS)
    """Folder of the snapshots. Default: memory in the run folder."""
    memory_snapshot_path: str = opt("snapshot.pickle", needs=_RECORDS)
    """Suffix of each snapshot's file name, after step and rank. Must not contain a folder."""


def traces_engines(args: Args, rollout_id: int) -> bool:
    """Returns whether engines are traced while they generate the samples of step `rollout_id`."""
    asked = args.use_pytorch_profiler and ROLLOUT in args.profile_target and not args.debug_train_only
    return asked and args.profile_step_start <= rollout_id < args.profile_step_end


def ranks_exist(args: Args) -> str | None:
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    wrong = [rank for rank in args.profile_ranks if not 0 <= rank < world]
    if not args.use_pytorch_profiler or not wrong:
        return None
    return f"--profile-ranks names rank {wrong[0]}, but there are {world} training ranks; use 0 to {world - 1}"


def every_target_runs(args: Args) -> str | None:
    idle = [target for target in args.profile_target if not _runs(target, args)]
    if not args.use_pytorch_profiler or not idle:
        return None
    half = "--debug-train-only" if args.debug_train_only else "--debug-rollout-only"
    named = " ".join(idle)
    return f"--profile-target contains {named}, which does not run with {half}; remove {named} from the targets"


PROFILING_RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.use_pytorch_profiler and s.profile_step_start >= s.profile_step_end,
        "--profile-step-end {s.profile_step_end} is not after --profile-step-start {s.profile_step_start}, so no step "
        "would be traced; set a later end",
    ),
    ranks_exist,
    every_target_runs,
    refuse_if(
        lambda s: s.use_pytorch_profiler and ROLLOUT in s.profile_target and s.rollout_external_engine_addrs,
        f"--profile-target {ROLLOUT} does not work with external engines, which write traces on their own hosts; use "
        "their /start_profile route",
    ),
    refuse_if(
        lambda s: s.record_memory_history and s.memory_recorder == "memray",
        "--memory-recorder memray is not supported: memray records host memory; use torch for GPU memory, or attach "
        "memray to a training rank's process",
    ),
    refuse_if(
        lambda s: s.record_memory_history and s.memory_recorder != "memray" and s.device == "cpu",
        "--record-memory-history does not work on a CPU, where torch's allocator keeps no history; drop it, or run on "
        "CUDA",
    ),
    refuse_if(
        lambda s: "/" in s.memory_snapshot_path,
        "--memory-snapshot-path {s.memory_snapshot_path} contains a folder, but must be a file name suffix; set the "
        "folder with --memory-snapshot-dir",
    ),
)

# --- Where settings come from, and how they are checked


@dataclass(frozen=True, kw_only=True)
class ConfigurationSettings:
    """Settings files, and the strictness of checks."""

    custom_config_path: str | None = None
    """YAML file with any of these settings by name. The key `custom` and unknown keys are for your own settings, which
    your functions read as args.custom["name"] or args.name. Unknown keys are listed when the run starts."""
    megatron_config_path: str | None = None
    """YAML file with Megatron settings for only the policy (role actor) or only the critic."""
    strict: bool = False
    """Refuse settings that have no effect. Default: list them when the run starts."""
