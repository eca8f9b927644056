"""`Sample`: one training sequence, from prompt to reward; `Group`: all work for one prompt.

Life of a sample: the Data Buffer issues the sample as PENDING, with its prompt; a generate function appends tokens and
sets the status; a grader sets the reward; the conversion freezes the sample into a `TrainSample`.

Invariants
1. `loss_mask`, `rollout_log_probs`, `token_versions` and `teacher_log_probs` have `response_length` entries when set.
2. The last `response_length` entries of `tokens` are the response; the ids before them are the prompt.
3. A position with `loss_mask == 1` was sampled by an engine and has that engine's log-prob and weight version.
4. `reward is None` means "not scored". A failure never becomes a number.
5. `rollout_routed_experts` has rows from the first token on, at most one for each token but the last.

Finished and waiting samples store their lists of numbers as arrays (`pack`). Reading a field converts it to a list.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from slime.core.columns import Column, Numbers, UnpackedList
from slime.core.engine_interface import TOKEN_VERSIONS_KEY
from slime.core.errors import DataError
from slime.core.routed_experts import RoutedExperts, join

NOT_SAMPLED = -1
"""Weight version of a token that no engine sampled (a prompt, a tool result)."""
TURN_COUNTS = "turn_counts"
"""Metadata key under which a generate function reports its turns and tool calls (`slime.rollout.sample_metrics`)."""
PER_TOKEN = ("tokens", "loss_mask", "rollout_log_probs", "token_versions", "teacher_log_probs")
"""The fields that are lists of numbers: `tokens`, and all fields with one entry per response token."""


class Status(str, Enum):
    PENDING = "pending"
    """The response is not generated yet, or only in part."""
    COMPLETED = "completed"
    """The model ended the response (end-of-sequence token or stop string)."""
    TRUNCATED = "truncated"
    """A length limit ended the response."""
    ABORTED = "aborted"
    """The generation was interrupted. The tokens so far are kept and can be continued."""
    FAILED = "failed"
    """The infrastructure failed; `failure` says why. Never trained, and never scored zero."""


FINISH_REASONS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""An engine's finish reason -> status."""


@dataclass(slots=True)
class Sample:
    """One training sequence. `_T` is `len(tokens)`, `_R` is `response_length`."""

    group_index: int | None = None
    """The prompt's id. All samples of a prompt share it. It is unique over the whole run, across resumes."""
    index: int | None = None
    """The execution's id within its group. An execution is one of `n_samples_per_prompt` runs of the prompt. Fan-out
    siblings share the id."""
    prompt: str | list[dict[str, Any]] = ""
    """The prompt as text (chat template already applied) or as messages."""
    tokens: list[int] = field(default_factory=list)
    """[T] prompt and response ids, exactly as the engine read or sampled them."""
    response: str = ""
    """The response as text, for graders and people; never encoded."""
    response_length: int = 0
    """R: number of tokens after the first prompt, tool results included."""
    loss_mask: list[int] | None = None
    """[R] 1 where the token is trained; None means all ones."""
    rollout_log_probs: list[float] | None = None
    """[R] log-prob (nats) that the engine reported: at the sampling temperature, over the whole vocabulary, regardless
    of top-p and top-k; 0.0 where not sampled."""
    token_versions: list[int] | None = None
    """[R] weight version that sampled each token; `NOT_SAMPLED` elsewhere."""
    teacher_log_probs: list[float] | None = None
    """[R] log-prob (nats) under the teacher of `--opd-type sglang`; arbitrary where masked."""
    rollout_routed_experts: RoutedExperts | None = None
    """[at most T - 1, layers, topk] experts that the engine chose for each token; None: not recorded."""
    images: list[str] = field(default_factory=list)
    """Digests of the prompt's images (`slime.core.files`), in the order of their placeholders in `tokens`."""
    label: Any = None
    """The reference answer from the dataset, unchanged."""
    reward: float | dict[str, Any] | None = None
    """The score, or a dict from which `--reward-key` picks one; None while unscored."""
    status: Status = Status.PENDING
    """How the generation ended."""
    failure: str = ""
    """Why the status is FAILED."""
    unscored: str = ""
    """Why a finished sample has no reward."""
    ungradable: str = ""
    """Why the grader could not handle the answer, which then counts as wrong."""
    num_quarantined: int = 0
    """How often the sample's group was set aside until the next step, because a request got no response in time."""
    started_version: int | None = None
    """Weight version when work on the sample's group began; None if work has not begun, or starts over."""
    remove_sample: bool = False
    """If True, the sample is not trained (the conversion zeroes its mask), but counts in its group's statistics."""
    session_id: str | None = None
    """All requests with the same session id go to the same engine."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """For users' own data, which must be JSON-serialisable. slime reads the keys `rm_type`, `tools` and `turn_counts`
    (`slime.rollout.sample_metrics`)."""
    generate_function_path: str | None = None
    """Overrides `--custom-generate-function-path` for this sample (evaluation datasets set it)."""
    custom_rm_path: str | None = None
    """Overrides `--custom-rm-path` for this sample."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Values that user code set under other names (`sample.name = value`); must be JSON-serialisable."""

    if not TYPE_CHECKING:  # type checkers see only the fields, but users' functions may use other names

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _OWN_NAMES:
                object.__setattr__(self, name, value)
            else:
                self.attributes[name] = value

        def __getattr__(self, name: str) -> Any:
            # Called only for names that are not fields. pickle and copy look up dunder methods before fields exist.
            if not name.startswith("__"):
                with contextlib.suppress(KeyError):
                    return object.__getattribute__(self, "attributes")[name]
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
        """Appends tokens that an engine sampled (`log_probs`: one per token) or a tool returned (None: masked).

        `first`: the tokens; or the settings, followed by `tokens`, as in the public slime. `weight_version`: one for
        all tokens, or one per token. `meta_info`: from the engine's response, with version, finish reason and routed
        experts. `trainable`: if set, must be True with log-probs and False without. `update_terminal_info`: False if
        more of this response follows. `routed_experts`: rows of the response; existing rows are not replaced.

        Raises `DataError` if lengths differ, a sampled token has no weight version, or the experts do not fit.
        """
        tokens = first if tokens is None else tokens
        if trainable is not None and trainable != (log_probs is not None):
            said = "without log-probs" if trainable else "with log-probs"
            raise DataError(f"trainable={trainable} {said}; only sampled tokens are trained, with their log-probs")
        if meta_info is not None:
            weight_version = meta_info.get(TOKEN_VERSIONS_KEY) or int(meta_info.get("weight_version", NOT_SAMPLED))
            ended = (meta_info.get("finish_reason") or {}).get("type") if update_terminal_info else None
            finish_reason = ended if finish_reason is None else finish_reason
            recorded = meta_info.get("routed_experts")
            routed_experts = recorded if isinstance(recorded, RoutedExperts) else routed_experts
        sampled = log_probs is not None
        if log_probs is not None and len(log_probs) != len(tokens):
            raise DataError(
                f"{len(tokens)} tokens came with {len(log_probs)} log-probs; each sampled token needs its own"
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
        self.response_length += len(tokens)
        self.response += text
        if finish_reason is not None:
            self.status = FINISH_REASONS.get(finish_reason, self.status)
        self.validate()

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
        """The distinct weight versions that sampled this response, in order of first use."""
        versions = self.held("token_versions")
        known = versions.distinct.tolist() if isinstance(versions, Column) else versions or ()
        return [v for v in dict.fromkeys(known) if v != NOT_SAMPLED]

    def pack(self) -> None:
        """Stores the lists of numbers as equal arrays. Reading a field converts its array to a list again."""
        for name in PER_TOKEN:
            _FIELDS[name].pack(self)

    def held(self, name: str) -> Any:
        """Returns a field of `PER_TOKEN` in its stored form: a list, a `Column`, or None."""
        return _FIELDS[name].packed(self)

    def column(self, name: str) -> Numbers | None:
        """Returns a field of `PER_TOKEN` as a read-only array [T or R]; None if the field is not set."""
        value = self.held(name)
        return value.array if isinstance(value, Column) else None if value is None else np.asarray(value)

    def get_reward_value(self, reward_key: Any = None) -> float | None:
        """Returns the reward as a number; None while unscored.

        `reward_key`: the key to pick from a dict, or settings with this key. Raises `DataError` if the key is missing.
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

    def validate(self) -> None:
        """Raises `DataError` if invariant 1, 2 or 5 of the module is broken."""
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
        experts = self.rollout_routed_experts
        if experts is not None and (experts.start or experts.end >= max(num_tokens, 1)):
            raise DataError(
                f"sample {self.index} has routed experts for tokens {experts.start} to {experts.end} of {num_tokens}; "
                "rows must begin with the first token and end before the last one"
            )

    def copy(self) -> Sample:
        """Returns a deep copy. `copy.deepcopy` alone takes milliseconds for thousands of tokens."""
        lists = [values for name in PER_TOKEN if isinstance(values := self.held(name), list)]
        return copy.deepcopy(self, {id(values): list(values) for values in lists})

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, self.held_fields()

    def held_fields(self) -> dict[str, Any]:
        """Returns all fields in their stored form."""
        return {f.name: (self.held if f.name in _FIELDS else self.__getattribute__)(f.name) for f in FIELDS}

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dict; `from_dict` restores the sample exactly."""
        values = {k: v.tolist() if isinstance(v, Column) else v for k, v in self.held_fields().items()}
        experts = self.rollout_routed_experts
        own = {"status": self.status.value, "rollout_routed_experts": None if experts is None else experts.to_dict()}
        return values | own

    def to_json(self, *, allow_nan: bool = True) -> bytes:
        """Returns `to_dict` as JSON. Takes a microsecond for eight tokens, and is seven times as fast as `json`.

        Raises `TypeError` or `ValueError` for values that are not JSON; without `allow_nan`, also for NaN and infinity.
        """
        return fields_to_json(self.to_dict(), allow_nan=allow_nan)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Returns the sample from `to_dict`. Raises `DataError` for unknown fields."""
        unknown = set(data) - {f.name for f in FIELDS}
        if unknown:
            raise DataError(f"slime has no sample fields {sorted(unknown)}; load them with the version that wrote them")
        experts = data.get("rollout_routed_experts")
        restored = None if experts is None else RoutedExperts.from_dict(experts)
        return cls(**{**data, "status": Status(data["status"]), "rollout_routed_experts": restored})


def fields_to_json(fields: Mapping[str, Any], *, allow_nan: bool = True) -> bytes:
    """Returns the fields of a sample as JSON. Raises the same errors as `Sample.to_json`."""

    def part(name: str, value: Any) -> orjson.Fragment:
        if name in PER_TOKEN and isinstance(value, list | tuple):
            with contextlib.suppress(TypeError):  # `json` handles other values, and integers beyond 64 bits
                text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
                if b"n" not in text:  # orjson writes null for NaN
                    return orjson.Fragment(text)
        return orjson.Fragment(json.dumps(value, allow_nan=allow_nan))

    return orjson.dumps({name: part(name, value) for name, value in fields.items()})


FIELDS = dataclasses.fields(Sample)
_OWN_NAMES = frozenset(dir(Sample)) | {f.name for f in FIELDS}
setattr(Sample, "Status", Status)  # noqa: B010 - the public name; inside the class it would be another type
_FIELDS = {name: UnpackedList(Sample.__dict__[name]) for name in PER_TOKEN}
"""Descriptors of the fields that may be stored as arrays."""
for _name, _field in _FIELDS.items():
    setattr(Sample, _name, _field)


@dataclass(frozen=True, slots=True)
class Group:
    """All work for one prompt: the unit that the Data Buffer issues, takes back, filters and counts."""

    group_index: int
    samples: tuple[Sample, ...]
    """All samples, at least one per execution. Fan-out siblings are adjacent."""
    attempts: int = 0
    """How often the group was issued before."""

    def __post_init__(self) -> None:
        stray = {s.group_index for s in self.samples} - {self.group_index}
        if stray:
            raise DataError(f"group {self.group_index} holds samples of groups {sorted(map(str, stray))}")
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
    """A usable row of a dataset. Its containers are read-only, so code that issues samples copies them."""

    prompt: str | list[dict[str, Any]]
    """The prompt as text (chat template already applied) or as messages."""
    prompt_tokens: tuple[int, ...] | None
    """The prompt as ids; None if it could not be encoded (no tokenizer, or messages without a chat template)."""
    label: Any
    """The reference answer from the file, unchanged; None without a label key."""
    metadata: Mapping[str, Any]
    """JSON-serialisable. The key `tools` has the row's tool definitions."""
    source: str
    """The row's position, for messages: `train.jsonl:17` (line of a text file or row of a parquet file, from 1)."""
    images: tuple[str, ...] = ()
    """Digests of the prompt's images (`slime.core.files`), in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identifies a dataset's rows. A data cursor in a checkpoint is valid for one fingerprint."""

    source: str
    """Path and slice as given. Used only in messages, because moving the file does not change the data."""
    num_rows: int
    """Number of usable rows."""
    digest: str
    """SHA-256 (hex) over prompt, label and metadata of every usable row in order, after template and filters."""

    def same_data(self, other: Fingerprint) -> bool:
        """Returns whether a data cursor for one dataset is valid for the other."""
        return (self.num_rows, self.digest) == (other.num_rows, other.digest)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(**data)
