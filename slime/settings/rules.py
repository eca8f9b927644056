"""Rules across groups of settings: what they cannot do together, what the two loops cannot do, lengths that no model
has, and free keys that nobody reads. Rules of one group stand beside it.

Files are looked at, none but config.json and the first row of the data is opened: these checks cost microseconds.
"""

from __future__ import annotations

import os
import re
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
)
from slime.settings.custom_yaml import FREE, NEAR
from slime.settings.data_files import check_data, files_of, first_row_names, scheme_of
from slime.settings.eval_config import eval_datasets
from slime.settings.fields import Rule
from slime.settings.flags import EXECUTIONS
from slime.settings.groups.data import reads_prompt_data
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, FULLY_ASYNC, SFT_ROLLOUT
from slime.settings.groups.rollout import SCHEDULES
from slime.settings.hooks import CONTRACTS

if TYPE_CHECKING:
    from slime.settings.args import Args

# The rules of the two loops, train.py and train_async.py, and of what generates while they train.


def sync_rules() -> tuple[Rule, ...]:
    """What train.py refuses on top."""
    return (*_BOTH, _sync_trainer_syncs_every_step, _sync_trains_what_sampled, _sync_waits_for_its_batch)


def _sync_trainer_syncs_every_step(args: Args) -> str | None:
    if args.update_weights_interval == 1:
        return None
    return (
        f"got update_weights_interval {args.update_weights_interval} with train.py, which syncs weights after every "
        "step; drop it or use train_async.py"
    )


def _sync_trains_what_sampled(args: Args) -> str | None:
    if not args.keep_old_actor:
        return None
    return (
        "got --keep-old-actor with train.py, which trains every batch on the weights that sampled it; "
        "drop it or use train_async.py"
    )


def async_rules() -> tuple[Rule, ...]:
    """What train_async.py refuses on top."""
    return (*_BOTH, _async_is_not_colocated, _one_step_off_has_no_bound)


def _async_is_not_colocated(args: Args) -> str | None:
    if not args.colocate:
        return None
    return (
        "got --colocate with train_async.py, which generates while it trains; both need the GPU: "
        "drop --colocate or use train.py"
    )


def _sync_waits_for_its_batch(args: Args) -> str | None:
    if not args.fully_async:
        return None
    return "got --fully-async with train.py, which generates and trains in turn; use train_async.py"


def _one_step_off_has_no_bound(args: Args) -> str | None:
    if args.fully_async or args.max_weight_staleness is None:
        return None
    return (
        "got --max-weight-staleness with train_async.py, which takes a batch before the weights that it will train "
        "exist; add --fully-async or use train.py"
    )


def _worker_is_not_refused(args: Args) -> str | None:
    if args.rollout_function_path != FULLY_ASYNC:
        return None
    return "got --no-fully-async with --rollout-function-path of its worker; drop one of the two"


def _one_schedule(args: Args) -> str | None:
    name = args.rollout_schedule
    if load_object(SCHEDULES).get(name).continuous != args.fully_async:
        switch = "--fully-async" if args.fully_async else "--no-fully-async"
        return f"got --rollout-schedule {name} and {switch} (or the function that means it); drop one of the two"
    if name != "function" and args.rollout_function_path != DEFAULT_ROLLOUT:
        return (
            f"got --rollout-schedule {name} with --rollout-function-path {args.rollout_function_path}, which only the "
            "schedule function calls; drop one of the two"
        )
    return None


def _worker_has_its_own_ways(args: Args) -> str | None:
    if not args.fully_async:
        return None
    wrong = [n for n in ("rollout_function_path", "over_sampling_batch_size") if args.was_given(n)]
    if not wrong and not fine_tunes(args):
        return None
    return (
        f"got --fully-async with {' and '.join(wrong) or 'loss_type sft_loss'}: its worker is the rollout function "
        "and keeps max_groups_in_flight groups; drop one of the two"
    )


def _batches_of_a_worker_mix_versions(args: Args) -> str | None:
    if not (args.fully_async and args.keep_old_actor):
        return None
    return (
        "got --keep-old-actor with --fully-async, whose batches were sampled by several weights, of which one copy "
        "is kept; use --use-tis or --use-rollout-logprobs"
    )


def _prompts_are_read_at_once(args: Args) -> str | None:
    if args.pause_generation_mode != "in_place" or args.sglang["chunked_prefill_size"] == -1:
        return None
    return (
        "got --sglang-chunked-prefill-size with --pause-generation-mode in_place: a prompt read by several weights "
        "would not show in the versions of its sample; drop it or use retract"
    )


def _bounds_are_possible(args: Args) -> str | None:
    bound, most = args.max_weight_staleness, args.max_groups_in_flight
    if bound is not None and bound < 0:
        return f"got max_weight_staleness {bound}; 0 trains only what the newest weights sampled, leave it out for none"
    if most is not None and most < args.rollout_batch_size:
        return (
            f"got max_groups_in_flight {most} below rollout_batch_size {args.rollout_batch_size}: a batch would "
            "never be full; raise it"
        )
    if args.fully_async and bound is not None and bound < (interval := args.update_weights_interval) - 1:
        return (
            f"got max_weight_staleness {bound} with update_weights_interval {interval}: before a weight sync "
            f"engines are {interval - 1} versions behind and a step would wait for ever; raise it"
        )
    return None


_BOTH: tuple[Rule, ...] = (
    _worker_is_not_refused,
    _one_schedule,
    _worker_has_its_own_ways,
    _bounds_are_possible,
    _prompts_are_read_at_once,
    _batches_of_a_worker_mix_versions,
)

# Free keys of `--custom-config-path`: the user's own settings, which need a function of the user's to read them.


def free_keys_have_a_reader(args: Args) -> str | None:
    """What nothing could read is a misspelt setting."""
    found = {name.removeprefix(FREE): text for name, text in args.idle.items() if name.startswith(FREE)}
    if not found or _has_functions(args):
        return None
    name, text = next(iter(found.items()))
    got, _, near = text.partition(NEAR)
    hint = f"did you mean {near}? " if near else ""
    return (
        f"got {name}: {got} in {args.custom_config_path}, and the run has none; {hint}correct it, or put your own "
        "settings below `custom`"
    )


def _has_functions(args: Args) -> bool:
    """Whether the run calls code of the user's."""
    paths = [getattr(args, contract.flag) for contract in CONTRACTS.values()]
    flat = [path for one in paths for path in (one if isinstance(one, tuple) else (one,))]
    return any(path is not None and not str(path).startswith("slime.") for path in flat)


# Lengths that the model cannot have: what an engine would refuse with every request is refused before it starts.


def engine_context(args: Args) -> int | None:
    """Most tokens of prompt and response together that an engine serves; None where it is not known, or not refused."""
    if args.sglang.get("allow_auto_truncate"):
        return None
    given: int | None = args.sglang.get("context_length")
    return context_length_of(read_hf_config(args.hf_checkpoint)) if given is None else int(given)


def own_lengths(args: Args) -> bool:
    """Whether slime's own generate function asks the engines, with the lengths of the settings."""
    return args.rollout_function_path == DEFAULT_ROLLOUT and not args.custom_generate_function_path


def responses_fit_the_model(args: Args) -> str | None:
    """A prompt and the longest response fit into the model's context."""
    if args.debug_train_only or fine_tunes(args) or not own_lengths(args):
        return None
    context = engine_context(args)
    if context is None:
        return None
    problem = None
    if args.num_rollout:
        problem = _of("rollout", args.rollout_max_context_len, args.rollout_max_response_len, "", context)
    if problem is not None or (args.eval_interval is None and args.num_rollout):
        return problem
    found = [
        _of("eval", one.max_context_len, one.max_response_len, f" for evaluation on {one.name}", context)
        for one in eval_datasets(args)
        if not one.custom_generate_function_path
    ]
    return next((problem for problem in found if problem is not None), None)


def _of(kind: str, conversation: int | None, answer: int, of_what: str, context: int) -> str | None:
    """Of rollouts, or of one dataset of the evaluation."""
    if conversation is not None:  # an answer ends there
        name = f"{kind}_max_context_len"
        return _beyond(f"{name} {conversation}{of_what}", name, context) if conversation > context else None
    name = f"{kind}_max_response_len"
    return _beyond(f"{name} {answer}{of_what}", name, context) if answer >= context else None


def _beyond(got: str, name: str, context: int) -> str:
    flag = "--" + name.replace("_", "-")
    return (
        f"got {got}, but prompt and response together are at most {context} tokens in this model "
        f"(config.json, or --sglang-context-length), and engines refuse requests for more; lower {flag}"
    )


LENGTH_RULES: tuple[Rule, ...] = (responses_fit_the_model,)

# Rules across groups: what settings of several groups cannot do together. Those of one group stand beside it.
#
# Files are looked at, none but config.json and the first row of the data is opened: these checks cost microseconds.


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


def a_step_is_finite(settings: Any) -> str | None:
    """Each of the two factors is bounded by its declaration. Asked before anything is derived from the product."""
    prompts, samples, most = settings.rollout_batch_size, settings.n_samples_per_prompt, int(EXECUTIONS.le or 0)
    if prompts * samples <= most:
        return None
    return (
        f"got rollout_batch_size {prompts} * n_samples_per_prompt {samples} = {prompts * samples} executions, and a "
        f"step has at most {most}; lower one of the two"
    )


def steps_agree(args: Args) -> str | None:
    """global_batch_size and num_steps_per_rollout say the same thing twice."""
    executions = args.rollout_batch_size * args.n_samples_per_prompt
    if args.use_dynamic_global_batch_size:
        if args.was_given("global_batch_size"):
            return (
                "got --global-batch-size with --use-dynamic-global-batch-size, whose steps have no fixed size; "
                "give --num-steps-per-rollout"
            )
        return None
    size = args.global_batch_size
    if size < 1 or size * args.num_steps_per_rollout == executions or executions % size:
        return None
    return (
        f"got global_batch_size {args.global_batch_size} with num_steps_per_rollout {args.num_steps_per_rollout}, "
        f"but a rollout has {executions} executions; give only one of the two"
    )


def sampled_distribution_is_trained(args: Args) -> str | None:
    """The log-prob of a token is that of the distribution it was sampled from; engines report the whole one."""
    if fine_tunes(args) or (args.rollout_top_p == 1.0 and args.rollout_top_k == -1):
        return None
    names = ("use_rollout_logprobs", "use_kl_loss", "custom_loss_function_path", "custom_advantage_function_path")
    wrong = [f"--{n.replace('_', '-')}" for n in names if getattr(args, n)]
    if not wrong:
        return None
    return (
        f"got {', '.join(wrong)} with rollout_top_p {args.rollout_top_p} and rollout_top_k {args.rollout_top_k}: "
        "the trainer's log-probs are those of the truncated distribution, the engine's and the reference's of the "
        "whole one; leave top-p and top-k out, or use --kl-coef for a reference"
    )


def something_is_trained(args: Args) -> str | None:
    """Without advantages the policy loss is zero; only a KL loss or an entropy bonus is left."""
    trains = args.num_rollout != 0 and minimises_policy_loss(args) and not args.debug_rollout_only
    if not trains or args.compute_advantages_and_returns or args.entropy_coef:
        return None
    if args.use_kl_loss and args.kl_loss_coef:
        return None
    return (
        "got --disable-compute-advantages-and-returns with loss_type policy_loss: all advantages would be zero, "
        "and nothing trained; drop it, or give --use-kl-loss --kl-loss-coef or --entropy-coef"
    )


def advantages_can_differ_from_zero(args: Args) -> str | None:
    """A single reward less its mean is zero."""
    own_groups = args.rollout_function_path != DEFAULT_ROLLOUT or args.custom_convert_samples_to_train_data_path
    trains = args.num_rollout != 0 and has_policy_term(args)
    if args.n_samples_per_prompt != 1 or not trains or args.debug_rollout_only or own_groups:
        return None
    if not (estimator_of(args).compares_within_group and args.components["rewards_normalization"]):
        return None
    if args.use_opd or args.custom_advantage_function_path or args.rollout_data_postprocess_path:
        return None
    return (
        "got n_samples_per_prompt 1 with rewards_normalization: the group's mean is the reward itself, every "
        "advantage is zero and nothing is trained; raise --n-samples-per-prompt, or give "
        "--disable-rewards-normalization"
    )


def custom_loss_has_a_function(args: Args) -> str | None:
    """The loss type and the hook come together."""
    if minimises_custom_loss(args) == bool(args.custom_loss_function_path):
        return None
    return "got one of --loss-type custom_loss and --custom-loss-function-path without the other; give both or none"


def rewards_are_defined(args: Args) -> str | None:
    """A policy learns from rewards, or from a teacher; what is sampled to be kept is judged by them."""
    learns = minimises_policy_loss(args) or args.rollout_function_path == DEFAULT_ROLLOUT
    needs = learns and not args.debug_train_only and args.num_rollout != 0 and args.opd_teacher_url is None
    if args.rm_type == "remote_rm" and not args.rm_url:
        return "got --rm-type remote_rm without --rm-url; give its address"
    if args.group_rm and not args.custom_rm_path:
        return "got --group-rm without --custom-rm-path; the built-in graders score one sample at a time"
    if not needs or args.rm_type or args.custom_rm_path or args.custom_generate_function_path:
        return None
    if args.rollout_function_path != DEFAULT_ROLLOUT or not reads_prompt_data(args):
        return None
    if first_row_names(args.prompt_data or "", "rm_type"):
        return None
    return "got no --rm-type and no --custom-rm-path; say how to score samples"


def prompts_exist(args: Args) -> str | None:
    """Something to generate from."""
    if args.prompt_data is not None or args.num_rollout == 0 or args.load_debug_rollout_data:
        return None
    if args.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT) or not reads_prompt_data(args):
        return None
    return "got no --prompt-data; give a .jsonl or .parquet file, or --data-source-path"


def files_exist(args: Args) -> str | None:
    """Files of data are there, and what a scheme is asked for exists."""
    data = [] if args.prompt_data is None else [("prompt_data", args.prompt_data, False)]
    return _missing([*data, *_held_out(args)])


def held_out_files_exist(settings: Any) -> str | None:
    """So are those that nothing would evaluate: whoever names a file means one that is there."""
    try:
        return _missing(_held_out(settings))
    except ConfigError as error:
        return str(error)


def _held_out(settings: Any) -> list[tuple[str, str, bool]]:
    return [(f"evaluation data {d.name}", d.path, True) for d in eval_datasets(settings)]


def _missing(data: list[tuple[str, str, bool]]) -> str | None:
    """`data`: what they are, where, and whether they are held out."""
    for name, spec, held_out in data:
        try:
            check_data(spec, held_out=held_out)
        except ConfigError as error:
            said = str(error)
            return said if said.startswith("got --") else said.replace("got ", f"got {name} ", 1)
    return None


def one_first_step(args: Args) -> str | None:
    """A checkpoint says which step follows it."""
    if args.start_rollout_id is None:
        return None
    if args.load is None or args.finetune:
        return None
    return (
        f"got start_rollout_id {args.start_rollout_id} with load {args.load}, whose checkpoint says which step is "
        "next; drop it, or add --finetune to take only the weights"
    )


def export_replaces_nothing_else(args: Args) -> str | None:
    """An export replaces the whole folder of its name, so nothing else may live there."""
    if args.save_hf is None:
        return None
    try:
        exports = _export_folders(args.save_hf)
    except (KeyError, IndexError, ValueError) as error:
        return f"got save_hf {args.save_hf}, whose braces name something else ({error}); only {{rollout_id}} is known"
    for name, path in _in_use(args):
        if exports.fullmatch(os.path.realpath(path)):
            return (
                f"got save_hf {args.save_hf}, which is or holds {name} {path}: an export replaces its whole "
                "folder, and that would be deleted; give a folder of its own"
            )
    return None


_ANY = "\ue000"
"""Stands for the number of the step while a path is resolved; no folder is called so."""


def _export_folders(template: str) -> re.Pattern[str]:
    """Matches the folders that exports may replace, and everything below them."""
    template.format(rollout_id=0)
    absolute = os.path.realpath(re.sub(r"\{rollout_id[^{}]*\}", _ANY, template).replace("{{", "{").replace("}}", "}"))
    return re.compile(re.escape(absolute.rstrip("/")).replace(re.escape(_ANY), r"\d+") + r"(/.*)?", re.DOTALL)


def _in_use(args: Args) -> list[tuple[str, str]]:
    """(what it is, path) of what a run reads or writes."""
    names = (
        "hf_checkpoint",
        "ref_load",
        "critic_load",
        "opd_teacher_load",
        "load",
        "save",
        "run_dir",
        "update_weight_disk_dir",
    )
    found = [(name, getattr(args, name)) for name in names if getattr(args, name, None)]
    found += [(name, os.path.join(path, "step_000000")) for name, path in found if name in ("load", "save")]
    data = [*([args.prompt_data] if args.prompt_data else []), *(d.path for d in eval_datasets(args))]
    found += [("the data", str(path)) for spec in data if scheme_of(spec) is None for path in files_of(spec)]
    return [*found, ("the working folder", os.getcwd())]


RULES: tuple[Rule, ...] = (
    batch_divides,
    steps_agree,
    sampled_distribution_is_trained,
    something_is_trained,
    advantages_can_differ_from_zero,
    custom_loss_has_a_function,
    rewards_are_defined,
    prompts_exist,
    files_exist,
    *conditions.RULES,
    one_first_step,
    export_replaces_nothing_else,
    *LENGTH_RULES,
    free_keys_have_a_reader,
)
