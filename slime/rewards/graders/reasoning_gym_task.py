"""reasoning-gym: scores answers with the task's own verifier (0.0 to 1.0).

Rows of `--prompt-data rg:TASK` contain the task and its entry as `metadata["reasoning_gym"] = {"dataset": ..., "entry":
...}`, plus `settings` if they are not the defaults. Other rows name the task in `metadata["source_dataset"]`. Their
entry (question, answer, metadata) is in `metadata["entry"]` or at the top level of the metadata, or only the answer is
given, as the label. Verifiers expect the bare answer, which `bare_answer` extracts from the response. Source:
`score_answer` of the tasks in reasoning_gym.
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
"""Without a marked answer, only the end of the response is searched."""
BOARDS = ("arc_agi", "rearc")
"""Tasks with verifiers that compare boards as tuples, which JSON has converted to lists."""


@functools.lru_cache(maxsize=256)
def score_function(source_dataset: str, settings: str = "{}") -> Callable[[str, dict[str, Any]], float]:
    """Returns the verifier of a task. `settings` are the task's settings as JSON."""
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
    """Returns (task name, entry). Raises `DataError` if the metadata lacks either."""
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
            "the reasoning_gym grader needs source_dataset and the entry's answer, but the metadata has only the "
            f"keys {sorted(metadata)}; add both to the metadata column of the dataset"
        )
    return str(source), entry


def bare_answer(response: str, reference: str) -> str:
    """Returns the last `<answer>` element, the last box, the last number (if the reference is one) or the last line."""
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
    """The score from the task's own verifier."""

    held = True
    wrong = 0.0

    def prepare(self, sample: Sample) -> None:
        """Loads the task. Raises `DataError` if the row names none."""
        score_function(task_entry(sample)[0], _settings_of(sample))

    def grade(self, sample: Sample, limit_s: float) -> float:
        source, entry = task_entry(sample)
        score = score_function(source, _settings_of(sample))
        seen = _with_boards(entry) if source in BOARDS else entry
        return float(score(bare_answer(sample.response, str(entry["answer"])), seen))

    def warm_up(self) -> None:
        """Imports reasoning-gym, which takes seconds."""
        score_function("basic_arithmetic")
