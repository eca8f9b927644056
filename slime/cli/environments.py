"""`slime env`: RL environments of other projects, see `slime.agent.environments`.

`slime env list` shows what there is, `slime env tasks NAME` writes a dataset of tasks for training, and `slime env try
NAME` plays one episode with a model and prints the conversation, the tokens and the reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError, EngineError
from slime.core.text import listed, visible
from slime.core.user_files import read_yaml

if TYPE_CHECKING:
    from slime.agent.environments import EnvironmentSpec
    from slime.core.sample import Sample

ACTIONS = ("list", "tasks", "try")
GENERATE = "slime.agent.environments:generate"
DATA_FLAGS = ("--input-key", "prompt", "--metadata-key", "metadata", "--custom-generate-function-path", GENERATE)
"""The flags of a run on a dataset that `slime env tasks` wrote."""
ONE_EPISODE = (
    *("--debug-rollout-only", "--num-rollout", "1", "--rollout-batch-size", "1", "--n-samples-per-prompt", "1"),
    *("--advantage-estimator", "reinforce_plus_plus"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s list | tasks NAME --to FILE | try NAME --hf-checkpoint DIR [flags of the loop]"
    parser.add_argument("action", choices=ACTIONS, help="list environments, write tasks, or try one episode")
    parser.add_argument("name", nargs="?", metavar="NAME", help="an environment of slime env list")
    parser.add_argument(
        "--environment-config", metavar="FILE", help="YAML with the environment's own settings (docs/environments.md)"
    )
    parser.add_argument(
        "--environment-package",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="package that the environment needs, for pip; repeatable",
    )
    parser.add_argument(
        "--environment-path",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with modules of the environment; repeatable",
    )
    parser.add_argument(
        "--environment-python",
        metavar="PATH",
        help="interpreter that has the environment's packages (default: a virtual environment, created on first use)",
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="tasks: the dataset to write, as JSON lines")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="position of the first task (default 0)")
    parser.add_argument("--count", type=int, metavar="N", help="tasks: at most this many (default 1000)")


def run(options: argparse.Namespace) -> int:
    """Lists environments, writes a dataset, or plays an episode. Raises `SlimeError`."""
    if options.action == "list":
        _require_none(options.words)
        print(table())
        return 0
    if options.name is None:
        raise ConfigError(f"{options.action} needs the name of an environment; slime env list shows them")
    spec = _spec(options)
    if options.action == "try":
        return _try(spec, options)
    _require_none(options.words)
    if options.to is None:
        raise ConfigError("the file for the tasks is missing; pass --to FILE.jsonl")
    rows = tasks_of(spec, options.first, 1000 if options.count is None else options.count)
    options.to.parent.mkdir(parents=True, exist_ok=True)
    options.to.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"wrote {len(rows)} tasks to {options.to}; train on them with\n  --prompt-data {options.to} {DATA_FLAGS[0]} "
        + " ".join(DATA_FLAGS[1:])
    )
    return 0


def _require_none(words: Sequence[str]) -> None:
    if words:
        raise ConfigError(f"{words[0]!r} is one argument too many; only slime env try passes flags to the loop")


def _spec(options: argparse.Namespace) -> EnvironmentSpec:
    """Returns the specification on a command line, with absolute paths. Raises `ConfigError`."""
    from slime.agent.environments import EnvironmentSpec

    path = [Path(folder).absolute() for folder in options.environment_path]
    if missing := [str(folder) for folder in path if not folder.is_dir()]:
        raise ConfigError(f"--environment-path {listed(missing)} is not a folder; check the path")
    file, python = options.environment_config, options.environment_python
    config = read_yaml(file, "--environment-config") if file else {}
    if "dataset" in config and (beside := Path(file).parent / str(config["dataset"])).is_file():
        config["dataset"] = str(beside.absolute())
    return EnvironmentSpec(
        kind=options.name.replace("-", "_"),
        config=config,
        packages=tuple(_absolute(one) for one in options.environment_package),
        path=tuple(map(str, path)),
        python=str(Path(python).absolute()) if python else None,
    )


def _absolute(requirement: str) -> str:
    """Returns a requirement for pip, with the absolute path of a local project."""
    return str(Path(requirement).absolute()) if requirement.startswith((".", "/")) else requirement


def table() -> str:
    """Returns a line for each environment: name, package, whether it is installed, what it needs."""
    from slime.agent.environments import ENVIRONMENTS, EnvironmentSpec, installed

    rows = [("NAME", "PACKAGE", "INSTALLED", "NEEDS BESIDES PYPI")]
    for name, one in ENVIRONMENTS.items():
        try:
            there = "yes" if installed(EnvironmentSpec(name)) else "no"
        except ConfigError:
            there = f"no Python {one.python[0]}.{one.python[1]}"
        rows.append((name, f"{one.package} {one.version}", there, one.needs))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    )


def tasks_of(spec: EnvironmentSpec, first: int, count: int) -> list[dict[str, Any]]:
    """Returns rows of a dataset, one for each task. Creates the virtual environment on first use.

    Raises `ConfigError` if there are no tasks, and as `started` and `EnvironmentProcess.tasks` do.
    """
    from slime.agent.environments import SPEC, TASK, started

    async def found() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="slime-env-") as folder:
            process = await started(spec, Path(folder) / "environment.log", lambda line: print(line, flush=True))
            try:
                return await process.tasks(first, count)
            finally:
                await process.close()

    if first < 0 or count < 1:
        raise ConfigError(
            f"--first is {first} and --count is {count}; use a first of 0 or more and a count of 1 or more"
        )
    rows = asyncio.run(found())
    if not rows:
        raise ConfigError(f"the environment {spec.kind} has no tasks from position {first}; check --first")
    return [{"prompt": row["prompt"], "metadata": {SPEC: spec.to_dict(), TASK: row["task"]}} for row in rows]


def _try(spec: EnvironmentSpec, options: argparse.Namespace) -> int:
    from slime.rollout.factories import tokenizer_of
    from slime.rollout.recordings import load_rollout
    from slime.settings.command_line import flag_value

    model = flag_value(options.words, "hf_checkpoint")
    if model is None:
        raise ConfigError(
            "the model is missing; pass --hf-checkpoint DIR, and --rollout-external-engine-addrs HOST:PORT if an "
            "engine already serves it"
        )
    (row,) = tasks_of(spec, options.first, 1)
    with tempfile.TemporaryDirectory(prefix="slime-env-") as name:
        folder = Path(name)
        (folder / "task.jsonl").write_text(json.dumps(row) + "\n")
        own = ["--prompt-data", str(folder / "task.jsonl"), *DATA_FLAGS, "--run-dir", str(folder / "run")]
        own += ["--save-debug-rollout-data", str(folder / "{rollout_id}.jsonl.zst")]
        words = [*options.words, "--override", *own, *ONE_EPISODE]
        print("playing one episode; starting an engine takes a while", flush=True)
        with (folder / "output").open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", "slime", "train", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode != 0:
            said = (folder / "output").read_text(errors="replace")[-3000:]
            raise EngineError(f"the episode failed with code {done.returncode}; the end of its output:\n{said}")
        _, groups = load_rollout(folder / "0.jsonl.zst")
        tokenizer = tokenizer_of(model)
        for sample in groups[0]:
            print(transcript(sample, lambda ids: str(tokenizer.decode(ids))))
    return 0


def transcript(sample: Sample, decode: Any) -> str:
    """Returns a sample as text: each part of the conversation with its origin and tokens, then score and facts.

    `decode`: token ids -> text.
    """
    from slime.agent.environments import INFO

    agent: Mapping[str, Any] = sample.metadata.get("agent", {})
    lines = []
    for start, end, origin in agent.get("origins", []):
        text = decode(sample.tokens[start:end]) if start < len(sample.tokens) else ""
        lines.append(f"--- {origin}, {min(end, len(sample.tokens)) - start} tokens\n{text}")
    trained = sum(sample.loss_mask or [])
    lines.append(
        f"--- {sample.status.value}: reward {sample.reward}, {agent.get('turns', 0)} turns, "
        f"{len(sample.tokens)} tokens, {trained} sampled"
    )
    if sample.failure:
        lines.append(f"failure: {sample.failure}")
    lines.append(f"environment: {json.dumps(sample.metadata.get(INFO))}")
    return visible("\n".join(lines))
