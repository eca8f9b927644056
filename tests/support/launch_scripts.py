"""Public launch scripts as command lines on files of a test: MODEL is the model's folder, other names are files.

`MODEL_torch_dist`, which scripts give as --ref-load, is the folder that the public slime converts a model to. Nothing
is left out or changed: --wandb-key has no value, because its variable is empty, and folders of --load do not exist.
`own_command_lines.yaml` has more command lines of this form, written from what the public slime documents.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
OWN_FILE = FILE.with_name("own_command_lines.yaml")
ROWS = 256
"""Of each data file: as many as the largest batch of a script."""
COLUMNS = ("prompt", "label", "input", "problem", "answer", "messages")
_EVALUATION = "eval: {datasets: [{name: aime, path: aime-2024.jsonl, rm_type: math}]}"
_CORRECTION = {
    "use_rs": True,
    "rs_level": "token",
    "rs_lower_bound": 0.5,
    "rs_upper_bound": 2.0,
    "tis_mode": "truncate",
}


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """One script."""

    name: str
    synchronous: bool
    """train.py, not train_async.py."""
    model: str
    flags: tuple[str, ...]

    def write(self, folder: Path) -> list[str]:
        """Its command line, on files below `folder`, in which it is to be parsed."""
        models = facts()["models"] | own_facts()["models"]
        for name in ("MODEL", "OTHER"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(models[self.model]))
        for name, text in own_facts()["files"].items():
            (folder / name).write_text(text)
        for word in (*self.flags, "aime-2024.jsonl"):
            if word.endswith((".jsonl", ".parquet")):
                _write_rows(folder / word)
        (folder / "multi_task.yaml").write_text(_EVALUATION)
        (folder / "mis.yaml").write_text(yaml.safe_dump(_CORRECTION))
        return list(self.flags)


def _write_rows(path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text((json.dumps(dict.fromkeys(COLUMNS, "1")) + "\n") * ROWS)
        return
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({name: ["1"] * ROWS for name in COLUMNS}), path)


@cache
def facts() -> dict[str, Any]:
    """The file."""
    content: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return content


@cache
def launch_scripts() -> dict[str, LaunchScript]:
    """All of them, by name."""
    common = shlex.split(facts()["common"])
    return {
        name: LaunchScript(name, one["loop"] == "train", one["model"], (*common, *shlex.split(one["flags"])))
        for name, one in facts()["scripts"].items()
    }


@cache
def own_facts() -> dict[str, Any]:
    """The file with the command lines that are ours."""
    content: dict[str, Any] = yaml.safe_load(OWN_FILE.read_text())
    return content


@cache
def own_command_lines() -> dict[str, LaunchScript]:
    """Those that are ours, by name: scripts, then tests."""
    return {
        name: LaunchScript(name, one.get("loop") != "async", one["model"], _words(one))
        for kind in ("scripts", "tests")
        for name, one in own_facts()[kind].items()
    }


def _words(one: Mapping[str, Any]) -> tuple[str, ...]:
    """The model's block and the flags, with all blocks filled in."""
    blocks = own_facts()["blocks"] | {"MODEL_ARGS_ROTARY_BASE": one.get("base", 1_000_000)}
    text = f"{own_facts()['model_args'][one['args']]} {one['flags']}"
    return tuple(shlex.split(Template(text).safe_substitute(blocks)))
