"""The demo's task: small additions from reasoning-gym, in four phrasings, scored by its numeric scorer.

`basic_arithmetic` asks "What is 3 + 4?", "Solve 3 + 4.", "Compute 3 + 4." and "Evaluate: 3 + 4." for terms from 0 to
10. A model of 135M parameters can answer some of these questions from the start, but far from all. Policy gradients
need groups in which some samples are correct and some are wrong.

Invariants
1. No sum of the held-out file occurs in the training file, in any phrasing or order of its terms. Every question occurs
   once in its file.
2. The files depend only on the seed and the version of reasoning-gym.
3. A score is 1.0 or 0.0. The scorer gives partial credit to an answer that contains the correct one ("15" for "5"). So
   entries store the answer as "5.0", which has the same value but is not part of such a wrong answer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.core.errors import DataError

TASK = "basic_arithmetic"
SCORER = "chain_sum"
"""The task whose scorer compares numbers; the scorer of `basic_arithmetic` compares text."""
SETTINGS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "format_style": "natural",
}
NUM_HELD_OUT_PAIRS = 30
"""Unordered pairs of terms that occur only in the held-out file."""
NUM_HELD_OUT = 200
MIN_TRAIN = 96
"""Prompts of one run of the demo, each used once."""
DRAWS = 20_000
"""Number of entries drawn; most of them repeat an earlier entry."""


def draw_entries(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Draws distinct training and held-out entries, each in random order."""
    import reasoning_gym

    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=DRAWS, **SETTINGS):
        found.setdefault(entry["question"], entry)
    entries = [found[question] for question in sorted(found)]
    pairs = sorted({_terms(entry) for entry in entries})
    rng = random.Random(seed)
    kept_back = set(rng.sample(pairs, min(NUM_HELD_OUT_PAIRS, len(pairs))))
    rng.shuffle(entries)
    train = [entry for entry in entries if _terms(entry) not in kept_back]
    held_out = [entry for entry in entries if _terms(entry) in kept_back][:NUM_HELD_OUT]
    if len(held_out) != NUM_HELD_OUT or len(train) < MIN_TRAIN:
        raise DataError(
            f"this version of reasoning-gym has {len(train)} training and {len(held_out)} held-out problems of {TASK}, "
            "too few; install the version that requirements/ pins"
        )
    return train, held_out


def _terms(entry: dict[str, Any]) -> tuple[int, ...]:
    """Returns the terms of the sum, smallest first: 3 + 4 and 4 + 3 are one problem."""
    return tuple(sorted(int(term) for term in entry["metadata"]["expression"].split("+")))


def to_row(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns one row of a dataset file."""
    answer = str(entry["answer"])
    stored = {"question": entry["question"], "answer": f"{answer}.0", "metadata": {"source_dataset": SCORER}}
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "label": answer,
        "metadata": {"rm_type": "reasoning_gym", "reasoning_gym": {"dataset": SCORER, "entry": stored}},
    }


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes one row per line, atomically; returns the number of rows."""
    partial = path.with_name(path.name + ".partial")
    num_rows = 0
    with partial.open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            num_rows += 1
    partial.replace(path)
    return num_rows


def write_task(out: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `eval.jsonl` into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    entries, held_out_entries = draw_entries(seed)
    train, held_out = out / "train.jsonl", out / "eval.jsonl"
    write_jsonl(train, (to_row(e) for e in entries))
    write_jsonl(held_out, (to_row(e) for e in held_out_entries))
    return train, held_out
