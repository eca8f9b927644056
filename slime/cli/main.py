"""`slime <command>`: the entry point. Help answers at once: each command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.core.errors import SlimeError


def build_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="slime", description="Tools around a slime run. Training itself: python train.py --help"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="check this machine: versions, device, memory, ports, engines")
    doctor.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to check for")
    doctor.add_argument("--no-engines", action="store_true", help="skip the imports of SGLang and Megatron (30 s)")

    report = commands.add_parser("report", help="draw report.png and report.md of a run folder")
    report.add_argument("run_dir", type=Path)

    trace = commands.add_parser("trace", help="join the traces of a run into one file for ui.perfetto.dev")
    trace.add_argument("run_dir", type=Path)
    trace.add_argument("--out", type=Path, help="default: trace.json in the run folder")

    convert = commands.add_parser("convert", help="a Hugging Face folder or a checkpoint to a Hugging Face folder")
    convert.add_argument("source", type=Path, metavar="IN", help="a HF folder, a --save folder, or one of its step_*")
    convert.add_argument("target", type=Path, metavar="OUT", help="the folder to write; new or empty")
    convert.add_argument("--to", choices=("bf16", "fp16", "fp32", "fp8"), help="default: types as they are")
    convert.add_argument(
        "--hf-checkpoint", type=Path, help="with a checkpoint: where tensors come from that training does not hold"
    )
    convert.add_argument("--model-family", help="a family of your own: pkg.module, path/to/file.py, pkg.module:Class")

    schemas = commands.add_parser("schemas", help="compare the flag schemas with the installed engines")
    schemas.add_argument("--write", action="store_true", help="write them again")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (0 well, 1 something is wrong, 2 wrong usage)."""
    options = build_parser().parse_args(argv)
    try:
        return _run(options)
    except SlimeError as error:
        print(f"slime {options.command}: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from slime.cli import doctor

        return doctor.run(options.device, engines=not options.no_engines)
    if options.command == "schemas":
        from slime.cli import schemas

        return schemas.main(["--write"] if options.write else [])
    if options.command == "convert":
        from slime.cli import convert

        return convert.run(options.source, options.target, options.to, options.hf_checkpoint, options.model_family)
    from slime.cli import run_files

    if options.command == "report":
        return run_files.report(options.run_dir)
    return run_files.trace(options.run_dir, options.out)


if __name__ == "__main__":
    sys.exit(main())
