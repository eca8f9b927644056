"""The prompt dataset: every row is read and validated at startup, then kept in memory.

A row that is malformed (quarantined), or whose prompt is over the length limit, is dropped. Its file, line and reason
are recorded. If too many are malformed (`--max-dropped-row-fraction`), loading raises an error, because the file or a
column name is probably wrong. The length limit is a filter, so any number of prompts may be over it.

Invariants
1. rows read == len(dataset) + len(dataset.quarantined) + len(dataset.too_long).
2. Rows stay in file order. The fingerprint covers every field that goes into a sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime.core.errors import ConfigError, DataError
from slime.core.sample import Fingerprint, PromptRow
from slime.data.chat import ChatRenderer, Rendered
from slime.data.images import ImageColumn, RowImages, with_images
from slime.data.row_files import RawRow, read_rows
from slime.data.schemes import INPUT, LABEL, METADATA, TOOLS
from slime.data.template_spelling import joined, omitted_message, writes_tools
from slime.observability.logs import TELL_DRIVER
from slime.observability.samples import DROPPED_ROWS
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.settings.data_files import files_of, scheme_of
from slime.settings.eval_config import EvalDatasetConfig
from slime.settings.groups.data import DataSettings
from slime.settings.groups.hooks import SFT_ROLLOUT
from slime.settings.rules import own_lengths

logger = logging.getLogger(__name__)

ENCODE_CHUNK = 1024
NUM_NAMED = 5
"""Maximum number of bad rows listed in a message; `DROPPED_ROWS` has all of them."""
FLAG = "--max-dropped-row-fraction"
MOST_RECORDED = 10_000
"""Maximum number of lines in `DROPPED_ROWS`."""
_DEFAULT_KEYS = frozenset({"metadata", "tools"})
"""Columns that a dataset need not have. Any other column that the user names must exist in the training data."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An unusable row and the reason."""

    file: str
    line: int
    """1-based line of a text file, or row of a parquet file; 0 for a row that does not come from a file."""
    reason: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Keys:
    """Column names."""

    prompt: str
    label: str | None
    metadata: str | None
    tools: str | None
    any_prompt: bool = False
    """Whether a prompt may be any JSON value, because a user's function turns it into tokens."""


def _hash_of_prompt(row: PromptRow) -> int:
    return hash(json.dumps([row.prompt, row.images], sort_keys=True))


class PromptDataset:
    """The usable rows, by index, plus counts of the rows left out."""

    def __init__(
        self,
        rows: Iterable[PromptRow],
        *,
        source: str = "memory",
        quarantined: Sequence[Quarantined] = (),
        too_long: Sequence[Quarantined] = (),
        num_control_token_rows: int = 0,
    ) -> None:
        """Raises `DataError` if there are no usable rows."""
        digest = hashlib.sha256()
        self._rows: list[PromptRow] = []
        self._tokens: list[np.ndarray[Any, np.dtype[np.int32]] | None] = []
        self._prompts: set[int] = set()
        contents: set[int] = set()
        for row in rows:
            parts = [row.prompt, row.label, row.metadata, *([row.images] if row.images else [])]
            content = json.dumps(parts, sort_keys=True)
            digest.update(content.encode() + b"\n")
            contents.add(hash(content))
            self._prompts.add(_hash_of_prompt(row))
            # int32: four bytes per id instead of a Python object
            self._tokens.append(None if row.prompt_tokens is None else np.asarray(row.prompt_tokens, np.int32))
            self._rows.append(replace(row, prompt_tokens=None))
        self.quarantined = tuple(quarantined)
        self.too_long = tuple(too_long)
        """Rows dropped for exceeding the prompt length limit."""
        self.num_control_token_rows = num_control_token_rows
        """Usable rows that contain control tokens, which are encoded as ordinary text."""
        self.num_repeated = len(self._rows) - len(contents)
        """Rows that are equal to an earlier row."""
        self.fingerprint = Fingerprint(source=source, num_rows=len(self._rows), digest=digest.hexdigest())
        if not self._rows:
            named = f". First: {_named(self.dropped)}" if self.dropped else ""
            raise DataError(
                f"{source} has no usable rows: {len(self.quarantined)} are malformed and {len(self.too_long)} too "
                f"long; check the file, its slice and the prompt length limit{named}"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int, /) -> PromptRow:
        tokens = self._tokens[row]
        return replace(self._rows[row], prompt_tokens=None if tokens is None else tuple(tokens.tolist()))

    def without_ids(self, row: int, /) -> PromptRow:
        """Returns a row without the ids of its prompt, which take most of the time to read a row."""
        return self._rows[row]

    @property
    def dropped(self) -> tuple[Quarantined, ...]:
        """All rows that were left out."""
        return self.quarantined + self.too_long

    def num_shared(self, rows: Sequence[PromptRow]) -> int:
        """Returns how many of these rows have a prompt that is also in this dataset."""
        return sum(_hash_of_prompt(row) in self._prompts for row in rows)

    def metrics(self) -> dict[str, float]:
        """Returns the `data/*` metrics."""
        return {
            "data/num_rows": len(self),
            "data/num_repeated_rows": self.num_repeated,
            "data/num_quarantined": len(self.quarantined),
            "data/num_too_long": len(self.too_long),
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
        max_dropped: float = 0.05,
        held_out: bool = False,
        images: ImageColumn | None = None,
        grader: str | None = None,
        any_prompt: bool = False,
    ) -> PromptDataset:
        """Loads a .jsonl, .jsonl.zst or .parquet file, a folder or glob pattern of such files, or a data scheme, which
        defines its own column names. The path may end with a slice, `@[a:b]`.

        With `apply_chat_template`, the prompt (messages, or a string treated as one user message) is rendered and
        tokenized. Otherwise a string is tokenized as it is, without special tokens, and messages stay messages.
        `allow_control_tokens` (template only) turns control strings in the data into control tokens. `held_out` is
        passed to `read_rows`. `images` is the image column and requires the template. `grader` is the grader that needs
        a label, if any. `any_prompt` keeps prompts that are neither text nor messages as they are.

        Raises `DataError` for an unreadable or empty file, or if more than the fraction `max_dropped` of the rows is
        malformed (`too_many_dropped`); `ConfigError` for a length limit or template without a tokenizer.
        """
        if tokenizer is None and (apply_chat_template or max_prompt_tokens is not None):
            raise ConfigError("a chat template or a prompt length limit requires a tokenizer; pass one")
        chat = None
        if apply_chat_template:
            kwargs = apply_chat_template_kwargs
            chat = ChatRenderer(tokenizer, kwargs=kwargs, allow_control_tokens=allow_control_tokens)
        keys = _Keys(input_key, label_key, metadata_key, tool_key, any_prompt and not apply_chat_template)
        if made := scheme_of(str(path)) is not None:
            keys = _Keys(INPUT, LABEL, METADATA, TOOLS)
        folder = Path() if made else files_of(str(path))[0].parent
        loader = _Loader(keys, tokenizer, chat, images, folder, grader)
        chunk: list[RawRow] = []
        for raw in read_rows(str(path), held_out=held_out):
            chunk.append(raw)
            if len(chunk) == ENCODE_CHUNK:
                loader.add(chunk)
                chunk = []
        loader.add(chunk)
        rows, too_long = _drop_long(loader.rows, max_prompt_tokens)
        loader.report(str(path), too_long, max_dropped, held_out=held_out)
        return cls(
            rows,
            source=str(path),
            quarantined=loader.quarantined,
            too_long=too_long,
            num_control_token_rows=loader.num_control_token_rows,
        )


_Parsed = tuple[PromptRow, Rendered | None, RawRow, RowImages]
"""(row, rendered prompt or None for messages, raw row, images)"""
NO_IMAGES = RowImages((), ())


class _Loader:
    """Turns raw rows into prompt rows, chunk by chunk."""

    def __init__(
        self,
        keys: _Keys,
        tokenizer: Any,
        chat: ChatRenderer | None,
        images: ImageColumn | None,
        folder: Path,
        grader: str | None,
    ) -> None:
        self.rows: list[PromptRow] = []
        self.quarantined: list[Quarantined] = []
        self.num_control_token_rows = self.num_without_tools = 0
        self._columns: set[str] = set()
        self._grader = grader
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
                self._columns.update(raw.value)
                row, seen = _parse(raw.value, self._keys, f"{raw.file}:{raw.line}"), NO_IMAGES
                require_label(row, self._grader, self._keys.label)
                if self._images is not None:
                    seen = self._images.read(raw.value, self._folder)
                    written = seen.digests if self._chat is None else ()  # for `current().chat`
                    prompt = with_images(row.prompt, len(seen.digests), written)
                    row = replace(row, prompt=prompt, images=seen.digests)
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
        messages, tools = messages_to_render(row.prompt, has_images=self._images is not None), row.metadata.get("tools")
        rendered = self._chat.render(messages, tools=tools)
        text = rendered.text
        if (number := omitted_message(messages, text)) is not None:
            role = messages[number]["role"]
            raise DataError(
                f"the chat template omits message {number} (role {role}) of the prompt; use a role that the template "
                "supports, or set --chat-template FILE"
            )
        self.num_without_tools += not writes_tools(tools, text)
        return replace(row, prompt=text), rendered

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

    def report(self, source: str, too_long: Sequence[Quarantined], max_dropped: float, *, held_out: bool) -> None:
        """Warns about dropped rows. Raises `DataError` if there are no rows or too many are malformed."""
        num_read = len(self.quarantined) + len(self.rows)
        if num_read == 0:
            raise DataError(f"{source} has no rows: the file or its slice is empty; correct the path")
        for flag, key in (("--metadata-key", self._keys.metadata), ("--tool-key", self._keys.tools)):
            if key is not None and self._columns and key not in _DEFAULT_KEYS | self._columns:
                columns = ", ".join(sorted(self._columns))
                problem = f"no row of {source} has the column {key!r} of {flag}; its columns are: {columns}"
                if not held_out:
                    raise DataError(f"{problem}; set the flag to one of them, or drop it")
                _tell("%s", problem)
        if too_many_dropped(len(self.quarantined), num_read, num_read, max_dropped):
            raise DataError(
                f"{len(self.quarantined)} of the {num_read} rows of {source} cannot be used, but at most "
                f"{100 * max_dropped:.4g} % may be dropped; correct the rows or the --*-key flags, or allow more with "
                f"{FLAG}. {first_rows_of(self.quarantined)}"
            )
        if self.quarantined:
            first = first_rows_of(self.quarantined)
            _tell("%s: dropping %d of %d rows, which are malformed. %s", source, len(self.quarantined), num_read, first)
        if too_long:
            first = first_rows_of(too_long)
            _tell("%s: dropping %d of %d rows, which are too long. %s", source, len(too_long), num_read, first)
        if self.num_without_tools:
            text = "%s: the chat template omits the tools of %d of %d rows, so the model does not see them; use a "
            text += "template that writes tools (--chat-template FILE), or describe them in a message"
            _tell(text, source, self.num_without_tools, len(self.rows))
        if self.num_control_token_rows:
            text = "%s: %d of %d rows contain control tokens, which are encoded as ordinary text. If the prompts are "
            text += "already rendered, drop --apply-chat-template"
            _tell(text, source, self.num_control_token_rows, len(self.rows))


def too_many_dropped(num_dropped: int, num_seen: int, num_rows: int, most: float) -> bool:
    """Returns whether more than the fraction `most` of a dataset's `num_rows` rows is dropped, going by the `num_seen`
    rows seen so far. `num_rows` is 0 if unknown.

    Two bad rows among the first eight can be chance. So until all rows have been seen, the limit for those seen so
    far is raised by three standard deviations of a random draw, plus one row. One row may always be dropped, unless
    `most` is 0.
    """
    if most <= 0 or most >= 1:
        return most <= 0 and num_dropped > 0
    left = 1.0 if num_rows <= 0 else max(num_rows - num_seen, 0) / max(num_rows - 1, 1)
    slack = 3 * math.sqrt(num_seen * most * (1 - most) * left) + 1 if left else 0.0
    return num_dropped > max(
        1.0, min(most * num_seen + slack, most * max(num_rows, num_seen) if num_rows else math.inf)
    )


def _tell(text: str, *values: object) -> None:
    logger.warning(text, *values, extra=TELL_DRIVER)


def first_rows_of(dropped: Sequence[Quarantined]) -> str:
    """Names the first dropped rows, and the reason for the first one."""
    others = ", ".join(one.place for one in dropped[1:NUM_NAMED])
    return f"First: {dropped[0]}" + (f". Also: {others}" if others else "")


def _named(quarantined: Sequence[Quarantined]) -> str:
    return "; ".join(map(str, quarantined[:NUM_NAMED]))


def _drop_long(rows: list[PromptRow], most: int | None) -> tuple[list[PromptRow], list[Quarantined]]:
    """Returns the rows with at most `most` prompt tokens, and the others. Messages, whose length is unknown until a
    function renders them, are all kept, with a warning.
    """
    if most is None:
        return rows, []
    if num := sum(row.prompt_tokens is None for row in rows):
        text = (
            "%d prompts are messages that no chat template renders, so none of them is dropped for having more than %d "
            "tokens; to drop long ones, add --apply-chat-template, unless your generate function renders the messages, "
            "as current().chat does"
        )
        logger.warning(text, num, most, extra=TELL_DRIVER)
    sizes = [len(row.prompt_tokens or ()) for row in rows]
    too_long = [
        dropped_row(row.source, f"the prompt has {size} tokens, more than {most}")
        for row, size in zip(rows, sizes, strict=True)
        if size > most
    ]
    return [row for row, size in zip(rows, sizes, strict=True) if size <= most], too_long


def dropped_row(source: str, reason: str) -> Quarantined:
    """Makes a dropped row from its `PromptRow.source`, or from any other text that names it."""
    file, _, line = source.rpartition(":")
    return Quarantined(file, int(line), reason) if file and line.isdecimal() else Quarantined(source, 0, reason)


def require_label(row: PromptRow, grader: str | None, label_key: str | None) -> None:
    """Raises `DataError` if the row has no label, but `grader` needs one. None: no grader needs one."""
    if grader is not None and row.label in (None, "") and "rm_type" not in row.metadata:
        raise DataError(f"the grader {grader} needs a label, but {label_key!r} is {row.label!r}")


def messages_to_render(prompt: str | list[dict[str, Any]], *, has_images: bool = False) -> list[dict[str, Any]]:
    """Returns the messages for the chat template. A string becomes a user message; text parts become one string.

    Raises `DataError` if the prompt already contains its answer, or contains an image but the dataset has no image
    column.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            "the prompt ends with an assistant message, after which the chat template begins another answer; remove "
            "that message from the prompt, or set --input-key to the question column"
        )
    if has_images:
        return prompt
    messages = [{**m, "content": joined(m["content"])} if m.get("content") else m for m in prompt]
    for i, message in enumerate(messages):
        if isinstance(message.get("content"), list):
            raise DataError(
                f"message {i} of the prompt has content other than text, which would be ignored; for images, set "
                "--multimodal-keys (docs/vision.md)"
            )
    return messages


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
    prompt = value[keys.prompt]
    if not keys.any_prompt or isinstance(prompt, str) or prompt in (None, [], {}) or _are_messages(prompt):
        prompt = _checked_prompt(prompt, keys.prompt)
    for name, part in (("the prompt", prompt), ("the label", label), ("the metadata", metadata)):
        try:
            # The fingerprint hashes JSON, but parquet can contain bytes and dates, and NaN for a missing number.
            json.dumps(part, sort_keys=True, allow_nan=False)
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


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(one, dict) and "role" in one for one in prompt)


def _checked_prompt(prompt: Any, key: str) -> str | list[dict[str, Any]]:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{key!r} must be a non-empty string or list of messages, got {repr(prompt)[:80]}")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {i} of {key!r} must be an object with a role, got {repr(message)[:80]}")
        if not isinstance(message.get("content"), str | list | None) or not {"content", "tool_calls"} & set(message):
            raise DataError(f"message {i} of {key!r} needs content (text or parts), got {repr(message)[:80]}")
        if message["role"] == "user" and not message.get("content"):
            raise DataError(f"message {i} of {key!r} is an empty user message")
        # Parquet adds every key to every message, as null; templates check whether a key exists.
        messages.append({k: v for k, v in message.items() if v is not None or k == "content"})
    return messages


def load_prompts(
    args: Args,
    tokenizer: Any,
    *,
    max_prompt_tokens: int | None = None,
    images: ImageColumn | None = None,
    grader: str | None = None,
) -> PromptDataset | None:
    """Loads the training prompts; None without `--prompt-data`. Raises the same errors as `PromptDataset.load`."""
    if args.prompt_data is None:
        return None
    made = _load(args, args.prompt_data, args, tokenizer, max_prompt_tokens, images, grader)
    if made.num_repeated:
        _tell("%s: %d of %d rows are equal to an earlier row", args.prompt_data, made.num_repeated, len(made))
    if len(made) < args.rollout_batch_size:
        text = "%s has %d usable rows, fewer than the %d of a step (--rollout-batch-size), so each step repeats rows"
        _tell(text, args.prompt_data, len(made), args.rollout_batch_size)
    return made


def load_held_out(
    args: Args, config: EvalDatasetConfig, tokenizer: Any, images: ImageColumn | None, grader: str | None = None
) -> PromptDataset:
    """Loads the prompts of an evaluation dataset. Raises the same errors as `PromptDataset.load`."""
    return _load(args, config.path, config, tokenizer, config.max_prompt_len, images, grader)


def _load(
    args: Args,
    path: str,
    columns: DataSettings | EvalDatasetConfig,
    tokenizer: Any,
    max_prompt_tokens: int | None,
    images: ImageColumn | None,
    grader: str | None,
) -> PromptDataset:
    held_out = columns if isinstance(columns, EvalDatasetConfig) else None
    made = PromptDataset.load(
        path,
        tokenizer=tokenizer,
        input_key=columns.input_key,
        label_key=columns.label_key,
        metadata_key=columns.metadata_key,
        tool_key=columns.tool_key,
        apply_chat_template=columns.apply_chat_template,
        apply_chat_template_kwargs=columns.apply_chat_template_kwargs,
        max_prompt_tokens=max_prompt_tokens,
        max_dropped=args.max_dropped_row_fraction,
        held_out=held_out is not None,
        images=images,
        grader=grader,
        any_prompt=users_read_prompts(args, held_out),
    )
    record_dropped(args.run_dir, None if held_out is None else held_out.name, made.dropped)
    return made


def users_read_prompts(args: Args, held_out: EvalDatasetConfig | None = None) -> bool:
    """Returns whether a user's function turns the prompts of the training data, or of `held_out`, into tokens."""
    if fine_tunes(args) or args.rollout_function_path == SFT_ROLLOUT:
        return False
    own = None if held_out is None else held_out.custom_generate_function_path or args.eval_function_path
    return own is not None or not own_lengths(args)


def record_dropped(run_dir: str, dataset: str | None, dropped: Iterable[Quarantined]) -> None:
    """Adds dropped rows to the file `DROPPED_ROWS` of the run folder, unless they are there already.

    `dataset`: the name of the evaluation dataset; None for the training data.
    """
    new = [json.dumps({"dataset": dataset, **asdict(one)}) for one in dropped]
    if not new:
        return
    path = Path(run_dir) / DROPPED_ROWS
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.read_text().splitlines() if path.is_file() else []
    added = [line for line in dict.fromkeys(new) if line not in set(known)][: max(MOST_RECORDED - len(known), 0)]
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in added)


def read_row(
    raw: RawRow,
    *,
    input_key: str,
    label_key: str | None,
    metadata_key: str | None,
    tool_key: str | None,
    any_prompt: bool = False,
) -> PromptRow:
    """Parses one row like `PromptDataset.load`, but does not render or tokenize it. Raises `DataError`."""
    if raw.value is None:
        raise DataError(raw.error or "unreadable")
    return _parse(raw.value, _Keys(input_key, label_key, metadata_key, tool_key, any_prompt), f"row {raw.line}")
