"""Fine-tuning as a rollout: conversations become ids and masks without an engine."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import DataError
from slime.data.first_rows import data_problems
from slime.observability.logs import ForDriver
from slime.observability.samples import DROPPED_ROWS
from slime.rollout import sft
from slime.rollout.manager import RolloutManager
from tests.support.rollout import rollout_args
from tests.support.tiny import FORGETFUL_TEMPLATE, write_tokenizer

SFT = ("--rollout-function-path", "slime.rollout.sft.generate_rollout", "--n-samples-per-prompt", "1")


def step(args: Any) -> Any:
    async def work() -> Any:
        manager = RolloutManager(args, engines=None)
        try:
            batch, metrics = await manager.generate(0)
            return batch, metrics, manager.commit(0)
        finally:
            await manager.close()

    return asyncio.run(work())


def test_the_mask_is_the_answer_and_its_end(tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    rows = [
        {"input": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), "--label-key", "label")
    batch, metrics, ledger = step(args.replace(label_key=None))
    assert len(batch.samples) == 4 and ledger["data/trained"] == 4
    for sample in batch.samples:
        assert sample.rollout_log_probs is None and sample.loss_mask.tolist() == [1.0, 1.0]
        assert sample.tokens[-1] == 1 and sample.reward == 0.0
    assert metrics["rollout/trained_tokens"] == 8.0


def test_a_row_of_several_samples_is_one_execution(tmp_path: Path) -> None:
    """Law: batch size, ledger and means count rows, whatever number of samples a template makes of them."""
    turns = [("1+1=", "2"), ("1+1=", "two", "2+1=", "3"), ("1+1=", "two", "2+1=", "three", "3+1=", "4"), ("5", "6")]
    data = tmp_path / "talks.jsonl"
    talks = [[{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)] for texts in turns]
    data.write_text("".join(json.dumps({"input": talk}) + "\n" for talk in talks))
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), "--rollout-batch-size", "4").replace(label_key=None)
    write_tokenizer(Path(args.hf_checkpoint), chat_template=FORGETFUL_TEMPLATE)
    batch, metrics, ledger = step(args)
    assert batch.num_executions == 4 == ledger["data/trained"]
    by_row = [[s for s in batch.samples if s.group_index == row] for row in range(4)]
    assert sorted(map(len, by_row)) == [1, 1, 2, 3] and len({s.index for s in batch.samples}) == 4
    assert metrics["rollout/trained_tokens"] == sum(len(t) + 1 for texts in turns for t in texts[1::2])
    assert metrics["rollout/total_len/mean"] == sum(len(s.tokens) for s in batch.samples) / 4


def test_what_a_template_has_no_place_for_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = {"role": "assistant", "content": "2", "reasoning_content": "one and one"}
    data = tmp_path / "thoughts.jsonl"
    rows = [{"input": [{"role": "user", "content": "1+1="}, answer]}, {"input": [{"role": "user", "content": "1"}]}]
    rows.append({"input": [{"role": "user", "content": "2+1="}, {"role": "assistant", "content": "3"}]})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), "--rollout-batch-size", "2").replace(label_key=None)
    sft._warn.cache_clear()
    for _ in range(2):
        _, metrics, _ = step(args)
        assert metrics["rollout/num_rows_without_reasoning"] == 1.0 == metrics["rollout/num_filtered_groups"]
    logged = [r.message for r in caplog.records if "omits reasoning" in r.message]
    assert len(logged) == 1 and "rollout/num_rows_without_reasoning" in logged[0]


def test_a_turn_ends_with_a_token_of_the_generation_config(tmp_path: Path) -> None:
    """Not with the tokenizer's own where the template writes another one."""
    args = rollout_args(tmp_path, *SFT, "--label-key", "label")
    folder = shutil.copytree(args.hf_checkpoint, tmp_path / "other")
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", "<unk>\n"))
    generation = folder / "generation_config.json"
    with pytest.raises(DataError, match="writes no stop token"):
        step(args.replace(hf_checkpoint=str(folder)))
    generation.write_text(json.dumps({"eos_token_id": [1, 3]}))
    batch, _, _ = step(args.replace(hf_checkpoint=str(folder)))
    assert {int(sample.tokens[-1]) for sample in batch.samples} == {3}


def test_text_prompts_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="requires messages, or a text and its answer"):
        step(rollout_args(tmp_path, *SFT).replace(label_key=None))
    with pytest.raises(DataError, match="remove --apply-chat-template"):
        step(rollout_args(tmp_path, *SFT, "--apply-chat-template"))


def test_a_text_and_its_answer_are_a_conversation_of_one_turn(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": f"{i}+{i}="}, {"role": "assistant", "content": str(2 * i)}] for i in range(4)]
    data = tmp_path / "turns.jsonl"
    data.write_text("".join(json.dumps({"input": one, "label": ""}) + "\n" for one in turns))
    as_text, _, _ = step(rollout_args(tmp_path, *SFT, "--rollout-batch-size", "4"))
    as_turns, _, _ = step(rollout_args(tmp_path, *SFT, "--rollout-batch-size", "4", "--prompt-data", str(data)))
    assert [s.tokens.tolist() for s in as_text.samples] == [s.tokens.tolist() for s in as_turns.samples]
    assert [s.loss_mask.tolist() for s in as_text.samples] == [s.loss_mask.tolist() for s in as_turns.samples]


def test_conversations_beyond_the_limit_are_left_out_whole_and_counted(tmp_path: Path) -> None:
    """Law: of what is trained nothing is longer than --rollout-max-context-len, and nothing is cut; the same row is
    trained when the limit is its own length. A question alone is what --rollout-max-prompt-len counts."""
    data = tmp_path / "rows.jsonl"
    rows = [{"input": "1+1=", "label": "2" * n} for n in (1, 30, 1, 1)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), "--rollout-batch-size", "4")
    whole, _, _ = step(args)
    lengths = sorted(len(sample.tokens) for sample in whole.samples)
    assert lengths[-1] == lengths[0] + 29
    for most, left in ((lengths[-1], 0), (lengths[-1] - 1, 1)):
        batch, metrics, ledger = step(args.replace(rollout_max_context_len=most))
        assert len(batch.samples) == 4 and {len(s.tokens) for s in batch.samples} <= set(lengths)
        assert max(len(s.tokens) for s in batch.samples) <= most
        assert metrics["rollout/num_filtered_groups"] == left == ledger.get("data/filtered/too_long_conversation", 0)
    with pytest.raises(DataError, match=rf"has {lengths[0]} tokens, more than {lengths[0] - 1} \(rollout_max_context"):
        step(args.replace(rollout_max_context_len=lengths[0] - 1))
    few = [{"input": "1+1=" + "9" * n, "label": "2"} for n in (0, 30, 0, 0, 0)]
    data.write_text("".join(json.dumps(row) + "\n" for row in few))
    shorter, _, _ = step(args.replace(rollout_max_prompt_len=4))
    assert {len(sample.tokens) for sample in shorter.samples} == {lengths[0]}


def test_messages_whose_length_is_not_known_yet_are_refused_with_a_prompt_limit(tmp_path: Path) -> None:
    data = tmp_path / "sft.jsonl"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    data.write_text(json.dumps({"input": turns}) + "\n")
    flags = (*SFT, "--prompt-data", str(data), "--loss-type", "sft_loss")
    assert data_problems(rollout_args(tmp_path, *flags).replace(label_key=None)) == []
    limited = rollout_args(tmp_path, *flags, "--rollout-max-prompt-len", "99").replace(label_key=None)
    (problem,) = data_problems(limited)
    assert "rollout_max_prompt_len 99 cannot be applied to them" in problem and "drop that limit" in problem


def held_out(args: Any) -> Any:
    async def work() -> Any:
        manager = RolloutManager(args, engines=None)
        try:
            return await manager.held_out()
        finally:
            await manager.close()

    return asyncio.run(work())


def test_held_out_conversations_get_the_ids_and_masks_of_training(tmp_path: Path) -> None:
    """Rows that cannot be masked are left out and counted."""
    rows = [
        {"input": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]}
        for i in range(4)
    ]
    bad = {"input": [{"role": "user", "content": "1+1="}]}
    data, more = tmp_path / "sft.jsonl", tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more.write_text("".join(json.dumps(row) + "\n" for row in [bad, *rows, bad]))
    evaluation = ("--eval-prompt-data", "held", str(more), "--eval-interval", "1", "--loss-type", "sft_loss")
    args = rollout_args(tmp_path, *SFT, "--prompt-data", str(data), *evaluation)
    args = args.replace(label_key=None, eval_label_key=None, rm_type=None)
    with pytest.raises(
        DataError, match=r"2 of the 6 rows of held-out held .*at most 5 %.*First: held\.jsonl:1: none of"
    ):
        held_out(args)
    args = args.replace(max_dropped_row_fraction=0.4)
    (one,) = held_out(args)
    trained, _, _ = step(args)
    assert (one.name, one.num_unusable) == ("held", 2)
    for a, b in zip(one.batch.samples, trained.samples, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.loss_mask.tolist() == b.loss_mask.tolist()
    long = {"input": [rows[0]["input"][0], {"role": "assistant", "content": "1" * 50}]}
    more.write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    limited = args.replace(eval_max_context_len=40)
    assert [one.num_unusable for one in (*held_out(args), *held_out(limited))] == [0, 1]
    more.write_text(json.dumps(bad) + "\n")
    with pytest.raises(DataError, match="none of the 1 conversations in held-out held is usable"):
        held_out(args)


def talk(i: int, *, is_bad: bool = False) -> dict[str, Any]:
    """A bad row has a tool message, whose text the template of `forgetful_of_tools` omits."""
    asked, answer = {"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}
    return {"input": [asked, {"role": "tool", "content": "a result"}, answer] if is_bad else [asked, answer]}


def forgetful_of_tools(tmp_path: Path, rows: list[dict[str, Any]], *flags: str) -> Any:
    data = tmp_path / "sft.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = rollout_args(tmp_path, *SFT, "--loss-type", "sft_loss", "--prompt-data", str(data), *flags)
    turns = (
        "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}{% endif %}"
    )
    turns += "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    write_tokenizer(Path(args.hf_checkpoint), chat_template=turns)
    return args.replace(label_key=None)


def test_a_run_that_would_drop_a_third_of_its_rows_does_not_start(tmp_path: Path) -> None:
    """The error says how many, which ones, why, and which flag allows them."""
    args = forgetful_of_tools(tmp_path, [talk(i, is_bad=i % 3 == 1) for i in range(60)])
    with pytest.raises(DataError) as raised:
        RolloutManager(args, engines=None)
    text = str(raised.value)
    assert "20 of the 60 rows of the training data cannot be used for fine-tuning, but at most 5 %" in text
    assert "First: sft.jsonl:2: the chat template omits message 1 (role tool)" in text
    assert "Also: sft.jsonl:5, sft.jsonl:8" in text and "--max-dropped-row-fraction" in text
    recorded = [json.loads(line) for line in (Path(args.run_dir) / DROPPED_ROWS).read_text().splitlines()]
    assert [row["line"] for row in recorded] == list(range(2, 61, 3))
    _, metrics, ledger = step(args.replace(max_dropped_row_fraction=0.4))
    assert metrics["rollout/num_dropped_rows"] == ledger["data/filtered/unusable_conversation"] > 0


def test_rows_that_the_start_did_not_see_end_the_run_when_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share counts all rows since the start: the first step of four good rows and one bad one passes."""
    monkeypatch.setattr(sft, "CHECK_S", 0.0)
    args = forgetful_of_tools(tmp_path, [talk(i, is_bad=i % 3 == 1) for i in range(60)])
    handler = ForDriver()
    logging.getLogger().addHandler(handler)

    async def work() -> list[float]:
        manager = RolloutManager(args, engines=None)
        shares = []
        try:
            for number in range(9):
                _, metrics = await manager.generate(number)
                manager.commit(number)
                shares.append(metrics["rollout/dropped_row_fraction"])
                told = handler.take()
                assert [text[:27] for text in told[-1:]] == (["2 of the first 6 rows canno"] if number == 0 else [])
        except DataError as error:
            assert "rows seen so far (60 in the dataset) cannot be used" in str(error) and "sft.jsonl:" in str(error)
        finally:
            await manager.close()
            logging.getLogger().removeHandler(handler)
        return shares

    shares = asyncio.run(work())
    assert 1 <= len(shares) < 4 and shares[-1] > 0.2


def test_an_empty_answer_is_not_trained(tmp_path: Path) -> None:
    rows = [talk(i) for i in range(30)]
    rows[4]["input"][1]["content"] = " "
    handler = ForDriver()
    logging.getLogger().addHandler(handler)
    RolloutManager(forgetful_of_tools(tmp_path, rows), engines=None)
    logging.getLogger().removeHandler(handler)
    (told,) = handler.take()
    assert (
        "1 of the 30 rows of the training data" in told and "sft.jsonl:5: message 1 (role assistant) is empty" in told
    )
