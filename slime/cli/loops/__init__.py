"""`slime train` and `slime train-async`: the loops `train.py` and `train_async.py`, with their own command line; and
`slime recipe`, which runs a recipe that comes with slime; and `slime cluster init`, which writes the files that start a
run under Slurm, on Kubernetes or as a job of Ray.

All arguments after `train`, `train-async` and the name of a recipe go to the loop, including `--help` and `--explain`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.core.errors import ConfigError
from slime.settings import run_or_exit


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds nothing, because the loop parses its flags itself."""


def run_sync(options: argparse.Namespace) -> int:
    """Alternates generation and training. Exits with `SystemExit`, like `run_or_exit`."""
    from slime.cli.loops.train import train

    import_from_here()
    run_or_exit(train, options.words)
    return 0


def run_async(options: argparse.Namespace) -> int:
    """Generates while it trains. Exits with `SystemExit`, like `run_or_exit`."""
    from slime.cli.loops.train_async import train_async

    import_from_here()
    run_or_exit(train_async, options.words, synchronous=False)
    return 0


def import_from_here() -> None:
    """Lets every process of the run import users' modules from the working folder (`my_hooks:reward`).

    PYTHONPATH precedes the standard library, so a module that would shadow one of Python's raises `ConfigError`.
    """
    here = str(Path.cwd())
    named = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if here not in named:
        _require_no_namesake(Path(here))
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *named])
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _require_no_namesake(folder: Path) -> None:
    modules = [*sorted(folder.glob("*.py")), *(path.parent for path in sorted(folder.glob("*/__init__.py")))]
    found = next((path for path in modules if path.stem in sys.stdlib_module_names), None)
    if found is not None:
        raise ConfigError(
            f"every process of the run would import {found} instead of Python's own {found.stem}; rename the file, or "
            "start the run in a different folder"
        )


RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    return sorted(script.parent.name for script in RECIPES.glob("*/run.sh"))


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help=f"{', '.join(recipe_names())}; flags after it are passed to the loop"
    )


def run_recipe(options: argparse.Namespace) -> int:
    """Replaces this process with the recipe's script.

    The script prepares model and data in the working folder and starts `slime train`. Raises `ConfigError` for an
    unknown recipe and for wrong flags, before anything is prepared.
    """
    from slime.settings.command_line import EXPLAIN, parse_words

    if options.name not in recipe_names():
        raise ConfigError(f"there is no recipe {options.name}; choose from {', '.join(recipe_names())}")
    import_from_here()
    parse_words([word for word in options.words if word != EXPLAIN])
    script = RECIPES / options.name / "run.sh"
    this_slime = str(Path(__file__).parents[3])  # the script's interpreter might import a different slime
    path = os.pathsep.join(filter(None, (this_slime, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PY": sys.executable, "PYTHONPATH": path}
    os.execvpe("bash", ["bash", str(script), *options.words], environment)


TEMPLATES = RECIPES / "cluster"
CLUSTERS: Mapping[str, Mapping[str, str]] = {
    "slurm": {"job.sbatch": "slurm.sh"},
    "k8s": {"raycluster.yaml": "raycluster.yaml", "rayjob.yaml": "rayjob.yaml"},
    "ray": {"submit.sh": "submit.sh", "stop.sh": "stop.sh"},
}
"""Kind of cluster -> file that `slime cluster init` writes -> its template. Each kind also gets TRAIN."""
TRAIN = "train.sh"
HEAD_CPUS, HEAD_MEMORY, RETRIES = "8", "64Gi", "20"


@dataclass(frozen=True, slots=True)
class _Number:
    """A flag of `slime cluster init`, which fills a placeholder of the templates."""

    default: str
    help: str
    form: str = r"\S+"
    """Regular expression of the values."""
    kinds: tuple[str, ...] = tuple(CLUSTERS)


_COUNT, _NONE = r"[1-9]\d*", r"\d+"
NUMBERS: Mapping[str, _Number] = {
    "name": _Number("slime", "name of the job: lower-case letters, digits and -", r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"),
    "nodes": _Number("2", "hosts with GPUs", _COUNT),
    "gpus": _Number("8", "GPUs of each host; 0: train on CPUs", _NONE),
    "cpus": _Number("64", "CPU cores of each host for the run; Kubernetes needs some for itself", _COUNT),
    "shared": _Number("/shared", "folder that all hosts see at the same path", r"/[\w./-]+"),
    "warn_s": _Number("900", "seconds that a step and a checkpoint take at most", _COUNT, ("slurm", "ray")),
    "time": _Number("24:00:00", "time limit of the job", r"(\d+-)?\d+:\d\d:\d\d", ("slurm",)),
    "venv": _Number("", "virtual environment with slime; default: that of the shell", r"[\w./-]*", ("slurm",)),
    "partition": _Number("", "partition; default: that of the cluster", r"[\w.,-]*", ("slurm",)),
    "account": _Number("", "account; default: that of the user", r"[\w.-]*", ("slurm",)),
    "image": _Number("slime:gpu", "container image, built with the Dockerfile of slime", kinds=("k8s",)),
    "memory": _Number("512Gi", "memory of each host for the run, less than it has", r"[1-9]\d*[KMGT]i", ("k8s",)),
    "claim": _Number("shared", "PersistentVolumeClaim of the shared folder", r"[a-z0-9.-]+", ("k8s",)),
    "address": _Number("http://127.0.0.1:8265", "address of Ray's job server", r"https?://[\w.:\[\]-]+", ("ray",)),
}


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("init",), metavar="init", help="write the files")
    parser.add_argument("kind", choices=tuple(CLUSTERS), metavar="KIND", help=", ".join(CLUSTERS))
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="where to write; flags of slime train after it are those of the run"
    )
    for name, number in NUMBERS.items():
        kinds = "" if len(number.kinds) == len(CLUSTERS) else f" ({', '.join(number.kinds)})"
        default = f"; default: {number.default}" if number.default else ""
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{number.help}{default}{kinds}")


def run_cluster(options: argparse.Namespace) -> int:
    """Writes the files and prints what to do with them. Raises `ConfigError` before it writes anything."""
    from slime.settings.command_line import parse_words

    parse_words(options.words)
    values = _values(options)
    folder = options.folder.absolute()
    train = _filled(TRAIN, {"FLAGS": _run_flags(options.words, values)})
    values |= {"DIR": str(folder), "TRAIN": "".join(f"    {line}\n" for line in train.splitlines()).rstrip("\n")}
    texts = {TRAIN: train} | {name: _filled(template, values) for name, template in CLUSTERS[options.kind].items()}
    for name, text in texts.items():
        if (folder / name).exists() and (folder / name).read_text() != text:
            raise ConfigError(f"{folder / name} exists and is different; delete it or choose a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; choose another folder") from error
    print(f"wrote {', '.join(texts)} to {folder}; the comments at their beginning say how to use them")
    if options.words:
        print(f"{folder / TRAIN} has your flags and those for the cluster; it needs --hf-checkpoint and data as well")
    else:
        print(f"{folder / TRAIN} has example values for model, data and reward: change them")
    return 0


def _values(options: argparse.Namespace) -> dict[str, str]:
    """Returns placeholder -> value. Raises `ConfigError` for a value that is wrong, or that the kind does not have."""
    from importlib import metadata

    values = {"RAY": metadata.version("ray"), "HEAD_CPUS": HEAD_CPUS, "HEAD_MEMORY": HEAD_MEMORY, "RETRIES": RETRIES}
    for name, number in NUMBERS.items():
        given, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if given is not None and options.kind not in number.kinds:
            raise ConfigError(f"{flag} {given} is for {' and '.join(number.kinds)}, not for {options.kind}; drop it")
        value = number.default if given is None else given
        if re.fullmatch(number.form, value) is None:
            raise ConfigError(f"{flag} is {value!r}, but must be: {number.help}, like {number.default or '...'}")
        values[name.upper()] = value
    if options.kind == "slurm":
        _require_time(values["TIME"], int(values["WARN_S"]))
    gpus = int(values["GPUS"])
    values["GPU_OPTION"] = f" --gpus-per-node={gpus}" if gpus else ""
    values["GPU_LIMIT"] = f', nvidia.com/gpu: "{gpus}"' if gpus else ""
    chosen = {name: values[name.upper()] for name in ("partition", "account")}
    values["MORE_OPTIONS"] = "".join(f"\n#SBATCH --{name}={value}" for name, value in chosen.items() if value)
    venv = values["VENV"]
    values["ENVIRONMENT"] = f"source {venv}/bin/activate" if venv else "# activate the environment with slime here"
    return values


LATEST_WARNING_S = 65_535
"""Slurm's limit of the time between a signal and the end of a job."""


def _require_time(time: str, warn_s: int) -> None:
    """Raises `ConfigError` if a job is warned at its start, which would requeue it for ever, or not at all."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    total_s = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if warn_s >= min(total_s, LATEST_WARNING_S + 1):
        raise ConfigError(
            f"--warn-s {warn_s} is not less than --time {time} ({total_s} s), or more than Slurm's {LATEST_WARNING_S}; "
            "the job would end before its first step. Give it more time, or warn it later"
        )


def _run_flags(words: Sequence[str], values: Mapping[str, str]) -> str:
    """Returns the flags of train.sh, one on each line: those given, and defaults for the others."""
    from slime.settings.command_line import groups, name_of

    gpus, run = int(values["GPUS"]), f"{values['SHARED']}/runs/{values['NAME']}"
    default = f"--device {'cuda' if gpus else 'cpu'} --actor-num-nodes {values['NODES']}"
    default += f" --actor-num-gpus-per-node {gpus or 1} --colocate --run-dir {run} --save {run}/save --load {run}/save"
    default += " --save-interval 20 --save-keep-last 2 --exit-signal-handler"
    if not words:
        default += f" --hf-checkpoint {values['SHARED']}/model --prompt-data {values['SHARED']}/prompts.jsonl"
        default += " --input-key prompt --label-key label --apply-chat-template --rm-type deepscaler"
        default += " --rollout-batch-size 64 --n-samples-per-prompt 8 --rollout-max-response-len 8192"
        default += " --num-rollout 1000 --lr 1e-6 --lr-decay-style constant"
    given = groups(words)
    names = {name_of(group).removeprefix("no_") for group in given}
    kept = [group for group in groups(default.split()) if name_of(group) not in names]
    return "".join(f"\\\n  {shlex.join(group)} " for group in (*kept, *given)).rstrip()


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Returns the text of a template. Every placeholder must have a value."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], (TEMPLATES / template).read_text())
