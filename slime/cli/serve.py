"""`slime serve` and `slime weights-agent`.

`slime serve [TOPOLOGY.yaml] --hf-checkpoint DIR --port N [flags]` runs engines and routers without training, until
Ctrl-C. It runs the loop with `--debug-rollout-only --num-rollout 0` and accepts the loop's other flags. The file has
the format of `--sglang-config`; with it, the policy's checkpoint is optional.

`slime weights-agent` loads the weights that a trainer writes to a folder into one engine, until Ctrl-C. A run starts it
next to its own engines; for external engines, start it manually on the engine's host. The agent reads the engine's key
from SLIME_ENGINE_ADMIN_API_KEY, or from SLIME_ENGINE_API_KEY if the engine uses one key for everything.
"""

from __future__ import annotations

import argparse

from slime.settings.command_line import flag_value
from slime.settings.flag_parser import OVERRIDE
from slime.settings.flags import PORT

DEFAULT_PORT = 30000
"""SGLang's default."""
CHECKPOINT = "--hf-checkpoint"
ONLY_SERVES = ("--debug-rollout-only", "--num-rollout", "0", "--rollout-batch-size", "1")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [TOPOLOGY.yaml] [--port N] [--host ADDRESS] [flags of the loop]"
    parser.add_argument("--port", type=_port, help=f"port of the router (default {DEFAULT_PORT})")
    parser.add_argument(
        "--host", help="address to listen on (default: loopback); a different address needs --router-api-key"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or PORT.problem(int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 1 to 65535")
    return int(text)


def words_of(options: argparse.Namespace) -> list[str]:
    """Returns the loop's flags. Those that turn training off come last, to override the flags of a training run."""
    words: list[str] = options.words
    if words and not words[0].startswith("-"):
        words = [*_of_topology(words[0], words[1:]), *words[1:]]
    port = DEFAULT_PORT if options.port is None and flag_value(words, "router_port") is None else options.port
    own = {"--router-port": port, "--router-host": options.host}
    where = [word for flag, value in own.items() if value is not None for word in (flag, str(value))]
    return [*where, *words, OVERRIDE, *ONLY_SERVES]


def _of_topology(file: str, words: list[str]) -> list[str]:
    """Returns the flags for a topology file. Without --hf-checkpoint, the file's first model is the policy."""
    from slime.settings.topology_yaml import first_path

    given = any(word == CHECKPOINT or word.startswith(f"{CHECKPOINT}=") for word in words)
    return ["--sglang-config", file, *([] if given else [CHECKPOINT, first_path(file)])]


def run(options: argparse.Namespace) -> int:
    """Serves until a signal ends the process. Exits with `SystemExit`, like `run_or_exit`."""
    from slime.cli.loops import import_from_here
    from slime.cli.loops.train import train
    from slime.settings import run_or_exit

    import_from_here()
    run_or_exit(train, words_of(options))
    return 0


def add_agent_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", required=True, metavar="URL", help="the engine's address, as seen from this host")
    parser.add_argument(
        "--name", metavar="HOST:PORT", help="the engine's address, as the trainer names it (default: --engine)"
    )
    parser.add_argument(
        "--disk-dir",
        required=True,
        metavar="DIR",
        help="the folder of --update-weight-disk-dir, as seen from this host",
    )
    parser.add_argument(
        "--local-dir",
        required=True,
        metavar="DIR",
        help="a folder on this host for the checkpoint that the engine loads; agents on the same host can share it",
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="time limit of each request to the engine (default 300)"
    )
    parser.add_argument(
        "--pre-read-hook", metavar="PATH", help="fn(source_dir, target_version), called before a version is read"
    )


def run_agent(options: argparse.Namespace) -> int:
    """Loads weights from the folder until a signal ends the process."""
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
    from slime.settings.flags import SECONDS, url_form
    from slime.settings.hook_contracts import load_hook

    if problem := url_form(options.engine):
        raise ConfigError(f"--engine is {options.engine}, {problem}")
    if problem := SECONDS.problem(options.limit_s):
        raise ConfigError(f"--limit-s is {options.limit_s}, {problem}")
    if owner := os.environ.get(OWNER_ENV):
        die_with_parent(int(owner))
    setup_logging(None)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    # The agent's requests do not depend on the engine's layout, so any layout works.
    key = os.environ.get(ADMIN_KEY_ENV) or os.environ.get(API_KEY_ENV)
    control = HttpEngineControl(options.engine, ONE_RANK, options.limit_s, key)
    hook = load_hook(options.pre_read_hook, "pre_read") if options.pre_read_hook else None
    agent = WeightsAgent(
        Path(options.disk_dir), options.name or options.engine, control, Path(options.local_dir), pre_read=hook
    )
    print(f"slime weights-agent: {options.engine} follows {options.disk_dir}", flush=True)
    agent.run(over)
    return 0
