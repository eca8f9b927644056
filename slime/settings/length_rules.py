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


RULES: tuple[Rule, ...] = (responses_fit_the_model,)
