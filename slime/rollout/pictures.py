"""The images of a request: what travels beside its token ids, and how these are written for an engine.

A sample's ids have a placeholder for each token that an image is read as. SGLang 0.5.16 wants one for each image, and
puts as many in its place as its own processor finds, keeping all other ids as they are; it says how long the prompt
was that it read. So the engine reads what is trained, or the request is an error (`slime.rollout.call`).

Images go as PNG in data URIs: bare base64 that begins with a slash, as that of a JPEG does, is taken for a path, and a
JPEG may be decoded by a GPU, which gives other pixels.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from slime.core.errors import RequestRejected
from slime.core.files import ImageFolder


@dataclass(frozen=True, slots=True)
class Pictures:
    """Of one sample, in the order of its prompt."""

    token_id: int
    """The placeholder."""
    uris: tuple[str, ...]

    @classmethod
    def of(cls, digests: Sequence[str], folder: ImageFolder, token_id: int) -> Pictures:
        """Reads the files. Raises `DataError` if one is not there."""
        files = (base64.b64encode(folder.read(digest)).decode() for digest in digests)
        return cls(token_id, tuple(f"data:image/png;base64,{file}" for file in files))

    def written(self, ids: Sequence[int]) -> list[int]:
        """The ids with one placeholder for each image.

        Raises `RequestRejected` if there are others, as in the answer of a model that sampled one: an engine would
        look for an image there.
        """
        out: list[int] = []
        for token in ids:
            if token != self.token_id or not out or out[-1] != token:
                out.append(token)
        if (found := out.count(self.token_id)) != len(self.uris):
            raise RequestRejected(
                f"got {found} runs of placeholders for {len(self.uris)} images, because the model sampled one or the "
                "prompt was made otherwise; an engine would look for an image there"
            )
        return out
