"""A secret is in no record and no message, whether its setting acts or not."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.observability.run_folder import RunFolder
from slime.settings import parse_args
from slime.settings.all_flags import flag_table
from slime.settings.args import Args
from slime.settings.command_line import explain_args as explain
from slime.settings.command_line import help_text
from slime.settings.flags import url_form
from tests.support.command_line import refused

SECRET = "hunter2-hunter2"

SECRETS = [flag for flag in flag_table().flags if flag.secret]
"""Of slime, its entries and the engines."""


def told_of(args: Args, folder: Path) -> str:
    """All that is written about the settings of a run: its records, and what a script prints."""
    settings = args.to_json_dict()
    run = RunFolder.create(folder, run_id="one", args=settings, without_effect=settings["idle"])
    files = [path.read_text() for path in sorted(run.path.rglob("*.json"))]
    idle = [f"{name} {text}" for name, text in args.idle.items()]
    return "\n".join([*files, *idle, json.dumps(settings), explain(args)])


@pytest.mark.parametrize("flag", SECRETS, ids=lambda flag: f"{flag.owner}.{flag.dest}")
def test_a_secret_is_written_nowhere(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flag: object
) -> None:
    caplog.set_level(logging.DEBUG)
    name = flag.names[0]  # type: ignore[attr-defined]
    is_url = flag.form is url_form  # type: ignore[attr-defined]
    words = [*base, name, f"https://{SECRET}/" if is_url else SECRET]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    try:
        args = parse_args(words)
    except ConfigError as error:  # slime sets it itself
        assert SECRET not in str(error) and "slime sets itself" in str(error)
        return
    assert SECRET not in told_of(args, tmp_path / "told") and SECRET not in caplog.text
    if args.idle and not is_url:
        assert "<hidden>, which needs" in "\n".join(args.idle.values())
        assert SECRET not in refused([*words, "--strict"])


def test_a_secret_without_effect_is_masked(base: list[str]) -> None:
    words = [*base, "--opd-teacher-api-key", SECRET, "--wandb-key", SECRET]
    assert dict(parse_args(words).idle) == {
        "opd_teacher_api_key": "<hidden>, which needs --opd-teacher-url",
        "wandb_key": "<hidden>, which needs --use-wandb",
    }
    message = refused([*words, "--strict"])
    assert SECRET not in message and "opd_teacher_api_key <hidden>" in message


@pytest.mark.parametrize("value", [f"[{SECRET}]", f"{SECRET}-another"])
def test_a_secret_of_a_file_is_in_no_message(base: list[str], tmp_path: Path, value: str) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(f"wandb_key: {value}\n")
    message = refused([*base, "--wandb-key", "short", "--custom-config-path", str(file)])
    assert "wandb_key" in message and SECRET not in message and "short" not in message


def test_a_secret_may_stand_in_a_file(base: list[str], tmp_path: Path) -> None:
    """Law: nobody has to put a secret on a command line, where `ps` shows it to the whole host."""
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    args = parse_args([*base, "--router-api-key", f"@{file}", "--use-wandb", f"--wandb-key=@{file}"])
    assert args.router["api_key"] == args.wandb_key == SECRET
    assert f"@{file}" in args.command, "another start reads it again"
    assert "cannot be read" in refused([*base, "--router-api-key", f"@{tmp_path / 'none'}"])
    file.write_text("\n")
    assert "an empty file" in refused([*base, "--router-api-key", f"@{file}"])


def test_help_says_so_of_every_secret() -> None:
    for topic in ("slime", "sglang", "router"):
        shown = help_text(topic)
        expected = sum(flag.owner == topic and not flag.internal for flag in SECRETS)
        assert expected and " ".join(shown.split()).count("Use @FILE to read the value from a file") >= expected, topic
