"""Results of rollout functions and filters, conversations as generate functions see them, and the progress that the
driver displays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime.core.sample import Sample
from slime.observability.samples import ShownSample

if TYPE_CHECKING:
    from slime.rollout.client.engine_client import EngineClient

SampleGroup = list[Sample]
"""All samples of one prompt, with fan-outs flattened."""


@dataclass(slots=True)
class RolloutFnTrainOutput:
    """The result of a rollout function for one training step."""

    samples: list[SampleGroup]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """The result of an evaluation function."""

    data: dict[str, dict[str, Any]]
    """Dataset name -> {"rewards": [S] floats, "truncated": [S] bools, "samples": [S]}."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepNews:
    """What the driver logs for a step or an evaluation."""

    metrics: dict[str, float]
    samples: list[ShownSample]
    """A few samples to display."""
    span_s: tuple[float, float] | None = None
    """When the generation or evaluation started and ended, in Unix time."""
    warnings: tuple[str, ...] = ()
    """What the driver shows on the console (`slime.observability.logs.TELL_DRIVER`)."""


@dataclass(frozen=True, slots=True)
class DynamicFilterOutput:
    """Verdict of a dynamic sampling filter on one group."""

    keep: bool
    reason: str | None = None
    """Counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """With `keep=False`: keep the group anyway if accepted and running groups cannot fill the step without it."""


Messages = str | Sequence[Mapping[str, Any]]
"""A conversation in the form of OpenAI's chat completions: `{"role": ..., "content": ...}`. A string is one message
from the user. With `--multimodal-keys`, the content of messages and tool results can have images: OpenAI's parts with
data URIs, or `{"type": "image", "image": ...}` with a PIL image, bytes, a path or a data URI."""


Tools = Sequence[Mapping[str, Any] | Callable[..., Any]]
"""Tools in OpenAI's form, or Python functions with type hints and a Google-style docstring that describes each argument
(`transformers.utils.get_json_schema`)."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A tool call in a reply."""

    id: str
    name: str
    arguments: dict[str, Any]

    def result(self, content: str | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the message that answers the call. `content`: a text, or parts, such as images."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer to a conversation."""

    text: str
    """The text without thinking, calls and control tokens."""
    thinking: str
    calls: tuple[FunctionCall, ...]
    finish_reason: str
    """stop | length | calls. "length" without any token: a limit on tokens or turns left no room for this turn."""
    message: dict[str, Any]
    """The answer as a message; append it to the conversation."""
    num_prompt_tokens: int
    num_tokens: int
    """Number of sampled tokens."""
    ill_formed: bool = False
    """Whether a call could not be parsed; it is part of `text`."""


class Chat(Protocol):
    """The conversations of one execution with the policy (`RolloutContext.chat`)."""

    async def ask(self, messages: Messages, *, tools: Tools | None = None, **sampling: Any) -> Reply:
        """Sends the whole conversation so far and returns the policy's next turn. Its tokens are kept for `samples`.

        A conversation that continues an earlier one of this chat reuses its tokens; any other one starts a branch.
        Calls may run concurrently. `tools`: None keeps those of the conversation so far. `sampling`: `max_new_tokens`
        can lower the run's limit. If another parameter differs from the run's, the turn is not trained on.

        Raises `DataError` if a message has another form or the chat template rejects the conversation, `ConfigError`
        if the chat template is not append-only or has no tools that can be parsed, and the errors of
        `EngineClient.generate`.
        """

    async def run(self, reply: Reply, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
        """Calls the functions that a reply asks for, by name, and returns the messages that answer the calls.

        A function may be async; others run in threads. An exception, or a call of another function, becomes the result
        "error: ...", which the model sees. Calls and errors are counted in the samples' tool metrics.

        A function may return a PIL image, or a list of images, texts and content parts; anything else becomes text.
        Raises `DataError` for an image if the model reads none, or cannot read this one.
        """

    def reward_turn(self, value: float) -> None:
        """Adds a reward at the end of the latest reply, which is trained once, in the branch where it was sampled.

        Raises `DataError` if the reward is not finite, or if there is no reply yet.
        """

    def fork(self) -> Chat:
        """Returns a second chat that knows the same conversations. Its `samples` contain only its own turns."""

    def samples(
        self, base: Sample, reward: float | Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> list[Sample]:
        """Returns one sample for each branch with turns of its own to train. `reward`: reward of every sample; None: a
        grader scores each. If nothing can be trained on, returns a copy of `base` with status FAILED.
        """


class Chats(Protocol):
    """Conversations with one model. Implemented in the room `agent`, which this room may not import."""

    def open(self, client: EngineClient, params: Mapping[str, Any]) -> Chat:
        """Opens the chat of an execution. `params`: the run's sampling parameters."""

    async def ask(self, client: EngineClient, messages: Messages, tools: Tools, sampling: Mapping[str, Any]) -> Reply:
        """Answers one conversation that is never trained on."""


OpenChats = Callable[[str, Any, Mapping[str, Any]], Chats]
"""(checkpoint, its tokenizer, arguments for the chat template) -> conversations with the model."""


@dataclass(slots=True)
class Progress:
    """The current state of a rollout, written by the rollout task and polled by the driver."""

    unit: str = ""
    """What `done` and `total` count: groups (rollout) or executions (evaluation)."""
    done: int = 0
    total: int = 0
    tokens: int = 0
    """Response tokens of finished executions."""
    arrived: Callable[[], int] | None = None
    """Returns how many tokens this process has received from engines so far. None in a worker."""
    num_failures: int = 0
    """Execution attempts that failed or got no score."""
    last_failure: str = ""
    started: float = field(default_factory=time.monotonic)
    _arrived_before: int = 0
    _seen: tuple[int, float] = (0, 0.0)
    """The number of tokens at its last change, and the time of that change."""

    def begin(self, unit: str, total: int) -> None:
        """Starts a new phase with all counts at zero."""
        self.unit, self.total, self.done, self.tokens, self.started = unit, total, 0, 0, time.monotonic()
        self.num_failures, self.last_failure = 0, ""
        self._arrived_before, self._seen = self.arrived() if self.arrived is not None else 0, (0, self.started)

    def failed(self, reason: str) -> str:
        """Counts a failure so that users see it before the step fails. Returns the reason."""
        self.num_failures, self.last_failure = self.num_failures + 1, reason
        return reason

    def add(self, other: Progress) -> None:
        """Adds the counts of another process."""
        self.tokens += other.tokens
        self.num_failures += other.num_failures
        self.last_failure = other.last_failure or self.last_failure

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def _num_sampled(self) -> int:
        """Returns the tokens so far, including those of unfinished responses. The rate is measured up to the latest
        token, so that the line does not change while nothing arrives.
        """
        arrived = self.arrived() - self._arrived_before if self.arrived is not None else 0
        tokens = max(self.tokens, arrived)
        if tokens != self._seen[0]:
            self._seen = tokens, time.monotonic()
        return tokens

    def __str__(self) -> str:
        if not self.total:
            return ""
        line = f"{self.done}/{self.total} {self.unit}"
        if tokens := self._num_sampled():  # nothing is known before the first tokens arrive
            line += f", {tokens / max(self._seen[1] - self.started, 1.0):.0f} tokens/s"
        return f"{line}; {self.num_failures} failures, last: {self.last_failure}" if self.num_failures else line
