"""What the rollout will read, looked at before any process starts: prompts, held-out data, the chat template.

What a user's class or function replaces is not looked at: the source of prompts, the rendering of messages, grading.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.core.errors import ConfigError, DataError
from slime.core.registry import load_object
from slime.data.first_rows import Look, check_rows, check_template, checkpoint_of, messages_problem
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.settings.data_files import scheme_of
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets
from slime.settings.groups.evaluation import measures_loss
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.settings.groups.reward import GRADERS
from slime.settings.rules import engine_context, own_lengths


def data_problems(args: Args) -> list[str]:
    """What of the data cannot work, one message for each data set; empty if all looks well."""
    looks = [_prompts(args)] if args.data_source == "prompt_data" and args.prompt_data is not None else []
    looks += [_held_out(args, one) for one in eval_datasets(args)]
    return list(dict.fromkeys(_problems(args, looks)))


def _problems(args: Args, looks: list[Look]) -> Iterator[str]:
    try:
        checkpoint = checkpoint_of(args.hf_checkpoint, args.chat_template)
    except (DataError, OSError) as error:
        yield str(error)
        return
    for look in looks:
        renders = look.template or look.conversations
        because = "--apply-chat-template" if look.template else "fine-tuning on conversations"
        problem = check_template(checkpoint, because=because) if renders else None
        problem = problem or (check_rows(look, checkpoint) if scheme_of(look.path) is None else _made_rows(look))
        if problem is not None:
            yield problem


def _made_rows(look: Look) -> str | None:
    """What is wrong with a scheme's rows; they are not made here, and their name is checked with the settings."""
    found = scheme_of(look.path)
    if found is None or not found[0].makes_messages(found[1]):
        return None
    problem = messages_problem(look)
    return None if problem is None else f"got {look.name} {look.path}, whose prompts are messages, {problem}"


def _prompts(args: Args) -> Look:
    limits = [(args.rollout_max_prompt_len, "rollout_max_prompt_len")]
    own = own_lengths(args) and not args.rollout_sample_hook_path
    if own_lengths(args) and args.num_rollout and not args.debug_train_only and args.load_debug_rollout_data is None:
        limits.append(_of_engines(args, args.rollout_max_context_len, args.rollout_max_response_len))
    most, limit = _least(limits)
    return Look(
        name="prompt_data",
        path=args.prompt_data or "",
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        template=args.apply_chat_template,
        template_kwargs=args.apply_chat_template_kwargs,
        conversations=args.rollout_function_path == SFT_ROLLOUT,
        takes_messages=args.rollout_function_path != DEFAULT_ROLLOUT or not own_lengths(args),
        grader=_needs_label(args.rm_type) if own and not args.custom_rm_path else None,
        row_limit=_row_limit(args.rollout_max_prompt_len, "rollout_max_prompt_len"),
        max_prompt_tokens=most,
        limit=limit,
    )


def _held_out(args: Args, one: EvalDatasetConfig) -> Look:
    generates = own_lengths(args) and not fine_tunes(args)
    generates = generates and one.custom_generate_function_path is None and args.eval_function_path is None
    graded = generates and not (one.custom_rm_path or args.custom_rm_path or args.rollout_sample_hook_path)
    limits = [(one.max_prompt_len, "eval_max_prompt_len")]
    if generates and not args.debug_train_only:
        limits.append(_of_engines(args, one.max_context_len, one.max_response_len))
    most, limit = _least(limits)
    return Look(
        name=f"evaluation data {one.name}",
        path=one.path,
        input_key=one.input_key,
        label_key=one.label_key,
        metadata_key=one.metadata_key,
        tool_key=one.tool_key,
        template=one.apply_chat_template,
        template_kwargs=one.apply_chat_template_kwargs or {},
        conversations=measures_loss(args, one),
        takes_messages=not generates,
        grader=_needs_label(one.rm_type or args.rm_type) if graded else None,
        row_limit=_row_limit(one.max_prompt_len, "eval_max_prompt_len"),
        max_prompt_tokens=most,
        limit=limit,
    )


def _row_limit(limit: int | None, setting: str) -> str:
    return "" if limit is None else f"{setting} {limit}"


def _needs_label(rm_type: str | None) -> str | None:
    """The grader's name, if it can score nothing without a label."""
    try:
        return rm_type if rm_type and load_object(GRADERS).get(rm_type).needs_label else None
    except ConfigError:  # a rule tells it
        return None


def _of_engines(args: Args, max_context_len: int | None, max_response_len: int) -> tuple[int | None, str]:
    """The longest prompt whose request an engine takes."""
    context = engine_context(args)
    if context is None or max_context_len is not None:  # an answer ends there
        return (None if context is None else context - 1), "the model's context"
    return context - max_response_len, f"the model's context of {context} less a response of {max_response_len}"


def _least(limits: list[tuple[int | None, str]]) -> tuple[int | None, str]:
    given = [(most, text) for most, text in limits if most is not None]
    return min(given) if given else (None, "")
