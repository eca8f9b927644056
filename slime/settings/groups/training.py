"""The trainer: how samples become optimizer steps, which parameters are trained, what is loaded and saved, and what the
trainer cannot do.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.settings.conditions import (
    ADVANTAGES,
    CRITIC,
    REFERENCE,
    fine_tunes,
    has_hf_model,
    has_megatron_checkpoint,
    what_to_give,
)
from slime.settings.fields import Adjusted, ChosenBy, Need, Passed, Rule, derived, internal, opt
from slime.settings.flags import BOUND, COUNT, EXECUTIONS, SECONDS, SEED, STEPS, STEPS_OR_NONE, TOKENS
from slime.settings.groups.hooks import DEFAULT_ROLLOUT
from slime.settings.megatron import FIXED, UNSUPPORTED
from slime.settings.schema import model_type_of, prefix_problem_of

if TYPE_CHECKING:
    from slime.settings.args import Args

# How samples become optimizer steps and micro-batches.


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

# What the trainer cannot do: layouts of ranks, kernels, and settings of Megatron that it fixes.

OPTIMIZER_DTYPES = {
    "main_params_dtype": ("float32", "float16"),
    "exp_avg_dtype": ("float32", "bfloat16"),
    "exp_avg_sq_dtype": ("float32", "bfloat16"),
}
"""Setting -> what --use-precision-aware-optimizer can keep that part of its state in."""


def world_divides(args: Args) -> str | None:
    """Ranks form whole models."""
    m, world = args.megatron, args.actor_num_nodes * args.actor_num_gpus_per_node
    tp, pp, cp, ep = (
        m[f"{name}_parallel_size"] or 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    if min(tp, pp, cp, ep) >= 1 and world % (tp * pp * cp) == 0 and world % (ep * pp) == 0:
        return None
    return (
        f"got {world} training GPUs with tensor_model_parallel_size {tp}, pipeline_model_parallel_size {pp}, "
        f"context_parallel_size {cp} and expert_model_parallel_size {ep}: the product of the first three, or that "
        "of the second and the last, does not divide them; change --actor-num-gpus-per-node or a size"
    )


def tensor_parallel_divides_heads(args: Args) -> str | None:
    """A rank holds whole heads."""
    m = args.megatron
    tp = max(m["tensor_model_parallel_size"], 1)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if m[name] % tp:
            return (
                f"got tensor_model_parallel_size {tp}, which does not divide {name} {m[name]} of the checkpoint; "
                "choose a divisor"
            )
    return None


def only_supported_parallelism(args: Args) -> str | None:
    """What this release trains, and splits that leave whole layers and experts on every rank."""
    m = args.megatron
    pp, vp = m["pipeline_model_parallel_size"] or 1, m["virtual_pipeline_model_parallel_size"] or 1
    if vp > 1 and pp == 1:
        return (
            f"got virtual_pipeline_model_parallel_size {vp} without pipeline stages to interleave; give "
            "--pipeline-model-parallel-size or leave it out"
        )
    uneven = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
    )
    if m["num_layers"] % (pp * vp) and not any(m[n] for n in uneven):
        return (
            f"got {m['num_layers']} layers for pipeline_model_parallel_size {pp} and "
            f"virtual_pipeline_model_parallel_size {vp}, which do not divide them; choose divisors, or give "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    ep, experts = m["expert_model_parallel_size"] or 1, m["num_moe_experts"] or 0
    if ep > 1 and (not experts or experts % ep):
        return f"got expert_model_parallel_size {ep} for {experts} experts; choose a divisor of their number"
    if experts and (m["tensor_model_parallel_size"] or 1) > 1 and not m["sequence_parallel"]:
        return "got --no-sequence-parallel for experts under tensor parallelism, which need it; drop the flag"
    return None


def fused_kernels_can_run(args: Args) -> str | None:
    """Kernels need a GPU, and those of attention half precision."""
    if args.kernels != "fused":
        return None
    reasons = (
        ("the trainer runs on a CPU", args.device == "cpu"),
        ("the training dtype is float32", not (args.megatron["bf16"] or args.megatron["fp16"])),
    )
    found = " and ".join(reason for reason, holds in reasons if holds)
    return f"got kernels fused, but {found}; use auto, which chooses by itself" if found else None


def prefixes_can_be_shared(args: Args) -> str | None:
    """Layers read a prefix of which others are behind as well."""
    problem = prefix_problem_of(args.hf_checkpoint) if args.use_prefix_sharing else None
    return None if problem is None else f"got --use-prefix-sharing for a checkpoint where {problem}; drop the flag"


def one_dtype(args: Args) -> str | None:
    """A model has one training dtype."""
    if args.megatron["fp16"] and args.megatron["bf16"]:
        return "got --fp16 and --bf16 together; give one of them"
    return None


def one_warm_up(args: Args) -> str | None:
    """Two flags say how long the warm-up is."""
    fraction, iters = args.megatron["lr_warmup_fraction"], args.megatron["lr_warmup_iters"]
    if fraction is None or not args.was_given("megatron.lr_warmup_iters"):
        return None
    return f"got lr_warmup_fraction {fraction} with lr_warmup_iters {iters}, which it would replace; give one of them"


def warm_up_ends(args: Args) -> str | None:
    """A schedule with an end is longer than its warm-up."""
    m = args.megatron
    warm_up, length = m["lr_warmup_iters"] or 0, m["lr_decay_iters"]
    if m["lr_decay_style"] == "constant" or not args.num_rollout or not length or warm_up < length:
        return None
    return (
        f"got {warm_up} warm-up iterations of a schedule of {length} (lr_decay_style {m['lr_decay_style']}), so the "
        "learning rate would never decay; lower --lr-warmup-iters, or raise --num-rollout or --lr-decay-iters"
    )


def learning_rate_can_decay(args: Args) -> str | None:
    """The schedule ends below where it starts."""
    m = args.megatron
    if m["lr"] is None or not m["min_lr"] or m["min_lr"] <= m["lr"]:
        return None
    return f"got min_lr {m['min_lr']} above lr {m['lr']}, to which it could not decay; lower --min-lr or raise --lr"


def learning_rate_can_warm_up(args: Args) -> str | None:
    """A warm-up begins below where it ends; with a file of roles each is checked by itself, with its rate as lr."""
    m = args.megatron
    rates = {"lr": m["lr"]}
    if args.megatron_config_path is None and ADVANTAGES.acts(args) and CRITIC.acts(args):
        rates["critic_lr"] = args.critic_lr
    for name, rate in rates.items():
        if rate is not None and m["lr_warmup_init"] > rate:
            return (
                f"got lr_warmup_init {m['lr_warmup_init']} above {name} {rate}, to which it could not warm up; lower "
                f"--lr-warmup-init or raise --{name.replace('_', '-')}"
            )
    return None


def state_dtypes_can_be_kept(args: Args) -> str | None:
    """Dtypes that the optimizer can round to; moments span more than float16 can hold."""
    for name, allowed in OPTIMIZER_DTYPES.items():
        if (value := args.megatron[name]) not in allowed:
            return f"got {name} {value}, which the trainer cannot keep; choose {' or '.join(allowed)}"
    return None


def adam_decouples(args: Args) -> str | None:
    """The optimizer that holds its state itself decouples weight decay."""
    m = args.megatron
    if m["decoupled_weight_decay"] or not (m["optimizer_cpu_offload"] or m["use_precision_aware_optimizer"]):
        return None
    return (
        "got --no-decoupled-weight-decay with --optimizer-cpu-offload or --use-precision-aware-optimizer, which are "
        "AdamW; drop one of them"
    )


def dynamic_batches_have_a_limit(args: Args) -> str | None:
    """A micro-batch is limited by samples or by tokens."""
    if args.use_dynamic_batch_size and not args.max_tokens_per_gpu:
        return "got --max-tokens-per-gpu none for micro-batches that are filled by tokens; leave it out, or give it"
    return None


def fixed_settings_are_left_alone(args: Args) -> str | None:
    """A flag that the trainer would override silently is refused."""
    for name, (value, why) in (*FIXED.items(), *UNSUPPORTED.items()):
        if args.megatron[name] != value:
            return f"got {name} {args.megatron[name]}; the trainer always uses {value} ({why}): drop the flag"
    return None


def moments_may_begin_anew(args: Args) -> str | None:
    """State in half precision is rounded by draws that follow from the number of updates."""
    if not args.reset_optimizer_states or not args.megatron["use_precision_aware_optimizer"]:
        return None
    return (
        "got --reset-optimizer-states with --use-precision-aware-optimizer, whose rounding would draw the same numbers "
        "in every step; drop one of the two"
    )


RULES: tuple[Rule, ...] = (
    world_divides,
    tensor_parallel_divides_heads,
    only_supported_parallelism,
    fused_kernels_can_run,
    prefixes_can_be_shared,
    one_dtype,
    one_warm_up,
    warm_up_ends,
    learning_rate_can_decay,
    learning_rate_can_warm_up,
    state_dtypes_can_be_kept,
    adam_decouples,
    moments_may_begin_anew,
    dynamic_batches_have_a_limit,
    fixed_settings_are_left_alone,
)

# What is loaded and saved, and when.


def has_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint or holds one, by the names that the trainer gives them."""
    root = Path(folder)
    return any((root / name).is_file() for name in ("manifest.json", "latest.json")) or any(
        root.glob("step_*/manifest.json")
    )


def _fresh_start(load: Any, s: Any) -> Adjusted | None:
    if load and has_hf_model(load) and not has_checkpoint(load):
        return Adjusted(None, "--load is a folder in Hugging Face format: the run starts from its weights")
    same = load and s.save and Path(load).resolve() == Path(s.save).resolve()
    if not same or has_checkpoint(load):
        return None
    return Adjusted(None, "--load is --save and holds no checkpoint yet; the run starts without it")


def _start(s: Any) -> str:
    """Folder of the weights that a run without a checkpoint starts from."""
    load = s.given("load")
    if load and has_hf_model(load) and not has_checkpoint(load):
        return str(load)
    return str(s.given("ref_load") or s.hf_checkpoint)


_SAVES = Need(lambda s: s.save is not None, "--save")
_REMOVES = Need(lambda s: s.save_keep_last is not None, "--save-keep-last: all are kept anyway")
_LOADS = Need(lambda s: not s.origins.get("load", "default").startswith("default"), "--load")  # given, if dropped
_RESUMES = Need(lambda s: s.load is not None, "--load of a folder with checkpoints")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints hold everything needed to resume: weights, optimizer, RNG, data cursor, buffer, version."""

    load: str | None = opt(None, adjust=_fresh_start)
    """Checkpoint folder to resume from; if it is also --save and still empty, the run starts as without it. Or a folder
    in Hugging Face format, from whose weights the trainer starts in place of those of --ref-load or --hf-checkpoint."""
    initial_weights: str = internal(_start, "--load in Hugging Face format, else --ref-load, else --hf-checkpoint")
    """Where the policy's weights come from, unless a checkpoint is resumed."""
    ckpt_step: int | None = opt(None, needs=_RESUMES, within=STEPS_OR_NONE)
    """The step to load of --load. Default: the latest."""
    save: str | None = None
    """Checkpoint folder."""
    save_interval: int | None = opt(None, within=STEPS)
    """Steps between checkpoints; the last step is always saved when --save is given."""
    save_timeout_s: float = opt(3600.0, within=SECONDS)
    """Limit of writing one checkpoint, and of reading one, in seconds: raise it for terabytes on a slow disk."""
    async_save: bool = opt(False, needs=_SAVES)
    """Copy the state to host memory and write it while training goes on; the next save waits for the one before."""
    save_keep_last: int | None = opt(None, needs=_SAVES, within=COUNT)
    """Checkpoints to keep below --save; older ones are removed after a new one is complete. Default: all."""
    save_retain_interval: int | None = opt(None, needs=(_SAVES, _REMOVES), within=STEPS)
    """Of those that --save-keep-last would remove, keep each that ends a multiple of this many steps."""
    save_hf: str | None = None
    """Also save in HF format here; {rollout_id} in the path is replaced."""
    no_save_optim: bool = opt(False, needs=_SAVES)
    """Leave optimizer, scheduler and RNG out of checkpoints (resuming then needs --no-load-optim or --finetune)."""
    no_load_optim: bool = opt(False, needs=_LOADS)
    """Start with a fresh optimizer."""
    no_load_rng: bool = opt(False, needs=_LOADS)
    """Start with a fresh RNG."""
    finetune: bool = opt(False, needs=_LOADS)
    """Take only the weights of --load and start at step 0."""


def saving_has_a_place(args: Args) -> str | None:
    """Checkpoints go somewhere."""
    if args.save_interval is None or args.save is not None or args.save_hf is not None:
        return None
    return f"got save_interval {args.save_interval} without --save or --save-hf; say where to"


def load_holds_a_checkpoint(args: Args) -> str | None:
    """A run that is meant to continue does not start over. (An empty --load that is --save was dropped before.)"""
    if args.load is None or not Path(args.load).is_dir():
        return None
    if has_checkpoint(args.load):
        places = (Path(args.load), Path(args.load) / f"step_{args.ckpt_step or 0:06d}")
        if args.ckpt_step is None or any((place / "manifest.json").is_file() for place in places):
            return None
        there = sorted(path.parent.name for path in Path(args.load).glob("step_*/manifest.json"))
        return f"got ckpt_step {args.ckpt_step}, which {args.load} does not hold; it has {', '.join(there)}"
    if has_megatron_checkpoint(args.load):
        return f"got load {args.load}, a checkpoint of Megatron, made of pickles; {what_to_give(args.load)}"
    return (
        f"got load {args.load}, which holds no checkpoint (no manifest.json, no step_*) and no model in Hugging Face "
        "format (no config.json); give the --save folder of the run to continue"
    )


CHECKPOINT_RULES: tuple[Rule, ...] = (saving_has_a_place, load_holds_a_checkpoint)

# Which parameters are trained, adapters, the moving reference and the old policy.

_ADAPTERS = Need(lambda s: s.lora_rank is not None, "--lora-rank")
_OLD_ACTOR = (
    Need(
        lambda s: not fine_tunes(s) and not s.use_rollout_logprobs,
        "old log-probs of the trainer: loss_type policy_loss or custom_loss, without --use-rollout-logprobs",
    ),
    Need(lambda s: not s.debug_train_only, "engines, to which weights are synced"),
)
_PATTERNS = ("only_train_params_name_list", "freeze_params_name_list", "lora_target_modules")


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Patterns are regexes (`re.search`) on a parameter's Megatron name or any HF name of its table row; docs/lora.md.

    They concern the policy; a critic trains all of its parameters.
    """

    only_train_params_name_list: tuple[str, ...] | None = None
    """Train the parameters that one of these patterns matches, and freeze all others."""
    freeze_params_name_list: tuple[str, ...] | None = None
    """Freeze the parameters that one of these patterns matches."""
    lora_rank: int | None = opt(None, within=COUNT)
    """Freeze the model and train adapters of this rank on its linear layers (LoRA, arXiv:2106.09685). Exports and the
    weight sync merge them."""
    lora_alpha: float | None = opt(None, needs=_ADAPTERS, gt=0, le=1_000_000)
    """Adapters are scaled by lora_alpha / lora_rank. Default: twice the rank, so by 2 whatever the rank is."""
    lora_target_modules: tuple[str, ...] | None = opt(None, needs=_ADAPTERS)
    """Linear layers that get an adapter. Default: all of attention and MLP, experts included. The routed experts of a
    layer get one each as soon as one of them matches."""
    ref_update_interval: int | None = opt(None, needs=REFERENCE, within=STEPS)
    """Copy the policy into the reference every N rollouts. Default: the reference stays as it is."""
    keep_old_actor: bool = opt(False, needs=_OLD_ACTOR)
    """Old log-probs come from a copy of the weights that the batch was sampled under, which train_async.py has left
    behind. Default: from the weights before the update."""


def one_way_to_say_what_is_trained(args: Args) -> str | None:
    """Two lists, or a list and adapters, which freeze the model, would contradict each other."""
    ways = ("only_train_params_name_list", "freeze_params_name_list", "lora_rank")
    given = [f"--{n.replace('_', '-')}" for n in ways if getattr(args, n)]
    if len(given) < 2:
        return None
    return (
        f"got {' and '.join(given)} together, which each say what is trained; give one of them "
        "(--lora-target-modules chooses among adapters)"
    )


def patterns_are_regexes(args: Args) -> str | None:
    """Names are matched with `re.search`."""
    for name in _PATTERNS:
        for pattern in getattr(args, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"got {name} {pattern!r}, which is not a regular expression ({error}); correct it"
    return None


PARAMETER_RULES: tuple[Rule, ...] = (one_way_to_say_what_is_trained, patterns_are_regexes)
