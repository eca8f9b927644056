"""The contract of a wire format: requests and answers of one public API, translated and nothing else.

A wire format is one file below this folder. It knows no session, no engine and no token.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.agent.adapters.turn import Answer, Event, Request


class BadRequest(Exception):
    """What an agent asked cannot be meant, or not be done: an error in its API's own shape."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event."""

    data: Mapping[str, Any] | str
    event: str | None = None

    def encoded(self) -> bytes:
        """As it goes over the wire."""
        text = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        head = f"event: {self.event}\n" if self.event else ""
        return f"{head}data: {text}\n\n".encode()


class Stream(ABC):
    """The frames of one streamed answer."""

    @abstractmethod
    def begin(self) -> Iterable[Frame]:
        """Before anything was sampled."""

    @abstractmethod
    def frames(self, event: Event) -> Iterable[Frame]:
        """What an event becomes; those of the `Answer` end the stream."""

    @abstractmethod
    def broken(self, message: str, status: int) -> Iterable[Frame]:
        """The end of a stream that failed half-way."""


class Wire(ABC):
    """One public API."""

    path: ClassVar[str]
    """Of its POST route."""
    counters: ClassVar[Mapping[str, Callable[[int], dict[str, Any]]]] = {}
    """POST routes that tell how many tokens a request has -> the answer for a number."""

    @abstractmethod
    def request(self, body: Mapping[str, Any]) -> Request:
        """Reads a request. Raises `BadRequest` for what this API would refuse, or what nobody here can do."""

    @abstractmethod
    def whole(self, answer: Answer, request: Request) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def stream(self, request: Request) -> Stream:
        """An answer in events."""

    @abstractmethod
    def error(self, message: str, status: int) -> dict[str, Any]:
        """The body of an error."""


def wanted(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Of the sampling parameters that an API calls by these names those that were given, as an engine calls them."""
    return {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
