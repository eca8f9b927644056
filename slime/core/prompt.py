"""What a dataset hands to the Data Buffer: its usable rows and the identity of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One usable row. Treat its containers as read-only; whoever issues samples from it copies them."""

    prompt: str | list[dict[str, Any]]
    """The prompt as text (chat template already applied) or as messages."""
    prompt_tokens: tuple[int, ...] | None
    """The prompt as ids, or None where nothing could encode it (no tokenizer, or messages without a chat template)."""
    label: Any
    """The reference answer as the file gives it; None without a label key."""
    metadata: Mapping[str, Any]
    """JSON-serialisable; `tools` holds the row's tool definitions."""
    source: str
    """Where the row is, for people: `train.jsonl:17` (the line of a text file, the row of a parquet file, from 1)."""
    images: tuple[str, ...] = ()
    """Digests of its images (`slime.core.images`), in the order of their placeholders."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of the rows that a dataset serves: what a data cursor in a checkpoint is valid for."""

    source: str
    """Path and slice as given. For messages; a moved file is still the same data."""
    num_rows: int
    """Usable rows, in the order that the cursor counts."""
    digest: str
    """SHA-256 (hex) over prompt, label and metadata of every usable row in order, after template and filters."""

    def same_data(self, other: Fingerprint) -> bool:
        """True if a cursor of one is valid for the other."""
        return (self.num_rows, self.digest) == (other.num_rows, other.digest)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fingerprint:
        return cls(**data)
