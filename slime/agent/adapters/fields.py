"""The fields of requests: what the fields of each API do here, and checks of their types.

Invariants
1. Any JSON object becomes a `Request` or a `BadRequest`.
2. A field that would change what the answer means is served or refused with the reason, never ignored silently.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import zstandard
from aiohttp import web

from slime.agent.template import TEXT_ONLY
from slime.core.errors import DataError
from slime.data.images import ConversationImages, StoredImage

T = TypeVar("T")
KINDS: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
}
"""The types of JSON values; a `float` may be written as an integer, and an `int` as 1.0."""
SAMPLING: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 100.0),
    "top_p": (float, 0.0, 1.0),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0.0, 1.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "presence_penalty": (float, -2.0, 2.0),
    "repetition_penalty": (float, 0.0, 2.0),
}
"""Sampling parameter -> (type, least value, greatest value)."""
GUIDED = "the model would be sampled under a constraint that the trainer does not know, so its log-probs would be wrong"
MAX_WARNINGS = 100
MAX_BODY_BYTES = 64 * 2**20
"""Largest body of a request, as it arrives and decoded."""
ENCODINGS = ("gzip", "deflate", "zstd")

logger = logging.getLogger(__name__)


class BadRequest(Exception):
    """The request is invalid or cannot be served. The agent gets an error in the format of its API."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


async def body_of(http: web.Request) -> Mapping[str, Any]:
    """Returns the JSON object in a request. Raises `BadRequest`."""
    try:
        body = await http.read()
        encoding = http.headers.get("Content-Encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            body = await asyncio.to_thread(_decoded, body, encoding)
        value = orjson.loads(body)
    except web.HTTPRequestEntityTooLarge as error:
        raise BadRequest(f"the body is larger than {MAX_BODY_BYTES} bytes", 413) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body did not arrive completely: {error}") from error
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    return value


def _decoded(body: bytes, encoding: str) -> bytes:
    if encoding not in ENCODINGS:
        raise BadRequest(
            f"the Content-Encoding {encoding[:80]!r} is not supported; send {', '.join(ENCODINGS)}, or none"
        )
    try:
        if encoding == "zstd":
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
                found, whole = reader.read(MAX_BODY_BYTES + 1), True
        else:
            bits = 31 if encoding == "gzip" else 15 if body[:1] == b"\x78" else -15  # some send no head of zlib
            stream = zlib.decompressobj(bits)
            found = stream.decompress(body, MAX_BODY_BYTES + 1)
            whole = stream.eof and not stream.unused_data
    except (zlib.error, zstandard.ZstdError) as error:
        raise BadRequest(f"the body cannot be decoded (Content-Encoding: {encoding}): {error}") from error
    if len(found) > MAX_BODY_BYTES:
        raise BadRequest(f"the decoded body is larger than {MAX_BODY_BYTES} bytes", 413)
    if not whole:
        raise BadRequest(f"the body cannot be decoded (Content-Encoding: {encoding}): it is incomplete")
    return found


@dataclass(frozen=True)
class Fields:
    """What the fields of a request body do. `works` and `refused` may limit a field's values where it is read."""

    works: frozenset[str]
    """Fields that do what the API says."""
    hints: Mapping[str, Any]
    """Field -> its JSON type, or several. They are accepted and have no effect, because an answer means the same
    without them: labels, storage, prices, caching, and wishes that a model may ignore, such as a seed or an effort."""
    refused: Mapping[str, str]
    """Field -> why it is refused, unless its value is the API's default or empty."""
    defaults: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Refused field -> values that ask for nothing."""
    _warned: set[str] = field(default_factory=set)

    def check(self, body: Mapping[str, Any]) -> None:
        """Raises `BadRequest` for a refused field, and for a field without effect that has a wrong type. Logs once for
        each unknown field that it has no effect.
        """
        for name, why in self.refused.items():
            if (value := body.get(name)) and value not in self.defaults.get(name, ()):
                raise BadRequest(f"{name} is not supported: {why}")
        for name, kinds in self.hints.items():
            if body.get(name) is not None:
                one_of(body[name], kinds, name)
        for name in body.keys() - self.works - self.hints.keys() - self.refused.keys() - self._warned:
            if len(self._warned) < MAX_WARNINGS:
                self._warned.add(name)
                logger.warning("an agent sends the field %.80r, which has no effect", name)


IMAGE_PARTS = ("image_url", "input_image", "image")
"""Types of parts that are images: two of OpenAI's APIs, and Anthropic's, which is also the form for Python code."""


@dataclass(frozen=True, slots=True)
class ImageParts:
    """Reads the images in requests."""

    images: ConversationImages | None = None
    """None if the model gets no images."""
    why_none: str = TEXT_ONLY

    def refused(self, what: str, kind: str) -> BadRequest:
        """Returns the error for a part of a message. `what`: the API's name for a part. `kind`: its type."""
        why = self.why_none if self.images is None else "the model reads text and images only"
        return BadRequest(f"a {what} of type {kind[:80]!r} is not supported, because {why}")

    def of_part(self, part: Mapping[str, Any], where: str) -> StoredImage | None:
        """Reads a content part of OpenAI's APIs. Returns None if it is none that can be read. Raises `BadRequest`."""
        if self.images is None or part["type"] not in IMAGE_PARTS[:2]:
            return None
        holder = part.get("image_url")
        if isinstance(holder, dict):
            return self.read(holder, "url", f"{where}image_url.")
        return self.read(part, "image_url", where)

    def read(self, given: Mapping[str, Any], name: str, where: str) -> StoredImage:
        """Reads the image in field `name`, a data URI. Raises `BadRequest`."""
        if given.get(name) is None and given.get("file_id") is not None:
            raise BadRequest(f"{where}file_id is not supported, because files are not stored; send {name}")
        uri = required(given, name, str, where)
        return self.checked(lambda images: images.of_uri(uri), where + name)

    def read_base64(self, given: Mapping[str, Any], name: str, where: str) -> StoredImage:
        """Reads the image in field `name`, in base64. Raises `BadRequest`."""
        text = required(given, name, str, where)
        return self.checked(lambda images: images.of_base64(text), where + name)

    def checked(self, read: Callable[[ConversationImages], StoredImage], where: str) -> StoredImage:
        """Converts a `DataError` of `read` to `BadRequest`. `where`: the field in its message."""
        assert self.images is not None, "`refused` is called first"
        try:
            return read(self.images)
        except DataError as error:
            raise BadRequest(f"{where}: {error}") from error


def kind_of(value: Any) -> str:
    """Returns a value's JSON type, in words."""
    if value is None:
        return "null"
    return KINDS[type(value)] if type(value) in KINDS else type(value).__name__


def checked(value: Any, kind: type[T], name: str) -> T:
    """Returns `value` if it is of a JSON type. `name`: the field in the error message. Raises `BadRequest`."""
    if kind is float and type(value) is int:
        value = float(value)
    if kind is int and type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not kind:
        raise BadRequest(f"{name} is {kind_of(value)}, but must be {KINDS[kind]}")
    return value


def one_of(value: Any, kinds: type | tuple[type, ...], name: str) -> None:
    """Raises `BadRequest` if `value` has another JSON type than these. `name`: the field in the error message."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if type(value) not in kinds:
        if len(kinds) == 1:
            checked(value, kinds[0], name)
        else:
            raise BadRequest(f"{name} is {kind_of(value)}, but must be {' or '.join(KINDS[kind] for kind in kinds)}")


def optional(given: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T | None:
    """Returns a field, or None if it is missing or null. `where`: prefix of its name in errors. Raises `BadRequest`."""
    value = given.get(name)
    return None if value is None else checked(value, kind, where + name)


def required(given: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T:
    """Returns a field. Raises `BadRequest` if it is missing, null or of another type."""
    value = given.get(name)
    if value is None:
        raise BadRequest(f"{where}{name} is missing; it must be {KINDS[kind]}")
    return checked(value, kind, where + name)


def objects(given: Mapping[str, Any], name: str, where: str = "") -> list[dict[str, Any]]:
    """Returns an array of objects; empty if it is missing or null. Raises `BadRequest`."""
    values = optional(given, name, list, where) or []
    return [checked(value, dict, f"{where}{name}[{i}]") for i, value in enumerate(values)]


def at_least_one(given: Mapping[str, Any], name: str) -> int | None:
    """Returns a limit on tokens. Raises `BadRequest` if it is below 1."""
    value = optional(given, name, int)
    if value is not None and value < 1:
        raise BadRequest(f"{name} is {value}, but must be at least 1")
    return value


def stops(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the non-empty stop strings of a field that is a string or an array of strings. Raises `BadRequest`."""
    value = given.get(name)
    found = [value] if isinstance(value, str) else optional(given, name, list) or []
    return tuple(text for i, one in enumerate(found) if (text := checked(one, str, f"{name}[{i}]")))


def sampling(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the sampling parameters of a request. Raises `BadRequest` for wrong types and values out of range."""
    found: dict[str, Any] = {}
    for name in names:
        kind, least, most = SAMPLING[name]
        value = optional(given, name, kind)
        if value is not None:
            if not least <= value <= most:
                raise BadRequest(f"{name} is {value}, but must be between {least} and {most}")
            found[name] = value
    return found


def schema_text(format: Mapping[str, Any] | None, name: str, inner: str | None = None) -> str:
    """Returns the JSON schema that an answer must satisfy; empty if it may be any text. Raises `BadRequest`.

    `name`: the field in error messages. `inner`: the field that holds the schema's object, if there is one.
    """
    if format is None:
        return ""
    match required(format, "type", str, f"{name}."):
        case "text":
            return ""
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            where = f"{name}." if inner is None else f"{name}.{inner}."
            holder = format if inner is None else required(format, inner, dict, f"{name}.")
            return json.dumps(required(holder, "schema", dict, where))
    raise BadRequest(f"{name}.type is {str(format['type'])[:80]!r}, but must be text, json_object or json_schema")
