"""Law: settings that probably train something else than the user believes are said at the start, others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.launch_run import start_warnings
from slime.core.errors import ConfigError
from slime.settings.command_line import explain_args
from slime.settings.rules import likely_mistakes
from tests.support.rollout import rollout_args


def said(tmp_path: Path, *flags: str) -> str:
    return "\n".join(likely_mistakes(rollout_args(tmp_path, *flags)))


@pytest.mark.parametrize(
    ("flags", "meant", "text"),
    [
        (["--lr", "0"], ["--lr", "1e-6"], "lr is 0, so the weights never change"),
        (["--lr", "0"], ["--lr", "0", "--debug-rollout-only"], "lr is 0"),
        (["--lr-warmup-iters", "10"], ["--lr-warmup-iters", "9"], "is above the 9 optimizer steps of the run"),
        (["--lora-rank", "4"], ["--lora-rank", "4", "--lr", "1e-4"], "lr 1e-06 is a learning rate for full"),
        (["--use-kl-loss"], ["--use-kl-loss", "--kl-loss-coef", "0"], "only logs the KL to the reference"),
        (["--use-kl-loss"], ["--use-kl-loss", "--kl-loss-coef", "0.1"], "only logs the KL to the reference"),
        (
            ["--num-rollout", "50", "--save", "s"],
            ["--num-rollout", "50", "--save", "s", "--save-interval", "50"],
            "saves only after the last of 50 steps",
        ),
        (["--num-rollout", "50", "--save", "s"], ["--save", "s"], "saves only after the last"),
    ],
)
def test_a_likely_mistake_is_said_unless_it_is_meant(
    tmp_path: Path, flags: list[str], meant: list[str], text: str
) -> None:
    assert text in said(tmp_path, *flags)
    assert text not in said(tmp_path, *meant)


def test_a_run_without_mistakes_is_told_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) == ""


def test_a_grader_that_never_grades_is_said(tmp_path: Path) -> None:
    own = "examples.brief_reward:reward"
    assert f"--rm-type random grades nothing, because --custom-rm-path {own}" in said(tmp_path, "--custom-rm-path", own)


@pytest.mark.parametrize(
    ("trained", "evaluated", "overlap"),
    [
        ("", "", True),
        ("@[:-5]", "@[-5:]", False),
        ("@[0:30]", "@[30:40]", False),
        ("@[0:30]", "@[29:40]", True),
        ("@[0:30]", "", True),
    ],
)
def test_evaluation_on_trained_rows_is_said(tmp_path: Path, trained: str, evaluated: str, overlap: bool) -> None:
    data = tmp_path / "prompts.jsonl"
    flags = ["--prompt-data", f"{data}{trained}", "--eval-prompt-data", "held", f"{data}{evaluated}"]
    told = said(tmp_path, *flags, "--eval-interval", "1")
    assert (f"evaluation data held reads rows of {data} that --prompt-data trains on" in told) is overlap


def _prompts(tmp_path: Path, *prompts: Any) -> list[str]:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"input": prompt, "label": "1"}) + "\n" for prompt in prompts))
    return ["--prompt-data", str(file), "--save", str(tmp_path / "save")]


def test_an_instruct_model_without_its_template_is_said(tmp_path: Path) -> None:
    """The tokenizer of the stub has a chat template."""
    flags = _prompts(tmp_path, *["What is 1+1?"] * 4)
    (told,) = start_warnings(rollout_args(tmp_path, *flags))
    assert "has plain text prompts, and the chat template" in told and "--no-apply-chat-template if intended" in told
    for meant in ("--apply-chat-template", "--no-apply-chat-template"):
        assert start_warnings(rollout_args(tmp_path, *flags, meant)) == []


def test_rendered_prompts_are_not_rendered_again_unsaid(tmp_path: Path) -> None:
    flags = _prompts(tmp_path, *["<bos><|user|>1+1?<eos><|assistant|>"] * 4)
    assert start_warnings(rollout_args(tmp_path, *flags)) == []
    (told,) = start_warnings(rollout_args(tmp_path, *flags, "--apply-chat-template"))
    assert "already rendered (they contain <bos>)" in told and "drop --apply-chat-template" in told


def test_a_step_that_repeats_its_prompts_is_said(tmp_path: Path) -> None:
    flags = [*_prompts(tmp_path, *["a"] * 3), "--no-apply-chat-template"]
    (told,) = start_warnings(rollout_args(tmp_path, *flags))
    assert "has 3 rows, but a step takes rollout_batch_size 4 prompts" in told
    assert start_warnings(rollout_args(tmp_path, *flags, "--rollout-batch-size", "3")) == []


def test_explain_shows_likely_mistakes_first(tmp_path: Path) -> None:
    assert explain_args(rollout_args(tmp_path, "--lr", "0")).startswith("Probably not what you want:\n  lr is 0")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rollout-top-k", "1"], "rollout_top_k 1 does not work with training"),
        (["--rollout-stop", "END", ""], "--rollout-stop contains an empty string"),
    ],
)
def test_sampling_that_leaves_nothing_to_train_is_refused(tmp_path: Path, flags: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rollout_args(tmp_path, *flags)
