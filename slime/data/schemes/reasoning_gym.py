"""`rg:TASK?size=500&seed=1`: the reasoning-gym task with that name.

    size    number of rows (500)
    seed    random seed of the rows (0)
    split   train, eval or all. Default: train for training data, eval for held-out data
    system  name of a reasoning-gym system prompt to put before each question: default, simple, direct, ... (makes the
            prompts messages, which need --apply-chat-template)

Every other parameter is a setting of the task (`&min_word_len=3`), as JSON or plain text.

Rows are generated in a child process: importing the library takes a second, some tasks print, and some depend on
Python's hash seed, which is fixed for the child. The split of a question is determined by a hash of its text, so
training and held-out data never share a question, whatever the size, seed and settings. A quarter of all questions is
held out. The grader is `reasoning_gym`, the task's own verifier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from slime.core.errors import ConfigError
from slime.data.schemes import SCHEMES, DataScheme

SPLITS = ("train", "eval", "all")
CHILD = "slime.data.reasoning_gym_rows"
LIMIT_S = 600.0
"""Time limit for generating rows. Most tasks generate thousands per second, but some run a search for each row."""


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    size: int = 500
    seed: int = 0
    split: str | None = None
    """One of `SPLITS`; None selects train or eval, depending on how the data is used."""
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def parse(rest: str) -> Task:
    """Parses `spell_backward?size=500&min_word_len=3`. Raises `ConfigError`."""
    name, _, query = rest.partition("?")
    given: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, equals, text = pair.partition("=")
        if not equals or not key or key in given:
            raise ConfigError(f"rg:{rest}: expected name=value, once per name, as in rg:{name}?size=500; got {pair!r}")
        given[key] = _value(unquote(text))
    own = {key: given.pop(key) for key in ("size", "seed", "split", "system") if key in given}
    task = Task(name, **own, settings=given)
    for key, least in (("size", 1), ("seed", 0)):
        number = getattr(task, key)
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"rg:{rest}: {key} must be an integer >= {least}, got {number}")
    if task.split is not None and task.split not in SPLITS:
        raise ConfigError(f"rg:{rest}: split must be one of {', '.join(SPLITS)}, got {task.split}")
    return task


def _value(text: str) -> Any:
    """Decodes JSON; returns any other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@SCHEMES.register("rg")
class ReasoningGym(DataScheme):
    """Rows of one task: the question, the answer as label, and the verifier's entry as metadata."""

    grader = "reasoning_gym"

    def count(self, rest: str) -> int:
        return parse(rest).size

    def makes_messages(self, rest: str) -> bool:
        return parse(rest).system is not None

    def rows(self, rest: str, *, held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Raises `ConfigError` for an unknown task or setting, or if there are too few questions in the split."""
        return self._made(rest, held_out=held_out, all_rows=True)

    def check(self, rest: str, *, held_out: bool) -> None:
        """Generates one row to validate the name."""
        list(self._made(rest, held_out=held_out, all_rows=False))

    def _made(self, rest: str, *, held_out: bool, all_rows: bool) -> Iterator[Mapping[str, Any]]:
        task = parse(rest)
        request = {
            "task": task.name,
            "size": task.size if all_rows else 1,
            "seed": task.seed,
            "split": task.split or ("eval" if held_out else "train"),
            "system": task.system,
            "settings": dict(task.settings),
        }
        try:
            child = subprocess.run(
                [sys.executable, "-m", CHILD],
                input=json.dumps(request).encode(),
                capture_output=True,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"rg:{rest}: generating rows took longer than {LIMIT_S:g} s; lower size") from error
        for line in child.stdout.splitlines():
            answer = json.loads(line)
            if "error" in answer:
                raise ConfigError(f"rg:{rest}: {answer['error']}")
            yield answer["row"]
        if child.returncode:
            said = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {child.returncode}"]
            raise ConfigError(f"rg:{rest}: generating rows failed ({said[0]}); try other settings")
