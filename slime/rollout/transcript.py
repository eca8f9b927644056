"""`Transcript`: the prompts that one execution sent to engines, and the tokens that the engines sampled.

The client writes the transcript, and `execute` reads it when the execution ends. Tasks of an execution inherit the
transcript through `TRANSCRIPT`. User code may build a sample in any way it likes; when the execution ends, the sample's
tokens are checked against the transcript.

Invariants
1. A trained token is the id that an engine sampled at this position, after exactly the ids and images that precede it
   in the sample, with that engine's log-prob and weight version (law 1). `problem` describes the first violation.
2. If the run cancelled any request of an execution, the execution is not finished, regardless of what its code returns
   (`taken_back`).
3. Ids are stored once: an answer stores only ids that no earlier answer of the execution has stored.

Memory: 4 to 16 bytes per prompt or sampled token. The time per request is linear in the length of the conversation,
about a tenth of a millisecond for 200,000 tokens.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from slime.core.routed_experts import RoutedExperts, join
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.core.text import step_name
from slime.observability.logs import TELL_DRIVER
from slime.rollout.client.call import Call
from slime.settings import Args
from slime.settings.conditions import trains_given_tokens
from slime.settings.groups.hooks import SFT_ROLLOUT

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]
Numbers = Sequence[float] | npt.NDArray[Any]
TOLERANCE = 1e-6
"""Relative and absolute tolerance for log-probs (nats) that user code stored in another precision."""
OTHERWISE_SAMPLED = "not as sampled"
"""Prefix of every reason returned by `problem`."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The tokens that engines sampled after a prompt."""

    before: _Answer | None
    """The earlier answer that the prompt extends, if any."""
    new_ids: Ids
    """The prompt ids that follow the ids of `before`."""
    begin: int
    """Length of the prompt."""
    read: int
    """Digest of the prompt."""
    said: int
    """Digest of the prompt and the sampled ids."""
    tokens: Ids
    log_probs: npt.NDArray[np.float64]
    versions: Ids
    experts: RoutedExperts | None
    images: tuple[str, ...] | None = ()
    """Digests of the images in the prompt. None for an answer of an earlier attempt, which has checked them."""
    image_token: int | None = None
    """The placeholder of an image; None without images."""

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Mask over `tokens`. An answer from an earlier attempt also contains tokens that no engine sampled."""
        sampled: npt.NDArray[np.bool_] = self.versions != NOT_SAMPLED
        return sampled

    def ids(self) -> Ids:
        """Returns the prompt ids and the sampled ids."""
        parts, one = [self.tokens, self.new_ids], self.before
        while one is not None:
            parts += [one.tokens, one.new_ids]
            one = one.before
        return np.concatenate(parts[::-1])


@dataclass(slots=True, eq=False, weakref_slot=True)
class Transcript:
    """The transcript of one execution, or of a hook for a whole group."""

    taken_back: bool = False
    """Whether the run cancelled a request, whether to the policy or a judge, from an agent or a hook."""
    refusal: str = ""
    """Why the first refused HTTP request of the execution was refused."""
    closed: bool = False
    """Whether the execution has ended. Later requests from its tasks are recorded in `STRAYS`."""
    _answers: list[_Answer] = field(default_factory=list)
    _by_read: dict[int, list[_Answer]] = field(default_factory=dict)
    _by_said: dict[int, _Answer] = field(default_factory=dict)
    _begins: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    """Start and end positions of the answers, sorted, without duplicates."""
    _calls: dict[Call, None] = field(default_factory=dict)
    """Running calls, including streams that were not read to the end."""

    @classmethod
    def behind(cls, sample: Sample) -> Transcript:
        """Starts the transcript of an execution that continues `sample`. The earlier attempt has already checked the
        trained tokens.
        """
        begun = cls()
        _LIVE.add(begun)
        versions, log_probs = sample.column("token_versions"), sample.column("rollout_log_probs")
        if versions is not None and log_probs is not None and len(versions):
            mask = sample.column("loss_mask")
            versions = versions if mask is None else np.where(mask > 0, versions, NOT_SAMPLED)
            ids = np.array(sample.column("tokens"), np.int32)
            prompt, response = ids[: sample.prompt_length], ids[sample.prompt_length :]
            begun._add(replace(begun._made(prompt, response, log_probs, versions, None), images=None))
        return begun

    def close(self) -> None:
        """Closes the transcript when its execution ends."""
        self.closed = True
        _LIVE.discard(self)

    def begin_call(self, call: Call) -> None:
        """Counts the tokens sampled for `call` from now on."""
        self._calls[call] = None

    def end_call(self, call: Call) -> None:
        """Stores the result of `call`, even a partial one."""
        self._calls.pop(call, None)
        for answer in self._of_call(call):
            self._add(answer)

    def _of_call(self, call: Call) -> list[_Answer]:
        """Returns a list with the answer so far, or an empty list if nothing was sampled."""
        generation = call.answer()
        if not generation.tokens:
            return []
        ids, tokens = (np.asarray(part, np.int32) for part in (call.input_ids, generation.tokens))
        answer = self._made(ids, tokens, generation.log_probs, generation.versions, generation.routed_experts)
        return [replace(answer, images=call.images, image_token=call.image_token)]

    def _made(
        self, ids: Ids, tokens: Ids, log_probs: Numbers, versions: Numbers, experts: RoutedExperts | None
    ) -> _Answer:
        digests = self._digests_at_ends(ids)
        before = next((self._by_said[d] for _, d in sorted(digests.items(), reverse=True) if d in self._by_said), None)
        return _Answer(
            before,
            ids[0 if before is None else before.end :].copy(),
            begin=len(ids),
            read=digests[len(ids)],
            said=_digest(ids, tokens),
            tokens=tokens,
            log_probs=np.array(log_probs, np.float64),
            versions=np.array(versions, np.int32),
            experts=experts,
        )

    def _digests_at_ends(self, ids: Ids) -> dict[int, int]:
        """Returns length -> digest of so many of `ids`: of all, and of those after which an answer ended.

        Usually, the prompt extends one of the latest answers. Shorter ones are then left out, so that the time does not
        grow with the number of turns.
        """
        num = len(ids)
        latest = [one for one in self._answers[-LATEST:] if one.end <= num and one.tokens[-1] == ids[one.end - 1]]
        for least in sorted({min((one.end for one in latest), default=0), 0}, reverse=True):
            ends = self._ends[bisect_left(self._ends, least) : bisect_right(self._ends, num)]
            digests = _prefix_digests(ids, [*ends, num])
            if any(digests[one.end] == one.said for one in latest):
                break
        return digests

    def _add(self, answer: _Answer) -> None:
        self._answers.append(answer)
        self._by_read.setdefault(answer.read, []).append(answer)
        self._by_said[answer.said] = answer
        for places, number in ((self._begins, answer.begin), (self._ends, answer.end)):
            at = bisect_left(places, number)
            if at == len(places) or places[at] != number:
                places.insert(at, number)

    def complete(self, sample: Sample) -> None:
        """Fills in images, and versions, log-probs and experts of sampled tokens, where user code omitted them."""
        if sample.images or any(one.images for one in (*self._answers, *STRAYS._answers)):
            _set_images(sample, self._known_answers_in(sample))
        known, said, num = sample.token_versions or [], sample.column("rollout_log_probs"), sample.response_length
        if len(known) >= num and said is not None:
            return
        versions, log_probs, recorded = np.full(num, NOT_SAMPLED, np.int32), np.zeros(num), list[_Answer]()
        for answer, ours, own in self._known_answers_in(sample):
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
        for answer in sorted(recorded, key=lambda one: one.begin):  # keep the first record of each token
            experts, first = sample.rollout_routed_experts, sample.prompt_length
            sample.rollout_routed_experts = join(experts, answer.experts, answer.end, sample.token_versions, first)
        if said is None:
            sample.rollout_log_probs = log_probs.tolist()

    def _known_answers_in(self, sample: Sample) -> list[tuple[_Answer, slice, slice]]:
        """Like `_answers_in`. If this execution's answers lack trained tokens, adds those of `STRAYS` and, if the
        tokens have log-probs, of other executions. This execution's come last.
        """
        found = list(self._answers_in(sample))
        if self is STRAYS or not self._leaves_over(sample, found):
            return found
        found = [*STRAYS._answers_in(sample), *found]
        said = sample.column("rollout_log_probs")
        if said is None or not said.any() or not self._leaves_over(sample, found):
            return found
        return [*(part for other in _LIVE if other is not self for part in other._answers_in(sample)), *found]

    @staticmethod
    def _leaves_over(sample: Sample, found: Sequence[tuple[_Answer, slice, slice]]) -> bool:
        """Returns whether `sample` has trained tokens that are not in `found`."""
        mask = sample.column("loss_mask")
        left = np.ones(sample.response_length, np.bool_) if mask is None else np.asarray(mask) > 0
        for answer, ours, own in found:
            if len(left) >= own.stop:
                left[own] &= ~answer.sampled[ours]
        return bool(left.any())

    def problem(self, sample: Sample) -> str:
        """Describes the first violation of invariant 1 in a sample; empty if there is none.

        If the execution sent no request, a sample without log-probs and versions is given text (see `not_sampled`).
        """
        if sample.remove_sample or not (_claims(sample) or self._answers or self._calls):
            return ""
        found = list(self._answers_in(sample))
        reason = self._first_problem(sample, found)
        if reason:  # a thread, a shared task or an HTTP client may have sent the request
            strays = list(STRAYS._answers_in(sample))
            reason = self._first_problem(sample, [*found, *strays]) if strays else reason
        if reason:
            others = [one for one in (*_LIVE, STRAYS) if one is not self]
            elsewhere = [part for other in others for part in other._answers_in(sample)]
            reason = self._first_problem(sample, [*found, *elsewhere]) if elsewhere else reason
        return reason

    def _first_problem(self, sample: Sample, found: Sequence[tuple[_Answer, slice, slice]]) -> str:
        num, mask = sample.response_length, sample.column("loss_mask")
        said, versions = sample.column("rollout_log_probs"), sample.column("token_versions")
        sampled, same_images, same_log_prob, same = (np.zeros(num, np.bool_) for _ in range(4))
        for (answer, ours, own), agrees in zip(found, _agree_on_images(sample, found), strict=True):
            here = answer.sampled[ours]
            sampled[own] |= here
            here = here & agrees
            same_images[own] |= here
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
        if not same_images[place]:
            return (
                f"{OTHERWISE_SAMPLED}: response token {place} is trained, but its engine got other images than those "
                "that precede it in the sample; send all images of the prompt with each request"
            )
        what = f"{OTHERWISE_SAMPLED}: response token {place} has"
        if said is not None and not same_log_prob[place]:
            value = float(said[place])
            return f"{what} log-prob {value:g}, but the engine sampled it with a different one; use the engine's"
        assert versions is not None, "log-probs match, so versions must differ"
        version = int(versions[place])
        return f"{what} weight version {version}, but another version sampled it; use the version from the engine"

    def of_siblings(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Returns for each sample of an execution: its turns that no earlier sibling has, and how many of its trained
        tokens are already trained in an earlier sibling.

        A token that siblings share counts as one token unless engines sampled it separately for each of them.
        """
        counts, earlier = list[tuple[int, int]](), list[tuple[Ids, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]]()
        for sample in samples:
            tokens, first = np.asarray(sample.column("tokens"), np.int32), sample.prompt_length
            num_answers, num_held, num_trained = (np.zeros(len(tokens), np.int32) for _ in range(3))
            for answer, ours, own in self._answers_in(sample):
                num_answers[first:][own] += answer.sampled[ours]
            for other, sampled, trained in earlier:
                shared = _agreement(tokens, other)
                num_held[:shared] += sampled[:shared]
                num_trained[:shared] += trained[:shared]
            known, mask, versions = num_answers > 0, *(sample.column(n) for n in ("loss_mask", "token_versions"))
            sampled, trained = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.bool_)
            sampled[first:] = False if versions is None else versions != NOT_SAMPLED
            trained[first:] = not sample.remove_sample and (True if mask is None else mask > 0)
            starts = sampled & ~np.concatenate([[False], sampled[:-1]])
            own_turns = starts & ~(known & (num_held >= num_answers))
            again = trained & known & (num_trained >= num_answers)
            counts.append((int(own_turns.sum()), int(again.sum())))
            earlier.append((tokens, sampled, trained))
        return counts

    def num_sampled(self) -> int:
        """Returns how many tokens engines have sampled for the execution so far, whether used or not."""
        under_way = sum(len(call.answer().tokens) for call in self._calls)
        return under_way + sum(int(answer.sampled.sum()) for answer in self._answers)

    def _answers_in(self, sample: Sample) -> Iterator[tuple[_Answer, slice, slice]]:
        """Yields (answer, slice of its matching tokens, slice of the response) for each answer whose prompt is a prefix
        of the sample.

        The longest match comes last.
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
        """Describes why the first violating token counts as not sampled."""
        tokens = np.asarray(sample.column("tokens"), np.int32)
        where = sample.prompt_length + place
        what = f"{OTHERWISE_SAMPLED}: response token {place} (id {tokens[where]}) is trained, but"
        do = "send input_ids, use the sampled ids unchanged, and mask all other tokens"
        if not self._answers:
            return (
                f"{what} its execution sent no request through the run's client, so it is unknown which engine "
                "sampled it; send requests through current().engine() or slime.utils.http_utils.post"
            )
        readings = [one.ids() for one in self._answers if one.end > where] or [one.ids() for one in self._answers]
        ids = max(readings, key=lambda read: _agreement(read, tokens))
        differs = _agreement(ids, tokens)
        if differs >= where or differs >= len(ids):
            return f"{what} no engine sampled it after the {where} ids that precede it; {do}"
        return (
            f"{what} its engine got a different prefix: token {differs} of the sample is id {tokens[differs]}, but the "
            f"engine had id {ids[differs]} there; {do}"
        )


class _Strays(Transcript):
    """Answers to requests outside executions: from threads, shared tasks, and tasks that outlived their execution."""

    forgot = False
    """Whether answers were dropped to save memory, so that a token of unknown origin may still have been sampled."""
    earlier: frozenset[int] | None = None
    """The ids of the answers that are older than the call of the user's rollout function; None if it is not running."""

    def _add(self, answer: _Answer) -> None:
        super()._add(answer)
        self._forget()

    def _forget(self) -> None:
        """Drops the oldest answers, except during a call of the user's rollout function."""
        if self.earlier is None and len(self._answers) > MAX_STRAYS:
            self.forgot = True
            kept = self._answers[-(MAX_STRAYS // 2) :]
            for part in (self._answers, self._by_read, self._by_said, self._begins, self._ends):
                part.clear()
            for one in kept:
                super()._add(one)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Drops no answer during the block, a call of the user's rollout function."""
        self.earlier = frozenset(map(id, self._answers))
        try:
            yield
        finally:
            self.earlier = None
            self._forget()

    def complete_made(self, sample: Sample) -> str:
        """Completes a sample that a user's rollout function made itself, outside of executions.

        Returns why it must not be trained on, or '': some of its trained tokens are sampled, but not all of them.
        Samples without any known token are left to the function, as are those that began before answers were dropped.
        """
        if len(sample.token_versions or ()) >= sample.response_length:
            return ""  # an execution has checked it
        self.complete(sample)
        if not sample.token_versions or (self.forgot and not self._began_in_call(sample)):
            return ""
        return self.problem(sample)

    def _began_in_call(self, sample: Sample) -> bool:
        """Returns whether this call of the rollout function sampled the first trained token, and so all others."""
        mask, earlier = sample.column("loss_mask"), self.earlier
        first = 0 if mask is None else int((np.asarray(mask) > 0).argmax())
        here = (answer for answer, _, own in self._answers_in(sample) if own.start <= first < own.stop)
        return earlier is not None and any(id(answer) not in earlier for answer in here)


MAX_STRAYS = 2048
STRAYS = _Strays()
_LIVE: weakref.WeakSet[Transcript] = weakref.WeakSet()
"""The transcripts of running executions in this process."""
TRANSCRIPT: ContextVar[Transcript | None] = ContextVar("slime_transcript", default=None)


class Seals:
    """Records the trained content of samples before calling user code, which may only read, mask or drop samples."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._before = {id(sample): _content(sample) for sample in samples}

    def mark_changed(self, samples: Iterable[Sample]) -> int:
        """Marks changed samples unscored. Returns their number."""
        num_changed = 0
        for sample in samples:
            if not _claims(sample) or sample.remove_sample or (sample.reward is None and sample.unscored):
                continue
            digest, trained = _content(sample)
            known = self._before.get(id(sample))
            candidates = list(self._before.values()) if known is None else [known]
            if not any(one == digest and not (trained & ~mask).any() for one, mask in candidates):
                sample.reward, sample.unscored = None, HOOK_CHANGED
                num_changed += 1
        return num_changed


HOOK_CHANGED = f"{OTHERWISE_SAMPLED}: a hook changed trained content, but may only mask or drop it"


def not_sampled(sample: Sample) -> str:
    """Describes the first trained token that is not known to be sampled, or returns ''.

    A token counts as sampled if it has a weight version. If the response has none, because user code asked engines of
    its own, log-probs are enough.
    """
    if sample.remove_sample or (sample.reward is None and sample.unscored):
        return ""
    mask = sample.column("loss_mask")
    trained = np.ones(sample.response_length, np.bool_) if mask is None else np.asarray(mask) > 0
    place = first_not_sampled(trained, sample.column("token_versions"), sample.column("rollout_log_probs"))
    if place is None:
        return ""
    token = int(np.asarray(sample.column("tokens"), np.int64)[sample.prompt_length + place])
    return f"{OTHERWISE_SAMPLED}: response token {place} (id {token}) is trained, but {NO_ENGINE}"


def first_not_sampled(
    trained: npt.NDArray[np.bool_], versions: Numbers | None, log_probs: Numbers | None
) -> int | None:
    """Returns the position of the first trained token without weight version and log-prob; None if there is none.

    `trained`: [R] mask. `versions`, `log_probs`: [R], or None if unknown.
    """
    known = None if versions is None else np.asarray(versions) != NOT_SAMPLED
    said = None if log_probs is None else np.asarray(log_probs, np.float64) != 0
    if known is not None and (known & trained).any():
        left = trained & ~known if said is None else trained & ~known & ~said
    elif said is not None and (said & trained).any():  # a greedy token may have the log-prob 0.0
        return None
    else:
        left = trained
    return int(left.argmax()) if left.any() else None


NO_ENGINE = (
    "it has no log-prob and no engine of the run is known to have sampled it; return the ids and the log-probs that "
    "/generate answered, and mask all other tokens, or set --train-unsampled-tokens to train on given text"
)


def is_refused(sample: Sample) -> bool:
    """Returns whether a sample is excluded from training because it is not as sampled."""
    return sample.reward is None and sample.unscored.startswith(OTHERWISE_SAMPLED)


def _content(sample: Sample) -> tuple[int, npt.NDArray[np.bool_]]:
    """Returns a digest of ids, log-probs and versions, and the mask of trained tokens."""
    state, mask = xxhash.xxh3_128(), sample.column("loss_mask")
    for name, kind in (("tokens", np.int32), ("rollout_log_probs", np.float32), ("token_versions", np.int32)):
        values = sample.column(name)
        state.update(b"-" if values is None else np.ascontiguousarray(values, kind).tobytes())
    trained = np.ones(sample.response_length, np.bool_) if mask is None else np.asarray(mask) > 0
    return state.intdigest(), trained


def _claims(sample: Sample) -> bool:
    """Returns whether the sample claims that any of its tokens were sampled."""
    said, versions = sample.column("rollout_log_probs"), sample.column("token_versions")
    known = versions is not None and bool((versions != NOT_SAMPLED).any())
    return known or (said is not None and bool((said != 0).any()))


def _set_images(sample: Sample, found: Sequence[tuple[_Answer, slice, slice]]) -> None:
    """Sets `Sample.images` to those that an engine got for the last sampled tokens, whichever images the code chose.

    An unfinished sample may have further ones, for its next request.
    """
    last = max(found, key=lambda part: part[2].stop, default=None)
    images = None if last is None else last[0].images
    if images is None or (sample.status in (Status.PENDING, Status.ABORTED) and _begins(sample.images, images)):
        return
    sample.images = list(images)


def _begins(images: Sequence[str], first: Sequence[str]) -> bool:
    return list(images[: len(first)]) == list(first)


def _agree_on_images(sample: Sample, found: Sequence[tuple[_Answer, slice, slice]]) -> list[bool]:
    """Returns for each answer whether its prompt had the images that precede it in the sample.

    Placeholders that an engine sampled are text.
    """
    place = next((answer.image_token for answer, *_ in found if answer.images), None)
    if place is None:
        return [True] * len(found)
    tokens = np.asarray(sample.column("tokens"), np.int32)
    shown = np.concatenate([[False], tokens == place])
    for answer, ours, own in found:
        shown[1 + sample.prompt_length :][own] &= ~answer.sampled[ours]
    num_before = np.concatenate([[0], np.cumsum(shown[1:] & ~shown[:-1])])
    return [
        answer.images is None or list(answer.images) == list(sample.images[: num_before[answer.begin]])
        for answer, *_ in found
    ]


def _close(said: Numbers, sampled: Numbers) -> npt.NDArray[np.bool_]:
    return np.isclose(np.asarray(said, np.float64), sampled, rtol=TOLERANCE, atol=TOLERANCE)


LATEST = 8
"""How many of the latest answers are tried first."""


def _digest(*parts: Ids) -> int:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(np.ascontiguousarray(part).data)
    return state.intdigest()


def _prefix_digests(ids: Ids, lengths: Sequence[int]) -> dict[int, int]:
    """Returns length -> digest of the first `length` ids. `lengths` must be sorted; skips those beyond the end."""
    digests, done, state = dict[int, int](), 0, xxhash.xxh3_128()
    for length in lengths:
        if length <= len(ids):
            state.update(np.ascontiguousarray(ids[done:length]).data)
            digests[length], done = state.intdigest(), length
    return digests


def _agreement(one: Ids, other: Ids) -> int:
    """Returns the length of the common prefix."""
    num = min(len(one), len(other))
    differ = one[:num] != other[:num]
    return int(differ.argmax()) if differ.any() else num


# ---- samples that no execution has checked -------------------------------------------------------------------------
REFUSED = "rollout/num_refused_samples"


def refuse_unsampled(args: Args, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Refuses samples that a rollout function made or a file contains, unless their trained tokens are sampled.

    Completes samples whose tokens were sampled by the run's engines. Returns the number of refused samples as a metric.
    """
    samples = [sample for group in groups for sample in group if isinstance(sample, Sample)]
    given = trains_given_tokens(args) or args.rollout_function_path == SFT_ROLLOUT
    for sample in samples:
        if is_refused(sample):
            continue  # by its execution
        if reason := STRAYS.complete_made(sample) or ("" if given else not_sampled(sample)):
            sample.reward, sample.unscored = None, reason
    reasons = [sample.unscored for sample in samples if is_refused(sample)]
    tell_refused(rollout_id, len(reasons), reasons[0] if reasons else "")
    return {REFUSED: float(len(reasons))}


def tell_refused(rollout_id: int, num: int, reason: str) -> None:
    """Shows on the console how many samples of a step were refused."""
    if num:
        text = "%s: %d samples are refused, so they are not trained on; the first: %s"
        logger.warning(text, step_name(rollout_id), num, reason, extra=TELL_DRIVER)
