"""What a data set's name means: a file, a folder or pattern of files in one order, or the data of a scheme."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.data.dataset import PromptDataset
from slime.data.row_files import read_rows
from slime.settings.data_files import count_rows, files_of, first_row_names


def write(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    return path


def read(spec: object) -> list[str]:
    return [str(row.value and row.value["input"]) for row in read_rows(str(spec))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten rows, 0 to 9 in the order of the paths, which is not the order in which the files were written."""
    write(tmp_path / "data" / "part-2.jsonl", ["7", "8", "9"])
    write(tmp_path / "data" / "part-1.jsonl", ["3", "4", "5", "6"])
    write(tmp_path / "data" / "part-0.jsonl", ["0", "1", "2"])
    (tmp_path / "data" / "README.md").write_text("not data")
    return tmp_path / "data"


def test_a_folder_and_a_pattern_are_read_in_the_order_of_their_paths(folder: Path) -> None:
    assert read(folder) == read(folder / "part-*.jsonl") == read(folder.parent / "**" / "*.jsonl") == list("0123456789")
    assert read(folder / "part-[12].jsonl") == list("3456789")
    assert count_rows(str(folder)) == 10
    assert first_row_names(str(folder), "input") and not first_row_names(str(folder), "metadata")


@pytest.mark.parametrize("rows", ["[:]", "[2:8]", "[3:7]", "[-2:]", "[:-4]", "[4:5]", "[8:20]", "[6:2]"])
def test_a_slice_counts_the_rows_of_all_files(folder: Path, rows: str) -> None:
    start, stop = (int(n) if n else None for n in rows[1:-1].split(":"))
    expected = list("0123456789")[start:stop]
    assert read(f"{folder}@{rows}") == read(f"{folder}/part-*.jsonl@{rows}") == expected
    assert count_rows(f"{folder}@{rows}") == len(expected)


def test_a_data_cursor_does_not_know_how_rows_are_spread_over_files(folder: Path, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", list("0123456789"))
    assert PromptDataset.load(folder).fingerprint.same_data(PromptDataset.load(whole).fingerprint)
    assert PromptDataset.load(folder)[3].source == "part-1.jsonl:1"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["train-0.jsonl", "test-0.jsonl"], "several splits .*test: test-0.jsonl, train: .*'.*/train\\*'"),
        (["train.jsonl", "validation.jsonl"], "several splits"),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "several splits.*'.*/gsm8k_train\\*'"),
        (["data.jsonl", "test.jsonl"], "several splits .*unnamed: data.jsonl, test: test.jsonl.*'.*/data.jsonl'"),
        (["a.jsonl", "a.parquet"], "may contain the same rows"),
        (["README.md"], "has no .jsonl"),
        (["data/train.jsonl", "README.md"], "pass one of .*data"),
    ],
)
def test_a_folder_that_is_not_one_split_in_one_format_is_refused(tmp_path: Path, names: list[str], says: str) -> None:
    for name in names:
        write(tmp_path / name, ["x"])
    with pytest.raises(ConfigError, match=says):
        files_of(str(tmp_path))


@pytest.mark.parametrize(
    "names", [["math_test-0.jsonl", "math_test-1.jsonl"], ["train.jsonl", "more.jsonl"], ["a", "b"]]
)
def test_a_folder_of_one_split_is_read(tmp_path: Path, names: list[str]) -> None:
    files = [write(tmp_path / Path(name).with_suffix(".jsonl"), ["x"]) for name in names]
    assert files_of(str(tmp_path)) == sorted(files)


def test_a_name_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matches no files"):
        files_of(str(tmp_path / "*.jsonl"))
    with pytest.raises(ConfigError, match=r"there is no such data scheme.*choose from rg"):
        read("s3:bucket/key.jsonl")


def test_a_file_with_signs_of_patterns_and_schemes_in_its_name_is_a_file(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "a[1]*.jsonl", ["x"])
    write(tmp_path / "rg:b.jsonl", ["y"])
    monkeypatch.chdir(tmp_path)
    assert read("a[1]*.jsonl@[0:1]") == ["x"] and read("rg:b.jsonl") == ["y"]
