"""Law: a data set of which no row can be used is refused before anything starts; one with a usable row never is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data import first_rows
from slime.data.checkpoint_template import CheckpointTemplate
from slime.data.first_rows import DataCheck, check_rows, checkpoint_of
from slime.data.row_files import read_rows
from tests.support.tiny import CHAT_TEMPLATE

LOOK = DataCheck(
    name="prompt_data",
    path="",
    input_key="input",
    label_key=None,
    metadata_key="metadata",
    tool_key="tools",
    template=False,
    template_kwargs={},
)


def look(folder: Path, rows: list[Any], **changes: Any) -> DataCheck:
    """At a file of these rows."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataclasses.replace(LOOK, **{"path": str(file), **changes})


@pytest.fixture(scope="module")
def tiny(tiny_qwen3: Path) -> CheckpointTemplate:
    return CheckpointTemplate.of(tiny_qwen3)


def test_one_usable_row_is_enough(tmp_path: Path, tiny: CheckpointTemplate) -> None:
    rows = [{"other": 1}] * 50 + [{"input": 7}] * 50 + [{"input": "x" * 90}] * 50 + [{"input": "fits"}]
    assert check_rows(look(tmp_path, rows, max_prompt_tokens=4), tiny) is None
    told = check_rows(look(tmp_path, rows[:-1], max_prompt_tokens=4, limit="rollout_max_prompt_len"), tiny)
    assert told is not None and "the shortest has 90 tokens, but at most 4 are allowed (rollout_max_prompt_len)" in told


def test_bytes_are_not_taken_for_tokens(tmp_path: Path, tiny: CheckpointTemplate) -> None:
    """Each of these characters is one token of three bytes."""
    assert check_rows(look(tmp_path, [{"input": "日" * 5}], max_prompt_tokens=5), tiny) is None
    assert check_rows(look(tmp_path, [{"input": "日" * 6}], max_prompt_tokens=5), tiny) is not None


def test_few_characters_may_be_many_tokens(tmp_path: Path, tiny: CheckpointTemplate) -> None:
    """The only prompt that fits is the last one by its characters: such a data set is used."""
    rows = [{"input": "日" * 6}] * 3 * first_rows.CHUNK
    short = dataclasses.replace(tiny, folder=tmp_path)
    counts = {"日" * 6: 6, "x" * 9: 2}
    looked = look(tmp_path, [*rows, {"input": "x" * 9}], max_prompt_tokens=5)

    class Counting(CheckpointTemplate):
        """Long words are few tokens."""

        def count_tokens(self, texts: Sequence[str]) -> list[int]:
            return [counts[text] for text in texts]

    counting = Counting(**{f.name: getattr(short, f.name) for f in dataclasses.fields(short)})
    assert check_rows(looked, counting) is None
    told = check_rows(look(tmp_path, rows, max_prompt_tokens=5), counting)
    assert told is not None and "the shortest has 6 tokens" in told


def test_a_pattern_of_csv_files_is_answered_with_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("input\n1\n")
    (tmp_path / "a.csv").write_text("input\n1\n")
    told = check_rows(dataclasses.replace(LOOK, path=f"{tmp_path}/*.csv"), None)
    assert told is not None and f"read_csv('{tmp_path}/a.csv'), 'a.parquet'" in told and "for each file" in told


def test_the_template_counts(tmp_path: Path, tiny: CheckpointTemplate) -> None:
    """Four more tokens stand around the text."""
    rows = [{"input": "12345"}]
    assert check_rows(look(tmp_path, rows, max_prompt_tokens=8, template=True), tiny) is not None
    assert check_rows(look(tmp_path, rows, max_prompt_tokens=9, template=True), tiny) is None


@pytest.mark.parametrize(
    ("row", "changes", "told"),
    [
        ({"prompt": "a"}, {}, "there is no column 'input'; set --input-key to one of prompt"),
        ({"input": "a"}, {"label_key": "label"}, "there is no column 'label'; set --label-key to one of input"),
        ({"input": "a"}, {"grader": "math"}, "the grader math needs a label"),
        ({"input": ["a"]}, {}, "must be an object with a role"),
        ({"input": "a", "metadata": "{"}, {}, "is a string but not valid JSON"),
        ({"input": [{"role": "user", "content": "a"}]}, {}, "add --apply-chat-template"),
        (
            {"input": [{"role": "user", "content": "a"}]},
            {"takes_messages": True, "row_limit": "rollout_max_prompt_len 9"},
            "rollout_max_prompt_len 9 cannot be applied to them",
        ),
        (
            {"input": [{"role": "assistant", "content": "a"}]},
            {"conversations": True, "row_limit": "eval_max_prompt_len 9"},
            "drop that limit",
        ),
        ({"input": "a"}, {"conversations": True}, "a column of message lists"),
        (
            {"input": [{"role": "user", "content": "a"}]},
            {"conversations": True},
            "add an assistant message",
        ),
    ],
)
def test_what_is_wrong_with_all_rows_is_told(
    row: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    said = check_rows(look(tmp_path, [row] * 3, **changes), None)
    assert said is not None and told in said and "none of its 3 rows can be used" in said


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"input": "a", "metadata": {"rm_type": "chance"}}, {"grader": "math"}),
        ({"input": [{"role": "user", "content": "a"}]}, {"takes_messages": True}),
        ({"input": [{"role": "user", "content": "a"}]}, {"template": True}),
        (
            {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"conversations": True},
        ),
        ({"input": "a", "label": "b"}, {"conversations": True, "label_key": "label"}),
    ],
)
def test_what_the_run_can_use_passes(row: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    assert check_rows(look(tmp_path, [row], **changes), None) is None


def test_a_template_that_ignores_add_generation_prompt_is_refused_for_fine_tuning(
    tmp_path: Path, tiny_qwen3: Path
) -> None:
    row = {"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    at, file = look(tmp_path, [row], conversations=True), tmp_path / "own.jinja"
    turns = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<eos>' }}{% endfor %}"
    for template, is_right in ((turns + "{{ '<|assistant|>' }}", False), (turns, False), (CHAT_TEMPLATE, True)):
        file.write_text(template)
        told = check_rows(at, checkpoint_of(str(tiny_qwen3), str(file)))
        assert told is None if is_right else told is not None and "ignores add_generation_prompt" in told


def test_arguments_as_text_reach_a_template_that_reads_objects(tmp_path: Path, tiny_qwen3: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k ~ v }}{% endfor %}{% endfor %}{{ '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    at = look(tmp_path, [{"input": [{"role": "user", "content": "a"}, answer]}], conversations=True)
    assert check_rows(at, checkpoint_of(str(tiny_qwen3), str(file))) is None


def test_calls_at_once_pass_where_a_template_writes_one_a_turn(tmp_path: Path, tiny_qwen3: Path) -> None:
    """As fine-tuning writes them: one behind the result of another."""
    calls = [{"id": str(i), "function": {"name": "f", "arguments": {"x": i}}} for i in range(2)]
    results = [{"role": "tool", "content": "r", "tool_call_id": str(i)} for i in range(2)]
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
        "{{ m.tool_calls[0].function | tojson }}{% endif %}{{ '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    for behind, told in ((results, None), (results[:0], "2 calls, but this chat template writes only 1")):
        at = look(tmp_path, [{"input": [{"role": "user", "content": "a"}, answer, *behind]}], conversations=True)
        found = check_rows(at, checkpoint_of(str(tiny_qwen3), str(file)))
        assert found is None if told is None else found is not None and told in found


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (b"{% for m in messages %}\n{{ m.content }\n{% endfor %}", "own.jinja is not valid Jinja (line 2"),
        (b"{% for m in messages %}", "own.jinja is not valid Jinja (line 1"),
        (b"{{ messages | no_such_filter }}", "No filter named 'no_such_filter'"),
        (b"\xff{{ messages }}", "own.jinja is not UTF-8"),
    ],
)
def test_a_template_of_the_users_that_is_none_is_refused(
    template: bytes, told: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "own.jinja"
    file.write_bytes(template)
    with pytest.raises(DataError) as raised:
        checkpoint_of(str(tiny_qwen3), str(file))
    assert told in str(raised.value)


def test_only_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for raw in read_rows(*args, **kwargs):
            read.append(raw.line)
            yield raw

    monkeypatch.setattr(first_rows, "read_rows", counted)
    monkeypatch.setattr(first_rows, "MOST_ROWS", 10)
    told = check_rows(look(tmp_path, [{}] * 30), None)
    assert told is not None and "none of its first 10 rows" in told and read == list(range(1, 11))
    read.clear()
    assert check_rows(look(tmp_path, [{"input": "a"}] * 30), None) is None and read == [1]


def test_the_rows_of_the_slice_are_looked_at(tmp_path: Path) -> None:
    at = look(tmp_path, [{}] * 5 + [{"input": "a"}] * 5)
    assert check_rows(dataclasses.replace(at, path=f"{at.path}@[0:5]"), None) is not None
    for usable in ("@[5:]", "@[-2:]", "@[:-1]"):
        assert check_rows(dataclasses.replace(at, path=at.path + usable), None) is None
    empty = check_rows(dataclasses.replace(at, path=f"{at.path}@[10:]"), None)
    assert empty is not None and "no rows" in empty


def test_parquet_is_read_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"question": ["a", "b"]}), file)
    told = check_rows(dataclasses.replace(LOOK, path=str(file)), None)
    assert told is not None and "one of question" in told
    assert check_rows(dataclasses.replace(LOOK, path=str(file), input_key="question"), None) is None
    file.write_text("no parquet")
    broken = check_rows(dataclasses.replace(LOOK, path=str(file)), None)
    assert broken is not None and "cannot be read" in broken
