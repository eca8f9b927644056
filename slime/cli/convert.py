"""`slime convert IN OUT`: weights to a Hugging Face folder, in another type, or to Megatron's `torch_dist`; a rollout
of the public slime to one of ours.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.core.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to convert, where to, and into what."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="IN",
        help="a HF folder, a --save folder or one of its step_*, a torch_dist folder of Megatron, or the rollout X.pt",
    )
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="what to write: a folder, of X.pt a file; new or empty"
    )
    kinds = ("bf16", "fp16", "fp32", "fp8", "peft", "torch_dist")
    parser.add_argument(
        "--to",
        choices=kinds,
        help="a type, peft: adapters alone, or torch_dist: a folder that Megatron loads; default: types as they are",
    )
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="of a torch_dist folder: its model, of which config and tokenizer are taken; with a checkpoint or a "
        "torch_dist folder: where tensors come from that training does not hold; with peft: the adapters' model",
    )
    parser.add_argument("--model-family", help="a family of your own: pkg.module, path/to/file.py, pkg.module:Class")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read IN though it is made of pickles: as data alone, in a process that is confined",
    )


def run(options: argparse.Namespace) -> int:
    """Converts (`slime/cli/conversion.py`), and prints what was written."""
    if options.source.suffix == ".pt":
        from slime.cli.conversion import convert_rollout

        if options.to is not None:
            raise ConfigError(f"got --to {options.to} for {options.source}, a rollout, which holds no weights; drop it")
        print(convert_rollout(options.source, options.target, trusted=options.trust_pickle))
        return 0
    from slime.cli.conversion import convert, described

    convert(
        options.source,
        options.target,
        options.to,
        options.hf_checkpoint,
        options.model_family,
        trust_pickle=options.trust_pickle,
    )
    print(described(options.target))
    return 0
