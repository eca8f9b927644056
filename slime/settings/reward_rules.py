"""The rules of rewards: every sample that a policy learns from has somebody who scores it."""

from __future__ import annotations

from typing import Any

from slime.core.errors import ConfigError
from slime.core.loading import load_object
from slime.settings.args import Args
from slime.settings.data_files import split_slice
from slime.settings.eval_config import eval_datasets
from slime.settings.rules import RULE_DEFAULT_ROLLOUT, Rule


def grader_of(rm_type: str) -> Any:
    """The entry of the graders' registry. Raises `ConfigError`."""
    return load_object("slime.rewards.graders:GRADERS").get(rm_type)


def grader_is_known(args: Args) -> str | None:
    """A misspelt grader is found before any process starts."""
    try:
        for rm_type in (args.rm_type, *(d.rm_type for d in eval_datasets(args))):
            if rm_type:
                grader_of(rm_type)
    except ConfigError as error:
        return str(error)
    return None


def rewards_are_defined(args: Args) -> str | None:
    """A policy learns from rewards, or from a teacher; what is sampled to be kept is judged by them."""
    learns = args.loss_type == "policy_loss" or args.rollout_function_path == RULE_DEFAULT_ROLLOUT
    needs = learns and not args.debug_train_only and args.num_rollout != 0 and args.opd_teacher_url is None
    if args.rm_type == "remote_rm" and not args.rm_url:
        return "got --rm-type remote_rm without --rm-url; give its address"
    if args.group_rm and not args.custom_rm_path:
        return "got --group-rm without --custom-rm-path; the built-in graders score one sample at a time"
    if not needs or args.rm_type or args.custom_rm_path or args.custom_generate_function_path:
        return None
    if args.rollout_function_path != RULE_DEFAULT_ROLLOUT or args.data_source_path:
        return None
    return (
        None if _rows_may_name_graders(args) else "got no --rm-type and no --custom-rm-path; say how to score samples"
    )


def rewards_are_used_as_asked(args: Args) -> str | None:
    """Several numbers need a key; batches need a service to go to."""
    keys = ", ".join(grader_of(args.rm_type).score_keys) if args.rm_type and grader_is_known(args) is None else ""
    if keys and not args.reward_key and not args.custom_rm_path and not args.custom_reward_post_process_path:
        return f"got --rm-type {args.rm_type} without --reward-key; it returns several numbers, pick one of {keys}"
    if args.rm_batch_size < 1 or (args.rm_batch_size > 1 and not args.rm_url):
        return f"got --rm-batch-size {args.rm_batch_size}; give 1 or more, above 1 with the --rm-url that gets batches"
    return None


def _rows_may_name_graders(args: Args) -> bool:
    """A row's metadata may carry its own rm_type; the first row tells."""
    path, _ = split_slice(args.prompt_data or "")
    if path.suffix != ".jsonl" or not path.is_file():
        return True
    with path.open(encoding="utf-8", errors="replace") as lines:
        return '"rm_type"' in lines.readline()


REWARD_RULES: tuple[Rule, ...] = (grader_is_known, rewards_are_defined, rewards_are_used_as_asked)
