"""Lengths that the model cannot have: what an engine would refuse with every request is refused before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.core.hf_config import context_length_of, read_hf_config
from slime.settings.conditions import fine_tunes
from slime.settings.eval_config import eval_datasets
from slime.settings.group import Rule
from slime.settings.groups.hooks import DEFAULT_ROLLOUT

if TYPE_CHECKING:
    from slime.settings.args import Args


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
    context, given = engine_context(args), args.rollout_max_context_len
    if context is None:
        return None
    if given is not None:  # the client ends responses there
        return (
            None
            if given <= context
            else _beyond(f"rollout_max_context_len {given}", "--rollout-max-context-len", context)
        )
    if args.num_rollout and args.rollout_max_response_len >= context:
        return _beyond(
            f"rollout_max_response_len {args.rollout_max_response_len}", "--rollout-max-response-len", context
        )
    if args.eval_interval is None and args.num_rollout:
        return None
    for one in eval_datasets(args):
        if one.max_response_len >= context and not one.custom_generate_function_path:
            name = f"eval_max_response_len {one.max_response_len} for evaluation on {one.name}"
            return _beyond(name, "--eval-max-response-len", context)
    return None


def _beyond(got: str, flag: str, context: int) -> str:
    return (
        f"got {got}, but prompt and response together are at most {context} tokens in this model "
        f"(config.json, or --sglang-context-length), and engines refuse requests for more; lower {flag}"
    )


RULES: tuple[Rule, ...] = (responses_fit_the_model,)
