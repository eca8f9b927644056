"""Generation: how many prompts and samples per step, how they are sampled, how long the loop runs."""

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
from slime.settings.fields import Need, Passed, Rule, derived, opt
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
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC

if TYPE_CHECKING:
    from slime.settings.args import Args

SCHEDULES = "slime.rollout.schedules:SCHEDULES"
"""The registry of schedules."""


RESPONSE_LEN = 1024
"""Tokens of a response, unless a limit is given."""
REQUESTS_OF_A_PROCESS = 1024
"""So many samples at a time are work enough for a process of their own."""


def _half_of_context(s: Any) -> int | None:
    """Only where a prompt and the usual response do not fit."""
    if not (Path(s.hf_checkpoint) / "config.json").is_file():  # a rule says so
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
    """Batches under way; with more, long responses get old before they are finished."""
    return min(s.max_weight_staleness or 0, 1) + 1


def _num_requests(s: Any) -> int:
    groups = s.max_groups_in_flight if s.fully_async else s.over_sampling_batch_size
    return int(groups * s.n_samples_per_prompt)


def _works_on_groups(s: Any) -> bool:
    return not (s.rollout_schedule == "function" or s.load_debug_rollout_data is not None or fine_tunes(s))


_GROUPS = Need(
    _works_on_groups, "a rollout that works on groups: no function of a whole step, no recorded data, no SFT"
)


def _num_workers(s: Any) -> int:
    if not _works_on_groups(s):
        return 0
    most = 1 if s.agent_port else usable_cores() // 4
    return min(_num_requests(s) // REQUESTS_OF_A_PROCESS, most)


def _why_num_workers(s: Any) -> str:
    return (
        f"{_num_requests(s)} samples at a time, {REQUESTS_OF_A_PROCESS} for each process, and "
        f"{usable_cores()} usable cores"
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


_WORKER = Need(lambda s: s.fully_async, "the worker of --fully-async")
_PAUSES = Need(
    lambda s: s.fully_async or s.pause_generation_mode == "abort",
    "--fully-async: nothing else runs while weights are synced",
)
_CONTINUES = Need(lambda s: s.partial_rollout, "--partial-rollout")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Generation of the samples of one step, and the length of the loop."""

    hf_checkpoint: str = opt("", required="--hf-checkpoint DIR names the model")
    """HF model folder: architecture, initial weights, tokenizer. Required."""
    num_rollout: int = derived(
        _rows_of_epochs,
        _why_rows,
        required="--num-rollout N (or --num-epoch N) is the length of the run",
        within=STEPS_OR_NONE,
    )
    """Number of steps of the loop; 0 evaluates only. Required unless --num-epoch is given."""
    num_epoch: int | None = opt(None, within=COUNT)
    """Passes over the prompt data; gives num_rollout = num_epoch * (rows // rollout_batch_size)."""
    start_rollout_id: int | None = opt(None, within=STEPS_OR_NONE)
    """First step of the loop. Default: the one after the loaded checkpoint, else 0."""
    rollout_batch_size: int = derived(
        lambda s: 1 if s.given("num_rollout") == 0 else None,
        "--num-rollout 0 generates no step",
        required="--rollout-batch-size N is the number of prompts per step",
        within=COUNT,
    )
    """Prompts per step. Required."""
    n_samples_per_prompt: int = opt(1, within=COUNT)
    """Executions (samples) per prompt."""
    over_sampling_batch_size: int = derived(lambda s: s.rollout_batch_size, "rollout_batch_size", within=COUNT)
    """Prompts that a step starts with; more than rollout_batch_size leaves room for filters. When fewer than the batch
    are finished or under way, what is missing is issued in the same proportion."""
    rollout_temperature: float = opt(1.0, ge=0, le=1_000)
    """Sampling temperature; the trainer divides the logits by the same number."""
    rollout_top_p: float = opt(1.0, within=FRACTION)
    """Top-p sampling. The trainer's log-probs are then those of the set of tokens that was sampled from; what would
    compare them with those of the whole vocabulary is refused."""
    rollout_top_k: int = opt(-1, ge=-1, le=100_000_000)
    """Top-k sampling, -1 is off. The trainer's log-probs are as with --rollout-top-p."""
    rollout_max_response_len: int = derived(
        _half_of_context, "half of the model's context", default=RESPONSE_LEN, within=TOKENS
    )
    """Most tokens of one answer of the model: of each turn, where an execution has several. Default: 1024, or half of
    the context of a model that has no more."""
    rollout_max_total_response_len: int | None = opt(None, within=TOKENS)
    """Most tokens that one execution samples, over all of its answers: turns with tools, the conversations of an agent.
    What tools and templates say does not count. Answers that are sampled side by side may each use what is left when
    they begin. Default: no limit."""
    rollout_max_context_len: int | None = opt(None, ge=2, le=100_000_000)
    """Most tokens of a conversation: a prompt and all that follows, tool results included. An answer that gets there
    ends, and a conversation of fine-tuning that is longer is left out and counted. Default: the context of the model,
    where engines end; none in fine-tuning."""
    rollout_max_prompt_len: int | None = derived(
        lambda s: None if s.rollout_max_context_len is None or fine_tunes(s) else s.rollout_max_context_len - 1,
        "rollout_max_context_len - 1",
        within=TOKENS,
    )
    """Longer prompts are filtered out when the data is read. Default: rollout_max_context_len - 1 if that is
    given; none with loss_type sft_loss, where prompts are conversations that are rendered later."""
    rollout_skip_special_tokens: bool = False
    """Leave special tokens out of the response text (never out of the trained ids)."""
    rollout_stop: tuple[str, ...] | None = None
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] | None = opt(None, within=TOKENS_OR_NONE)
    """Token ids that end a response."""
    rollout_shuffle: bool = False
    """Shuffle the prompts again in each epoch, seeded by rollout_seed + epoch."""
    rollout_seed: int = opt(42, within=SEED)
    """Seed of the shuffle and, where the engine samples by seed, of sampling."""
    partial_rollout: bool = derived(
        lambda s: True if s.fully_async else None,
        "--fully-async syncs weights while groups are half done",
        default=False,
    )
    """Keep the tokens of samples that the end of a step interrupts, and continue them later."""
    mask_offpolicy_in_partial_rollout: bool = opt(False, needs=_CONTINUES)
    """Train only the tokens that the newest weights sampled in a continued sample."""
    update_weights_interval: int = opt(1, within=STEPS)
    """Steps between weight syncs (train_async.py only)."""
    rollout_schedule: str = derived(_schedule, _why_schedule, chosen_from=SCHEDULES)
    """When groups are started, and which are trained. step: each step generates what it trains. fully_async: a worker
    generates all the time, and a step trains the oldest groups that are finished. function: --rollout-function-path
    does both. An import path names a class of your own (docs/customization.md). Default: fully_async with
    --fully-async, function with a --rollout-function-path of your own, else step."""
    fully_async: bool = derived(_generates_all_the_time, _why_all_the_time, default=False)
    """Generate all the time, also while weights are trained and synced (train_async.py only): the same as
    --rollout-schedule fully_async, or --rollout-function-path
    slime.rollout.fully_async.generate_rollout_fully_async. Default: what --rollout-schedule says."""
    max_groups_in_flight: int | None = derived(
        lambda s: _num_batches_ahead(s) * s.rollout_batch_size if s.fully_async else None,
        lambda s: f"{_num_batches_ahead(s)} * rollout_batch_size, max_weight_staleness {s.max_weight_staleness}",
        needs=_WORKER,
        within=COUNT,
    )
    """Groups that the worker of fully_async has running or finished and waiting, at most. Default: 2 *
    rollout_batch_size, half of that if max_weight_staleness is 0."""
    max_weight_staleness: int | None = derived(
        lambda s: 2 if s.fully_async else None, "--fully-async", within=STEPS_OR_NONE
    )
    """How many versions (trained steps) the weights that sampled a token may be older than those that are trained;
    groups with older tokens start over. Finished groups beyond a batch are kept for the next step. Default: 2 with
    --fully-async; otherwise a step trains what was sampled in it, and what --partial-rollout continues."""
    pause_generation_mode: Literal["abort", "retract", "in_place"] = opt("abort", needs=_PAUSES)
    """What a weight sync does to requests under way (fully_async): abort ends them, and they are sent again with their
    tokens; retract and in_place let them go on under the new weights, retract after reading all tokens again, in_place
    with the keys and values of the old weights. The weight sync before a checkpoint always ends them, so that it holds
    their tokens."""
    execution_timeout_s: float = opt(1800.0, within=SECONDS_OR_NONE)
    """Seconds that a generate function (with its sample hooks) may be without progress; the execution has then failed,
    and the message says where it stands. Progress: an answer of an engine, a command in a sandbox, alive() of
    slime.rollout.guard; while an engine or a sandbox works for it, their own limits hold. The length of an execution
    has no limit in seconds. Filters, converters and log functions may take as long in one call, and a rollout
    function may be without progress of its executions as long; the run then ends. A function may keep the event loop
    from turning as long: it is then broken off, or else its process ends, which is the run's without workers
    (--rollout-num-workers). 0: no limit."""
    rollout_num_workers: int = derived(_num_workers, _why_num_workers, needs=_GROUPS, within=COUNT_OR_NONE)
    """Processes that work on samples beside the rollout's own, on the driver's host: each asks the engines itself and
    has a tokenizer, its part of the graders, and a copy of your generate function, filters and sample hooks with what
    they keep in their modules. 0: the rollout's own process does it all. Default: one for each 1024 samples at a time,
    but at most a quarter of the usable cores, and one with --agent-port."""
    rollout_global_timeout_s: float | None = opt(None, within=SECONDS)
    """Limit of one whole generation phase, in seconds."""


PASSED: tuple[Passed, ...] = (
    Passed(  # the versions of a sample then say whether its keys and values are of several
        "sglang",
        "chunked_prefill_size",
        lambda s: -1 if s.fully_async and s.pause_generation_mode == "in_place" else None,
        "--pause-generation-mode in_place: prompts are read at once",
    ),
)


def temperature_is_positive(args: Args) -> str | None:
    """Greedy samples have no log-prob to learn from."""
    if args.rollout_temperature > 0:
        return None
    return (
        f"got rollout_temperature {args.rollout_temperature}: greedy samples of a prompt are all equal and their "
        "log-probs divide by zero; give a value > 0 (--eval-temperature 0 is fine)"
    )


def sampled_set_is_not_empty(args: Args) -> str | None:
    """Top-p and top-k leave something to sample."""
    if 0 < args.rollout_top_p <= 1 and (args.rollout_top_k >= 1 or args.rollout_top_k == -1):
        return None
    return (
        f"got rollout_top_p {args.rollout_top_p} and rollout_top_k {args.rollout_top_k}; "
        "give 0 < top_p <= 1, and top_k >= 1 or -1 for all"
    )


def engines_divide_by_the_temperature(args: Args) -> str | None:
    """An environment variable of SGLang takes the temperature out of its log-probs."""
    if args.rollout_temperature == 1.0 or args.debug_train_only:
        return None
    if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() not in ("1", "true", "yes", "y"):
        return None
    return (
        f"got SGLANG_RETURN_ORIGINAL_LOGPROB in the environment with rollout_temperature "
        f"{args.rollout_temperature}: engines would report log-probs at temperature 1, and the trainer those that "
        "tokens were sampled with; unset it"
    )


def over_sampling_covers_batch(args: Args) -> str | None:
    """Fewer prompts than a batch never fill it."""
    if args.over_sampling_batch_size >= args.rollout_batch_size:
        return None
    return (
        f"got over_sampling_batch_size {args.over_sampling_batch_size} below rollout_batch_size "
        f"{args.rollout_batch_size}; raise it or leave it out"
    )


def one_length_of_the_run(args: Args) -> str | None:
    """Epochs and steps say the same thing twice."""
    epochs = _rows_of_epochs(args) if args.was_given("num_rollout") else None
    if epochs is None or args.num_rollout in (0, epochs):
        return None
    return (
        f"got num_rollout {args.num_rollout} with num_epoch {args.num_epoch}, which is {_why_rows(args)} = {epochs} "
        "steps; give one of the two"
    )


def an_epoch_has_a_step(args: Args) -> str | None:
    """An epoch counts whole batches."""
    if args.num_epoch is None or args.was_given("num_rollout") or args.num_rollout > 0:
        return None
    return f"got {_why_rows(args)} = 0 steps, so nothing would be trained; lower --rollout-batch-size"


def lengths_fit(args: Args) -> str | None:
    """Prompt and response fit into the context."""
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        return (
            f"got rollout_max_prompt_len {prompt} above rollout_max_context_len {context} - 1; no token would be left"
        )
    return None


RULES: tuple[Rule, ...] = (
    temperature_is_positive,
    sampled_set_is_not_empty,
    engines_divide_by_the_temperature,
    over_sampling_covers_batch,
    one_length_of_the_run,
    an_epoch_has_a_step,
    lengths_fit,
)
