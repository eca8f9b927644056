"""Settings for rewards (the grader and its limits) and for agents (their limits, and the address of their adapter)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.core.cores import usable_cores
from slime.core.errors import ConfigError
from slime.core.registry import load_object
from slime.settings.conditions import ADVANTAGES, fine_tunes
from slime.settings.data_files import first_row_names, grader_of_data
from slime.settings.eval_config import eval_datasets
from slime.settings.fields import Need, Rule, derived, is_not_zero, opt, refuse_if
from slime.settings.flags import COUNT, SECONDS, TOKENS, host_form, url_form
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT, teacher_of_reward

if TYPE_CHECKING:
    from slime.settings.args import Args

GRADERS = "slime.rewards.graders:GRADERS"


def _may_ask_a_service(s: Any) -> bool:
    """Returns whether a grader (from a setting, dataset or row) or a user function may send requests to `--rm-url`."""
    if teacher_of_reward(s) is not None:
        return True
    return _may_be_graded_by(s, lambda kind: "rm_url" in getattr(kind, "__dataclass_fields__", {}))


def _may_run_code(s: Any) -> bool:
    return _may_be_graded_by(s, lambda kind: kind.runs_code)


def _may_be_graded_by(s: Any, fits: Callable[[Any], bool]) -> bool:
    """Returns whether the run may use a grader for which `fits` is true, or a user function."""
    if s.custom_rm_path or s.custom_generate_function_path or s.data_source_path:
        return True
    try:
        datasets = eval_datasets(s)
        files = [one for one in (s.prompt_data, *(d.path for d in datasets)) if one]
        named = [one for one in (s.rm_type, *(d.rm_type for d in datasets)) if one]
        if any(d.custom_rm_path or d.custom_generate_function_path for d in datasets):
            return True
        return any(fits(grader_of(name)) for name in named) or any(
            first_row_names(file, s.metadata_key) for file in files
        )
    except ConfigError:  # a rule reports the problem
        return True


def _grader_of_prompts(s: Any) -> str | None:
    return None if s.custom_rm_path or fine_tunes(s) else grader_of_data(s.prompt_data)


def _num_workers(_: Any) -> int:
    return min(64, max(4, usable_cores()))


def _more_than_one(value: Any) -> bool:
    return value is not None and value != 1


_SERVICE = Need(_may_ask_a_service, "--rm-type remote_rm, rows with metadata (which may name it), or your own function")
_COMPUTES = Need(
    lambda s: _may_be_graded_by(s, lambda kind: kind.wrong is not None),
    "a grader that computes (--rm-type math), or rows with metadata (which may name one)",
)
_SHAPED = Need(
    lambda s: not (s.custom_reward_post_process_path or s.custom_convert_samples_to_train_data_path),
    "slime's own rewards; --custom-reward-post-process-path or --custom-convert-samples-to-train-data-path replaces "
    "them",
)
_OVERLONG = Need(lambda s: s.overlong_buffer_len is not None, "--overlong-buffer-len")
_CODE = Need(_may_run_code, "--rm-type code, rows with metadata (which may name it), or your own function")


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Grading of samples, in worker processes that can be killed."""

    rm_type: str | None = derived(
        _grader_of_prompts, "it comes with the prompt data", chosen_from=GRADERS, first="Reward"
    )
    """Grader: a built-in one, or the import path of your own class. A row can override it with metadata["rm_type"].
    Default: the grader that comes with the data (rg:NAME), unless --custom-rm-path is set."""
    rm_url: str | None = opt(None, form=url_form, needs=_SERVICE)
    """URL of the grader for --rm-type remote_rm."""
    rm_batch_size: int = opt(1, needs=_SERVICE, asks=_more_than_one, within=COUNT)
    """Maximum samples per request to --rm-url. If 1, each request is one object; otherwise, a list of objects."""
    allow_unconfined_code: bool = opt(False, needs=_CODE)
    """Let graders run model-written programs on a machine that cannot confine them. Without user namespaces, programs
    can reach the network and other processes; without Landlock, all files. Default: refuse such a machine."""
    reward_key: str | None = None
    """Key of a dict reward to train on."""
    overlong_buffer_len: int | None = opt(None, needs=(ADVANTAGES, _SHAPED), within=TOKENS)
    """Lower the trained reward of a response in the last N tokens before the maximum length, linearly up to
    --overlong-penalty-factor (DAPO's soft overlong punishment, arXiv:2503.14476). The maximum is
    --rollout-max-total-response-len if set, else --rollout-max-response-len. Default: off."""
    overlong_penalty_factor: float = opt(1.0, needs=(ADVANTAGES, _SHAPED, _OVERLONG), ge=0, le=1_000_000)
    """Penalty of a response of the maximum length."""
    length_reward_coef: float = opt(0.0, needs=(ADVANTAGES, _SHAPED), asks=is_not_zero, ge=0, le=1_000_000)
    """Weight of the length reward (Kimi k1.5, arXiv:2501.12599), added to the trained reward: among the responses to a
    prompt, from 0.5 for the shortest to -0.5 for the longest, and at most 0 for those without a positive reward."""
    group_rm: bool = False
    """Grade all samples of a prompt in a single call."""
    reward_timeout_s: float = opt(30.0, within=SECONDS)
    """Time limit of a grader call, in seconds: CPU time for a compute-only built-in grader, else wall-clock time.
    After that, the sample is unscored, which is not a reward of zero."""
    ungradable_answers: Literal["wrong", "unscored"] = opt("wrong", asks=lambda v: v != "wrong", needs=_COMPUTES)
    """How to treat an answer if a compute-only built-in grader raises an exception on it, or runs out of CPU time,
    memory or stack: as wrong, or as unscored. Failures of services and machines never become a reward."""
    reward_num_workers: int = derived(_num_workers, "one per usable core, from 4 to 64", within=COUNT)
    """Number of grader processes, started on demand. Also the number of concurrent calls to a blocking function (such
    as an HTTP client of a judge); an async function has up to 128. Compute-only graders use at most one process per
    core. Default: usable cores, from 4 to 64."""
    reward_memory_limit_mb: int = opt(2048, ge=16, le=100_000_000)
    """Maximum address space of one grader process, in MiB."""


def grader_of(rm_type: str) -> Any:
    """Returns the registry entry of a grader. Raises `ConfigError` for an unknown name."""
    return load_object(GRADERS).get(rm_type)


def grader_is_known(args: Args) -> str | None:
    try:
        for rm_type in (args.rm_type, *(d.rm_type for d in eval_datasets(args))):
            if rm_type:
                grader_of(rm_type)
    except ConfigError as error:
        return str(error)
    return None


def rewards_are_used_as_asked(args: Args) -> str | None:
    keys = ", ".join(grader_of(args.rm_type).score_keys) if args.rm_type and grader_is_known(args) is None else ""
    if keys and not args.reward_key and not args.custom_rm_path and not args.custom_reward_post_process_path:
        return f"--rm-type {args.rm_type} returns several numbers and needs --reward-key; choose one of {keys}"
    if args.rm_batch_size > 1 and not args.rm_url:
        return f"--rm-batch-size {args.rm_batch_size} needs --rm-url; set it to the URL that receives the batches"
    return None


def longest_response(s: Any) -> int:
    """Returns the maximum number of tokens sampled per execution, or per response if only that is limited."""
    return int(s.rollout_max_total_response_len or s.rollout_max_response_len)


RULES: tuple[Rule, ...] = (
    grader_is_known,
    rewards_are_used_as_asked,
    refuse_if(
        lambda s: s.overlong_buffer_len is not None and s.overlong_buffer_len > longest_response(s),
        lambda s: (
            f"overlong_buffer_len {s.overlong_buffer_len} is larger than the maximum response length of "
            f"{longest_response(s)}, so every response would be penalised; set a smaller one"
        ),
    ),
)

# --- Agents

FORMATS = "slime.agent.parsers:FORMATS"


def _may_run_agents(s: Any) -> bool:
    """Returns whether the run has a user function that may run agents; slime's own functions do not."""
    if s.custom_generate_function_path or s.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT):
        return True
    try:
        return any(d.custom_generate_function_path for d in eval_datasets(s))
    except ConfigError:  # a rule reports the problem
        return True


_AGENTS = Need(_may_run_agents, "your own function that runs agents, --custom-generate-function-path")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """The adapter that serves the OpenAI and Anthropic APIs. User functions open it with `slime.agent.execution`."""

    agent_tool_format: str | None = opt(None, needs=_AGENTS)
    """Tool-call format of the model: a built-in format, or the import path of your own class; `text` leaves calls as
    text. Default: the format whose markers are in the chat template. Without markers, agents with tools are refused."""
    agent_sampling: bool = opt(False, needs=_AGENTS)
    """Let agents choose temperature, top-p and top-k. Responses sampled with different values are then used as context
    but not trained on, because log-probs use the run's values. Default: the run's values override an agent's."""
    agent_max_turns: int = opt(1_000, needs=_AGENTS, within=COUNT)
    """Maximum number of responses in one execution. Further requests are refused, and the execution is truncated. The
    default ends agents that never stop."""
    agent_time_limit_s: float | None = opt(None, needs=_AGENTS, within=SECONDS)
    """Maximum duration of an execution, in seconds. After that, running requests are aborted, further requests are
    refused, and the execution is truncated."""
    agent_host: str = opt("127.0.0.1", form=host_form, needs=_AGENTS)
    """Address that the adapter listens on. Agents on other hosts need a different address, on a network that only they
    can reach: traffic is not encrypted, and a session's key is the only protection."""
    agent_port: int = opt(0, ge=0, le=65535, needs=_AGENTS)
    """Port of the adapter. 0: a free port."""
    agent_url: str | None = opt(None, form=url_form, needs=_AGENTS)
    """URL passed to agents, such as that of a tunnel or a container's gateway. Default: the adapter's address."""


def format_is_known(args: Args) -> str | None:
    try:
        if args.agent_tool_format:
            load_object(FORMATS).get(args.agent_tool_format)
    except ConfigError as error:
        return str(error)
    return None


AGENT_RULES: tuple[Rule, ...] = (
    format_is_known,
    refuse_if(
        lambda s: s.agent_port and s.rollout_num_workers > 1,
        "agent_port {s.agent_port} does not work with rollout_num_workers {s.rollout_num_workers}: each worker needs "
        "a separate port; drop agent_port, or set --rollout-num-workers 1",
    ),
)
