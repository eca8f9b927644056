"""A look at the first rows of a data set before any process starts: is one of them usable?

A wrong column, another format, a template that refuses the messages, a limit that every prompt exceeds: all are
mistakes of the whole file, so they show in its first rows. Reading those takes a fraction of a second; the run would
find out after it has started engines and trainers. A single bad row is none of this module's business (`dataset`).

Invariants
1. What the run could use of the first `MOST_ROWS` rows is never refused: a data set passes as soon as one of them is
   usable, and where only the real tokenizer can tell, a row is taken to be.
2. No more than `MOST_ROWS` rows are read.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, DataError
from slime.core.sample import PromptRow
from slime.data.checkpoint_template import CheckpointTemplate
from slime.data.conversations import conversation_of, generation_prompt_problem, trained_turns
from slime.data.dataset import read_row
from slime.data.row_files import RawRow, read_rows
from slime.data.spelling import Spelling
from slime.settings.data_files import files_of, split_slice

MOST_ROWS = 5000
"""Rows read before the data set is given up; one usable row ends the look."""
CHUNK = 64
"""Of rows whose prompts may be too long, so many are encoded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a row has to be, to be of use."""

    name: str
    """The data set in messages: `prompt_data`, `evaluation data NAME`."""
    path: str
    """As in `--prompt-data`."""
    input_key: str
    label_key: str | None
    metadata_key: str | None
    tool_key: str | None
    template: bool
    """The prompt is rendered when the data is read."""
    template_kwargs: Mapping[str, Any]
    conversations: bool = False
    """Rows are conversations to learn from, which are rendered later."""
    takes_messages: bool = False
    """Messages may stay messages: the user's function renders them."""
    grader: str | None = None
    """The grader that scores nothing without a label."""
    row_limit: str = ""
    """The setting and the limit by which prompts are left out when the data is read; empty without any."""
    max_prompt_tokens: int | None = None
    """Longer prompts are left out, or refused by every engine."""
    limit: str = ""
    """What makes that limit, in words."""


def check_template(checkpoint: CheckpointTemplate, *, because: str) -> str | None:
    """What is wrong with a checkpoint whose template is asked for. `because`: by which setting."""
    if not checkpoint.has_tokenizer:
        return (
            f"got hf_checkpoint {checkpoint.folder}, which holds no tokenizer (tokenizer.json); do: fetch all files of "
            "the checkpoint, not its weights alone"
        )
    if checkpoint.has_template:
        return None
    return (
        f"got {because} with hf_checkpoint {checkpoint.folder}, which has no chat template (a base model?); do: use "
        "the chat checkpoint, give --chat-template FILE, or write prompts as text and drop --apply-chat-template"
    )


def check_rows(look: Look, checkpoint: CheckpointTemplate | None) -> str | None:
    """Why no row of the data set is usable; None as soon as one is. `checkpoint`: whose template renders it."""
    refusals: Counter[str] = Counter()
    too_long: list[tuple[int, str]] = []
    num_rows = 0
    form = functools.cache(functools.partial(_form, look, checkpoint))
    try:
        for raw in itertools.islice(read_rows(look.path), MOST_ROWS):
            num_rows += 1
            try:
                text = _text(look, checkpoint, raw, form)
            except DataError as error:
                refusals[str(error)] += 1
                continue
            # A token is a byte at least, so that a short text needs no tokenizer.
            if text is None or look.max_prompt_tokens is None or len(text.encode()) <= look.max_prompt_tokens:
                return None
            too_long.append((len(text), text))
    except (ConfigError, DataError) as error:
        return _unreadable(look, error)
    if not num_rows:
        return f"got {look.name} {look.path}, which has no rows; do: correct the file or its slice"
    if too_long:
        return _shortest_too_long(look, checkpoint, too_long, num_rows)
    (reason, _), *_ = refusals.most_common(1)
    which = "" if num_rows < MOST_ROWS else "first "
    return f"got {look.name} {look.path}, of whose {which}{num_rows} rows none can be used: {reason}"


_Form = tuple[str | None, Spelling | None]
"""What keeps a template from fine-tuning, and the spelling that it reads; None where that is not known."""


def _form(look: Look, checkpoint: CheckpointTemplate | None) -> _Form:
    if checkpoint is None:
        return None, None
    render = functools.partial(checkpoint.render, kwargs=look.template_kwargs)
    return (
        generation_prompt_problem(lambda talk, asked: render(talk, tools=None, add_generation_prompt=asked)),
        Spelling.of(lambda talk, tools, asked: render(talk, tools=tools, add_generation_prompt=asked)),
    )


def _text(look: Look, checkpoint: CheckpointTemplate | None, raw: RawRow, form: Callable[[], _Form]) -> str | None:
    """The row's prompt as the engines would get it; None where that is not known. Raises `DataError` with a remedy."""
    row = _row(look, raw)
    if not isinstance(row.prompt, str) and (problem := messages_problem(look)):
        raise DataError(f"{look.input_key!r} holds messages, {problem}")
    if look.conversations:
        _check_conversation(look, checkpoint, row, form)
        return None
    if look.grader is not None and row.label is None and "rm_type" not in row.metadata:
        raise DataError(
            f"no label, which the grader {look.grader} compares with (label_key {look.label_key}); give "
            f"--label-key, one of {_columns(raw)}"
        )
    if not look.template:
        return row.prompt if isinstance(row.prompt, str) else None
    if checkpoint is None:
        return None
    messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return checkpoint.render(messages, tools=row.metadata.get("tools"), kwargs=look.template_kwargs)


def messages_problem(look: Look) -> str | None:
    """Why prompts that are messages are of no use, as a clause; None if they are."""
    if look.template:
        return None
    if not look.conversations and not look.takes_messages:
        return "and nothing renders them; do: add --apply-chat-template"
    if look.row_limit:
        other = "" if look.conversations else " or add --apply-chat-template"
        return f"whose length {look.row_limit} cannot judge before they are rendered; do: drop that limit{other}"
    return None


def _row(look: Look, raw: RawRow) -> PromptRow:
    keys = {"label_key": look.label_key, "metadata_key": look.metadata_key, "tool_key": look.tool_key}
    for flag, key in (("--input-key", look.input_key), ("--label-key", look.label_key)):
        if raw.value is not None and key is not None and key not in raw.value:
            raise DataError(f"there is no column {key!r}; give {flag}, one of {_columns(raw)}")
    try:
        return read_row(raw, input_key=look.input_key, **keys)
    except DataError as error:
        raise DataError(
            f"{error}; do: write one JSON object a row, its prompt as text or a list of messages"
        ) from error


def _columns(raw: RawRow) -> str:
    return ", ".join(map(str, raw.value or ()))


def _check_conversation(
    look: Look, checkpoint: CheckpointTemplate | None, row: PromptRow, form: Callable[[], _Form]
) -> None:
    """As `slime.data.conversations` wants it. Raises `DataError`."""
    messages = conversation_of(row.prompt, row.label, rendered=look.template)
    if look.template or messages is None:
        got = "rendered prompts (--apply-chat-template)" if look.template else f"text in {look.input_key!r}"
        raise DataError(
            f"fine-tuning learns from messages and renders them itself, and got {got}; do: leave --apply-chat-template "
            "out, and let --input-key name a column with a list of messages, or --label-key that of the answers"
        )
    numbers = trained_turns(messages)
    problem, spelling = form()
    if problem is not None:
        raise DataError(problem)
    if checkpoint is not None and spelling is not None:
        spelled = spelling.spell(messages, row.metadata.get("tools"))
        first = spelled.rows.index(numbers[0])
        for length, asked in ((first, True), (first + 1, False)):
            checkpoint.render(
                spelled.messages[:length],
                tools=spelled.tools,
                kwargs=look.template_kwargs,
                add_generation_prompt=asked,
            )


def _shortest_too_long(
    look: Look, checkpoint: CheckpointTemplate | None, texts: list[tuple[int, str]], num_rows: int
) -> str | None:
    """All usable rows may be too long: they are counted in tokens, those of fewer characters first, until one fits."""
    least: int | None = None
    shortest_first = [text for _, text in sorted(texts)]
    for start in range(0, len(texts), CHUNK):
        counts = None if checkpoint is None else checkpoint.count_tokens(shortest_first[start : start + CHUNK])
        if counts is None or look.max_prompt_tokens is None or min(counts) <= look.max_prompt_tokens:
            return None
        least = min(counts) if least is None else min(least, *counts)
    which = "all" if num_rows < MOST_ROWS else f"the first {num_rows}"
    return (
        f"got {look.name} {look.path}, of which {which} prompts are too long: the shortest has {least} tokens, "
        f"more than {look.max_prompt_tokens} ({look.limit}); do: raise that limit or shorten the prompts"
    )


def _unreadable(look: Look, error: ConfigError | DataError) -> str:
    """A file of another kind, with the command that makes a readable one of it."""
    path, _ = split_slice(look.path)
    if path.suffix == ".csv":
        try:
            file, *_ = files_of(look.path)
        except ConfigError:  # another process took it away
            file = path
        out = file.with_suffix(".parquet").name
        command = f"import pyarrow.csv as c, pyarrow.parquet as p; p.write_table(c.read_csv('{file}'), '{out}')"
        each = "" if file == path else " (and so for each of the files)"
        return f'got {look.name} {path}; slime reads .jsonl, .jsonl.zst and .parquet; do: python -c "{command}"{each}'
    if path.suffix == ".json":
        return f"got {look.name} {path}; do: write one JSON object on each line, and call the file {path.stem}.jsonl"
    return f"{look.name}: {error}"


def checkpoint_of(hf_checkpoint: str, chat_template: str | None = None) -> CheckpointTemplate:
    """Of a local folder; `chat_template`: a file that stands for its own template. Raises `DataError`."""
    found = CheckpointTemplate.of(Path(hf_checkpoint))
    return found if chat_template is None else found.with_template(Path(chat_template))
