"""Child process that generates the rows of a reasoning-gym task: reads a JSON request from stdin, writes JSON lines.

The request has the keys `task`, `size`, `seed`, `split`, `system` and `settings`. The response is one `{"row": ...}`
per row, or `{"error": message}`. The parent (`slime.data.schemes.reasoning_gym`) fixes `PYTHONHASHSEED`, because some
tasks order words by hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.core.text import nearest

HELD_OUT_OF = 4
"""One in this many questions is held out."""
MOST_ROUNDS = 7
"""Maximum number of attempts to find enough entries. Each draws twice as many as the one before."""


def is_held_out(question: str) -> bool:
    """Returns whether a question is held out. Depends only on its text."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % HELD_OUT_OF == 0


def rows(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Generates the requested rows. Raises `ConfigError` for an unknown task or setting, or if generation fails."""
    _import_when_used("cellpylib")  # only one task needs it, but it imports matplotlib and doubles the start-up time
    from reasoning_gym.factory import DATASETS, create_dataset

    name, size, split = request["task"], int(request["size"]), request["split"]
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)
        raise ConfigError(f"reasoning-gym has no task {name!r}; use one of {', '.join(near)}")
    settings = _settings(DATASETS[name][1], request["settings"])
    system = _system(request["system"])
    share = {"train": HELD_OUT_OF / (HELD_OUT_OF - 1), "eval": HELD_OUT_OF, "all": 1}[split]
    num_drawn = int(size * share * 1.25) + 16 if split != "all" else size
    found: list[dict[str, Any]] = []
    for _ in range(MOST_ROUNDS):
        found = []
        try:
            dataset = create_dataset(name, size=num_drawn, seed=request["seed"], **settings)
            for index in range(num_drawn):
                entry = dataset[index]
                if split == "all" or is_held_out(entry["question"]) == (split == "eval"):
                    found.append(entry)
                if len(found) == size:
                    return (_row(name, settings, one, system) for one in found)
        except Exception as error:  # tasks check settings with assertions, and their generators can raise anything
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the task rejects these settings ({said}); correct them") from error
        num_drawn *= 2
    raise ConfigError(
        f"only {len(found)} of {num_drawn // 2} generated entries are in split {split}; lower size, change the task's "
        "settings, or set split=all if no other data of this task is held out"
    )


def _import_when_used(name: str) -> None:
    """Defers the import of a module until its first use."""
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _settings(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts lists to tuples where the task's default is a tuple. Raises `ConfigError` for an unknown setting."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("size", "seed")}
    out = {}
    for name, value in given.items():
        if name not in fields:
            near = nearest(name, fields)
            hint = f"did you mean {near}? " if near else ""
            raise ConfigError(f"the task has no setting {name!r}; {hint}use one of {', '.join(fields)}")
        out[name] = tuple(value) if isinstance(value, list) and isinstance(fields[name].default, tuple) else value
    return out


def _system(name: str | None) -> str | None:
    """Returns the text of the named system prompt. Raises `ConfigError` for an unknown name."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    if name is not None and name not in SYSTEM_PROMPTS:
        raise ConfigError(f"there is no system prompt {name!r}; use one of {', '.join(SYSTEM_PROMPTS)}")
    return None if name is None else str(SYSTEM_PROMPTS[name])


def _row(name: str, settings: Mapping[str, Any], entry: Mapping[str, Any], system: str | None) -> dict[str, Any]:
    question = entry["question"]
    asked = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    task = {"dataset": name, "settings": dict(settings), "entry": dict(entry)}
    return {
        "input": question if system is None else asked,
        "label": entry["answer"],
        "metadata": {"reasoning_gym": task},
    }


def main() -> None:
    """Serves one request."""
    out, request = sys.stdout, json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):  # some tasks print to stdout
        try:
            lines = [json.dumps({"row": row}) for row in rows(request)]
        except ConfigError as error:
            lines = [json.dumps({"error": str(error)})]
    out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
