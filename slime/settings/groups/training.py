"""Settings for the trainer (batches, trained parameters, checkpoints), and rules about its limitations."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.settings.conditions import (
    ADVANTAGES,
    CRITIC,
    NO_CHECKPOINT,
    REFERENCE,
    fine_tunes,
    has_hf_model,
    has_megatron_checkpoint,
    hf_origin,
    is_only_converted,
    is_trained_by_megatron,
    what_to_give,
    why_instead,
)
from slime.settings.fields import Adjusted, ChosenBy, Need, Passed, Rule, derived, internal, opt, refuse_if
from slime.settings.flags import BOUND, COUNT, EXECUTIONS, SECONDS, SEED, STEPS, STEPS_OR_NONE, TOKENS
from slime.settings.groups.hooks import DEFAULT_ROLLOUT
from slime.settings.megatron import FIXED, RECOMPUTED, UNSUPPORTED
from slime.settings.schema import kernels_problem_of, model_type_of, prefix_problem_of

if TYPE_CHECKING:
    from slime.settings.args import Args


def _executions(s: Any) -> int:
    return int(s.rollout_batch_size * s.n_samples_per_prompt)


def _num_given_steps(s: Any) -> int | None:
    """Returns the optimizer steps per rollout if the user set a positive number, else None."""
    steps = s.given("num_steps_per_rollout")
    return steps if steps is not None and steps > 0 else None


def _why_batch(s: Any) -> str:
    steps = _num_given_steps(s)
    if steps is None:
        return "rollout_batch_size * n_samples_per_prompt, one step per rollout"
    return f"{_executions(s)} executions // {steps} steps per rollout"


LEAST_ROOM = 2048
"""Lower limit for the default number of tokens in a micro-batch."""


def _fills_by_tokens(s: Any) -> bool | None:
    """Returns True, unless --micro-batch-size is set or a pipeline needs many micro-batches to fill its stages."""
    if s.was_given("micro_batch_size") or (s.megatron["pipeline_model_parallel_size"] or 1) > 1:
        return None
    return True


def longest_sample(s: Any) -> int:
    """Returns the maximum number of tokens of one sample, according to the length limits."""
    sampled = s.rollout_max_total_response_len or s.rollout_max_response_len
    return int(s.rollout_max_context_len or (s.rollout_max_prompt_len or 0) + sampled)


def _longest_shown(s: Any) -> str:
    without = "" if s.rollout_max_context_len or s.rollout_max_prompt_len else " without the prompt, which has no limit"
    return f"{longest_sample(s)} tokens{without}"


def _room(s: Any) -> int | None:
    if not s.use_dynamic_batch_size:
        return None
    ranks = s.megatron["context_parallel_size"] or 1
    return max(math.ceil(longest_sample(s) / ranks), LEAST_ROOM)


def _has_common_beginnings(s: Any) -> bool:
    """Returns whether a micro-batch may hold several samples of one group.

    Users' functions and recorded rollouts may produce more samples than --n-samples-per-prompt, and in fine-tuning
    each turn may be a sample.
    """
    if not s.use_dynamic_batch_size and s.micro_batch_size == 1:
        return False
    if s.load_debug_rollout_data or s.rollout_function_path != DEFAULT_ROLLOUT:
        return True
    return bool(s.n_samples_per_prompt > 1 or s.custom_generate_function_path is not None)


_SEVERAL = Need(
    _has_common_beginnings,
    "several samples of a prompt in a micro-batch: --n-samples-per-prompt above 1 (or your own function that makes "
    "more, or fine-tuning on conversations), and --use-dynamic-batch-size or --micro-batch-size above 1",
)
_DYNAMIC = Need(lambda s: s.use_dynamic_batch_size, "--use-dynamic-batch-size")
_COUNTED = Need(lambda s: not s.use_dynamic_batch_size, "--no-use-dynamic-batch-size")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Batching, seed and the trainer's self-checks. Model, optimizer and schedule are Megatron's own flags."""

    global_batch_size: int = derived(
        lambda s: _executions(s) // (_num_given_steps(s) or 1), _why_batch, within=EXECUTIONS, first="Batch"
    )
    """Executions (prompts x samples) per optimizer step. Default: executions per rollout // num_steps_per_rollout."""
    num_steps_per_rollout: int = derived(
        lambda s: max(_executions(s) // max(s.global_batch_size, 1), 1),
        lambda s: f"{_executions(s)} executions // {max(s.global_batch_size, 1)}",
        within=COUNT,
    )
    """Optimizer steps per generated batch. Default: 1, or what global_batch_size implies."""
    micro_batch_size: int = opt(1, needs=_COUNTED, within=COUNT)
    """Samples per forward pass, packed without padding, if micro-batches are not filled by token count."""
    use_dynamic_batch_size: bool = derived(
        _fills_by_tokens, "neither --micro-batch-size nor pipeline stages", default=False
    )
    """Fill micro-batches up to max_tokens_per_gpu, which does not change the gradient. Default: on, unless
    micro_batch_size is set or there are pipeline stages."""
    max_tokens_per_gpu: int | None = derived(
        _room,
        lambda s: f"the longest sample that the limits allow, {_longest_shown(s)}, and at least {LEAST_ROOM}",
        needs=_DYNAMIC,
        within=TOKENS,
        first="Length",
    )
    """Maximum tokens in a micro-batch that is filled by token count; a longer sample gets a separate micro-batch.
    Default: the longest sample (rollout_max_context_len, else prompt plus response limit) / context-parallel ranks, at
    least 2048."""
    use_dynamic_global_batch_size: bool = derived(
        lambda s: True if s.load_debug_rollout_data_subsample is not None else None,
        "--load-debug-rollout-data-subsample changes the number of samples",
        default=False,
    )
    """Accept any number of executions per rollout, and train on them in num_steps_per_rollout optimizer steps of nearly
    equal size."""
    balance_data: bool = derived(lambda s: s.balance_by_flops or None, "--balance-by-flops", default=False)
    """Balance FLOPs over data-parallel ranks."""
    balance_by_flops: bool = False
    """Alias of --balance-data, which always balances by FLOPs."""
    reset_optimizer_states: bool = False
    """Reset the optimizer's moments to zero at the start of each step. Its master weights and schedule are kept."""
    use_prefix_sharing: bool = opt(False, needs=_SEVERAL)
    """Compute the common prefix of a prompt's samples (prompt and common turns) once per micro-batch. Log-probs, loss
    weights and gradient do not change. max_tokens_per_gpu counts these tokens once. Refused for models with recurrent
    state (Qwen3-Next, Qwen3.5) or sparse attention (GLM-5)."""
    log_probs_chunk_size: int = opt(1024, ge=-1, le=100_000_000)
    """Number of tokens whose full-vocabulary logits are in memory at a time; -1: all."""
    kernels: Literal["auto", "reference", "fused", "flash4"] = "auto"
    """Implementation of norms, rotary embedding, activations and attention. auto: GPU kernels where they can run.
    reference: plain PyTorch everywhere, for comparisons. fused: GPU kernels, or an error if a kernel cannot run.
    flash4: like auto, with FlashAttention 4 (experimental). The log of rank 0 and slime doctor show the choices and the
    reasons."""
    true_on_policy: bool = False
    """Trainer and engines compute with the same kernels, so that both give every token the same log-prob, bit for bit.
    Any difference ends the run (mismatch_limit 0). For Qwen3, Qwen3-MoE (with use_rollout_routing_replay) and Llama
    models, without tensor parallelism."""
    seed: int = opt(1234, within=SEED)
    """Seed for initialisation and dropout."""
    model_family: str | None = opt(
        None,
        chosen_from="slime.models:FAMILIES",
        chosen_by=ChosenBy(lambda s: model_type_of(s.hf_checkpoint), "a checkpoint of model_type"),
    )
    """Your own model family, registered for the checkpoint's model_type: pkg.module, path/to/file.py or
    pkg.module:ClassName. Default: slime's families."""
    mismatch_limit: float | None = derived(
        lambda s: 0.0 if s.true_on_policy else s.ci_train_rollout_logprob_abs_diff_threshold if s.ci_test else None,
        "--true-on-policy, or --ci-train-rollout-logprob-abs-diff-threshold with --ci-test",
        default=None,
        names=("--logprob-gap-limit",),
        within=BOUND,
    )
    """Maximum difference between trainer and engine log-probs. Default: depends on the dtype; 0 with true_on_policy."""


def _dtype(s: Any) -> str:
    return "float16" if s.megatron["fp16"] else "bfloat16" if s.megatron["bf16"] else "float32"


def _attention_backend(s: Any) -> str | None:
    return "triton" if s.true_on_policy and s.device == "cuda" else None


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
    Passed("megatron", "bf16", lambda s: False if s.megatron["fp16"] else None, "--fp16 is set"),
    Passed("megatron", "params_dtype", _dtype, _DTYPE),
    Passed("megatron", "pipeline_dtype", _dtype, _DTYPE),
    Passed("sglang", "dtype", _dtype, "training dtype (auto would serve float32 weights as float16)"),
    Passed("sglang", "attention_backend", _attention_backend, "--true-on-policy replaces the kernels of this backend"),
    Passed("megatron", "train_iters", _num_iters, "num_rollout * num_steps_per_rollout"),
    Passed("megatron", "lr_decay_iters", lambda s: max(_num_iters(s), 1), "train_iters"),
    Passed("megatron", "lr_warmup_iters", _warm_up, "lr_warmup_fraction * lr_decay_iters"),
    Passed("megatron", "start_weight_decay", lambda s: s.megatron["weight_decay"], "weight_decay"),
    Passed("megatron", "end_weight_decay", lambda s: s.megatron["weight_decay"], "weight_decay"),
    Passed("megatron", "sequence_parallel", _needs_sequence_parallel, "experts under tensor parallelism need it"),
)

# --- Limitations of the trainer

OPTIMIZER_VALUES = {
    "optimizer": ("adam", "muon"),
    "muon_coefficient_type": ("quintic", "simple"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
    "muon_scalar_optimizer": ("adam",),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_tp_mode": ("duplicated", "distributed", "blockwise"),
    "main_params_dtype": ("float32", "float16"),
    "exp_avg_dtype": ("float32", "bfloat16"),
    "exp_avg_sq_dtype": ("float32", "bfloat16"),
}
"""Setting of the optimizer -> the values that the trainer supports."""


def world_divides(args: Args) -> str | None:
    m, world = args.megatron, args.actor_num_nodes * args.actor_num_gpus_per_node
    tp, pp, cp, ep = (
        m[f"{name}_parallel_size"] or 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    if min(tp, pp, cp, ep) >= 1 and world % (tp * pp * cp) == 0 and world % (ep * pp) == 0:
        return None
    return (
        f"tensor_model_parallel_size {tp}, pipeline_model_parallel_size {pp}, context_parallel_size {cp} and "
        f"expert_model_parallel_size {ep} do not divide the {world} training GPUs, which must be a multiple of TP * "
        "PP * CP and of EP * PP; change --actor-num-gpus-per-node or a size"
    )


def tensor_parallel_divides_heads(args: Args) -> str | None:
    m = args.megatron
    tp = max(m["tensor_model_parallel_size"], 1)
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if m[name] % tp:
            return (
                f"tensor_model_parallel_size {tp} does not divide {name} {m[name]} of the checkpoint; choose a divisor"
            )
    return None


def only_supported_parallelism(args: Args) -> str | None:
    m = args.megatron
    pp, vp = m["pipeline_model_parallel_size"] or 1, m["virtual_pipeline_model_parallel_size"] or 1
    if vp > 1 and pp == 1:
        return (
            f"virtual_pipeline_model_parallel_size {vp} needs pipeline stages to interleave; set "
            "--pipeline-model-parallel-size, or drop it"
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
            f"pipeline_model_parallel_size {pp} and virtual_pipeline_model_parallel_size {vp} do not divide the "
            f"{m['num_layers']} layers; choose divisors, or set --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers"
        )
    ep, experts = m["expert_model_parallel_size"] or 1, m["num_moe_experts"] or 0
    if ep > 1 and (not experts or experts % ep):
        return f"expert_model_parallel_size {ep} does not divide the {experts} experts; choose a divisor"
    if experts and (m["tensor_model_parallel_size"] or 1) > 1 and not m["sequence_parallel"]:
        return "--no-sequence-parallel does not work with MoE models under tensor parallelism; drop the flag"
    return None


def fused_kernels_can_run(args: Args) -> str | None:
    """Fused kernels need a GPU, and those for attention need half precision."""
    if args.kernels not in ("fused", "flash4"):
        return None
    reasons = (
        ("the trainer runs on a CPU", args.device == "cpu"),
        ("the training dtype is float32", not (args.megatron["bf16"] or args.megatron["fp16"])),
    )
    found = " and ".join(reason for reason, holds in reasons if holds)
    return f"kernels {args.kernels} cannot be used: {found}; use auto" if found else None


def trainer_can_be_true_on_policy(args: Args) -> str | None:
    """Checks the trainer's settings; `engines_can_be_true_on_policy` checks the engines'."""
    if not args.true_on_policy:
        return None
    if args.model_family is not None:
        return "--true-on-policy does not work with --model-family; drop one of the two"
    if problem := kernels_problem_of(args.hf_checkpoint):
        return f"--true-on-policy does not work with this model: {problem}; drop the flag"
    m = args.megatron
    reasons = (
        (
            "tensor_model_parallel_size above 1 sums products in a different order",
            (m["tensor_model_parallel_size"] or 1) > 1,
        ),
        (
            "with --lora-rank, engines get merged weights, whose products are rounded differently",
            args.lora_rank is not None,
        ),
        ("--fp32-residual-connection has a higher precision than the engines", bool(m["fp32_residual_connection"])),
        (
            "--kernels reference sums rows in an order that depends on the batch",
            args.kernels == "reference" and args.device == "cuda",
        ),
        ("training in float32 has no attention kernel on a GPU", args.device == "cuda" and _dtype(args) == "float32"),
        (
            "--moe-token-dispatcher-type allgather sums experts in a different order",
            (m["expert_model_parallel_size"] or 1) > 1 and m["moe_token_dispatcher_type"] == "allgather",
        ),
    )
    if m["num_moe_experts"] and not args.use_rollout_routing_replay:
        return (
            "--true-on-policy needs the experts that the engine chose, because two experts can have equal scores; add "
            "--use-rollout-routing-replay"
        )
    found = next((reason for reason, holds in reasons if holds), None)
    return None if found is None else f"--true-on-policy does not work here: {found}; drop one of the two"


def prefixes_can_be_shared(args: Args) -> str | None:
    problem = prefix_problem_of(args.hf_checkpoint) if args.use_prefix_sharing else None
    return None if problem is None else f"--use-prefix-sharing does not work with this model: {problem}; drop the flag"


def context_ranks_can_split_heads(args: Args) -> str | None:
    """Checks `--cp-comm-type a2a`."""
    m = args.megatron
    tp, cp = m["tensor_model_parallel_size"] or 1, m["context_parallel_size"] or 1
    if m["cp_comm_type"] != "a2a" or cp == 1:
        return None
    instead = "use --cp-comm-type all_gather"
    for name in ("num_attention_heads", "num_query_groups"):
        if m[name] % (tp * cp):
            return (
                f"--cp-comm-type a2a splits heads over tensor- and context-parallel ranks, but {tp * cp} ranks do not "
                f"divide {name} {m[name]} of the checkpoint; {instead}"
            )
    if problem := prefix_problem_of(args.hf_checkpoint):
        return f"--cp-comm-type a2a does not work with this model: {problem}; {instead}"
    return None


def only_known_modules_are_recomputed(args: Args) -> str | None:
    others = sorted({*(args.megatron["recompute_modules"] or ())} - {*RECOMPUTED})
    if not others or args.megatron["recompute_granularity"] != "selective":
        return None
    return (
        f"recompute_modules {', '.join(others)} does not exist in this trainer, whose layers recompute "
        f"{', '.join(RECOMPUTED)}; choose from these, or use --recompute-granularity full"
    )


def one_warm_up(args: Args) -> str | None:
    fraction, iters = args.megatron["lr_warmup_fraction"], args.megatron["lr_warmup_iters"]
    if fraction is None or not args.was_given("megatron.lr_warmup_iters"):
        return None
    return f"lr_warmup_fraction {fraction} and lr_warmup_iters {iters} both set the warm-up; set only one of them"


def warm_up_ends(args: Args) -> str | None:
    m = args.megatron
    warm_up, length = m["lr_warmup_iters"] or 0, m["lr_decay_iters"]
    if m["lr_decay_style"] == "constant" or not args.num_rollout or not length or warm_up < length:
        return None
    return (
        f"the warm-up of {warm_up} iterations fills the schedule of {length} (lr_decay_style {m['lr_decay_style']}), "
        "so the learning rate would never decay; lower --lr-warmup-iters, or raise --num-rollout or --lr-decay-iters"
    )


def _decays_upwards(s: Any) -> bool:
    rate, floor = s.megatron["lr"], s.megatron["min_lr"]
    return rate is not None and bool(floor) and floor > rate


def learning_rate_can_warm_up(args: Args) -> str | None:
    """The warm-up must not start above the learning rate.

    With --megatron-config-path, each role is resolved and checked separately, with its own rate as `lr`.
    """
    m = args.megatron
    rates = {"lr": m["lr"]}
    if args.megatron_config_path is None and ADVANTAGES.acts(args) and CRITIC.acts(args):
        rates["critic_lr"] = args.critic_lr
    for name, rate in rates.items():
        if rate is not None and m["lr_warmup_init"] > rate:
            return (
                f"lr_warmup_init {m['lr_warmup_init']} is above {name} {rate}, so the rate could not warm up; lower "
                f"--lr-warmup-init or raise --{name.replace('_', '-')}"
            )
    return None


def optimizer_can_run(args: Args) -> str | None:
    """Refuses dtypes that optimizer state cannot be rounded to. Moments exceed the range of float16."""
    for name, allowed in OPTIMIZER_VALUES.items():
        if (value := args.megatron.get(name, allowed[0])) not in allowed:  # no Megatron version has all these names
            return f"{name} is {value}, which the trainer does not support; choose {' or '.join(allowed)}"
    return None


def _couples_weight_decay(s: Any) -> bool:
    m = s.megatron
    decoupled = m["optimizer_cpu_offload"] or m["use_precision_aware_optimizer"] or m["optimizer"] == "muon"
    return bool(decoupled and not m["decoupled_weight_decay"])


def fp8_can_train(args: Args) -> str | None:
    """Refuses FP8 recipes other than the trainer's."""
    m = args.megatron
    if m["fp8"] is None:
        return None
    if m["fp8"] != "e4m3" or m["fp8_recipe"] != "blockwise":
        return (
            f"--fp8-format {m['fp8']} --fp8-recipe {m['fp8_recipe']} needs Transformer Engine, which the trainer does "
            "not use; it multiplies in FP8 with one scale per 128 entries: --fp8-format e4m3 --fp8-recipe blockwise"
        )
    if args.device == "cuda" and not m["bf16"]:
        return "--fp8-format needs --bf16 on a GPU: its kernels read and write bfloat16"
    if args.true_on_policy:
        return "--fp8-format does not work with --true-on-policy, whose products are in bfloat16; drop one of them"
    return None


def fixed_settings_are_left_alone(args: Args) -> str | None:
    """Refuses other values of fixed settings, which the trainer would silently override."""
    for name, (value, why) in (*FIXED.items(), *UNSUPPORTED.items()):
        if args.megatron[name] != value:
            return f"{name} is {args.megatron[name]}, but the trainer always uses {value} ({why}); drop the flag"
    return None


RULES: tuple[Rule, ...] = (
    world_divides,
    tensor_parallel_divides_heads,
    only_supported_parallelism,
    fused_kernels_can_run,
    trainer_can_be_true_on_policy,
    fp8_can_train,
    prefixes_can_be_shared,
    context_ranks_can_split_heads,
    only_known_modules_are_recomputed,
    refuse_if(lambda s: s.megatron["fp16"] and s.megatron["bf16"], "--fp16 contradicts --bf16; set only one of them"),
    one_warm_up,
    warm_up_ends,
    refuse_if(
        _decays_upwards,
        "min_lr {s.megatron[min_lr]} is above lr {s.megatron[lr]}, so the rate could not decay; lower --min-lr or "
        "raise --lr",
    ),
    learning_rate_can_warm_up,
    optimizer_can_run,
    refuse_if(
        _couples_weight_decay,
        "--no-decoupled-weight-decay does not work with --optimizer muon, --optimizer-cpu-offload and "
        "--use-precision-aware-optimizer, which decouple it; drop one of them",
    ),
    refuse_if(
        lambda s: (
            s.megatron["optimizer"] == "muon"
            and (s.megatron["optimizer_cpu_offload"] or s.megatron["use_precision_aware_optimizer"])
        ),
        "--optimizer muon keeps its state in float32 on the GPU; drop --optimizer-cpu-offload and "
        "--use-precision-aware-optimizer, or use --optimizer adam",
    ),
    refuse_if(  # rounding is seeded with the number of updates, which a reset sets to zero
        lambda s: s.reset_optimizer_states and s.megatron["use_precision_aware_optimizer"],
        "--reset-optimizer-states does not work with --use-precision-aware-optimizer, which would then round with the "
        "same random numbers in every step; drop one of the two",
    ),
    refuse_if(
        lambda s: s.use_dynamic_batch_size and not s.max_tokens_per_gpu,
        "--max-tokens-per-gpu is none, but --use-dynamic-batch-size needs a limit; drop the flag, or set a number",
    ),
    fixed_settings_are_left_alone,
)

# --- Checkpoints


def has_checkpoint(folder: str) -> bool:
    """Returns whether the folder is a slime checkpoint or contains one."""
    root = Path(folder)
    own = any((root / name).is_file() for name in ("manifest.json", "latest.json"))
    return own or any(root.glob("step_*/manifest.json"))


def _fresh_start(load: Any, s: Any) -> Adjusted | None:
    if load and has_hf_model(load) and not has_checkpoint(load):
        return Adjusted(None, "--load is a folder in Hugging Face format: the run starts from its weights")
    if load and is_only_converted(load) and not has_checkpoint(load):
        return Adjusted(None, why_instead(load, s.initial_weights))
    if not load or has_checkpoint(load) or is_trained_by_megatron(load):
        return None
    if s.save and Path(load).resolve() == Path(s.save).resolve():
        return Adjusted(None, "--load is --save and has no checkpoint yet; the run starts without it")
    if s.ckpt_step is None and _is_empty(Path(load)):
        return Adjusted(None, f"{load} {NO_CHECKPOINT}")
    return None


def _is_empty(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _start(s: Any) -> str:
    """Returns the folder of the initial weights, for a run that does not resume a checkpoint."""
    load = s.given("load")
    if load and not has_checkpoint(load) and (found := load if has_hf_model(load) else hf_origin(load)) is not None:
        return str(found)
    return str((s.given("ref_load") and s.ref_load) or s.hf_checkpoint)


_SAVES = Need(lambda s: s.save is not None, "--save")
_REMOVES = Need(lambda s: s.save_keep_last is not None, "--save-keep-last; without it, all checkpoints are kept")
# Not `s.load`, which is None if `_fresh_start` dropped it.
_LOADS = Need(lambda s: not s.origins.get("load", "default").startswith("default"), "--load")
_RESUMES = Need(lambda s: s.load is not None, "--load with a checkpoint folder")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints, which contain everything needed to resume: weights, optimizer, RNG, data cursor, buffer, version."""

    load: str | None = opt(None, adjust=_fresh_start, first="Save and resume")
    """Checkpoint folder to resume from. If it is empty or does not exist, the run starts at step 0. Or a folder in
    Hugging Face format, whose weights the trainer starts from instead of those of --ref-load or --hf-checkpoint."""
    initial_weights: str = internal(_start, "--load in Hugging Face format, else --ref-load, else --hf-checkpoint")
    """Folder of the policy's initial weights, if no checkpoint is resumed."""
    ckpt_step: int | None = opt(None, needs=_RESUMES, within=STEPS_OR_NONE)
    """Step of the checkpoint to load from --load. Default: the latest."""
    save: str | None = opt(None, first="Save and resume")
    """Checkpoint folder."""
    save_interval: int | None = opt(None, within=STEPS, first="Save and resume")
    """Steps between checkpoints; the last step is always saved when --save is given."""
    save_timeout_s: float = opt(3600.0, within=SECONDS)
    """Time limit for writing or reading a checkpoint, in seconds; raise it for terabytes on a slow disk."""
    async_save: bool = opt(False, needs=_SAVES)
    """Copy the state to host memory and write it while training continues. The next save waits for the previous one."""
    save_keep_last: int | None = opt(None, needs=_SAVES, within=COUNT)
    """Number of checkpoints to keep in --save; older ones are deleted after a new one is complete. Default: all."""
    save_retain_interval: int | None = opt(None, needs=(_SAVES, _REMOVES), within=STEPS)
    """Also keep the checkpoint of every N-th step, which --save-keep-last would delete."""
    save_hf: str | None = opt(None, first="Save and resume")
    """Also export in Hugging Face format to this folder. {rollout_id} in the path is replaced by the step."""
    no_save_optim: bool = opt(False, needs=_SAVES)
    """Omit optimizer, scheduler and RNG from checkpoints; resuming then needs --no-load-optim or --finetune."""
    no_load_optim: bool = opt(False, needs=_LOADS)
    """Start with a fresh optimizer."""
    no_load_rng: bool = opt(False, needs=_LOADS)
    """Start with a fresh RNG."""
    finetune: bool = opt(False, needs=_LOADS)
    """Load only the weights from --load, and start at step 0."""


def load_holds_a_checkpoint(args: Args) -> str | None:
    """--load must contain a checkpoint, so that a run never silently starts over.

    `_fresh_start` has already dropped a --load without a checkpoint that equals --save, is empty or does not exist.
    """
    if args.strict and NO_CHECKPOINT in (why := args.origins.get("load", "")):
        return f"--strict refuses a run that was meant to resume: load {why.removeprefix('derived: ')}; drop --load"
    if args.load is None or not Path(args.load).is_dir():
        return None
    if has_checkpoint(args.load):
        places = (Path(args.load), Path(args.load) / f"step_{args.ckpt_step or 0:06d}")
        if args.ckpt_step is None or any((place / "manifest.json").is_file() for place in places):
            return None
        there = sorted(path.parent.name for path in Path(args.load).glob("step_*/manifest.json"))
        return f"load {args.load} has no checkpoint for ckpt_step {args.ckpt_step}; choose one of {', '.join(there)}"
    if has_megatron_checkpoint(args.load):
        return f"load {args.load} is a pickled Megatron checkpoint; {what_to_give(args.load)}"
    return (
        f"load {args.load} has no checkpoint (no manifest.json, no step_*) and no model in Hugging Face format (no "
        "config.json); pass the --save folder of the run to continue"
    )


CHECKPOINT_RULES: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.save_interval is not None and s.save is None and s.save_hf is None,
        "save_interval {s.save_interval} needs --save or --save-hf; set one of them",
    ),
    load_holds_a_checkpoint,
)

# --- Trained parameters, adapters, the moving reference and the old policy

_ADAPTERS = Need(lambda s: s.lora_rank is not None, "--lora-rank")
_OLD_ACTOR = (
    Need(
        lambda s: not fine_tunes(s) and not s.use_rollout_logprobs,
        "old log-probs of the trainer: loss_type policy_loss or custom_loss, without --use-rollout-logprobs",
    ),
    Need(lambda s: not s.debug_train_only, "engines that receive weights"),
)
_PATTERNS = ("only_train_params_name_list", "freeze_params_name_list", "lora_target_modules")


@dataclass(frozen=True, kw_only=True)
class ParameterSettings:
    """Trained parameters and adapters (docs/lora.md), the moving reference and the old policy.

    Patterns are regexes (`re.search`) on a parameter's Megatron name or any of its Hugging Face names. They apply only
    to the policy; a critic trains all its parameters.
    """

    only_train_params_name_list: tuple[str, ...] | None = None
    """Train only the parameters that match one of these patterns."""
    freeze_params_name_list: tuple[str, ...] | None = None
    """Freeze the parameters that match one of these patterns."""
    lora_rank: int | None = opt(None, within=COUNT)
    """Freeze the model and train adapters of this rank on its linear layers (LoRA, arXiv:2106.09685). Exports and
    weight syncs merge them."""
    lora_alpha: float | None = derived(
        lambda s: None if s.lora_rank is None else 2.0 * s.lora_rank,
        "2 x lora_rank",
        needs=_ADAPTERS,
        gt=0,
        le=100_000,
    )
    """Adapters are scaled by lora_alpha / lora_rank. Default: twice the rank, so the scale is always 2."""
    lora_target_modules: tuple[str, ...] | None = opt(None, needs=_ADAPTERS)
    """Linear layers that get an adapter. Default: all of attention and MLP, including experts. If one routed expert of
    a layer matches, all routed experts of that layer get an adapter."""
    ref_update_interval: int | None = opt(None, needs=REFERENCE, within=STEPS)
    """Copy the policy into the reference every N rollouts. Default: the reference does not change."""
    keep_old_actor: bool = opt(False, needs=_OLD_ACTOR)
    """Compute old log-probs with a copy of the weights that sampled the batch; in train_async.py they are older than
    the weights being trained. Default: use the weights before the update."""


def one_way_to_say_what_is_trained(args: Args) -> str | None:
    ways = ("only_train_params_name_list", "freeze_params_name_list", "lora_rank")
    given = [f"--{n.replace('_', '-')}" for n in ways if getattr(args, n)]
    if len(given) < 2:
        return None
    return (
        f"{' and '.join(given)} both select what is trained; set only one of them (--lora-target-modules selects the "
        "layers with adapters)"
    )


def patterns_are_regexes(args: Args) -> str | None:
    for name in _PATTERNS:
        for pattern in getattr(args, name) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{name} {pattern!r} is not a regular expression ({error}); correct it"
    return None


PARAMETER_RULES: tuple[Rule, ...] = (
    one_way_to_say_what_is_trained,
    patterns_are_regexes,
    refuse_if(
        lambda s: s.lora_rank is not None and s.lora_rank > s.megatron["hidden_size"],
        "lora_rank {s.lora_rank} is above the hidden_size {s.megatron[hidden_size]} of the checkpoint, so adapters "
        "would be larger than their layers; lower it",
    ),
)
