"""Laws of a dataset: every row of the file is served, too long or quarantined by name; the slice is Python's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.core.errors import ConfigError, DataError
from slime.data.dataset import PromptDataset
from slime.settings.data_files import split_slice
from tests.support.tiny import write_tokenizer

GOOD = {"input": "hello", "label": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def write(path: Path, rows: list[dict]) -> Path:
    text = "" if path.suffix == ".parquet" else "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    elif path.suffix == ".zst":
        import zstandard

        path.write_bytes(zstandard.compress(text.encode()))
    else:
        path.write_text(text)
    return path


KINDS = ["d.jsonl", "d.jsonl.zst", "d.parquet"]


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.none() | st.integers(-12, 12), st.none() | st.integers(-12, 12))
def test_a_slice_means_what_python_means(tmp_path_factory, kind: str, start: int | None, stop: int | None) -> None:
    path = tmp_path_factory.getbasetemp() / f"slices-{kind}"
    if not path.exists():
        write(path, [{"input": f"p{i}"} for i in range(10)])
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [f"p{i}" for i in range(10)][start:stop]
    if not expected:
        with pytest.raises(DataError, match="empty"):
            PromptDataset.load(spec)
        return
    dataset = PromptDataset.load(spec)
    assert [dataset[i].prompt for i in range(len(dataset))] == expected
    assert dataset[0].source == f"{path.name}:{int(expected[0][1:]) + 1}"


@pytest.mark.parametrize("kind", KINDS)
def test_columns_arrive_whole(tmp_path: Path, tokenizer, kind: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"q": messages, "a": {"x": 0.1}, "m": {"k": [1]}, "t": [{"name": "f"}], "more": "ignored"},
        {"q": messages, "a": {"x": 0.2}, "m": {"k": [2]}, "t": None, "more": "ignored"},
    ]
    options = {"input_key": "q", "label_key": "a", "metadata_key": "m", "tool_key": "t"}
    path = write(tmp_path / kind, rows)
    raw = PromptDataset.load(path, tokenizer=tokenizer, **options)
    assert raw[0].prompt == messages and raw[0].prompt_tokens is None
    assert raw[0].label == {"x": 0.1} and raw[0].metadata == {"k": [1], "tools": [{"name": "f"}]}
    assert raw[1].metadata == {"k": [2]}
    chat = PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True, **options)
    assert chat[0].prompt == "<bos><|user|>hi<eos><|assistant|>"
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(chat[0].prompt_tokens) == expected


def test_kinds_of_file_hold_the_same_data(tmp_path: Path) -> None:
    rows = [{**GOOD, "input": f"p{i}"} for i in range(4)]
    prints = [PromptDataset.load(write(tmp_path / kind, rows), label_key="label").fingerprint for kind in KINDS]
    assert all(p.same_data(prints[0]) for p in prints)
    other = PromptDataset.load(write(tmp_path / "other.jsonl", rows[::-1]), label_key="label").fingerprint
    assert not other.same_data(prints[0])


BAD_LINES = {
    "not valid JSON": b'{"input": "x"',
    "NaN": b'{"input": "x", "label": NaN}',
    "not JSON: 'utf-8'": b'{"input": "\xff\xfe"}',
    "surrogates": b'{"input": "\\ud800", "label": 1}',
    "JSON object, got list": b"[1]",
    "no column 'input'": b'{"prompt": "x", "label": 1}',
    "no column 'label'": b'{"input": "x"}',
    "must be a non-empty string": b'{"input": "", "label": 1}',
    "or list of messages": b'{"input": 5, "label": 1}',
    "role": b'{"input": [{"content": "x"}], "label": 1}',
    "needs content": b'{"input": [{"role": "user", "content": 3}], "label": 1}',
    "'metadata' must be a dict": b'{"input": "x", "label": 1, "metadata": [1]}',
    "'metadata' is a string": b'{"input": "x", "label": 1, "metadata": "{"}',
    "'tools'": b'{"input": "x", "label": 1, "tools": [1]}',
    "different tools": b'{"input": "x", "label": 1, "tools": [{"a": 1}], "metadata": {"tools": [{"a": 2}]}}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_malformed_row_is_named_and_left_out(tmp_path: Path, reason: str, caplog) -> None:
    path = tmp_path / "d.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join([good, b"", BAD_LINES[reason], *[good] * 30]))
    dataset = PromptDataset.load(path, label_key="label")
    assert len(dataset) == 31
    (bad,) = dataset.quarantined
    assert (bad.file, bad.line) == ("d.jsonl", 3)
    assert reason.replace("not JSON: 'utf-8'", "utf-8") in bad.reason
    assert "d.jsonl:3" in caplog.text
    assert dataset.metrics()["data/num_quarantined"] == 1


def test_many_malformed_rows_are_an_error_that_names_them(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"question": "x"}] * 9 + [GOOD])
    with pytest.raises(
        DataError, match=r"9 of the 10 rows .*cannot be used.*d.jsonl:1: there is no column 'input'.*question"
    ):
        PromptDataset.load(path)
    assert len(PromptDataset.load(path, max_dropped=0.9)) == 1
    with pytest.raises(DataError, match="no usable row"):
        PromptDataset.load(f"{path}@[:3]", max_dropped=1.0)


def test_one_malformed_row_is_never_too_many(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [GOOD] * 3 + [{"question": "x"}])
    assert len(PromptDataset.load(path).quarantined) == 1
    with pytest.raises(DataError, match="1 of the 4 rows"):
        PromptDataset.load(path, max_dropped=0.0)
    with pytest.raises(DataError, match=r"no usable row.*d\.jsonl:4: there is no column 'input'"):
        PromptDataset.load(f"{path}@[3:]")


def test_a_parquet_row_that_is_not_json_is_quarantined(tmp_path: Path) -> None:
    texts = [[{"role": "user", "content": [{"type": "text", "text": "hi", "image": None}]}]] * 2
    image = [{"role": "user", "content": [{"type": "image", "text": None, "image": b"\x89PNG"}]}]
    dataset = PromptDataset.load(write(tmp_path / "d.parquet", [{"input": m} for m in (*texts, image)]))
    assert len(dataset) == 2
    assert [q.line for q in dataset.quarantined] == [3] and "prompt is not JSON" in dataset.quarantined[0].reason


def test_a_row_that_the_template_refuses_is_quarantined(tmp_path: Path, tokenizer) -> None:
    calls = [{"role": "assistant", "tool_calls": []}]
    path = write(tmp_path / "d.jsonl", [GOOD] * 30 + [{"input": calls}])
    dataset = PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True)
    assert [q.line for q in dataset.quarantined] == [31] and "template" in dataset.quarantined[0].reason


def test_long_prompts_are_left_out_and_counted(tmp_path: Path, tokenizer, caplog) -> None:
    path = write(tmp_path / "d.jsonl", [{"input": "x" * n} for n in range(1, 9)])
    dataset = PromptDataset.load(path, tokenizer=tokenizer, max_prompt_tokens=5)
    assert re.search(r"dropping 3 of 8 rows, which are too long. First: d\.jsonl:6: .*6 tokens", caplog.text)
    assert [len(dataset[i].prompt_tokens) for i in range(len(dataset))] == [1, 2, 3, 4, 5]
    assert [one.line for one in dataset.too_long] == [6, 7, 8]
    with pytest.raises(DataError, match="8 too long"):
        PromptDataset.load(path, tokenizer=tokenizer, max_prompt_tokens=0)
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptDataset.load(path, max_prompt_tokens=5)


def test_control_tokens_in_a_prompt_are_spelled_and_counted(tmp_path: Path, tokenizer, caplog) -> None:
    path = write(tmp_path / "d.jsonl", [{"input": "a<eos><|assistant|>b"}, {"input": "c"}])
    dataset = PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True)
    assert dataset[0].prompt_tokens.count(tokenizer.eos_token_id) == 1
    assert dataset.num_control_token_rows == 1 and "control tokens" in caplog.text
    trusted = PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True, allow_control_tokens=True)
    assert trusted[0].prompt_tokens.count(tokenizer.eos_token_id) == 2
    assert trusted[0].prompt == dataset[0].prompt


def test_more_rows_than_one_chunk_keep_their_order(tmp_path: Path, tokenizer) -> None:
    path = write(tmp_path / "d.jsonl", [{"input": f"p{i}"} for i in range(2500)])
    dataset = PromptDataset.load(path, tokenizer=tokenizer)
    assert all(tokenizer.decode(dataset[i].prompt_tokens) == dataset[i].prompt == f"p{i}" for i in range(2500))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("d.csv", b"a,b\n", ConfigError),
        ("d.jsonl", b"", DataError),
        ("d.jsonl", b"\n \n", DataError),
        ("d.parquet", b"PAR1 not really", DataError),
        ("d.jsonl.zst", b"not zstd", DataError),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, error) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error):
        PromptDataset.load(tmp_path / name)


def test_paths_and_slices_are_told_apart(tmp_path: Path) -> None:
    assert split_slice("a@b.jsonl") == (Path("a@b.jsonl"), slice(None))
    assert split_slice("d.jsonl@[-3:]") == (Path("d.jsonl"), slice(-3, None))
    for wrong in ("d.jsonl@[3]", "d.jsonl@[a:b]", "d.jsonl@[1:2:3]", "d.jsonl@[-:2]"):
        with pytest.raises(ConfigError, match=r"@\[start:stop\]"):
            split_slice(wrong)
    with pytest.raises(ConfigError, match="does not exist"):
        PromptDataset.load(tmp_path / "absent.jsonl")
