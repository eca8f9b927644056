"""Rules across groups: what settings of several groups cannot do together. Those of one group stand beside it.

Files are looked at, none but config.json and the first row of the data is opened: these checks cost microseconds.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.settings import free_keys, length_rules, model_folders
from slime.settings.conditions import (
    estimator_of,
    fine_tunes,
    has_policy_term,
    minimises_custom_loss,
    minimises_policy_loss,
)
from slime.settings.data_files import check_data, files_of, first_row_names, scheme_of
from slime.settings.eval_config import eval_datasets
from slime.settings.group import Rule
from slime.settings.groups.data import reads_prompt_data
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.settings.ranges import EXECUTIONS

if TYPE_CHECKING:
    from slime.settings.args import Args


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
    *model_folders.RULES,
    one_first_step,
    export_replaces_nothing_else,
    *length_rules.RULES,
    free_keys.free_keys_have_a_reader,
)
