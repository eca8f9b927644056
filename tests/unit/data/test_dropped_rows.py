"""Law: no row of a dataset is lost silently. A row that cannot be used as it is meant is dropped by name, too many of
them end the run, and what is unusual about the other rows is said on the console."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.core.sample import PromptRow
from slime.data.dataset import PromptDataset, load_prompts, too_many_dropped
from slime.observability.logs import ForDriver
from slime.observability.report.summary import facts, summarize
from slime.observability.samples import DROPPED_ROWS
from slime.rollout.factories import load_data_source, load_eval_datasets, load_tokenizer, tell_shared_rows
from tests.support.rollout import rollout_args
from tests.support.tiny import write_tokenizer

QUESTION = {"role": "user", "content": "1+1="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def console() -> Any:
    """What the driver shows."""
    handler = ForDriver()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chance_of_more(num: int, num_seen: int, share: float) -> float:
    """Of a binomial distribution."""
    return sum(math.comb(num_seen, k) * share**k * (1 - share) ** (num_seen - k) for k in range(num + 1, num_seen + 1))


@pytest.mark.parametrize("num_seen", [2, 8, 16, 64, 300])
def test_a_part_of_the_rows_ends_a_run_only_if_chance_cannot_explain_it(num_seen: int) -> None:
    """A run whose true share is just allowed is stopped in fewer than one case in 200; one with a third, soon."""
    allowed = next(k for k in range(num_seen + 1) if k == num_seen or too_many_dropped(k + 1, num_seen, 10**6, 0.05))
    assert chance_of_more(allowed, num_seen, 0.05) < 1 / 200
    assert too_many_dropped(num_seen // 3, num_seen, 10**6, 0.05) == (num_seen > 8)
    assert not too_many_dropped(2, 8, 10**6, 0.05)


@pytest.mark.parametrize("num_rows", [8, 40, 1000])
def test_all_rows_are_judged_exactly(num_rows: int) -> None:
    for dropped in range(num_rows + 1):
        too_many = dropped > max(1, 0.05 * num_rows)
        assert too_many_dropped(dropped, num_rows, num_rows, 0.05) == too_many
        assert too_many_dropped(dropped, num_rows, num_rows, 0.0) == (dropped > 0)
        assert not too_many_dropped(dropped, num_rows, num_rows, 1.0)
    assert too_many_dropped(2, 2, 8, 0.05), "two of eight rows are too many, whatever the other six are"


UNUSABLE = {
    "needs a label, but 'label' is None": {"input": "x", "label": None},
    "needs a label, but 'label' is ''": {"input": "x", "label": ""},
    "Out of range float": {"input": "x", "label": float("nan")},
    "must be a non-empty string": {"input": " \n", "label": "1"},
    "message 0 of 'input' is an empty user message": {"input": [{"role": "user", "content": ""}], "label": "1"},
    "the prompt ends with an assistant message": {
        "input": [QUESTION, {"role": "assistant", "content": "2"}],
        "label": "2",
    },
    "content other than text": {"input": [{"role": "user", "content": [{"type": "image"}]}], "label": "1"},
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_a_row_that_would_be_misread_is_dropped_by_name(
    tmp_path: Path, tokenizer: Any, reason: str, console: ForDriver
) -> None:
    """Before, each was trained on: without its label, its image or its question, or behind its own answer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [{"input": "x", "label": "1"}] * 30
    path, bad = tmp_path / "d.jsonl", UNUSABLE[reason]
    if isinstance(bad["label"], float):  # JSON has no NaN, parquet has
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist([{**row, "label": 1.0} for row in rows] + [bad]), path)
    else:
        write(path, [*rows, bad])
    flags = {"label_key": "label", "grader": "math", "apply_chat_template": True}
    dataset = PromptDataset.load(path, tokenizer=tokenizer, **flags)
    assert len(dataset) == 30 and [(q.file, q.line) for q in dataset.quarantined] == [(path.name, 31)]
    assert reason in dataset.quarantined[0].reason
    (told,) = console.take()
    assert "dropping 1 of 31 rows" in told and f"{path.name}:31: " in told


def test_a_message_that_the_template_omits_is_not_lost(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(
        tmp_path / "no_system",
        chat_template=(
            "{% for m in messages %}{% if m.role != 'system' %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        ),
    )
    path = write(tmp_path / "d.jsonl", [{"input": [{"role": "system", "content": "Be brief."}, QUESTION]}] * 3)
    tokenizer_without = AutoTokenizer.from_pretrained(tmp_path / "no_system")
    with pytest.raises(DataError, match=r"3 of the 3 rows .*First: d\.jsonl:1: .*omits message 0 \(role system\)"):
        PromptDataset.load(path, tokenizer=tokenizer_without, apply_chat_template=True)
    assert "Be brief." in PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True)[0].prompt


def test_text_in_parts_is_the_same_text(tmp_path: Path, tokenizer: Any) -> None:
    """Templates that expect strings write the Python repr of a list."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}]
    path = write(tmp_path / "d.jsonl", [{"input": parts}, {"input": [QUESTION]}])
    dataset = PromptDataset.load(path, tokenizer=tokenizer, apply_chat_template=True)
    assert dataset[0].prompt_tokens == dataset[1].prompt_tokens and "text" not in str(dataset[0].prompt)


def test_tools_that_the_template_omits_are_told(tmp_path: Path, tokenizer: Any, console: ForDriver) -> None:
    rows = [{"input": "x"}] * 3 + [{"input": "use add", "tools": [TOOL]}] + [{"input": "x", "tools": [TOOL]}] * 2
    PromptDataset.load(write(tmp_path / "d.jsonl", rows), tokenizer=tokenizer, apply_chat_template=True)
    (told,) = console.take()
    assert "the chat template omits the tools of 2 of 6 rows" in told


def test_a_named_column_that_no_row_has_is_an_error(tmp_path: Path, console: ForDriver) -> None:
    path = write(tmp_path / "d.jsonl", [{"input": "x", "info": {"a": 1}}] * 3)
    for flag, keys in (("--metadata-key", {"metadata_key": "extra"}), ("--tool-key", {"tool_key": "functions"})):
        with pytest.raises(DataError, match=rf"no row of .* has the column .* of {flag}; its columns are: info, input"):
            PromptDataset.load(path, **keys)
    PromptDataset.load(path, metadata_key="extra", held_out=True)
    assert "no row" in console.take()[0]
    assert PromptDataset.load(path, metadata_key="info")[0].metadata == {"a": 1} and len(PromptDataset.load(path)) == 3


def test_repeated_rows_and_steps_that_repeat_rows_are_told(tmp_path: Path, console: ForDriver) -> None:
    args = rollout_args(tmp_path, "--rollout-batch-size", "4", num_rows=3)
    file = Path(args.prompt_data)
    load_prompts(args, load_tokenizer(args))
    assert [text.partition(" has ")[2] for text in console.take()] == [
        "3 usable rows, fewer than the 4 of a step (--rollout-batch-size), so each step repeats rows"
    ]
    file.write_text(file.read_text() * 2)
    dataset = load_prompts(args, load_tokenizer(args))
    assert dataset is not None and dataset.metrics()["data/num_repeated_rows"] == 3
    assert [text.partition(": ")[2] for text in console.take()] == ["3 of 6 rows are equal to an earlier row"]


def test_evaluation_prompts_that_are_trained_on_are_told(tmp_path: Path, console: ForDriver) -> None:
    data = tmp_path / "prompts.jsonl"
    evaluation = ("--eval-prompt-data", "seen", f"{data}@[38:]", "--eval-interval", "1")
    for slice_, told in (("", ["2 of the 2 prompts of evaluation data seen are also"]), ("@[:38]", [])):
        args = rollout_args(tmp_path, *evaluation).replace(prompt_data=f"{data}{slice_}")
        tokenizer = load_tokenizer(args)
        tell_shared_rows(load_data_source(args, tokenizer), load_eval_datasets(args, tokenizer))
        assert [text[: len(told[0])] for text in console.take()] == told


def test_the_report_names_dropped_rows(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, num_rows=40)
    file, run = Path(args.prompt_data), Path(args.run_dir)
    file.write_text(file.read_text() + '{"label": "no input"}\n')
    for _ in range(2):  # a resumed run finds the same rows again
        load_prompts(args, load_tokenizer(args))
    (row,) = map(json.loads, (run / DROPPED_ROWS).read_text().splitlines())
    assert (row["dataset"], row["file"], row["line"]) == (None, "prompts.jsonl", 41) and "no column" in row["reason"]
    (run / "metrics.jsonl").write_text('{"time": 1.0, "rollout/step": 0, "rollout/raw_reward": 1.0}\n')
    assert facts(summarize(run))["rows dropped, training data"].startswith("1 (prompts.jsonl:41; ")


def test_equal_prompts_are_found_whatever_their_labels() -> None:
    dataset = PromptDataset([PromptRow("a", None, "1", {}, "d:1"), PromptRow("b", None, "2", {}, "d:2")])
    assert dataset.num_shared([PromptRow("a", None, "9", {}, "e:1"), PromptRow("c", None, "1", {}, "e:2")]) == 1
