"""Rules that involve several groups of settings. Rules of a single group are in the group's module.

They reject combinations that cannot work in one or both loops, lengths beyond the model's context, and free keys that
nothing reads. They take microseconds, because they read only config.json and the first row of the data.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.hf_config import context_length_of, read_hf_config
from slime.core.registry import load_object
from slime.settings import conditions
from slime.settings.conditions import (
    estimator_of,
    fine_tunes,
    has_policy_term,
    minimises_custom_loss,
    minimises_policy_loss,
    samples_all_tokens,
)
from slime.settings.custom_yaml import FREE, NEAR
from slime.settings.data_files import check_data, files_of, first_row_names, scheme_of, split_spec
from slime.settings.eval_config import eval_datasets
from slime.settings.fields import Rule, refuse_if
from slime.settings.flags import EXECUTIONS
from slime.settings.groups.data import reads_prompt_data
from slime.settings.groups.evaluation import UNNAMED
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC, SFT_ROLLOUT
from slime.settings.groups.rollout import SCHEDULES
from slime.settings.hook_contracts import runs_user_code

if TYPE_CHECKING:
    from slime.settings.args import Args

# --- The two loops


def _one_schedule(args: Args) -> str | None:
    name = args.rollout_schedule
    if load_object(SCHEDULES).get(name).continuous != args.fully_async:
        switch = "--fully-async" if args.fully_async else "--no-fully-async"
        return f"--rollout-schedule {name} contradicts {switch} (or the function that implies it); drop one of the two"
    if name != "function" and args.rollout_function_path != DEFAULT_ROLLOUT:
        return (
            f"--rollout-schedule {name} does not call --rollout-function-path {args.rollout_function_path}; only "
            "--rollout-schedule function does. Drop one of the two"
        )
    return None


def _worker_has_its_own_ways(args: Args) -> str | None:
    if not args.fully_async:
        return None
    own = args.was_given("rollout_function_path")
    if not own and not fine_tunes(args):
        return None
    return (
        f"--fully-async does not work with {'rollout_function_path' if own else 'loss_type sft_loss'}: its worker "
        "replaces the rollout function; drop one of the two"
    )


def _bounds_are_possible(args: Args) -> str | None:
    bound, most = args.max_weight_staleness, args.max_groups_in_flight
    if most is not None and most < args.rollout_batch_size:
        return (
            f"max_groups_in_flight {most} is below rollout_batch_size {args.rollout_batch_size}, so no batch would "
            "ever be full; raise it"
        )
    if args.fully_async and bound is not None and bound < (interval := args.update_weights_interval) - 1:
        return (
            f"max_weight_staleness {bound} is too low for update_weights_interval {interval}: engines are "
            f"{interval - 1} versions behind before a weight sync, so a step would wait forever; raise it"
        )
    return None


_BOTH: tuple[Rule, ...] = (
    refuse_if(
        lambda s: s.rollout_function_path == FULLY_ASYNC,
        "--no-fully-async contradicts the fully async --rollout-function-path; drop one of the two",
    ),
    _one_schedule,
    _worker_has_its_own_ways,
    _bounds_are_possible,
    refuse_if(
        lambda s: s.pause_generation_mode == "in_place" and s.sglang["chunked_prefill_size"] != -1,
        "--sglang-chunked-prefill-size does not work with --pause-generation-mode in_place: several weight versions "
        "could prefill one prompt, which the sample would not record; drop it or use retract",
    ),
    refuse_if(
        lambda s: s.fully_async and s.keep_old_actor,
        "--keep-old-actor keeps one old policy, but with --fully-async several weight versions sample a batch; use "
        "--use-tis or --use-rollout-logprobs",
    ),
)
SYNC_RULES: tuple[Rule, ...] = (
    *_BOTH,
    refuse_if(
        lambda s: s.fully_async,
        "--fully-async does not work with train.py, which alternates generation and training; use train_async.py",
    ),
)
"""Rules of train.py."""
IDLE_IN_SYNC: Mapping[str, tuple[Any, str]] = {
    "update_weights_interval": (1, "which needs train_async.py; train.py syncs weights after every step"),
    "keep_old_actor": (False, "which needs train_async.py; train.py trains a batch on the weights that sampled it"),
}
"""Setting without effect in train.py -> (its default, why)."""
ASYNC_RULES: tuple[Rule, ...] = (
    *_BOTH,
    refuse_if(
        lambda s: s.colocate,
        "--colocate does not work with train_async.py, which generates while it trains, so both need the GPU; drop "
        "--colocate or use train.py",
    ),
    refuse_if(
        lambda s: not s.fully_async and s.max_weight_staleness is not None,
        "--max-weight-staleness does not work with train_async.py, which samples a batch before the weights that it "
        "will train exist; add --fully-async or use train.py",
    ),
)
"""Rules of train_async.py."""

# --- Free keys of --custom-config-path


def free_keys_have_a_reader(args: Args) -> str | None:
    """A free key needs a user function that can read it; otherwise it is probably a misspelt setting."""
    found = {name.removeprefix(FREE): text for name, text in args.idle.items() if name.startswith(FREE)}
    if not found or runs_user_code(args):
        return None
    name, text = next(iter(found.items()))
    value, _, near = text.partition(NEAR)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"{args.custom_config_path} has {name}: {value}, but the run has none; {hint}correct it, or put your own "
        "settings below `custom`"
    )


# --- Lengths beyond the model's context, for which engines refuse requests


def engine_context(args: Args) -> int | None:
    """Returns the maximum number of tokens of prompt plus response that an engine accepts.

    Returns None if the limit is unknown, or if engines truncate longer requests.
    """
    if args.sglang.get("allow_auto_truncate"):
        return None
    given: int | None = args.sglang.get("context_length")
    return context_length_of(read_hf_config(args.hf_checkpoint)) if given is None else int(given)


def own_lengths(args: Args) -> bool:
    """Returns whether slime's own generate function sends the requests, so that the length settings apply."""
    return args.rollout_function_path == DEFAULT_ROLLOUT and not args.custom_generate_function_path


def responses_fit_the_model(args: Args) -> str | None:
    if args.debug_train_only or fine_tunes(args) or not own_lengths(args):
        return None
    context = engine_context(args)
    if context is None:
        return None
    problem = None
    if args.num_rollout:
        problem = _too_long("rollout", args.rollout_max_context_len, args.rollout_max_response_len, "", context)
    if problem is not None or (args.eval_interval is None and args.num_rollout):
        return problem
    found = [
        _too_long("eval", one.max_context_len, one.max_response_len, f" for evaluation on {one.name}", context)
        for one in eval_datasets(args)
        if not one.custom_generate_function_path
    ]
    return next((problem for problem in found if problem is not None), None)


def _too_long(kind: str, conversation: int | None, answer: int, of_what: str, context: int) -> str | None:
    """Reports a limit beyond `context`.

    `kind` is rollout or eval. `conversation` limits prompt plus response, `answer` the response, both in tokens.
    """
    if conversation is not None:  # the response ends at this limit, whatever `answer` is
        name, value, wrong = f"{kind}_max_context_len", conversation, conversation > context
    else:
        name, value, wrong = f"{kind}_max_response_len", answer, answer >= context
    if not wrong:
        return None
    return (
        f"{name} {value}{of_what} is too long: this model supports at most {context} tokens of prompt plus response "
        "(config.json, or --sglang-context-length), and engines refuse longer requests; lower "
        f"--{name.replace('_', '-')}"
    )


# --- Batches, losses, data and folders


def _executions(s: Any) -> int:
    return int(s.rollout_batch_size * s.n_samples_per_prompt)


def _leaves_executions(s: Any) -> bool:
    return not s.use_dynamic_global_batch_size and s.global_batch_size > 0 and _executions(s) % s.global_batch_size != 0


def a_step_is_finite(settings: Any) -> str | None:
    """Limits the number of executions per step. Checked before other settings are derived from that number."""
    most = int(EXECUTIONS.le or 0)
    if _executions(settings) <= most:
        return None
    return f"{_product(settings)} executions per step is above the limit of {most}; lower one of the two"


def _product(s: Any) -> str:
    prompts, samples = s.rollout_batch_size, s.n_samples_per_prompt
    return f"rollout_batch_size {prompts} * n_samples_per_prompt {samples} = {prompts * samples}"


def _steps_contradict(s: Any) -> bool:
    """Returns whether batch size and number of steps disagree. `_leaves_executions` covers uneven division."""
    if s.use_dynamic_global_batch_size or s.global_batch_size < 1 or _leaves_executions(s):
        return False
    return bool(s.global_batch_size * s.num_steps_per_rollout != _executions(s))


def sampled_distribution_is_trained(args: Args) -> str | None:
    """The trainer computes log-probs under the top-p and top-k distribution, engines under the full one."""
    if fine_tunes(args) or samples_all_tokens(args):
        return None
    names = ("use_rollout_logprobs", "use_kl_loss", "custom_loss_function_path", "custom_advantage_function_path")
    wrong = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n)]
    if not wrong:
        return None
    return (
        f"{', '.join(wrong)} does not work with rollout_top_p {args.rollout_top_p} and rollout_top_k "
        f"{args.rollout_top_k}: the trainer computes log-probs over the truncated distribution, but the engine and "
        "the reference over the full one; drop top-p and top-k, or use --kl-coef for a reference"
    )


def _trains_samples(s: Any) -> bool:
    return s.num_rollout != 0 and not s.debug_rollout_only and not fine_tunes(s)


def stop_strings_have_text(args: Args) -> str | None:
    given = [("--rollout-stop", args.rollout_stop)]
    given += [(f"stop of evaluation data {one.name}", one.stop) for one in eval_datasets(args)]
    name = next((name for name, strings in given if "" in (strings or ())), None)
    if name is None:
        return None
    return f"{name} contains an empty string, which would end every response at its first token; drop that string"


def something_is_trained(args: Args) -> str | None:
    """Without advantages the policy loss is zero, so only a KL loss or an entropy bonus can train."""
    trains = args.num_rollout != 0 and minimises_policy_loss(args) and not args.debug_rollout_only
    if not trains or args.compute_advantages_and_returns or args.entropy_coef:
        return None
    if args.use_kl_loss and args.kl_loss_coef:
        return None
    return (
        "--disable-compute-advantages-and-returns does not work with loss_type policy_loss: all advantages would be "
        "zero and nothing would be trained; drop it, or set --use-kl-loss --kl-loss-coef or --entropy-coef"
    )


def advantages_can_differ_from_zero(args: Args) -> str | None:
    own_groups = args.rollout_function_path != DEFAULT_ROLLOUT or args.custom_convert_samples_to_train_data_path
    trains = args.num_rollout != 0 and has_policy_term(args)
    if args.n_samples_per_prompt != 1 or not trains or args.debug_rollout_only or own_groups:
        return None
    if not (estimator_of(args).compares_within_group and args.components["rewards_normalization"]):
        return None
    if args.use_opd or args.custom_advantage_function_path or args.rollout_data_postprocess_path:
        return None
    return (
        "n_samples_per_prompt 1 does not work with rewards_normalization: a group's mean is the reward itself, so "
        "every advantage is zero and nothing is trained; raise --n-samples-per-prompt, or set "
        "--disable-rewards-normalization"
    )


def rewards_are_defined(args: Args) -> str | None:
    """A policy needs rewards or a teacher. Sampling without training needs a grader too, because it stores rewards."""
    learns = minimises_policy_loss(args) or args.rollout_function_path == DEFAULT_ROLLOUT
    needs = learns and not args.debug_train_only and args.num_rollout != 0 and args.opd_teacher_url is None
    if args.rm_type == "remote_rm" and not args.rm_url:
        return "--rm-type remote_rm needs --rm-url; set it to the grader's URL"
    if args.group_rm and not args.custom_rm_path:
        return "--group-rm needs --custom-rm-path: the built-in graders score one sample at a time"
    own = args.custom_rm_path or args.custom_generate_function_path or args.rollout_sample_hook_path
    if not needs or args.rm_type or own:  # your function may set `sample.reward`; an unscored sample is an error later
        return None
    if args.rollout_function_path != DEFAULT_ROLLOUT or not reads_prompt_data(args):
        return None
    if first_row_names(args.prompt_data or "", "rm_type"):
        return None
    return (
        "nothing would score the samples; set --rm-type or --custom-rm-path, or set sample.reward in "
        "--custom-generate-function-path or --rollout-sample-hook-path"
    )


def prompts_exist(args: Args) -> str | None:
    if args.prompt_data is not None or args.num_rollout == 0 or args.load_debug_rollout_data:
        return None
    if args.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT) or not reads_prompt_data(args):
        return None
    return "there are no prompts; set --prompt-data to a .jsonl or .parquet file, or set --data-source-path"


def files_exist(args: Args) -> str | None:
    data = [] if args.prompt_data is None else [("prompt_data", args.prompt_data, False)]
    return _missing([*data, *_held_out(args)])


def held_out_files_exist(settings: Any) -> str | None:
    """Held-out files must exist, even if the run never evaluates them."""
    try:
        return _missing(_held_out(settings))
    except ConfigError as error:
        return str(error)


def _held_out(settings: Any) -> list[tuple[str, str, bool]]:
    unnamed = settings.eval_config is None and len(settings.eval_prompt_data or ()) == 2
    return [
        ("eval_prompt_data" if unnamed and d.name == UNNAMED else f"evaluation data {d.name}", d.path, True)
        for d in eval_datasets(settings)
    ]


def _missing(data: list[tuple[str, str, bool]]) -> str | None:
    """Reports the first dataset that does not exist. `data`: (name for messages, spec, whether it is held out)."""
    for name, spec, held_out in data:
        try:
            check_data(spec, held_out=held_out)
        except ConfigError as error:
            return str(error) if str(error).startswith("--") else f"{name}: {error}"
    return None


def export_replaces_nothing_else(args: Args) -> str | None:
    """An export replaces its whole folder, so nothing else may be in it."""
    if args.save_hf is None:
        return None
    try:
        exports = _export_folders(args.save_hf)
    except ValueError as error:
        return (
            f"save_hf {args.save_hf} is not valid: braces can only contain {{rollout_id}}, or {{rollout_id:06d}}, not "
            f"{error}; correct it"
        )
    for name, path in _in_use(args):
        if exports.fullmatch(os.path.realpath(path)):
            return (
                f"save_hf {args.save_hf} is or contains {name} {path}: an export replaces its whole folder and would "
                "delete it; use a separate folder"
            )
    return None


_ANY = "\ue000"
"""Placeholder for the step number while a path is resolved; no folder has this name."""


def _export_folders(template: str) -> re.Pattern[str]:
    """Returns a pattern for the folders that exports replace, and for all paths below them.

    Raises `ValueError` if `template` has braces other than `{rollout_id}`.
    """
    for _, name, width, conversion in string.Formatter().parse(template):
        if name is not None and (
            name != "rollout_id" or conversion or not re.fullmatch(r"(0?\d{1,2}d?)?", width or "")
        ):
            raise ValueError(f"{{{name}{':' if width else ''}{width}}}")
    absolute = os.path.realpath(re.sub(r"\{rollout_id[^{}]*\}", _ANY, template).replace("{{", "{").replace("}}", "}"))
    return re.compile(re.escape(absolute.rstrip("/")).replace(re.escape(_ANY), r"\d+") + r"(/.*)?", re.DOTALL)


_RECORDS = ("save_debug_rollout_data", "save_debug_train_data")


def records_replace_nothing_else(args: Args) -> str | None:
    """Writing a record overwrites its path, so that path must be neither an input nor the other record."""
    for name in _RECORDS:
        if (template := getattr(args, name)) is None:
            continue
        own = re.escape(os.path.realpath(template)).replace(re.escape("{rollout_id}"), r"(\d+|eval_[^/]*)")
        for other, path in _in_use(args):
            if other != name and re.fullmatch(own, os.path.realpath(path)):
                return f"{name} {template} would overwrite {other} {path}; use a different path"
    return None


def _in_use(args: Args) -> list[tuple[str, str]]:
    """Returns (name for messages, path) of every file and folder that a run reads or writes."""
    names = (
        *("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load", "custom_config_path", "eval_config"),
        *("load", "save", "run_dir", "update_weight_disk_dir", "load_debug_rollout_data", *_RECORDS),
    )
    found = [(name, str(getattr(args, name))) for name in names if getattr(args, name, None)]
    found = [(name, path.replace("{rollout_id}", "0")) for name, path in found]
    found += [(name, os.path.join(path, "step_000000")) for name, path in found if name in ("load", "save")]
    data = [*([args.prompt_data] if args.prompt_data else []), *(d.path for d in eval_datasets(args))]
    found += [("the data", str(path)) for spec in data if scheme_of(spec) is None for path in files_of(spec)]
    return [*found, ("the working folder", os.getcwd())]


RULES: tuple[Rule, ...] = (
    refuse_if(
        _leaves_executions,
        lambda s: (
            f"global_batch_size {s.global_batch_size} does not divide the executions of a step ({_product(s)}), so "
            "some would never be trained; change one of the three"
        ),
    ),
    refuse_if(
        lambda s: s.use_dynamic_global_batch_size and s.was_given("global_batch_size"),
        "--global-batch-size contradicts --use-dynamic-global-batch-size, whose steps have no fixed size; use "
        "--num-steps-per-rollout",
    ),
    refuse_if(
        _steps_contradict,
        lambda s: (
            f"global_batch_size {s.global_batch_size} contradicts num_steps_per_rollout {s.num_steps_per_rollout}: a "
            f"rollout has {_executions(s)} executions; set only one of the two"
        ),
    ),
    sampled_distribution_is_trained,
    refuse_if(
        lambda s: s.rollout_top_k == 1 and _trains_samples(s),
        "rollout_top_k 1 does not work with training: all samples of a prompt would be the same greedy response, and "
        "a token without an alternative has no gradient; raise --rollout-top-k (--eval-top-k 1 is fine)",
    ),
    stop_strings_have_text,
    something_is_trained,
    advantages_can_differ_from_zero,
    refuse_if(
        lambda s: minimises_custom_loss(s) != bool(s.custom_loss_function_path),
        "--loss-type custom_loss and --custom-loss-function-path need each other; set both or neither",
    ),
    rewards_are_defined,
    prompts_exist,
    files_exist,
    *conditions.RULES,
    refuse_if(
        lambda s: s.start_rollout_id is not None and s.load is not None and not s.finetune,
        "start_rollout_id {s.start_rollout_id} does not work with load {s.load}, because the checkpoint determines "
        "the next step; drop it, or add --finetune to load only the weights",
    ),
    export_replaces_nothing_else,
    records_replace_nothing_else,
    responses_fit_the_model,
    free_keys_have_a_reader,
)

# --- Likely mistakes: valid settings that usually do not train what the user expects

LONG_RUN_STEPS = 20
"""A run with this many steps needs checkpoints before its last step."""
LEAST_LORA_LR = 1e-5
"""Adapters need about ten times the learning rate of full fine-tuning (Schulman et al., LoRA Without Regret, 2025)."""


def _trains(s: Any) -> bool:
    return s.num_rollout != 0 and not s.debug_rollout_only


def learning_rate_is_zero(args: Args) -> str | None:
    if not _trains(args) or args.megatron["lr"] != 0:
        return None
    return "lr is 0, so the weights never change; set --lr above 0, unless you only want to measure"


def warm_up_outlasts_the_run(args: Args) -> str | None:
    warm_up, steps = args.megatron["lr_warmup_iters"] or 0, args.megatron["train_iters"]
    if not _trains(args) or not steps or warm_up <= steps:
        return None
    return (
        f"lr_warmup_iters {warm_up} is above the {steps} optimizer steps of the run, so the learning rate never "
        f"reaches lr {args.megatron['lr']:g}; lower --lr-warmup-iters, or raise --num-rollout"
    )


def adapters_learn_slowly(args: Args) -> str | None:
    rate = args.megatron["lr"]
    if not _trains(args) or args.lora_rank is None or not rate or rate >= LEAST_LORA_LR:
        return None
    return (
        f"lr {rate:g} is a learning rate for full fine-tuning, but --lora-rank {args.lora_rank} trains adapters, "
        "which need about ten times as much and would hardly change; raise --lr, for example to 1e-4"
    )


def kl_loss_has_no_weight(args: Args) -> str | None:
    if not _trains(args) or not minimises_policy_loss(args) or not args.use_kl_loss:
        return None
    if args.kl_loss_coef or args.was_given("kl_loss_coef"):
        return None
    return (
        "--use-kl-loss without --kl-loss-coef only logs the KL to the reference and does not keep the policy close to "
        "it; set --kl-loss-coef (0 if intended), or drop --use-kl-loss"
    )


def teacher_scores_at_another_temperature(args: Args) -> str | None:
    if not _trains(args) or not args.use_opd or args.opd_teacher_url is None or args.rollout_temperature == 1.0:
        return None
    return (
        f"--opd-teacher-url scores tokens at temperature 1, but the student samples at rollout_temperature "
        f"{args.rollout_temperature}, so it learns to match at that temperature the teacher's distribution at 1; set "
        "--rollout-temperature 1, unless this is intended"
    )


def grader_is_replaced(args: Args) -> str | None:
    if args.custom_rm_path is None or not args.was_given("rm_type"):
        return None
    return (
        f"--rm-type {args.rm_type} grades nothing, because --custom-rm-path {args.custom_rm_path} grades every sample; "
        "drop one of the two"
    )


def only_the_end_is_saved(args: Args) -> str | None:
    if not _trains(args) or args.save is None or args.save_interval is not None or args.num_rollout < LONG_RUN_STEPS:
        return None
    return (
        f"--save without --save-interval saves only after the last of {args.num_rollout} steps, so an interrupted run "
        f"loses everything; set --save-interval ({args.num_rollout} if intended)"
    )


_LONG = 10**12
"""Assumed number of rows of a dataset, which decides whether two slices have rows in common."""


def evaluates_training_data(args: Args) -> str | None:
    if not _trains(args) or args.eval_interval is None or args.prompt_data is None or scheme_of(args.prompt_data):
        return None
    trained, rows = set(map(os.path.realpath, files_of(args.prompt_data))), _rows(args.prompt_data)
    for one in eval_datasets(args):
        files = [] if scheme_of(one.path) else files_of(one.path)
        both = next((file for file in files if os.path.realpath(file) in trained), None)
        there = _rows(one.path)
        if both is None or rows.start >= there.stop or there.start >= rows.stop:
            continue
        return (
            f"evaluation data {one.name} reads rows of {both} that --prompt-data trains on, so its score says nothing "
            "about new prompts; use other rows, for example the slices FILE@[:-200] and FILE@[-200:]"
        )
    return None


def _rows(spec: str) -> range:
    return range(*split_spec(spec)[1].indices(_LONG))


LIKELY_MISTAKES: tuple[Rule, ...] = (
    learning_rate_is_zero,
    warm_up_outlasts_the_run,
    adapters_learn_slowly,
    kl_loss_has_no_weight,
    teacher_scores_at_another_temperature,
    grader_is_replaced,
    only_the_end_is_saved,
    evaluates_training_data,
)


def likely_mistakes(args: Args) -> list[str]:
    """Returns a warning for each setting that probably does not do what the user wants."""
    return [text for rule in LIKELY_MISTAKES if (text := rule(args)) is not None]
