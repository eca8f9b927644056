"""`slime tokenizer`: writes a tokenizer.json for a folder whose tokenizer is code."""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.core.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a Kimi-K2 folder, as released")


def run(options: argparse.Namespace) -> int:
    """Writes a tokenizer.json without running the tokenizer's code. Raises `ConfigError` if it is not supported."""
    from slime.core.files import FAST
    from slime.data.checkpoint_template import KEPT, write_fast

    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder; pass a Kimi-K2 folder, as released")
    num_ids = write_fast(options.folder)
    print(f"{options.folder / FAST}: {num_ids} ids; the original configuration is kept as {KEPT}")
    return 0
