"""`Branch`: one line of a session's conversation as token ids, to which things are only ever added.

Invariants
1. A token with origin SAMPLED has the log-prob and the weight version that it was sampled with; no other has one.
2. What an engine reads for a turn are exactly the tokens that stand here before it; what it samples comes behind them.
3. The first `num_shared` tokens, in the first `num_shared_turns` turns and around them, are those of the branch that
   this one left, and are trained there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slime.agent.messages import Message
from slime.agent.template import Origin, Tokens
from slime.core.routed_experts import RoutedExperts, join
from slime.core.sample import NOT_SAMPLED
from slime.rollout.client.call import Generation


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model."""

    start: int
    """Of its first sampled token in the branch."""
    end: int
    num_messages: int
    """Of the conversation, this answer included."""
    finish: str
    """stop | length | abort"""
    ill_formed: bool = False
    """It tried a call that cannot be read."""
    trained: bool = True
    """It was sampled as the run samples."""


@dataclass(slots=True)
class Branch:
    """Tokens, and the messages that they say."""

    why: str
    """Why it was begun: `first`, or the reason of the fork."""
    tools: str = ""
    """The tools that its prompt names, as JSON: another list is another prompt."""
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """[T]"""
    log_probs: list[float] = field(default_factory=list)
    """[T] nats; 0.0 where not sampled."""
    versions: list[int] = field(default_factory=list)
    """[T] `NOT_SAMPLED` where not sampled."""
    experts: RoutedExperts | None = None
    """Of the tokens from the first on."""
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_shared: int = 0
    num_shared_turns: int = 0
    parent: int | None = None
    """Number of the branch that it left; None if it shares no token."""
    busy: bool = False
    """A turn is being sampled."""

    def add_context(self, tokens: Tokens) -> None:
        """What the template, a tool or a person says."""
        num = len(tokens.ids)
        self.tokens += tokens.ids
        self.origins += tokens.origins
        self.log_probs += [0.0] * num
        self.versions += [NOT_SAMPLED] * num

    def add_turn(
        self,
        new: Sequence[Message],
        answer: Message,
        generation: Generation,
        *,
        ill_formed: bool = False,
        trained: bool = True,
    ) -> None:
        """What was sampled behind the tokens that there are. `new`: the messages that the turn answers."""
        start, num = len(self.tokens), len(generation.tokens)
        version = generation.weight_version
        self.tokens += generation.tokens
        self.origins += [Origin.SAMPLED] * num
        self.log_probs += generation.log_probs
        self.versions += [version] * num if isinstance(version, int) else version
        self.experts = join(self.experts, generation.routed_experts, len(self.tokens), self.versions)
        self.messages += [*new, answer]
        finish = generation.finish_reason
        self.turns.append(Turn(start, start + num, len(self.messages), finish, ill_formed, trained))

    def own_turns(self) -> list[Turn]:
        """Those that were sampled in this branch, not in the one that it left."""
        return self.turns[self.num_shared_turns :]

    def trained_turns(self) -> list[Turn]:
        """Those of them with tokens, which were sampled as the run samples."""
        return [turn for turn in self.own_turns() if turn.trained and turn.start < turn.end]

    def loss_mask(self) -> list[int]:
        """[T] 1 for the tokens of `trained_turns`."""
        mask = [0] * len(self.tokens)
        for turn in self.trained_turns():
            mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
        return mask

    def last_of(self, turn: Turn) -> int | None:
        """The token that was sampled last in a turn; None if none was."""
        return self.tokens[turn.end - 1] if turn.start < turn.end else None

    def upto(self, turn: Turn, *, why: str, number: int, without_end: bool = False) -> Branch:
        """A branch that leaves this one, which has `number`, behind a turn; before the last token of that, if
        `without_end`.
        """
        end = turn.end - without_end
        turns = self.turns[: self.turns.index(turn)]
        return Branch(
            why=why,
            tools=self.tools,
            tokens=self.tokens[:end],
            origins=self.origins[:end],
            log_probs=self.log_probs[:end],
            versions=self.versions[:end],
            experts=None if self.experts is None else self.experts.upto(end - 1),
            messages=self.messages[: turn.num_messages],
            turns=[*turns, replace(turn, end=end)],
            num_shared=end,
            num_shared_turns=len(turns) + 1,
            parent=number,
        )

    def spans(self) -> list[tuple[int, int, str]]:
        """(start, end, origin) of runs of tokens of one origin."""
        out: list[tuple[int, int, str]] = []
        for i, origin in enumerate(self.origins):
            if out and out[-1][2] == origin.value:
                out[-1] = (out[-1][0], i + 1, origin.value)
            else:
                out.append((i, i + 1, origin.value))
        return out
