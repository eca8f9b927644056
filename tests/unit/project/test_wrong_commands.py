"""Law: a wrong command is answered in one sentence that says what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.cli.main import COMMANDS, main
from slime.settings.all_flags import flag_table

CASES = {
    "": "slime: the command is missing; slime --help lists the commands, and slime train --help the flags of a run",
    "foo": "slime: there is no command foo; slime --help lists the commands",
    "trian": "slime: there is no command trian; did you mean slime train? slime --help lists the commands",
    "train.py": "slime: there is no command train.py; did you mean slime train? slime --help lists the commands",
    "train_async": "slime: there is no command train_async; did you mean slime train-async?",
    "help train": "slime: there is no command help; write slime train --help",
    "--lr 3": "slime: --lr comes before a command; write slime train --lr 3",
    "--step 3": "slime: --step comes before a command; write slime samples --step 3",
    "--foo": "slime: unknown flag --foo; write the command first: slime --help lists the commands",
    "report": "slime report: RUN is missing; write slime report RUN; slime report --help shows all arguments",
    "convert x": "slime convert: OUT is missing; write slime convert IN OUT",
    "weights-agent --engine x": "slime weights-agent: --disk-dir, --local-dir are missing; write slime weights-agent "
    "--engine URL --disk-dir DIR --local-dir DIR",
    "report a b": "slime report: 'b' is one argument too many",
    "report a --lr 3": "slime report: unknown flag --lr; it is a flag of slime train",
    "report a --best": "slime report: unknown flag --best; it is a flag of slime samples",
    "doctor --devise cpu": "slime doctor: unknown flag --devise; did you mean --device?",
    "samples a --step x": "slime samples: --step is 'x', but must be a number",
    "samples a --step": "slime samples: --step has no value; write --step VALUE",
    "convert a b --to bf61": "slime convert: --to is 'bf61'; did you mean bf16? It must be one of bf16, fp16, fp32",
    "serve --prt 3": "slime serve: unknown flag --prt; did you mean --port?",
    "serve --best": "slime serve: unknown flag --best; it is a flag of slime samples; drop it",
    "train --trust-pickle": "slime train: unknown flag --trust-pickle; it is a flag of slime convert; drop it",
    "train --hlp": "slime train: unknown flag --hlp; did you mean --help?",
    "samples a --step 1 --step 2": "slime samples: --step: it has two values, 1 and 2; keep one",
}


@pytest.mark.parametrize("words", CASES)
def test_a_wrong_command_has_one_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(CASES[words]) and err.count("\n") == 1, err


@pytest.mark.parametrize("words", ["--help", "-h", "help"])
def test_the_list_of_commands_has_all(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: slime ") and all(f"\n    {command.name}" in out for command in COMMANDS)


def test_the_version_needs_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("slime 0.")


@pytest.mark.parametrize("command", [c.name for c in COMMANDS if c.words != "all"])
def test_the_usage_of_a_command_names_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert not end.value.code and capsys.readouterr().out.startswith(f"usage: slime {command} ")


def test_a_misspelled_flag_of_the_loop_is_left_to_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop lists all mistakes at once, and knows the flags of users' entries."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # otherwise the command adds this folder
    with pytest.raises(SystemExit):
        main(["train", "--lrr", "3", "--rollout-batch-sise", "4"])
    said = capsys.readouterr().err
    assert "did you mean --lr?" in said and "did you mean --rollout-batch-size?" in said
    assert "--lr" in flag_table().by_name
