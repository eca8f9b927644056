"""reasoning-gym: the score of the task's own verifier (0.0 to 1.0), for the entry that the sample was made from.

The dataset row carries the task and its entry: `metadata["reasoning_gym"] = {"dataset": ..., "entry": ...}` (and
`settings` of the task, if they are not its defaults), as rows of `--prompt-data rg:TASK` do; or
`metadata["source_dataset"]` with the entry (question, answer, metadata) under `metadata["entry"]`, beside it, or with
only the label. The verifiers want the bare answer, so it is taken out of the response first: `bare_answer`.
Source: `score_answer` of the tasks of reasoning_gym.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from slime.core.errors import DataError
from slime.core.sample import Sample
from slime.rewards.graders import GRADERS, Grader
from slime.rewards.graders.answers import last_answer_element, last_boxed

NUMBER = re.compile(r"[-+]?\d+(?:[.,/]\d+)*")
TAIL_CHARS = 2_000
"""Without a marked answer only the end of the response is searched."""


BOARDS = ("arc_agi", "rearc")
"""Tasks whose verifier compares boards that are tuples; JSON made them lists."""


@functools.lru_cache(maxsize=256)
def score_function(source_dataset: str, settings: str = "{}") -> Callable[[str, dict[str, Any]], float]:
    """`settings`: of the task, as JSON."""
    import reasoning_gym

    function: Callable[[str, dict[str, Any]], float] = reasoning_gym.create_dataset(
        source_dataset, seed=0, **json.loads(settings)
    ).score_answer
    return function


def _settings_of(sample: Sample) -> str:
    task = sample.metadata.get("reasoning_gym")
    return json.dumps(task.get("settings") or {} if isinstance(task, dict) else {}, sort_keys=True)


def _with_boards(entry: dict[str, Any]) -> dict[str, Any]:
    metadata = dict(entry["metadata"])
    metadata["output"] = tuple(tuple(row) for row in metadata["output"])
    return {**entry, "metadata": metadata}


def task_entry(sample: Sample) -> tuple[str, dict[str, Any]]:
    """The task's name and entry. Raises `DataError` if the metadata do not tell them."""
    metadata = sample.metadata
    task = metadata.get("reasoning_gym")
    if isinstance(task, dict) and task.get("dataset") and isinstance(task.get("entry"), dict):
        return str(task["dataset"]), task["entry"]
    entry = metadata.get("entry", metadata if "answer" in metadata else None)
    if entry is None:
        entry = {"question": sample.prompt, "answer": sample.label, "metadata": metadata}
    source = metadata.get("source_dataset") or (entry.get("metadata") or {}).get("source_dataset")
    if not source or entry.get("answer") is None:
        raise DataError(
            f"got metadata with keys {sorted(metadata)}; the reasoning_gym grader needs source_dataset and the entry's "
            "answer there: write them into the metadata column of the dataset"
        )
    return str(source), entry


def bare_answer(response: str, reference: str) -> str:
    """What the response commits to: the `<answer>` element, else the last box, else the last number if the reference
    is a number, else the last line that is not empty.
    """
    for marked in (last_answer_element(response), last_boxed(response)):
        if marked is not None:
            return marked
    tail = response[-TAIL_CHARS:].strip()
    if NUMBER.fullmatch(reference.strip()):
        numbers: list[str] = NUMBER.findall(tail)
        return numbers[-1] if numbers else ""
    return tail.splitlines()[-1].strip() if tail else ""


@GRADERS.register("reasoning_gym")
class ReasoningGymTask(Grader):
    """The score of the task's own verifier."""

    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Loads the task. Raises `DataError` on a row that does not say one."""
        score_function(task_entry(sample)[0], _settings_of(sample))

    def grade(self, sample: Sample, limit_s: float) -> float:
        """Returns the verifier's score."""
        source, entry = task_entry(sample)
        score = score_function(source, _settings_of(sample))
        seen = _with_boards(entry) if source in BOARDS else entry
        return float(score(bare_answer(sample.response, str(entry["answer"])), seen))

    def warm_up(self) -> None:
        """Imports reasoning-gym, which takes seconds."""
        score_function("basic_arithmetic")
