"""A chat template for a model that has none, and names on the hub where a folder is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.core.errors import ConfigError
from slime.core.files import download_hint
from slime.data.dataset import PromptDataset
from slime.rollout.factories import load_tokenizer
from slime.settings import parse_args
from slime.training.state.hf_files import CHAT_TEMPLATE_FILE
from tests.support.command_line import complete, refused
from tests.support.tiny import write_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def swapped(argv: list[str], flag: str, value: str) -> list[str]:
    """The command line with another value of a flag."""
    at = argv.index(flag)
    return [*argv[: at + 1], value, *argv[at + 2 :]]


def base_model(folder: Path) -> Path:
    """A tokenizer without a chat template."""
    write_tokenizer(folder)
    (folder / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_template_from_a_file_renders_prompts_and_reaches_the_engines(tmp_path: Path) -> None:
    base = complete(tmp_path)
    base_model(tmp_path / "model")
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    without = parse_args([*base, "--apply-chat-template"])
    with pytest.raises(ConfigError, match="--chat-template FILE"):
        PromptDataset.load(str(without.prompt_data), tokenizer=load_tokenizer(without), apply_chat_template=True)
    args = parse_args([*base, "--apply-chat-template", "--chat-template", str(file)])
    data = PromptDataset.load(str(args.prompt_data), tokenizer=load_tokenizer(args), apply_chat_template=True)
    assert data[0].prompt == "[user]1+1>"
    assert args.sglang["chat_template"] == str(file)


def test_an_export_with_the_template_is_read_with_it(tmp_path: Path) -> None:
    """Whatever the tokenizer's own configuration says."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / CHAT_TEMPLATE_FILE).write_text(TEMPLATE)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE


def test_a_template_that_is_no_template_is_refused(tmp_path: Path) -> None:
    base = complete(tmp_path)
    (tmp_path / "template.txt").write_text(TEMPLATE)
    (tmp_path / "empty.jinja").write_text("")
    for name, says in {
        "template.txt": "does not end in .jinja",
        "empty.jinja": "is missing or empty",
        "no.jinja": "is missing or empty",
    }.items():
        assert says in refused([*base, "--chat-template", str(tmp_path / name)])


def test_a_name_on_the_hub_is_answered_with_the_command_that_downloads_it(tmp_path: Path) -> None:
    base = complete(tmp_path)
    message = refused(swapped(base, "--hf-checkpoint", "Qwen/Qwen3-0.6B"))
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then use Qwen3-0.6B" in message
    message = refused(swapped(base, "--prompt-data", "openai/gsm8k"))
    assert "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k" in message
    assert "hf download a/b --local-dir b" in refused(
        [*base, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", "a/b"]
    )


def test_a_path_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/qwen", "data/train.jsonl", "a/b/c", "/a/b", "./a", "qwen"):
        assert download_hint(path) == ""
