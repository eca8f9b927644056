"""`Transcript`: what one execution asked of engines, what they sampled, and whether the run took a request of it back.

The client writes it (`client`), the end of the execution reads it (`execute`). Tasks of an execution inherit it through
`TRANSCRIPT`; tokens reach a sample by whatever way the user's code likes, and are checked against it in the end.

Invariants
1. A trained token is the id that an engine sampled at this place, behind exactly the ids that stand before it in the
   sample, with that engine's log-prob and weight version (law 1). `problem` says where this does not hold first.
2. An execution of which the run took any request back is never finished, whatever its code says (`taken_back`).
3. Ids are held once: an answer holds those that no earlier answer of the execution has.

Memory is that of the tokens read and sampled, 4 to 16 bytes each; the time of a request and of the check is linear in
the length of the conversation, mostly one conversion from a list.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from slime.core.routed_experts import RoutedExperts, join
from slime.core.sample import NOT_SAMPLED, Sample
from slime.rollout.client.call import Generation

Ids = npt.NDArray[np.int32]
Numbers = Sequence[float] | npt.NDArray[Any]
TOLERANCE = 1e-6
"""Of a log-prob that user code kept in another precision, relative and absolute (nats)."""
OTHERWISE_SAMPLED = "not as sampled"
"""How the reasons of `problem` begin."""


class Asked(Protocol):
    """A call of the client."""

    input_ids: list[int]

    def answer(self) -> Generation: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    """What engines sampled behind some ids."""

    before: _Answer | None
    """The earlier answer behind whose last token the ids of this request go on."""
    new_ids: Ids
    """The ids of the request that come behind those of `before`."""
    begin: int
    """Number of ids that were read."""
    read: int
    """Digest of these."""
    said: int
    """Digest of these and of the sampled ones."""
    tokens: Ids
    log_probs: npt.NDArray[np.float64]
    versions: Ids
    experts: RoutedExperts | None

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Of each of its tokens; what an earlier try left has some that no engine sampled."""
        sampled: npt.NDArray[np.bool_] = self.versions != NOT_SAMPLED
        return sampled

    def ids(self) -> Ids:
        """All that was read, then all that was sampled."""
        parts, one = [self.tokens, self.new_ids], self.before
        while one is not None:
            parts += [one.tokens, one.new_ids]
            one = one.before
        return np.concatenate(parts[::-1])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Transcript:
    """Of one execution, or of what is done with the samples of a whole group."""

    taken_back: bool = False
    """The run ended a request of it, wherever that came from: policy, judge, agent, hook."""
    closed: bool = False
    """Its execution has ended: what a task of it that lives on asks is nobody's any more."""
    _answers: list[_Answer] = field(default_factory=list)
    _by_read: dict[int, list[_Answer]] = field(default_factory=dict)
    _by_said: dict[int, _Answer] = field(default_factory=dict)
    _begins: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    """Of the answers, each number once, in order."""
    _calls: dict[Asked, None] = field(default_factory=dict)
    """Under way, or streams that nobody reads to the end."""

    @classmethod
    def behind(cls, sample: Sample) -> Transcript:
        """Of an execution that goes on where an earlier try, whose trained tokens were checked then, left `sample`."""
        begun = cls()
        _LIVE.add(begun)
        versions, log_probs = sample.column("token_versions"), sample.column("rollout_log_probs")
        if versions is not None and log_probs is not None and len(versions):
            mask = sample.column("loss_mask")
            versions = versions if mask is None else np.where(mask > 0, versions, NOT_SAMPLED)
            ids = np.array(sample.column("tokens"), np.int32)
            begun._add(begun._made(ids[: sample.prompt_length], ids[sample.prompt_length :], log_probs, versions, None))
        return begun

    def close(self) -> None:
        """Its execution has ended."""
        self.closed = True
        _LIVE.discard(self)

    def begin(self, call: Asked) -> None:
        """Something is asked; what has come of it counts from now on."""
        self._calls[call] = None

    def end(self, call: Asked) -> None:
        """Its answer, or the part of one that came before it was ended."""
        self._calls.pop(call, None)
        for answer in self._of_call(call):
            self._add(answer)

    def _of_call(self, call: Asked) -> list[_Answer]:
        """What has come of a call, if anything has."""
        generation = call.answer()
        if not generation.tokens:
            return []
        ids, tokens = np.asarray(call.input_ids, np.int32), np.asarray(generation.tokens, np.int32)
        return [self._made(ids, tokens, generation.log_probs, generation.versions, generation.routed_experts)]

    def _made(
        self, ids: Ids, tokens: Ids, log_probs: Numbers, versions: Numbers, experts: RoutedExperts | None
    ) -> _Answer:
        digests = _prefix_digests(ids, [*self._ends[: bisect_right(self._ends, len(ids))], len(ids)])
        before = next((self._by_said[d] for _, d in sorted(digests.items(), reverse=True) if d in self._by_said), None)
        whole = np.concatenate([ids, tokens])
        return _Answer(
            before,
            ids[0 if before is None else before.end :].copy(),
            begin=len(ids),
            read=digests[len(ids)],
            said=_prefix_digests(whole, [len(whole)])[len(whole)],
            tokens=tokens,
            log_probs=np.array(log_probs, np.float64),
            versions=np.array(versions, np.int32),
            experts=experts,
        )

    def _add(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._by_read.setdefault(answer.read, []).append(answer)
        self._by_said[answer.said] = answer
        for places, number in ((self._begins, answer.begin), (self._ends, answer.end)):
            at = bisect_left(places, number)
            if at == len(places) or places[at] != number:
                places.insert(at, number)

    def complete(self, sample: Sample) -> None:
        """Writes versions, log-probs and routed experts of sampled tokens where the user's code left them out."""
        known, said, num = sample.token_versions or [], sample.column("rollout_log_probs"), sample.response_length
        if len(known) >= num and said is not None:
            return
        versions, log_probs, recorded = np.full(num, NOT_SAMPLED, np.int32), np.zeros(num), list[_Answer]()
        for answer, ours, own in self._said_in(sample):
            here = answer.sampled[ours]
            if said is not None and len(said) == num:
                here = here & _close(said[own], answer.log_probs[ours])
            versions[own] = np.where(here, answer.versions[ours], versions[own])
            log_probs[own] = np.where(here, answer.log_probs[ours], log_probs[own])
            if ours.stop == len(answer.tokens):
                recorded.append(answer)
        if (versions == NOT_SAMPLED).all():
            return
        sample.token_versions = [*known, *versions[len(known) :].tolist()]
        for answer in sorted(recorded, key=lambda one: one.begin):  # what was read first stays
            experts, first = sample.rollout_routed_experts, sample.prompt_length
            sample.rollout_routed_experts = join(experts, answer.experts, answer.end, sample.token_versions, first)
        if said is None:
            sample.rollout_log_probs = log_probs.tolist()

    def problem(self, sample: Sample) -> str:
        """Why a sample may not be trained: its first token against invariant 1; empty if there is none.

        A sample that says nothing of log-probs and versions, of an execution that asked no engine, was not sampled and
        does not claim it: conversations that are learned by heart.
        """
        if sample.remove_sample or not (_claims(sample) or self._answers or self._calls):
            return ""
        found = list(self._said_in(sample))
        reason = self._first_problem(sample, found)
        if reason:  # it may have been asked for by a task that others share, or by a thread
            others = [one for one in (*_LIVE, STRAYS) if one is not self]
            elsewhere = [part for other in others for part in other._said_in(sample)]
            reason = self._first_problem(sample, [*found, *elsewhere]) if elsewhere else reason
        return reason

    def _first_problem(self, sample: Sample, found: Sequence[tuple[_Answer, slice, slice]]) -> str:
        num, mask = sample.response_length, sample.column("loss_mask")
        said, versions = sample.column("rollout_log_probs"), sample.column("token_versions")
        sampled, same_log_prob, same = (np.zeros(num, np.bool_) for _ in range(3))
        for answer, ours, own in found:
            here = answer.sampled[ours]
            sampled[own] |= here
            if said is not None:
                here = here & _close(said[own], answer.log_probs[ours])
            same_log_prob[own] |= here
            if versions is not None:
                here = here & (versions[own] == answer.versions[ours])
            same[own] |= here
        wrong = ~same if mask is None else (mask > 0) & ~same
        if not wrong.any():
            return ""
        place = int(wrong.argmax())
        if not sampled[place]:
            return self._not_sampled(sample, place)
        what = f"{OTHERWISE_SAMPLED}: response token {place} has"
        if said is not None and not same_log_prob[place]:
            value = float(said[place])
            return f"{what} log-prob {value:g}, and its engine sampled it with another; keep that of the answer"
        assert versions is not None, "what agrees in log-probs differs in versions"
        version = int(versions[place])
        return f"{what} weight version {version}, and another one sampled it; keep that of the answer"

    def num_sampled(self) -> int:
        """Tokens that engines have sampled for the execution so far, whatever becomes of them."""
        under_way = sum(len(call.answer().tokens) for call in self._calls)
        return under_way + sum(int(answer.sampled.sum()) for answer in self._answers)

    def _said_in(self, sample: Sample) -> Iterator[tuple[_Answer, slice, slice]]:
        """The answers to ids with which the sample begins, and which of their tokens are which of its response; the one
        of which the most stand there comes last.
        """
        tokens, prompt_length = np.asarray(sample.column("tokens"), np.int32), sample.prompt_length
        under_way = [answer for call in list(self._calls) for answer in self._of_call(call)]
        begins = {*self._begins[: bisect_right(self._begins, len(tokens))], *(one.begin for one in under_way)}
        digests = _prefix_digests(tokens, sorted(begins))
        read = [answer for digest in digests.values() for answer in self._by_read.get(digest, ())]
        read += [one for one in under_way if digests.get(one.begin) == one.read]
        stand = [(a, _agreement(a.tokens, tokens[a.begin : a.end])) for a in read if a.end > prompt_length]
        for answer, num in sorted(stand, key=lambda found: found[1]):
            skipped = max(0, prompt_length - answer.begin)
            if num > skipped:
                first = answer.begin - prompt_length
                yield answer, slice(skipped, num), slice(first + skipped, first + num)

    def _not_sampled(self, sample: Sample, place: int) -> str:
        """What to say of the first trained token that no engine sampled where it stands."""
        tokens = np.asarray(sample.column("tokens"), np.int32)
        where = sample.prompt_length + place
        what = f"{OTHERWISE_SAMPLED}: response token {place} (id {tokens[where]}) is trained, and"
        do = "send input_ids, take the ids that were sampled as they are, and mask what others say"
        if not self._answers:
            return (
                f"{what} its execution asked no engine through the run's client, so nothing says who sampled it; ask "
                "by current().engine() or slime.utils.http_utils.post"
            )
        readings = [one.ids() for one in self._answers if one.end > where] or [one.ids() for one in self._answers]
        ids = max(readings, key=lambda read: _agreement(read, tokens))
        differs = _agreement(ids, tokens)
        if differs >= where or differs >= len(ids):
            return f"{what} no engine sampled it there, behind the {where} ids before it; {do}"
        return (
            f"{what} its engine did not read the ids before it: token {differs} of the sample is id {tokens[differs]}, "
            f"and the engine had id {ids[differs]} there; {do}"
        )


class _Strays(Transcript):
    """Answers to requests of no execution, or of one that has ended: of threads, and of tasks that executions share."""

    __slots__ = ()

    def _add(self, answer: _Answer) -> None:
        super()._add(answer)
        if len(self._answers) > MAX_STRAYS:
            kept = self._answers[MAX_STRAYS // 2 :]
            for part in (self._answers, self._by_read, self._by_said, self._begins, self._ends):
                part.clear()
            for one in kept:
                super()._add(one)


MAX_STRAYS = 2048
STRAYS: Transcript = _Strays()
_LIVE: weakref.WeakSet[Transcript] = weakref.WeakSet()
"""Of executions under way in this process."""
TRANSCRIPT: ContextVar[Transcript | None] = ContextVar("slime_transcript", default=None)


class Seals:
    """What was checked in samples, before user code gets them that only is to look, mask or drop.

    A sample of which it changed a trained token, its log-prob or its version, or of which it trains more, is left out.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._before = {id(sample): _content(sample) for sample in samples}

    def check(self, samples: Iterable[Sample]) -> None:
        """Marks the changed ones unscored."""
        for sample in samples:
            if not _claims(sample) or sample.remove_sample or (sample.reward is None and sample.unscored):
                continue
            digest, trained = _content(sample)
            known = self._before.get(id(sample))
            candidates = list(self._before.values()) if known is None else [known]
            if not any(one == digest and not (trained & ~mask).any() for one, mask in candidates):
                sample.reward = None
                sample.unscored = f"{OTHERWISE_SAMPLED}: a hook changed what is trained; hooks may mask and drop"


def _content(sample: Sample) -> tuple[int, npt.NDArray[np.bool_]]:
    """A digest of ids, log-probs and versions; where it is trained."""
    state, mask = xxhash.xxh3_128(), sample.column("loss_mask")
    for name, kind in (("tokens", np.int32), ("rollout_log_probs", np.float32), ("token_versions", np.int32)):
        values = sample.column(name)
        state.update(b"-" if values is None else np.ascontiguousarray(values, kind).tobytes())
    trained = np.ones(sample.response_length, np.bool_) if mask is None else np.asarray(mask) > 0
    return state.intdigest(), trained


def _claims(sample: Sample) -> bool:
    """Whether a sample says of any token that an engine sampled it."""
    said, versions = sample.column("rollout_log_probs"), sample.column("token_versions")
    known = versions is not None and bool((versions != NOT_SAMPLED).any())
    return known or (said is not None and bool((said != 0).any()))


def _close(said: Numbers, sampled: Numbers) -> npt.NDArray[np.bool_]:
    return np.isclose(np.asarray(said, np.float64), sampled, rtol=TOLERANCE, atol=TOLERANCE)


def _prefix_digests(ids: Ids, lengths: Sequence[int]) -> dict[int, int]:
    """The digest of the first `n` ids for each of the lengths that there are; these are in order."""
    digests, done, state = dict[int, int](), 0, xxhash.xxh3_128()
    for length in lengths:
        if length <= len(ids):
            state.update(ids[done:length].tobytes())
            digests[length], done = state.intdigest(), length
    return digests


def _agreement(one: Ids, other: Ids) -> int:
    """How many ids the two begin with in common."""
    num = min(len(one), len(other))
    differ = one[:num] != other[:num]
    return int(differ.argmax()) if differ.any() else num
