"""Law: what is read from a checkpoint's files is what transformers makes of them, or it is said not to be known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime.core.errors import DataError
from slime.data.checkpoint_template import CheckpointTemplate
from tests.support.tiny import CHAT_TEMPLATE

TALK = [
    {"role": "system", "content": "be <b>brief</b>"},
    {"role": "user", "content": "what is 1+1?"},
    {"role": "assistant", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a & b", "parameters": {}}}]
TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[0].content }}",
    "whitespace": "  {%- for m in messages %}\n    {{ m.content }}\n  {% endfor %}\n{% if tools %}go{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "argument": "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ messages | length }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def with_template(model: Path, folder: Path, source: str | None) -> Path:
    """A copy of the checkpoint with another template, or without one."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    if source is not None:
        (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_rendered_as_transformers_renders_it(name: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_qwen3, tmp_path / "model", TEMPLATES[name])
    kwargs = {"enable_thinking": False}
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, tools=TOOLS, tokenize=False, add_generation_prompt=True, **kwargs
    )
    assert CheckpointTemplate.of(folder).render(TALK, tools=TOOLS, kwargs=kwargs) == expected


def test_tokens_are_counted_as_transformers_counts_them(tiny_qwen3: Path) -> None:
    texts = ["", "1+1", "<|user|>a<eos>", "é"]
    real = AutoTokenizer.from_pretrained(tiny_qwen3)
    counts = CheckpointTemplate.of(tiny_qwen3).count_tokens(texts)
    assert counts == [len(ids) for ids in real(texts, add_special_tokens=False)["input_ids"]]


def test_a_refusal_of_the_template_is_told(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_qwen3, tmp_path / "model", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        CheckpointTemplate.of(folder).render(TALK, tools=None, kwargs={})


@pytest.mark.parametrize("source", ["{% unknown %}", "{{ messages[0]['content'].encode_as_nothing() }}{{ 1 / 0 }}"])
def test_what_only_the_tokenizer_can_tell_is_not_known(source: str, tiny_qwen3: Path, tmp_path: Path) -> None:
    """A tag of another version, and an error that is none of a template."""
    template = CheckpointTemplate.of(with_template(tiny_qwen3, tmp_path / "model", source))
    try:
        assert template.render(TALK, tools=None, kwargs={}) is None
    except DataError as error:
        assert "has no attribute" in str(error)


@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({}, False),
        ({"chat_template": "{{ 1 }}"}, True),
        ({"chat_template": [{"name": "default", "template": "{{ 1 }}"}]}, True),
        ({"chat_template": [{"name": "tool_use", "template": "{{ 1 }}"}]}, True),
    ],
)
def test_a_template_is_found_wherever_a_checkpoint_may_hold_it(
    config: dict[str, object], has: bool, tiny_qwen3: Path, tmp_path: Path
) -> None:
    folder = with_template(tiny_qwen3, tmp_path / "model", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert CheckpointTemplate.of(folder).has_template is has


def test_a_damaged_file_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder = with_template(tiny_qwen3, tmp_path / "model", None)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json.*download"):
        CheckpointTemplate.of(folder)
