"""Settings for evaluation on held-out data: schedule, datasets, sampling, and scoring by answers or by loss.

In a fine-tuning run, the trainer evaluates a held-out dataset without a grader by the mean loss of its trained tokens.
All other datasets are evaluated by sampling: engines generate responses and graders score them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.settings.conditions import fine_tunes
from slime.settings.data_files import first_row_names
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets
from slime.settings.fields import Need, Rule, derived, opt
from slime.settings.flags import COUNT, FRACTION, STEPS, TOKENS, TOKENS_OR_NONE, Range
from slime.settings.groups.hooks import SFT_ROLLOUT

if TYPE_CHECKING:
    from slime.settings.args import Args


def measures_loss(s: Any, dataset: EvalDatasetConfig) -> bool:
    """Returns whether a dataset is evaluated by its loss, without sampling."""
    if not fine_tunes(s) or s.rollout_function_path != SFT_ROLLOUT or s.eval_function_path is not None:
        return False
    of_run = (s.rm_type, s.custom_rm_path, s.custom_generate_function_path)
    of_data = (dataset.rm_type, dataset.custom_rm_path, dataset.custom_generate_function_path)
    return not any((*of_run, *of_data)) and not first_row_names(dataset.path, "rm_type")


def loss_datasets(s: Any) -> tuple[EvalDatasetConfig, ...]:
    """Returns the datasets that are evaluated by their loss. Raises the errors of `eval_datasets`."""
    return tuple(one for one in eval_datasets(s) if measures_loss(s, one))


def samples_evaluations(s: Any) -> bool:
    """Returns whether an evaluation needs engines. Raises the errors of `eval_datasets`."""
    return s.eval_function_path is not None or not all(measures_loss(s, one) for one in eval_datasets(s))


_EVALUATES = Need(
    lambda s: s.eval_interval is not None or s.num_rollout == 0,
    "evaluation: --eval-interval, or --num-rollout 0",
)
_EVALUATES_LATER = Need(
    lambda s: s.eval_interval is not None and s.num_rollout != 0,
    "--eval-interval and at least one step; --num-rollout 0 always evaluates",
)


_HAS_ENGINES = Need(
    lambda s: fine_tunes(s) or not s.debug_train_only,
    "engines; --debug-train-only and --load-debug-rollout-data start none",
)


UNNAMED = "aime"
"""Name of a single evaluation dataset if the user gives none."""


def _pairs(data: Any) -> Any:
    return data if data is None or len(data) != 1 else (UNNAMED, *data)


def _samples(s: Any) -> bool:
    try:
        return samples_evaluations(s)
    except ConfigError:  # a rule reports the problem
        return True


SAMPLED = Need(
    lambda s: s.rollout_function_path != SFT_ROLLOUT or not fine_tunes(s) or _samples(s),
    "a rollout or an evaluation that samples; fine-tuning reads conversations as they are",
)
"""Condition for the rollout's sampling settings, which an evaluation may inherit."""
_SAMPLED = Need(_samples, "an evaluation that samples; conversations without a grader are evaluated by their loss")
_SAMPLES = (_EVALUATES, _SAMPLED)


def _same_as(name: str, *, within: Range | None = None, needs: Need | tuple[Need, ...] = _SAMPLES) -> Any:
    return derived(lambda s: getattr(s, name), f"same as {name}", within=within, needs=needs)


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Evaluation. Most settings default to the rollout's values."""

    eval_interval: int | None = opt(None, within=STEPS, needs=_HAS_ENGINES, first="Evaluation")
    """Steps between evaluations. Default: no evaluation."""
    skip_eval_before_train: bool = opt(False, needs=_EVALUATES_LATER)
    """Do not evaluate before the first step."""
    eval_prompt_data: tuple[str, ...] | None = opt(None, canonical=_pairs, needs=_EVALUATES, first="Evaluation")
    """Datasets as pairs, NAME DATA [NAME DATA ...], where DATA is as in --prompt-data. A single DATA is called aime."""
    eval_config: str | None = opt(None, needs=_EVALUATES)
    """YAML file of datasets with individual settings. Replaces --eval-prompt-data."""
    eval_input_key: str = _same_as("input_key", needs=_EVALUATES)
    """Column of the prompt. Default: input_key."""
    eval_label_key: str | None = _same_as("label_key", needs=_EVALUATES)
    """Column of the answer. Default: label_key."""
    eval_tool_key: str = _same_as("tool_key", needs=_EVALUATES)
    """Column of the tools. Default: tool_key."""
    eval_reward_key: str | None = _same_as("reward_key")
    """Key of a dict reward. Default: reward_key."""
    n_samples_per_eval_prompt: int = opt(1, needs=_SAMPLES, within=COUNT, first="Evaluation")
    """Samples per evaluation prompt."""
    eval_temperature: float = _same_as("rollout_temperature", within=Range(ge=0, le=1_000))
    """Temperature; 0 is greedy. Default: rollout_temperature."""
    eval_top_p: float = _same_as("rollout_top_p", within=FRACTION)
    """Top-p sampling. Default: rollout_top_p."""
    eval_top_k: int = _same_as("rollout_top_k", within=Range(ge=-1, le=100_000_000))
    """Top-k sampling. Default: rollout_top_k."""
    eval_max_response_len: int = _same_as("rollout_max_response_len", within=TOKENS)
    """Maximum tokens per response. Default: rollout_max_response_len."""
    eval_max_total_response_len: int | None = _same_as("rollout_max_total_response_len", within=TOKENS)
    """Maximum tokens sampled per execution, over all its responses. Default: rollout_max_total_response_len."""
    eval_max_prompt_len: int | None = derived(
        lambda s: s.eval_max_context_len - 1 if s.given("eval_max_context_len") else s.rollout_max_prompt_len,
        lambda s: "eval_max_context_len - 1" if s.given("eval_max_context_len") else "same as rollout_max_prompt_len",
        needs=_EVALUATES,
        within=TOKENS,
    )
    """Maximum prompt tokens; longer prompts are filtered out. Default: eval_max_context_len - 1 if that is set, else
    rollout_max_prompt_len."""
    eval_max_context_len: int | None = _same_as(
        "rollout_max_context_len", within=Range(ge=2, le=100_000_000), needs=_EVALUATES
    )
    """Maximum tokens per conversation. Default: rollout_max_context_len."""
    eval_min_new_tokens: int | None = opt(None, needs=_SAMPLES, within=TOKENS_OR_NONE)
    """Minimum tokens per response."""
    eval_max_failed_fraction: float = opt(0.05, ge=0, le=1, needs=_SAMPLES)
    """Fraction of each dataset's samples, rounded up, that may fail permanently (engine, tool, your function) before
    the run fails. A sample fails permanently after three attempts, or one without progress. Failed samples are counted
    but do not affect scores; a dataset whose samples all fail has no score."""
    eval_fleet: int | None = opt(None, within=COUNT, needs=(_EVALUATES_LATER, _SAMPLED))
    """Evaluate in the background, on this many engines of their own (--rollout-num-gpus-per-engine GPUs each, besides
    --rollout-num-gpus), while training and generation go on. They get the weights of each evaluation's step. Default:
    the engines that generate also evaluate, and training waits."""
    eval_fleet_must_work: bool = opt(False, needs=Need(lambda s: s.eval_fleet is not None, "--eval-fleet"))
    """Fail the run if an evaluation on --eval-fleet fails or its engines cannot be kept running. Default: such failures
    are logged and counted (eval/num_failed_evaluations), and the run goes on."""


def evaluation_has_data(args: Args) -> str | None:
    data = args.eval_prompt_data
    if data is not None and len(data) % 2:
        return f"eval_prompt_data is {' '.join(data)}; write pairs: NAME FILE [NAME FILE ...]"
    if data is not None and args.eval_config is not None:
        return "--eval-prompt-data and --eval-config both name the datasets; set only one of them"
    named = data is not None or args.eval_config is not None
    if args.eval_interval is not None and not named and args.eval_function_path is None:
        return f"eval_interval {args.eval_interval} needs --eval-prompt-data; set NAME FILE pairs"
    if args.num_rollout == 0 and not named and args.eval_function_path is None and not args.debug_rollout_only:
        return "num_rollout 0, which only evaluates, needs --eval-prompt-data; set NAME FILE pairs"
    return None


def lengths_fit(args: Args) -> str | None:
    context, prompt = args.eval_max_context_len, args.eval_max_prompt_len
    if args.was_given("eval_max_context_len") and context is not None and prompt is not None and prompt > context - 1:
        return (
            f"eval_max_prompt_len {prompt} is above eval_max_context_len {context} - 1, which leaves no token for a "
            "response; lower it"
        )
    for one in eval_datasets(args) if args.eval_config is not None else ():
        longest, whole = one.max_prompt_len, one.max_context_len
        if longest is not None and whole is not None and longest > whole - 1:
            return (
                f"max_prompt_len {longest} is above max_context_len {whole} - 1 for evaluation on {one.name}, which "
                "leaves no token for a response; lower it"
            )
    return None


def fleet_can_evaluate(args: Args) -> str | None:
    """An evaluation fleet gets weights from a trainer that keeps them on its GPUs, on engines that the run starts."""
    if args.eval_fleet is None:
        return None
    reasons = {
        "--colocate": (args.colocate, "it moves the trainer's weights off the GPU before an evaluation; drop one"),
        "--rollout-external-engine-addrs": (
            bool(args.rollout_external_engine_addrs),
            "the run does not start external engines, so it cannot reserve some for evaluation; drop one",
        ),
        "--debug-rollout-only": (args.debug_rollout_only, "no trainer sends weights to the fleet; drop one"),
        "--debug-train-only": (args.debug_train_only, "the run starts no engines; drop one"),
        "--update-weight-local-checkpoint-dir": (
            args.components.get("update_weight_local_checkpoint_dir") is not None,
            "the folder on a host holds one version, and the fleet serves an older one than the other engines; use "
            "--update-weight-transport distributed",
        ),
    }
    found = next(((flag, why) for flag, (given, why) in reasons.items() if given), None)
    return None if found is None else f"eval_fleet {args.eval_fleet} does not work with {found[0]}: {found[1]}"


RULES: tuple[Rule, ...] = (evaluation_has_data, lengths_fit, fleet_can_evaluate)
