"""A random Qwen3-0.6B-shaped checkpoint with a borrowed tokenizer: speed and memory of the real shape without weights.

python -m benchmarks.random_qwen3 --out assets/qwen3-0.6b-random --tokenizer assets/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def write(out: Path, tokenizer: Path, *, seed: int = 0) -> None:
    """Writes bfloat16 weights of the published shape (28 layers, hidden 1024, 16 heads of 128, 8 KV heads, tied)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=151645,
        bos_token_id=151643,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, out / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    write(options.out, options.tokenizer)
