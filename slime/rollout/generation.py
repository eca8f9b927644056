"""What an engine is asked for, and what it answers: checked on the way out and on the way in.

Invariants
1. Nothing is sent that an engine or the router is known to mishandle: an id outside the vocabulary kills the SGLang
   0.5.16 scheduler, and sglang-router 0.3.2 drops sampling parameters that it does not know.
2. The ids of a `Generation` are the ids that the engine sampled, the end-of-sequence or stop token included; the text
   has lost the end token but keeps a matched stop string.
3. Each id has a finite log-prob and a weight version: the engine's word for each where requests live through
   weight syncs, otherwise one for all.
4. Routed experts have a row for each token that the engine read, from the one asked for to the last but one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.core.errors import DataError, EngineError, RequestRejected
from slime.core.ports import TOKEN_VERSIONS_KEY, WeightVersion
from slime.core.routed_experts import ExpertFormat, RoutedExperts
from slime.core.sample import FINISH_REASONS, NOT_SAMPLED

FORWARDED_SAMPLING_PARAMS = frozenset(
    (
        "temperature",
        "max_new_tokens",
        "min_new_tokens",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "json_schema",
        "regex",
        "ebnf",
        "sampling_seed",
    )
)
"""What an answer may be asked for with, also through sglang-router 0.3.2, which drops others without a word."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request sampled: `T` tokens."""

    tokens: tuple[int, ...]
    """[T] ids as sampled."""
    log_probs: tuple[float, ...]
    """[T] nats, of the distribution after temperature (the trainer divides its logits by the same number)."""
    finish_reason: str
    """stop | length | abort"""
    weight_version: WeightVersion | tuple[WeightVersion, ...]
    """Of all tokens, or [T] of each; `NOT_SAMPLED` only if T is 0 and the request never reached an engine."""
    text: str
    """For graders and people: without the end token, with a matched stop string."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Of prompt and sampled tokens but the last; None if they were not asked for, or nothing was sampled."""

    @property
    def versions(self) -> list[WeightVersion]:
        """[T] the weight version of each token."""
        version = self.weight_version
        return [version] * len(self.tokens) if isinstance(version, int) else list(version)


@dataclass(frozen=True, slots=True)
class Drafts:
    """What an engine's draft proposed for one request."""

    verified: int
    """Passes of the model that looked at proposed tokens; each samples one token more than it accepts."""
    accepted: int
    proposed: int
    """Tokens."""


NO_DRAFTS = Drafts(0, 0, 0)
NEVER_SENT = Generation((), (), "abort", NOT_SAMPLED, "")
"""The answer to a request whose scope was aborted before it was sent."""


def check_request(input_ids: Sequence[int], sampling_params: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raises `RequestRejected` for what engine or router are known to mishandle."""
    unknown = sorted(set(sampling_params) - FORWARDED_SAMPLING_PARAMS)
    if unknown:
        raise RequestRejected(
            f"got sampling parameters {unknown}, which a way to an engine would silently drop, or which make several "
            f"answers; use only {sorted(FORWARDED_SAMPLING_PARAMS)}"
        )
    if not input_ids:
        raise RequestRejected("got an empty prompt; an engine needs at least one token to continue")
    if vocab_size is not None and not (min(input_ids) >= 0 and max(input_ids) < vocab_size):
        raise RequestRejected(
            f"got prompt ids from {min(input_ids)} to {max(input_ids)}, because the model has {vocab_size} "
            "tokens; check that tokenizer and model belong together"
        )


def before_stop(part: Generation, stop: str | Sequence[str], tokenizer: Any) -> Generation:
    """An interrupted part without the tokens that may begin a stop string: engines match one in new text only."""
    stops = [stop] if isinstance(stop, str) else stop
    begun = max((n for s in stops for n in range(1, len(s)) if part.text.endswith(s[:n])), default=0)
    num = len(part.tokens)
    while num and len(tokenizer.decode(part.tokens[num:])) < begun:
        num -= 1
    versions = part.weight_version if isinstance(part.weight_version, int) else part.weight_version[:num]
    text = part.text[: len(part.text) - len(tokenizer.decode(part.tokens[num:]))]
    experts = part.routed_experts
    if experts is not None:
        experts = experts.upto(experts.end - (len(part.tokens) - num))
    return replace(
        part,
        tokens=part.tokens[:num],
        log_probs=part.log_probs[:num],
        weight_version=versions,
        text=text,
        routed_experts=experts,
    )


def parse_generation(answer: Mapping[str, Any], token_versions: bool = False) -> Generation:
    """Reads and checks a `/generate` answer (SGLang 0.5.16). Raises `EngineError` if an invariant does not hold.

    `token_versions`: the engine must tell the version of each token.
    """
    meta = answer.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    reason = finish.get("type")
    if reason not in FINISH_REASONS:
        raise EngineError(f"got finish_reason {finish!r}; expected one of {sorted(FINISH_REASONS)}")
    return _parse(answer, meta, finish, reason, token_versions)


def _parse(
    answer: Mapping[str, Any], meta: Mapping[str, Any], finish: Mapping[str, Any], reason: str, token_versions: bool
) -> Generation:
    """An answer, or a part of one, that is called to have ended for `reason`."""
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        raise EngineError("got an answer without output_token_logprobs; was return_logprob dropped on the way?")
    said, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tokens = tuple(map(int, ids))
    log_probs = tuple(map(float, said if None not in said else (math.nan if one is None else one for one in said)))
    if not all(map(math.isfinite, log_probs)):
        bad = next(i for i, value in enumerate(log_probs) if not math.isfinite(value))
        raise EngineError(
            f"got log-prob {pairs[bad][0]} for token {bad} of {len(tokens)} (id {tokens[bad]}); it must be finite"
        )
    output_ids = answer.get("output_ids")
    if output_ids is not None and list(output_ids) != ids:
        raise EngineError(
            f"got {len(output_ids)} output ids and log-probs of {len(tokens)} other ids; they must be the same ids"
        )
    version = str(meta.get("weight_version", ""))
    if not version.isdecimal():
        raise EngineError(
            f"got weight_version {version!r}; a trained token needs the integer version that sampled it: "
            "serve only after a verified weight sync"
        )
    versions = tuple(meta.get(TOKEN_VERSIONS_KEY) or ())
    if token_versions and tokens and not versions and finish.get("type") == "abort":  # ended while it waited
        return Generation((), (), reason, int(version), "")
    odd = [v for v in versions if not 0 < v <= int(version) and v != int(version)]  # 0: no weights were ever synced
    if token_versions and (odd or len(versions) != len(tokens)):
        raise EngineError(
            f"got versions {sorted(set(versions))} of {len(versions)} tokens for {len(tokens)}, because the engine did "
            "not label each; look for errors of hooks in its log"
        )
    matched = finish.get("matched")
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        finish_reason=reason,
        weight_version=versions if token_versions else int(version),
        text=str(answer.get("text", "")) + (matched if isinstance(matched, str) else ""),
        prompt_tokens=int(meta.get("prompt_tokens") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def parse_drafts(event: Mapping[str, Any]) -> Drafts | None:
    """What an event tells of its request so far; None if nothing."""
    meta = event.get("meta_info") or {}
    if not meta.get("spec_verify_ct"):
        return None
    counts = (meta["spec_verify_ct"], meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"])
    return Drafts(*map(int, counts))


def parse_experts(
    answer: Mapping[str, Any], experts: ExpertFormat, *, start: int, num_tokens: int
) -> RoutedExperts | None:
    """The routed experts of an answer that ends a request of `num_tokens` ids, sampled ones included.

    None for a request that was aborted while it waited: the engine has let go of its tokens. Raises `EngineError` if
    they are missing otherwise, or do not fit.
    """
    meta = answer.get("meta_info") or {}
    text = meta.get("routed_experts")
    if text is None:
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return None
        raise EngineError(
            "got an answer without routed_experts, because the engine records none or the request's id was changed on "
            "the way; start engines with enable_return_routed_experts (slime's own are, if the run asks for it)"
        )
    try:
        return experts.decode(text, start=start, num_rows=max(0, num_tokens - 1 - start))
    except DataError as problem:
        raise EngineError(f"the engine's answer is not usable: {problem}") from problem


def parse_part(answer: Mapping[str, Any], token_versions: bool = False) -> tuple[Generation, bool]:
    """Reads one event of a stream, and whether it is the last. Raises `EngineError` as `parse_generation` does."""
    meta = answer.get("meta_info") or {}
    if meta.get("finish_reason"):
        return parse_generation(answer, token_versions), True
    return _parse(answer, meta, {}, "abort", token_versions), False
