"""`slime serve --hf-checkpoint DIR --port N [flags]`: engines and router without training, until Ctrl-C.

The loop's own mode for it (`--debug-rollout-only --num-rollout 0`) under a shorter name; every other flag of the loop
may follow.
"""

from __future__ import annotations

import argparse

DEFAULT_PORT = 30000
"""SGLang's own."""
ONLY_SERVES = ("--debug-rollout-only", "--num-rollout", "0", "--rollout-batch-size", "1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where to listen; further flags are for the loop."""
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"where clients reach the router (default {DEFAULT_PORT})"
    )
    parser.add_argument("--host", help="address to listen on (default loopback); others need --router-api-key")


def words_of(options: argparse.Namespace) -> list[str]:
    """The flags of the loop; those that make it serve alone come last, so that no other flag turns them off."""
    host = ["--router-host", options.host] if options.host is not None else []
    return ["--router-port", str(options.port), *host, *options.words, *ONLY_SERVES]


def run(options: argparse.Namespace) -> int:
    """Serves. Exit codes are those of `run_or_exit`, raised as `SystemExit`."""
    from slime.cli.loops.train import train
    from slime.cli.train import import_from_here
    from slime.settings import run_or_exit

    import_from_here()
    run_or_exit(train, words_of(options))
    return 0
