"""Evaluation under fine-tuning: by loss where nothing scores, by sampled answers where something does."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from slime.settings import parse_args
from slime.settings.groups.evaluation import loss_datasets, samples_evaluations
from tests.support.command_line import complete, listed, refused
from tests.support.marks import quick


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """Fine-tuning on conversations, with others held out."""
    words = complete(tmp_path)
    at = words.index("--rm-type")
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps({"input": turns}) + "\n")
    held = ["--eval-prompt-data", "held", str(held_out), "--eval-interval", "1"]
    return [*words[:at], *words[at + 2 :], "--loss-type", "sft_loss", *held]


def test_conversations_that_nothing_scores_need_no_engine(base: list[str]) -> None:
    args = parse_args([*base, "--eval-temperature", "0.5"])
    assert [one.name for one in loss_datasets(args)] == ["held"] and not samples_evaluations(args)
    assert args.debug_train_only
    assert "eval_temperature 0.5, which needs an evaluation that samples" in listed(args)


@pytest.mark.parametrize(
    "judge",
    [
        ["--rm-type", "math"],
        ["--custom-rm-path", "examples.brief_reward:reward"],
        ["--eval-function-path", "examples.small_hooks:rollout"],
        ["--rollout-function-path", "slime.rollout.loop.generate_rollout", "--custom-rm-path", "a.b"],
    ],
)
def test_what_is_scored_is_sampled(base: list[str], judge: list[str]) -> None:
    args = parse_args([*base, *judge])
    assert loss_datasets(args) == () and samples_evaluations(args) and not args.debug_train_only


@pytest.mark.parametrize("kind", quick(["folder", "parquet", "zst", "escaped"], "parquet"))
@pytest.mark.parametrize("graded", [True, False])
def test_rows_that_name_their_grader_are_sampled_in_every_format(
    base: list[str], kind: str, graded: bool, tmp_path: Path
) -> None:
    metadata = {"rm_type": "math"} if graded else {"source": "a"}
    row = {"input": [{"role": "user", "content": "1+1"}], "metadata": metadata}
    folder = tmp_path / "rows"
    folder.mkdir()
    path = folder / {"parquet": "a.parquet", "zst": "a.jsonl.zst"}.get(kind, "a.jsonl")
    if kind == "escaped":
        row["metadata"] = json.dumps(metadata)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        line = json.dumps(row).encode() + b"\n"
        path.write_bytes(zstandard.ZstdCompressor().compress(line) if kind == "zst" else line)
    base[base.index("--eval-prompt-data") + 2] = str(folder if kind == "folder" else path)
    args = parse_args(base)
    assert samples_evaluations(args) is graded and bool(loss_datasets(args)) is not graded


def test_a_context_limit_is_no_prompt_limit_of_conversations(base: list[str]) -> None:
    """Their length is not known before they are rendered."""
    args = parse_args([*base, "--rollout-max-context-len", "512"])
    assert args.rollout_max_prompt_len is None and args.eval_max_prompt_len is None


def test_a_loss_without_a_trainer_is_refused(base: list[str]) -> None:
    assert "whose loss the trainer measures" in refused([*base, "--debug-rollout-only"])
