"""Settings for generation: prompts and samples per step, sampling, and the number of steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.core.cores import usable_cores
from slime.core.hf_config import context_length_of, read_hf_config
from slime.core.registry import load_object
from slime.settings.conditions import fine_tunes
from slime.settings.data_files import count_rows
from slime.settings.fields import Need, Passed, Rule, derived, opt, refuse_if
from slime.settings.flags import (
    COUNT,
    COUNT_OR_NONE,
    FRACTION,
    SECONDS,
    SECONDS_OR_NONE,
    SEED,
    STEPS,
    STEPS_OR_NONE,
    TOKENS,
    TOKENS_OR_NONE,
)
from slime.settings.groups.evaluation import SAMPLED
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC

if TYPE_CHECKING:
    from slime.settings.args import Args

SCHEDULES = "slime.rollout.schedules:SCHEDULES"
RESPONSE_LEN = 1024
"""Default maximum length of a response, in tokens."""
LEAST_TEMPERATURE = 0.01
LEAST_TOP_P = 0.001
REQUESTS_OF_A_PROCESS = 1024
"""The number of concurrent samples that keeps one rollout worker process busy."""


def _half_of_context(s: Any) -> int | None:
    """Returns half of the model's context if the context is too short for the default response limit, else None."""
    if not (Path(s.hf_checkpoint) / "config.json").is_file():  # a rule reports the problem
        return None
    context = context_length_of(read_hf_config(s.hf_checkpoint))
    return context // 2 if context is not None and 2 <= context <= RESPONSE_LEN else None


def _rows_of_epochs(s: Any) -> int | None:
    if s.num_epoch is None or not s.prompt_data or not s.rollout_batch_size:
        return None
    return int(s.num_epoch * (count_rows(s.prompt_data) // s.rollout_batch_size))


def _why_rows(s: Any) -> str:
    size = s.rollout_batch_size
    return f"num_epoch {s.num_epoch} * ({count_rows(s.prompt_data)} rows // rollout_batch_size {size})"


def _num_batches_ahead(s: Any) -> int:
    """Returns how many batches are in flight. With more, long responses would become stale before they finish."""
    return min(s.max_weight_staleness or 0, 1) + 1


def _num_requests(s: Any) -> int:
    groups = s.max_groups_in_flight if s.fully_async else s.over_sampling_batch_size
    return int(groups * s.n_samples_per_prompt)


def _works_on_groups(s: Any) -> bool:
    return not (s.rollout_schedule == "function" or s.load_debug_rollout_data is not None or fine_tunes(s))


_GROUPS = Need(
    _works_on_groups, "a rollout that works on groups: not a function for entire steps, recorded data or SFT"
)


def _num_workers(s: Any) -> int:
    if not _works_on_groups(s):
        return 0
    most = 1 if s.agent_port else usable_cores() // 4
    return min(_num_requests(s) // REQUESTS_OF_A_PROCESS, most)


def _why_num_workers(s: Any) -> str:
    return (
        f"{_num_requests(s)} concurrent samples, {REQUESTS_OF_A_PROCESS} per process, and {usable_cores()} usable cores"
    )


def _schedule(s: Any) -> str:
    if s.fully_async:
        return "fully_async"
    return "step" if s.rollout_function_path == DEFAULT_ROLLOUT else "function"


def _why_schedule(s: Any) -> str:
    own = s.rollout_function_path
    reasons = {"fully_async": "--fully-async", "step": "the default rollout function"}
    return reasons.get(s.rollout_schedule, f"--rollout-function-path {own}")


def _generates_all_the_time(s: Any) -> bool | None:
    name = s.given("rollout_schedule")
    if name is not None:
        continuous: bool = load_object(SCHEDULES).get(name).continuous
        return continuous
    return True if s.given("rollout_function_path") == FULLY_ASYNC else None


def _why_all_the_time(s: Any) -> str:
    name = s.given("rollout_schedule")
    return f"--rollout-function-path {FULLY_ASYNC}" if name is None else f"--rollout-schedule {name}"


_STEPWISE = Need(
    lambda s: not s.fully_async,
    "which changes nothing: the worker of --fully-async keeps max_groups_in_flight groups in flight",
)
_WORKER = Need(lambda s: s.fully_async, "the worker of --fully-async")
_PAUSES = Need(
    lambda s: s.fully_async or s.pause_generation_mode == "abort",
    "--fully-async: otherwise no requests run during weight syncs",
)
_RESPONSES = Need(
    lambda s: SAMPLED.acts(s) or s.loss_aggregation == "constant_length",
    f"{SAMPLED.text}, or --loss-aggregation constant_length",
)
_CONTINUES = Need(lambda s: s.partial_rollout, "--partial-rollout")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Generation of one step's samples, and the number of steps."""

    hf_checkpoint: str = opt("", required="--hf-checkpoint DIR (the model)", first="Model")
    """Hugging Face model folder: architecture, initial weights, tokenizer. Required."""
    num_rollout: int = derived(
        _rows_of_epochs,
        _why_rows,
        required="--num-rollout N or --num-epoch N (the length of the run)",
        within=STEPS_OR_NONE,
        first="Batch",
    )
    """Number of steps in the loop; 0 only evaluates. Required unless --num-epoch is set."""
    num_epoch: int | None = opt(
        None,
        needs=Need(lambda s: not s.was_given("num_rollout"), "a run without --num-rollout, which sets its length"),
        within=COUNT,
    )
    """Passes over the prompt data. Sets num_rollout = num_epoch * (rows // rollout_batch_size)."""
    start_rollout_id: int | None = opt(None, within=STEPS_OR_NONE)
    """First step of the loop. Default: the one after the loaded checkpoint, else 0."""
    rollout_batch_size: int = derived(
        lambda s: 1 if s.given("num_rollout") == 0 else None,
        "--num-rollout 0 generates nothing",
        required="--rollout-batch-size N (prompts per step)",
        within=COUNT,
        first="Batch",
    )
    """Prompts per step. Required."""
    n_samples_per_prompt: int = opt(1, within=COUNT, first="Batch")
    """Executions (samples) per prompt."""
    over_sampling_batch_size: int = derived(
        lambda s: s.rollout_batch_size, "rollout_batch_size", needs=(SAMPLED, _STEPWISE), within=COUNT
    )
    """Number of prompts that a step issues at first; a value above rollout_batch_size leaves room for filters. If too
    few groups for the batch are finished or in flight, the step issues more prompts in the same proportion."""
    rollout_temperature: float = opt(1.0, ge=0, le=1_000, needs=SAMPLED, first="Length")
    """Sampling temperature; the trainer divides the logits by the same number."""
    rollout_top_p: float = opt(1.0, within=FRACTION, needs=SAMPLED)
    """Top-p sampling. The trainer then computes log-probs over the tokens that remain after top-p; settings that would
    compare these with log-probs over the entire vocabulary are refused."""
    rollout_top_k: int = opt(-1, ge=-1, le=100_000_000, needs=SAMPLED)
    """Top-k sampling; -1: off. The trainer's log-probs are restricted to these tokens, as with --rollout-top-p."""
    rollout_max_response_len: int = derived(
        _half_of_context,
        "half of the model's context",
        default=RESPONSE_LEN,
        needs=_RESPONSES,
        within=TOKENS,
        first="Length",
    )
    """Maximum tokens per response; in a multi-turn execution, per turn. Default: 1024, or half the model's context if
    the context is at most 1024."""
    rollout_max_total_response_len: int | None = opt(None, needs=_RESPONSES, within=TOKENS)
    """Maximum tokens sampled per execution, over all its responses (turns with tools, or an agent's conversations).
    Tool output and template text do not count. Responses sampled in parallel can each use the budget left when they
    start. Default: no limit."""
    rollout_max_context_len: int | None = opt(None, ge=2, le=100_000_000)
    """Maximum tokens per conversation: the prompt and everything after it, including tool results. A response ends at
    this length. In fine-tuning, a longer conversation is dropped and counted. Default: the model's context, where
    engines stop; none in fine-tuning."""
    rollout_max_prompt_len: int | None = derived(
        lambda s: None if s.rollout_max_context_len is None or fine_tunes(s) else s.rollout_max_context_len - 1,
        "rollout_max_context_len - 1",
        within=TOKENS,
    )
    """Maximum prompt tokens; longer prompts are filtered out when the data is read. Default: rollout_max_context_len -
    1 if that is set; none with loss_type sft_loss, whose conversations are rendered later."""
    rollout_skip_special_tokens: bool = opt(False, needs=SAMPLED)
    """Omit special tokens from the response text; the trained ids keep them."""
    rollout_stop: tuple[str, ...] | None = opt(None, needs=SAMPLED)
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] | None = opt(None, needs=SAMPLED, within=TOKENS_OR_NONE)
    """Token ids that end a response."""
    rollout_shuffle: bool = False
    """Reshuffle the prompts in each epoch, with seed rollout_seed + epoch."""
    rollout_seed: int = opt(42, within=SEED)
    """Seed for shuffling and, where the engine supports it, for sampling."""
    execution_timeout_s: float = opt(1800.0, within=SECONDS_OR_NONE)
    """Seconds without progress after which an execution (a generate function with its sample hooks) fails. The error
    says what the function was doing. Progress is an engine's response, a command in a sandbox, or a call to
    slime.rollout.guard.alive(). While an engine or sandbox is busy with the execution, its own limits apply. The total
    time of an execution is not limited. The same limit applies to each call to a filter, converter or log function. If
    no execution of a rollout function makes progress for this time, the run fails. A function that blocks the event
    loop for this time is interrupted, or its process is killed; without workers (--rollout-num-workers), that is the
    run's own process. 0: no limit."""
    rollout_num_workers: int = derived(_num_workers, _why_num_workers, needs=_GROUPS, within=COUNT_OR_NONE)
    """Number of additional processes that work on samples, on the driver's host. Each process sends requests to the
    engines and has its own tokenizer, share of the graders, and module state of your generate function, filters and
    sample hooks. 0: the rollout process does everything. Default: one per 1024 concurrent samples, at most a quarter of
    the usable cores, and at most one with --agent-port."""
    rollout_global_timeout_s: float | None = opt(None, within=SECONDS)
    """Time limit of each generation phase, in seconds."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """When groups start, and how far the sampling weights can lag behind the trained ones."""

    partial_rollout: bool = derived(
        lambda s: True if s.fully_async else None,
        "--fully-async syncs weights while groups are unfinished",
        default=False,
        needs=SAMPLED,
    )
    """Keep the tokens of samples that are unfinished at the end of a step, and continue them later."""
    mask_offpolicy_in_partial_rollout: bool = opt(False, needs=_CONTINUES)
    """In a continued sample, train only on the tokens that the newest weights sampled."""
    update_weights_interval: int = opt(1, within=STEPS)
    """Steps between weight syncs (train_async.py only)."""
    rollout_schedule: str = derived(_schedule, _why_schedule, chosen_from=SCHEDULES)
    """When groups start, and which groups are trained on. step: each step generates what it trains on. fully_async: a
    worker generates continuously, and a step trains on the oldest finished groups. function: --rollout-function-path
    does both. Or the import path of your own class (docs/customization.md). Default: fully_async with --fully-async,
    function with your own --rollout-function-path, else step."""
    fully_async: bool = derived(_generates_all_the_time, _why_all_the_time, default=False)
    """Generate continuously, including during training and weight syncs (train_async.py only). Same as
    --rollout-schedule fully_async, or --rollout-function-path slime.rollout.fully_async.generate_rollout_fully_async.
    Default: set by --rollout-schedule."""
    max_groups_in_flight: int | None = derived(
        lambda s: _num_batches_ahead(s) * s.rollout_batch_size if s.fully_async else None,
        lambda s: f"{_num_batches_ahead(s)} * rollout_batch_size, max_weight_staleness {s.max_weight_staleness}",
        needs=_WORKER,
        within=COUNT,
    )
    """Maximum number of groups in the fully_async worker, either running or finished and waiting. Default: 2 *
    rollout_batch_size, or rollout_batch_size if max_weight_staleness is 0."""
    max_weight_staleness: int | None = derived(
        lambda s: 2 if s.fully_async else None, "--fully-async", within=STEPS_OR_NONE
    )
    """Maximum number of versions (trained steps) by which the weights that sampled a token can lag behind the weights
    being trained. Groups with older tokens start over. Finished groups beyond a batch are kept for the next step.
    Default: 2 with --fully-async. Otherwise, a step trains on what it sampled and what --partial-rollout continues."""
    pause_generation_mode: Literal["abort", "retract", "in_place", "auto"] = opt("abort", needs=_PAUSES)
    """How a weight sync treats running requests (fully_async). abort: requests are aborted and resubmitted with their
    tokens. retract: requests continue with the new weights after a new prefill of all tokens. in_place: requests
    continue with the KV cache of the old weights. auto: the first weight syncs alternate between abort and retract, and
    the run keeps the one that pauses the engines for less time. The weight sync before a checkpoint always aborts
    requests, so that the checkpoint contains their tokens."""


PASSED: tuple[Passed, ...] = (
    Passed(  # otherwise several weight versions could prefill one prompt, which the sample would not record
        "sglang",
        "chunked_prefill_size",
        lambda s: -1 if s.fully_async and s.pause_generation_mode == "in_place" else None,
        "--pause-generation-mode in_place prefills each prompt in one pass",
    ),
)


def engines_divide_by_the_temperature(args: Args) -> str | None:
    """SGLANG_RETURN_ORIGINAL_LOGPROB makes SGLang report log-probs at temperature 1."""
    if args.rollout_temperature == 1.0 or args.debug_train_only:
        return None
    if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() not in ("1", "true", "yes", "y"):
        return None
    return (
        "SGLANG_RETURN_ORIGINAL_LOGPROB in the environment does not work with rollout_temperature "
        f"{args.rollout_temperature}: engines would report log-probs at temperature 1, but the trainer computes those "
        "of the sampled distribution; unset the variable"
    )


def an_epoch_has_a_step(args: Args) -> str | None:
    if args.num_epoch is None or args.was_given("num_rollout") or args.num_rollout > 0:
        return None
    return f"{_why_rows(args)} = 0 steps, so nothing would be trained; lower --rollout-batch-size"


def _leaves_no_token(s: Any) -> bool:
    context, prompt = s.rollout_max_context_len, s.rollout_max_prompt_len
    return context is not None and prompt is not None and prompt > context - 1


RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.rollout_temperature < LEAST_TEMPERATURE,
        f"rollout_temperature {{s.rollout_temperature}} is too low: all samples of a prompt would be identical, and "
        f"the trainer divides logits by it; set at least {LEAST_TEMPERATURE} (--eval-temperature 0 is fine)",
    ),
    refuse_if(
        lambda s: not (LEAST_TOP_P <= s.rollout_top_p <= 1 and (s.rollout_top_k >= 1 or s.rollout_top_k == -1)),
        "rollout_top_p {s.rollout_top_p} with rollout_top_k {s.rollout_top_k} is out of range; "
        f"set {LEAST_TOP_P} <= top_p <= 1, and top_k >= 1 or -1 for all",
    ),
    engines_divide_by_the_temperature,
    refuse_if(
        lambda s: s.over_sampling_batch_size < s.rollout_batch_size,
        "over_sampling_batch_size {s.over_sampling_batch_size} is below rollout_batch_size {s.rollout_batch_size}, so "
        "no batch would ever be full; raise it or drop it",
    ),
    an_epoch_has_a_step,
    refuse_if(
        _leaves_no_token,
        "rollout_max_prompt_len {s.rollout_max_prompt_len} is above rollout_max_context_len "
        "{s.rollout_max_context_len} - 1, which leaves no token for a response; lower it",
    ),
)
