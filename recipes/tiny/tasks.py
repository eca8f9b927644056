"""Two toy tasks for a tiny model in which every character is a token.

*Digits* starts from random weights. The prompt is a short random word, and the reward is the fraction of the response's
characters that are digits. Each character counts, so a random model improves within ten GRPO steps.

*Sums* needs a cold start: `sums_sft.jsonl` teaches "3+4=" -> "7" by supervised training, and `sums_rl.jsonl` has the
same sums for reinforcement learning with exact match.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.core.sample import Sample

DIGITS_FILE, SFT_FILE, RL_FILE = "digits.jsonl", "sums_sft.jsonl", "sums_rl.jsonl"


def digit_fraction(args: Any, sample: Sample, **_: Any) -> float:
    """`--custom-rm-path`: the fraction of the response's characters that are digits; 0.0 for an empty response."""
    text = sample.response
    return sum(c in string.digits for c in text) / len(text) if text else 0.0


def digits_rows(num_rows: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Returns prompts for the digits task: short random words."""
    rng = random.Random(seed)
    words = ("".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(num_rows))
    return [{"prompt": [{"role": "user", "content": word}], "label": ""} for word in words]


def sums(max_term: int = 9) -> list[tuple[str, str]]:
    """Returns the question and answer of every sum of two terms up to `max_term`."""
    terms = range(max_term + 1)
    return [(f"{a}+{b}=", str(a + b)) for a in terms for b in terms]


def sums_sft_rows(num_rows: int, *, seed: int = 0, max_term: int = 4) -> list[dict[str, Any]]:
    """Returns conversations for `--loss-type sft_loss`; all sums occur about equally often."""
    pairs = _repeat(sums(max_term), num_rows, seed)
    turns = ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs)
    return [{"messages": messages} for messages in turns]


def sums_rl_rows(num_rows: int, *, seed: int = 0, max_term: int = 4) -> list[dict[str, Any]]:
    """Returns prompts with labels, graded by exact match."""
    pairs = _repeat(sums(max_term), num_rows, seed)
    return [
        {"prompt": [{"role": "user", "content": q}], "label": a, "metadata": {"rm_type": "exact_match"}}
        for q, a in pairs
    ]


def _repeat(pairs: list[tuple[str, str]], num_rows: int, seed: int) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    out: list[tuple[str, str]] = []
    while len(out) < num_rows:
        out += rng.sample(pairs, len(pairs))
    return out[:num_rows]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Writes one row per line; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_all(out: Path, *, num_rows: int = 512, seed: int = 0) -> None:
    """Writes the three files into `out`."""
    write_rows(out / DIGITS_FILE, digits_rows(num_rows, seed=seed))
    write_rows(out / SFT_FILE, sums_sft_rows(num_rows, seed=seed))
    write_rows(out / RL_FILE, sums_rl_rows(num_rows, seed=seed + 1))


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m recipes.tiny.tasks --out assets/tiny`."""
    parser = argparse.ArgumentParser(description="Writes the toy tasks.")
    parser.add_argument("--out", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--num-rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    write_all(options.out, num_rows=options.num_rows, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
