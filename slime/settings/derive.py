"""What is computed from other settings, and why. One function per subject; each records its reason for --explain."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.core.ids import new_run_id
from slime.core.loading import load_object
from slime.settings.data_files import count_rows
from slime.settings.groups.hooks import HookArgs
from slime.settings.groups.off_policy import chosen_corrections


class Draft:
    """Settings on their way to `Args`: `values` of slime, `megatron`, `sglang`, and an origin for each."""

    def __init__(self, values: dict[str, Any], megatron: dict[str, Any], sglang: dict[str, Any]) -> None:
        self.values, self.megatron, self.sglang = values, megatron, sglang
        self.given: set[str] = set()
        """Names that the user gave (slime's plain, others as owner.name)."""
        self.origins: dict[str, str] = {}

    def derive(self, name: str, value: Any, why: str) -> None:
        """Sets `name` unless the user gave it."""
        if name not in self.given:
            self.values[name] = value
            self.origins[name] = f"derived: {why}"

    def derive_megatron(self, name: str, value: Any, why: str) -> None:
        """Sets Megatron's `name` unless the user gave it."""
        if f"megatron.{name}" not in self.given:
            self.megatron[name] = value
            self.origins[f"megatron.{name}"] = f"derived: {why}"

    def derive_sglang(self, name: str, value: Any, why: str) -> None:
        """Sets SGLang's `name` unless the user gave it."""
        if f"sglang.{name}" not in self.given:
            self.sglang[name] = value
            self.origins[f"sglang.{name}"] = f"derived: {why}"


def _device(draft: Draft) -> None:
    if draft.values["device"] in (None, "auto"):
        has_gpu = bool(glob.glob("/dev/nvidia[0-9]*"))
        draft.given.discard("device")
        why = "/dev/nvidia* exists" if has_gpu else "no /dev/nvidia* on this machine"
        draft.derive("device", "cuda" if has_gpu else "cpu", why)


def _dtype(draft: Draft) -> None:
    megatron = draft.megatron
    if megatron["fp16"] and "megatron.bf16" not in draft.given:
        megatron["bf16"], draft.origins["megatron.bf16"] = False, "derived: --fp16 was given"
    dtype = "float16" if megatron["fp16"] else "bfloat16" if megatron["bf16"] else "float32"
    for name in ("params_dtype", "pipeline_dtype"):
        draft.derive_megatron(name, dtype, "training dtype (--bf16 default, --fp16, --no-bf16)")
    draft.derive_sglang("dtype", dtype, "training dtype (auto would serve float32 as float16)")


def _debug(draft: Draft) -> None:
    v = draft.values
    if v["num_rollout"] == 0:
        draft.derive("rollout_batch_size", 1, "--num-rollout 0 generates no step")
    if v["load_debug_rollout_data"]:
        draft.derive("debug_train_only", True, "--load-debug-rollout-data replays rollouts")
    if v["load_debug_rollout_data_subsample"] is not None:
        why = "--load-debug-rollout-data-subsample changes the number of samples"
        draft.derive("use_dynamic_global_batch_size", True, why)
    if v["dump_details"]:
        for kind, ending in (("rollout", "jsonl.zst"), ("train", "npz")):
            path = Path(v["dump_details"]) / f"{kind}_data" / f"{{rollout_id}}.{ending}"
            draft.derive(f"save_debug_{kind}_data", str(path), "--dump-details")


def _placement(draft: Draft) -> None:
    v = draft.values
    num_train = v["actor_num_nodes"] * v["actor_num_gpus_per_node"]
    if v["debug_rollout_only"] and v["colocate"]:
        v["colocate"], draft.origins["colocate"] = False, "derived: --debug-rollout-only starts no trainer"
    if v["colocate"]:
        draft.derive("rollout_num_gpus", num_train, "--colocate: the training GPUs")
    else:
        draft.derive("rollout_num_gpus", v["rollout_num_gpus_per_engine"], "one engine")
    both = v["offload"] or (v["colocate"] and v["device"] == "cuda")
    why = "--offload" if v["offload"] else "--colocate on cuda" if both else "training and inference do not share a GPU"
    if v["colocate"] and not both:
        why = "on a CPU there is no device memory to hand over"
    draft.derive("offload_train", both, why)
    draft.derive("offload_rollout", both, why)
    draft.derive("run_id", new_run_id(), "time and a random number")
    draft.derive("run_dir", f"runs/{v['run_id']}", "the run id")


def _batches(draft: Draft) -> None:
    v = draft.values
    executions = (v["rollout_batch_size"] or 0) * v["n_samples_per_prompt"]
    steps = v["num_steps_per_rollout"]
    if steps is not None and steps > 0:
        draft.derive("global_batch_size", executions // steps, f"{executions} executions // {steps} steps per rollout")
    else:
        draft.derive("global_batch_size", executions, "rollout_batch_size * n_samples_per_prompt, one step per rollout")
        size = max(v["global_batch_size"], 1)
        draft.derive("num_steps_per_rollout", max(executions // size, 1), f"{executions} executions // {size}")
    draft.derive("over_sampling_batch_size", v["rollout_batch_size"], "rollout_batch_size")
    if v["custom_reward_post_process_path"]:
        why = "--custom-reward-post-process-path returns the rewards to train on"
        draft.derive("rewards_normalization", False, why)


BY_GROUP_STD = ("grpo", "gspo", "cispo", "sapo")
"""Estimators whose rewards may be divided by a standard deviation."""


def _algorithm(draft: Draft) -> None:
    v = draft.values
    estimator = v["advantage_estimator"]
    own = estimator in ("gspo", "cispo", "sapo")
    draft.derive("policy_loss", estimator if own else "ppo_clip", f"advantage_estimator {estimator}")
    per_token = v["calculate_per_token_loss"]
    why = "--calculate-per-token-loss" if per_token else "mean over executions"
    draft.derive("loss_aggregation", "token_mean" if per_token else "sequence_mean", why)
    draft.derive("loss_constant_length", v["rollout_max_response_len"], "rollout_max_response_len")
    draft.derive("eps_clip_high", v["eps_clip"], "eps_clip")
    draft.derive("cispo_clip_low", 1.0 - v["eps_clip"], "1 - eps_clip")
    draft.derive("cispo_clip_high", 1.0 + v["eps_clip_high"], "1 + eps_clip_high")
    if v["n_samples_per_prompt"] == 1 and estimator in BY_GROUP_STD:
        draft.derive("grpo_std_normalization", False, "a group of one sample has no standard deviation")
    scale = "group" if v["grpo_std_normalization"] else "none"
    draft.derive("advantage_scale", scale, f"grpo_std_normalization {v['grpo_std_normalization']}")
    whitened = estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    draft.derive("normalize_advantages", whitened, f"advantage_estimator {estimator}")
    draft.derive("off_policy_corrections", chosen_corrections(SimpleNamespace(**v)), "the switches")
    draft.derive("critic_lr", draft.megatron["lr"], "lr")
    if estimator == "ppo":
        draft.derive("critic_load", v["hf_checkpoint"], "the critic starts from the policy's weights")


FULLY_ASYNC = "slime.rollout.fully_async.generate_rollout_fully_async"
"""The public name of `--fully-async`; its worker outlives a call, so that no function of one step could be it."""


def _fully_async(draft: Draft) -> None:
    v = draft.values
    refused = "fully_async" in draft.given and not v["fully_async"]
    if v["rollout_function_path"] == FULLY_ASYNC and not refused:
        draft.given.discard("rollout_function_path")
        draft.derive("rollout_function_path", HookArgs.rollout_function_path, f"{FULLY_ASYNC} means --fully-async")
        draft.derive("fully_async", True, f"--rollout-function-path {FULLY_ASYNC}")
    _schedule(draft)
    if not v["fully_async"]:
        return
    draft.derive("max_weight_staleness", 2, "--fully-async")
    bound, why = v["max_weight_staleness"], "--fully-async publishes while groups are half done"
    draft.derive("partial_rollout", True, why)
    ahead = min(bound or 0, 1) + 1  # with more, long responses get old before they are finished
    most = ahead * (v["rollout_batch_size"] or 0)
    draft.derive("max_groups_in_flight", most, f"{ahead} * rollout_batch_size, max_weight_staleness {bound}")
    mode = v["pause_generation_mode"]
    if mode != "abort":
        draft.derive_sglang("disable_radix_cache", True, f"--pause-generation-mode {mode}: prefixes are of old weights")
    if mode == "in_place":  # the versions of a sample then say whether its keys and values are of several
        draft.derive_sglang("chunked_prefill_size", -1, "--pause-generation-mode in_place: prompts are read at once")
    corrected = v["use_rollout_logprobs"] or v["rejection_level"] or v["custom_loss_function_path"]
    if not corrected and v["loss_type"] == "policy_loss" and v["compute_advantages_and_returns"]:
        draft.derive("use_tis", True, "--fully-async trains on tokens of older weights")


def _schedule(draft: Draft) -> None:
    """`rollout_schedule` and `fully_async` follow from each other; else the rollout function says the schedule."""
    v = draft.values
    name, path = v["rollout_schedule"], v["rollout_function_path"]
    if name is not None:
        continuous: bool = load_object("slime.rollout.schedules:SCHEDULES").get(name).continuous
        draft.derive("fully_async", continuous, f"--rollout-schedule {name}")
    elif v["fully_async"]:
        draft.derive("rollout_schedule", "fully_async", "--fully-async")
    elif path == HookArgs.rollout_function_path:
        draft.derive("rollout_schedule", "step", "the default rollout function")
    else:
        draft.derive("rollout_schedule", "function", f"--rollout-function-path {path}")


TEACHER_HOOK = "slime.rollout.workflows.teacher.judge"
"""Sample hook that asks the server of `--opd-teacher-url`."""
SFT_ROLLOUT = "slime.rollout.sft.generate_rollout"
"""Rollout function of supervised fine-tuning: rows become samples, no engine."""


def _sft(draft: Draft) -> None:
    v = draft.values
    dotted = v["rollout_function_path"].replace(":", ".")
    if dotted in (SFT_ROLLOUT, FULLY_ASYNC, HookArgs.rollout_function_path):
        v["rollout_function_path"] = dotted  # rules know the built-in ones by one spelling
    if v["loss_type"] != "sft_loss":
        return
    why = "--loss-type sft_loss learns from the data, not from rewards"
    draft.derive("rollout_function_path", SFT_ROLLOUT, why)
    draft.derive("compute_advantages_and_returns", False, why)
    evaluates = v["eval_prompt_data"] is not None or v["eval_config"] is not None
    if v["rollout_function_path"] == SFT_ROLLOUT and not evaluates:
        draft.derive("debug_train_only", True, "supervised fine-tuning without evaluation needs no engine")


def _teacher(draft: Draft) -> None:
    v = draft.values
    if v["opd_teacher_url"] is not None:
        hooks = tuple(path for path in v["rollout_sample_hook_path"] if path != TEACHER_HOOK)
        v["rollout_sample_hook_path"] = (*hooks, TEACHER_HOOK)
        draft.origins["rollout_sample_hook_path"] = "derived: --opd-teacher-url asks the teacher about each sample"


def _length(draft: Draft) -> None:
    v = draft.values
    if v["num_rollout"] is None and v["num_epoch"] is not None and v["prompt_data"] and v["rollout_batch_size"]:
        rows = count_rows(v["prompt_data"])
        per_epoch = rows // v["rollout_batch_size"]
        why = f"num_epoch {v['num_epoch']} * ({rows} rows // rollout_batch_size {v['rollout_batch_size']})"
        draft.derive("num_rollout", v["num_epoch"] * per_epoch, why)
    if v["num_rollout"] is not None:
        iters = v["num_rollout"] * (v["num_steps_per_rollout"] or 1)
        draft.derive_megatron("train_iters", iters, "num_rollout * num_steps_per_rollout")
        if draft.megatron["lr_decay_iters"] is None:
            draft.derive_megatron("lr_decay_iters", max(iters, 1), "train_iters")
    fraction = draft.megatron["lr_warmup_fraction"]
    if fraction is not None and draft.megatron["lr_decay_iters"] and "megatron.lr_warmup_iters" not in draft.given:
        warmup = math.ceil(fraction * draft.megatron["lr_decay_iters"])
        draft.derive_megatron("lr_warmup_iters", warmup, "lr_warmup_fraction * lr_decay_iters")
    for name in ("start_weight_decay", "end_weight_decay"):
        draft.derive_megatron(name, draft.megatron["weight_decay"], "weight_decay")


def _experts(draft: Draft) -> None:
    if draft.megatron["num_moe_experts"] and (draft.megatron["tensor_model_parallel_size"] or 1) > 1:
        draft.derive_megatron("sequence_parallel", True, "experts under tensor parallelism need it")


def _evaluation(draft: Draft) -> None:
    v = draft.values
    if v["rollout_max_context_len"] is not None:
        draft.derive("rollout_max_prompt_len", v["rollout_max_context_len"] - 1, "rollout_max_context_len - 1")
    same = {
        "eval_input_key": "input_key",
        "eval_label_key": "label_key",
        "eval_tool_key": "tool_key",
        "eval_reward_key": "reward_key",
        "eval_temperature": "rollout_temperature",
        "eval_top_p": "rollout_top_p",
        "eval_top_k": "rollout_top_k",
        "eval_max_response_len": "rollout_max_response_len",
        "eval_max_prompt_len": "rollout_max_prompt_len",
    }
    for name, source in same.items():
        draft.derive(name, v[source], f"same as {source}")


def _weight_sync(draft: Draft) -> None:
    v = draft.values
    transport = v["update_weight_transport"]
    if transport in (None, "auto"):
        draft.given.discard("update_weight_transport")
        separate = v["device"] == "cuda" and not v["colocate"]
        why = "trainer and engines have GPUs of their own" if separate else "trainer and engines share memory"
        draft.derive("update_weight_transport", "distributed" if separate else "tensor", why)
    elif transport == "nccl":
        v["update_weight_transport"] = "distributed"
        draft.origins["update_weight_transport"] += " (nccl is an alias of distributed)"
    if v["update_weight_transport"] == "disk":
        draft.derive("update_weight_disk_dir", str(Path(v["run_dir"]) / "weights"), "disk transport, below run_dir")


def _checkpoint(draft: Draft) -> None:
    v = draft.values
    same = v["load"] and v["save"] and Path(v["load"]).resolve() == Path(v["save"]).resolve()
    if same and not has_checkpoint(v["load"]):
        v["load"] = None
        draft.origins["load"] = "derived: --load is --save and holds no checkpoint yet; starting from --hf-checkpoint"
    if v["ref_load"] is None and (v["use_kl_loss"] or v["kl_coef"]):
        draft.derive("ref_load", v["hf_checkpoint"], "a KL needs a reference: the initial weights")


def has_checkpoint(folder: str) -> bool:
    """Whether a folder is a checkpoint or holds one, by the names that the trainer gives them."""
    root = Path(folder)
    return any((root / name).is_file() for name in ("manifest.json", "latest.json")) or any(
        root.glob("step_*/manifest.json")
    )


DERIVATIONS: tuple[Callable[[Draft], None], ...] = (
    _device,
    _dtype,
    _debug,
    _sft,
    _placement,
    _batches,
    _fully_async,
    _algorithm,
    _experts,
    _teacher,
    _length,
    _evaluation,
    _weight_sync,
    _checkpoint,
)
"""In order: later ones read what earlier ones set."""


def json_line(value: Any) -> str:
    """A value on one line, as --explain shows it."""
    return json.dumps(value, default=list) if isinstance(value, (dict, list, tuple)) else str(value)
