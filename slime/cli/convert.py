"""`slime convert IN OUT`: a Hugging Face folder or a slime checkpoint to a Hugging Face folder, in another type."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to convert, where to, and into what."""
    parser.add_argument("source", type=Path, metavar="IN", help="a HF folder, a --save folder, or one of its step_*")
    parser.add_argument("target", type=Path, metavar="OUT", help="the folder to write; new or empty")
    kinds = ("bf16", "fp16", "fp32", "fp8", "peft")
    parser.add_argument("--to", choices=kinds, help="a type, or peft: adapters alone; default: types as they are")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="with a checkpoint: where tensors come from that training does not hold; with peft: the adapters' model",
    )
    parser.add_argument("--model-family", help="a family of your own: pkg.module, path/to/file.py, pkg.module:Class")


def run(options: argparse.Namespace) -> int:
    """Converts (`slime/cli/conversion.py`), and prints what was written."""
    from slime.cli.conversion import convert, described

    convert(options.source, options.target, options.to, options.hf_checkpoint, options.model_family)
    print(described(options.target))
    return 0
