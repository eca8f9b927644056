"""Public launch scripts as command lines on files of a test: MODEL is the model's folder, other names are files.

`MODEL_torch_dist`, which scripts give as --ref-load, is the folder that the public slime converts a model to. Nothing
is left out or changed: --wandb-key has no value, because its variable is empty, and folders of --load do not exist.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_suffix(".yaml")
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
        (folder / "MODEL").mkdir()
        (folder / "MODEL" / "config.json").write_text(json.dumps(facts()["models"][self.model]))
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
