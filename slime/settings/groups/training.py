"""How samples become optimizer steps and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from slime.settings.families import model_type_of
from slime.settings.fields import ChosenBy, Need, derived, opt
from slime.settings.group import Passed
from slime.settings.groups.hooks import DEFAULT_ROLLOUT
from slime.settings.ranges import BOUND, COUNT, EXECUTIONS, SEED, TOKENS


def _executions(s: Any) -> int:
    return int(s.rollout_batch_size * s.n_samples_per_prompt)


def _num_given_steps(s: Any) -> int | None:
    """The given number of steps per rollout, if it can be one."""
    steps = s.given("num_steps_per_rollout")
    return steps if steps is not None and steps > 0 else None


def _why_batch(s: Any) -> str:
    steps = _num_given_steps(s)
    if steps is None:
        return "rollout_batch_size * n_samples_per_prompt, one step per rollout"
    return f"{_executions(s)} executions // {steps} steps per rollout"


LEAST_ROOM = 2048
"""Tokens of a micro-batch that is filled by tokens, unless a limit is given; few, wherever anything is trained."""


def _fills_by_tokens(s: Any) -> bool | None:
    """Not where samples are counted on purpose, nor where a pipeline wants many micro-batches to fill its stages."""
    if s.was_given("micro_batch_size") or (s.megatron["pipeline_model_parallel_size"] or 1) > 1:
        return None
    return True


def longest_sample(s: Any) -> int:
    """Most tokens of one sample, as far as limits say it: a micro-batch of one sample may have as many."""
    sampled = s.rollout_max_total_response_len or s.rollout_max_response_len
    return int(s.rollout_max_context_len or (s.rollout_max_prompt_len or 0) + sampled)


def _room(s: Any) -> int | None:
    if not s.use_dynamic_batch_size:
        return None
    ranks = s.megatron["context_parallel_size"] or 1
    return max(math.ceil(longest_sample(s) / ranks), LEAST_ROOM)


def _has_common_beginnings(s: Any) -> bool:
    """Whether a micro-batch may hold several samples of one group. Users' functions, and rollouts that were kept, may
    have more than are asked for, and of a conversation to learn from each turn may be one.
    """
    if not s.use_dynamic_batch_size and s.micro_batch_size == 1:
        return False
    if s.load_debug_rollout_data or s.rollout_function_path != DEFAULT_ROLLOUT:
        return True
    return bool(s.n_samples_per_prompt > 1 or s.custom_generate_function_path is not None)


_SEVERAL = Need(
    _has_common_beginnings,
    "several samples of a prompt in a micro-batch: --n-samples-per-prompt above 1 (or your own function that makes "
    "more, or conversations to learn from), --use-dynamic-batch-size or --micro-batch-size above 1",
)
_DYNAMIC = Need(lambda s: s.use_dynamic_batch_size, "--use-dynamic-batch-size")
_COUNTED = Need(lambda s: not s.use_dynamic_batch_size, "--no-use-dynamic-batch-size")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Batching, seed and the trainer's self-checks. Model, optimizer and schedule are Megatron's own flags."""

    global_batch_size: int = derived(
        lambda s: _executions(s) // (_num_given_steps(s) or 1), _why_batch, within=EXECUTIONS
    )
    """Executions (prompts x samples) per optimizer step. Default: those of a
    rollout // num_steps_per_rollout."""
    num_steps_per_rollout: int = derived(
        lambda s: max(_executions(s) // max(s.global_batch_size, 1), 1),
        lambda s: f"{_executions(s)} executions // {max(s.global_batch_size, 1)}",
        within=COUNT,
    )
    """Optimizer steps per generated batch. Default: 1, or what global_batch_size implies."""
    micro_batch_size: int = opt(1, needs=_COUNTED, within=COUNT)
    """Samples per forward pass, packed without padding, where micro-batches are not filled by tokens."""
    use_dynamic_batch_size: bool = derived(
        _fills_by_tokens, "neither --micro-batch-size nor pipeline stages", default=False
    )
    """Fill micro-batches up to max_tokens_per_gpu. Default: on, unless micro_batch_size is given or there are
    pipeline stages. The gradient is the same."""
    max_tokens_per_gpu: int | None = derived(
        _room,
        lambda s: f"the longest sample that the limits allow, {longest_sample(s)} tokens, and at least {LEAST_ROOM}",
        needs=_DYNAMIC,
        within=TOKENS,
    )
    """Most tokens in a micro-batch that is filled by tokens; a longer sample is one by itself. Default: the tokens of
    the longest sample (rollout_max_context_len, else prompt and response limit) on each context-parallel rank, and
    at least 2048."""
    use_dynamic_global_batch_size: bool = derived(
        lambda s: True if s.load_debug_rollout_data_subsample is not None else None,
        "--load-debug-rollout-data-subsample changes the number of samples",
        default=False,
    )
    """Train whatever number of executions a rollout has, in num_steps_per_rollout steps of nearly equal size."""
    balance_data: bool = derived(lambda s: s.balance_by_flops or None, "--balance-by-flops", default=False)
    """Spread samples over data-parallel ranks by the floating-point operations that they cost."""
    balance_by_flops: bool = False
    """Another name of --balance-data: samples are always weighed so."""
    reset_optimizer_states: bool = False
    """Begin each step's updates with moments of zero, as if the optimizer were new. Its master weights and its schedule
    go on."""
    use_prefix_sharing: bool = opt(False, needs=_SEVERAL)
    """Compute tokens with which samples of a prompt begin alike, the prompt and common turns, once in a micro-batch;
    log-probs, loss weights and gradient are the same. max_tokens_per_gpu counts such tokens once. Models whose layers
    carry a state along the sequence (Qwen3-Next, Qwen3.5) and sparse attention (GLM-5) are refused."""
    log_probs_chunk_size: int = opt(1024, ge=-1, le=100_000_000)
    """Tokens whose full-vocabulary logits exist at one time; -1 means all."""
    kernels: Literal["auto", "reference", "fused"] = "auto"
    """Which implementation of norms, rotary embedding, activations and attention trains: auto takes the kernels of a
    GPU where they can run, reference plain PyTorch everywhere, for comparisons; fused is refused where one cannot run.
    The log of rank 0 and slime doctor say what was chosen, and why."""
    seed: int = opt(1234, within=SEED)
    """Seed of initialisation and dropout."""
    model_family: str | None = opt(
        None,
        chosen_from="slime.models:FAMILIES",
        chosen_by=ChosenBy(lambda s: model_type_of(s.hf_checkpoint), "a checkpoint of model_type"),
    )
    """A model family of your own, registered for the checkpoint's model_type: pkg.module, path/to/file.py or
    pkg.module:ClassName. None: slime's own families."""
    mismatch_limit: float | None = opt(None, names=("--logprob-gap-limit",), within=BOUND)
    """Largest accepted difference between trainer and engine log-probs; none takes the limit of the dtype."""


def _dtype(s: Any) -> str:
    return "float16" if s.megatron["fp16"] else "bfloat16" if s.megatron["bf16"] else "float32"


def _num_iters(s: Any) -> int:
    return int(s.num_rollout * (s.num_steps_per_rollout or 1))


def _warm_up(s: Any) -> int | None:
    fraction, iters = s.megatron["lr_warmup_fraction"], s.megatron["lr_decay_iters"]
    return math.ceil(fraction * iters) if fraction is not None and iters else None


def _needs_sequence_parallel(s: Any) -> bool | None:
    m = s.megatron
    return True if m["num_moe_experts"] and (m["tensor_model_parallel_size"] or 1) > 1 else None


_DTYPE = "training dtype (--bf16 default, --fp16, --no-bf16)"

PASSED: tuple[Passed, ...] = (
    Passed("megatron", "bf16", lambda s: False if s.megatron["fp16"] else None, "--fp16 was given"),
    Passed("megatron", "params_dtype", _dtype, _DTYPE),
    Passed("megatron", "pipeline_dtype", _dtype, _DTYPE),
    Passed("sglang", "dtype", _dtype, "training dtype (auto would serve float32 as float16)"),
    Passed("megatron", "train_iters", _num_iters, "num_rollout * num_steps_per_rollout"),
    Passed("megatron", "lr_decay_iters", lambda s: max(_num_iters(s), 1), "train_iters"),
    Passed("megatron", "lr_warmup_iters", _warm_up, "lr_warmup_fraction * lr_decay_iters"),
    Passed("megatron", "start_weight_decay", lambda s: s.megatron["weight_decay"], "weight_decay"),
    Passed("megatron", "end_weight_decay", lambda s: s.megatron["weight_decay"], "weight_decay"),
    Passed("megatron", "sequence_parallel", _needs_sequence_parallel, "experts under tensor parallelism need it"),
)
