"""The work that every system of `benchmarks.peers.league` does: the prompts, the reward, and slime's hooks for both.

All prompts have the same number of tokens, and every response has exactly the given number, so that the systems train
the same tokens, and none of them pads.

python -m benchmarks.peers.workload --model DIR --out FOLDER --prompts 256      writes prompts.jsonl and workload.json
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

WORDS = 96


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Returns 1.0 if the text has an even number of characters, else 0.0: cheap, and different within a group. The
    name and the arguments are verl's.
    """
    return float(len(solution_str) % 2 == 0)


def slime_reward(args: Any, sample: Any, **_: Any) -> float:
    """The same reward as a grader of slime."""
    return compute_score("", sample.response, "")


async def slime_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """slime's own generation, which goes on to the last allowed token, whatever is sampled."""
    from slime.rollout.generate import generate

    return await generate(args, sample, {**sampling_params, "ignore_eos": True})


def words_of(tokenizer: Any) -> list[str]:
    """Returns words that are one token each if a space precedes them."""
    words = (token[1:] for token in sorted(tokenizer.get_vocab()) if token.startswith("Ġ"))
    plain = [word for word in words if word.isascii() and word.isalpha() and word.islower() and len(word) > 2]
    return [word for word in plain[:4000] if len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1]


def rows_of(tokenizer: Any, num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows with all the keys that the systems read."""
    words, choice = words_of(tokenizer), random.Random(seed)
    texts = ["Sort: " + " ".join(choice.choices(words, k=WORDS)) for _ in range(num_prompts)]
    return [
        {
            "prompt": [{"role": "user", "content": text}],
            "label": "",
            "data_source": "league",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(texts)
    ]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=256)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = rows_of(tokenizer, options.prompts, seed=0)
    rendered = (tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows)
    lengths = {len(tokenizer.encode(text, add_special_tokens=False)) for text in rendered}
    if len(lengths) != 1:
        raise SystemExit(f"The prompts have {sorted(lengths)} tokens; the words of this tokenizer do not add up.")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (options.out / "workload.json").write_text(json.dumps({"prompt_tokens": lengths.pop(), "prompts": len(rows)}))


if __name__ == "__main__":
    main()
