"""What the trainer cannot do: layouts of ranks, kernels, and settings of Megatron that it fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.settings.conditions import ADVANTAGES, CRITIC
from slime.settings.families import prefix_problem_of
from slime.settings.group import Rule
from slime.settings.megatron_defaults import FIXED, UNSUPPORTED

if TYPE_CHECKING:
    from slime.settings.args import Args

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
