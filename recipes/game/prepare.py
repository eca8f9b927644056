"""Prepares the game: `python -m recipes.game.prepare --out assets/game`. A second call does nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..demo.model import unpack
from . import task

STAMP = "task.json"


def prepare(out: Path, model: Path, *, game: str, seed: int = 0) -> None:
    """Model and data, each only where it is missing or was made otherwise."""
    print(f"model: {unpack(model)}")
    done, wanted = out / STAMP, json.loads(json.dumps(task.stamp(game, seed)))
    if not done.is_file() or json.loads(done.read_text()) != wanted:
        task.write_task(out, game, seed=seed)
        done.write_text(json.dumps(wanted))
    for name in ("train", "eval"):
        path = out / f"{name}.jsonl"
        print(f"{name}: {path} ({sum(1 for _ in path.open())} questions)")


def main(argv: list[str] | None = None) -> int:
    """Entry of `python -m recipes.game.prepare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("assets/game"), help="folder of train.jsonl and eval.jsonl")
    parser.add_argument("--model", type=Path, default=Path("assets/smollm2-135m-instruct"), help="folder of the model")
    parser.add_argument("--game", choices=sorted(task.GAMES), default="bits", help="which questions")
    parser.add_argument("--seed", type=int, default=0, help="which questions are held out")
    options = parser.parse_args(argv)
    prepare(options.out, options.model, game=options.game, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
