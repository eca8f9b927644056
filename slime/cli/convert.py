"""`slime convert IN OUT` and `slime tokenizer`.

`slime convert` converts weights, or a rollout of the public slime.

The output for weights is a Hugging Face folder, optionally with a different dtype, or Megatron's `torch_dist`; for a
rollout, it is a file in slime's format. Arguments are checked before torch is imported.

`slime tokenizer` writes a tokenizer.json for a folder whose tokenizer is code.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slime.core.errors import CheckpointError, ConfigError
from slime.core.hf_config import quantisation_of, read_hf_config
from slime.settings.conditions import has_hf_model, has_megatron_checkpoint
from slime.settings.groups.training import has_checkpoint
from slime.training.foreign import require_trust


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="IN",
        help="a Hugging Face folder, a --save folder or one of its step_*, a torch_dist folder, or a rollout X.pt",
    )
    parser.add_argument(
        "target", type=Path, metavar="OUT", help="where to write: a new or empty folder; for X.pt a new file"
    )
    kinds = ("bf16", "fp16", "fp32", "fp8", "peft", "torch_dist")
    parser.add_argument(
        "--to",
        choices=kinds,
        help="dtype of the weights; peft: only adapters; torch_dist: a folder for Megatron; default: keep the dtypes",
    )
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="for a torch_dist folder: the model with config and tokenizer; for a checkpoint or torch_dist folder: "
        "the source of tensors that training does not use; for peft: the base model",
    )
    parser.add_argument("--model-family", help="your own model family: pkg.module, path/to/file.py, pkg.module:Class")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read IN although it contains pickles; they are read as data, and no code in them runs",
    )


def run(options: argparse.Namespace) -> int:
    """Checks the arguments, converts (`slime/cli/checkpoint_conversion.py`), and prints a description of the result."""
    if options.source.suffix == ".pt":
        if options.to is not None:
            raise ConfigError(f"--to {options.to} is for weights, but {options.source} is a rollout; drop the flag")
        check_rollout(options.source, options.target, trusted=options.trust_pickle)
        from slime.cli.checkpoint_conversion import convert_rollout

        print(convert_rollout(options.source, options.target, trusted=options.trust_pickle))
        return 0
    check_folders(options.source, options.target, options.to, options.hf_checkpoint, trusted=options.trust_pickle)
    from slime.cli.checkpoint_conversion import convert, described

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


def check_rollout(source: Path, target: Path, *, trusted: bool) -> None:
    """Raises `ConfigError` if the file is missing or not trusted, `CheckpointError` if the target already exists."""
    if not source.is_file():
        raise ConfigError(f"{source} is not a file; pass a rollout written by the public slime")
    require_trust(source, trusted=trusted)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"the target {target} already exists; pass a new file, OUT.jsonl.zst")


def check_folders(source: Path, target: Path, to: str | None, hf_checkpoint: Path | None, *, trusted: bool) -> None:
    """Raises `CheckpointError` or `ConfigError` for arguments that cannot work, without reading weights."""
    is_hf = has_hf_model(str(source))
    if to == "peft" and is_hf:
        raise CheckpointError(f"--to peft needs adapters, but {source} has none; pass a --save folder")
    if target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError(f"the target {target} is not empty; pass a new folder or empty this one")
    is_megatron = not is_hf and has_megatron_checkpoint(str(source))
    if not is_hf and not is_megatron and not has_checkpoint(str(source)):
        missing = "contains no checkpoint" if source.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{source} {missing}; pass a Hugging Face folder, a --save folder or a step_* folder in one, or a "
            "torch_dist folder"
        )
    if hf_checkpoint is not None and not has_hf_model(str(hf_checkpoint)):
        raise ConfigError(f"--hf-checkpoint {hf_checkpoint} has no config.json; pass a Hugging Face folder")
    if is_megatron:
        require_trust(source, trusted=trusted)
        if hf_checkpoint is None:
            raise ConfigError(
                f"{source} contains only weights; set --hf-checkpoint to the Hugging Face folder of the model, for "
                "config.json and tokenizer"
            )
    if to == "fp8" and is_hf and (found := quantisation_of(read_hf_config(str(source)))) is not None:
        method = str(found.get("quant_method")).upper()
        raise ConfigError(f"--to fp8 does not work with {source}, which is already {method}; choose a different --to")


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a Kimi-K2 folder, as released")


def run_tokenizer(options: argparse.Namespace) -> int:
    """Writes a tokenizer.json without running the tokenizer's code. Raises `ConfigError` if it is not supported."""
    from slime.core.files import FAST
    from slime.data.checkpoint_template import KEPT, write_fast

    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder; pass a Kimi-K2 folder, as released")
    num_ids = write_fast(options.folder)
    print(f"{options.folder / FAST}: {num_ids} ids; the original configuration is kept as {KEPT}")
    return 0
