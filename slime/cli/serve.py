"""Commands beside a run: `slime serve` (engines and routers without training) and `slime weights-agent`."""

from __future__ import annotations

import argparse

from slime.settings.flags import OVERRIDE, PORT
from slime.settings.parse import flag_value

# `slime serve [TOPOLOGY.yaml] --hf-checkpoint DIR --port N [flags]`: engines and routers without training, until
# Ctrl-C. The file is what `--sglang-config` reads; the policy's checkpoint may then be left out.
#
# The loop's own mode for it (`--debug-rollout-only --num-rollout 0`) under a shorter name; every other flag of the loop
# may follow.

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


# `slime weights-agent`: keeps one engine at the weights that a trainer writes to a folder, until Ctrl-C.
#
# A run starts it beside its own engines; beside engines that run already, it is started by hand, on the engine's host.
# The engine's key is in the environment: SLIME_ENGINE_ADMIN_API_KEY, or SLIME_ENGINE_API_KEY if it has one for all.


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    """Which engine, and which folders."""
    parser.add_argument("--engine", required=True, metavar="URL", help="the server, as it is reached from here")
    parser.add_argument("--name", metavar="HOST:PORT", help="the server as the trainer knows it (default: --engine)")
    parser.add_argument(
        "--disk-dir", required=True, metavar="DIR", help="the folder of --update-weight-disk-dir, as it is seen here"
    )
    parser.add_argument(
        "--local-dir",
        required=True,
        metavar="DIR",
        help="a folder of this host for the checkpoint that the engine loads; agents of one host may share it",
    )
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one answer of the engine (default 300)")
    parser.add_argument(
        "--pre-read-hook", metavar="PATH", help="fn(source_dir, target_version), called before a version is read"
    )


def run_agent(options: argparse.Namespace) -> int:
    """Answers calls until a signal ends it."""
    import os
    import signal
    import threading
    from pathlib import Path

    from slime.core.errors import ConfigError
    from slime.core.processes import die_with_parent
    from slime.core.topology import ONE_RANK
    from slime.observability.logs import setup_logging
    from slime.serving.child_process import OWNER_ENV
    from slime.serving.control import HttpEngineControl
    from slime.serving.launch import ADMIN_KEY_ENV, API_KEY_ENV
    from slime.serving.weights_agent import WeightsAgent
    from slime.settings.flags import SECONDS
    from slime.settings.hooks import load_hook

    if not options.engine.startswith(("http://", "https://")):
        raise ConfigError(
            f"got --engine {options.engine}, which does not begin with http:// or https://; give http://HOST:PORT"
        )
    if problem := SECONDS.problem(options.limit_s):
        raise ConfigError(f"got --limit-s {options.limit_s}, {problem}; give seconds")
    if owner := os.environ.get(OWNER_ENV):
        die_with_parent(int(owner))
    setup_logging(None)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    # Its layout is the trainer's business: what the agent asks an engine for is the same for any.
    key = os.environ.get(ADMIN_KEY_ENV) or os.environ.get(API_KEY_ENV)
    control = HttpEngineControl(options.engine, ONE_RANK, options.limit_s, key)
    hook = load_hook(options.pre_read_hook, "pre_read") if options.pre_read_hook else None
    agent = WeightsAgent(
        Path(options.disk_dir), options.name or options.engine, control, Path(options.local_dir), pre_read=hook
    )
    print(f"slime weights-agent: {options.engine} follows {options.disk_dir}", flush=True)
    agent.run(over)
    return 0
