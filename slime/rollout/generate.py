"""The default generate function, sampling parameters, and the limits on response length.

A custom function (`--custom-generate-function-path`) has the signature of `generate` and may return several samples (a
fan-out, for example for sub-agents or compaction), which share the execution's `index`.

`temperature`, `top_p` and `top_k` are always sent. Otherwise the engine would fill in missing values from the
checkpoint or its own defaults, and the log-probs would belong to a different distribution. `Limits.next_answer` bounds
every response, whether it comes from the default `generate`, an agent or a function that posts to `/generate`.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.core.errors import ConfigError, DataError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.rollout.client.call import before_stop
from slime.rollout.context import current, on_rollout_loop
from slime.rollout.transcript import Transcript
from slime.settings import Args
from slime.settings.eval_config import EvalDatasetConfig
from slime.settings.groups.rollout import RolloutSettings
from slime.settings.rules import engine_context

MARGIN = 6
"""SGLang 0.5.16 rejects a prompt that leaves this many tokens or fewer in the model's context."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Token limits of one execution, in addition to `max_new_tokens`. Tasks inherit them through `LIMITS`."""

    max_context_len: int | None = None
    """Maximum length of a conversation: the prompt and sampled tokens of a request."""
    max_total_response_len: int | None = None
    """Maximum number of tokens in all responses of the execution combined."""
    served: int | None = None
    """The model's context length. Engines refuse longer requests."""
    transcript: Transcript = field(default_factory=Transcript)
    """Records the tokens that the execution has sampled so far."""
    spent: Counter[str] = field(default_factory=Counter)
    """Limit (a key of `EMPTY_TURNS`) -> number of turns for which it left no token."""

    @classmethod
    def of(
        cls,
        args: Args,
        transcript: Transcript,
        *,
        evaluation: bool = False,
        dataset: EvalDatasetConfig | None = None,
    ) -> Limits:
        """Returns the limits for training or evaluation; the limits of `dataset` if it is set."""
        context, total = args.rollout_max_context_len, args.rollout_max_total_response_len
        if dataset is not None:
            context, total = dataset.max_context_len, dataset.max_total_response_len
        elif evaluation:
            context, total = args.eval_max_context_len, args.eval_max_total_response_len
        return cls(context, total, _served(args), transcript)

    @property
    def are_spent(self) -> bool:
        return self.max_total_response_len is not None and self._left_in_all() <= 0

    def ends_before_turn(self, num: int, most: int | None) -> bool:
        """Returns whether an execution that had `num` turns of at most `most` may have no other, and counts that."""
        if most is None or num < most:
            return False
        self.spent["agent_max_turns"] += 1
        return True

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens that a prompt may have if a response is to fit into the context; None: no limit."""
        served = None if self.served is None else self.served - MARGIN - 1
        own = None if self.max_context_len is None else self.max_context_len - 1
        return min((num for num in (served, own) if num is not None), default=None)

    def next_answer(self, most: int, num_read: int, begun: int = 0) -> int:
        """Returns how many tokens a request with a prompt of `num_read` tokens may sample.

        `most`: limit for the whole response. `begun`: number of response tokens so far, included in `num_read`.
        """
        left = {}
        if self.served is not None:
            room = self.served - num_read
            left["model_context"] = room if room > MARGIN else 0
        if self.max_context_len is not None:
            left["max_context_len"] = self.max_context_len - num_read
        if self.max_total_response_len is not None:
            left["max_total_response_len"] = self._left_in_all()
        shortest = min(left, key=lambda name: left[name], default=None)
        if shortest is not None and left[shortest] <= 0 < most and not begun:
            self.spent[shortest] += 1
        return max(0, min(most - begun, *left.values()) if left else most - begun)

    def _left_in_all(self) -> int:
        assert self.max_total_response_len is not None, "the limit is not set"
        return self.max_total_response_len - self.transcript.num_sampled()


LIMITS: ContextVar[Limits | None] = ContextVar("slime_limits", default=None)


def _served(args: Args) -> int | None:
    """Returns the model's context length; None for external engines, which enforce their own limit."""
    if args.rollout_external_engine_addrs:
        return None
    key = (args.hf_checkpoint, args.sglang.get("context_length"), args.sglang.get("allow_auto_truncate"))
    if key not in _SERVED:  # read the file only once
        _SERVED[key] = engine_context(args)
    return _SERVED[key]


_SERVED: dict[tuple[Any, ...], int | None] = {}


def num_begun(sample: Sample) -> int:
    """Returns the number of tokens in the unfinished response at the end of the sample; 0 if there is none."""
    versions = sample.column("token_versions")
    if sample.status is Status.COMPLETED or versions is None:
        return 0
    others = np.flatnonzero(versions == NOT_SAMPLED)
    return len(versions) - (int(others[-1]) + 1 if len(others) else 0)


def rollout_sampling_params(args: RolloutSettings) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "skip_special_tokens": args.rollout_skip_special_tokens,
    }
    if args.rollout_stop:
        params["stop"] = list(args.rollout_stop)
    if args.rollout_stop_token_ids:
        params["stop_token_ids"] = list(args.rollout_stop_token_ids)
    return params


def eval_sampling_params(dataset: EvalDatasetConfig) -> dict[str, Any]:
    """Returns the sampling parameters of a dataset. Temperature 0 is greedy."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_new_tokens",
        "repetition_penalty",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
    )
    given = {name: getattr(dataset, name) for name in names}
    params = {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v is not None}
    return {**params, "max_new_tokens": dataset.max_response_len}


def seeded(args: Args, params: dict[str, Any], index: int) -> dict[str, Any]:
    """Returns a copy for one execution, with its own seed if inference is deterministic."""
    params = dict(params)
    if args.sglang.get("enable_deterministic_inference"):
        params["sampling_seed"] = (args.rollout_seed + index) % 2**31
    return params


def prompt_ids(sample: Sample, tokenizer: Any) -> list[int]:
    """Returns the sample's ids if it has any, else the ids of its text prompt.

    Adds no beginning-of-sequence token, because chat templates include it. Only the dataset renders messages, because
    it neutralizes control tokens in their text. Raises `ConfigError` for messages, and `DataError` without a tokenizer.
    """
    if sample.tokens:
        return list(sample.tokens)
    if tokenizer is None:
        raise DataError(f"sample {sample.index} has no ids and no tokenizer for its prompt; set --hf-checkpoint")
    if not isinstance(sample.prompt, str):
        kind = "a list of messages" if isinstance(sample.prompt, list) else f"of type {type(sample.prompt).__name__}"
        raise ConfigError(
            f"the prompt of sample {sample.index} is {kind}, but nothing renders it; set "
            "--apply-chat-template, or render it in --custom-generate-function-path or --data-source-path"
        )
    return [int(i) for i in tokenizer.encode(sample.prompt, add_special_tokens=False)]


def remaining_tokens(args: Args, sample: Sample, max_new_tokens: int) -> int:
    """Returns how many tokens the sample's next request may sample.

    `max_new_tokens`: limit for one response, including the tokens of an interrupted one. The limits on the conversation
    and the execution apply as well.
    """
    limits = LIMITS.get() or Limits.of(args, Transcript.behind(sample))
    return limits.next_answer(max_new_tokens, len(sample.tokens), num_begun(sample))


@on_rollout_loop
async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates the next response of `sample` in place, or the rest of an unfinished one.

    `max_new_tokens` limits this response. If no more tokens are allowed, the sample becomes TRUNCATED. Raises the
    errors of `EngineClient.generate`.
    """
    context = current()
    sample.tokens = prompt_ids(sample, context.tokenizer)
    budget = remaining_tokens(args, sample, sampling_params["max_new_tokens"])
    if budget == 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": budget}
    if "min_new_tokens" in params:
        params["min_new_tokens"] = max(0, min(params["min_new_tokens"] - num_begun(sample), budget))
    known = 0 if sample.rollout_routed_experts is None else sample.rollout_routed_experts.end
    seen: dict[str, Any] = {"pictures": context.pictures(sample.images)} if sample.images else {}
    generation = await context.engine().generate(
        sample.tokens, params, session_id=sample.session_id, experts_from=known, returns_partial=True, **seen
    )
    if generation.finish_reason == "abort" and params.get("stop") and context.tokenizer is not None:
        generation = before_stop(generation, params["stop"], context.tokenizer)
    sample.append_response_tokens(
        generation.tokens,
        log_probs=generation.log_probs,
        weight_version=generation.weight_version,
        text=generation.text,
        finish_reason=generation.finish_reason,
        routed_experts=generation.routed_experts,
    )
    return sample
