"""The demo's task: small sums from reasoning-gym, scored by reasoning-gym.

`chain_sum` additions of two terms up to `MAX_TERM`. A model of 135M parameters
answers a good part of them from the start and far from all, which is what policy gradients need: groups in which some
samples are right and some are wrong.

Invariants
1. No question of the held-out file occurs in the training file; every question occurs once in its file.
2. The files depend on the seed and the version of reasoning-gym alone.
3. A score is 1.0 or 0.0. reasoning-gym gives part of the credit to an answer that merely contains the right one
   ("15" for "5"); entries carry the answer as "5.0", equal in value, which no such answer contains.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.core.errors import DataError

TASK = "chain_sum"
SETTINGS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
MAX_TERM = 20
NUM_HELD_OUT = 200
MIN_TRAIN = 96
"""Prompts of one run of the demo: none is asked twice."""
DRAWS = 60_000
"""Entries drawn; most are too hard or repeat an earlier one."""


def draw_entries(seed: int) -> list[dict[str, Any]]:
    """Distinct fitting entries in random order."""
    import reasoning_gym

    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=DRAWS, **SETTINGS):
        terms = [int(t) for t in re.findall(r"\d+", entry["metadata"]["expression"])]
        if max(terms) <= MAX_TERM and "-" not in entry["metadata"]["expression"]:
            found.setdefault(entry["question"], entry)
    entries = [found[question] for question in sorted(found)]
    random.Random(seed).shuffle(entries)
    if len(entries) < NUM_HELD_OUT + MIN_TRAIN:
        raise DataError(
            f"got {len(entries)} distinct problems of {TASK}, because this version of reasoning-gym draws others; "
            "do: raise MAX_TERM"
        )
    return entries


def to_row(entry: dict[str, Any]) -> dict[str, Any]:
    """One line of a dataset file."""
    answer = str(entry["answer"])
    stored = {"question": entry["question"], "answer": f"{answer}.0", "metadata": {"source_dataset": TASK}}
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "label": answer,
        "metadata": {"rm_type": "reasoning_gym", "reasoning_gym": {"dataset": TASK, "entry": stored}},
    }


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Writes one row per line, whole or not at all; returns how many."""
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
    entries = draw_entries(seed)
    train, held_out = out / "train.jsonl", out / "eval.jsonl"
    write_jsonl(train, (to_row(e) for e in entries[NUM_HELD_OUT:]))
    write_jsonl(held_out, (to_row(e) for e in entries[:NUM_HELD_OUT]))
    return train, held_out
