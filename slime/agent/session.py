"""`Session`: the conversations of one agent execution as a tree of branches, and the samples built from them.

An agent sends its entire history with each request. The session compares the history with the messages it knows, and
appends the tokens of new messages. A history that contradicts the known messages starts a new branch. Branches are
counted by reason:

    retry        the agent repeats a request; the earlier answer keeps its branch
    edited       the history continues differently after a known turn, or another message before one differs
    foreign      the history contains an assistant message that this session did not sample
    tools        the list of tools is different
    compaction   the beginning is the same, but sampled turns are missing
    sub-agent    the first message is different
    template     the chat template does not append the new messages (`NotAppended`)
    ending       the model ended its turn with a different end token than the template's
    placeholder  the model sampled the token that stands for an image, which an engine cannot read in a prompt with
                 images; the new branch has the text of that answer

Most clients do not send thinking back. The history still agrees: the sampled tokens, with their thinking, stay the
context of what follows, and the branch counts such turns (`Branch.unthought`). Other thinking than was sampled is an
edit.

A session turns requests into prompts, and sampled tokens into samples. It never waits.

Invariants
1. A sampled token is trained once, in the branch where it was sampled.
2. A token with origin SAMPLED has the log-prob and weight version that it was sampled with; other tokens have neither.
3. For each turn, the prompt is exactly the branch's tokens, and the sampled tokens are appended to them.
4. The first `num_shared` tokens and `num_shared_turns` turns of a branch belong to its parent branch, and are trained
   there.
5. A branch has exactly the images whose placeholders are among its tokens, and so has its sample.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.agent.messages import Message
from slime.agent.template import CODES, ORIGINS, ConversationTemplate, NotAppended, Origin, Placed, Tokens
from slime.core.columns import Column, GrowingColumn
from slime.core.errors import DataError
from slime.core.routed_experts import RoutedExperts, join
from slime.core.sample import NOT_SAMPLED, TURN_COUNTS, Sample, Status
from slime.rollout.client.call import Generation


@dataclass(frozen=True, slots=True)
class Turn:
    start: int
    """Position of the first sampled token in the branch."""
    end: int
    num_messages: int
    """Number of messages in the conversation, including this answer."""
    finish: str
    """stop | length | abort"""
    ill_formed: bool = False
    """Whether the turn contains a call that could not be parsed."""
    trained: bool = True
    """Whether the turn was sampled with the run's parameters."""
    reward: float = 0.0
    """Reward at the turn's last token."""


@dataclass(slots=True)
class Branch:
    """A sequence of tokens, and the messages that they encode. Finished turns never change, except for
    their rewards."""

    why: str
    """`first`, `fork` (the code of the environment forked the session), or the reason for the fork."""
    tools: str = ""
    """The tools in the prompt, as JSON. A different list requires a different prompt."""
    tokens: GrowingColumn = field(default_factory=partial(GrowingColumn, np.int32))
    codes: GrowingColumn = field(default_factory=partial(GrowingColumn, np.uint8))
    """[T] token origins, as numbers of `template.CODES`."""
    log_probs: GrowingColumn = field(default_factory=partial(GrowingColumn, np.float64))
    """[T] log-probs in nats; 0.0 where not sampled."""
    versions: GrowingColumn = field(default_factory=partial(GrowingColumn, np.int32))
    """[T] weight versions; `NOT_SAMPLED` where not sampled."""
    experts: RoutedExperts | None = None
    """Rows from the first token onwards."""
    images: list[Placed] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_shared: int = 0
    num_shared_turns: int = 0
    parent: int | None = None
    """Index of the branch that this one was forked from; None if they share no tokens."""
    unthought: set[int] = field(default_factory=set)
    """Positions in `messages` of answers that the agent sent back without their thinking."""
    asked: list[Message] | None = None
    """The messages that the turn being sampled answers; None while none is being sampled."""

    @property
    def busy(self) -> bool:
        return self.asked is not None

    def requests(self, num: int) -> Iterator[list[Message]]:
        """Yields the requests of `num` messages that this branch answered or is answering."""
        for turn in self.turns:
            if turn.num_messages == num + 1:
                yield self.messages[:num]
        if self.asked is not None and len(self.messages) + len(self.asked) == num:
            yield [*self.messages, *self.asked]

    def add_context(self, tokens: Tokens) -> None:
        """Appends tokens that the model did not sample (template, tool results, user messages)."""
        num, before = len(tokens.ids), len(self.tokens)
        self.images += [image._replace(start=before + image.start) for image in tokens.images]
        self.tokens.extend(tokens.ids)
        self.codes.extend(tokens.codes)
        self.log_probs.extend(np.zeros(num))
        self.versions.extend(np.full(num, NOT_SAMPLED))

    def add_turn(
        self,
        new: Sequence[Message],
        answer: Message,
        generation: Generation,
        *,
        ill_formed: bool = False,
        trained: bool = True,
    ) -> None:
        """Appends a sampled turn. `new`: the messages that it answers, whose tokens the branch already has."""
        start, num = len(self.tokens), len(generation.tokens)
        version = generation.weight_version
        self.tokens.extend(generation.tokens)
        self.codes.extend(np.full(num, CODES[Origin.SAMPLED]))
        self.log_probs.extend(generation.log_probs)
        self.versions.extend(np.full(num, version) if isinstance(version, int) else version)
        self.experts = join(self.experts, generation.routed_experts, len(self.tokens), self.versions.array)
        self.messages += [*new, answer]
        finish = generation.finish_reason
        self.turns.append(Turn(start, start + num, len(self.messages), finish, ill_formed, trained))

    def own_turns(self) -> list[Turn]:
        """Returns the turns sampled in this branch, excluding those shared with its parent."""
        return self.turns[self.num_shared_turns :]

    def trained_turns(self) -> list[Turn]:
        """Returns the turns of `own_turns` that have tokens and were sampled with the run's parameters."""
        return [turn for turn in self.own_turns() if turn.trained and turn.start < turn.end]

    @property
    def origins(self) -> list[Origin]:
        """The [T] token origins."""
        return [ORIGINS[code] for code in self.codes]

    def images_upto(self, end: int) -> list[Placed]:
        """Returns the images among the first `end` tokens."""
        return [image for image in self.images if image.start < end]

    def sampled_upto(self, end: int) -> npt.NDArray[np.int32]:
        """Returns the sampled ids among the first `end` tokens."""
        return self.tokens.array[:end][self.codes.array[:end] == CODES[Origin.SAMPLED]]

    def readable(self, start: int, end: int) -> list[int]:
        """Returns the ids from `start` to `end`, with one placeholder for each image."""
        kept = np.ones(len(self.tokens), np.bool_)
        for image in self.images:
            kept[image.start + 1 : image.start + image.num] = False
        ids: list[int] = self.tokens.array[start:end][kept[start:end]].tolist()
        return ids

    def columns(self) -> Iterator[GrowingColumn]:
        """Yields the columns with one entry per token."""
        yield from (self.tokens, self.codes, self.log_probs, self.versions)

    def loss_mask(self) -> npt.NDArray[np.uint8]:
        """Returns the [T] loss mask: 1 for tokens of `trained_turns`, 0 elsewhere."""
        mask = np.zeros(len(self.tokens), np.uint8)
        for turn in self.trained_turns():
            mask[turn.start : turn.end] = 1
        return mask

    def rewards(self, start: int, end: int) -> list[float] | None:
        """Returns the rewards of `own_turns` at the tokens from `start` to `end`; None if all are 0."""
        if not any(turn.reward for turn in self.own_turns()):
            return None
        rewards = [0.0] * (end - start)
        for turn in self.own_turns():
            rewards[max(turn.end - 1, start) - start] += turn.reward
        return rewards

    def last_of(self, turn: Turn) -> int | None:
        """Returns the last sampled token of a turn; None if the turn is empty."""
        return int(self.tokens[turn.end - 1]) if turn.start < turn.end else None

    def upto(self, turn: Turn, *, why: str, number: int | None, without_end: bool = False) -> Branch:
        """Forks this branch after a turn. `number`: its index; None in another session. `without_end` drops the turn's
        last token."""
        end = turn.end - without_end
        turns = self.turns[: self.turns.index(turn)]
        return Branch(
            why=why,
            tools=self.tools,
            tokens=self.tokens.upto(end),
            codes=self.codes.upto(end),
            log_probs=self.log_probs.upto(end),
            versions=self.versions.upto(end),
            experts=None if self.experts is None else self.experts.upto(end - 1),
            images=self.images_upto(end),
            messages=self.messages[: turn.num_messages],
            turns=[*turns, replace(turn, end=end)],
            num_shared=end,
            num_shared_turns=len(turns) + 1,
            parent=number,
        )

    def spans(self) -> list[tuple[int, int, str]]:
        """Returns (start, end, origin) of each run of tokens with the same origin."""
        codes = self.codes.array
        starts = np.flatnonzero(np.diff(codes, prepend=np.uint8(len(ORIGINS)))).tolist()
        return [
            (start, end, ORIGINS[codes[start]].value)
            for start, end in zip(starts, [*starts[1:], len(codes)], strict=True)
        ]


FIRST = "first"


@dataclass(slots=True)
class Opened:
    """A turn that is ready to be sampled. Its prompt consists of all tokens of the branch."""

    branch: Branch
    new: list[Message]
    """The messages that the turn answers. The branch already has their tokens, but `branch.messages` lacks them."""


class Session:
    """The conversations of one agent execution. For use on a single event loop."""

    def __init__(self, template: ConversationTemplate) -> None:
        self.branches: list[Branch] = []
        self.forks: Counter[str] = Counter()
        """Reason -> number of branches, not counting the first branch."""
        self.aborted = False
        """Whether the run cancelled a turn, which makes the execution incomplete."""
        self.hit_limit = False
        """Whether a limit ended the execution. If so, the sample of the branch `_last` is truncated."""
        self.context_full = False
        """Whether the latest request did not fit into the context. If the execution ends there, `_last` is truncated,
        as at other limits; an agent that shortens its history goes on.
        """
        self._last: Branch | None = None
        """The branch of the latest answer."""
        self._template = template

    def fork(self) -> Session:
        """Returns a session that continues from the same conversations. Its samples contain only its own turns."""
        other = Session(self._template)
        for branch in self.branches:
            if branch.turns:
                other.branches.append(branch.upto(branch.turns[-1], why="fork", number=None))
        return other

    def open_turn(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Opened:
        """Finds or creates the branch for a request, appends the new messages, and marks the branch busy.

        Raises `DataError` if the chat template rejects the messages.
        """
        named = name_of_tools(tools)
        branch, number, turn, why = self._where(messages, named)
        opened = None
        if branch is not None and turn is not None:
            branch.unthought |= _unthought(branch.messages[: turn.num_messages], messages)
            if self._can_go_on(branch, turn, messages):
                opened, why = self._behind(branch, number, turn, why, messages, tools), why or "template"
            else:
                why = why or "placeholder"
        if opened is None:
            opened = self._afresh(messages, tools, named, why or FIRST)
        opened.branch.asked = opened.new
        return opened

    def end_turn(
        self,
        opened: Opened,
        answer: Message,
        generation: Generation,
        *,
        ill_formed: bool = False,
        trained: bool = True,
    ) -> None:
        """Adds the model's answer. `trained`: whether it was sampled with the run's parameters."""
        opened.branch.add_turn(opened.new, answer, generation, ill_formed=ill_formed, trained=trained)
        opened.branch.asked, self.context_full = None, False
        self._last = opened.branch

    def reward_turn(self, value: float) -> None:
        """Adds a reward at the end of the latest answer, in the branch where it was sampled and is trained.

        An answer without tokens, at a limit, gets no reward: it would count for the turn before. Raises `DataError` if
        the reward is not a finite number, or if there is no answer yet.
        """
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"the reward of a turn must be a finite number, got {value!r}")
        if self._last is None:
            raise DataError("there is no answer to reward yet; call reward_turn after a response of the model")
        turn = self._last.turns[-1]
        if turn.start == turn.end:
            return
        if not math.isfinite(turn.reward + value):
            raise DataError(f"the rewards of a turn must have a finite sum, got {value} after {turn.reward}")
        self._last.turns[-1] = replace(turn, reward=turn.reward + float(value))

    def drop_turn(self, opened: Opened) -> None:
        """Removes an unfinished turn. The branch then ends with the previous turn."""
        branch = opened.branch
        branch.asked = None
        end = branch.turns[-1].end if branch.turns else 0
        for column in branch.columns():
            column.shorten_to(end)
        branch.images = branch.images_upto(end)
        if not branch.turns or end <= branch.num_shared:
            self.branches.remove(branch)
            self.forks[branch.why] -= branch.why != FIRST

    def tools_of(self, messages: Sequence[Message]) -> str:
        """Returns the tools (`name_of_tools`) of the conversation that these messages continue; "" if there is none."""
        agreed = [(_agreement(branch.messages, messages), branch.tools) for branch in self.branches]
        return max(agreed, key=lambda one: one[0], default=(0, ""))[1] if any(same for same, _ in agreed) else ""

    def num_prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> int:
        """Returns the number of prompt tokens for this request. Changes nothing."""
        named = name_of_tools(tools)
        branch, _, turn, _ = self._where(messages, named)
        if branch is not None and turn is not None and self._can_go_on(branch, turn, messages):
            before, last = branch.messages[: turn.num_messages], branch.last_of(turn)
            with contextlib.suppress(NotAppended):
                new = messages[turn.num_messages :]
                suffix = self._template.suffix(before, new, tools, last_id=last)
                return turn.end - suffix.other_end + len(suffix.ids)
        return len(self._template.prompt(messages, tools).ids)

    def _where(self, messages: Sequence[Message], tools: str) -> tuple[Branch | None, int, Turn | None, str]:
        """Returns (branch, its index, the turn that the request continues, the reason for a fork or "")."""
        best: tuple[int, int, Branch, Turn, int] | None = None
        agreed = [_agreement(branch.messages, messages) for branch in self.branches]
        for number, (branch, same) in enumerate(zip(self.branches, agreed, strict=True)):
            if branch.tools != tools:
                continue
            turn = next((t for t in reversed(branch.turns) if t.num_messages <= same), None)
            if turn is None or any(m.role == "assistant" for m in messages[turn.num_messages :]):
                continue
            if len(messages) == turn.num_messages:  # no new message
                continue
            goes_on = turn is branch.turns[-1] and not branch.busy
            rank = (turn.num_messages, int(goes_on))
            if best is None or rank > best[:2]:
                best = (*rank, branch, turn, number)
        if best is not None:
            _, goes_on_, branch, turn, number = best
            if goes_on_:
                return branch, number, turn, ""
            return branch, number, turn, "retry" if self._was_asked(messages, tools) else "edited"
        if not self.branches:
            return None, 0, None, ""
        return None, 0, None, self._reason(messages, tools, agreed)

    def _reason(self, messages: Sequence[Message], tools: str, agreed: Sequence[int]) -> str:
        """Returns the reason for a new branch that shares no tokens with others. `agreed`: messages in common with each
        branch.
        """
        if self._was_asked(messages, tools):
            return "retry"
        if not (most := max(agreed)):
            return "sub-agent"
        nearest = [branch for branch, same in zip(self.branches, agreed, strict=True) if same == most]
        if all(branch.tools != tools for branch in nearest):
            return "tools"
        answers = [message for message in messages if message.role == "assistant"]
        if not self._were_sampled([message for message in messages[most:] if message.role == "assistant"]):
            return "foreign"
        there = [branch.messages[most] for branch in nearest if most < min(len(branch.messages), len(messages))]
        if any(message.same(messages[most]) for message in there):  # only its thinking is different
            return "edited"
        return "compaction" if len(answers) < max(len(branch.turns) for branch in nearest) else "edited"

    def _was_asked(self, messages: Sequence[Message], tools: str) -> bool:
        """Returns whether the same request was answered before or is being answered."""
        num = len(messages)
        known = (request for branch in self.branches if branch.tools == tools for request in branch.requests(num))
        return any(_agreement(request, messages) == num for request in known)

    def _were_sampled(self, answers: Sequence[Message]) -> bool:
        """Returns whether this session sampled all of these messages, thinking aside. Linear if they are in order."""
        known = [branch.messages[turn.num_messages - 1] for branch in self.branches for turn in branch.own_turns()]
        at = 0
        for answer in answers:
            places = (*range(at, len(known)), *range(at))
            found = next((place for place in places if known[place].same(answer)), None)
            if found is None:
                return False
            at = found + 1
        return True

    def _behind(
        self, branch: Branch, number: int, turn: Turn, why: str, messages: Sequence[Message], tools: Sequence[Any]
    ) -> Opened | None:
        """Opens a turn after `turn`. Returns None if the template does not append the new messages."""
        new = list(messages[turn.num_messages :])
        try:
            suffix = self._template.suffix(
                branch.messages[: turn.num_messages], new, tools, last_id=branch.last_of(turn)
            )
        except NotAppended:
            return None
        if suffix.other_end:
            why = why or "ending"
        if why:
            branch = self._begun(branch.upto(turn, why=why, number=number, without_end=suffix.other_end))
        branch.add_context(suffix)
        return Opened(branch, new)

    def _can_go_on(self, branch: Branch, turn: Turn, messages: Sequence[Message]) -> bool:
        """Returns whether an engine can read the tokens up to `turn` in front of the other messages."""
        has_images = branch.images_upto(turn.end) or any(m.images for m in messages[turn.num_messages :])
        return not has_images or self._template.can_follow(branch.sampled_upto(turn.end))

    def _afresh(self, messages: Sequence[Message], tools: Sequence[Any], named: str, why: str) -> Opened:
        tokens = self._template.prompt(messages, tools)
        branch = self._begun(Branch(why, named))
        branch.add_context(tokens)
        return Opened(branch, list(messages))

    def _begun(self, branch: Branch) -> Branch:
        self.branches.append(branch)
        if branch.why != FIRST:
            self.forks[branch.why] += 1
        return branch

    def samples(
        self,
        base: Sample,
        *,
        decode: Callable[[Sequence[int]], str] | None = None,
        reward: float | Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """Returns one sample per branch that has tokens of its own to train. The samples are siblings of one execution.

        If the run cancelled a turn, returns only a copy of `base` with status ABORTED, because an agent cannot continue
        and must start over. `decode`: converts ids to text, for people and graders. `reward`: reward of every sample;
        None: a grader sets it. Raises `DataError` if it is not a finite number or a dict.
        """
        is_number = isinstance(reward, int | float) and math.isfinite(reward)
        if not (reward is None or isinstance(reward, Mapping) or is_number):
            raise DataError(f"the reward of sample {base.index} must be a finite number or a dict, got {reward!r}")
        if self.aborted:
            stopped = base.copy()
            stopped.status = Status.ABORTED
            return [stopped]
        kept = [branch for branch in self.branches if branch.trained_turns()]
        made = [self._sample(base, branch, decode) for branch in kept]
        if made:
            self._book_counts(base, made[0])
        if (self.hit_limit or self.context_full) and self._last in kept:
            made[kept.index(self._last)].status = Status.TRUNCATED
        for sample in made:
            sample.reward = dict(reward) if isinstance(reward, Mapping) else reward
        return made

    @staticmethod
    def _book_counts(base: Sample, first: Sample) -> None:
        """Moves the counts that a generate function put into `base` to one sample, so that they count only once."""
        counts = base.metadata.pop(TURN_COUNTS, None)
        if isinstance(counts, dict):
            first.metadata[TURN_COUNTS] = {**counts, **first.metadata[TURN_COUNTS]}

    def _sample(self, base: Sample, branch: Branch, decode: Callable[[Sequence[int]], str] | None) -> Sample:
        start, end = branch.turns[0].start, branch.turns[-1].end
        sample = base.copy()
        tokens, own_part = branch.tokens.array[:end], slice(start, end)
        columns = {  # user code that reads one gets a list
            "tokens": tokens,
            "loss_mask": branch.loss_mask()[own_part],
            "rollout_log_probs": branch.log_probs.array[own_part],
            "token_versions": branch.versions.array[own_part],
        }
        for name, numbers in columns.items():
            setattr(sample, name, Column.of_array(numbers))
        sample.response_length = end - start
        sample.token_rewards = branch.rewards(start, end)
        sample.rollout_routed_experts = None if branch.experts is None else branch.experts.upto(end - 1)
        sample.images = [image.digest for image in branch.images_upto(end)]
        sample.response = decode(branch.readable(start, end)) if decode is not None else ""
        sample.status = Status.TRUNCATED if branch.turns[-1].finish == "length" else Status.COMPLETED
        own = branch.own_turns()
        sample.metadata["agent"] = {
            "branch": branch.why,
            "turns": len(own),
            "ill_formed_calls": sum(turn.ill_formed for turn in own),
            "otherwise_sampled": sum(not turn.trained for turn in own),
            "thinking_dropped": sum(turn.num_messages - 1 in branch.unthought for turn in own),
            "origins": branch.spans(),
        }
        sample.metadata[TURN_COUNTS] = {"turns": len(own)}
        sample.validate()
        return sample


def name_of_tools(tools: Sequence[Any]) -> str:
    """Returns a list of tools as JSON; "" without tools."""
    return json.dumps(list(tools), sort_keys=True) if tools else ""


def _agreement(known: Sequence[Message], given: Sequence[Message]) -> int:
    """Returns the length of the common prefix in messages."""
    for i, (ours, theirs) in enumerate(zip(known, given, strict=False)):
        as_it_was = ours is theirs or (
            (ours.text, ours.role, ours.calls, ours.images) == (theirs.text, theirs.role, theirs.calls, theirs.images)
        )
        if not as_it_was and not ours.same(theirs):
            return i
        if theirs.reasoning and theirs.reasoning != ours.reasoning and theirs.thought() not in ([], ours.thought()):
            return i
    return min(len(known), len(given))


def _unthought(known: Sequence[Message], given: Sequence[Message]) -> set[int]:
    """Returns the positions of messages that came back without their thinking."""
    both = enumerate(zip(known, given, strict=False))
    return {i for i, (ours, theirs) in both if ours.reasoning and not theirs.reasoning and ours.thought()}
