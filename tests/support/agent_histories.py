"""Random conversations of agents that behave and agents that do not, and an engine that samples anything.

`Player` plays one: it asks a session as an adapter does, answers with random ids, and keeps what the engine read and
sampled, apart from the session: `check` compares the two.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from slime.agent.messages import Message, Picture, ToolCall, canonical_arguments
from slime.agent.session import Session
from slime.agent.template import ConversationTemplate, Origin
from slime.core.errors import DataError
from slime.core.sample import NOT_SAMPLED, Sample
from slime.rollout.client.call import Generation

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    for name in ("search", "read")
]
ODD = (
    "",
    "plain words",
    "é\u0301 👩\u200d👩\u200d👧 \U0001f600",
    "a\u200b\u00adb",
    "\u202eright to left",
    "tab\tnul\u0001",
    "\r\n\n ",
)
"""Texts that tokenizers treat in ways of their own."""
LONGEST_TURN = 12


@dataclass
class Asked:
    """One request as the engine saw it."""

    read: tuple[int, ...]
    sampled: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    kept: bool = True
    images: tuple[str, ...] = ()
    """Digests of the images in the history that the agent sent."""


@dataclass
class Player:
    """One agent with its session."""

    template: ConversationTemplate
    tokenizer: Any
    num_ids: int
    """Of the tokenizer, which takes a quarter of a second to count them."""
    seed: int
    asked: list[Asked] = field(default_factory=list)
    refused: int = 0
    pictures: tuple[Picture, ...] = ()
    """What people and tools show; nothing if the model is text-only."""
    rewards: defaultdict[tuple[int, ...], float] = field(default_factory=lambda: defaultdict(float))
    """Reward of each rewarded turn, by all ids up to its last one."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.session = Session(self.template)
        self.control = sorted(self.template.chat.control)
        self.placeholder = -1 if self.template.images is None else self.template.images.token_id
        self.version = 1

    # ---- what people, tools and models say ---------------------------------------------------------------------------

    def text(self) -> str:
        """Odd Unicode, and control tokens where they do not belong."""
        parts = [self.random.choice((*ODD, *self.control, "x" * self.random.randrange(9))) for _ in range(3)]
        return " ".join(parts[: self.random.randrange(4)])

    def answer(self) -> tuple[Message, Generation, bool]:
        """Any ids at all, with an end token or without, and a message that an adapter might read out of them."""
        rng = self.random
        ids = [rng.randrange(self.num_ids) for _ in range(rng.randrange(LONGEST_TURN))]
        finish = rng.choice(("stop", "stop", "length"))
        if finish == "stop":
            ids.append(rng.choice(sorted(self.template.end_ids)))
        finish = finish if ids else "length"
        calls = tuple(
            ToolCall(
                f"call_{rng.randrange(10**9)}", rng.choice(("search", "read")), canonical_arguments({"q": self.text()})
            )
            for _ in range(rng.choice((0, 0, 1, 2)))
        )
        if self.pictures and ids and rng.random() < 0.05:
            ids[rng.randrange(len(ids))] = self.placeholder
        message = Message("assistant", self.text(), rng.choice((None, "", "thoughts")), calls)
        log_probs = tuple(-rng.random() for _ in ids)
        return message, Generation(tuple(ids), log_probs, finish, self.version, ""), rng.random() < 0.1

    def reply(self, answer: Message) -> list[Message]:
        """What the agent sends behind an answer."""
        results = [self.shown(Message("tool", self.text(), call_id=one.id, name=one.name)) for one in answer.calls]
        more = [self.shown(Message(self.random.choice(("user", "user", "user", "system")), self.text()))]
        return results if results and self.random.random() < 0.8 else [*results, *more]

    def shown(self, message: Message) -> Message:
        """The message with some images somewhere in its text."""
        if not self.pictures or message.role == "system":
            return message
        places = sorted(self.random.randrange(len(message.text) + 1) for _ in range(self.random.choice((0, 0, 1, 2))))
        images = tuple(replace(self.random.choice(self.pictures), at=at) for at in places)
        return replace(message, images=images)

    # ---- a conversation ----------------------------------------------------------------------------------------------

    def play(self, num_requests: int) -> None:
        """Requests one after the other; some histories are rewritten on the way."""
        tools = TOOLS if self.template.writes_tools and self.random.random() < 0.5 else ()
        history = self.opening()
        for _ in range(num_requests):
            self.version += self.random.random() < 0.2
            answer = self.ask(history, tools)
            if answer is None:
                history = self.opening()
                continue
            history, tools = self.onward(history, answer, tools)

    def opening(self) -> list[Message]:
        """A conversation before its first answer."""
        system = [Message("system", self.text() or "Be brief.")] if self.random.random() < 0.6 else []
        return [*system, self.shown(Message("user", self.text()))]

    def onward(self, history: list[Message], answer: Message, tools: Any) -> tuple[list[Message], Any]:
        """The next history: mostly what was, the answer, and something new."""
        rng = self.random
        match rng.choice(("on",) * 12 + ("again", "edited", "compacted", "other", "thinking", "foreign", "tools")):
            case "again":
                return history, tools
            case "edited":
                cut = rng.randrange(1, len(history) + 1)
                while cut > 1 and history[cut - 1].role == "assistant":
                    cut -= 1
                return [*history[: cut - 1], Message("user", self.text() + " edited")], tools
            case "compacted":
                return [history[0], Message("user", "summary: " + self.text())], tools
            case "other":
                return [Message("system", "another agent " + self.text()), Message("user", self.text())], tools
            case "thinking":
                kept = Message("assistant", answer.text, None, answer.calls)
                return [*history, kept, *self.reply(answer)], tools
            case "foreign":
                return [*history, Message("assistant", "never sampled"), Message("user", self.text())], tools
            case "tools":
                return [*history, answer, *self.reply(answer)], () if tools or not self.template.writes_tools else TOOLS
        return [*history, answer, *self.reply(answer)], tools

    def ask(self, history: list[Message], tools: Any) -> Message | None:
        """One request; None if the template refuses it, or if its answer was lost on the way."""
        try:
            opened = self.session.open_turn(history, tools)
        except DataError:
            self.refused += 1
            return None
        read = tuple(opened.branch.tokens)
        message, generation, ill_formed = self.answer()
        kept = self.random.random() < 0.95
        images = [image for one in history for image in one.images]
        assert [image.digest for image in opened.branch.images] == [image.digest for image in images], self.seed
        if images:
            assert read.count(self.placeholder) == sum(image.num_tokens for image in images), self.seed
        digests = tuple(image.digest for image in images)
        self.asked.append(Asked(read, generation.tokens, generation.log_probs, self.version, kept, digests))
        if not kept:
            self.session.drop_turn(opened)
            return None
        self.session.end_turn(opened, message, generation, ill_formed=ill_formed)
        if generation.tokens and len(self.asked) % 2:
            for value in (0.5, float(len(self.asked))):
                self.session.reward_turn(value)
                self.rewards[*read, *generation.tokens] += value
        return message

    # ---- laws --------------------------------------------------------------------------------------------------------

    def check(self) -> Counter[str]:
        """What was trained is what was sampled, where it was sampled, once. Returns the forks."""
        control = set(self.tokenizer.convert_tokens_to_ids(self.control)) - {self.tokenizer.unk_token_id}
        known: defaultdict[Any, list[Asked]] = defaultdict(list)
        for one in self.asked:
            known[one.read, one.sampled] += [one] * one.kept
        for branch in self.session.branches:
            if branch.parent is not None:
                shared = branch.tokens[: branch.num_shared]
                others = [one for one in self.session.branches if one is not branch]
                assert any(one.tokens[: len(shared)] == shared for one in others), self.seed
            for turn in branch.own_turns():
                span = slice(turn.start, turn.end)
                booked = (tuple(branch.log_probs[span]), set(branch.versions[span]))
                said = known[tuple(branch.tokens[: turn.start]), tuple(branch.tokens[span])]
                assert booked in [(one.log_probs, {one.version} if one.sampled else set()) for one in said], self.seed
                assert set(branch.origins[span]) <= {Origin.SAMPLED}, self.seed
            sampled = {i for turn in branch.turns for i in range(turn.start, turn.end)}
            for i, (token, origin) in enumerate(zip(branch.tokens, branch.origins, strict=True)):
                assert (origin is Origin.SAMPLED) == (i in sampled), self.seed
                if origin not in (Origin.SAMPLED, Origin.TEMPLATE) and token != self.placeholder:
                    assert token not in control, f"{self.seed}: {origin} injected {token}"
        trained: Counter[tuple[int, ...]] = Counter()
        rewards: defaultdict[tuple[int, ...], float] = defaultdict(float)
        for sample in self.session.samples(Sample(index=0, group_index=0)):
            start = sample.prompt_length
            ends = [one.images for one in self.asked if one.kept and [*one.read, *one.sampled] == sample.tokens]
            assert tuple(sample.images) in ends, f"{self.seed}: the images of its own path"
            for i, kept in enumerate(sample.loss_mask or (), start):
                if kept:
                    trained[tuple(sample.tokens[: i + 1])] += 1
                    assert (sample.token_versions or ())[i - start] != NOT_SAMPLED, self.seed
            for i, reward in enumerate(sample.token_rewards or (), start):
                if reward:
                    rewards[tuple(sample.tokens[: i + 1])] += reward
        kept_ones = [one for one in self.asked if one.kept]
        sampled_ones = Counter((*one.read, *one.sampled[: i + 1]) for one in kept_ones for i in range(len(one.sampled)))
        assert trained == sampled_ones, f"{self.seed}: what is trained is not what was sampled, once"
        assert rewards == self.rewards, f"{self.seed}: each reward is at the end of its turn, once"
        return self.session.forks
