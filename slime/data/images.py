"""Reads the images of dataset rows and of conversations, counts their tokens and stores them in the run folder.

An image of a row is bytes (or {"bytes", "path"}, as in Hugging Face parquet files), a base64 data URI, or a path
relative to the folder of the data file. Nothing is downloaded.

Invariants
1. Each image is decoded once, here, so storage, engines and trainer see the same RGB pixels.
2. A prompt has one placeholder per image, which is expanded to one id per image token. Any other text that looks like a
   placeholder is encoded as ordinary text (`slime.data.chat`).
3. Images of conversations with equal pixels have the same digest, whatever their format.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from slime.core.errors import DataError
from slime.core.files import ImageFolder

P = ParamSpec("P")
R = TypeVar("R")

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


def with_images(
    prompt: str | list[dict[str, Any]], num_images: int, digests: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Replaces each `<image>` with a content part. `digests`: those of the images, to be written into the parts.

    Raises `DataError` if there are not `num_images` images.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{**m, "content": _parts(m["content"])} if m.get("content") else m for m in messages]
    found = sum(part.get("type") == "image" for m in messages for part in _listed(m.get("content")))
    if found != num_images:
        raise DataError(
            f"the prompt refers to {found} images ({MARK} or parts of type image), but its row has {num_images}"
        )
    if digests:
        left = iter(digests)
        messages = [{**m, "content": _named(m["content"], left)} if m.get("content") else m for m in messages]
    return messages


def as_png(content: bytes) -> tuple[bytes, tuple[int, int]]:
    """Returns (RGB image as PNG, (width, height)), upright as its EXIF data says. A PNG that already is both stays as
    it is. Raises `DataError` if PIL cannot read the image.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.format in RUN_BY_PROGRAMS:
                raise ValueError(f"{image.format} files are programs, which slime does not run")
            if image.format == "PNG" and image.mode == "RGB" and not _is_turned(image):
                image.load()
                return content, image.size
            return _written(image)
    except Exception as error:  # a decoder can raise anything on a damaged file
        raise _unreadable(content, error) from error


RUN_BY_PROGRAMS = ("EPS",)
"""Formats that PIL would pass to another program, Ghostscript."""


def _unreadable(content: bytes, error: Exception) -> DataError:
    return DataError(f"PIL cannot read these {len(content)} bytes as an image ({type(error).__name__}: {error})")


ORIENTATION = 0x0112
"""EXIF's number of the field that says how a camera was held."""


def _is_turned(image: Any) -> bool:
    return image.getexif().get(ORIENTATION, 1) != 1


def _written(image: Any) -> tuple[bytes, tuple[int, int]]:
    """Writes a PIL image as an upright RGB PNG without metadata. Returns (PNG, (width, height))."""
    from PIL import ImageOps

    upright = (ImageOps.exif_transpose(image) if _is_turned(image) else image).convert("RGB")
    upright.info.clear()
    out = io.BytesIO()
    upright.save(out, "PNG", compress_level=1)
    return out.getvalue(), upright.size


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image in the run folder."""

    digest: str
    num_tokens: int


MAX_BYTES = 32 * 2**20
"""Size of an image's file in a conversation."""
MAX_PIXELS = 2**25
"""An 8K screen has 33,177,600 pixels. Decoded, this many take 96 MiB."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Those of conversations, whose images are hostile. Of an animation, the first image counts."""
NUM_THREADS = 4
MAX_KNOWN = 2**16
"""Images that are recognised without being decoded again, at about 200 bytes each."""


class ConversationImages:
    """Reads the images of conversations. Clients send the whole history with each request, so an image is decoded,
    measured and stored once, and then recognised by a digest of what was sent. Can be used by several threads.
    """

    def __init__(self, processor: Counts, store: ImageFolder, other_ids: Collection[int] = ()) -> None:
        """`other_ids`: placeholders of other media."""
        self.token_id, self.store, self.other_ids = processor.token_id, store, frozenset(other_ids)
        self._count = processor.num_tokens
        self._threads = ThreadPoolExecutor(NUM_THREADS, "images")
        self._known: dict[bytes, StoredImage] = {}

    async def in_thread(self, work: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
        """Calls `work` in a thread. asyncio's own threads may all be waiting for it, when they run agents."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *given, **named))

    def of_base64(self, text: str) -> StoredImage:
        """Raises `DataError` if it is not valid base64, and like `of_bytes`."""
        _require_size(len(text) * 3 // 4)

        def read() -> tuple[bytes, tuple[int, int]]:
            return _read_within_limits(_decoded(text, "the image"))

        return self._recognised(b"base64", text.encode(errors="replace"), read)

    def of_uri(self, uri: str) -> StoredImage:
        """Raises `DataError` for anything but a base64 data URI, and like `of_bytes`."""
        head, comma, text = uri.partition(",")
        if not head.startswith("data:"):
            raise DataError(
                f"{uri[:80]!r} is not a data URI, and slime downloads no images; send the image's bytes as "
                "data:image/png;base64,..."
            )
        if not comma or not head.endswith(";base64"):
            raise DataError(f"the data URI begins with {uri[:80]!r}, but must begin like data:image/png;base64,")
        return self.of_base64(text)

    def of_bytes(self, content: bytes) -> StoredImage:
        """Raises `DataError` if PIL cannot read the image, if it is too large, or if the model cannot read its size."""
        _require_size(len(content))
        return self._recognised(b"bytes", content, lambda: _read_within_limits(content))

    def of_pil(self, image: Any) -> StoredImage:
        """Reads a PIL image. Raises `DataError` if it is too large, or if the model cannot read its size."""
        _require_pixels(image)
        image.load()
        shown = f"{image.mode} {image.size} {image.getexif().get(ORIENTATION, 1)} {image.getpalette()}".encode()
        return self._recognised(shown, image.tobytes(), lambda: _written(image))

    def of_digest(self, digest: str) -> StoredImage:
        """Returns an image of the run folder, such as a dataset's. Raises `DataError` if it is missing."""
        return self._recognised(b"digest", digest.encode(), lambda: as_png(self.store.read(digest)))

    def _recognised(self, kind: bytes, sent: bytes, read: Callable[[], tuple[bytes, tuple[int, int]]]) -> StoredImage:
        key = hashlib.sha256(kind + b"\0" + sent).digest()
        found = self._known.get(key)
        if found is None:
            png, size = read()
            num_tokens = self._count(*size)
            while len(self._known) >= MAX_KNOWN:
                self._known.pop(next(iter(self._known)), None)
            found = self._known[key] = StoredImage(self.store.put(png), num_tokens)
        return found


def _require_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise DataError(f"the image has {num_bytes:,} bytes, but may have at most {MAX_BYTES:,}; send a smaller one")


def _require_pixels(image: Any) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"the image has {width} x {height} pixels, but may have at most {MAX_PIXELS:,}; send a smaller one"
        )


def _read_within_limits(content: bytes) -> tuple[bytes, tuple[int, int]]:
    """Like `as_png`, but writes every image, so that equal pixels are equal bytes. Raises `DataError` for images with
    more than `MAX_PIXELS`, before they are decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _require_pixels(image)
            return _written(image)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        forms = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise DataError(f"these {len(content)} bytes are not an image in {forms} format") from error
    except Exception as error:
        raise _unreadable(content, error) from error


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"{what} is not valid base64: {error}") from error


def _bytes_of(image: Any, folder: Path) -> bytes:
    if isinstance(image, Mapping):
        image = next((image[name] for name in ("bytes", "path", "url") if image.get(name)), None)
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str):
        raise DataError(f"expected bytes, a data URI or a path, got {type(image).__name__}")
    if image.startswith("data:"):
        return _decoded(image.partition(",")[2], "the data URI")
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


def _named(content: Any, digests: Iterator[str]) -> Any:
    """Writes the next digests into the parts that are images."""
    if not isinstance(content, list):
        return content
    return [{**part, "digest": next(digests)} if part.get("type") == "image" else part for part in _listed(content)]


def _split(text: str) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(text.split(MARK)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _listed(content: Any) -> list[Any]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
