"""`Sample`: one training sequence, from prompt to reward. `Group`: all work for one prompt.

Sample lifecycle: the Data Buffer issues a PENDING sample with its prompt, a generate function appends tokens and sets
the status, a grader sets the reward, and `TrainSample.from_sample` freezes the result for training.

Invariants
1. `loss_mask`, `rollout_log_probs`, `token_versions`, `teacher_log_probs` and `token_rewards` have `response_length`
   entries when set, and token rewards are finite.
2. `tokens` is the prompt followed by `response_length` response ids.
3. A token with `loss_mask == 1` was sampled by an engine and has that engine's log-prob and weight version.
4. `reward is None` means "not scored". A failure is never turned into a score.
5. `rollout_routed_experts` starts at the first token and has at most one row for every token except the last.

`pack` stores the numeric lists of finished and buffered samples as arrays. Reading a field converts it back to a list.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from slime.core.columns import Column, Numbers, UnpackedList
from slime.core.engine_interface import TOKEN_VERSIONS_KEY
from slime.core.errors import DataError
from slime.core.routed_experts import RoutedExperts, join

NOT_SAMPLED = -1
"""Weight version of a token that was not sampled by an engine (prompt or tool result)."""
TURN_COUNTS = "turn_counts"
"""Metadata key for a generate function's turn and tool-call counts (`slime.rollout.sample_metrics`)."""
PER_TOKEN = ("tokens", "loss_mask", "rollout_log_probs", "token_versions", "teacher_log_probs", "token_rewards")
"""Fields that are lists of numbers: `tokens` and the fields with one entry per response token."""


C = TypeVar("C", bound="Counters")


class Status(str, Enum):
    PENDING = "pending"
    """The response has not been generated yet, or only partially."""
    COMPLETED = "completed"
    """The model finished the response (end-of-sequence token or stop string)."""
    TRUNCATED = "truncated"
    """The response hit a length limit."""
    ABORTED = "aborted"
    """Generation was interrupted. It can resume from the tokens generated so far."""
    FAILED = "failed"
    """The infrastructure failed (see `failure`). The sample is never trained on or given a score of zero."""


PUBLIC_FIELDS: Mapping[str, Any] = {
    "rollout_id": None,
    "train_metadata": None,
    "apply_chat_template_kwargs": None,
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "multimodal_train_input_id": None,
    "non_generation_time": 0.0,
    "rollout_top_p_token_ids": None,
    "rollout_top_p_token_offsets": None,
}
"""Fields of the public slime's `Sample` that are attributes here -> their value when unset."""
UNSYNCED = "default"
"""What an engine reports as its weight version before the first weight sync. Counts as version 0."""


def version_of(reported: Any) -> int:
    """Returns a weight version that an engine reported, or that user code copied from its report."""
    return 0 if reported == UNSYNCED else int(reported)


class Counters(dict[str, Any]):
    """Counters summed over an engine's requests. A dict, so that samples remain JSON-serialisable."""

    keys_of: ClassVar[Mapping[str, str]] = {}
    """Counter -> its key in the engine's `meta_info`."""

    def __init__(self, given: Mapping[str, Any] | None = None, **named: Any) -> None:
        super().__init__({**dict.fromkeys(self.keys_of, 0), **(given or {}), **named})

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).keys_of:
                return self[name]
            raise AttributeError(f"{type(self).__name__} has no counter {name!r}; it has {', '.join(self.keys_of)}")

        def __setattr__(self, name: str, value: Any) -> None:
            self[name] = value

    def add(self, meta_info: Mapping[str, Any], *_: Any) -> None:
        """Adds the counts of one request. Counts that the engine does not report are 0."""
        for name, key in self.keys_of.items():
            self[name] += int(meta_info.get(key) or 0)

    def to_dict(self) -> dict[str, Any]:
        return dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(data)


class SpecInfo(Counters):
    """Counters of speculative decoding."""

    keys_of: ClassVar[Mapping[str, str]] = {
        "spec_accept_token_num": "spec_accept_token_num",
        "spec_draft_token_num": "spec_draft_token_num",
        "spec_verify_ct": "spec_verify_ct",
        "completion_token_num": "completion_tokens",
    }

    @property
    def spec_accept_rate(self) -> float:
        return float(self["spec_accept_token_num"] / max(1, self["spec_draft_token_num"]))

    @property
    def spec_accept_length(self) -> float:
        return float(self["completion_token_num"] / max(1, self["spec_verify_ct"]))


class PrefixCacheInfo(Counters):
    """Counters of an engine's prefix cache."""

    keys_of: ClassVar[Mapping[str, str]] = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}

    @property
    def prefix_cache_hit_rate(self) -> float:
        return float(self["cached_tokens"] / max(1, self["total_prompt_tokens"]))


FINISH_REASONS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""An engine's finish reason -> status."""


@dataclass(slots=True)
class Sample:
    """One training sequence. `_T` is `len(tokens)`, `_R` is `response_length`."""

    group_index: int | None = None
    """Prompt id, shared by all samples of the prompt. Unique within a run, including across resumes."""
    index: int | None = None
    """Execution id within the group. An execution is one of `n_samples_per_prompt` runs of the prompt. Fan-out siblings
    share the id."""
    prompt: Any = ""
    """The prompt as text (chat template already applied) or as messages; with a generate function of your own and
    without a template, any JSON value."""
    tokens: list[int] = field(default_factory=list)
    """[T] prompt and response ids, exactly as the engine received or sampled them."""
    response: str = ""
    """The response text, for graders and display, without the end-of-sequence token (which `slime samples` does show).
    The text is never re-tokenized."""
    response_length: int = 0
    """R: number of tokens after the initial prompt, including tool results."""
    loss_mask: list[int] | None = None
    """[R] 1 where the token is trained on; None means all ones."""
    rollout_log_probs: list[float] | None = None
    """[R] log-probs (nats) reported by the engine: at the sampling temperature, over the full vocabulary, without top-p
    or top-k. 0.0 where not sampled."""
    token_versions: list[int] | None = None
    """[R] weight version that sampled each token, or `NOT_SAMPLED`."""
    teacher_log_probs: list[float] | None = None
    """[R] log-probs (nats) under the teacher of `--opd-type sglang`; undefined where masked."""
    token_rewards: list[float] | None = None
    """[R] reward at each response token, in addition to `reward`, which comes at the last trained token. None: all are
    0. A reward at a masked token counts at the last trained token before it; before the first one, it does not count
    (`credited_rewards`)."""
    rollout_routed_experts: RoutedExperts | None = None
    """[at most T - 1, layers, topk] experts selected by the engine for each token. None: not recorded."""
    images: list[str] = field(default_factory=list)
    """Digests of the prompt's images (`slime.core.files`), in the order of their placeholders in `tokens`."""
    label: Any = None
    """The reference answer from the dataset, unchanged."""
    reward: float | dict[str, Any] | None = None
    """The score, or a dict of scores from which `--reward-key` selects one. None while unscored."""
    status: Status = Status.PENDING
    """Progress or outcome of generation."""
    failure: str = ""
    """Why the status is FAILED."""
    unscored: str = ""
    """Why a finished sample has no reward."""
    ungradable: str = ""
    """Why the grader could not process the answer, which then counts as wrong."""
    num_quarantined: int = 0
    """How often the sample's group was deferred to the next step because a request timed out."""
    started_version: int | None = None
    """Weight version when generation of the group started. None: not started, or restarting from scratch."""
    remove_sample: bool = False
    """If True, the sample's loss mask is zeroed, but the sample still counts in its group's statistics."""
    session_id: str | None = None
    """All requests with the same session id go to the same engine."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Arbitrary JSON-serialisable user data. slime reads the keys `rm_type`, `tools` and `turn_counts`
    (`slime.rollout.sample_metrics`)."""
    generate_function_path: str | None = None
    """Overrides `--custom-generate-function-path` for this sample (evaluation datasets set it)."""
    custom_rm_path: str | None = None
    """Overrides `--custom-rm-path` for this sample."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Extra attributes set by user code (`sample.name = value`). Values must be JSON-serialisable."""
    as_issued: dict[str, Any] = field(default_factory=dict)
    """Field -> its value before user code changed it, from which another attempt starts."""

    if not TYPE_CHECKING:  # type checkers should reject unknown names, but user code may set any at runtime

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _OWN_NAMES:
                object.__setattr__(self, name, value)
            else:
                self.attributes[name] = value

        def __getattr__(self, name: str) -> Any:
            # Only called for names that are not fields. pickle and copy look up dunder methods before fields exist.
            if not name.startswith("__"):
                with contextlib.suppress(KeyError):
                    return object.__getattribute__(self, "attributes")[name]
                with contextlib.suppress(KeyError):
                    return PUBLIC_FIELDS[name]
            raise AttributeError(f"a sample has no attribute {name!r}")

        def __delattr__(self, name: str) -> None:
            if name in _OWN_NAMES or self.attributes.pop(name, self) is self:
                object.__delattr__(self, name)

    def append_response_tokens(
        self,
        first: Any,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool | None = None,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
        *,
        weight_version: int | Sequence[int] = NOT_SAMPLED,
        finish_reason: str | None = None,
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        """Appends sampled tokens (with one log-prob each) or tool output (no log-probs, masked from the loss).

        `first`: the tokens, or `args` followed by `tokens` as in the public slime. `weight_version`: one for all tokens
        or one per token. `meta_info`: the engine's `meta_info`, which provides weight version, finish reason and routed
        experts. `trainable`: if set, must match whether log-probs are passed. `update_terminal_info`: False if this
        response will continue. `routed_experts`: rows for the new tokens; existing rows are not replaced.

        Raises `DataError` for mismatched lengths, a sampled token without weight version, or invalid routed experts.
        """
        tokens = first if tokens is None else tokens
        if trainable is not None and trainable != (log_probs is not None):
            said = "without log-probs" if trainable else "with log-probs"
            raise DataError(f"trainable={trainable} {said}; a token is trainable if and only if it has a log-prob")
        if meta_info is not None:
            weight_version = meta_info.get(TOKEN_VERSIONS_KEY) or version_of(meta_info.get("weight_version", -1))
            ended = (meta_info.get("finish_reason") or {}).get("type") if update_terminal_info else None
            finish_reason = ended if finish_reason is None else finish_reason
            recorded = meta_info.get("routed_experts")
            routed_experts = recorded if isinstance(recorded, RoutedExperts) else routed_experts
        sampled = log_probs is not None
        if log_probs is not None and len(log_probs) != len(tokens):
            raise DataError(
                f"got {len(log_probs)} log-probs for {len(tokens)} tokens; pass one log-prob per sampled token"
            )
        versions = [weight_version] * len(tokens) if isinstance(weight_version, int) else list(weight_version)
        if sampled and min(versions, default=0) < 0:
            raise DataError(f"{len(tokens)} sampled tokens have no weight version; the engine must report it")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        self.rollout_log_probs = self.rollout_log_probs or []
        self.token_versions = self.token_versions or []
        num_tokens, first = len(self.tokens) + len(tokens), self.prompt_length
        experts = join(self.rollout_routed_experts, routed_experts, num_tokens, self.token_versions, first)
        self.rollout_routed_experts = experts
        self.tokens.extend(tokens)
        self.loss_mask.extend([int(sampled)] * len(tokens))
        self.rollout_log_probs.extend(log_probs if log_probs is not None else [0.0] * len(tokens))
        self.token_versions.extend(versions if sampled else [NOT_SAMPLED] * len(tokens))
        if self.token_rewards is not None:
            self.token_rewards.extend([0.0] * len(tokens))
        self.response_length += len(tokens)
        self.response += text
        if finish_reason is not None:
            self.status = FINISH_REASONS.get(finish_reason, self.status)
        self._count(meta_info if update_terminal_info else None)
        self.validate()

    def add_turn_reward(self, value: float) -> None:
        """Adds a reward at the end of the latest turn: at the last token so far that an engine sampled.

        Tokens without weight versions count as sampled where the loss mask is not 0. Raises `DataError` if the reward
        is not a finite number, or if no token is sampled yet.
        """
        try:
            finite = math.isfinite(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"sample {self.index}: the reward of a turn must be a number ({error})") from error
        if not finite:
            raise DataError(f"sample {self.index}: the reward of a turn must be finite, got {value}")
        place = self._last_sampled()
        if place is None:
            raise DataError(f"sample {self.index} has no sampled token yet; add the reward of a turn after the turn")
        rewards = [0.0] * self.response_length if self.token_rewards is None else self.token_rewards
        before, rewards[place] = rewards[place], rewards[place] + float(value)
        if not math.isfinite(rewards[place]):
            raise DataError(
                f"sample {self.index}: the rewards of a turn must have a finite sum, got {value} after {before}"
            )
        self.token_rewards = rewards

    def _last_sampled(self) -> int | None:
        """Returns the position of the last sampled token in the response. Reads from the end."""
        places, versions, mask = range(self.response_length - 1, -1, -1), self.token_versions or (), self.loss_mask
        by_version = (place for place in places if place < len(versions) and versions[place] != NOT_SAMPLED)
        by_mask = (place for place in places if mask is None or mask[place])
        return next(by_version, next(by_mask, None))

    def _count(self, meta_info: Mapping[str, Any] | None) -> None:
        """Adds the counts of a finished request to the counters."""
        if meta_info is not None:
            self.spec_info.add(meta_info)
            self.prefix_cache_info.add(meta_info)

    @property
    def prompt_length(self) -> int:
        return len(self.held("tokens")) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of trained tokens."""
        mask = self.held("loss_mask")
        if mask is None:
            return self.response_length
        return int(mask.array.sum(dtype=np.int64)) if isinstance(mask, Column) else sum(mask)

    @property
    def weight_versions(self) -> list[int]:
        """Distinct weight versions that sampled this response, in order of first use.

        User code may set them; these values apply only while the tokens have no versions of their own.
        """
        versions = self.held("token_versions")
        if versions is None:
            return [version_of(one) for one in self.attributes.get("weight_versions", ())]
        known = versions.distinct.tolist() if isinstance(versions, Column) else versions or ()
        return [v for v in dict.fromkeys(known) if v != NOT_SAMPLED]

    @weight_versions.setter
    def weight_versions(self, reported: Sequence[Any]) -> None:
        self.attributes["weight_versions"] = [version_of(one) for one in reported]

    @property
    def spec_info(self) -> SpecInfo:
        """Counters of speculative decoding, stored in `attributes`."""
        return self._counters("spec_info", SpecInfo)

    @spec_info.setter
    def spec_info(self, counters: Mapping[str, Any]) -> None:
        self.attributes["spec_info"] = SpecInfo(counters)

    @property
    def prefix_cache_info(self) -> PrefixCacheInfo:
        """Counters of the engines' prefix cache, stored in `attributes`."""
        return self._counters("prefix_cache_info", PrefixCacheInfo)

    @prefix_cache_info.setter
    def prefix_cache_info(self, counters: Mapping[str, Any]) -> None:
        self.attributes["prefix_cache_info"] = PrefixCacheInfo(counters)

    def _counters(self, name: str, kind: type[C]) -> C:
        found = self.attributes.get(name)
        if not isinstance(found, kind):  # not set, or a dict that was read from JSON
            found = self.attributes[name] = kind(found)
        return found

    def pack(self) -> None:
        """Stores the numeric lists as arrays without losing precision. Reading a field converts it back to a list."""
        for name in PER_TOKEN:
            _FIELDS[name].pack(self)

    def held(self, name: str) -> Any:
        """Returns a `PER_TOKEN` field as stored: a list, a `Column`, or None."""
        return _FIELDS[name].packed(self)

    def column(self, name: str) -> Numbers | None:
        """Returns a `PER_TOKEN` field as a read-only array [T or R]. None: the field is not set."""
        value = self.held(name)
        return value.array if isinstance(value, Column) else None if value is None else np.asarray(value)

    def get_reward_value(self, reward_key: Any = None) -> float | None:
        """Returns the reward as a number, or None while unscored.

        `reward_key`: key of a dict reward, or an object with a `reward_key` attribute. Raises `DataError` if missing.
        """
        if self.reward is None:
            return None
        reward_key = getattr(reward_key, "reward_key", reward_key)
        if isinstance(self.reward, dict):
            if reward_key is None or reward_key not in self.reward:
                raise DataError(
                    f"--reward-key {reward_key!r} is not a key of the reward; choose one of {sorted(self.reward)}"
                )
            return float(self.reward[reward_key])
        return float(self.reward)

    def total_reward(self, reward_key: Any = None) -> float | None:
        """Returns `get_reward_value` plus the credited token rewards, or None while unscored."""
        reward, rewards = self.get_reward_value(reward_key), self.column("token_rewards")
        if reward is None or rewards is None:
            return reward
        mask = self.column("loss_mask")
        return reward + sum_of_rewards(rewards, np.ones(len(rewards)) if mask is None else mask)

    def validate(self) -> None:
        """Raises `DataError` if the sample violates invariant 1, 2 or 5 of this module.

        Token rewards that your code set as an array, a tensor or a tuple become a list.
        """
        num_tokens = len(self.held("tokens"))
        if not 0 <= self.response_length <= num_tokens:
            raise DataError(
                f"sample {self.index} has {num_tokens} tokens, but its response_length is {self.response_length}"
            )
        for name in PER_TOKEN[1:]:
            value = self.held(name)
            if value is not None and len(value) != self.response_length:
                raise DataError(
                    f"sample {self.index}: {name} has {len(value)} entries for {self.response_length} response tokens"
                )
        if (rewards := self.held("token_rewards")) is not None:
            values = _finite_rewards(self, rewards.array if isinstance(rewards, Column) else rewards)
            if not isinstance(rewards, list | Column):
                self.token_rewards = values.tolist()
        experts = self.rollout_routed_experts
        if experts is not None and (experts.start or experts.end >= max(num_tokens, 1)):
            raise DataError(
                f"sample {self.index} has routed experts for tokens {experts.start} to {experts.end} of {num_tokens}; "
                "they must start at the first token and stop before the last one"
            )

    def copy(self) -> Sample:
        """Returns a deep copy. Plain `copy.deepcopy` would take milliseconds for thousands of tokens."""
        lists = [values for name in PER_TOKEN if isinstance(values := self.held(name), list)]
        return copy.deepcopy(self, {id(values): list(values) for values in lists})

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, self.held_fields()

    def held_fields(self) -> dict[str, Any]:
        """Returns all fields as stored."""
        return {f.name: (self.held if f.name in _FIELDS else self.__getattribute__)(f.name) for f in FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict from which `from_dict` restores an identical sample."""
        values = {k: v.tolist() if isinstance(v, Column) else v for k, v in self.held_fields().items()}
        experts = self.rollout_routed_experts
        own = {"status": self.status.value, "rollout_routed_experts": None if experts is None else experts.to_dict()}
        return values | own

    def to_json(self, *, allow_nan: bool = True) -> bytes:
        """Returns `to_dict` as JSON. Takes about a microsecond per eight tokens and is seven times as fast as `json`.

        Raises `TypeError` or `ValueError` for values that are not JSON (without `allow_nan`, also NaN and infinity).
        """
        return fields_to_json(self.to_dict(), allow_nan=allow_nan)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Restores a sample from `to_dict`. Raises `DataError` for unknown fields."""
        unknown = set(data) - {f.name for f in FIELDS}
        if unknown:
            raise DataError(f"unknown sample fields {sorted(unknown)}; use the slime version that wrote them")
        experts = data.get("rollout_routed_experts")
        restored = None if experts is None else RoutedExperts.from_dict(experts)
        return cls(**{**data, "status": Status(data["status"]), "rollout_routed_experts": restored})


def fields_to_json(fields: Mapping[str, Any], *, allow_nan: bool = True) -> bytes:
    """Returns a sample's fields as JSON. Raises the same errors as `Sample.to_json`."""

    def part(name: str, value: Any) -> orjson.Fragment:
        if name in PER_TOKEN and isinstance(value, list | tuple):
            with contextlib.suppress(TypeError):  # fall back to `json` for other types and integers beyond 64 bits
                text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
                if b"n" not in text:  # orjson writes null for NaN
                    return orjson.Fragment(text)
        return orjson.Fragment(json.dumps(value, allow_nan=allow_nan))

    return orjson.dumps({name: part(name, value) for name, value in fields.items()})


def credited_rewards(rewards: Numbers, mask: Numbers) -> npt.NDArray[np.float64]:
    """Returns token rewards [R] where they count: those at untrained tokens are added to the last trained token before.

    Rewards before the first trained token do not count, because no trained token led to them: they belong to the
    sibling that trains the earlier turn. `mask` [R]: positive where trained.
    """
    rewards, trained = np.asarray(rewards, np.float64), np.asarray(mask) > 0
    places = np.flatnonzero(rewards)
    last = np.searchsorted(trained_at := np.flatnonzero(trained), places, side="right") - 1
    out, counted = np.zeros(len(trained)), last >= 0
    np.add.at(out, trained_at[last[counted]], rewards[places[counted]])
    return out


def sum_of_rewards(rewards: Numbers, mask: Numbers) -> float:
    """Returns the exact sum of the token rewards [R] that count. Without a trained token (`remove_sample`), all do."""
    rewards, trained = np.asarray(rewards, np.float64), np.asarray(mask) > 0
    rewards = rewards[int(trained.argmax()) :] if len(trained) else rewards
    return math.fsum(rewards[rewards != 0].tolist())


def _finite_rewards(sample: Sample, rewards: Any) -> Numbers:
    """Returns token rewards as an array. Raises `DataError` if one is not finite, or their sum."""
    name = f"sample {getattr(sample, 'index', None)}: token_rewards"
    try:
        given, values = np.asarray(rewards), np.asarray(rewards, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # of torch: a tensor with a gradient
        raise DataError(f"{name} must be numbers ({error})") from error
    if values.ndim != 1:
        got = f"{rewards!r:.80}" if values.ndim == 0 else f"the shape {values.shape}"
        raise DataError(f"{name} is {got}, but must have one number per response token")
    if given.dtype.kind not in "biufO":
        raise DataError(f"{name} must be numbers, got {rewards[0]!r:.80}")
    finite = np.isfinite(values)
    if not finite.all():
        place = int(finite.argmin())
        raise DataError(f"{name}[{place}] is {rewards[place]}; rewards must be finite")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.abs(values).sum()):
            raise DataError(f"{name} has values up to {np.abs(values).max()}; rewards must have a finite sum")
    return values


FIELDS = dataclasses.fields(Sample)
_OWN_NAMES = frozenset(dir(Sample)) | {f.name for f in FIELDS}
for _public in (Status, SpecInfo, PrefixCacheInfo):  # the public slime's names; nested classes would be different types
    setattr(Sample, _public.__name__, _public)
_CHECKS = {"token_rewards": _finite_rewards}
_FIELDS = {name: UnpackedList(Sample.__dict__[name], _CHECKS.get(name)) for name in PER_TOKEN}
"""Descriptors of the fields that can be stored as arrays."""
for _name, _field in _FIELDS.items():
    setattr(Sample, _name, _field)
_SET_LATER = frozenset(PUBLIC_FIELDS) | {"weight_versions", "spec_info", "prefix_cache_info"}
_init: Any = Sample.__init__


@functools.wraps(_init)
def _init_with_public_names(self: Sample, *given: Any, **named: Any) -> None:
    public = {name: named.pop(name) for name in _SET_LATER & named.keys()}
    _init(self, *given, **named)
    for name, value in public.items():
        setattr(self, name, value)


setattr(Sample, "__init__", _init_with_public_names)  # noqa: B010 - type checkers see the fields alone


@dataclass(frozen=True, slots=True)
class Group:
    """All work for one prompt: the unit that the Data Buffer issues, reclaims, filters and counts."""

    group_index: int
    samples: tuple[Sample, ...]
    """All samples, at least one per execution. Fan-out siblings are adjacent."""
    attempts: int = 0
    """Number of times the group was issued before."""

    def __post_init__(self) -> None:
        stray = {s.group_index for s in self.samples} - {self.group_index}
        if stray:
            raise DataError(f"group {self.group_index} contains samples of other groups: {sorted(map(str, stray))}")
        if not self.samples:
            raise DataError(f"group {self.group_index} is empty")

    @property
    def num_executions(self) -> int:
        return len({s.index for s in self.samples})

    def pack(self) -> None:
        for sample in self.samples:
            sample.pack()

    def with_samples(self, samples: Sequence[Sample]) -> Group:
        return dataclasses.replace(self, samples=tuple(samples))

    def to_dict(self) -> dict[str, Any]:
        return {
            "group_index": self.group_index,
            "attempts": self.attempts,
            "samples": [s.to_dict() for s in self.samples],
        }

    def to_json(self, *, allow_nan: bool = True) -> str:
        """Returns `to_dict` as JSON. Raises the same errors as `Sample.to_json`."""
        samples = [orjson.Fragment(s.to_json(allow_nan=allow_nan)) for s in self.samples]
        return orjson.dumps(self.to_dict() | {"samples": samples}).decode()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Group:
        samples = tuple(Sample.from_dict(s) for s in data["samples"])
        return cls(group_index=data["group_index"], attempts=data["attempts"], samples=samples)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A usable dataset row. Its containers are read-only, so samples must copy them."""

    prompt: Any
    """As in `Sample`."""
    prompt_tokens: tuple[int, ...] | None
    """The tokenized prompt. None: there is no tokenizer, or the prompt is messages without a chat template."""
    label: Any
    """The reference answer from the file, unchanged. None: no label key is set."""
    metadata: Mapping[str, Any]
    """JSON-serialisable. `tools` contains the row's tool definitions."""
    source: str
    """Where the row comes from, for messages: `train.jsonl:17` (1-based line, or row of a parquet file)."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images (`slime.core.files`), in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies a dataset's rows. A data cursor in a checkpoint is valid for one fingerprint."""

    source: str
    """Path and slice as specified. Only used in messages, because moving the file does not change the data."""
    num_rows: int
    """Number of usable rows."""
    digest: str
    """SHA-256 (hex) of the prompt, label and metadata of all usable rows in order, after templating and filtering."""

    def same_data(self, other: Fingerprint) -> bool:
        """Returns whether a data cursor of one dataset is valid for the other."""
        return (self.num_rows, self.digest) == (other.num_rows, other.digest)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(**data)
