"""The rules of `validation`, in the order in which they are reported; those of the algorithm, of files and
of rewards have modules of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from slime.settings.args import Args
from slime.settings.eval_config import eval_datasets
from slime.settings.megatron_defaults import FIXED

Rule = Callable[[Args], "str | None"]

RULES: list[Rule] = []

RULE_DEFAULT_ROLLOUT = "slime.rollout.loop.generate_rollout"


def was_given(args: Args, name: str) -> bool:
    """Whether the user gave a setting, on the command line or in a file."""
    return not args.origins.get(name, "default").startswith(("default", "derived"))


def rule(function: Rule) -> Rule:
    """Registers a rule."""
    RULES.append(function)
    return function


@rule
def counts_are_positive(args: Args) -> str | None:
    """Counts below one make no step."""
    names = (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "micro_batch_size",
        "global_batch_size",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "rollout_num_gpus_per_engine",
        "update_weights_interval",
        "reward_num_workers",
        "num_steps_per_rollout",
        "rollout_max_response_len",
        "n_samples_per_eval_prompt",
        "eval_max_response_len",
        "sglang_server_concurrency",
        "update_weight_buffer_size",
    )
    wrong = [f"{n} {getattr(args, n)}" for n in names if getattr(args, n) < 1]
    return f"got {', '.join(wrong)}, which must be at least 1; give a positive number" if wrong else None


@rule
def timeouts_are_positive(args: Args) -> str | None:
    """A limit of zero ends everything."""
    names = ("reward_timeout_s", "request_timeout_s", "engine_start_timeout_s", "weight_sync_timeout_s")
    wrong = [f"{n} {getattr(args, n)}" for n in names if getattr(args, n) <= 0]
    return f"got {', '.join(wrong)}: such a wait ends before it begins; give seconds > 0" if wrong else None


@rule
def intervals_are_positive(args: Args) -> str | None:
    """Intervals count steps."""
    wrong = [
        f"{n} {getattr(args, n)}"
        for n in (
            "save_interval",
            "save_keep_last",
            "save_retain_interval",
            "eval_interval",
            "num_epoch",
            "ref_update_interval",
        )
        if getattr(args, n) is not None and getattr(args, n) < 1
    ]
    return f"got {', '.join(wrong)}, which must be at least 1; leave it out to switch it off" if wrong else None


@rule
def batch_divides(args: Args) -> str | None:
    """Every execution is trained exactly once."""
    executions = args.rollout_batch_size * args.n_samples_per_prompt
    if args.use_dynamic_global_batch_size or args.global_batch_size < 1 or executions % args.global_batch_size == 0:
        return None
    return (
        f"got rollout_batch_size {args.rollout_batch_size} * n_samples_per_prompt {args.n_samples_per_prompt} = "
        f"{executions} executions, which global_batch_size {args.global_batch_size} does not divide; "
        "some would never be trained: change one of the three"
    )


@rule
def steps_agree(args: Args) -> str | None:
    """global_batch_size and num_steps_per_rollout say the same thing twice."""
    executions = args.rollout_batch_size * args.n_samples_per_prompt
    if args.use_dynamic_global_batch_size:
        if was_given(args, "global_batch_size"):
            return (
                "got --global-batch-size with --use-dynamic-global-batch-size, whose steps have no fixed size; "
                "give --num-steps-per-rollout"
            )
        return None
    if args.global_batch_size * args.num_steps_per_rollout == executions or executions % args.global_batch_size:
        return None
    return (
        f"got global_batch_size {args.global_batch_size} with num_steps_per_rollout {args.num_steps_per_rollout}, "
        f"but a rollout has {executions} executions; give only one of the two"
    )


@rule
def over_sampling_covers_batch(args: Args) -> str | None:
    """Fewer prompts than a batch never fill it."""
    if args.over_sampling_batch_size >= args.rollout_batch_size:
        return None
    return (
        f"got over_sampling_batch_size {args.over_sampling_batch_size} below rollout_batch_size "
        f"{args.rollout_batch_size}; raise it or leave it out"
    )


@rule
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


@rule
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


@rule
def engine_divides_heads(args: Args) -> str | None:
    """SGLang shards query heads over the ranks of an engine."""
    tp, heads = args.rollout_num_gpus_per_engine, args.megatron["num_attention_heads"]
    if args.debug_train_only or tp < 1 or heads % tp == 0:
        return None
    return f"got rollout_num_gpus_per_engine {tp}, which does not divide the {heads} attention heads; choose a divisor"


@rule
def engines_divide(args: Args) -> str | None:
    """Inference GPUs form whole engines."""
    total, each = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if args.debug_train_only or (total > 0 and each > 0 and total % each == 0):
        return None
    return (
        f"got rollout_num_gpus {total} for engines of {each}: they form no whole engines; "
        "change --rollout-num-gpus or --rollout-num-gpus-per-engine"
    )


@rule
def only_supported_parallelism(args: Args) -> str | None:
    """What this release trains, and cuts that leave whole layers and experts on every rank."""
    m = args.megatron
    wrong = [n for n in ("mtp_num_layers", "fp8", "fp4") if m[n]]
    if wrong:
        return f"got {', '.join(wrong)}, which this release does not train: leave it out"
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
    if experts and m["moe_token_dispatcher_type"] not in ("allgather", "alltoall"):
        return f"got moe_token_dispatcher_type {m['moe_token_dispatcher_type']}, which needs DeepEP; use alltoall"
    if experts and (m["tensor_model_parallel_size"] or 1) > 1 and not m["sequence_parallel"]:
        return "got --no-sequence-parallel for experts under tensor parallelism, which need it; drop the flag"
    return None


@rule
def linear_attention_is_cut_by_key_heads(args: Args) -> str | None:
    """A recurrence runs through whole sequences."""
    m = args.megatron
    if m["experimental_attention_variant"] != "gated_delta_net":
        return None
    tp, cp, heads = m["tensor_model_parallel_size"] or 1, m["context_parallel_size"] or 1, m["linear_num_key_heads"]
    if heads % tp:
        return f"got tensor_model_parallel_size {tp} for {heads} key heads of linear attention; choose a divisor"
    if cp > 1:
        return (
            f"got context_parallel_size {cp} for a model with linear attention, whose recurrence runs through a "
            "whole sequence on one rank; leave it out, or use --tensor-model-parallel-size"
        )
    return None


@rule
def kernels_of_linear_attention_can_run(args: Args) -> str | None:
    """A choice of kernels has a model that uses them, and what they need."""
    m, backend = args.megatron, args.qwen_gdn_backend
    if backend != "auto" and m["experimental_attention_variant"] != "gated_delta_net":
        return f"got qwen_gdn_backend {backend} for a model without gated delta nets; leave it out"
    if backend != "fla":
        return None
    problems = (
        ("flash-linear-attention is not installed", importlib.util.find_spec("fla") is None),
        ("the trainer runs on a CPU", args.device == "cpu"),
        ("the training dtype is float32", not (m["bf16"] or m["fp16"])),
    )
    reasons = " and ".join(reason for reason, holds in problems if holds)
    return f"got qwen_gdn_backend fla, but {reasons}; use torch, or auto, which chooses by itself" if reasons else None


@rule
def one_dtype(args: Args) -> str | None:
    """A model has one training dtype."""
    if args.megatron["fp16"] and args.megatron["bf16"]:
        return "got --fp16 and --bf16 together; give one of them"
    return None


@rule
def fixed_settings_are_left_alone(args: Args) -> str | None:
    """A flag that the trainer would override silently is refused."""
    for name, (value, why) in FIXED.items():
        if args.megatron[name] != value:
            return f"got {name} {args.megatron[name]}; the trainer always uses {value} ({why}): drop the flag"
    return None


@rule
def evaluation_can_be_sampled(args: Args) -> str | None:
    """Zero is greedy, less is nothing."""
    least = {"temperature": 0, "n_samples_per_eval_prompt": 1, "max_response_len": 1}
    wrong = [] if args.eval_temperature >= 0 else [f"eval_temperature {args.eval_temperature}"]
    wrong += [
        f"{n} {getattr(d, n)} for evaluation on {d.name}"
        for d in eval_datasets(args)
        for n, low in least.items()
        if getattr(d, n) < low
    ]
    return f"got {'; '.join(wrong)}: a temperature is 0 (greedy) or more, a count 1 or more" if wrong else None


@rule
def colocate_shares_all_gpus(args: Args) -> str | None:
    """Colocated engines live on the training GPUs."""
    num_train = args.actor_num_nodes * args.actor_num_gpus_per_node
    if not args.colocate or args.debug_train_only or args.rollout_num_gpus <= num_train:
        return None
    return (
        f"got --colocate with rollout_num_gpus {args.rollout_num_gpus} and {num_train} training GPUs: the others "
        "would be shared with nobody; leave --rollout-num-gpus out"
    )


@rule
def one_host(args: Args) -> str | None:
    """Engines and router listen on loopback."""
    if args.actor_num_nodes <= 1:
        return None
    return (
        f"got actor_num_nodes {args.actor_num_nodes}; in this release engines and router listen on loopback, so a "
        "run lives on one host: use --actor-num-gpus-per-node"
    )


@rule
def engines_of_one_gpu(args: Args) -> str | None:
    """An engine actor holds one GPU."""
    each = args.rollout_num_gpus_per_engine
    if args.device != "cuda" or args.debug_train_only or each <= 1:
        return None
    return (
        f"got rollout_num_gpus_per_engine {each}; this release starts engines of one GPU: leave it at 1 and give "
        f"--rollout-num-gpus {each} for as many engines"
    )


@rule
def engines_hold_what_tables_say(args: Args) -> str | None:
    """The weight tables know engines whose ranks cut tensors by tensor parallelism alone, unquantised."""
    if args.debug_rollout_only or args.debug_train_only:
        return None
    usual = {
        "quantization": (None,),
        "pp_size": (None, 1),
        "ep_size": (None, 1),
        "dp_size": (None, 1),
        "enable_dp_attention": (None, False),
        "enable_eplb": (None, False),
        "moe_a2a_backend": (None, "none"),
        "speculative_algorithm": (None,),
    }
    odd = [name for name, plain in usual.items() if args.sglang.get(name) not in plain]
    if not odd:
        return None
    return (
        f"got --sglang-{odd[0].replace('_', '-')} {args.sglang[odd[0]]}: the engine would hold other tensors than "
        "the trainer verifies after each sync; leave it out"
    )


@rule
def tensor_transport_needs_shared_gpus(args: Args) -> str | None:
    """CUDA IPC hands a tensor over on the GPU that holds it."""
    separate = args.device == "cuda" and not args.colocate and not args.debug_train_only and not args.debug_rollout_only
    if args.update_weight_transport != "tensor" or not separate:
        return None
    return (
        "got --update-weight-transport tensor on cuda without --colocate: a tensor is handed over on its own GPU, "
        "where no engine is; use distributed or disk"
    )


@rule
def nccl_needs_separate_gpus(args: Args) -> str | None:
    """NCCL refuses two ranks of one group on one GPU."""
    shares = args.colocate and args.device == "cuda" and args.update_weight_transport == "distributed"
    if not shares:
        return None
    return (
        "got --update-weight-transport distributed with --colocate on cuda: NCCL cannot have two ranks on one GPU; "
        "use tensor or disk"
    )


@rule
def one_warm_up(args: Args) -> str | None:
    """Two flags say how long the warm-up is."""
    fraction, iters = args.megatron["lr_warmup_fraction"], args.megatron["lr_warmup_iters"]
    if fraction is None or not was_given(args, "megatron.lr_warmup_iters"):
        return None
    return f"got lr_warmup_fraction {fraction} with lr_warmup_iters {iters}, which it would replace; give one of them"


@rule
def dynamic_batches_have_a_limit(args: Args) -> str | None:
    """A micro-batch is limited by samples or by tokens."""
    if args.use_dynamic_batch_size and not args.max_tokens_per_gpu:
        return "got --use-dynamic-batch-size without --max-tokens-per-gpu, which is its limit; give it"
    return None


@rule
def evaluation_has_data(args: Args) -> str | None:
    """Evaluation needs data, and data an interval."""
    data = args.eval_prompt_data
    if data is not None and (len(data) < 2 or len(data) % 2):
        return f"got eval_prompt_data {' '.join(data)}; give pairs: NAME FILE [NAME FILE ...]"
    if data is not None and args.eval_config is not None:
        return "got --eval-prompt-data with --eval-config, which names the datasets; give one of them"
    named = data is not None or args.eval_config is not None
    if args.eval_interval is not None and not named and args.eval_function_path is None:
        return f"got eval_interval {args.eval_interval} without --eval-prompt-data; give NAME FILE pairs"
    if args.num_rollout == 0 and not named and args.eval_function_path is None and not args.debug_rollout_only:
        return "got num_rollout 0, which only evaluates, without --eval-prompt-data; give NAME FILE pairs"
    if named and args.eval_interval is None and args.num_rollout != 0:
        return "got evaluation data without --eval-interval, so it would never be evaluated; give an interval"
    return None


@rule
def halves_are_compatible(args: Args) -> str | None:
    """Half a loop is one half."""
    if args.debug_rollout_only and args.debug_train_only:
        return "got rollout-only and train-only together, so nothing would run; give one of them"
    part = args.load_debug_rollout_data_subsample
    if part is not None and not (0 < part <= 1 and args.load_debug_rollout_data):
        return f"got load_debug_rollout_data_subsample {part}; give 0 < part <= 1 with --load-debug-rollout-data"
    return None


@rule
def lengths_fit(args: Args) -> str | None:
    """Prompt and response fit into the context."""
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        return (
            f"got rollout_max_prompt_len {prompt} above rollout_max_context_len {context} - 1; no token would be left"
        )
    return None
