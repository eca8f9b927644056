"""`Call`: the state of one client call, which may span several requests. `Generation`: the sampled tokens.

A call builds the payload of its next request, consumes the events of the running one, and joins the chunks into one
completion. It never waits.

Invariants
1. The joined chunks form the completion that a single request would have sampled: each token appears exactly once, with
   the log-prob and version it was sampled with. Each follow-up request takes all tokens so far as input, and its
   `max_new_tokens` and `min_new_tokens` are reduced accordingly.
2. A completion ends where a single request would have ended. If a request is interrupted at the last allowed token, at
   an end token or at the end of a stop string, the completion is finished. The same holds if a stop string spans two
   requests: engines search only new text for stop strings, so `EndOfText` searches the text of both requests.
3. Under a grammar, an interrupted completion starts over, because the engine would restart the grammar.
4. Penalties count only the tokens of the current request. Log-probs are exact.
5. Requests that an engine or the router is known to mishandle are never sent: an id outside the vocabulary kills the
   scheduler of SGLang 0.5.16, and sglang-router 0.3.2 drops sampling parameters that it does not know.
6. The ids of a `Generation` are exactly those the engine sampled, including an end or stop token. Its text omits the
   end token but keeps a matched stop string.
7. Each id has a finite log-prob and a weight version. If requests survive weight syncs, each id has its own version;
   otherwise all ids share one.
8. Routed experts have one row per processed token, from the first requested token to the second-to-last.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.core.engine_interface import ROUTED_EXPERTS_MARK, TOKEN_VERSIONS_KEY, WeightVersion
from slime.core.errors import DataError, EngineError, RequestRejected, SampledPlaceholder
from slime.core.files import ImageFolder
from slime.core.routed_experts import ExpertFormat, RoutedExperts, without_newer
from slime.core.sample import FINISH_REASONS, NOT_SAMPLED

FORWARDED_SAMPLING_PARAMS = frozenset(
    (
        *("temperature", "max_new_tokens", "min_new_tokens", "top_p", "top_k", "min_p", "sampling_seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
        *("json_schema", "regex", "ebnf"),
    )
)
"""Sampling parameters that reach the engine on every path; sglang-router 0.3.2 silently drops others."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The `T` tokens of a completion, or of one chunk of it."""

    tokens: tuple[int, ...]
    """[T] sampled ids."""
    log_probs: tuple[float, ...]
    """[T] log-probs in nats, after temperature scaling (the trainer divides its logits by the same temperature)."""
    finish_reason: str
    """stop | length | abort"""
    weight_version: WeightVersion | tuple[WeightVersion, ...]
    """One version for all tokens, or [T] versions; `NOT_SAMPLED` only if no request reached an engine."""
    text: str
    """Excludes the end token, but includes a matched stop string."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its prefix cache."""
    routed_experts: RoutedExperts | None = None
    """Experts for the prompt and all sampled tokens but the last; None if not requested, or if nothing was sampled."""

    @property
    def versions(self) -> list[WeightVersion]:
        """The [T] weight versions of the tokens."""
        version = self.weight_version
        return [version] * len(self.tokens) if isinstance(version, int) else list(version)

    def first(self, num: int) -> Generation:
        """Returns a copy with only the first `num` tokens; text and routed experts are unchanged."""
        version = self.weight_version
        return replace(
            self,
            tokens=self.tokens[:num],
            log_probs=self.log_probs[:num],
            weight_version=version if isinstance(version, int) else version[:num],
        )


def joined(parts: Sequence[Generation]) -> Generation:
    """Joins the chunks of a stream. Without chunks, returns an empty generation that hit a length limit."""
    if not parts:
        return Generation((), (), "length", NOT_SAMPLED, "")
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    versions = {part.weight_version for part in parts}
    one = versions.pop() if len(versions) == 1 else None
    return Generation(
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        log_probs=tuple(chain.from_iterable(part.log_probs for part in parts)),
        finish_reason=last.finish_reason,
        weight_version=one if isinstance(one, int) else tuple(chain.from_iterable(part.versions for part in parts)),
        text="".join(part.text for part in parts),
        prompt_tokens=last.prompt_tokens,
        cached_tokens=max(part.cached_tokens for part in parts),
        routed_experts=last.routed_experts,
    )


@dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative-decoding counters of one request, in tokens except for `verified`."""

    verified: int
    """Number of verification passes; each pass samples one token more than it accepts."""
    accepted: int
    proposed: int


NO_DRAFTS = Drafts(0, 0, 0)
NEVER_SENT = Generation((), (), "abort", NOT_SAMPLED, "")
"""The result of a call that was cancelled before its first request."""


Ids = npt.NDArray[np.int32]


def ids_of(input_ids: Sequence[int] | Ids) -> Ids:
    """Returns a copy of token ids as an array. Raises `RequestRejected` if they are not integers of 32 bits.

    The conversion of a list takes about 40 nanoseconds per id. Everything else that needs the ids then reads the array.
    """
    found = np.asarray(input_ids if len(input_ids) else np.zeros(0, np.int32))
    if found.ndim != 1 or found.dtype.kind not in "iu":
        kinds = sorted({type(one).__name__ for one in input_ids} - {"int"})
        raise RequestRejected(f"the prompt ids must be a flat list of integers, but contain {', '.join(kinds)}")
    if len(found) and not (found.min() >= INT32.min and found.max() <= INT32.max):
        raise RequestRejected(f"the prompt ids range from {found.min()} to {found.max()}, which no vocabulary has")
    return found.astype(np.int32)


INT32 = np.iinfo(np.int32)


def check_request(input_ids: Sequence[int] | Ids, sampling_params: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raises `RequestRejected` for a request that an engine or the router is known to mishandle."""
    input_ids = ids_of(input_ids)
    unknown = sorted(set(sampling_params) - FORWARDED_SAMPLING_PARAMS)
    if unknown:
        raise RequestRejected(
            f"the sampling parameters {unknown} are not supported: the router would silently drop them, or they "
            f"request several completions; use only {sorted(FORWARDED_SAMPLING_PARAMS)}"
        )
    if not len(input_ids):
        raise RequestRejected("the prompt is empty; it must have at least one token")
    if vocab_size is not None and not (input_ids.min() >= 0 and input_ids.max() < vocab_size):
        raise RequestRejected(
            f"the prompt ids range from {input_ids.min()} to {input_ids.max()}, but the vocabulary has {vocab_size} "
            "tokens; check that the tokenizer matches the model"
        )


def before_stop(part: Generation, stop: str | Sequence[str], tokenizer: Any) -> Generation:
    """Drops trailing tokens of an interrupted generation that may begin a stop string: engines search only new text."""
    stops = [stop] if isinstance(stop, str) else stop
    begun = max((n for s in stops for n in range(1, len(s)) if part.text.endswith(s[:n])), default=0)
    num = len(part.tokens)
    while num and len(tokenizer.decode(part.tokens[num:])) < begun:
        num -= 1
    text = part.text[: len(part.text) - len(tokenizer.decode(part.tokens[num:]))]
    experts = part.routed_experts
    if experts is not None:
        experts = experts.upto(experts.end - (len(part.tokens) - num))
    return replace(part.first(num), text=text, routed_experts=experts)


def parse_generation(answer: Mapping[str, Any], token_versions: bool = False, *, has_ended: bool = True) -> Generation:
    """Parses and validates a `/generate` response (SGLang 0.5.16). Raises `EngineError` if it violates an invariant.

    `token_versions`: the engine must report the version of each token. `has_ended`: False for an intermediate chunk,
    which gets finish reason `abort`.
    """
    meta = answer.get("meta_info") or {}
    finish = meta.get("finish_reason") or {}
    reason = finish.get("type") if has_ended else "abort"
    if reason not in FINISH_REASONS:
        raise EngineError(f"the engine's finish_reason is {finish!r}, but must be one of {sorted(FINISH_REASONS)}")
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        raise EngineError(
            "the response has no output_token_logprobs; check that no proxy removes return_logprob from requests"
        )
    said, ids, *_ = zip(*pairs, strict=False) if pairs else ((), ())
    tokens = tuple(map(int, ids))
    log_probs = tuple(map(float, said if None not in said else (math.nan if one is None else one for one in said)))
    if not math.isfinite(sum(log_probs)):
        bad = next((i for i, value in enumerate(log_probs) if not math.isfinite(value)), 0)
        raise EngineError(
            f"the log-prob of token {bad} of {len(tokens)} (id {tokens[bad]}) is {pairs[bad][0]}; it must be finite"
        )
    output_ids = answer.get("output_ids")
    if output_ids is not None and tuple(output_ids) != ids:
        raise EngineError(
            f"the {len(output_ids)} output ids of the response differ from the {len(tokens)} ids of its log-probs; "
            "they must be identical"
        )
    version = str(meta.get("weight_version", ""))
    if not version.isdecimal():
        raise EngineError(
            f"the engine's weight_version is {version!r}, but training needs the integer version that sampled "
            "each token; serve requests only after a verified weight sync"
        )
    versions = tuple(meta.get(TOKEN_VERSIONS_KEY) or ())
    if token_versions and tokens and not versions and finish.get("type") == "abort":  # aborted in the queue
        return Generation((), (), reason, int(version), "")
    odd = [v for v in versions if not 0 < v <= int(version) and v != int(version)]  # 0: no weights were ever synced
    if token_versions and (odd or len(versions) != len(tokens)):
        raise EngineError(
            f"the engine sampled {len(tokens)} tokens but reported {len(versions)} weight versions (values "
            f"{sorted(set(versions))}); it must report a valid one per token, so check its log for hook errors"
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
    """Returns the speculative-decoding counters so far; None if speculative decoding is off."""
    meta = event.get("meta_info") or {}
    if not meta.get("spec_verify_ct"):
        return None
    counts = (meta["spec_verify_ct"], meta["spec_num_correct_drafts"], meta["spec_num_proposed_drafts"])
    return Drafts(*map(int, counts))


def parse_experts(
    answer: Mapping[str, Any], experts: ExpertFormat, *, start: int, num_tokens: int
) -> RoutedExperts | None:
    """Returns the routed experts of a finished request with `num_tokens` token ids, including sampled ones.

    Returns None if the request was aborted while queued, because in that case the engine no longer has its tokens.
    Raises `EngineError` if the experts are missing for any other reason or have the wrong size.
    """
    meta = answer.get("meta_info") or {}
    text = meta.get("routed_experts")
    if text is None:
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            return None
        raise EngineError(
            "the response has no routed_experts: either the engine does not record them, or a proxy changed the "
            "request's id; start external engines with enable_return_routed_experts"
        )
    try:
        return experts.decode(text, start=start, num_rows=max(0, num_tokens - 1 - start))
    except DataError as problem:
        raise EngineError(f"the engine returned invalid routed_experts: {problem}") from problem


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images of one request, in the order of their placeholders in the prompt.

    A prompt has one placeholder per image token, but SGLang 0.5.16 expects one placeholder per image and expands it.
    `Call` checks that the prompt length reported by SGLang matches. Images are sent as PNG in data URIs, because SGLang
    mistakes bare base64 that begins with a slash (as a JPEG's does) for a path, and may decode a JPEG on a GPU, which
    produces different pixels.
    """

    token_id: int
    uris: tuple[str, ...]
    digests: tuple[str, ...] = ()
    """The images as in `Sample.images`."""
    other_ids: frozenset[int] = frozenset()
    """Placeholders of other media."""

    @classmethod
    def of(
        cls, digests: Sequence[str], folder: ImageFolder, token_id: int, other_ids: Collection[int] = ()
    ) -> Pictures:
        """Reads the image files. Raises `DataError` if one is missing."""
        files = (base64.b64encode(folder.read(digest)).decode() for digest in digests)
        uris = tuple(f"data:image/png;base64,{file}" for file in files)
        return cls(token_id, uris, tuple(digests), frozenset(other_ids))

    def can_follow(self, tokens: Iterable[int]) -> bool:
        """Returns whether a later request may contain these sampled tokens.

        In a request with images, SGLang 0.5.23 reads every placeholder as an image, video or audio. It fails with an
        HTTP 500 if there are more of them than images.
        """
        return not ({self.token_id, *self.other_ids} & set(tokens))

    def written(self, ids: Sequence[int]) -> list[int]:
        """Collapses each run of placeholders into one and returns the ids.

        Raises `SampledPlaceholder` if there are more placeholders than images, `RequestRejected` if there are fewer.
        """
        out: list[int] = []
        for token in ids:
            if token != self.token_id or not out or out[-1] != token:
                out.append(token)
        found, others = out.count(self.token_id), sum(token in self.other_ids for token in out)
        if found > len(self.uris) or others:
            raise SampledPlaceholder(
                f"the prompt has {found} runs of placeholders but {len(self.uris)} images, and {others} placeholders "
                "of other media; an engine reads all of them as media, so a conversation cannot continue once the "
                "model has sampled one; if your code added it, send its image"
            )
        if found < len(self.uris):
            raise RequestRejected(
                f"the prompt has {found} runs of placeholders but {len(self.uris)} images; write one run for each image"
            )
        return out


ENGINE_MAX_NEW_TOKENS = 128
"""SGLang's default."""
GRAMMARS = ("json_schema", "regex", "ebnf")
NOT_HANDED_OVER = "KVTransferError"
"""SGLang's error contains this if the KV cache of a request did not reach the decode engine."""


@dataclass(frozen=True, slots=True)
class EndOfText:
    """Detects the end of a completion by the same rules as an engine."""

    token_ids: frozenset[int] = frozenset()
    """Tokens that end every completion."""
    decode: Callable[[Sequence[int], bool], str] | None = None
    """(ids, skip_special_tokens) -> text. If None, stop strings that span two requests are not detected."""


class Refused(Exception):
    """An engine refused a request. Carries the status, from HTTP or the stream, and the engine's message."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


class Call:
    def __init__(
        self,
        input_ids: Sequence[int] | Ids,
        params: Mapping[str, Any],
        *,
        token_versions: bool = False,
        experts: ExpertFormat | None = None,
        experts_from: int = 0,
        end: EndOfText | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """`experts`: the format of routed experts, which are requested from token `experts_from` onwards. `pictures`:
        the images in the prompt.
        """
        self.input_ids, self._params = ids_of(input_ids), {"max_new_tokens": ENGINE_MAX_NEW_TOKENS, **params}
        self._token_versions, self._format, self._experts_from = token_versions, experts, experts_from
        self._end = end or EndOfText()
        stop = params.get("stop") or ()
        self._stops = [s for s in ([stop] if isinstance(stop, str) else stop) if s]
        self._window = 4 * max(map(len, self._stops), default=0) + 1
        """Maximum number of tokens that a stop string can span: one character may take up to four."""
        self._pictures = pictures
        self._has_grammar = any(params.get(name) for name in GRAMMARS)
        self.tokens: list[int] = []
        self.finish: str | None = None
        """stop | length, once the completion has ended."""
        self.num_requests = 0
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._texts: list[str] = []
        self._experts: RoutedExperts | None = None
        self._version, self._prompt_tokens, self._cached_tokens = NOT_SAMPLED, 0, 0
        self.read = (0, 0)
        """Prompt tokens of the latest request, and how many of them the engine had cached."""
        self.drafted = NO_DRAFTS
        """Speculative-decoding counters of the latest request."""
        self._num_earlier = 0
        """Number of tokens sampled by earlier requests."""
        self._received, self._start = 0, 0

    # ---- requests --------------------------------------------------------------------------------------------------

    def payload(self, rid: str, stream_interval: int) -> dict[str, Any]:
        """Returns the next request, which continues from the tokens so far. `stream_interval`: tokens per event."""
        self.num_requests += 1
        self._num_earlier, self._received, self.read = len(self.tokens), 0, (0, 0)
        self.drafted = NO_DRAFTS
        params = {**self._params, "no_stop_trim": False, "stream_interval": stream_interval}
        if self._num_earlier and params["max_new_tokens"] is not None:
            params["max_new_tokens"] -= self._num_earlier
        if self._num_earlier and params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - self._num_earlier)
        ids = np.concatenate([self.input_ids, np.asarray(self.tokens, np.int32)])
        if self._format is not None:
            # The engine rejects a start beyond the number of ids.
            known = self._experts_from if self._experts is None else self._experts.end
            self._start = min(max(known, 0), len(ids))
            rid = f"{rid}{ROUTED_EXPERTS_MARK}{self._start}"
        asked = {"rid": rid, "input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": True}
        if self._pictures is None:
            return asked
        return {**asked, "input_ids": self._pictures.written(ids.tolist()), "image_data": list(self._pictures.uris)}

    @property
    def picture_uris(self) -> tuple[str, ...]:
        return tuple(self._pictures.uris) if self._pictures is not None else ()

    @property
    def images(self) -> tuple[str, ...]:
        """Digests of the images in the prompt."""
        return self._pictures.digests if self._pictures is not None else ()

    @property
    def image_token(self) -> int | None:
        return self._pictures.token_id if self._pictures is not None else None

    @property
    def can_continue(self) -> bool:
        """Whether another request can continue from the tokens so far."""
        return not self._has_grammar and (self._pictures is None or self._pictures.can_follow(self.tokens))

    def start_over(self) -> None:
        for part in (self.tokens, self._log_probs, self._versions, self._texts):
            part.clear()
        self._experts, self._cached_tokens = None, 0

    # ---- events ----------------------------------------------------------------------------------------------------

    def take_event(self, event: Mapping[str, Any]) -> tuple[Generation, bool]:
        """Returns the new tokens of an event, and whether its request has ended. Sets `finish` if the completion has
        also ended.

        Raises `Refused` if the engine refused the request, and `EngineError` if the data cannot be trained on.
        """
        refuse(event)
        self.drafted = parse_drafts(event) or self.drafted
        ended = bool((event.get("meta_info") or {}).get("finish_reason"))
        part = parse_generation(self._new_of(event), self._token_versions, has_ended=ended)
        self._received += len(part.tokens)
        experts = self._new_experts(event) if ended and self._format is not None and self._received else None
        kept, stopped = self._until_stop(part)
        if ended or stopped:
            most = self._params["max_new_tokens"]  # engines check the length first
            full = most is not None and len(self.tokens) + len(kept.tokens) >= most
            here = "length" if full else "stop"
            self.finish = here if stopped else None if part.finish_reason == "abort" else part.finish_reason
        self._append(kept)
        if experts is not None and len(self.tokens) > self._num_earlier:
            self._join_experts(experts.upto(len(self.input_ids) + len(self.tokens) - 1))
        if ended and self.finish is None:
            self.settle()
        return kept if kept.finish_reason == "abort" else replace(kept, finish_reason="abort"), ended or stopped

    def settle(self) -> None:
        """Sets `finish` if the tokens already form a complete response. Called after an interruption."""
        if not self.tokens:
            return
        most = self._params["max_new_tokens"]
        if most is not None and len(self.tokens) >= most:
            self.finish = "length"
        elif self._stopped_at(len(self.tokens)) or self._ends_with_token():
            self.finish = "stop"

    def answer(self) -> Generation:
        """Returns all chunks joined. The finish reason is `abort` if the completion has not ended."""
        if not self.num_requests:
            return NEVER_SENT
        return Generation(
            tokens=tuple(self.tokens),
            log_probs=tuple(self._log_probs),
            finish_reason=self.finish or "abort",
            weight_version=self._labels(self._versions),
            text=self._text(),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            routed_experts=self._experts,
        )

    def last_part(self, part: Generation | None) -> Generation:
        """Returns the last chunk of a stream: `part`, or an empty chunk, with the routed experts of all chunks."""
        if not self.num_requests:
            return NEVER_SENT
        part = part or Generation((), (), "abort", () if self._token_versions else self._version, "")
        return replace(part, finish_reason=self.finish or "abort", routed_experts=self._experts)

    def _new_of(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the event without the tokens and text of earlier events.

        When a waiting request is aborted, SGLang 0.5.16 repeats all of its log-probs and text, and reports neither a
        prompt length nor versions.
        """
        meta = event.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") != "abort" or "prompt_tokens" in meta:
            return event
        total = int(meta.get("completion_tokens") or 0)
        pairs = [] if self._token_versions else list(meta.get("output_token_logprobs") or ())
        new = pairs[len(pairs) - total :][self._received :] if 0 < total <= len(pairs) else []
        text = str(event.get("text", "")) if new else ""
        return {"text": text, "meta_info": {**meta, "output_token_logprobs": new}}

    def _append(self, part: Generation) -> None:
        self.tokens += part.tokens
        self._log_probs += part.log_probs
        versions = part.weight_version
        self._versions += [versions] * len(part.tokens) if isinstance(versions, int) else versions
        self._version = max(versions, default=self._version) if isinstance(versions, tuple) else versions
        self._texts.append(part.text)
        if part.prompt_tokens:
            self._prompt_tokens = part.prompt_tokens - self._num_earlier
            if self._pictures is not None and self._prompt_tokens != len(self.input_ids):
                raise EngineError(
                    f"the engine counts {self._prompt_tokens} prompt tokens and the trainer {len(self.input_ids)}, so "
                    "their image processors differ, or the model sampled a placeholder next to those of an image; use "
                    "the processor files of --hf-checkpoint with default settings for both"
                )
            self.read = (part.prompt_tokens, part.cached_tokens)
            if self.num_requests == 1:
                self._cached_tokens = part.cached_tokens

    def _labels(self, versions: list[int]) -> int | tuple[int, ...]:
        if not versions:
            return self._version
        return versions[0] if len(set(versions)) == 1 and not self._token_versions else tuple(versions)

    # ---- the end of the text ---------------------------------------------------------------------------------------

    def _until_stop(self, part: Generation) -> tuple[Generation, bool]:
        """Truncates the chunk at a stop string that began in an earlier request. Also returns whether one was found."""
        before, joint = len(self.tokens), self._num_earlier
        if not joint or not self._stops or self._end.decode is None or before >= joint + self._window:
            return part, False
        tokens = [*self.tokens, *part.tokens]
        for num in range(before + 1, min(len(tokens), joint + self._window) + 1):
            if self._stopped_at(num, tokens):
                return part.first(num - before), True
        return part, False

    def _stopped_at(self, num: int, tokens: Sequence[int] | None = None) -> bool:
        """Returns whether a stop string ends at, or just before, token `num`."""
        if not self._stops or self._end.decode is None:
            return False
        tail = self._end.decode((tokens or self.tokens)[max(0, num - self._window) : num], False)
        return any(stop in tail for stop in self._stops)

    def _ends_with_token(self) -> bool:
        if self._params.get("ignore_eos"):
            return False
        last = self.tokens[-1]
        return last in self._end.token_ids or last in (self._params.get("stop_token_ids") or ())

    def _text(self) -> str:
        """Returns the engine's text. After several requests, decodes all tokens: a character can span two requests."""
        if not self._num_earlier or self._end.decode is None:
            return "".join(self._texts)
        skip = bool(self._params.get("skip_special_tokens", True))
        body = self.tokens[:-1] if self.finish == "stop" and self.tokens and self._ends_with_token() else self.tokens
        before = self.input_ids[-5:].tolist()
        text = self._end.decode([*before, *body], skip)[len(self._end.decode(before, skip)) :]
        found = [(text.find(stop) + len(stop)) for stop in self._stops if stop in text]
        return text[: min(found)] if self.finish == "stop" and found else text

    # ---- routed experts --------------------------------------------------------------------------------------------

    def _new_experts(self, event: Mapping[str, Any]) -> RoutedExperts | None:
        assert self._format is not None, "experts were not requested"
        total = len(self.input_ids) + self._num_earlier + self._received
        return parse_experts(event, self._format, start=self._start, num_tokens=total)

    def _join_experts(self, more: RoutedExperts) -> None:
        """Appends new rows. A row for a token of an earlier request is kept only if it was computed by the version that
        sampled the token.
        """
        known, num = self._experts, len(self.input_ids)
        read_under = self._versions[self._num_earlier]  # the version that computed the rows
        more = without_newer(more, self._versions[: self._num_earlier], num, num + self._num_earlier, read_under)
        if known is None:
            self._experts = replace(more, read=(num, read_under))
        elif more.end > known.end:
            self._experts = replace(known, ids=np.concatenate([known.ids, more.ids[known.end - more.start :]]))


def refuse(event: Mapping[str, Any]) -> None:
    """Raises `Refused` if a stream event reports an error.

    Ignores the error if the KV cache did not reach the decode engine, either because the prefill engine failed or
    because the request was aborted while waiting for it. SGLang 0.5.16 reports both as an internal error.
    """
    error = event.get("error")
    if error:
        raise Refused(int(error.get("code") or 500), str(error.get("message", error)))
    finish = (event.get("meta_info") or {}).get("finish_reason") or {}
    said = str(finish.get("message", ""))
    if finish.get("type") == "abort" and finish.get("status_code") and NOT_HANDED_OVER not in said:
        raise Refused(int(finish["status_code"]), said)


def require_joinable(call: Call, returned_tokens: bool) -> None:
    """Restarts an interrupted call that cannot be continued. Raises `EngineError` if it already returned tokens."""
    if call.can_continue or not call.tokens:
        return
    if returned_tokens:
        raise EngineError(
            "a stream was interrupted after it returned some tokens, and cannot be continued, because it is under a "
            "grammar or the model sampled the placeholder of an image; use generate(), which starts over"
        )
    call.start_over()
