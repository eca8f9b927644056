"""Checks, before any process starts, that at least one of the first rows of a dataset is usable.

Some mistakes break every row: a wrong column or format, a template that rejects the messages, or a limit that every
prompt exceeds. Reading the first rows takes a fraction of a second; without this check, the run would fail only after
engines and trainers have started. Individual bad rows are left to `dataset`. Steps replaced by a user's class or
function (loading prompts, rendering messages, grading) are not checked. Rows that are usable but look wrong lead to a
warning (`data_warnings`).

Invariants
1. A usable dataset is never rejected: one usable row among the first `MOST_ROWS` is enough, and a row that only the
   real tokenizer can judge counts as usable.
2. At most `MOST_ROWS` rows are read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.core.errors import ConfigError, DataError
from slime.core.registry import load_object
from slime.core.sample import PromptRow
from slime.data.checkpoint_template import CheckpointTemplate
from slime.data.dataset import messages_to_render, read_row, require_label
from slime.data.row_files import RawRow, read_rows
from slime.data.sft_loss_mask import conversation_of, generation_prompt_problem, trained_turns
from slime.data.template_spelling import Spelling
from slime.settings import Args
from slime.settings.conditions import fine_tunes
from slime.settings.data_files import files_of, scheme_of, split_slice
from slime.settings.eval_config import EvalDatasetConfig, eval_datasets
from slime.settings.groups.evaluation import measures_loss
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.settings.groups.reward import GRADERS
from slime.settings.rules import engine_context, own_lengths

MOST_ROWS = 5000
"""The dataset is rejected if none of its first rows, up to this many, is usable."""
WARNING_ROWS = 16
"""A warning about prompts is based on this many rows."""
CHUNK = 64
"""Rows per tokenizer call, when prompt lengths must be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    """A dataset to check, and what makes a row usable."""

    name: str
    """The name shown in messages: `prompt_data` or `evaluation data NAME`."""
    path: str
    """The value of `--prompt-data`, or the path of the evaluation dataset."""
    input_key: str
    label_key: str | None
    metadata_key: str | None
    tool_key: str | None
    template: bool
    """Whether prompts are rendered when the data is loaded."""
    template_kwargs: Mapping[str, Any]
    conversations: bool = False
    """Whether rows are fine-tuning conversations, which are rendered later."""
    takes_messages: bool = False
    """Whether unrendered messages are allowed, because a user's function renders them."""
    grader: str | None = None
    """Name of the grader, if it needs a label."""
    has_images: bool = False
    """Whether prompts may contain images."""
    row_limit: str = ""
    """Name and value of the setting that limits the prompt length; empty without a limit."""
    max_prompt_tokens: int | None = None
    """Longer prompts are dropped, or rejected by engines."""
    limit: str = ""
    """Where `max_prompt_tokens` comes from, for messages."""


def check_template(checkpoint: CheckpointTemplate, *, because: str) -> str | None:
    """Returns why a checkpoint cannot render messages, or None. `because` names the setting that requires rendering."""
    if not checkpoint.has_tokenizer:
        return (
            f"--hf-checkpoint {checkpoint.folder} has no tokenizer (tokenizer.json); download the whole checkpoint, "
            "not only its weights"
        )
    if checkpoint.has_template:
        return None
    return (
        f"--hf-checkpoint {checkpoint.folder} has no chat template (a base model?), but {because} needs one; use the "
        "chat checkpoint, set --chat-template FILE, or write prompts as text and drop --apply-chat-template"
    )


def check_rows(check: DataCheck, checkpoint: CheckpointTemplate | None) -> str | None:
    """Returns why no row is usable, or None if one is. The chat template is read from `checkpoint`."""
    refusals: Counter[str] = Counter()
    too_long: list[tuple[int, str]] = []
    num_rows = 0
    form = functools.cache(functools.partial(_form, check, checkpoint))
    try:
        for raw in itertools.islice(read_rows(check.path), MOST_ROWS):
            num_rows += 1
            try:
                text = _text(check, checkpoint, raw, form)
            except DataError as error:
                refusals[str(error)] += 1
                continue
            # A token has at least one byte, so a short text needs no tokenizer.
            if text is None or check.max_prompt_tokens is None or len(text.encode()) <= check.max_prompt_tokens:
                return None
            too_long.append((len(text), text))
    except (ConfigError, DataError) as error:
        return _unreadable(check, error)
    if not num_rows:
        return f"{check.name} {check.path} has no rows; correct the file or its slice"
    if too_long:
        return _shortest_too_long(check, checkpoint, too_long, num_rows)
    (reason, _), *_ = refusals.most_common(1)
    which = "" if num_rows < MOST_ROWS else "first "
    return f"{check.name} {check.path}: none of its {which}{num_rows} rows can be used: {reason}"


_Form = tuple[str | None, Spelling | None]
"""(why the template cannot be used for fine-tuning, its spelling); None means no problem, or unknown."""


def _form(check: DataCheck, checkpoint: CheckpointTemplate | None) -> _Form:
    if checkpoint is None:
        return None, None
    render = functools.partial(checkpoint.render, kwargs=check.template_kwargs)
    return (
        generation_prompt_problem(lambda talk, add_prompt: render(talk, tools=None, add_generation_prompt=add_prompt)),
        Spelling.of(lambda talk, tools, add_prompt: render(talk, tools=tools, add_generation_prompt=add_prompt)),
    )


def _text(
    check: DataCheck, checkpoint: CheckpointTemplate | None, raw: RawRow, form: Callable[[], _Form]
) -> str | None:
    """Returns the prompt text that engines would receive; None if unknown. Raises `DataError` for an unusable row."""
    row = _row(check, raw)
    if not isinstance(row.prompt, str) and (problem := messages_problem(check)):
        raise DataError(f"{check.input_key!r} contains messages, {problem}")
    if check.conversations:
        _check_conversation(check, checkpoint, row, form)
        return None
    try:
        require_label(row, check.grader, check.label_key)
    except DataError as error:
        raise DataError(f"{error}; set --label-key to one of {_columns(raw)}") from error
    if not check.template:
        return row.prompt if isinstance(row.prompt, str) else None
    if checkpoint is None:
        return None
    messages = messages_to_render(row.prompt, has_images=check.has_images)
    return checkpoint.render(messages, tools=row.metadata.get("tools"), kwargs=check.template_kwargs)


def messages_problem(check: DataCheck) -> str | None:
    """Returns why prompts cannot be messages, as a clause starting with "but"; None if they can."""
    if check.template:
        return None
    if not check.conversations and not check.takes_messages:
        return "but nothing renders them; add --apply-chat-template"
    if check.row_limit:
        other = "" if check.conversations else " or add --apply-chat-template"
        unknown = "their length is unknown until they are rendered"
        return f"but {check.row_limit} cannot be applied to them, because {unknown}; drop that limit{other}"
    return None


def _row(check: DataCheck, raw: RawRow) -> PromptRow:
    keys: dict[str, Any] = {"label_key": check.label_key, "metadata_key": check.metadata_key}
    own = check.takes_messages and not check.template and not check.conversations
    keys |= {"tool_key": check.tool_key, "any_prompt": own}
    for flag, key in (("--input-key", check.input_key), ("--label-key", check.label_key)):
        if raw.value is not None and key is not None and key not in raw.value:
            raise DataError(f"there is no column {key!r}; set {flag} to one of {_columns(raw)}")
    try:
        return read_row(raw, input_key=check.input_key, **keys)
    except DataError as error:
        raise DataError(
            f"{error}; write each row as one JSON object, with its prompt as text or a list of messages"
        ) from error


def _columns(raw: RawRow) -> str:
    return ", ".join(map(str, raw.value or ()))


def _check_conversation(
    check: DataCheck, checkpoint: CheckpointTemplate | None, row: PromptRow, form: Callable[[], _Form]
) -> None:
    """Raises `DataError` if the row cannot be used for fine-tuning."""
    messages = conversation_of(row.prompt, row.label, rendered=check.template)
    if check.template or messages is None:
        got = "rendered prompts (--apply-chat-template)" if check.template else f"text in {check.input_key!r}"
        raise DataError(
            f"fine-tuning renders the messages itself, but the row has {got}; drop --apply-chat-template, and set "
            "--input-key to a column of message lists, or --label-key to the answer column"
        )
    numbers = trained_turns(messages)
    problem, spelling = form()
    if problem is not None:
        raise DataError(problem)
    if checkpoint is not None and spelling is not None:
        spelled = spelling.spell(messages, row.metadata.get("tools"))
        first = spelled.rows.index(numbers[0])
        for length, add_prompt in ((first, True), (first + 1, False)):
            checkpoint.render(
                spelled.messages[:length],
                tools=spelled.tools,
                kwargs=check.template_kwargs,
                add_generation_prompt=add_prompt,
            )


def _shortest_too_long(
    check: DataCheck, checkpoint: CheckpointTemplate | None, texts: list[tuple[int, str]], num_rows: int
) -> str | None:
    """Tokenizes the texts, shortest first, until one fits. Returns an error message if all are too long."""
    least: int | None = None
    shortest_first = [text for _, text in sorted(texts)]
    for start in range(0, len(texts), CHUNK):
        counts = None if checkpoint is None else checkpoint.count_tokens(shortest_first[start : start + CHUNK])
        if counts is None or check.max_prompt_tokens is None or min(counts) <= check.max_prompt_tokens:
            return None
        least = min(counts) if least is None else min(least, *counts)
    which = "all" if num_rows < MOST_ROWS else f"the first {num_rows}"
    return (
        f"{check.name} {check.path}: {which} prompts are too long: the shortest has {least} tokens, but at most "
        f"{check.max_prompt_tokens} are allowed ({check.limit}); raise that limit or shorten the prompts"
    )


def _unreadable(check: DataCheck, error: ConfigError | DataError) -> str:
    """Returns the error message for an unreadable file; for a CSV file, it includes a conversion command."""
    path, _ = split_slice(check.path)
    if path.suffix == ".csv":
        try:
            file, *_ = files_of(check.path)
        except ConfigError:  # the file was just deleted
            file = path
        out = file.with_suffix(".parquet").name
        command = f"import pyarrow.csv as c, pyarrow.parquet as p; p.write_table(c.read_csv('{file}'), '{out}')"
        each = "" if file == path else " (and the same for each file)"
        unknown = f"{check.name} {path} is CSV, but slime reads .jsonl, .jsonl.zst and .parquet"
        return f'{unknown}; convert it with python -c "{command}"{each}'
    if path.suffix == ".json":
        jsonl = f"write {path.stem}.jsonl with one JSON object per line"
        return f"{check.name} {path} is a .json file, but slime reads JSON lines; {jsonl}"
    return f"{check.name}: {error}"


def checkpoint_of(hf_checkpoint: str, chat_template: str | None = None) -> CheckpointTemplate:
    """Reads the checkpoint's template, overridden by the file `chat_template` if set. Raises `DataError`."""
    found = CheckpointTemplate.of(Path(hf_checkpoint))
    return found if chat_template is None else found.with_template(Path(chat_template))


# ---- the datasets of a run ---------------------------------------------------------------------------------------


def data_problems(args: Args) -> list[str]:
    """Returns an error message for each dataset without a usable row."""
    checks = [_prompts(args)] if args.data_source == "prompt_data" and args.prompt_data is not None else []
    checks += [_held_out(args, one) for one in eval_datasets(args)]
    return list(dict.fromkeys(_problems(args, checks)))


def _problems(args: Args, checks: list[DataCheck]) -> Iterator[str]:
    try:
        checkpoint = checkpoint_of(args.hf_checkpoint, args.chat_template)
    except (DataError, OSError) as error:
        yield str(error)
        return
    for check in checks:
        renders = check.template or check.conversations
        because = "--apply-chat-template" if check.template else "fine-tuning on conversations"
        problem = check_template(checkpoint, because=because) if renders else None
        problem = problem or (check_rows(check, checkpoint) if scheme_of(check.path) is None else _made_rows(check))
        if problem is not None:
            yield problem


def data_warnings(args: Args) -> list[str]:
    """Returns warnings about prompts that would probably train the model on something the user does not want.

    The datasets must have passed `data_problems`.
    """
    if args.prompt_data is None or args.data_source != "prompt_data" or fine_tunes(args) or args.num_rollout == 0:
        return []
    if scheme_of(args.prompt_data) is not None or args.debug_train_only or args.load_debug_rollout_data is not None:
        return []
    found: list[str | None] = []
    with contextlib.suppress(ConfigError, DataError, OSError):  # loading the data reports the problem
        found.append(_repeated_prompts(args))
        if own_lengths(args):
            checkpoint = checkpoint_of(args.hf_checkpoint, args.chat_template)
            found.append(template_mistake(_prompts(args), checkpoint, args))
    return [text for text in found if text is not None]


def _repeated_prompts(args: Args) -> str | None:
    wanted = args.rollout_batch_size
    num_rows = sum(1 for _ in itertools.islice(read_rows(args.prompt_data or ""), wanted))
    if num_rows >= wanted:
        return None
    return (
        f"prompt_data {args.prompt_data} has {num_rows} rows, but a step takes rollout_batch_size {wanted} prompts, so "
        "every step contains the same prompts several times; lower --rollout-batch-size, or raise "
        "--n-samples-per-prompt for more samples of each prompt"
    )


_MARKER = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]")
"""A control token in the text of a chat template, such as <|im_start|>, <bos> or [INST]."""


def template_mistake(check: DataCheck, checkpoint: CheckpointTemplate, args: Args) -> str | None:
    """Returns a warning for text prompts that are rendered twice, or not at all although the model has a template."""
    if not checkpoint.has_template:
        return None
    texts = [text for text in _first_prompts(check) if isinstance(text, str)]
    marked = _are_rendered(texts, check, checkpoint)
    if check.template and marked:
        return (
            f"{check.name} {check.path} has prompts that are already rendered (they contain {marked}), and "
            "--apply-chat-template renders them again as the text of a user message; drop --apply-chat-template"
        )
    if check.template or marked or not texts or args.was_given("apply_chat_template"):
        return None
    return (
        f"{check.name} {check.path} has plain text prompts, and the chat template of {checkpoint.folder} is not "
        "applied, so an instruct model continues the text instead of answering it; add --apply-chat-template (or "
        "--no-apply-chat-template if intended)"
    )


def _first_prompts(check: DataCheck) -> Iterator[Any]:
    for raw in itertools.islice(read_rows(check.path), WARNING_ROWS):
        with contextlib.suppress(DataError):
            yield _row(check, raw).prompt


def _are_rendered(texts: Sequence[str], check: DataCheck, checkpoint: CheckpointTemplate) -> str | None:
    """Returns a control token of the template that all texts contain; None if there is none."""
    try:
        empty = checkpoint.render([{"role": "user", "content": ""}], tools=None, kwargs=check.template_kwargs)
    except DataError:
        return None
    markers = dict.fromkeys(_MARKER.findall(empty or ""))
    return next((one for one in markers if texts and all(one in text for text in texts)), None)


def _made_rows(check: DataCheck) -> str | None:
    """Returns why a scheme's rows cannot be used, or None. Generates no rows."""
    found = scheme_of(check.path)
    if found is None or not found[0].makes_messages(found[1]):
        return None
    problem = messages_problem(check)
    return None if problem is None else f"{check.name} {check.path}: its prompts are messages, {problem}"


def _prompts(args: Args) -> DataCheck:
    limits = [(args.rollout_max_prompt_len, "rollout_max_prompt_len")]
    if own_lengths(args) and args.num_rollout and not args.debug_train_only and args.load_debug_rollout_data is None:
        limits.append(_engine_limit(args, args.rollout_max_context_len, args.rollout_max_response_len))
    most, limit = _least(limits)
    return DataCheck(
        name="prompt_data",
        path=args.prompt_data or "",
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        template=args.apply_chat_template,
        template_kwargs=args.apply_chat_template_kwargs,
        conversations=args.rollout_function_path == SFT_ROLLOUT,
        takes_messages=args.rollout_function_path != DEFAULT_ROLLOUT or not own_lengths(args),
        grader=grader_of_prompts(args),
        has_images=bool(args.multimodal_keys),
        row_limit=_row_limit(args, args.rollout_max_prompt_len, "rollout_max_prompt_len"),
        max_prompt_tokens=most,
        limit=limit,
    )


def _held_out(args: Args, one: EvalDatasetConfig) -> DataCheck:
    generates = _generates(args, one)
    limits = [(one.max_prompt_len, "eval_max_prompt_len")]
    if generates and not args.debug_train_only:
        limits.append(_engine_limit(args, one.max_context_len, one.max_response_len))
    most, limit = _least(limits)
    return DataCheck(
        name=f"evaluation data {one.name}",
        path=one.path,
        input_key=one.input_key,
        label_key=one.label_key,
        metadata_key=one.metadata_key,
        tool_key=one.tool_key,
        template=one.apply_chat_template,
        template_kwargs=one.apply_chat_template_kwargs or {},
        conversations=measures_loss(args, one),
        takes_messages=not generates,
        grader=grader_of_held_out(args, one),
        has_images=bool(args.multimodal_keys),
        row_limit=_row_limit(args, one.max_prompt_len, "eval_max_prompt_len"),
        max_prompt_tokens=most,
        limit=limit,
    )


def _generates(args: Args, one: EvalDatasetConfig) -> bool:
    """Returns whether slime's own functions generate the responses to an evaluation dataset."""
    own = own_lengths(args) and not fine_tunes(args)
    return own and one.custom_generate_function_path is None and args.eval_function_path is None


def grader_of_prompts(args: Args) -> str | None:
    """Returns the name of the run's grader if it grades the training prompts and needs a label, else None."""
    graded = own_lengths(args) and not (args.custom_rm_path or args.rollout_sample_hook_path)
    return _needs_label(args.rm_type) if graded else None


def grader_of_held_out(args: Args, one: EvalDatasetConfig) -> str | None:
    """Returns the name of an evaluation dataset's grader if it needs a label, else None."""
    graded = _generates(args, one) and not (one.custom_rm_path or args.custom_rm_path or args.rollout_sample_hook_path)
    return _needs_label(one.rm_type or args.rm_type) if graded else None


def _row_limit(args: Args, limit: int | None, setting: str) -> str:
    """Returns the setting that limits prompts, unless it is derived. A derived limit does not apply to messages."""
    return "" if limit is None or not args.was_given(setting) else f"{setting} {limit}"


def _needs_label(rm_type: str | None) -> str | None:
    """Returns the name of the grader if it needs a label, else None."""
    try:
        return rm_type if rm_type and load_object(GRADERS).get(rm_type).needs_label else None
    except ConfigError:  # an unknown grader is reported by a settings rule
        return None


def _engine_limit(args: Args, max_context_len: int | None, max_response_len: int) -> tuple[int | None, str]:
    """Returns the maximum prompt length that an engine accepts, and the reason for it."""
    context = engine_context(args)
    if context is None or max_context_len is not None:  # responses are truncated to fit
        return (None if context is None else context - 1), "the model's context"
    return context - max_response_len, f"the model's context of {context} minus a response of {max_response_len}"


def _least(limits: list[tuple[int | None, str]]) -> tuple[int | None, str]:
    given = [(most, text) for most, text in limits if most is not None]
    return min(given) if given else (None, "")
