"""`slime serve [TOPOLOGY.yaml] --hf-checkpoint DIR --port N [flags]`: engines and routers without training, until
Ctrl-C. The file is what `--sglang-config` reads; the policy's checkpoint may then be left out.

The loop's own mode for it (`--debug-rollout-only --num-rollout 0`) under a shorter name; every other flag of the loop
may follow.
"""

from __future__ import annotations

import argparse

from slime.settings.flags import OVERRIDE, PORT
from slime.settings.parse import flag_value

DEFAULT_PORT = 30000
"""SGLang's own."""
CHECKPOINT = "--hf-checkpoint"
ONLY_SERVES = ("--debug-rollout-only", "--num-rollout", "0", "--rollout-batch-size", "1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where to listen; a first word without dashes is a file, further flags are for the loop."""
    parser.usage = "slime serve [TOPOLOGY.yaml] [--port N] [--host ADDRESS] [flags of the loop]"
    parser.add_argument("--port", type=_port, help=f"where clients reach the router (default {DEFAULT_PORT})")
    parser.add_argument("--host", help="address to listen on (default loopback); others need --router-api-key")


def _port(text: str) -> int:
    """Raises `argparse.ArgumentTypeError` for what is none."""
    if not text.isdecimal() or PORT.problem(int(text)):
        raise argparse.ArgumentTypeError(f"got {text!r}, and a port is a number of at least 1 and at most 65535")
    return int(text)


def words_of(options: argparse.Namespace) -> list[str]:
    """The flags of the loop; those that make it serve alone replace what a command line of a training run says."""
    words: list[str] = options.words
    if words and not words[0].startswith("-"):
        words = [*_of_topology(words[0], words[1:]), *words[1:]]
    port = DEFAULT_PORT if options.port is None and flag_value(words, "router_port") is None else options.port
    own = {"--router-port": port, "--router-host": options.host}
    where = [word for flag, value in own.items() if value is not None for word in (flag, str(value))]
    return [*where, *words, OVERRIDE, *ONLY_SERVES]


def _of_topology(file: str, words: list[str]) -> list[str]:
    """The flags that a file stands for. Where no model is the policy, the first one is what rollouts would ask."""
    from slime.settings.topology_yaml import first_path

    given = any(word == CHECKPOINT or word.startswith(f"{CHECKPOINT}=") for word in words)
    return ["--sglang-config", file, *([] if given else [CHECKPOINT, first_path(file)])]


def run(options: argparse.Namespace) -> int:
    """Serves. Exit codes are those of `run_or_exit`, raised as `SystemExit`."""
    from slime.cli.loops.train import train
    from slime.cli.train import import_from_here
    from slime.settings import run_or_exit

    import_from_here()
    run_or_exit(train, words_of(options))
    return 0
