"""Reads the images of dataset rows, inserts them into messages, counts their tokens and stores them in the run folder.

An image is bytes (or {"bytes", "path"}, as in Hugging Face parquet files), a base64 data URI, or a path relative to the
folder of the data file. Nothing is downloaded.

Invariants
1. Each image is decoded once, here, so storage, engines and trainer see the same RGB pixels.
2. A prompt has one placeholder per image, which is expanded to one id per image token. Any other text that looks like a
   placeholder is encoded as ordinary text (`slime.data.chat`).
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime.core.errors import DataError
from slime.core.files import ImageFolder

MARK = "<image>"
"""Stands for the next image in a prompt."""


class Counts(Protocol):
    """The part of a model's image processor that this module uses."""

    @property
    def token_id(self) -> int: ...
    def num_tokens(self, width: int, height: int) -> int: ...


@dataclass(frozen=True, slots=True)
class RowImages:
    digests: tuple[str, ...]
    num_tokens: tuple[int, ...]
    """[N] number of placeholder ids of each image."""


@dataclass(frozen=True, slots=True)
class ImageColumn:
    """Reads the image column of a dataset."""

    column: str
    processor: Counts
    store: ImageFolder

    def read(self, value: Mapping[str, Any], folder: Path) -> RowImages:
        """Reads and stores the images of a row. Paths are relative to `folder`. Raises `DataError`."""
        if self.column not in value:
            raise DataError(f"there is no column {self.column!r}; the row has {sorted(map(str, value))}")
        found = value[self.column]
        images = found if isinstance(found, list | tuple) else [] if found is None else [found]
        digests, counts = [], []
        for number, image in enumerate(images):
            try:
                png, size = as_png(_bytes_of(image, folder))
                counts.append(self.processor.num_tokens(*size))
            except DataError as error:
                raise DataError(f"image {number} of {self.column!r}: {error}") from error
            digests.append(self.store.put(png))
        return RowImages(tuple(digests), tuple(counts))

    def expanded(self, ids: Sequence[int], images: RowImages) -> list[int]:
        """Repeats each placeholder id of a prompt once per image token, as the engine does.

        Raises `DataError` if the prompt does not have exactly one placeholder per image.
        """
        found = sum(token == self.processor.token_id for token in ids)
        if found != len(images.digests):
            raise DataError(
                f"the rendered prompt has {found} placeholders for {len(images.digests)} images; use a chat template "
                "that writes one per image"
            )
        counts = iter(images.num_tokens)
        return [t for token in ids for t in ([token] * next(counts) if token == self.processor.token_id else [token])]


def with_images(prompt: str | list[dict[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Replaces each `<image>` with a content part. Raises `DataError` if there are not `num_images` of them."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{**m, "content": _parts(m["content"])} if m.get("content") else m for m in messages]
    found = sum(part.get("type") == "image" for m in messages for part in _listed(m.get("content")))
    if found != num_images:
        raise DataError(
            f"the prompt refers to {found} images ({MARK} or parts of type image), but its row has {num_images}"
        )
    return messages


def as_png(content: bytes) -> tuple[bytes, tuple[int, int]]:
    """Returns (RGB image as PNG, (width, height)). Raises `DataError` if PIL cannot read the image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            size = image.size
            if image.format == "PNG" and image.mode == "RGB":
                image.load()
                return content, size
            out = io.BytesIO()
            image.convert("RGB").save(out, "PNG", compress_level=1)
    except Exception as error:  # a decoder can raise anything on a damaged file
        raise DataError(
            f"PIL cannot read these {len(content)} bytes as an image ({type(error).__name__}: {error})"
        ) from error
    return out.getvalue(), size


def _bytes_of(image: Any, folder: Path) -> bytes:
    if isinstance(image, Mapping):
        image = next((image[name] for name in ("bytes", "path", "url") if image.get(name)), None)
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise DataError(f"expected bytes, a data URI or a path, got {type(image).__name__}")
    if image.startswith("data:"):
        try:
            return base64.b64decode(image.partition(",")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"the data URI is not valid base64: {error}") from error
    if re.match(r"[a-z]+://", image) and not image.startswith("file://"):
        raise DataError(f"{image[:80]} is a URL, but slime downloads no images; download it and store its path")
    try:
        return (folder / image.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise DataError(f"{image[:80]} cannot be read: {error}") from error


def _parts(content: Any) -> Any:
    if not isinstance(content, str):
        return [{k: v for k, v in part.items() if v is not None} for part in _listed(content)]
    return list(_split(content)) if MARK in content else content


def _split(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _listed(content: Any) -> list[Any]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
