"""The games: reasoning-gym questions whose answer is a small whole number, asked again with a hint after a miss.

Invariants
1. No question of the held-out file is in the training file; every question occurs once.
2. In a balanced game every answer is equally frequent in either file. Who ignores question and hints then solves at
   most `turns / number of answers`.
3. The files depend on the game, the seed and the version of reasoning-gym alone.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.core.errors import DataError

from ..demo.task import write_jsonl

RULE = "Guess the number."
DRAWS = 20_000
"""Entries drawn; most repeat an earlier one."""


@dataclass(frozen=True)
class Game:
    """What is asked, and how often it may be tried."""

    dataset: str
    """Of reasoning-gym."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of that dataset."""
    example: tuple[str, ...] = ()
    """A game that is shown before: question, try, hint, try, ..., the right answer. Nothing of it is trained."""
    answers: tuple[int, ...] = ()
    """Equally frequent ones; none: as they are drawn."""
    turns: int = 3
    num_held_out: int = 140


BITS = {"min_n": 1, "max_n": 4095}
BITS_QUESTION = "How many 1 bits are there in the binary representation of the number 5000?"
BITS_EXAMPLE = (BITS_QUESTION, "6", "Less than 6.", "3", "More than 3.", "5")
SUM = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "format_style": "natural",
}
PRIMES_EXAMPLE = (
    "Count how many prime numbers there are between 80 and 100 (inclusive) ?",
    "2",
    "More than 2.",
    "5",
    "Less than 5.",
    "3",
)
GAMES = {
    "bits": Game("count_bits", BITS, BITS_EXAMPLE, tuple(range(2, 9))),
    "bits4": Game("count_bits", BITS, BITS_EXAMPLE, tuple(range(2, 9)), turns=4),
    "primes": Game("count_primes", {"max_n": 60}, PRIMES_EXAMPLE, tuple(range(0, 10))),
    "sums": Game("basic_arithmetic", SUM, ("What is 20 + 5?", "27", "Less than 27.", "24", "More than 24.", "25")),
}
MIN_TRAIN = 96
"""Questions to train on."""


def draw(game: Game, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Distinct entries to train on and held-out ones, each in random order. Raises `DataError` if there are too few."""
    import reasoning_gym

    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(game.dataset, seed=seed, size=DRAWS, **game.settings):
        found.setdefault(entry["question"], entry)
    entries = [found[question] for question in sorted(found)]
    random.Random(seed).shuffle(entries)
    if not game.answers:
        return _enough(game, entries[game.num_held_out :], entries[: game.num_held_out])
    of = {answer: [e for e in entries if e["answer"] == str(answer)] for answer in game.answers}
    each, back = min(map(len, of.values())), game.num_held_out // len(game.answers)
    train = [one[i] for i in range(back, each) for one in of.values()]
    held_out = [one[i] for i in range(back) for one in of.values()]
    random.Random(seed).shuffle(train)
    return _enough(game, train, held_out)


def _enough(game: Game, train: list[Any], held_out: list[Any]) -> tuple[list[Any], list[Any]]:
    if len(train) < min(MIN_TRAIN, 2 * len(held_out)):
        raise DataError(f"got {len(train)} questions of {game.dataset} to train on; widen the game's settings")
    return train, held_out


def to_row(game: Game, entry: dict[str, Any]) -> dict[str, Any]:
    """One line of a dataset file."""
    said = (*game.example, f"Right. {entry['question']}")
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    messages.insert(0, {"role": "system", "content": RULE})
    stored = {name: entry[name] for name in ("question", "answer", "metadata")}
    task = {"dataset": game.dataset, "settings": game.settings, "entry": stored}
    return {"prompt": messages, "label": entry["answer"], "metadata": {"turns": game.turns, "reasoning_gym": task}}


def write_task(out: Path, name: str, *, seed: int = 0) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `eval.jsonl` of a game into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    game = GAMES[name]
    paths = out / "train.jsonl", out / "eval.jsonl"
    for path, entries in zip(paths, draw(game, seed), strict=True):
        write_jsonl(path, (to_row(game, entry) for entry in entries))
    return paths


def stamp(name: str, seed: int) -> dict[str, Any]:
    """What the files were made of."""
    return {"game": name, "seed": seed, **asdict(GAMES[name])}
