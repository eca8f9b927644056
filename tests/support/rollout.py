"""Settings and a manager over a fake engine, for tests of the rollout."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slime.agent.chat import ModelChats
from slime.core.text import NO_KEYS, EngineKeys
from slime.rollout.manager import RolloutManager
from slime.settings import parse_args
from tests.support.command_line import last_of_each
from tests.support.fake_engine import FakeEngine, serve
from tests.support.tiny import VOCAB_SIZE, write_tokenizer


def write_prompts(path: Path, num_rows: int) -> Path:
    """`i+i=` with its sum as label."""
    rows = [{"input": f"{i}+{i}=", "label": str(2 * i)} for i in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SAMPLED = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "max_new_tokens": 7}
READ = {"stop": ["x", "yz"], "stop_token_ids": [77, 78], "skip_special_tokens": True}
SEED = 5
SAMPLING_FLAGS = (
    *("--rollout-temperature", "0.9", "--rollout-top-p", "0.8", "--rollout-top-k", "40"),
    *("--rollout-max-response-len", "7", "--rollout-stop", "x", "yz", "--rollout-stop-token-ids", "77", "78"),
    *("--rollout-skip-special-tokens", "--rollout-seed", str(SEED), "--sglang-enable-deterministic-inference"),
)
"""All that says how a rollout samples: engines get `SAMPLED`, `READ`, and `SEED` plus the index of an execution."""


def write_checkpoint_stub(directory: Path) -> Path:
    """Config and tokenizer of the tiny Qwen3, without weights: enough where no engine loads it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def rollout_args(tmp_path: Path, *flags: str, num_rows: int = 40, synchronous: bool = True) -> Any:
    """Parsed settings: 4 prompts of 2 samples per step, 8 tokens each, a reward that differs within a group."""
    model = tmp_path / "model"
    if not model.exists():
        write_checkpoint_stub(model)
    data = write_prompts(tmp_path / "prompts.jsonl", num_rows)
    base = {
        "--hf-checkpoint": str(model),
        "--prompt-data": str(data),
        "--label-key": "label",
        "--rollout-batch-size": "4",
        "--n-samples-per-prompt": "2",
        "--num-rollout": "9",
        "--rollout-max-response-len": "8",
        "--device": "cpu",
        "--rm-type": "random",
        "--run-dir": str(tmp_path / "run"),
        "--reward-num-workers": "1",
    }
    words = last_of_each([*(part for pair in base.items() for part in pair), *flags])
    return parse_args(words, synchronous=synchronous)


async def with_manager(
    args: Any, engine: FakeEngine, work: Callable[[RolloutManager], Awaitable[Any]], keys: EngineKeys = NO_KEYS
) -> Any:
    """Runs `work` on a manager whose engine is the fake one."""
    async with serve(engine):
        manager = RolloutManager(args, engines=[engine.url], keys=keys, open_chats=ModelChats)
        try:
            return await work(manager)
        finally:
            await manager.close()
