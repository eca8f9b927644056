"""The prompt dataset: every row is read and validated at startup, then kept in memory.

A malformed row is quarantined with its file, line and reason; a prompt over the length limit is dropped. Too many
malformed rows raise an error, because the file or a column name is probably wrong.

Invariants
1. rows read == len(dataset) + len(dataset.quarantined) + dataset.num_too_long.
2. Rows stay in file order. The fingerprint covers every field that goes into a sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.errors import ConfigError, DataError
from slime.core.sample import Fingerprint, PromptRow
from slime.data.chat import ChatRenderer, Rendered
from slime.data.images import ImageColumn, RowImages, with_images
from slime.data.row_files import RawRow, read_rows
from slime.data.schemes import INPUT, LABEL, METADATA, TOOLS
from slime.settings.data_files import files_of, scheme_of
from slime.settings.eval_config import EvalDatasetConfig
from slime.settings.groups.data import DataSettings

logger = logging.getLogger(__name__)

ENCODE_CHUNK = 1024
NUM_NAMED = 5
"""Maximum number of bad rows listed in a message; `quarantined` has all of them."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An unusable row and the reason."""

    file: str
    line: int
    """1-based line of a text file, or row of a parquet file."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Keys:
    """Column names."""

    prompt: str
    label: str | None
    metadata: str | None
    tools: str | None


class PromptDataset:
    """The usable rows, by index, plus counts of the rows left out."""

    def __init__(
        self,
        rows: Iterable[PromptRow],
        *,
        source: str = "memory",
        quarantined: Sequence[Quarantined] = (),
        num_too_long: int = 0,
        num_control_token_rows: int = 0,
    ) -> None:
        """Raises `DataError` if there are no usable rows."""
        digest = hashlib.sha256()
        self._rows: list[PromptRow] = []
        self._tokens: list[np.ndarray[Any, np.dtype[np.int32]] | None] = []
        for row in rows:
            parts = [row.prompt, row.label, row.metadata, *([row.images] if row.images else [])]
            digest.update(json.dumps(parts, sort_keys=True).encode() + b"\n")
            # int32: four bytes per id instead of a Python object
            self._tokens.append(None if row.prompt_tokens is None else np.asarray(row.prompt_tokens, np.int32))
            self._rows.append(replace(row, prompt_tokens=None))
        self.quarantined = tuple(quarantined)
        self.num_too_long = num_too_long
        """Rows dropped for exceeding the prompt length limit."""
        self.num_control_token_rows = num_control_token_rows
        """Usable rows that contain control tokens, which are encoded as ordinary text."""
        self.fingerprint = Fingerprint(source=source, num_rows=len(self._rows), digest=digest.hexdigest())
        if not self._rows:
            named = f". First: {_named(self.quarantined)}" if self.quarantined else ""
            raise DataError(
                f"{source} has no usable rows: {len(self.quarantined)} are malformed and {num_too_long} too long; "
                f"check the file, its slice and the prompt length limit{named}"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> PromptRow:
        tokens = self._tokens[row]
        return replace(self._rows[row], prompt_tokens=None if tokens is None else tuple(tokens.tolist()))

    def metrics(self) -> dict[str, float]:
        """Returns the `data/*` metrics."""
        return {
            "data/num_rows": len(self),
            "data/num_quarantined": len(self.quarantined),
            "data/num_too_long": self.num_too_long,
            "data/num_control_token_rows": self.num_control_token_rows,
        }

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        tokenizer: Any = None,
        input_key: str = "input",
        label_key: str | None = None,
        metadata_key: str | None = "metadata",
        tool_key: str | None = "tools",
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
        max_prompt_tokens: int | None = None,
        max_bad_fraction: float = 0.05,
        held_out: bool = False,
        images: ImageColumn | None = None,
    ) -> PromptDataset:
        """Loads a .jsonl, .jsonl.zst or .parquet file, a folder or glob pattern of such files, or a data scheme, which
        defines its own column names. The path may end with a slice, `@[a:b]`.

        With `apply_chat_template`, the prompt (messages, or a string treated as one user message) is rendered and
        tokenized. Otherwise a string is tokenized as it is, without special tokens, and messages stay messages.
        `allow_control_tokens` (template only) turns control strings in the data into control tokens. `held_out` is
        passed to `read_rows`. `images` is the image column and requires the template.

        Raises `DataError` for an unreadable or empty file, or if more than `max_bad_fraction` of the rows are malformed
        (one is always allowed, unless it is 0); `ConfigError` for a length limit or template without a tokenizer.
        """
        if tokenizer is None and (apply_chat_template or max_prompt_tokens is not None):
            raise ConfigError("a chat template or a prompt length limit requires a tokenizer; pass one")
        chat = None
        if apply_chat_template:
            kwargs = apply_chat_template_kwargs
            chat = ChatRenderer(tokenizer, kwargs=kwargs, allow_control_tokens=allow_control_tokens)
        keys = _Keys(input_key, label_key, metadata_key, tool_key)
        if made := scheme_of(str(path)) is not None:
            keys = _Keys(INPUT, LABEL, METADATA, TOOLS)
        loader = _Loader(keys, tokenizer, chat, images, Path() if made else files_of(str(path))[0].parent)
        chunk: list[RawRow] = []
        for raw in read_rows(str(path), held_out=held_out):
            chunk.append(raw)
            if len(chunk) == ENCODE_CHUNK:
                loader.add(chunk)
                chunk = []
        loader.add(chunk)
        loader.report(str(path), max_bad_fraction)
        rows, num_too_long = _drop_long(loader.rows, max_prompt_tokens)
        return cls(
            rows,
            source=str(path),
            quarantined=loader.quarantined,
            num_too_long=num_too_long,
            num_control_token_rows=loader.num_control_token_rows,
        )


_Parsed = tuple[PromptRow, Rendered | None, RawRow, RowImages]
"""(row, rendered prompt or None for messages, raw row, images)"""
NO_IMAGES = RowImages((), ())


class _Loader:
    """Turns raw rows into prompt rows, chunk by chunk."""

    def __init__(
        self, keys: _Keys, tokenizer: Any, chat: ChatRenderer | None, images: ImageColumn | None, folder: Path
    ) -> None:
        self.rows: list[PromptRow] = []
        self.quarantined: list[Quarantined] = []
        self.num_control_token_rows = 0
        self._keys = keys
        self._tokenizer = tokenizer
        self._chat = chat
        self._images, self._folder = images, folder

    def add(self, chunk: Sequence[RawRow]) -> None:
        parsed: list[_Parsed] = []
        for raw in chunk:
            try:
                if raw.value is None:
                    raise DataError(raw.error or "unreadable")
                row, seen = _parse(raw.value, self._keys, f"{raw.file}:{raw.line}"), NO_IMAGES
                if self._images is not None:
                    seen = self._images.read(raw.value, self._folder)
                    row = replace(row, prompt=with_images(row.prompt, len(seen.digests)), images=seen.digests)
                parsed.append((*self._render(row), raw, seen))
            except DataError as error:
                self.quarantined.append(Quarantined(raw.file, raw.line, str(error)))
        for (row, rendered, raw, seen), ids in zip(parsed, self._encode(parsed), strict=True):
            try:
                if isinstance(ids, DataError):
                    raise ids
                if self._images is not None and ids is not None:
                    ids = self._images.expanded(ids, seen)
                if ids is not None and not ids:
                    raise DataError("the prompt encodes to zero tokens")
            except DataError as error:
                self.quarantined.append(Quarantined(raw.file, raw.line, str(error)))
                continue
            self.num_control_token_rows += bool(rendered and rendered.stand_ins)
            self.rows.append(row if ids is None else replace(row, prompt_tokens=tuple(ids)))

    def _render(self, row: PromptRow) -> tuple[PromptRow, Rendered | None]:
        if self._chat is None:
            return row, Rendered(row.prompt) if isinstance(row.prompt, str) else None
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        rendered = self._chat.render(messages, tools=row.metadata.get("tools"))
        return replace(row, prompt=rendered.text), rendered

    def _encode(self, parsed: Sequence[_Parsed]) -> list[list[int] | DataError | None]:
        """Tokenizes each row. An entry is None without a tokenizer or text, an error if no safe encoding exists."""
        out: list[list[int] | DataError | None] = [None] * len(parsed)
        if self._tokenizer is None:
            return out
        plain = [(i, r) for i, (_, r, *_) in enumerate(parsed) if r is not None and not r.stand_ins]
        if plain:
            ids = self._tokenizer([r.marked for _, r in plain], add_special_tokens=False)["input_ids"]
            for (i, _), row_ids in zip(plain, ids, strict=True):
                out[i] = list(row_ids)
        for i, (_, rendered, *_) in enumerate(parsed):
            if rendered is not None and rendered.stand_ins and self._chat is not None:
                try:
                    out[i] = self._chat.encode(rendered)
                except DataError as error:
                    out[i] = error
        return out

    def report(self, source: str, max_bad_fraction: float) -> None:
        """Logs quarantined rows. Raises `DataError` if there are no rows or too many are quarantined."""
        num_bad, num_read = len(self.quarantined), len(self.quarantined) + len(self.rows)
        if num_read == 0:
            raise DataError(f"{source} has no rows: the file or its slice is empty; correct the path")
        named = _named(self.quarantined)
        limit = max(1.0, max_bad_fraction * num_read) if max_bad_fraction > 0 else 0.0
        if num_bad > limit:
            raise DataError(
                f"{num_bad} of the {num_read} rows of {source} are malformed, but at most {max_bad_fraction:.0%} may "
                f"be; correct the file or the --*-key flags. First: {named}"
            )
        if num_bad:
            logger.warning("%s: %d of %d rows quarantined. First: %s", source, num_bad, num_read, named)
        if self.num_control_token_rows:
            logger.warning(
                "%s: %d rows contain control tokens, which are encoded as ordinary text",
                source,
                self.num_control_token_rows,
            )


def _named(quarantined: Sequence[Quarantined]) -> str:
    return "; ".join(map(str, quarantined[:NUM_NAMED]))


def _drop_long(rows: list[PromptRow], max_prompt_tokens: int | None) -> tuple[list[PromptRow], int]:
    """Returns the rows within the limit and the number of rows dropped."""
    if max_prompt_tokens is None:
        return rows, 0
    if any(row.prompt_tokens is None for row in rows):
        raise ConfigError(
            "a prompt length limit cannot be applied to messages, because their length is unknown until a template "
            "renders them; add --apply-chat-template or drop the limit"
        )
    kept = [row for row in rows if len(row.prompt_tokens or ()) <= max_prompt_tokens]
    if len(kept) < len(rows):
        logger.warning(
            "dropped %d of %d prompts longer than %d tokens", len(rows) - len(kept), len(rows), max_prompt_tokens
        )
    return kept, len(rows) - len(kept)


def _parse(value: Mapping[str, Any], keys: _Keys, source: str) -> PromptRow:
    """Parses one row. Raises `DataError` if it is malformed."""
    if keys.prompt not in value:
        raise DataError(f"there is no column {keys.prompt!r}; the row has {sorted(map(str, value))}")
    if keys.label is not None and keys.label not in value:
        raise DataError(f"there is no column {keys.label!r}; the row has {sorted(map(str, value))}")
    metadata = _decoded(value, keys.metadata, dict)
    tools = _decoded(value, keys.tools, list)
    if tools:
        if not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"every tool in {keys.tools!r} must be a JSON object")
        if metadata.get("tools", tools) != tools:
            raise DataError(f"{keys.tools!r} and {keys.metadata!r} list different tools; remove one list")
        metadata["tools"] = tools
    label = value[keys.label] if keys.label is not None else None
    prompt = _checked_prompt(value[keys.prompt], keys.prompt)
    for name, part in (("the prompt", prompt), ("the label", label), ("the metadata", metadata)):
        try:
            json.dumps(part, sort_keys=True)  # the fingerprint hashes JSON, but parquet can contain bytes and dates
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"{name} is not JSON-serializable: {error}") from error
    return PromptRow(prompt, None, label, metadata, source)


def _decoded(value: Mapping[str, Any], key: str | None, kind: type) -> Any:
    """Returns a copy of the column as `kind`, parsed if it is JSON text; empty if the column is absent or null."""
    found = value.get(key) if key is not None else None
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise DataError(f"{key!r} is a string but not valid JSON: {error}") from error
    if found is None:
        return kind()
    if not isinstance(found, kind):
        raise DataError(f"{key!r} must be a {kind.__name__}, got {type(found).__name__}")
    return kind(found)


def _checked_prompt(prompt: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{key!r} must be a non-empty string or list of messages, got {repr(prompt)[:80]}")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {i} of {key!r} must be an object with a role, got {repr(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None) or not {"content", "tool_calls"} & set(message):
            raise DataError(f"message {i} of {key!r} needs content (text or parts), got {repr(message)[:80]}")
        # Parquet adds every key to every message, as null; templates check whether a key exists.
        messages.append({k: v for k, v in message.items() if v is not None or k == "content"})
    return messages


def load_prompts(
    args: DataSettings, tokenizer: Any, *, max_prompt_tokens: int | None = None, images: ImageColumn | None = None
) -> PromptDataset | None:
    """Loads the training prompts; None without `--prompt-data`. Raises like `PromptDataset.load`."""
    if args.prompt_data is None:
        return None
    return _load(args.prompt_data, args, tokenizer, max_prompt_tokens, images)


def load_held_out(config: EvalDatasetConfig, tokenizer: Any, images: ImageColumn | None) -> PromptDataset:
    """Loads the prompts of an evaluation dataset. Raises like `PromptDataset.load`."""
    return _load(config.path, config, tokenizer, config.max_prompt_len, images, held_out=True)


def _load(
    path: str,
    columns: DataSettings | EvalDatasetConfig,
    tokenizer: Any,
    max_prompt_tokens: int | None,
    images: ImageColumn | None,
    *,
    held_out: bool = False,
) -> PromptDataset:
    return PromptDataset.load(
        path,
        tokenizer=tokenizer,
        input_key=columns.input_key,
        label_key=columns.label_key,
        metadata_key=columns.metadata_key,
        tool_key=columns.tool_key,
        apply_chat_template=columns.apply_chat_template,
        apply_chat_template_kwargs=columns.apply_chat_template_kwargs,
        max_prompt_tokens=max_prompt_tokens,
        held_out=held_out,
        images=images,
    )


def read_row(
    raw: RawRow, *, input_key: str, label_key: str | None, metadata_key: str | None, tool_key: str | None
) -> PromptRow:
    """Parses one row like `PromptDataset.load`, but does not render or tokenize it. Raises `DataError`."""
    if raw.value is None:
        raise DataError(raw.error or "unreadable")
    return _parse(raw.value, _Keys(input_key, label_key, metadata_key, tool_key), f"row {raw.line}")
